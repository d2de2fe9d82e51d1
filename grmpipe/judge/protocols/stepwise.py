"""The session of rollouts step by step: a score for each step, paid on the tokens of that step."""

from __future__ import annotations

from grmpipe.judge.protocols.pointwise import Matter, PointwiseHearing
from grmpipe.judge.protocols.steps import steps_of
from grmpipe.types import Failed, RewardSpan, Rollout


class StepwiseSession(PointwiseHearing):
    """As pointwise, with a score for each step."""

    def matter_of(self, rollout: Rollout) -> Matter | Failed:
        court = self._court
        assert court.decode is not None
        steps = steps_of(rollout, court.config.step_end, court.config.max_steps, court.decode)
        share = 1 / len(steps)
        return Matter(
            texts=tuple(step.text for step in steps),
            weights=(share,) * len(steps),
            places=tuple(
                RewardSpan(turn=step.turn, start=step.start, end=step.end, value=0.0, share=share) for step in steps
            ),
        )
