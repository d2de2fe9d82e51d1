"""The judge session by the criteria of a rubric: a score per criterion, weighted as the rubric says."""

import math

from grmpipe.judge.protocols.pointwise import PointwiseSession, ScoredParts
from grmpipe.judge.verdict import make_failure, outcome_place
from grmpipe.types import Failed, Rollout


class RubricSession(PointwiseSession):
    """Like pointwise, with a score per criterion."""

    def scored_parts_of(self, rollout: Rollout) -> ScoredParts | Failed:
        rubric = self._prompt.rubric
        if not rubric:
            return make_failure("refused", f"prompt {self._prompt.prompt_id} has no rubric")
        total = math.fsum(criterion.weight for criterion in rubric)
        weights = tuple(criterion.weight / total for criterion in rubric)
        shown = self._context.show_rollout(self._prompt, rollout)
        return ScoredParts(shown=(shown,), weights=weights, places=(outcome_place(rollout),))
