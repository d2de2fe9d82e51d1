"""Settings of judging: protocol, votes, limits, the scale of scores, labels. Frozen, checked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from grmpipe.config.env import EnvConfig
from grmpipe.config.isolation import INPROCESS, IsolationConfig
from grmpipe.config.judge_protocols import (
    DEFAULT_PROTOCOL,
    PROTOCOLS,
    SHIPPED_TEMPLATES,
    JudgeProtocol,
    protocol_named,
)
from grmpipe.config.judge_tables import ONE_SCORE, PARSERS, RULES, TWO_SCORES, VOTES, VOTES_WITH_META_RM
from grmpipe.config.keys.entry_names import JUDGE
from grmpipe.config.raw_scores import EnvRewardConfig, ScalarConfig
from grmpipe.models.bounds import Bounded, above_0_to_1, at_least, from_0_to_1, not_empty, one_of, positive
from grmpipe.models.types import ThinkingBudget


@dataclass(frozen=True, slots=True)
class JudgeKind:
    """How people read of a kind of judge.

    shown:     its name; the value of the key `named_by`, below the judge's section, completes it.
    score:     what its number is called: "reward" where that is no score on the judge's scale.
    scaled_by: a key below the judge's section that brings the reward to the judge's scale.
    writes:    whether it writes judgements, of which several may make a verdict.
    """

    shown: str = "the judge"
    score: str = "score"
    named_by: str = ""
    scaled_by: str = ""
    writes: bool = False

    def describe(self, read: Callable[[str], object]) -> JudgeKind:
        """The kind as one judge has it: `read` gives its settings by their keys, None or "null" for one without."""
        name = read(self.named_by) if self.named_by else ""
        is_scaled = bool(self.scaled_by) and read(self.scaled_by) not in (None, "null")
        return replace(self, shown=f"{self.shown} {name or ''}".rstrip(), score="score" if is_scaled else self.score)


KINDS = {
    "generative": JudgeKind(score="GRM score", writes=True),
    "scalar": JudgeKind(shown="the reward model"),
    "rule": JudgeKind(shown="the rule", named_by="rule"),
    "function": JudgeKind(
        shown="the reward function", score="reward", named_by="function", scaled_by="function_call.score_range"
    ),
    "env": JudgeKind(shown="the environment", score="reward"),
    "label": JudgeKind(shown="the labels"),
    "custom": JudgeKind(named_by="custom.target", writes=True),
}
FUNCTION_BATCHES = ("rollout", "group")
PAIRS = ("all", "ring")
PRINCIPLES = ("inline", "shared")
TRUNCATIONS = ("error", "middle")
SCORE_SOURCES = ("text", "expectation")
EARLY_STOPS = ("none", "exact", "relaxed")
# Settings of judges that write judgements; a scalar reward model writes none.
OF_JUDGEMENTS = (
    "protocol", "num_judgements", "template", "prefill", "parser", "pattern", "score_from", "format.structured", "vote",
    "votes.abstain_above_std", "principles.kind", "format.truncation",
)  # fmt: skip


@dataclass(frozen=True)
class ThinkingConfig:
    """How long a judge that thinks may think."""

    # [tokens] Tokens after which a judge that still thinks must give its verdict; they count towards max_new_tokens.
    # null: half of max_new_tokens, if the model thinks; 0: no budget, and a thought may fill max_new_tokens.
    budget_tokens: int | None = None
    # Text after a thought that was ended, with which the judge's answer begins, such as "Score:"; empty: it answers
    # freely.
    answer_start: str = ""

    def __post_init__(self) -> None:
        if self.budget_tokens is not None and self.budget_tokens < 0:
            raise ValueError(
                f"budget_tokens: must be 0 or more, got {self.budget_tokens}; for no thoughts type "
                "+grm.chat_template_kwargs.enable_thinking=false (or what the model's chat template calls it)"
            )
        if self.budget_tokens == 0 and self.answer_start:
            raise ValueError(
                "answer_start: it begins the answer after a thought that the budget ended, and there is no budget; "
                "type judge.thinking.budget_tokens=2048, or judge.thinking.answer_start=''"
            )


@dataclass(frozen=True)
class FormatConfig(Bounded):
    """What a judge is shown, and what it may write."""

    structured: bool = False  # The engine's grammar limits a judgement to what the parser can read.
    # A judgement that ends, or is truncated, without a verdict that can be read is asked for it once more: by the
    # engine's grammar, at an endpoint by a further message. For small models.
    ask_verdict: bool = False
    show_thoughts: bool = False  # Judges see the policy's thoughts too; false: only its answer.
    # A line after a response that was cut off says so, and why; false: judges aren't told.
    show_truncation: bool = False
    # What happens if the judge's prompt exceeds its context window: the verdict fails (error), or the longest responses
    # lose their middle (middle): first what tools and the environment said, then whole turns, then all texts.
    truncation: str = one_of(TRUNCATIONS, "error")


@dataclass(frozen=True)
class Scale:
    """The scores that a judge may give: from the lowest to the highest, including both ends."""

    low: int = 1  # [score] Lowest score.
    high: int = 10  # [score] Highest score.
    step: float = 1  # [score] Difference of neighbouring scores: 1, or 0.5 for half points.

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(
                f"high: must be above low = {self.low}, got {self.high}; type judge.scale.low=1 judge.scale.high=10"
            )
        if self.step not in (0.5, 1):
            raise ValueError(f"step: must be 1 or 0.5, got {self.step}; type judge.scale.step=1, or =0.5 for halves")

    @property
    def has_halves(self) -> bool:
        return self.step != 1

    def to_reward(self, score: float) -> float:
        """The reward of a score: 0 at the low end, 1 at the high end."""
        return (score - self.low) / (self.high - self.low)

    def to_score(self, reward: float) -> float:
        """The score of a reward from 0 to 1."""
        return self.low + reward * (self.high - self.low)


@dataclass(frozen=True)
class VotesConfig(Bounded):
    """Which judgements count in a vote."""

    k_meta: int = at_least(0, 0)  # [judgements] For best: those that the meta-RM keeps; 0: half of num_judgements.
    # [score] Standard deviation of the judgements above which there is no verdict; null: no limit.
    abstain_above_std: float | None = at_least(0, None)


@dataclass(frozen=True)
class SplitConfig(Bounded):
    """How a group, or a response, is split into what single judgements cover."""

    # For pairwise: which pairs of a group are judged, all or each sibling with the next.
    pairs: str = one_of(PAIRS, "all")
    # For steps: text that ends a step; empty: a step is a turn. After 31 steps the rest of a turn is the last one.
    step_end: str = "\n"


@dataclass(frozen=True)
class PrinciplesConfig(Bounded):
    """The principles that judgements follow."""

    # Where they are written: in each judgement (inline), or once per prompt for all judgements (shared).
    kind: str = one_of(PRINCIPLES, "inline")
    template: str = "principles"  # For shared: their prompt, a shipped template or the path of a Jinja file.
    max_new_tokens: int = at_least(1, 512)  # For shared: most tokens.


@dataclass(frozen=True)
class LimitsConfig(Bounded):
    """Limits of judgements: time, retries, requests in flight."""

    # Limit of one judgement, including its wait in the engine's queue.
    timeout_s: float = positive(120.0)
    # Slowest acceptable speed of a judgement; timeout_s is checked against it.
    min_tokens_per_s: float = positive(10.0)
    # [retries] How often an unparseable or truncated judgement is sampled again; at temperature 0 never.
    max_retries: int = at_least(0, 1)
    max_concurrency: int = at_least(1, 1024)  # [judgements] Most judgements in flight.


@dataclass(frozen=True)
class FunctionCallConfig(Bounded):
    """How a reward function is called, and what its number means."""

    # Its lowest and highest number, as in [0, 100], which become the rewards 0 and 1; null: its number is the reward.
    score_range: Any = None
    # If it takes lists: called with each response as it ends (rollout), or with all siblings of a group (group).
    batch: str = one_of(FUNCTION_BATCHES, "rollout")

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = self.score_range
        if ends is not None and not is_range(ends):
            raise ValueError(
                f"score_range: must be two numbers, the lower one first, got {ends!r}; type "
                "'judge.function_call.score_range=[0, 1]'"
            )


@dataclass(frozen=True)
class CustomConfig:
    """A judge of your own."""

    target: str = ""  # Dotted path of its class.
    options: dict[str, Any] = field(default_factory=dict)  # Arguments of its class.


CLOSING_S = 10.0  # for calls that were given up to end


@dataclass(frozen=True)
class ToolsConfig(Bounded):
    """Tools that a generative judge may call before its verdict, and the budget of its calls."""

    functions: str = ""  # Dotted path of a module, whose public functions are the tools; empty: none.
    # Servers of the Model Context Protocol, by name, as in env.mcp; their tools join those of functions.
    mcp: dict[str, Any] = field(default_factory=dict)
    # Where functions run: in the run itself, or in a process without network and with few files for each judgement.
    isolation: str = one_of((INPROCESS, "process"), INPROCESS, "isolation")
    # [calls] Most calls of a judgement; after them, or after half of judge.max_new_tokens, the verdict is asked for.
    max_calls: int = at_least(1, 8)
    # [seconds] Limit on all calls of a judgement together; then the verdict is asked for.
    max_s: float = positive(30.0)
    max_result_chars: int = at_least(1, 2000)  # [characters] Longest result; the middle of a longer one is left out.
    # Whether functions with a parameter of the type State get the final state of the rollout that is judged, as
    # an env of your own gave it (saved).
    state: bool = False

    @property
    def is_set(self) -> bool:
        return bool(self.functions or self.mcp)

    def make_env(self) -> EnvConfig:
        """The environment of a judgement: the policy's, with these tools."""
        return EnvConfig(
            kind="tools",
            functions=self.functions,
            mcp=self.mcp,
            isolation=IsolationConfig(kind=self.isolation),
            step_s=self.max_s + CLOSING_S,
            max_observation_chars=self.max_result_chars,
        )


CREDITS = ("whole", "evidence")


@dataclass(frozen=True)
class EvolveConfig(Bounded):
    """Criteria that a model writes in the run, for all prompts, and that enter the rubric once they were tried."""

    # Model that writes them: a role, as in judge.model, such as grm or policy, or a name in models; null: the rubric
    # stays as it is. An answer has at most judge.principles.max_new_tokens.
    writer: str | None = not_empty(None, "give the name of a model, such as grm, or null")
    template: str = "rubric_writer"  # Prompt of the writer: a name in grmpipe/judge/templates/, or a path.
    every_steps: int = at_least(1, 10)  # [steps] How often it is asked.
    # [criteria] Most that are in the rubric at once of those that it wrote; more retire the deadest.
    max_criteria: int = at_least(1, 8)
    # [share] Of the prompts with a reference, those whose answers judge.rule may label for trials. Without labels a
    # criterion must separate what the rest of the rubric ranks.
    labelled_share: float = from_0_to_1(1.0)


@dataclass(frozen=True)
class RubricConfig(Bounded):
    """How the criteria of a prompt's rubric become one score."""

    # A .json file of criteria for all prompts, after a prompt's own: a list, or {<source>: <list>, default: <list>}.
    path: str | None = not_empty(None, "give a .json file, or null")
    # [reward] Most that a response earns that doesn't meet an essential criterion (a score below the middle).
    essential_cap: float = from_0_to_1(0.0)
    # [criteria] Criteria in one call of the judge; 0: all of them. Fewer where they don't fit the judge's window.
    criteria_per_call: int = at_least(0, 0)
    # [share] Least share of the weight above 0 by which a group may be judged: criteria whose judgement failed for one
    # sibling are left out for all, but never an essential one or a fault. 1: none is, and the verdict fails.
    min_share: float = above_0_to_1(1.0)
    # [share] Of the criteria that aren't essential, those that training's groups are judged without, other ones for
    # each group: a policy can't learn which. Evaluations use all.
    dropout: float = from_0_to_1(0.0)
    # Which tokens get the points of a criterion with evidence: those of the whole response (whole), or of the turn that
    # the judge quotes, of a response of one turn the step by judge.split.step_end (evidence).
    credit: str = one_of(CREDITS, "whole")
    evolve: EvolveConfig = field(default_factory=EvolveConfig)


@dataclass(frozen=True)
class EarlyStopConfig(Bounded):
    """Early stop: when the remaining judgements of a rollout, or of a pair, are left out."""

    # Rule: never (none); once they can't change the winner of a pair (exact); once the standard error of a score is
    # small compared with the spread of its group (relaxed).
    kind: str = one_of(EARLY_STOPS, "none")
    # [judgements] For relaxed: judgements requested at once, and the fewest before a stop.
    first: int = at_least(1, 2)
    # [share] For relaxed: largest standard error of a score, as a share of the spread of the group's scores.
    max_error: float = positive(0.25)
    # For relaxed: share of rollouts that are still judged in full, to measure the error of stopping.
    audit_share: float = above_0_to_1(0.1)


@dataclass(frozen=True)
class JudgeConfig(Bounded):
    """How rollouts are judged, and when judging counts as failed."""

    # Where verdicts come from: a GRM, a scalar reward model, a rule, a reward function of your own, the environment's
    # rewards, the labels of a judge in training, or your own class.
    kind: str = one_of(KINDS, "generative")
    # Model that is asked: the role grm, a name in models, or policy, whose weights of the moment then judge.
    model: str = "grm"
    # What one judgement covers: a response, all responses of a group, a pair of them, the criteria of the prompt's
    # rubric, the steps of a response, or one of its turns; or the dotted path of your own protocol.
    protocol: str = DEFAULT_PROTOCOL
    num_judgements: int = at_least(1, 1)  # [judgements] Judgements of each response, list or pair.
    max_new_tokens: int = at_least(1, 160)  # Most tokens of a judgement.
    thinking: ThinkingConfig = field(default_factory=ThinkingConfig)
    temperature: float = at_least(0, 1.0)  # Sampling temperature of judgements; 0: greedy.
    # [share] Judgements are sampled from the fewest likely tokens that hold this probability (top-p).
    top_p: float = above_0_to_1(1.0)
    # [tokens] Judgements are sampled from this many likely tokens (top-k); 0: from all.
    top_k: int = at_least(0, 0)
    # [share] Judgements are sampled from tokens with at least this share of the likeliest one's probability (min-p).
    min_p: float = from_0_to_1(0.0)
    # Text with which each judgement begins, such as "<think>": part of the prompt, and of what is parsed.
    prefill: str = ""
    # Prompt of the judge: tiny, pointwise, short, yes_no, boxed, reference, listwise, pairwise, rubric, rubric_yes_no,
    # steps, turns, shared_principles, listwise_shared_principles, the format of a public GRM (docs/public_grms.md), or
    # the path of a Jinja file.
    template: str = "tiny"
    # How the end of a judgement is read: as a form of "Score: N" (score_line), the same or N alone (score), a form of
    # "\boxed{N, ...}" (boxed), as "Yes" or "No" (yes_no), as a public GRM writes it (docs/public_grms.md), or the
    # dotted path of a Form of your own (grmpipe/judge/parse.py).
    parser: str = "score_line"
    # Instead of judge.parser: a regular expression for the line of the verdict, with one group, which holds the score.
    pattern: str = ""
    # What a judgement's score is: the number that it wrote (text), or the mean over the numbers that it might have
    # written in that place, by the probabilities of their tokens (expectation).
    score_from: str = one_of(SCORE_SOURCES, "text")
    format: FormatConfig = field(default_factory=FormatConfig)
    scale: Scale = field(default_factory=Scale)
    # How the scores of several judgements become one, or the dotted path of a function of your own; weighted and best
    # ask a meta-RM.
    vote: str = "mean"
    votes: VotesConfig = field(default_factory=VotesConfig)
    # File of task=calibrate (calibration.json) for this very judge: its rewards are then what labels made of its
    # scores, such as the probability that a response is right; null: what it says.
    calibration: str | None = not_empty(None, "give calibration.json of a run of task=calibrate, or null")
    split: SplitConfig = field(default_factory=SplitConfig)
    principles: PrinciplesConfig = field(default_factory=PrinciplesConfig)
    rubric: RubricConfig = field(default_factory=RubricConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    # [share] Share of the last 256 verdicts that failed, or of the last 256 scores of teachers, above which judging
    # pauses; if it is exceeded again, the run stops. With several judges judge.max_failure_rate holds for the verdicts
    # that they give together, and that of each for its own: above it an alarm names the judge.
    max_failure_rate: float = above_0_to_1(0.2)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    # Rule that compares a response with the prompt's reference, or the dotted path of a function of your own.
    rule: str = "exact_answer"
    # For a reward function: its dotted path. It takes and returns what docs/reward_functions.md says, or what TRL or
    # verl asks.
    function: str = ""
    function_call: FunctionCallConfig = field(default_factory=FunctionCallConfig)
    scalar: ScalarConfig = field(default_factory=ScalarConfig)
    env_reward: EnvRewardConfig = field(default_factory=EnvRewardConfig)
    custom: CustomConfig = field(default_factory=CustomConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        for check in CHECKS:
            check(self)

    @property
    def name(self) -> str:
        """The name by which the reward and metrics name it."""
        return JUDGE

    @property
    def key(self) -> str:
        """The section that a user types."""
        return JUDGE

    def make_thinking_budget(self, *, thinks: bool) -> ThinkingBudget | None:
        """How long a judgement may think before its verdict. None: as long as it likes. thinks: whether its model
        does, here.
        """
        default = self.max_new_tokens // 2 if thinks else 0
        num_tokens = default if self.thinking.budget_tokens is None else self.thinking.budget_tokens
        return ThinkingBudget(num_tokens=num_tokens, answer_start=self.thinking.answer_start) if num_tokens else None

    @property
    def truncated_by(self) -> str:
        """The key by which judgements are sampled from a part of the distribution; empty: from all of it."""
        cuts = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        return next((key for key, is_set in cuts.items() if is_set), "")

    def to_shown_score(self, score: float) -> float:
        """A score as a verdict shows it: SPCT's sum goes from k to 10 k."""
        return score * self.num_judgements if self.vote == "sum" else score

    @property
    def protocol_kind(self) -> JudgeProtocol:
        """What other modules must know of the protocol."""
        return protocol_named(self.protocol)

    @property
    def compares_pairs(self) -> bool:
        """Whether its reward is the share of the pairs that a response wins."""
        return self.kind == "generative" and self.protocol_kind.about == "pair"

    @property
    def scale_of_margins(self) -> Scale | None:
        """The scale by which the votes on a pair count; None: only who is better counts."""
        return self.scale if self.compares_pairs and self.vote == "mean" else None

    @property
    def is_simulated(self) -> bool:
        """Whether a simulation knows the judge, and the number of scores in a judgement."""
        scores = self.kind == "generative" and self.protocol_kind.scores == "responses"
        return scores or self.kind in ("rule", "label")

    @property
    def gives_one_score(self) -> bool:
        """Whether a response gets one score, which has no standard deviation."""
        if self.kind == "generative":
            return self.num_judgements == 1 and not self.protocol_kind.compares
        return self.kind != "custom"

    @property
    def in_words(self) -> JudgeKind:
        """What people read it by."""
        return KINDS[self.kind].describe(lambda key: attrgetter(key)(self))

    @property
    def has_scale(self) -> bool:
        """Whether its rewards are from 0 to 1. Those of an environment are brought there by their weights."""
        return self.kind != "function" or self.function_call.score_range is not None

    @property
    def waits_for_siblings(self) -> bool:
        """Whether a verdict may depend on what became of the siblings' judgements."""
        by_criteria = self.protocol_kind.scores == "criteria" and self.rubric.min_share < 1
        return self.kind == "generative" and (self.protocol_kind.compares or by_criteria)

    def responses_shown(self, size: int) -> int:
        """The number of responses in one judgement, for a group of `size` siblings."""
        return self.protocol_kind.responses_shown(size)

    def judgements_of_group(self, size: int) -> int:
        """The number of judgements of a group of `size` siblings, if none fails and none is left out."""
        return self.protocol_kind.subjects(size, self.split.pairs) * self.num_judgements


@dataclass(frozen=True)
class JudgeEntry(JudgeConfig):
    """A judge of a run, with its name and the section that a user types."""

    name: str = JUDGE
    key: str = JUDGE

    @staticmethod
    def of(judge: JudgeConfig, name: str) -> JudgeEntry:
        """A further judge."""
        return JudgeEntry(**vars(judge), name=name, key=f"judges.{name}")


LABEL_RULES = ("exact", "same_side", "graded")


@dataclass(frozen=True)
class LabelConfig(Bounded):
    """When a judgement agrees with its label. Among several responses, the labelled best must be strictly first."""

    # What a judge in training is rewarded for: a score equal to the label (exact, as in SPCT), one on the same side of
    # pass_score (same_side), or the nearer to the label the more, and of several responses the more pairs in the order
    # of their labels (graded).
    rule: str = one_of(LABEL_RULES, "exact")
    # [score] Lowest score that passes a response, on the first judge's scale; also the label of a rollout that is
    # right: at least this score.
    pass_score: int = 8
    # Lowest and highest score of labels in files, as in [0, 5], which are stretched to the first judge's scale; null:
    # they are on that scale.
    score_range: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score_range is not None and not is_range(self.score_range):
            raise ValueError(
                f"score_range: must be two numbers, the lower one first, got {self.score_range!r}; type "
                "'data.labels.score_range=[0, 5]'"
            )


def is_range(ends: object) -> bool:
    """Whether it is a pair of finite numbers in ascending order."""
    if not isinstance(ends, list | tuple) or len(ends) != 2:
        return False
    numbers = all(isinstance(end, int | float) and not isinstance(end, bool) and math.isfinite(end) for end in ends)
    return numbers and ends[0] < ends[1]


LEAST_TO_ASK = 32  # tokens of a judgement, half of which are enough for a verdict


# -- checks of a judge -----------------------------------------------------------------------------------------------


def check_choices(judge: JudgeConfig) -> None:
    protocol_named(judge.protocol)
    for table in (PARSERS, VOTES, RULES):
        table.check(getattr(judge, table.name))


def check_template(judge: JudgeConfig) -> None:
    if not judge.template:
        raise ValueError(f"template: is empty; type {', '.join(SHIPPED_TEMPLATES)} or the path of a Jinja file")
    parser, protocol = SHIPPED_TEMPLATES.get(judge.template, (judge.parser, judge.protocol))
    if judge.protocol != protocol and judge.protocol in PROTOCOLS:
        raise ValueError(
            f"template: {judge.template} is for the {protocol} protocol; type judge.protocol={protocol}, or "
            f"judge={judge.protocol} for all keys of {judge.protocol}"
        )
    if judge.pattern:
        check_pattern(judge)
        return
    if judge.parser != parser and judge.parser in PARSERS:
        raise ValueError(
            f"parser: {judge.parser} can't read the format of template {judge.template}; type judge.parser={parser}"
        )
    by_criterion = judge.protocol_kind.scores == "criteria" and judge.rubric.criteria_per_call == 1
    if not judge.protocol_kind.gives_one_score and judge.parser in ONE_SCORE and not by_criterion:
        if judge.protocol_kind.scores == "criteria":
            raise ValueError(
                f"rubric.criteria_per_call: {judge.parser} reads one score; type judge.rubric.criteria_per_call=1, or "
                "judge=rubric"
            )
        raise ValueError(
            f"parser: {judge.parser} reads one score, and a {judge.protocol} judgement holds several; "
            "type judge.parser=boxed"
        )
    if judge.protocol_kind.about != "pair" and judge.parser in TWO_SCORES:
        raise ValueError(
            f"parser: {judge.parser} reads which of two responses is better, and a {judge.protocol} judgement isn't "
            "about a pair; type judge.protocol=pairwise, or judge.parser=boxed"
        )
    if judge.format.show_truncation and (judge.kind != "generative" or not judge.protocol_kind.is_of_whole):
        raise ValueError(
            "format.show_truncation: is for generative judges of whole responses; type "
            "judge.format.show_truncation=false, or judge=pointwise"
        )


def check_asked_verdicts(judge: JudgeConfig) -> None:
    if judge.format.ask_verdict and judge.kind == "generative" and judge.max_new_tokens < LEAST_TO_ASK:
        raise ValueError(
            f"format.ask_verdict: judge.max_new_tokens={judge.max_new_tokens} leave no tokens to ask for a verdict; "
            f"type judge.max_new_tokens={2 * LEAST_TO_ASK} or more, or judge.format.ask_verdict=false"
        )


def check_pattern(judge: JudgeConfig) -> None:
    """Check the regular expression of a verdict's line."""
    example = r"type judge.pattern='Verdict: ([0-9]+)'"
    try:
        compiled = re.compile(judge.pattern)
    except re.error as error:
        raise ValueError(f"pattern: {judge.pattern!r} is no regular expression: {error}; {example}") from error
    if compiled.groups != 1:
        raise ValueError(
            f"pattern: {judge.pattern!r} has {compiled.groups} groups, and one must hold the score; {example}, with "
            "(?:...) for groups that don't"
        )
    if repeats_repetitions(judge.pattern):
        raise ValueError(
            f"pattern: {judge.pattern!r} repeats a group that repeats something itself, or has alternatives: on some "
            f"lines that takes for ever; {example}, or a Form of your own (judge.parser)"
        )
    if not judge.protocol_kind.gives_one_score:
        raise ValueError(
            f"pattern: reads one score, and a {judge.protocol} judgement holds several; type judge.pattern='' and a "
            "judge.parser"
        )
    if key := "structured" if judge.format.structured else "ask_verdict" if judge.format.ask_verdict else "":
        raise ValueError(
            f"format.{key}: a pattern of your own is no grammar that keeps to the scale; type "
            f"judge.format.{key}=false, or judge.parser=<the dotted path of a Form of yours> for judge.pattern"
        )


def repeats_repetitions(pattern: str) -> bool:
    """Whether a group within which something repeats, or that has alternatives, is repeated itself."""
    rest = re.sub(r"\[\^?\]?[^\]]*\]", "x", re.sub(r"\\.", "x", pattern))
    while not re.search(r"\([^()]*[*+{|][^()]*\)[*+{]", rest):
        opened = re.sub(r"\(([^()]*)\)", r"\1", rest)
        if opened == rest:
            return False
        rest = opened
    return True


def check_thinking(judge: JudgeConfig) -> None:
    budget, most = judge.thinking.budget_tokens or 0, judge.max_new_tokens
    if judge.format.structured and judge.thinking.answer_start:
        raise ValueError(
            "thinking.answer_start: the grammar of judge.format.structured=true begins with the answer, which "
            "can't already have begun; type judge.thinking.answer_start='', or judge.format.structured=false"
        )
    if budget >= most:
        raise ValueError(
            f"thinking.budget_tokens: {budget} of judge.max_new_tokens={most} leave no tokens for the verdict; "
            f"type judge.max_new_tokens={budget + 512}"
        )
    if judge.principles.kind == "shared" and budget >= judge.principles.max_new_tokens:
        raise ValueError(
            f"principles.max_new_tokens: {judge.principles.max_new_tokens} leave no tokens for principles after "
            f"judge.thinking.budget_tokens={budget}; type judge.principles.max_new_tokens={budget + 512}"
        )


def check_votes(judge: JudgeConfig) -> None:
    protocol = judge.protocol_kind
    if judge.temperature == 0 and judge.num_judgements > 1 and not protocol.compares:
        raise ValueError(
            f"num_judgements: {judge.num_judgements} greedy judgements are all the same; "
            "type judge.num_judgements=1 or a judge.temperature above 0"
        )
    if protocol.both_orders and judge.num_judgements % 2:
        raise ValueError(
            f"num_judgements: each pair is judged in both orders equally often, so {judge.num_judgements} "
            f"is one too few; type judge.num_judgements={judge.num_judgements + 1}"
        )
    if protocol.votes and judge.vote not in protocol.votes:
        raise ValueError(
            f"vote: {judge.protocol} judgements are decided by {' or '.join(protocol.votes)}, not by {judge.vote}; "
            f"type judge.vote={protocol.votes[0]}"
        )
    if judge.score_from == "expectation" and judge.vote == "majority" and not protocol.votes:
        raise ValueError(
            "vote: majority counts equal scores, and no two are equal with judge.score_from=expectation; type "
            "judge.vote=mean"
        )
    if judge.votes.abstain_above_std is not None and judge.kind == "generative" and judge.gives_one_score:
        raise ValueError(
            "votes.abstain_above_std: one judgement has no standard deviation; type judge.num_judgements=4, or "
            "judge.votes.abstain_above_std=null"
        )
    if judge.votes.k_meta > judge.num_judgements:
        raise ValueError(
            f"votes.k_meta: {judge.votes.k_meta} of judge.num_judgements={judge.num_judgements} can't vote"
        )


def check_sampling(judge: JudgeConfig) -> None:
    if judge.score_from == "expectation" and (cut := judge.truncated_by):
        raise ValueError(
            f"{cut}: judge.score_from=expectation reads the probabilities of all scores, and {cut} cuts off unlikely "
            f"ones; type judge.{cut}={1 if cut == 'top_p' else 0}, or judge.score_from=text"
        )
    if judge.prefill and judge.kind != "generative":
        raise ValueError(
            f"prefill: kind={judge.kind} asks for no answer that could begin with it; type judge.prefill=''"
        )
    if judge.prefill and judge.format.structured:
        raise ValueError(
            "prefill: the grammar of judge.format.structured=true begins with the judgement, which can't already have "
            "begun; type judge.prefill='', or judge.format.structured=false"
        )


def check_early_stop(judge: JudgeConfig) -> None:
    stop = judge.early_stop
    if stop.kind == "none":
        return
    if stop.kind not in judge.protocol_kind.early_stops:
        wanted = [name for name, protocol in PROTOCOLS.items() if stop.kind in protocol.early_stops]
        why = "a winner fixes no rewards but a pair's" if stop.kind == "exact" else "it is for single scores"
        raise ValueError(
            f"early_stop.kind: {stop.kind} is for judge.protocol={' or '.join(wanted)}, not {judge.protocol}: "
            f"{why}; type judge.early_stop.kind=none"
        )
    if stop.kind == "relaxed" and judge.vote not in ("mean", "sum"):
        raise ValueError(
            f"early_stop.kind: relaxed uses the standard error of a mean, not of vote={judge.vote}; "
            "type judge.vote=mean, or judge.early_stop.kind=none"
        )
    if stop.kind == "exact" and judge.vote != "majority":
        raise ValueError(
            f"early_stop.kind: exact fixes who wins a pair, and with vote={judge.vote} its margin counts; type "
            "judge.vote=majority, or judge.early_stop.kind=none"
        )
    fewest = stop.first + 1 if stop.kind == "relaxed" else 2
    if judge.num_judgements < fewest:
        raise ValueError(
            f"early_stop.kind: of {judge.num_judgements} judgements none can be saved; "
            f"type judge.num_judgements={fewest} or more, or judge.early_stop.kind=none"
        )


def check_rubric(judge: JudgeConfig) -> None:
    rubric = judge.rubric
    usual = {"criteria_per_call": 0, "min_share": 1, "dropout": 0, "credit": "whole"}
    changed = [key for key, value in usual.items() if getattr(rubric, key) != value]
    if judge.protocol_kind.scores != "criteria" and changed:
        raise ValueError(
            f"rubric.{changed[0]}: is for judges by a rubric, and {judge.protocol} is none; type judge=rubric, or "
            f"judge.rubric.{changed[0]}={usual[changed[0]]}"
        )
    if rubric.evolve.writer is not None and (judge.protocol_kind.scores != "criteria" or judge.kind != "generative"):
        raise ValueError(
            "rubric.evolve.writer: criteria are written for judges by a rubric; type judge=rubric, or "
            "judge.rubric.evolve.writer=null"
        )
    if rubric.evolve.writer is not None and judge.principles.kind == "shared":
        raise ValueError(
            "rubric.evolve.writer: shared principles are written from a rubric that stays; type "
            "judge.principles.kind=inline, or judge.rubric.evolve.writer=null"
        )
    if rubric.dropout == 1:
        raise ValueError("rubric.dropout: must be below 1, or no criterion would be left to judge by")
    if rubric.criteria_per_call and judge.vote in VOTES_WITH_META_RM:
        raise ValueError(
            f"vote: {judge.vote} weighs judgements of the whole rubric, and judge.rubric.criteria_per_call splits it; "
            "type judge.vote=mean, or judge.rubric.criteria_per_call=0"
        )
    if rubric.criteria_per_call and judge.early_stop.kind != "none":
        raise ValueError(
            "early_stop.kind: relaxed compares scores of the whole rubric, and judge.rubric.criteria_per_call splits "
            "it; type judge.early_stop.kind=none, or judge.rubric.criteria_per_call=0"
        )


def check_tools(judge: JudgeConfig) -> None:
    """Check that a judgement can be an episode."""
    if judge.tools.state and not judge.tools.functions:
        raise ValueError(
            "tools.state: is for functions, which servers (mcp) aren't; type "
            "judge.tools.functions=my_package.my_tools, or judge.tools.state=false"
        )
    if judge.tools.state and (judge.protocol_kind.compares or judge.protocol_kind.scores == "turns"):
        raise ValueError(
            f"tools.state: is the final state of one rollout, and {judge.protocol} judges several, or its turns; type "
            "judge=pointwise, or judge.tools.state=false"
        )
    if not judge.tools.is_set:
        return
    try:
        judge.tools.make_env()
    except ValueError as error:
        raise ValueError(f"tools.{error}".replace("env.isolation.kind", "judge.tools.isolation")) from error
    way_out = "or judge.tools.functions='' judge.tools.mcp={}"
    if judge.kind != "generative":
        raise ValueError(f"tools.functions: kind={judge.kind} writes nothing, and calls nothing; type {way_out[3:]}")
    usual = {
        "format.structured": (False, "its grammar knows no calls"),
        "prefill": ("", "each turn would begin with it"),
        "score_from": ("text", "the probabilities are those of one turn"),
        "principles.kind": ("inline", "principles written ahead of time call nothing"),
    }
    for key, (value, why) in usual.items():
        if attrgetter(key)(judge) != value:
            shown = "false" if value is False else value or "''"
            raise ValueError(
                f"{key}: a judge with tools has several turns, and {why}; type judge.{key}={shown}, {way_out}"
            )


def check_own(judge: JudgeConfig) -> None:
    if judge.kind == "custom" and not judge.custom.target:
        raise ValueError(
            "custom.target: is empty; for kind=custom type judge.custom.target=my_package.my_module.MyJudge"
        )
    if judge.kind == "function" and not judge.function:
        raise ValueError("function: is empty; for kind=function type judge.function=my_module.my_reward")


def check_scalar(judge: JudgeConfig) -> None:
    """Check that no setting is meant for judgements, which a scalar reward model doesn't write."""
    if judge.kind != "scalar":
        return
    usual = JudgeConfig()
    for key in OF_JUDGEMENTS:
        default = attrgetter(key)(usual)
        if attrgetter(key)(judge) != default:
            raise ValueError(
                f"{key}: a scalar reward model writes no judgements; type judge.{key}="
                f"{'null' if default is None else default}, or judge.kind=generative for a GRM"
            )
    if judge.early_stop.kind != "none":
        raise ValueError(
            "early_stop.kind: a scalar reward model gives one score, and none can be left out; type "
            "judge.early_stop.kind=none"
        )


def check_deadline(judge: JudgeConfig) -> None:
    limits = judge.limits
    needed_s = judge.max_new_tokens / limits.min_tokens_per_s if judge.kind == "generative" else 0.0
    if limits.timeout_s < needed_s:
        raise ValueError(
            f"limits.timeout_s: {limits.timeout_s:g} s is less than max_new_tokens / limits.min_tokens_per_s = "
            f"{needed_s:g} s; type judge.limits.timeout_s={needed_s:g} or more, or correct "
            "judge.limits.min_tokens_per_s"
        )


def check_calibration(judge: JudgeConfig) -> None:
    """Check that the judge gives one reward for a whole response, which a map can calibrate."""
    if judge.calibration is None:
        return
    if judge.kind in ("env", "label"):
        raise ValueError(f"calibration: kind={judge.kind} judges no text that has a label; type judge.kind=generative")
    if judge.kind == "generative" and not judge.protocol_kind.is_of_whole:
        raise ValueError(
            f"calibration: {judge.protocol} gives a reward for each part of a response, and labels are of whole ones; "
            "type judge.protocol=pointwise, or judge.calibration=null"
        )


CHECKS = (
    check_choices, check_template, check_asked_verdicts, check_thinking, check_votes, check_sampling, check_early_stop,
    check_rubric, check_tools, check_own, check_scalar, check_deadline, check_calibration,
)  # fmt: skip
