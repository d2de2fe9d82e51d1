"""The protocols of judging by name: what each shows to the GRM, scores and needs. Imports none of their code.

A new one is a session in grmpipe/judge/protocols/, a row here, a template, a YAML in conf/judge/ and a test. A user's
own is named by the dotted path of a session, or of a JudgeProtocol if the defaults below don't fit it.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from grmpipe.config.keys.dotted_path import check_takes, find_at, is_dotted, unknown_value


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeProtocol:
    """What other modules must know of a protocol.

    session:     dotted path of the class that judges one group: (JudgeContext, Prompt, group_id, size) -> JudgeSession.
    about:       what one judgement is about: one response, a pair of siblings, or all siblings of the group.
    scores:      what gets one score each: the responses shown, the criteria of the prompt's rubric, the steps of the
                 response, or one of its turns.
    templates:   shipped templates for this protocol -> the parser of their answers.
    votes:       votes that work on its judgements; empty: all.
    early_stops: kinds of judge.early_stop that fit it.
    both_orders: half of a pair's judgements show it in the other order, so their number must be even.
    """

    session: str
    about: Literal["response", "pair", "group"] = "response"
    scores: Literal["responses", "criteria", "steps", "turns"] = "responses"
    templates: Mapping[str, str] = field(default_factory=dict)
    votes: tuple[str, ...] = ()
    early_stops: tuple[str, ...] = ()
    both_orders: bool = False

    @property
    def compares(self) -> bool:
        """Whether a judgement shows siblings next to each other."""
        return self.about != "response"

    @property
    def gives_one_score(self) -> bool:
        return not self.compares and self.scores in ("responses", "turns")

    @property
    def is_of_whole(self) -> bool:
        """Whether a judgement shows whole responses."""
        return self.scores in ("responses", "criteria")

    @property
    def template_fields(self) -> tuple[str, ...]:
        """The template's fields for the work under judgement: `responses` and `steps` are lists of texts, all others
        are texts.
        """
        if self.compares:
            return ("responses",)
        return {"steps": ("steps",), "turns": ("history", "turn")}.get(self.scores, ("response",))

    def responses_shown(self, size: int) -> int:
        """The number of responses in one judgement, for a group of `size` siblings."""
        return {"response": 1, "pair": min(2, size), "group": size}[self.about]

    def subjects(self, size: int, pairs: str) -> int:
        """The number of responses, pairs or groups that are judged in a group of `size` siblings. `pairs`:
        judge.split.pairs.
        """
        num_pairs = size * (size - 1) // 2
        if pairs == "ring":
            num_pairs = min(num_pairs, size)
        return {"response": size, "pair": num_pairs, "group": 1}[self.about]


DEFAULT_PROTOCOL = "pointwise"
PROTOCOLS: dict[str, JudgeProtocol] = {
    DEFAULT_PROTOCOL: JudgeProtocol(
        session="grmpipe.judge.protocols.pointwise.PointwiseSession",
        templates={
            "tiny": "score_line",
            "pointwise": "score_line",
            "short": "score",
            "yes_no": "yes_no",
            "boxed": "boxed",
            "reference": "boxed",
            "shared_principles": "boxed",
            "mt_bench": "rating",
            "prometheus2": "result",
            "selene": "bold_result",
            "ce_rm": "overall_boxed",
            "compass_verifier": "grade",
            "compass_verifier_cot": "grade_box",
            "xverify": "correct",
            "genrm_cot": "is_correct",
        },
        early_stops=("relaxed",),
    ),
    "listwise": JudgeProtocol(
        session="grmpipe.judge.protocols.listwise.ListwiseSession",
        about="group",
        templates={
            "listwise": "boxed",
            "listwise_shared_principles": "boxed",
            "deepseek_grm": "boxed",
            "rewardanything": "scores_field",
        },
    ),
    "pairwise": JudgeProtocol(
        session="grmpipe.judge.protocols.pairwise.PairwiseSession",
        about="pair",
        templates={
            "pairwise": "boxed",
            "mt_bench_pairwise": "letter_or_tie",
            "rewardbench": "letter",
            "skywork_critic": "letter",
            "rm_r1": "answer_letter",
            "rm_r1_distilled": "answer_letter",
            "judgelrm": "answer_scores",
            "compassjudger2": "choice_field",
            "prometheus2_pairwise": "result_letter",
            "selene_pairwise": "bold_result_letter",
            "nemotron_genrm": "ranking_box",
            "nemotron_genrm_json": "ranking_field",
            "arena_hard": "margin",
            "rubric_rm": "winner_letter",
            "br_rm": "which_box",
            "fare": "verdict_letter",
        },
        votes=("majority", "mean"),
        early_stops=("exact",),  # a fixed winner fixes the rewards of a pair only
        both_orders=True,
    ),
    "rubric": JudgeProtocol(
        session="grmpipe.judge.protocols.rubric.RubricSession",
        scores="criteria",
        templates={"rubric": "boxed", "rubric_yes_no": "yes_no", "tiny_criteria": "score_line"},
        early_stops=("relaxed",),
    ),
    "steps": JudgeProtocol(
        session="grmpipe.judge.protocols.stepwise.StepwiseSession",
        scores="steps",
        templates={"steps": "boxed"},
    ),
    "turns": JudgeProtocol(
        session="grmpipe.judge.protocols.turnwise.TurnwiseSession",
        scores="turns",
        templates={"turns": "boxed"},
    ),
}
SHIPPED_TEMPLATES = {  # name -> (the parser of its answers, its protocol)
    template: (parser, name) for name, protocol in PROTOCOLS.items() for template, parser in protocol.templates.items()
}


@functools.cache
def protocol_named(name: str) -> JudgeProtocol:
    """A row of PROTOCOLS, or the protocol at a dotted path. Raises ValueError that begins with the key."""
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    if not is_dotted(name):
        raise unknown_value(name, "protocol", PROTOCOLS)
    found = find_at(name, "protocol")
    protocol = found if isinstance(found, JudgeProtocol) else JudgeProtocol(session=name)
    check_takes(protocol.session, "protocol", ("context", "prompt", "group_id", "size"))
    return protocol
