"""The judge session of rollouts step by step: a score per step, rewarded on the tokens of that step."""

from __future__ import annotations

from grmpipe.judge.protocols.pointwise import PointwiseSession, ScoredParts
from grmpipe.judge.protocols.steps import steps_of
from grmpipe.types import Failed, RewardSpan, Rollout


class StepwiseSession(PointwiseSession):
    """Like pointwise, with a score per step."""

    def scored_parts_of(self, rollout: Rollout) -> ScoredParts | Failed:
        context = self._context
        assert context.decode is not None
        config = context.config
        steps = steps_of(rollout, config.step_end, config.max_steps, context.decode, thoughts=config.show_thoughts)
        share = 1 / len(steps)
        return ScoredParts(
            texts=tuple(step.text for step in steps),
            weights=(share,) * len(steps),
            places=tuple(
                RewardSpan(turn=step.turn, start=step.start, end=step.end, value=0.0, share=share) for step in steps
            ),
        )
