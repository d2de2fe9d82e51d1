"""Settings of judging: protocol, votes, limits, the scale of scores, labels. Frozen, checked; opens no file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from grmpipe.config.judge_protocols import (
    DEFAULT_PROTOCOL,
    PROTOCOLS,
    SHIPPED_TEMPLATES,
    JudgeProtocol,
    protocol_named,
)

KINDS = ("generative", "rule", "mixed", "label", "own")
PAIRS = ("all", "ring")
PRINCIPLES = ("inline", "ahead")
TOO_LONG = ("fail", "cut_response_middle")
EARLY_STOPS = ("none", "exact", "relaxed")
PARSERS = ("score_line", "boxed")
VOTES = ("mean", "sum", "median", "majority", "weighted", "best")
VOTES_WITH_META = ("weighted", "best")
RULES = ("exact_answer", "contains_reference", "math_verify")
COMPONENTS = ("generative", "rule")


@dataclass(frozen=True)
class EarlyStopConfig:
    """When the rest of the judgements of a rollout, or of a pair, is left out.

    exact:   never changes who wins; for winners only, which is what a pair asks for.
    relaxed: a pointwise score whose standard error is small against the spread of its group.
    """

    kind: str = "none"
    first: int = 2  # relaxed: judgements asked at once, the fewest to stop after
    wave: int = 2  # then so many at a time: fewer save more, and take longer
    max_error: float = 0.25  # relaxed: of the score, as a share of the spread of the group's scores
    audit_share: float = 0.1  # relaxed: of the rollouts, judged in full to see what the stop would have changed

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
                f"audit_share: must be above 0 and at most 1, got {self.audit_share}: without an audit nobody knows "
                "what a relaxed stop costs"
            )


@dataclass(frozen=True)
class JudgeConfig:
    """How rollouts are judged, when judging has failed, and what the alarm listens to."""

    kind: str = "generative"
    protocol: str = DEFAULT_PROTOCOL  # what a judgement is about: a row of PROTOCOLS, or the dotted path of the user's
    num_judgements: int = 1  # k: the GRM is asked so often about each rollout, list or pair
    max_new_tokens: int = 160
    temperature: float = 1.0
    template: str = "tiny"  # a shipped one, or the path of a Jinja file
    parser: str = "score_line"
    structured: bool = False  # the engine's grammar holds judgements to what the parser reads
    score_min: int = 1
    score_max: int = 10
    vote: str = "mean"
    k_meta: int = 0  # vote=best: judgements that the meta-RM keeps; 0: half of them
    abstain_above_spread: float | None = None  # no verdict where judgements lie further apart (std, score units)
    pairs: str = "all"  # pairwise: every pair, or a ring of neighbours
    step_end: str = "\n"  # steps: the text that ends a step; empty: a step is a turn
    max_steps: int = 32  # steps: what comes after belongs to the last one
    principles: str = "inline"  # ahead: written once per prompt, while its rollouts still run, and shared by them
    principles_template: str = "principles"
    principles_max_new_tokens: int = 512
    too_long: str = "fail"  # what becomes of a prompt that doesn't fit the GRM's window
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    reasks: int = 1  # a judgement that doesn't parse or is cut is asked for again so often
    timeout_s: float = 120.0  # of one judgement, its wait in the engine's queue included
    min_tokens_per_s: float = 10.0  # declared: the slowest speed of one judgement that is still fine
    max_failure_rate: float = 0.2  # of verdicts in the window; above it judging pauses, then the run stops
    failure_window: int = 256  # verdicts
    pause_s: float = 30.0
    width: int = 1024  # judgements in flight
    rule: str = "exact_answer"
    mix: dict[str, float] = field(default_factory=dict)  # kind=mixed: component (generative, rule) -> weight
    target: str = ""  # kind=own: the dotted path of a class of the user's
    options: dict[str, Any] = field(default_factory=dict)  # kind=own: its arguments
    anchors: int = 64  # rollouts with a known truth that the GRM is tried on
    anchor_every: int = 10  # steps
    anchor_min_score_rise: float = 1.0  # the alarm's first half, on the GRM's scale
    anchor_min_gold_fall: float = 0.10  # its second half, as a share of the anchors

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_ranges()
        self._check_template()
        self._check_votes()
        self._check_early_stop()
        self._check_mix()
        self._check_deadline()

    @property
    def scale(self) -> Scale:
        return Scale(low=self.score_min, high=self.score_max)

    def shown_score(self, score: float) -> float:
        """As a verdict gives it: SPCT's sum goes from k to 10 k."""
        return score * self.num_judgements if self.vote == "sum" else score

    @property
    def protocol_kind(self) -> JudgeProtocol:
        """What others must know of the protocol."""
        return protocol_named(self.protocol)

    def responses_shown(self, size: int) -> int:
        """In one judgement, of a group of so many siblings."""
        return self.protocol_kind.responses_shown(size)

    def judgements_of_group(self, size: int) -> int:
        """Asked about a group of so many siblings, where none fails and none is left out."""
        return self.protocol_kind.subjects(size, self.pairs) * self.num_judgements

    def _check_choices(self) -> None:
        protocol_named(self.protocol)
        for key, value, known in (
            ("kind", self.kind, KINDS),
            ("parser", self.parser, PARSERS),
            ("vote", self.vote, VOTES),
            ("pairs", self.pairs, PAIRS),
            ("principles", self.principles, PRINCIPLES),
            ("too_long", self.too_long, TOO_LONG),
            ("rule", self.rule, RULES),
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
                f"judge={self.protocol} for all that belongs to {self.protocol}"
            )
        if self.parser != parser:
            raise ValueError(
                f"parser: {self.parser} can't read what template {self.template} asks for; type judge.parser={parser}"
            )
        if not self.protocol_kind.gives_one_score and self.parser == "score_line":
            raise ValueError(
                f"parser: score_line reads one score, and a {self.protocol} judgement holds several; "
                "type judge.parser=boxed"
            )

    def _check_ranges(self) -> None:
        for key, count in (
            ("num_judgements", self.num_judgements),
            ("max_new_tokens", self.max_new_tokens),
            ("principles_max_new_tokens", self.principles_max_new_tokens),
            ("max_steps", self.max_steps),
            ("failure_window", self.failure_window),
            ("width", self.width),
            ("anchors", self.anchors),
            ("anchor_every", self.anchor_every),
        ):
            if count < 1:
                raise ValueError(f"{key}: must be at least 1, got {count}")
        for key, value in (
            ("temperature", self.temperature),
            ("k_meta", self.k_meta),
            ("abstain_above_spread", self.abstain_above_spread or 0.0),
            ("reasks", self.reasks),
            ("pause_s", self.pause_s),
            ("anchor_min_score_rise", self.anchor_min_score_rise),
            ("anchor_min_gold_fall", self.anchor_min_gold_fall),
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
                f"num_judgements: half of a pair's judgements show it in the other order, so {self.num_judgements} "
                f"is one too few; type judge.num_judgements={self.num_judgements + 1}"
            )
        if protocol.votes and self.vote not in protocol.votes:
            raise ValueError(
                f"vote: {self.protocol} judgements are decided by {' or '.join(protocol.votes)}, not by {self.vote}; "
                f"type judge.vote={protocol.votes[0]}"
            )
        if self.k_meta > self.num_judgements:
            raise ValueError(f"k_meta: {self.k_meta} of judge.num_judgements={self.num_judgements} can't be kept")

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
                f"early_stop.kind: relaxed reckons with the error of a mean, not of vote={self.vote}; "
                "type judge.vote=mean, or judge.early_stop.kind=none"
            )
        fewest = stop.first + 1 if stop.kind == "relaxed" else 2
        if self.num_judgements < fewest:
            raise ValueError(
                f"early_stop.kind: of {self.num_judgements} judgements none can be left out; "
                f"type judge.num_judgements={fewest} or more, or judge.early_stop.kind=none"
            )

    def _check_mix(self) -> None:
        if self.kind == "mixed" and not self.mix:
            raise ValueError("mix: is empty; for kind=mixed type +judge.mix={generative:0.8,rule:0.2}")
        for name, weight in self.mix.items():
            if name not in COMPONENTS:
                raise ValueError(f"mix: unknown component {name!r}; known: {', '.join(COMPONENTS)}")
            if not 0 < weight < math.inf:
                raise ValueError(f"mix.{name}: a weight must be above 0, got {weight}; leave out what isn't to count")
        if self.kind == "mixed" and self.vote == "sum":
            raise ValueError("vote: a sum goes from k to 10 k, and mixes with no other score; type judge.vote=mean")
        if self.kind == "own" and not self.target:
            raise ValueError("target: is empty; for kind=own type judge.target=my_package.my_module.MyJudge")

    def _check_deadline(self) -> None:
        if not 0 < self.min_tokens_per_s < math.inf:
            raise ValueError(f"min_tokens_per_s: must be above 0, got {self.min_tokens_per_s}")
        needed_s = self.max_new_tokens / self.min_tokens_per_s
        if not needed_s <= self.timeout_s < math.inf:
            raise ValueError(
                f"timeout_s: {self.timeout_s:g} s is less than max_new_tokens / min_tokens_per_s = {needed_s:g} s; "
                f"type judge.timeout_s={needed_s:g} or more, or a truer judge.min_tokens_per_s"
            )


LABEL_RULES = ("exact", "same_side")


@dataclass(frozen=True)
class LabelConfig:
    """When a judgement of one response agrees with its label. Of several, the labelled best must be strictly first."""

    rule: str = "exact"  # exact: the very score (SPCT); same_side: both at least `pass_score`, or both below
    pass_score: int = 8  # of same_side, and of rollouts that a rule calls right: a judge that passes them scores so

    def __post_init__(self) -> None:
        if self.rule not in LABEL_RULES:
            raise ValueError(f"rule: unknown value {self.rule!r}; known: {', '.join(LABEL_RULES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The scores that a judge may give: integers, both ends included."""

    low: int = 1
    high: int = 10

    def reward_of(self, score: float) -> float:
        """0 at the low end, 1 at the high end."""
        return (score - self.low) / (self.high - self.low)
