"""Settings of prompts, rollouts and their groups. Frozen, checked; opens no file."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DataConfig:
    """Where the prompts come from, and in what order they are drawn.

    path, eval_path: a .jsonl or .parquet file, or problems that the project makes: tiny://train, tiny://held_out.
    replay: the rollouts.jsonl of a run: its batches are trained instead, with the verdicts beside it. Nothing is
        sampled or judged, no engine starts, and the keys above are not looked at.
    """

    path: str = "tiny://train"
    eval_path: str | None = "auto"  # auto: tiny://held_out for tiny://train, none for a file
    num_prompts: int = 4096  # made for tiny://train; a file is read whole
    num_eval_prompts: int = 256  # made for tiny://held_out; of a file, the first ones
    shuffle: bool = True  # anew in each epoch
    max_epochs: int | None = None  # None: until train.num_steps
    replay: str | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path: missing; give a .jsonl or .parquet file, or type data.path=tiny://train")
        if self.replay == "":
            raise ValueError("replay: is empty; give the rollouts.jsonl of a run, or type data.replay=null")
        if self.eval_path == "":
            raise ValueError("eval_path: is empty; give a file, or type data.eval_path=null for no evaluation")
        for key, count in (("num_prompts", self.num_prompts), ("num_eval_prompts", self.num_eval_prompts)):
            if count < 1:
                raise ValueError(f"{key}: must be at least 1, got {count}")
        if self.max_epochs is not None and self.max_epochs < 1:
            raise ValueError(f"max_epochs: must be at least 1, or null for no limit, got {self.max_epochs}")


@dataclass(frozen=True)
class RolloutConfig:
    """How the policy is sampled while training, and how long a group may take."""

    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    max_turns: int = 1
    group_deadline_s: float = 900.0  # from a group's first token to its last verdict; syncs don't count
    min_tokens_per_s: float = 10.0  # declared: the slowest speed of one rollout that is still fine
    width: int = 1024  # rollouts in flight
    max_failure_rate: float = 0.5  # of groups in the window, by refusals, timeouts, aborts; above it: pause, then stop
    failure_window: int = 32  # groups
    pause_s: float = 30.0  # in which no group is opened

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.max_turns < 1 or self.width < 1:
            raise ValueError("max_new_tokens, max_turns, width: must be at least 1")
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
        if self.top_p != 1.0:
            raise ValueError(
                f"top_p: must be 1 to train (the learner's log-probs are over all tokens), got {self.top_p}"
            )
        if self.top_k != 0:
            raise ValueError(
                f"top_k: must be 0 to train (the learner's log-probs are over all tokens), got {self.top_k}"
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
