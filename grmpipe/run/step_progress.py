"""The line on a training step in progress, from the pipeline's counts."""

import time

from grmpipe.observe.progress import counts_text, join_shown, left_at_pace, left_text, speed_text
from grmpipe.pipeline.pipeline import Pipeline

LEARNER = {
    "work": "the learner trains",
    "weights": "weights are pushed",
    "policy": "the learner waits for rollouts",
    "judge": "the learner waits for verdicts",
}


class StepProgress:
    """What a step has, its speed, and the time left by the mean of the steps before it."""

    def __init__(self, pipeline: Pipeline, num_steps: int) -> None:
        self._pipeline = pipeline
        self._num_steps = num_steps
        self._num_timed, self._steps_s = 0, 0.0
        self._begin()

    def next_step(self, last_s: float) -> None:
        """A step begins, now. last_s: how long the one before took."""
        self._num_timed += 1
        self._steps_s += last_s
        self._begin()

    def describe(self, _: float) -> str:
        """The line now."""
        took_s, batch = time.monotonic() - self._began_s, self._pipeline.batch_progress
        policy, judge = self._tokens()
        step_s = self._steps_s / self._num_timed if self._num_timed else None
        if step_s is not None and step_s > took_s:
            left_s: float | None = step_s - took_s
        else:
            left_s = left_at_pace(batch.verdicts, batch.siblings, took_s)
        later = self._num_steps - self._pipeline.version - 1
        return join_shown(
            f"step {self._pipeline.version + 1:>{len(str(self._num_steps))}}/{self._num_steps}",
            counts_text("rollouts", batch.rollouts, batch.siblings),
            counts_text("verdicts", batch.verdicts, batch.siblings),
            speed_text("policy", policy - self._tokens_before[0], took_s),
            speed_text("judge", judge - self._tokens_before[1], took_s),
            left_text(left_s),
            left_text(None if step_s is None or later < 1 else (left_s or 0.0) + later * step_s, "run "),
            LEARNER.get(batch.learner or "", ""),
        )

    def _begin(self) -> None:
        self._began_s = time.monotonic()
        self._tokens_before = self._tokens()  # what ends during an evaluation between two steps is none of this step's

    def _tokens(self) -> tuple[int, int]:
        """Tokens of the policy and of judges since the last step was counted, without those from before a resume."""
        counts = self._pipeline.counters.step
        return (
            counts.policy_tokens - counts.kept_policy_tokens,
            counts.judging.judge_tokens - counts.judging.kept_tokens,
        )
