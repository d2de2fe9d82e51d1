"""Settings of judging: protocol, votes, limits, the scale of scores, labels. Frozen, checked; opens no file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from grmpipe.config.entry_names import JUDGE
from grmpipe.config.env_reward import EnvRewardConfig
from grmpipe.config.judge_protocols import (
    DEFAULT_PROTOCOL,
    PROTOCOLS,
    SHIPPED_TEMPLATES,
    JudgeProtocol,
    protocol_named,
)
from grmpipe.config.judge_tables import ONE_SCORE, PARSERS, RULES, TWO_SCORES, VOTES
from grmpipe.config.scalar_map import ScalarConfig
from models.types import ThinkingBudget

KINDS = ("generative", "scalar", "rule", "function", "env", "label", "custom")
FUNCTION_BATCHES = ("rollout", "group")
PAIRS = ("all", "ring")
PRINCIPLES = ("inline", "shared")
TRUNCATIONS = ("error", "middle")
EARLY_STOPS = ("none", "exact", "relaxed")
# Settings of judges that write judgements; a scalar reward model writes none.
OF_JUDGEMENTS = (
    "protocol", "num_judgements", "template", "parser", "structured", "vote", "abstain_above_std", "principles",
    "truncation",
)  # fmt: skip


@dataclass(frozen=True)
class EarlyStopConfig:
    """Early stop: when the remaining judgements of a rollout, or of a pair, are left out."""

    # Rule: never (none); once they can't change the winner of a pair (exact); once the standard error of a score is
    # small compared with the spread of its group (relaxed).
    kind: str = "none"
    first: int = 2  # [judgements] For relaxed: judgements requested at once, and the fewest before a stop.
    # [judgements] Judgements requested at a time after the first ones; fewer save more and take longer.
    wave: int = 2
    # [share] For relaxed: largest standard error of a score, as a share of the spread of the group's scores.
    max_error: float = 0.25
    # For relaxed: share of rollouts that are still judged in full, to measure the error of stopping.
    audit_share: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in EARLY_STOPS:
            raise ValueError(f"kind: unknown value {self.kind!r}; known: {', '.join(EARLY_STOPS)}")
        for key, count in (("first", self.first), ("wave", self.wave)):
            if count < 1:
                raise ValueError(f"{key}: must be at least 1, got {count}")
        if not 0 < self.max_error < math.inf:
            raise ValueError(f"max_error: must be above 0, got {self.max_error}")
        if not 0 < self.audit_share <= 1:
            raise ValueError(
                f"audit_share: must be above 0 and at most 1, got {self.audit_share}: without an audit the error of "
                "a relaxed stop is unknown"
            )


@dataclass(frozen=True)
class JudgeConfig:
    """How rollouts are judged, when judging counts as failed, and how often it is measured."""

    # Where verdicts come from: a GRM, a scalar reward model, a rule, a reward function of your own, the environment's
    # rewards, the labels of a judge in training, or your own class.
    kind: str = "generative"
    # Model that is asked: the role grm, a name in models, or policy, whose weights of the moment then judge.
    model: str = "grm"
    # What one judgement covers: a response, all responses of a group, a pair of them, the criteria of the prompt's
    # rubric, the steps of a response, or one of its turns; or the dotted path of your own protocol.
    protocol: str = DEFAULT_PROTOCOL
    num_judgements: int = 1  # [judgements] Judgements of each response, list or pair.
    max_new_tokens: int = 160  # Most tokens of a judgement.
    # [tokens] Tokens after which a judge that still thinks must give its verdict; they count towards max_new_tokens.
    # null: half of max_new_tokens, if the model thinks; 0: no budget, and a thought may fill max_new_tokens.
    thinking_tokens: int | None = None
    # Text after a thought that was ended, with which the judge's answer begins, such as "Score:"; empty: it answers
    # freely.
    answer_start: str = ""
    show_thoughts: bool = False  # Judges see the policy's thoughts too; false: only its answer.
    temperature: float = 1.0  # Sampling temperature of judgements; 0: greedy.
    # Prompt of the judge: tiny, pointwise, boxed, reference, listwise, pairwise, rubric, steps, turns,
    # shared_principles, listwise_shared_principles, the format of a public GRM (docs/judging.md), or the path of a
    # Jinja file.
    template: str = "tiny"
    # How the end of a judgement is read: as a form of "Score: N" (score_line) or of "\boxed{N, ...}" (boxed), as
    # a public GRM writes it (docs/judging.md), or the dotted path of a Form of your own (grmpipe/judge/forms.py).
    parser: str = "score_line"
    structured: bool = False  # The engine's grammar limits a judgement to what the parser can read.
    score_min: int = 1  # [score] Lowest score of the scale.
    score_max: int = 10  # [score] Highest score of the scale.
    # How the scores of several judgements become one, or the dotted path of a function of your own; weighted and best
    # ask a meta-RM.
    vote: str = "mean"
    k_meta: int = 0  # [judgements] For best: judgements that the meta-RM keeps; 0: half of num_judgements.
    # [score] Standard deviation of the judgements above which there is no verdict; null: no limit.
    abstain_above_std: float | None = None
    pairs: str = "all"  # For pairwise: which pairs of a group are judged, all or each sibling with the next.
    step_end: str = "\n"  # For steps: text that ends a step; empty: a step is a turn.
    max_steps: int = 32  # For steps: most steps of a response; the rest belongs to the last one.
    # Where principles are written: in each judgement (inline), or once per prompt for all judgements (shared).
    principles: str = "inline"
    # For shared principles: their prompt, a shipped template or the path of a Jinja file.
    principles_template: str = "principles"
    principles_max_new_tokens: int = 512  # For shared principles: most tokens.
    # What happens if the judge's prompt exceeds its context window: the verdict fails (error), or the longest responses
    # lose their middle (middle): first what tools and the environment said, then whole turns, then all texts.
    truncation: str = "error"
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    # [retries] How often an unparseable or truncated judgement is sampled again; at temperature 0 never.
    max_retries: int = 1
    # Limit of one judgement, including its wait in the engine's queue.
    timeout_s: float = 120.0
    min_tokens_per_s: float = 10.0  # Slowest acceptable speed of a judgement; timeout_s is checked against it.
    # [share] Share of failed verdicts above which judging pauses; if it is exceeded again, the run stops. With several
    # judges judge.max_failure_rate holds for the verdicts that they give together, and that of each for its own: above
    # it an alarm names the judge.
    max_failure_rate: float = 0.2
    failure_window: int = 256  # [verdicts] Latest verdicts that max_failure_rate is measured over.
    pause_s: float = 30.0  # Length of a pause of judging.
    max_concurrency: int = 1024  # [judgements] Most judgements in flight.
    # Rule that compares a response with the prompt's reference, or the dotted path of a function of your own.
    rule: str = "exact_answer"
    # For a reward function: its dotted path. It takes and returns what docs/judging.md says, or what TRL or verl asks.
    function: str = ""
    # For a reward function: its lowest and highest number, as in [0, 100], which become the rewards 0 and 1; null: its
    # number is the reward.
    score_range: Any = None
    # For a reward function that takes lists: called with each response as it ends (rollout), or with all siblings of a
    # group (group).
    function_batch: str = "rollout"
    scalar: ScalarConfig = field(default_factory=ScalarConfig)
    env_reward: EnvRewardConfig = field(default_factory=EnvRewardConfig)
    target: str = ""  # For your own judge: dotted path of its class.
    options: dict[str, Any] = field(default_factory=dict)  # For your own judge: arguments of its class.
    # [prompts] Held-out prompts of the evaluations during a run; the first and the last evaluation use all of them.
    anchors: int = 64
    anchor_every: int = 10  # [steps] Interval between evaluations on held-out prompts.

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_ranges()
        self._check_template()
        self._check_thinking()
        self._check_votes()
        self._check_early_stop()
        self._check_target()
        self._check_scalar()
        self._check_deadline()

    @property
    def name(self) -> str:
        """The name by which the reward and metrics name it."""
        return JUDGE

    @property
    def key(self) -> str:
        """The section that a user types."""
        return JUDGE

    @property
    def scale(self) -> Scale:
        return Scale(low=self.score_min, high=self.score_max)

    def thinking_budget(self, *, thinks: bool) -> ThinkingBudget | None:
        """How long a judgement may think before its verdict. None: as long as it likes. thinks: whether its model
        does, here.
        """
        default = self.max_new_tokens // 2 if thinks else 0
        num_tokens = default if self.thinking_tokens is None else self.thinking_tokens
        return ThinkingBudget(num_tokens=num_tokens, answer_start=self.answer_start) if num_tokens else None

    def shown_score(self, score: float) -> float:
        """A score as a verdict shows it: SPCT's sum goes from k to 10 k."""
        return score * self.num_judgements if self.vote == "sum" else score

    @property
    def protocol_kind(self) -> JudgeProtocol:
        """What other modules must know of the protocol."""
        return protocol_named(self.protocol)

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
    def has_scale(self) -> bool:
        """Whether its rewards are from 0 to 1. Those of an environment are brought there by their weights."""
        return self.kind != "function" or self.score_range is not None

    def responses_shown(self, size: int) -> int:
        """The number of responses in one judgement, for a group of `size` siblings."""
        return self.protocol_kind.responses_shown(size)

    def judgements_of_group(self, size: int) -> int:
        """The number of judgements of a group of `size` siblings, if none fails and none is left out."""
        return self.protocol_kind.subjects(size, self.pairs) * self.num_judgements

    def _check_choices(self) -> None:
        protocol_named(self.protocol)
        for table in (PARSERS, VOTES, RULES):
            table.check(getattr(self, table.name))
        for key, value, known in (
            ("kind", self.kind, KINDS),
            ("pairs", self.pairs, PAIRS),
            ("principles", self.principles, PRINCIPLES),
            ("truncation", self.truncation, TRUNCATIONS),
            ("function_batch", self.function_batch, FUNCTION_BATCHES),
        ):
            if value not in known:
                raise ValueError(f"{key}: unknown value {value!r}; known: {', '.join(known)}")

    def _check_template(self) -> None:
        if not self.template:
            raise ValueError(f"template: is empty; type {', '.join(SHIPPED_TEMPLATES)} or the path of a Jinja file")
        parser, protocol = SHIPPED_TEMPLATES.get(self.template, (self.parser, self.protocol))
        if self.protocol != protocol and self.protocol in PROTOCOLS:
            raise ValueError(
                f"template: {self.template} is for the {protocol} protocol; type judge.protocol={protocol}, or "
                f"judge={self.protocol} for all keys of {self.protocol}"
            )
        if self.parser != parser:
            raise ValueError(
                f"parser: {self.parser} can't read the format of template {self.template}; type judge.parser={parser}"
            )
        if not self.protocol_kind.gives_one_score and self.parser in ONE_SCORE:
            raise ValueError(
                f"parser: {self.parser} reads one score, and a {self.protocol} judgement holds several; "
                "type judge.parser=boxed"
            )
        if self.protocol_kind.about != "pair" and self.parser in TWO_SCORES:
            raise ValueError(
                f"parser: {self.parser} reads which of two responses is better, and a {self.protocol} judgement isn't "
                "about a pair; type judge.protocol=pairwise, or judge.parser=boxed"
            )

    def _check_thinking(self) -> None:
        budget, most = self.thinking_tokens, self.max_new_tokens
        if budget == 0 and self.answer_start:
            raise ValueError(
                "answer_start: it begins the answer after a thought that the budget ended, and there is no budget; "
                "type judge.thinking_tokens=2048, or judge.answer_start=''"
            )
        if self.structured and self.answer_start:
            raise ValueError(
                "answer_start: the grammar of judge.structured=true begins with the answer, which can't already have "
                "begun; type judge.answer_start='', or judge.structured=false"
            )
        if not budget:
            return
        if budget < 0:
            raise ValueError(
                f"thinking_tokens: must be 0 or more, got {budget}; for no thoughts type "
                "+grm.chat_template_kwargs.enable_thinking=false (or what the model's chat template calls it)"
            )
        if budget >= most:
            raise ValueError(
                f"thinking_tokens: {budget} of judge.max_new_tokens={most} leave no tokens for the verdict; "
                f"type judge.max_new_tokens={budget + 512}"
            )
        if self.principles == "shared" and budget >= self.principles_max_new_tokens:
            raise ValueError(
                f"principles_max_new_tokens: {self.principles_max_new_tokens} leave no tokens for principles after "
                f"judge.thinking_tokens={budget}; type judge.principles_max_new_tokens={budget + 512}"
            )

    def _check_ranges(self) -> None:
        for key, count in (
            ("num_judgements", self.num_judgements),
            ("max_new_tokens", self.max_new_tokens),
            ("principles_max_new_tokens", self.principles_max_new_tokens),
            ("max_steps", self.max_steps),
            ("failure_window", self.failure_window),
            ("max_concurrency", self.max_concurrency),
            ("anchors", self.anchors),
            ("anchor_every", self.anchor_every),
        ):
            if count < 1:
                raise ValueError(f"{key}: must be at least 1, got {count}")
        for key, value in (
            ("temperature", self.temperature),
            ("k_meta", self.k_meta),
            ("abstain_above_std", self.abstain_above_std or 0.0),
            ("max_retries", self.max_retries),
            ("pause_s", self.pause_s),
        ):
            if not 0 <= value < math.inf:
                raise ValueError(f"{key}: must be 0 or more, got {value}")
        if not self.score_min < self.score_max:
            raise ValueError(
                f"score_max: must be above score_min = {self.score_min}, got {self.score_max}; "
                "type judge.score_min=1 judge.score_max=10"
            )
        if not 0 < self.max_failure_rate <= 1:
            raise ValueError(
                f"max_failure_rate: must be above 0 and at most 1 (a share of verdicts), got {self.max_failure_rate}"
            )
        if self.temperature == 0 and self.num_judgements > 1 and not self.protocol_kind.compares:
            raise ValueError(
                f"num_judgements: {self.num_judgements} greedy judgements are all the same; "
                "type judge.num_judgements=1 or a judge.temperature above 0"
            )

    def _check_votes(self) -> None:
        protocol = self.protocol_kind
        if protocol.both_orders and self.num_judgements % 2:
            raise ValueError(
                f"num_judgements: each pair is judged in both orders equally often, so {self.num_judgements} "
                f"is one too few; type judge.num_judgements={self.num_judgements + 1}"
            )
        if protocol.votes and self.vote not in protocol.votes:
            raise ValueError(
                f"vote: {self.protocol} judgements are decided by {' or '.join(protocol.votes)}, not by {self.vote}; "
                f"type judge.vote={protocol.votes[0]}"
            )
        if self.abstain_above_std is not None and self.kind == "generative" and self.gives_one_score:
            raise ValueError(
                "abstain_above_std: one judgement has no standard deviation; type judge.num_judgements=4, or "
                "judge.abstain_above_std=null"
            )
        if self.k_meta > self.num_judgements:
            raise ValueError(f"k_meta: {self.k_meta} of judge.num_judgements={self.num_judgements} can't vote")

    def _check_early_stop(self) -> None:
        stop = self.early_stop
        if stop.kind == "none":
            return
        if stop.kind not in self.protocol_kind.early_stops:
            wanted = [name for name, protocol in PROTOCOLS.items() if stop.kind in protocol.early_stops]
            why = "a winner fixes no rewards but a pair's" if stop.kind == "exact" else "it is for single scores"
            raise ValueError(
                f"early_stop.kind: {stop.kind} is for judge.protocol={' or '.join(wanted)}, not {self.protocol}: "
                f"{why}; type judge.early_stop.kind=none"
            )
        if stop.kind == "relaxed" and self.vote not in ("mean", "sum"):
            raise ValueError(
                f"early_stop.kind: relaxed uses the standard error of a mean, not of vote={self.vote}; "
                "type judge.vote=mean, or judge.early_stop.kind=none"
            )
        fewest = stop.first + 1 if stop.kind == "relaxed" else 2
        if self.num_judgements < fewest:
            raise ValueError(
                f"early_stop.kind: of {self.num_judgements} judgements none can be saved; "
                f"type judge.num_judgements={fewest} or more, or judge.early_stop.kind=none"
            )

    def _check_target(self) -> None:
        if self.kind == "custom" and not self.target:
            raise ValueError("target: is empty; for kind=custom type judge.target=my_package.my_module.MyJudge")

        if self.kind == "function" and not self.function:
            raise ValueError("function: is empty; for kind=function type judge.function=my_module.my_reward")
        ends = self.score_range
        if ends is not None and not is_range(ends):
            raise ValueError(
                f"score_range: must be two numbers, the lower one first, got {ends!r}; type 'judge.score_range=[0, 1]'"
            )

    def _check_scalar(self) -> None:
        """Check that no setting is meant for judgements, which a scalar reward model doesn't write."""
        if self.kind != "scalar":
            return
        for spec in fields(self):
            if spec.name not in OF_JUDGEMENTS or getattr(self, spec.name) == spec.default:
                continue
            raise ValueError(
                f"{spec.name}: a scalar reward model writes no judgements; type judge.{spec.name}="
                f"{'null' if spec.default is None else spec.default}, or judge.kind=generative for a GRM"
            )
        if self.early_stop.kind != "none":
            raise ValueError(
                "early_stop.kind: a scalar reward model gives one score, and none can be left out; type "
                "judge.early_stop.kind=none"
            )

    def _check_deadline(self) -> None:
        if not 0 < self.min_tokens_per_s < math.inf:
            raise ValueError(f"min_tokens_per_s: must be above 0, got {self.min_tokens_per_s}")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s: must be a number above 0, got {self.timeout_s}; type judge.timeout_s=120")
        needed_s = self.max_new_tokens / self.min_tokens_per_s if self.kind == "generative" else 0.0
        if self.timeout_s < needed_s:
            raise ValueError(
                f"timeout_s: {self.timeout_s:g} s is less than max_new_tokens / min_tokens_per_s = {needed_s:g} s; "
                f"type judge.timeout_s={needed_s:g} or more, or correct judge.min_tokens_per_s"
            )


@dataclass(frozen=True)
class JudgeEntry(JudgeConfig):
    """A judge of a run, with its name and the section that a user types."""

    name: str = JUDGE
    key: str = JUDGE

    @staticmethod
    def of(judge: JudgeConfig, name: str) -> JudgeEntry:
        """A further judge."""
        return JudgeEntry(**vars(judge), name=name, key=f"judges.{name}")


LABEL_RULES = ("exact", "same_side")


@dataclass(frozen=True)
class LabelConfig:
    """When a judgement agrees with its label. Of several responses, the labelled best must be strictly first."""

    # When a score is right: equal to the label (exact, as in SPCT), or on the same side of pass_score (same_side).
    rule: str = "exact"
    # [score] Lowest score that passes a response, on the first judge's scale; also the label of a rollout that is
    # right: at least this score.
    pass_score: int = 8

    def __post_init__(self) -> None:
        if self.rule not in LABEL_RULES:
            raise ValueError(f"rule: unknown value {self.rule!r}; known: {', '.join(LABEL_RULES)}")


def is_range(ends: object) -> bool:
    """Whether it is a pair of finite numbers in ascending order."""
    if not isinstance(ends, list | tuple) or len(ends) != 2:
        return False
    numbers = all(isinstance(end, int | float) and not isinstance(end, bool) and math.isfinite(end) for end in ends)
    return numbers and ends[0] < ends[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The scores that a judge may give: integers, including both ends."""

    low: int = 1
    high: int = 10

    def reward_of(self, score: float) -> float:
        """The reward of a score: 0 at the low end, 1 at the high end."""
        return (score - self.low) / (self.high - self.low)

    def score_of(self, reward: float) -> float:
        """The score of a reward from 0 to 1."""
        return self.low + reward * (self.high - self.low)
