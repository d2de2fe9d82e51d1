"""What a user can set about prompts. Frozen, checked; opens no file."""

from __future__ import annotations

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
            raise ValueError("eval_path: is empty; give a file, or type data.eval_path=null to evaluate on nothing")
        for key, count in (("num_prompts", self.num_prompts), ("num_eval_prompts", self.num_eval_prompts)):
            if count < 1:
                raise ValueError(f"{key}: must be at least 1, got {count}")
        if self.max_epochs is not None and self.max_epochs < 1:
            raise ValueError(f"max_epochs: must be at least 1, or null for no limit, got {self.max_epochs}")
