"""Settings of single tasks: evaluations, judging again, tuning of judges, a meta-RM, plans, simulations."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grmpipe.models.bounds import Bounded, above, at_least, between_0_and_1, from_0_to_1, not_empty, one_of
from grmpipe.models.settings import DTYPES
from grmpipe.scheduler.devices import DeviceSpec

WHAT = ("judge", "policy", "both")
EVALUATIONS = ("evaluate", "calibrate", "probe_judge")  # tasks that judge, or answer, what `evaluate` names
HELD_OUT_JUDGEMENTS = "tiny://judgements_held_out"
A_PATH_OR_NONE = "give a path, or null for none"
OF_JUDGE = ("path", "num_items", "ks", "against")  # keys that only the evaluation of a judge reads
OF_POLICY = ("prompts", "num_samples", "pass_k", "temperature", "greedy")  # and only that of a policy
ITEMS_AT_ONCE = 64  # labelled items, or prompts, that an evaluation has in flight
ON_FAILURE = ("error", "mean_of_group")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
NUM_SAMPLES = 4  # per prompt in task=evaluate, if neither num_samples nor pass_k is set
TAKEN = ("initial", "final")  # other entries of `eval` in summary.json


@dataclass(frozen=True)
class EvaluateConfig(Bounded):
    """Settings of `task=evaluate`, which measures a judge against labels, a policy on prompts, or both; those of the
    policy's samples also hold for the held-out evaluations of a training run.
    """

    # What task=evaluate measures: the judge against labels (judge), the policy's answers to prompts (policy), or both.
    what: str = one_of(WHAT, "judge")
    # Labelled judgements: a .jsonl, .json or .parquet file (docs/labels.md lists the schemas), or
    # tiny://judgements_held_out.
    path: str = not_empty(HELD_OUT_JUDGEMENTS, f"give a file, or type evaluate.path={HELD_OUT_JUDGEMENTS}")
    num_items: int = at_least(1, 512)  # [items] Items made for tiny://, or the first ones of a file.
    # [judgements] Numbers of judgements per vote, ascending; only the largest is sampled, the others are subsets.
    ks: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])
    # The directory of an earlier evaluation of a judge, with which the judge is compared item by item; null: with none.
    against: str | None = not_empty(None, "give the directory of an evaluation, or type evaluate.against=null")
    # Prompts that the policy answers, by a name for their results, as in {gsm8k: gsm8k.jsonl}; files as data.path takes
    # them. Null: the held-out prompts of data.eval_path, as held_out.
    prompts: Any = None
    # [answers] Answers sampled for each prompt; null: the largest of pass_k, without it 4, or 1 in a training run.
    num_samples: int | None = at_least(1, None)
    # [answers] Each k of pass@k, ascending, at most num_samples; null: 1 and num_samples.
    pass_k: list[int] | None = None
    every: int = at_least(1, 10)  # [steps] Interval between the held-out evaluations of a training run.
    temperature: float = at_least(0, 1.0)  # Temperature of the sampled answers.
    greedy: bool = True  # Also answer each prompt once at temperature 0.

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_ascending(self.ks):
            raise ValueError(f"ks: must be numbers from 1 on, each larger than the one before, got {self.ks}")
        self._check_prompts()
        self._check_samples()

    def _check_prompts(self) -> None:
        if self.prompts is None:
            return
        if not isinstance(self.prompts, Mapping) or not self.prompts:
            raise ValueError(
                f"prompts: expected files by name, got {self.prompts!r}; type 'evaluate.prompts={{mine: file.jsonl}}', "
                "in quotes, or null for the held-out prompts"
            )
        for name, path in self.prompts.items():
            if not re.fullmatch(r"[A-Za-z][\w-]*", str(name)) or name in TAKEN:
                raise ValueError(
                    f"prompts.{name}: a name has letters, digits, '_' and '-', begins with a letter and isn't "
                    f"{' or '.join(TAKEN)}"
                )
            if not isinstance(path, str) or not path:
                raise ValueError(
                    f"prompts.{name}: expected a .jsonl or .parquet file, or tiny://held_out, got {path!r}"
                )

    def _check_samples(self) -> None:
        if self.pass_k is not None:
            if not is_ascending(self.pass_k):
                raise ValueError(
                    f"pass_k: must be numbers from 1 on, each larger than the one before, got {self.pass_k}"
                )
            if self.num_samples is not None and self.pass_k[-1] > self.num_samples:
                raise ValueError(
                    f"pass_k: pass@{self.pass_k[-1]} needs as many answers to each prompt, and num_samples is "
                    f"{self.num_samples}; type evaluate.num_samples={self.pass_k[-1]}, or smaller evaluate.pass_k"
                )
        if self.temperature == 0 and (self.num_samples or NUM_SAMPLES) > 1:
            raise ValueError(
                "temperature: at 0 all samples of a prompt are the same; type evaluate.num_samples=1 as well, or leave "
                "the temperature and type evaluate.greedy=true for one greedy answer beside the samples"
            )

    def samples(self, default: int) -> int:
        """Answers sampled for each prompt. default: if neither num_samples nor pass_k is set."""
        return self.num_samples or (self.pass_k[-1] if self.pass_k else default)

    def pass_ks(self, num_samples: int) -> tuple[int, ...]:
        """Each k of pass@k."""
        return tuple(self.pass_k or sorted({1, num_samples}))


def is_ascending(numbers: list[int]) -> bool:
    return bool(numbers) and min(numbers) >= 1 and sorted(set(numbers)) == list(numbers)


@dataclass(frozen=True)
class CalibrateConfig(Bounded):
    """Settings of `task=calibrate`, which fits a judge's rewards to the labels of `evaluate.path`."""

    length: bool = False  # Also fit a term of the response's length, which takes the judge's bias by length out.
    # Largest share of wrong responses that may pass, for which a threshold is sought; for labels of right and wrong.
    false_positive_rate: float = between_0_and_1(0.05)


TRICKS = (
    "longer", "praise", "confident", "template", "no_content", "refusal", "repeated_question", "foreign_praise",
    "instruction",
)  # fmt: skip
POLICY_TRICKS = ("best_of_n", "told")  # the policy tries, where it answers the prompts


@dataclass(frozen=True)
class ProbeConfig(Bounded):
    """Settings of `task=probe_judge`, which tries to get high scores for wrong responses. `evaluate` says for which:
    labelled ones (`evaluate.what=judge`), the policy's own (`policy`), or both.
    """

    # Tricks that are tried, as in [longer, praise]; null: all, with those of the policy (best_of_n, told) where it
    # answers.
    tricks: list[str] | None = None
    # Judge in `judges` that says which of the policy's answers are right; null: the first judge's rule, by references.
    truth: str | None = not_empty(None, "give the name of a judge, or type probe.truth=null")
    # A trick pays if the share of wrong responses that pass, or of the same response with it the mean reward from 0 to
    # 1, surely rises by more than this (low end of the 95 % interval).
    margin: float = from_0_to_1(0.05)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = (*TRICKS, *POLICY_TRICKS)
        if self.tricks is not None and (not self.tricks or not set(self.tricks) <= set(known)):
            unknown = next((trick for trick in self.tricks if trick not in known), None)
            wrong = "is empty" if unknown is None else f"unknown trick {unknown!r}"
            raise ValueError(f"tricks: {wrong}; known: {', '.join(known)}; or type probe.tricks=null for all")


@dataclass(frozen=True)
class RftConfig(Bounded):
    """Rejection-sampling fine-tuning: a GRM imitates its own right critiques (SPCT, arXiv 2504.02495, section 3.2)."""

    # [critiques] Critiques sampled per judging task; a task with only right ones is dropped as too easy.
    num_samples: int = at_least(1, 3)
    # If no critique is right, sample one with the label shown; if it is right, it is trained without the label.
    hint: bool = True
    num_epochs: int = at_least(1, 2)  # [epochs] Passes over the critiques that are kept.
    critiques_per_batch: int = at_least(1, 32)  # [critiques] Critiques of one optimizer step.


@dataclass(frozen=True)
class MetaRmConfig(Bounded):
    """The meta-RM: a model with a scalar head and the GRM's tokenizer that judges judgements."""

    # Meta-RM for the votes weighted and best: `meta_rm` in the directory of a run of task=train_meta_rm, a Hugging Face
    # directory or hub name, or tiny://meta_rm.
    path: str | None = not_empty(None, A_PATH_OR_NONE)
    dtype: str = one_of(DTYPES, "float32", "dtype")  # Type of the trunk; the head is always float32.
    max_batch_tokens: int = at_least(1, 16384)  # Most tokens of a forward pass; a longer judgement has its own pass.
    # Language model or meta-RM that task=train_meta_rm starts from; null: the GRM.
    start_path: str | None = not_empty(None, A_PATH_OR_NONE)
    # Labelled judgements that task=train_meta_rm reads instead of sampling: judgements.jsonl of an earlier such run.
    judgements: str | None = not_empty(None, A_PATH_OR_NONE)


SELECTIONS = ("random", "disagreement", "split", "threshold")


@dataclass(frozen=True)
class AnnotateConfig(Bounded):
    """Annotations of answers in the pages of `task=view`."""

    # Folder for annotations of runs that may not be written to, as <dir>/<run>/annotations.jsonl; null: each run's own.
    dir: str | None = not_empty(None, A_PATH_OR_NONE)
    # What the queue offers first: answers at random, or with a larger share of those on which judges disagree
    # (disagreement), votes are split (split), or the reward is near one half (threshold).
    select: str = one_of(SELECTIONS, "random")
    num_items: int = at_least(1, 100)  # [answers] Expected number of answers in the queue.


BY_PERSON, BY_POLICY = "person", "policy"


@dataclass(frozen=True)
class PlayConfig(Bounded):
    """Settings of `task=play`, which plays one episode on the console."""

    # Who acts: person (you type the policy's turns), policy (the model), or a .jsonl file with a turn per line, a JSON
    # text.
    by: str = not_empty(BY_PERSON, "type person, policy, or a .jsonl file with a turn of the policy per line")
    # Number of the prompt, from 0, among those of data.eval_path; of data.path if it has none.
    prompt: int = at_least(0, 0)


@dataclass(frozen=True)
class PlanConfig(Bounded):
    """Settings of `task=plan`, which plans a run."""

    rollout_tokens: int = at_least(0, 0)  # Mean length of a rollout; 0: half of rollout.max_new_tokens.
    judgement_tokens: int = at_least(0, 0)  # Mean length of a judgement; 0: half of judge.max_new_tokens.
    # [seconds] Mean time of a call of a judge's tools, of which a judgement makes half of judge.tools.max_calls.
    tool_s: float = at_least(0, 1.0)
    # [cores] Cores of the machine that CPU slots are on; 0: those of this machine, or the number of slots if larger.
    cores: int = at_least(0, 0, "0 (those of this machine) or more")
    devices: dict[str, DeviceSpec] = field(default_factory=dict)


@dataclass(frozen=True)
class SimulateConfig(Bounded):
    """Settings of `task=simulate`, which simulates a run."""

    steps: int = at_least(1, 20)  # [steps] Simulated steps.
    # Directory of an earlier run, whose rollouts and judgements give the lengths; null: lognormal lengths, with
    # the means of task=plan: plan.rollout_tokens, plan.judgement_tokens.
    lengths: str | None = not_empty(None, "give a run's directory, or null")


@dataclass(frozen=True)
class ScoreConfig:
    """Settings of `task=score`, which judges responses that were written elsewhere."""

    # Responses to judge: a .jsonl, .json (one array) or .parquet file whose rows have prompt or messages, and response
    # or responses (docs/labels.md).
    path: str | None = None


@dataclass(frozen=True)
class ServeConfig(Bounded):
    """Settings of `task=serve`, which serves the judge to other programs."""

    host: str = "127.0.0.1"  # Address to listen at; another than this machine's own needs key_env.
    port: int = at_least(0, 8710)  # Port; 0: any that is free.
    key_env: str = ""  # Name of the environment variable that holds the key of the clients; empty: none.
    max_in_flight: int = at_least(1, 4096)  # [responses] Most responses that are judged at once; above it: status 429.
    max_body_mb: int = at_least(1, 64)  # Largest body of a request.
    # [s] How long a question goes on, and its answer is kept, after its client has gone; an equal one takes it over.
    orphan_s: float = at_least(0, 30)
    # Latest answers that are kept for equal questions, also by the next process in this run_dir; 0: none. Equal
    # questions have the same judge, text and prompt_id; without a prompt_id only greedy judgements are kept.
    cache_size: int = at_least(0, 0)
    # What a trainer gets for a response without a verdict where its wire can't say "failed": error, status 503 once the
    # judge has been asked again for as long as the trainer waits; mean_of_group, the mean of its judged siblings.
    on_failure: str = one_of(ON_FAILURE, "error")
    # [s] How long the first response of a group is kept for its siblings, where a wire sends them one by one and the
    # reward needs them.
    group_wait_s: float = above(0, 600)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.key_env and self.host not in LOOPBACK:
            raise ValueError(
                f"host: {self.host} can be reached from other machines, and anybody could use the judge; type "
                "serve.key_env=<variable that holds a key>, or serve.host=127.0.0.1"
            )

    @property
    def key(self) -> str:
        """What clients send; empty: nothing. Raises ValueError if the variable is empty or isn't there."""
        if self.key_env and not os.environ.get(self.key_env):
            raise ValueError(f"key_env: the environment variable {self.key_env} is empty or isn't set")
        return os.environ[self.key_env] if self.key_env else ""


@dataclass(frozen=True)
class RejudgeConfig:
    """Judging the stored rollouts of the run in run_dir again, or those that another trainer has written."""

    # Rollouts of another trainer, a file or a folder (docs/rejudging.md), which become the journals of run_dir; null:
    # run_dir is that of a run.
    path: str | None = None
    # Column of the old reward in the files of rejudge.path; null: as their form has it.
    reward: str | None = None

    name: str = "again"  # Folder of the new verdicts, in <run_dir>/rejudged/. Another judge needs another name.
    sample: float = 1.0  # Share of the groups that are judged again, drawn by seed.
    # [steps] The first and the last step whose groups are judged again, as in [10, 20]; null: all groups, also those
    # that were not trained on.
    steps: list[int] | None = None

    def __post_init__(self) -> None:
        if self.path == "" or (self.reward is not None and self.path is None):
            raise ValueError(
                "path: give a file or folder of another trainer's rollouts; rejudge.reward is a column there"
            )
        if not re.fullmatch(r"[\w-][\w.-]*", self.name):
            raise ValueError(f"name: may hold letters, digits, '_', '-' and, not as the first, '.', got {self.name!r}")
        if not 0 < self.sample <= 1:
            raise ValueError(f"sample: is a share of the groups, above 0 and at most 1, got {self.sample}")
        if self.steps is not None and not (len(self.steps) == 2 and 1 <= self.steps[0] <= self.steps[1]):
            raise ValueError(f"steps: give the first and the last step, as in [10, 20], got {self.steps}")

    def wants(self, step: int | None) -> bool:
        """Whether groups of a step are judged again. step: that trained them; None: no step did."""
        return self.steps is None or (step is not None and self.steps[0] <= step <= self.steps[1])
