"""The judge session of rollouts step by step: a score per step, rewarded on the tokens of that step."""

from collections.abc import Iterator, Sequence

from grmpipe.judge.protocols.pointwise import PointwiseSession, ScoredParts
from grmpipe.judge.protocols.split_steps import ResponseStep, split_steps
from grmpipe.judge.trajectory import Passage, Trajectory, branch_at, show_opening, show_replies
from grmpipe.types import Failed, RewardSpan, Rollout


class StepwiseSession(PointwiseSession):
    """Like pointwise, with a score per step. What the environment says stands with the step that it answers."""

    def scored_parts_of(self, rollout: Rollout) -> ScoredParts | Failed:
        context = self._context
        assert context.decode is not None
        config = context.config
        steps = split_steps(
            rollout, config.split.step_end, config.split.max_steps, context.decode, thoughts=config.format.show_thoughts
        )
        share = 1 / len(steps)
        return ScoredParts(
            shown=tuple(self._shown(rollout, steps)),
            weights=(share,) * len(steps),
            places=tuple(
                RewardSpan(turn=step.turn, start=step.start, end=step.end, value=0.0, share=share) for step in steps
            ),
        )

    def _shown(self, rollout: Rollout, steps: Sequence[ResponseStep]) -> Iterator[Trajectory]:
        """Each step; the first one after the environment's opening, the last one of a turn with the replies to it."""
        for number, step in enumerate(steps):
            opening = show_opening(self._prompt, rollout) if number == 0 else ()
            begins_turn = number == 0 or steps[number - 1].turn != step.turn
            branch = branch_at(rollout, step.turn) if begins_turn else ()
            ends_turn = number + 1 == len(steps) or steps[number + 1].turn != step.turn
            after = show_replies(rollout, step.turn) if ends_turn else ()
            text = Passage(voice="policy", text=step.text, turn=step.turn)
            yield Trajectory(passages=(*opening, *branch, text, *after))
