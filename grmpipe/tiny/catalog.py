"""What a path that begins with tiny:// names: models, prompts, labelled judgements."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from grmpipe.models.types import Message
from grmpipe.tiny.comparisons import make_comparisons
from grmpipe.tiny.examples import IS_RIGHT, PHRASES, says
from grmpipe.tiny.judgements import RankedTexts, make_judgements
from grmpipe.tiny.problems import LARGE, AnsweredSum, Split, make_answered_sums, make_problems
from grmpipe.tiny.resolve import SCHEME, resolve_model
from grmpipe.tiny.short_answers import make_short_questions
from grmpipe.tiny.walks import format_entries, make_walks
from grmpipe.types import Criterion, Labelled, Prompt, RankedResponses, ScoredResponse, mark_best

__all__ = ["make_labelled", "make_prompts", "resolve_model"]

TRAIN: Split = "train"
HELD_OUT: Split = "held_out"


def make_prompts(path: str, count: int, seed: int) -> tuple[Prompt, ...]:
    """`count` prompts of a problem set, or all of one that has fewer. Raises ValueError for an unknown one."""
    if path not in SETS:
        raise ValueError(f"{path}: unknown problem set; known: {', '.join(SETS)}")
    make, split = SETS[path]
    name = path.removeprefix(SCHEME).replace("/", "-")
    return tuple(
        Prompt(
            prompt_id=f"tiny-{name}-{index}",
            messages=(Message(role="user", content=row.question),),
            source=row.kind or path,
            reference=str(row.answer),
            info=row.info,
            rubric=row.rubric,
        )
        for index, row in enumerate(make(split, count, seed))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyTask:
    """A generated task. `kind` is its source in a set of several kinds, and empty in all others."""

    question: str
    answer: int | str
    info: Mapping[str, object] = field(default_factory=dict)
    kind: str = ""
    rubric: tuple[Criterion, ...] = ()


Make = Callable[[Split, int, int], Iterator[TinyTask]]


def small_sums(split: Split, count: int, seed: int) -> Iterator[TinyTask]:
    yield from (TinyTask(question=one.question, answer=one.answer) for one in make_problems(split, count, seed))


def sums_with_rubric(split: Split, count: int, seed: int) -> Iterator[TinyTask]:
    """The rubric knows one of the two phrases by which tiny://policy_phrases impresses tiny://grm_criteria."""
    rubric = Criterion(text=IS_RIGHT, name="right"), Criterion(text=says(PHRASES[0]), weight=-1.0, name="phrase")
    yield from (replace(one, rubric=rubric) for one in small_sums(split, count, seed))


def large_sums(split: Split, count: int, seed: int) -> Iterator[TinyTask]:
    yield from (TinyTask(question=one.question, answer=one.answer) for one in make_problems(split, count, seed, LARGE))


def comparisons(split: Split, count: int, seed: int) -> Iterator[TinyTask]:
    yield from (TinyTask(question=one.question, answer=one.answer) for one in make_comparisons(split, count, seed))


def two_kinds(split: Split, count: int, seed: int) -> Iterator[TinyTask]:
    """Sums and comparisons in turn; of an odd count there is one sum more."""
    sums, compared = small_sums(split, (count + 1) // 2, seed), comparisons(split, count // 2, seed)
    for arithmetic, comparison in zip_longest(sums, compared):
        yield replace(arithmetic, kind="arithmetic")
        if comparison:
            yield replace(comparison, kind="comparison")


def short_answers(split: Split, count: int, seed: int) -> Iterator[TinyTask]:
    """Always the same ones, `count` at most: they are facts, which no seed makes."""
    for one in make_short_questions(split)[:count]:
        yield TinyTask(question=one.question, answer=one.answer, kind=one.kind)


def walks(split: Split, count: int, seed: int) -> Iterator[TinyTask]:
    for walk in make_walks(split, count, seed):
        store = {name: format_entries(name, entries) for name, entries in walk.graph.items()}
        yield TinyTask(question=walk.question, answer=walk.answer, info={"store": store, "path": list(walk.path)})


SETS: Mapping[str, tuple[Make, Split]] = {
    "tiny://train": (small_sums, TRAIN),
    "tiny://held_out": (small_sums, HELD_OUT),
    "tiny://rubric/train": (sums_with_rubric, TRAIN),
    "tiny://rubric/held_out": (sums_with_rubric, HELD_OUT),
    "tiny://tools/train": (large_sums, TRAIN),
    "tiny://tools/held_out": (large_sums, HELD_OUT),
    "tiny://walk/train": (walks, TRAIN),
    "tiny://walk/held_out": (walks, HELD_OUT),
    "tiny://comparison/train": (comparisons, TRAIN),
    "tiny://comparison/held_out": (comparisons, HELD_OUT),
    "tiny://short_answers/train": (short_answers, TRAIN),
    "tiny://short_answers/held_out": (short_answers, HELD_OUT),
    "tiny://two_kinds/train": (two_kinds, TRAIN),
    "tiny://two_kinds/held_out": (two_kinds, HELD_OUT),
}


# The split of the problems, and what is added to the seed: with that of tiny://train they would be its problems.
LABELLED_SETS: Mapping[str, tuple[Split, int]] = {
    "tiny://judgements": (TRAIN, 0),
    "tiny://judgements_held_out": (HELD_OUT, 0),
    "tiny://judgements_on_others": (TRAIN, 1),
}


SUMS_SETS: Mapping[str, Split] = {"tiny://sums": TRAIN, "tiny://sums_held_out": HELD_OUT}


def make_labelled(path: str, count: int, seed: int) -> tuple[Labelled, ...]:
    """`count` labelled judgements. Raises ValueError for an unknown set."""
    if path in SUMS_SETS:
        return tuple(label_sum(path, *each) for each in enumerate(make_answered_sums(SUMS_SETS[path], count, seed)))
    if path not in LABELLED_SETS:
        raise ValueError(f"{path}: unknown labelled data; known: {', '.join((*LABELLED_SETS, *SUMS_SETS))}")
    items: list[Labelled] = []
    split, more = LABELLED_SETS[path]
    for index, made in enumerate(make_judgements(split, count, seed + more)):
        item_id = f"{path.removeprefix(SCHEME)}-{index}"
        message = Message(role="user", content=made.problem.question)
        prompt = Prompt(prompt_id=item_id, messages=(message,), source=path, reference=str(made.problem.answer))
        if isinstance(made, RankedTexts):
            items.append(
                RankedResponses(
                    item_id=item_id,
                    prompt=prompt,
                    responses=made.texts,
                    grades=mark_best(made.best, len(made.texts)),
                    subset=f"ranked/{made.kind}",
                )
            )
        else:
            items.append(
                ScoredResponse(
                    item_id=item_id, prompt=prompt, response=made.text, score=made.score, subset=f"scored/{made.kind}"
                )
            )
    return tuple(items)


def label_sum(path: str, index: int, made: AnsweredSum) -> ScoredResponse:
    item_id = f"{path.removeprefix(SCHEME)}-{index}"
    message = Message(role="user", content=made.problem.question)
    prompt = Prompt(prompt_id=item_id, messages=(message,), source=path, reference=str(made.problem.answer))
    score, kind = (10, "right") if made.is_right else (1, "wrong")
    return ScoredResponse(item_id=item_id, prompt=prompt, response=made.text, score=score, subset=f"sums/{kind}")
