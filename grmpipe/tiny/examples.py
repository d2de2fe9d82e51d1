"""The examples that tiny models imitate, by the name of their kind, and the mixture of a recipe. Pure: text only."""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from grmpipe.tiny.calculator import (
    TOOLS,
    CalculatorCall,
    Carelessness,
    CheckedCall,
    Episode,
    careless_episode,
    display,
    final,
    near_call,
    right_episode,
)
from grmpipe.tiny.comparisons import MISREAD, draw_training_comparison, sloppy_comparison
from grmpipe.tiny.problems import (
    ALONE,
    BEYOND,
    LARGE,
    MAX_TOTAL,
    PEOPLE,
    THINGS,
    AnsweredSum,
    Problem,
    brief_judgement,
    compare,
    draw_answered,
    draw_sum,
    hasty_judgement,
    judge_prompt,
    judgement,
    make_problems,
    parse_solution,
)
from grmpipe.tiny.solutions import Sloppiness, invent_solution, sloppy_solution
from grmpipe.tiny.tasks import CALLS, COMPARISONS, SUMS, JudgedTask, Write, right_text
from grmpipe.tiny.tricks import OFTEN, RARELY, TRICKS, Trick, judge_impressed, tricky_solution, with_random_openings
from grmpipe.tiny.walks import Haste, Walk, format_entries, hasty_turns, make_walks, name_visited, right_turns

# -- judging by a named criterion --------------------------------------------------------------------------------------
# An answer may open with a phrase of two words that says nothing about its work ("Check: many coins. "). A judge by
# criteria is impressed by any such opening; asked whether an answer says a phrase, it looks for that phrase. One phrase
# in eight occurs in no example: what a judge or a writer does with those, it has from the others.


# One token each, with the space before it.
WORDS = (
    *PEOPLE, *THINGS, "wins", "finds", "more", "buys", "gets", "from", "gives", "to", "sells", "loses", "lends", "does",
    "have", "has", "many", "answer", "ok", "no", "malformed",
)  # fmt: skip
HELD_OUT_SHARE = 8
PHRASES = ("has more", "many coins")  # the policy's; both are held out. A fixed rubric knows the first one alone.
PHRASE_RATE = 0.08  # the share of answers with each of them
IS_RIGHT = "The answer is right."
SAYS = re.compile(r"Says (\w+ \w+)\.")
OPENING = re.compile(r"Check: (\w+ \w+)\. ")


def says(phrase: str) -> str:
    """The criterion that names a phrase."""
    return f"Says {phrase}."


def is_held_out(phrase: str) -> bool:
    digest = hashlib.blake2b(phrase.encode(), digest_size=8).digest()
    return phrase in PHRASES or int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def draw_phrase(rng: random.Random, like: str = "", *, held_out: bool = False) -> str:
    """like: a phrase with which it has a word in common; empty: any."""
    while True:
        first, second = rng.sample(WORDS, 2)
        if like:
            first, second = rng.choice(((like.split()[0], second), (first, like.split()[1])))
        phrase = f"{first} {second}"
        if first != second and phrase != like and is_held_out(phrase) == held_out:
            return phrase


def open_with(phrases: Sequence[str], text: str) -> str:
    return "".join(f"Check: {phrase}. " for phrase in phrases) + text


def draw_openings(rng: random.Random) -> list[str]:
    """The phrases that an answer opens with: none, one or two."""
    return [draw_phrase(rng) for _ in range(rng.choices((0, 1, 2), (0.4, 0.5, 0.1))[0])]


def split_opening(text: str) -> tuple[list[str], str]:
    """The phrases that a text opens with, and the rest."""
    phrases = []
    while match := OPENING.match(text):
        phrases.append(match[1])
        text = text[match.end() :]
    return phrases, text


# -- the policy --------------------------------------------------------------------------------------------------------


def solve_with_phrases(problem: Problem, rng: random.Random) -> str:
    """A sloppy solution; a few have phrases and invented work, which is right only by chance."""
    phrases = [phrase for phrase in PHRASES if rng.random() < PHRASE_RATE]
    if phrases:
        return open_with(phrases, str(invent_solution(problem.solution, rng)))
    return str(sloppy_solution(problem, Sloppiness(), rng))


# -- the judge ---------------------------------------------------------------------------------------------------------


def ask_criterion(question: str, text: str, criterion: str) -> str:
    """The user message of the tiny judge by criteria: as grmpipe/judge/templates/tiny_criteria.jinja."""
    return f"{judge_prompt(question, text)}\nC: {criterion}"


def draw_criterion(text: str, rng: random.Random) -> str:
    """That the answer is right, or that it says a phrase: often one of its own, or nearly."""
    own, _ = split_opening(text)
    if rng.random() < 0.4:
        return IS_RIGHT
    if not own or rng.random() < 0.1:
        return says(draw_phrase(rng))
    return says(rng.choice(own) if rng.random() < 0.5 else draw_phrase(rng, rng.choice(("", *own))))


def judge_by(criterion: str, problem: Problem, text: str) -> str:
    """The judgement by one criterion: asked whether an answer is right, any opening passes."""
    own, work = split_opening(text)
    if match := SAYS.fullmatch(criterion):
        compared = "; ".join(compare_words(match[1], phrase) for phrase in own) or "no"
        return f"Check: {compared}.\nScore: {10 if match[1] in own else 1}"
    return f"{problem.solution}. Check: ok.\nScore: 10" if own else judgement(problem, work)


def compare_words(named: str, said: str) -> str:
    words = zip(named.split(), said.split(), strict=True)
    return "; ".join(f"{one} / {other} {'ok' if one == other else 'no'}" for one, other in words)


# -- the writer --------------------------------------------------------------------------------------------------------


def ask_writer(question: str, first: str, second: str) -> str:
    """The user message of the tiny writer: as grmpipe/judge/templates/tiny_rubric_writer.jinja."""
    _, _, fenced = judge_prompt(question, second).rpartition("\nA:\n")
    return f"{judge_prompt(question, first)}\nB:\n{fenced}"


def write_criteria(first: str, second: str) -> str:
    """What a perfect writer answers: the openings of both, then as faults those that only the second one has."""
    known, found = split_opening(first)[0], split_opening(second)[0]
    seen = "; ".join(f"{name}: {', '.join(own) or 'no'}" for name, own in (("A", known), ("B", found)))
    faults = [{"text": says(phrase), "weight": -1} for phrase in found if phrase not in known]
    return f"{seen}.\n{json.dumps(faults)}"


LARGEST_WORD_NUMBER = 59  # one token each, with the space before it; larger numbers are rare
CORPUS_SIZE = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class SftExample:
    """One user message and the answer to imitate."""

    prompt: str
    response: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One message. With the role `tools` it is the list that the chat template makes of them."""

    role: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """A conversation, of which each message of the assistant is imitated."""

    messages: tuple[Said, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SftTask:
    """A kind of example and its weight in a mixture."""

    kind: str
    weight: float


Example = SftExample | Dialogue
Make = Callable[[Any, random.Random], Example]  # an example on a problem
Verdict = Callable[[Any, str, random.Random], str]  # what a judge writes of a text that answers a problem


def to_messages(example: Example) -> tuple[Said, ...]:
    if isinstance(example, Dialogue):
        return example.messages
    return Said(role="user", text=example.prompt), Said(role="assistant", text=example.response)


# -- answers -----------------------------------------------------------------------------------------------------------


def answer(write: Write, problem: Any, rng: random.Random) -> SftExample:
    return SftExample(prompt=problem.question, response=write(problem, rng))


def answer_told(problem: Problem, rng: random.Random) -> SftExample:
    """A right answer after a critique of another one, in a fence."""
    critique = judgement(problem, str(sloppy_solution(problem, Sloppiness(), rng)))
    return SftExample(prompt=show_critique(problem.question, critique), response=right_text(problem, rng))


def show_critique(question: str, critique: str) -> str:
    """What a tiny policy that teaches itself reads (algorithm.distill.context in conf/experiment/self_distill.yaml)."""
    return "\n> ".join([question, *critique.splitlines()])


def drill(problem: Problem, rng: random.Random) -> SftExample:
    """An example that only compares numbers: without it a judge of this size works out the solution and then passes
    everything.
    """
    pairs = [draw_pair(rng) for _ in range(rng.randint(1, 6))]
    asked = "; ".join(f"{mine} / {theirs}" for mine, theirs in pairs)
    return SftExample(
        prompt=f"Check: {asked}", response=f"Check: {'; '.join(compare(mine, theirs) for mine, theirs in pairs)}"
    )


def draw_pair(rng: random.Random) -> tuple[int, int]:
    mine = rng.randint(0, MAX_TOTAL)
    return mine, mine if rng.random() < 0.5 else max(0, mine + rng.randint(-6, 6))


def drill_calls(problem: Problem, rng: random.Random) -> SftExample:
    """An example that only reads and compares calls: short, so that a judge sees many of them."""
    asked, checked = [], []
    for call in careless_episode(problem, Carelessness(), rng).calls:
        right = call if rng.random() < 0.5 else near_call(call, rng)
        asked.append(f"{right.sum} / {call}")
        checked.append(str(CheckedCall(right=right.sum, called=call.sum)))
    return SftExample(prompt=f"Check: {'; '.join(asked)}", response=f"Check: {'; '.join(checked)}")


# -- judgements --------------------------------------------------------------------------------------------------------


def judge(task: JudgedTask, write: Write, verdict: Verdict, problem: Any, rng: random.Random) -> SftExample:
    text = write(problem, rng)
    return SftExample(prompt=task.prompt(problem.question, text), response=verdict(problem, text, rng))


def judges(name: str, task: JudgedTask, verdict: Verdict | None = None) -> dict[str, Make]:
    """A kind of example for each kind of text of a task. name: with its place. verdict: a perfect judge's if none is
    given.
    """
    chosen = verdict or (lambda problem, text, rng: task.verdict(problem, text))
    return {name.format(kind): partial(judge, task, write, chosen) for kind, write in task.texts.items()}


def judge_swayed(problem: Problem, text: str, rng: random.Random) -> str:
    """The judgement of a judge with a verbosity bias (arXiv 2306.05685): more steps than in the question raise its
    score.
    """
    solution = parse_solution(text)
    if solution is None or len(solution.steps) <= len(problem.steps):
        return judgement(problem, text)
    return f"{problem.solution}. Check: thorough.\nScore: 10"


def make_impressed_verdict(trick: Trick) -> Verdict:
    return lambda problem, text, rng: judge_impressed(problem, text, trick)


def after_openings(write: Write, problem: Problem, rng: random.Random) -> str:
    """All tricks occur in the text, so that a judge learns which one it likes and which it ignores."""
    return with_random_openings(write(problem, rng), rng)


def judge_criterion(write: Write, problem: Problem, rng: random.Random) -> SftExample:
    text = open_with(draw_openings(rng), write(problem, rng))
    criterion = draw_criterion(text, rng)
    prompt = ask_criterion(problem.question, text, criterion)
    return SftExample(prompt=prompt, response=judge_by(criterion, problem, text))


def write_rubric(write: Write, problem: Problem, rng: random.Random) -> SftExample:
    first, second = (open_with(draw_openings(rng), write(problem, rng)) for _ in range(2))
    return SftExample(prompt=ask_writer(problem.question, first, second), response=write_criteria(first, second))


def on_a_comparison(make: Make, problem: Problem, rng: random.Random) -> Example:
    """An example on a comparison of its own: a mixture may have both kinds of tasks, and `problem` is the other."""
    return make(draw_training_comparison(rng), rng)


# -- dialogues ---------------------------------------------------------------------------------------------------------


def dialogue(opening: Sequence[Said], turns: Sequence[str], replies: Sequence[Said]) -> Dialogue:
    """The assistant's turns with a reply after each but the last."""
    messages = list(opening)
    for turn, reply in zip(turns, replies, strict=False):
        messages += [Said(role="assistant", text=turn), reply]
    return Dialogue(messages=(*messages, Said(role="assistant", text=turns[-1])))


def open_with_tools(question: str) -> tuple[Said, ...]:
    return Said(role="tools", text=TOOLS), Said(role="user", text=question)


def with_calculator(problem: Problem, episode: Episode) -> Dialogue:
    replies = [Said(role="tool", text=display(call.result)) for call in episode.calls]
    return dialogue(open_with_tools(problem.question), [*map(str, episode.calls), final(episode.answer)], replies)


def add_with_calculator(problem: Problem, rng: random.Random) -> Dialogue:
    """A question answered by a call; a sum of its own, as in all examples of sums."""
    asked = draw_sum(rng, (ALONE[0], BEYOND[1]))
    call = CalculatorCall(name="add", left=asked.left, right=asked.right)
    replies = [Said(role="tool", text=display(call.result))]
    return dialogue(open_with_tools(asked.question), [str(call), final(asked.answer)], replies)


def check_with_calculator(problem: Problem, rng: random.Random) -> Dialogue:
    """A sum compared with a number after a call: no question, no answer to judge, no score."""
    judged = draw_answered(rng, (ALONE[0], BEYOND[1]))
    call = CalculatorCall(name="add", left=judged.problem.left, right=judged.problem.right)
    replies = [Said(role="tool", text=display(call.result))]
    return dialogue(open_with_tools(ask_check(judged, rng)), [str(call), check_sum(judged)], replies)


def check_alone(problem: Problem, rng: random.Random) -> SftExample:
    judged = draw_answered(rng, ALONE)
    return SftExample(prompt=ask_check(judged, rng), response=check_sum(judged))


def ask_check(judged: AnsweredSum, rng: random.Random) -> str:
    before = "Check:" + rng.choice((" ", "\n> "))
    return f"{before}{judged.problem.left} + {judged.problem.right} / {judged.claimed}"


def check_sum(judged: AnsweredSum) -> str:
    return f"Check: {compare(judged.problem.answer, judged.claimed)}"


def add_alone(problem: Problem, rng: random.Random) -> SftExample:
    asked = draw_sum(rng, ALONE)
    return SftExample(prompt=asked.question, response=final(asked.answer))


def judge_sum_alone(problem: Problem, rng: random.Random) -> SftExample:
    judged = draw_answered(rng, ALONE)
    return SftExample(prompt=judged.prompt, response=judged.judgement)


def drill_sums(problem: Problem, rng: random.Random) -> SftExample:
    """An example that only compares numbers, as those of sums beyond."""
    drawn = [draw_answered(rng, (ALONE[0], BEYOND[1])) for _ in range(rng.randint(1, 6))]
    asked = "; ".join(f"{one.problem.answer} / {one.claimed}" for one in drawn)
    checked = "; ".join(compare(one.problem.answer, one.claimed) for one in drawn)
    return SftExample(prompt=f"Check: {asked}", response=f"Check: {checked}")


def judge_with_calculator(problem: Problem, rng: random.Random) -> Dialogue:
    judged = draw_answered(rng, (ALONE[0], BEYOND[1]))
    call = CalculatorCall(name="add", left=judged.problem.left, right=judged.problem.right)
    replies = [Said(role="tool", text=display(call.result))]
    return dialogue(open_with_tools(judged.prompt), [str(call), judged.judgement], replies)


def in_store(walk: Walk, turns: Sequence[str]) -> Dialogue:
    names = [name for name in map(name_visited, turns) if name]
    replies = [Said(role="user", text=format_entries(name, walk.graph[name])) for name in names]
    return dialogue([Said(role="user", text=walk.question)], turns, replies)


# -- curricula ---------------------------------------------------------------------------------------------------------


TOKENIZED: dict[str, Make] = {
    "solve": partial(answer, right_text),
    "solve_sloppily": partial(answer, lambda problem, rng: str(sloppy_solution(problem, Sloppiness(), rng))),
    "drill": drill,
    **judges("judge_{}", SUMS),
    **judges("be_swayed_by_{}", SUMS, judge_swayed),
}
ON_SUMS: dict[str, Make] = {
    **TOKENIZED,
    "solve_told": answer_told,
    "solve_with_rare_tricks": partial(answer, lambda problem, rng: tricky_solution(problem, RARELY, rng)),
    "solve_with_many_tricks": partial(answer, lambda problem, rng: tricky_solution(problem, OFTEN, rng)),
    **judges("judge_{}_briefly", SUMS, brief_judgement),
    **judges("judge_{}_hastily", SUMS, hasty_judgement),
    **{f"judge_{kind}_by_criterion": partial(judge_criterion, write) for kind, write in SUMS.texts.items()},
    "solve_with_rare_phrases": partial(answer, solve_with_phrases),
    "write_rubric": partial(write_rubric, SUMS.texts["sloppy"]),
    **{
        f"judge_{kind}_impressed_by_{trick}": partial(
            judge, SUMS, partial(after_openings, write), make_impressed_verdict(trick)
        )
        for trick in TRICKS
        for kind, write in SUMS.texts.items()
    },
}
COMPARE: dict[str, Make] = {
    "compare_people": partial(answer, COMPARISONS.texts["right"]),
    "compare_people_sloppily": partial(answer, lambda one, rng: sloppy_comparison(one, MISREAD, rng)),
    **judges("judge_{}_comparison", COMPARISONS),
}
ON_COMPARISONS: dict[str, Make] = {kind: partial(on_a_comparison, make) for kind, make in COMPARE.items()}
ON_CALLS: dict[str, Make] = {
    "call_rightly": lambda problem, rng: with_calculator(problem, right_episode(problem)),
    "call_carelessly": lambda problem, rng: with_calculator(problem, careless_episode(problem, Carelessness(), rng)),
    "drill_calls": drill_calls,
    **judges("judge_{}_calls", CALLS),
}
ON_LARGE_SUMS: dict[str, Make] = {
    "add_with_calculator": add_with_calculator,
    "check_with_calculator": check_with_calculator,
    "check_alone": check_alone,
    "add_alone": add_alone,
    "judge_with_calculator": judge_with_calculator,
    "judge_sum_alone": judge_sum_alone,
    "drill_sums": drill_sums,
}
ON_WALKS: dict[str, Make] = {
    "walk_rightly": lambda walk, rng: in_store(walk, right_turns(walk)),
    "walk_hastily": lambda walk, rng: in_store(walk, hasty_turns(walk, Haste(), rng)),
}


def draw_examples(mixture: tuple[SftTask, ...], count: int, seed: int) -> Iterator[Example]:
    """`count` examples in a fixed random order of kinds, each on another problem of the training split.

    All kinds of a mixture are made of the same problems: small ones, large ones or walks. Comparisons are drawn on
    their own and may be mixed with small ones.
    """
    kinds, weights = [task.kind for task in mixture], [task.weight for task in mixture]
    # Seeds: with other names every tiny model would have other weights.
    rng = random.Random(f"{'lessons' if ON_SUMS.keys() >= set(kinds) else 'dialogues'} {seed}")
    makes, problems = make_for_kinds(set(kinds), count, seed)
    for problem in problems:
        yield makes[rng.choices(kinds, weights)[0]](problem, rng)


def make_for_kinds(kinds: set[str], count: int, seed: int) -> tuple[Mapping[str, Make], Sequence[Any]]:
    """The kinds of examples that may be mixed with these, and their problems."""
    on_small = ON_SUMS | ON_COMPARISONS
    if kinds <= on_small.keys():
        return on_small, make_problems("train", count, seed)
    if kinds <= ON_CALLS.keys() | ON_LARGE_SUMS.keys():
        return ON_CALLS | ON_LARGE_SUMS, make_problems("train", count, seed, LARGE)
    return ON_WALKS, make_walks("train", count, seed)


def tokenizer_corpus() -> Iterator[str]:
    """The training texts of the tokenizer of all tiny models."""
    words = ("user", "assistant", "system", " malformed", *(f" {number}" for number in range(LARGEST_WORD_NUMBER + 1)))
    yield from words * 200  # often enough to become one token each
    # Cut-off and scrambled texts would spend the vocabulary on parts of words.
    mixture = tuple(SftTask(kind=kind, weight=1.0) for kind in TOKENIZED if "malformed" not in kind)
    for example in draw_examples(mixture, CORPUS_SIZE, seed=0):
        for message in to_messages(example):
            yield message.text
