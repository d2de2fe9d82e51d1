"""The ways to ask a GRM about rollouts, by name: what each shows, scores and needs. Imports no code of theirs.

A new one is a session in grmpipe/judge/protocols/, a row here, a template, a YAML in conf/judge/ and a test. One of the
user's own is named by its dotted path: that of a session, or of a JudgeProtocol where the defaults below don't fit it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from grmpipe.config.dotted_path import check_takes, found_at, is_dotted, unknown_value


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeProtocol:
    """What others must know of a protocol.

    session:     dotted path of what judges one group: (JudgeContext, Prompt, group_id, size) -> JudgeSession.
    about:       what one judgement is about: one response, a pair of siblings, or all siblings of the group.
    scores:      what gets a score each: the responses that are shown, the criteria of the prompt's rubric, or the steps
                 of the response.
    templates:   shipped ones that ask for it -> the parser that reads their answers.
    votes:       those that can decide over its judgements; empty: all.
    early_stops: kinds of judge.early_stop that fit it.
    both_orders: half of a pair's judgements show it in the other order, so their number is even.
    """

    session: str
    about: Literal["response", "pair", "group"] = "response"
    scores: Literal["responses", "criteria", "steps"] = "responses"
    templates: Mapping[str, str] = field(default_factory=dict)
    votes: tuple[str, ...] = ()
    early_stops: tuple[str, ...] = ()
    both_orders: bool = False

    @property
    def compares(self) -> bool:
        """Does a judgement see siblings beside each other?"""
        return self.about != "response"

    @property
    def gives_one_score(self) -> bool:
        return not self.compares and self.scores == "responses"

    @property
    def template_field(self) -> str:
        """What of the policy's a template shows: `response` is a text, `responses` and `steps` are lists of texts."""
        return "responses" if self.compares else "steps" if self.scores == "steps" else "response"

    def responses_shown(self, size: int) -> int:
        """In one judgement, of a group of so many siblings."""
        return {"response": 1, "pair": min(2, size), "group": size}[self.about]

    def subjects(self, size: int, pairs: str) -> int:
        """How many responses, pairs or groups are judged of a group of so many siblings. `pairs`: judge.pairs."""
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
            "boxed": "boxed",
            "reference": "boxed",
            "shared_principles": "boxed",
        },
        early_stops=("relaxed",),
    ),
    "listwise": JudgeProtocol(
        session="grmpipe.judge.protocols.listwise.ListwiseSession",
        about="group",
        templates={"listwise": "boxed", "listwise_shared_principles": "boxed"},
    ),
    "pairwise": JudgeProtocol(
        session="grmpipe.judge.protocols.pairwise.PairwiseSession",
        about="pair",
        templates={"pairwise": "boxed"},
        votes=("majority",),
        early_stops=("exact",),  # a winner fixes no rewards but a pair's
        both_orders=True,
    ),
    "rubric": JudgeProtocol(
        session="grmpipe.judge.protocols.rubric.RubricSession",
        scores="criteria",
        templates={"rubric": "boxed"},
        early_stops=("relaxed",),
    ),
    "steps": JudgeProtocol(
        session="grmpipe.judge.protocols.stepwise.StepwiseSession",
        scores="steps",
        templates={"steps": "boxed"},
    ),
}
SHIPPED_TEMPLATES = {  # name -> the parser that reads the answers to it, the protocol that it asks for
    template: (parser, name) for name, protocol in PROTOCOLS.items() for template, parser in protocol.templates.items()
}


@functools.cache
def protocol_named(name: str) -> JudgeProtocol:
    """Of a row of PROTOCOLS, or of a dotted path. Raises ValueError that begins with the key."""
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    if not is_dotted(name):
        raise unknown_value(name, "protocol", PROTOCOLS)
    found = found_at(name, "protocol")
    protocol = found if isinstance(found, JudgeProtocol) else JudgeProtocol(session=name)
    check_takes(protocol.session, "protocol", ("context", "prompt", "group_id", "size"))
    return protocol
