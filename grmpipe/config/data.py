"""Settings of prompts, rollouts and their groups. Frozen, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grmpipe.config.judge import LabelConfig
from grmpipe.config.task_settings import RftConfig
from grmpipe.models.bounds import Bounded, above, above_0_to_1, at_least, not_empty, one_of
from grmpipe.models.types import ThinkingBudget


@dataclass(frozen=True)
class DataConfig(Bounded):
    """The source of prompts, and their order."""

    # Prompts: a .jsonl, .jsonl.gz, .parquet or .csv file, or tiny://train, generated problems; with judge=label
    # labelled judgements, or tiny://judgements.
    path: str = "tiny://train"
    # Held-out prompts, given as path is; auto: the held-out problems of a tiny:// path, none for a file.
    eval_path: str | None = not_empty("auto", "give a file, or type data.eval_path=null for no evaluation")
    # Which columns of your files hold our fields, as in {prompt: instruction, chosen: good}; `a.b` is b within a. Null:
    # they have our names.
    columns: Any = None
    num_prompts: int = at_least(1, 4096)  # [prompts] Prompts made for a tiny:// path; a file is read whole.
    # [prompts] Held-out prompts: the number made for tiny://, or the first of a file.
    num_eval_prompts: int = at_least(1, 256)
    shuffle: bool = True  # Shuffle the prompts again in each epoch; false: the order of the file.
    max_epochs: int | None = at_least(1, None)  # [epochs] Most passes over the prompts; null: no limit.
    # The rollouts.jsonl of a run, whose judged batches are trained again; nothing is sampled or judged then. Null: off.
    retrain_from: str | None = not_empty(None, "give the rollouts.jsonl of a run, or type data.retrain_from=null")
    labels: LabelConfig = field(default_factory=LabelConfig)
    rft: RftConfig = field(default_factory=RftConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        named = self.columns if isinstance(self.columns, Mapping) else {}
        if (self.columns is not None and not named) or not all(one and isinstance(one, str) for one in named.values()):
            raise ValueError(
                f"columns: expected columns by field, got {self.columns!r}; type "
                "'data.columns={prompt: instruction, chosen: good, rejected: bad}', in quotes, or null"
            )

    @property
    def is_replay(self) -> bool:
        """Whether the run trains on the rollouts of another run."""
        return self.retrain_from is not None


@dataclass(frozen=True)
class RolloutConfig(Bounded):
    """Sampling of the policy in training, and limits on the time of a group."""

    max_new_tokens: int = at_least(1, 64)  # Most tokens of one answer.
    # Sampling temperature. Sampling has no top-p and no top-k: the learner scores the whole distribution.
    temperature: float = 1.0
    # Texts that end a turn, such as "</search>", and special tokens by their text, such as "<|im_end|>". Their tokens
    # are trained, the text is shown without them.
    stop: list[str] = field(default_factory=list)
    # Tokens of a turn after which a thought that goes on is ended, so that the policy must answer; the tokens that
    # end it are never trained. They count towards max_new_tokens. 0: a thought may fill max_new_tokens.
    thinking_budget_tokens: int = at_least(0, 0)
    max_turns: int = at_least(1, 1)  # [turns] Most turns of a rollout.
    # Truncated rollouts: judged and trained like any other (train); judged, but none of their tokens is trained (mask:
    # DAPO's overlong filtering, TRL's mask_truncated_completions); or failed, so that their group is dropped (fail).
    truncated: str = one_of(("train", "mask", "fail"), "train")
    # Limit from a group's first token to its last verdict; weight pushes and pauses don't count.
    group_deadline_s: float = 900.0
    # Slowest acceptable speed of a rollout; group_deadline_s is checked against it.
    min_tokens_per_s: float = above(0, 10.0)
    max_concurrency: int = at_least(1, 1024)  # [rollouts] Most rollouts in flight.
    # [share] Share of the last 32 groups that the policy's engines fail, above which no group is opened for pause_s; if
    # it is exceeded again, the run stops.
    max_failure_rate: float = above_0_to_1(0.5)
    # Length of a pause after too many failures: of engines or environments, in which no group is opened; of judges, in
    # which none is judged.
    pause_s: float = at_least(0, 30.0)

    def make_thinking_budget(self) -> ThinkingBudget | None:
        """How long the policy may think in a turn. None: as long as it likes."""
        return ThinkingBudget(num_tokens=self.thinking_budget_tokens) if self.thinking_budget_tokens else None

    def __post_init__(self) -> None:
        super().__post_init__()
        if "" in self.stop:
            raise ValueError("stop: a text is empty, and would end every turn at once")
        if self.thinking_budget_tokens and self.stop:
            raise ValueError(
                "thinking_budget_tokens: a turn is sampled by two requests, and a text of rollout.stop may cross their "
                "border; type rollout.thinking_budget_tokens=0 or rollout.stop=[]"
            )
        if not self.temperature > 0:
            raise ValueError(
                f"temperature: must be above 0 to train (siblings would be equal at 0), got {self.temperature}"
            )
        needed_s = self.max_turns * self.max_new_tokens / self.min_tokens_per_s
        if self.group_deadline_s < needed_s:
            raise ValueError(
                f"group_deadline_s: {self.group_deadline_s:g} s is less than max_turns x max_new_tokens / "
                f"min_tokens_per_s = {needed_s:g} s; type rollout.group_deadline_s={needed_s:g} or more, "
                "or correct rollout.min_tokens_per_s"
            )
