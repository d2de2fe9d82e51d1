"""Settings of prompts, rollouts and their groups. Frozen, checked; opens no file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DataConfig:
    """The source of prompts, and their order."""

    # Prompts: a .jsonl or .parquet file, or tiny://train, generated problems; with judge=label labelled judgements, or
    # tiny://judgements.
    path: str = "tiny://train"
    # Held-out prompts, given as path is; auto: the held-out problems of a tiny:// path, none for a file.
    eval_path: str | None = "auto"
    num_prompts: int = 4096  # [prompts] Prompts made for a tiny:// path; a file is read whole.
    num_eval_prompts: int = 256  # [prompts] Held-out prompts: the number made for tiny://, or the first of a file.
    shuffle: bool = True  # Shuffle the prompts anew in each epoch; false: the order of the file.
    max_epochs: int | None = None  # [epochs] Most passes over the prompts; null: no limit.
    # The rollouts.jsonl of a run, whose judged batches are trained again; nothing is sampled or judged then. Null: off.
    retrain_from: str | None = None

    def __post_init__(self) -> None:
        if self.retrain_from == "":
            raise ValueError("retrain_from: is empty; give the rollouts.jsonl of a run, or type data.retrain_from=null")
        if self.eval_path == "":
            raise ValueError("eval_path: is empty; give a file, or type data.eval_path=null for no evaluation")
        for key, count in (("num_prompts", self.num_prompts), ("num_eval_prompts", self.num_eval_prompts)):
            if count < 1:
                raise ValueError(f"{key}: must be at least 1, got {count}")
        if self.max_epochs is not None and self.max_epochs < 1:
            raise ValueError(f"max_epochs: must be at least 1, or null for no limit, got {self.max_epochs}")


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling of the policy in training, and limits on the time of a group."""

    max_new_tokens: int = 64  # Most tokens of one answer.
    # Sampling temperature. Sampling has no top-p and no top-k: the learner scores the whole distribution.
    temperature: float = 1.0
    # Texts that end a turn, such as "</search>": their tokens are trained, the text is shown without them.
    stop: list[str] = field(default_factory=list)
    max_turns: int = 1  # [turns] Most turns of a rollout.
    # Limit from a group's first token to its last verdict; weight pushes and pauses don't count.
    group_deadline_s: float = 900.0
    min_tokens_per_s: float = 10.0  # Slowest acceptable speed of a rollout; group_deadline_s is checked against it.
    max_concurrency: int = 1024  # [rollouts] Most rollouts in flight.
    # [share] Share of groups that the policy's engines fail, above which no group is opened for pause_s; if it is
    # exceeded again, the run stops.
    max_failure_rate: float = 0.5
    failure_window: int = 32  # [groups] Latest groups that max_failure_rate is measured over.
    pause_s: float = 30.0  # Length of a pause, in which no group is opened.

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.max_turns < 1 or self.max_concurrency < 1:
            raise ValueError("max_new_tokens, max_turns, max_concurrency: must be at least 1")
        if "" in self.stop:
            raise ValueError("stop: a text is empty, and would end every turn at once")
        if not 0 < self.max_failure_rate <= 1:
            raise ValueError(
                f"max_failure_rate: must be above 0 and at most 1 (a share of groups), got {self.max_failure_rate}"
            )
        if self.failure_window < 1 or not 0 <= self.pause_s < math.inf:
            raise ValueError("failure_window, pause_s: must be at least 1 (groups), and 0 or more (seconds)")
        if not self.temperature > 0:
            raise ValueError(
                f"temperature: must be above 0 to train (siblings would be equal at 0), got {self.temperature}"
            )
        if not self.min_tokens_per_s > 0:
            raise ValueError(f"min_tokens_per_s: must be above 0, got {self.min_tokens_per_s}")
        needed_s = self.max_turns * self.max_new_tokens / self.min_tokens_per_s
        if self.group_deadline_s < needed_s:
            raise ValueError(
                f"group_deadline_s: {self.group_deadline_s:g} s is less than max_turns x max_new_tokens / "
                f"min_tokens_per_s = {needed_s:g} s; type rollout.group_deadline_s={needed_s:g} or more, "
                "or correct rollout.min_tokens_per_s"
            )
