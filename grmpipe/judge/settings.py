"""What a user can set about judging. Frozen, checked; opens no file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

KINDS = ("generative", "rule", "mixed", "label")
PARSERS = ("score_line", "boxed")
VOTES = ("mean", "median")
RULES = ("exact_answer", "contains_reference")
COMPONENTS = ("generative", "rule")
PARSER_OF_SHIPPED_TEMPLATE = {"tiny": "score_line", "pointwise": "score_line", "boxed": "boxed"}


@dataclass(frozen=True)
class JudgeConfig:
    """How rollouts are judged, when judging has failed, and what the alarm listens to."""

    kind: str = "generative"
    num_judgements: int = 1  # k: the GRM is asked so often about each rollout
    max_new_tokens: int = 160
    temperature: float = 1.0
    template: str = "tiny"  # a shipped one (tiny, pointwise, boxed), or the path of a Jinja file
    parser: str = "score_line"
    structured: bool = False  # the engine's grammar holds judgements to what the parser reads
    score_min: int = 1
    score_max: int = 10
    vote: str = "mean"
    reasks: int = 1  # a judgement that doesn't parse or is cut is asked for again so often
    timeout_s: float = 120.0  # of one judgement, its wait in the engine's queue included
    min_tokens_per_s: float = 10.0  # declared: the slowest speed of one judgement that is still fine
    max_failure_rate: float = 0.2  # of verdicts in the window; above it judging pauses, then the run stops
    failure_window: int = 256  # verdicts
    pause_s: float = 30.0
    width: int = 1024  # judgements in flight
    rule: str = "exact_answer"
    mix: dict[str, float] = field(default_factory=dict)  # kind=mixed: component (generative, rule) -> weight
    anchors: int = 64  # rollouts with a known truth that the GRM is tried on
    anchor_every: int = 10  # steps
    anchor_min_score_rise: float = 1.0  # the alarm's first half, on the GRM's scale
    anchor_min_gold_fall: float = 0.10  # its second half, as a share of the anchors

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_ranges()
        self._check_mix()
        self._check_deadline()

    def _check_choices(self) -> None:
        for key, value, known in (
            ("kind", self.kind, KINDS),
            ("parser", self.parser, PARSERS),
            ("vote", self.vote, VOTES),
            ("rule", self.rule, RULES),
        ):
            if value not in known:
                raise ValueError(f"{key}: unknown value {value!r}; known: {', '.join(known)}")
        if not self.template:
            raise ValueError("template: is empty; type tiny, pointwise, boxed or the path of a Jinja file")
        wanted = PARSER_OF_SHIPPED_TEMPLATE.get(self.template, self.parser)
        if self.parser != wanted:
            raise ValueError(
                f"parser: {self.parser} can't read what template {self.template} asks for; type judge.parser={wanted}"
            )

    def _check_ranges(self) -> None:
        for key, count in (
            ("num_judgements", self.num_judgements),
            ("max_new_tokens", self.max_new_tokens),
            ("failure_window", self.failure_window),
            ("width", self.width),
            ("anchors", self.anchors),
            ("anchor_every", self.anchor_every),
        ):
            if count < 1:
                raise ValueError(f"{key}: must be at least 1, got {count}")
        for key, value in (
            ("temperature", self.temperature),
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
        if self.temperature == 0 and self.num_judgements > 1:
            raise ValueError(
                f"num_judgements: {self.num_judgements} greedy judgements are all the same; "
                "type judge.num_judgements=1 or a judge.temperature above 0"
            )

    def _check_mix(self) -> None:
        if self.kind == "mixed" and not self.mix:
            raise ValueError("mix: is empty; for kind=mixed type +judge.mix={generative:0.8,rule:0.2}")
        for name, weight in self.mix.items():
            if name not in COMPONENTS:
                raise ValueError(f"mix: unknown component {name!r}; known: {', '.join(COMPONENTS)}")
            if not 0 < weight < math.inf:
                raise ValueError(f"mix.{name}: a weight must be above 0, got {weight}; leave out what isn't to count")

    def _check_deadline(self) -> None:
        if not 0 < self.min_tokens_per_s < math.inf:
            raise ValueError(f"min_tokens_per_s: must be above 0, got {self.min_tokens_per_s}")
        needed_s = self.max_new_tokens / self.min_tokens_per_s
        if not needed_s <= self.timeout_s < math.inf:
            raise ValueError(
                f"timeout_s: {self.timeout_s:g} s is less than max_new_tokens / min_tokens_per_s = {needed_s:g} s; "
                f"type judge.timeout_s={needed_s:g} or more, or a truer judge.min_tokens_per_s"
            )
