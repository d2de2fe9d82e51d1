"""Lines of a run's journals, as far as the index needs them. Pure; unknown fields are skipped unread, so that token ids
and log-probs cost nothing.

`read_line` checks all that it returns: the types of all fields, the bounds of numbers, and that lists which belong
together are of one length. What uses a line needs no check of its own.
"""

import functools
import re
import statistics
from collections.abc import Iterator, Mapping
from typing import Annotated, TypeVar

import msgspec

from grmpipe.observe.records import TEXT
from grmpipe.viewer.queries import snippet

DROPPED = "(text dropped: journals.keep)"
# Sums over all turns of all lines still fit the 64 bits of an index, and means over them are finite.
Whole = Annotated[int, msgspec.Meta(ge=-(2**40), le=2**40)]
Number = Annotated[float, msgspec.Meta(ge=-1e100, le=1e100)]
# Half of a surrogate pair, which byte-level models sample and msgspec refuses.
HALF_PAIR = re.compile(rb"(?i)\\ud[89ab]..(?!\\ud[c-f]..)|(?<!\\ud[89ab]..)\\ud[c-f]..")


class Line(msgspec.Struct, frozen=True):
    """run: the one that wrote it. step: a step of training, or the one after which an evaluation was. prompts: those of
    an evaluation, whose name is never that of training (empty) or of labelled work (with a space).
    """

    run: str = ""
    step: Whole | None = None
    prompts: Annotated[str, msgspec.Meta(pattern=r"\A\S+\Z")] = "held_out"


L = TypeVar("L", bound=Line)


class Span(msgspec.Struct, frozen=True):
    version: Whole = 0
    start: Whole = 0
    end: Whole = 0


class RewardLine(msgspec.Struct, frozen=True):
    value: Number = 0.0


class MessageLine(msgspec.Struct, frozen=True):
    role: str = ""
    content: str = ""


class ToolCallLine(msgspec.Struct, frozen=True):
    name: str = ""
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class PromptLine(msgspec.Struct, frozen=True):
    prompt_id: str = ""
    messages: list[MessageLine] = []
    source: str = ""
    reference: str | None = None


class CompletionLine(msgspec.Struct, frozen=True):
    text: str = ""
    versions: list[Span] = []
    unseen_tokens: Whole = 0
    thought_chars: Whole = 0

    @property
    def num_tokens(self) -> int:
        return max((span.end for span in self.versions), default=0) or self.unseen_tokens


class TurnLine(CompletionLine, frozen=True):
    replies: list[MessageLine] = []
    faults: list[str] = []
    tool_calls: list[ToolCallLine] = []


class RolloutLine(Line, frozen=True, kw_only=True):
    group_id: str
    sibling: Whole
    turns: list[TurnLine]
    prompt: PromptLine = PromptLine()
    status: str = ""
    reason: str = ""
    opening: list[MessageLine] = []
    right: Number | bool | None = None
    thinned: str = ""

    @property
    def version(self) -> int | None:
        return min((span.version for turn in self.turns for span in turn.versions), default=None)

    @property
    def question(self) -> str:
        return self.prompt.messages[-1].content if self.prompt.messages else ""

    @property
    def answer(self) -> str:
        return self.turns[-1].text[self.turns[-1].thought_chars :] if self.turns else ""

    def texts(self) -> Iterator[str]:
        """What a search for words finds."""
        yield from (message.content for message in (*self.prompt.messages, *self.opening))
        yield self.prompt.reference or ""
        for turn in self.turns:
            yield turn.text
            yield from (f"{call.name} {bytes(call.arguments).decode('utf-8', 'replace')}" for call in turn.tool_calls)
            yield from (message.content for message in turn.replies)

    def snippets(self) -> dict[str, object]:
        if self.thinned == TEXT:
            return {"question": DROPPED, "answer": DROPPED}
        return {"question": snippet(self.question), "answer": snippet(self.answer, from_end=True)}

    def row(self) -> dict[str, object]:
        faults = sorted({fault for turn in self.turns for fault in turn.faults})
        return {
            "prompt_id": self.prompt.prompt_id,
            "source": self.prompt.source,
            "status": self.reason or self.status,
            "version": self.version,
            "tokens": sum(turn.num_tokens for turn in self.turns),
            "turns": len(self.turns),
            "faults": " ".join(faults),
            **({} if self.right is None else {"truth": self.right}),  # in training it is in trained.jsonl
        }


class VerdictLine(msgspec.Struct, frozen=True):
    rewards: list[RewardLine] = []
    score: Number | None = None
    score_std: Number | None = None
    num_judgements: Whole = 0

    def row(self) -> dict[str, object]:
        if not self.rewards:  # failed, or in a run without rewards
            return {"score": None, "reward": None, "spread": None, "votes": self.num_judgements}
        reward = sum(span.value for span in self.rewards)
        return {"score": self.score, "reward": reward, "spread": self.score_std, "votes": self.num_judgements}


class FailedLine(msgspec.Struct, frozen=True):
    """sibling: of a labelled item, the response that it is about."""

    stage: str = ""
    cause: str = ""
    detail: str = ""
    judge: str = ""
    text: str = ""
    completion: CompletionLine | None = None
    sibling: Whole = 0


class JudgementLine(msgspec.Struct, frozen=True):
    completion: CompletionLine = CompletionLine()


class OwnLine(msgspec.Struct, frozen=True):
    """The report of one of several judges."""

    verdict: VerdictLine | None = None
    failed: FailedLine | None = None

    def outcome(self) -> dict[str, object]:
        """The numbers of the verdict; a failed one has only its cause."""
        numbers = (self.verdict or VerdictLine()).row()
        return {**numbers, "failure": self.failed.cause if self.failed is not None else ""}


class ReportLine(Line, frozen=True, kw_only=True):
    group_id: str
    sibling: Whole
    verdict: VerdictLine | None = None
    failed: FailedLine | None = None
    judgements: list[JudgementLine] = []
    failures: list[FailedLine] = []
    by_judge: dict[str, OwnLine] = {}
    principles: CompletionLine | None = None

    def outcomes(self) -> Mapping[str, dict[str, object]]:
        """The outcome of all judges under the name "", and that of each of several under its own."""
        of_all = OwnLine(verdict=self.verdict, failed=self.failed)
        return {name: own.outcome() for name, own in {"": of_all, **self.by_judge}.items()}

    def texts(self) -> Iterator[str]:
        if self.principles is not None:
            yield self.principles.text
        yield from (one.completion.text for one in self.judgements)
        for failed in self.failures:
            yield failed.detail
            if failed.completion is not None:
                yield failed.completion.text


class ScoresLine(Line, frozen=True):
    """The verdicts on the responses to a labelled item, by their places: scores, and causes where there is none."""

    scores: dict[str, Number] = {}
    failed: dict[str, str] = {}

    def describe(self, sibling: int) -> dict[str, object]:
        place = str(sibling)
        return {"score": self.scores.get(place), "failure": self.failed.get(place, "")}


class SaidLine(msgspec.Struct, frozen=True):
    """A judgement of a labelled item. siblings: the responses that it is about, in the order of the scores. criteria:
    of a rubric, where the scores are those of some only.
    """

    siblings: list[Whole] = []
    scores: list[Number] = []
    criteria: list[str] = []
    text: str = ""
    judge: str = ""


class ItemLine(ScoresLine, frozen=True, kw_only=True):
    """A line of judged.jsonl: a labelled item, whose responses are the siblings of a group."""

    item_id: str
    subset: str = ""
    outcome: str = ""
    prompt: PromptLine = PromptLine()
    responses: list[str] = []
    labels: list[Number] = []
    by_judge: dict[str, ScoresLine] = {}
    judgements: list[SaidLine] = []
    failures: list[FailedLine] = []

    def __post_init__(self) -> None:
        if len(self.labels) != len(self.responses):
            raise ValueError(f"{len(self.labels)} labels for {len(self.responses)} responses")

    def row(self, sibling: int) -> dict[str, object]:
        return {
            "prompt_id": self.prompt.prompt_id,
            "source": self.subset,
            "outcome": self.outcome,
            "truth": self.labels[sibling],
            "votes": len(votes := self.votes(sibling)),
            "spread": statistics.pstdev(votes) if len(votes) > 1 else None,
            "faults": "",
            **self.describe(sibling),
        }

    def votes(self, sibling: int) -> list[Number]:
        """The scores that the first judge's judgements give to a response."""
        about = [said for said in self.judgements if sibling in said.siblings]
        about = [said for said in about if said.judge == about[0].judge]
        return [said.scores[place] for said in about if (place := said.siblings.index(sibling)) < len(said.scores)]

    def snippets(self, sibling: int) -> dict[str, object]:
        question = self.prompt.messages[-1].content if self.prompt.messages else ""
        return {"question": snippet(question), "answer": snippet(self.responses[sibling], from_end=True)}

    def texts(self, sibling: int) -> Iterator[str]:
        yield from (message.content for message in self.prompt.messages)
        yield self.responses[sibling]

    def texts_about(self, sibling: int) -> Iterator[str]:
        yield from (said.text for said in self.judgements if sibling in said.siblings)
        yield from (failed.detail for failed in self.failures if failed.sibling == sibling)


class GroupLine(Line, frozen=True, kw_only=True):
    group_id: str
    outcome: str = ""
    cause: str | None = None


class TrainedLine(Line, frozen=True, kw_only=True):
    group_id: str
    sibling: Whole
    advantage: Number | None = None
    right: Number | bool | None = None

    def row(self) -> dict[str, object]:
        return {"step": self.step, "advantage": self.advantage, "truth": self.right}


@functools.cache
def make_decoder(kind: type[L]) -> msgspec.json.Decoder[L]:
    return msgspec.json.Decoder(kind)


def read_line(line: bytes, kind: type[L]) -> L:
    """A line, checked. Raises ValueError."""
    try:
        try:
            read: L = make_decoder(kind).decode(line)
        except msgspec.DecodeError:
            if not HALF_PAIR.search(line):
                raise
            read = make_decoder(kind).decode(HALF_PAIR.sub(rb"\\ufffd", line))
        return read
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
