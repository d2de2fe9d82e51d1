"""Calls of a calculator for a word problem: right, sloppy and corrupted episodes. Pure: text and numbers, no model."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest

from grmpipe.tiny.problems import Problem, SolutionStep
from grmpipe.tiny.solutions import what_is_read

SIGNS = {"add": "+", "sub": "-"}
NAMES = {sign: name for name, sign in SIGNS.items()}
MAX_CALLS = 9  # in an episode: a few more than the longest problem needs
TOOLS = "add(a, b)\nsub(a, b)"  # as the chat template lists them


@dataclass(frozen=True, slots=True, kw_only=True)
class CalculatorCall:
    """One call as a policy writes it: with the space, each number is the same token as in a question."""

    name: str  # "add" or "sub"
    left: int
    right: int

    @property
    def result(self) -> int:
        return self.left + self.right if self.name == "add" else self.left - self.right

    @property
    def sum(self) -> str:
        return f"{self.left} {SIGNS[self.name]} {self.right}"

    def __str__(self) -> str:
        return f"{self.name}( {self.left}, {self.right})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Calls, each answered by its true result, then the final answer."""

    calls: tuple[CalculatorCall, ...]
    answer: int

    @property
    def view(self) -> str:
        """What a judge sees: the policy's lines begin with `> `, the calculator's with `| `."""
        lines = [line for call in self.calls for line in (f"> {call}", f"| {display(call.result)}")]
        return "\n".join([*lines, f"> {final(self.answer)}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Carelessness:
    """The probability of each mistake, per step."""

    read_minus_as_plus: float = 0.55  # above one half: the mode is wrong too, so greedy decoding also fails
    miscopy: float = 0.03  # another number than the question's
    skip: float = 0.04
    twice: float = 0.03  # the same step twice
    old_result: float = 0.03  # the call goes on from an earlier result


def display(result: int) -> str:
    """What the calculator shows."""
    return f"= {result}"


def final(answer: int) -> str:
    return f"Answer: {answer}"


def make_call(step: SolutionStep, left: int) -> CalculatorCall:
    return CalculatorCall(name=NAMES[step.sign], left=left, right=step.right)


def make_episode(first: int, calls: tuple[CalculatorCall, ...]) -> Episode:
    """The episode of these calls, whose answer is the last result."""
    return Episode(calls=calls, answer=calls[-1].result if calls else first)


def right_episode(problem: Problem) -> Episode:
    return Episode(calls=tuple(make_call(step, step.left) for step in problem.steps), answer=problem.answer)


def careless_episode(problem: Problem, carelessness: Carelessness, rng: random.Random) -> Episode:
    """An episode with mistakes; most calls go on from the last result."""
    shown, calls = [problem.steps[0].left], []
    for step in what_is_read(problem.steps, carelessness.skip, carelessness.twice, rng):
        if step.sign == "-" and rng.random() < carelessness.read_minus_as_plus:
            step = replace(step, sign="+")
        if rng.random() < carelessness.miscopy:
            step = replace(step, right=rng.randint(1, 12))
        left = rng.choice(shown) if rng.random() < carelessness.old_result else shown[-1]
        calls.append(make_call(step, left))
        shown.append(calls[-1].result)
    return make_episode(shown[0], tuple(calls))


def chain_calls(first: int, calls: list[CalculatorCall]) -> Episode:
    """The same signs and numbers, each call from the last result."""
    total, made = first, []
    for call in calls:
        made.append(replace(call, left=total))
        total = made[-1].result
    return make_episode(first, tuple(made))


def near_call(call: CalculatorCall, rng: random.Random) -> CalculatorCall:
    """Another call that differs in one place."""
    return rng.choice(
        (
            replace(call, name="sub" if call.name == "add" else "add"),
            replace(call, left=another(call.left, rng)),
            replace(call, right=another(call.right, rng)),
        )
    )


def other_sign(episode: Episode, rng: random.Random) -> Episode:
    return change_call(episode, rng, lambda call: replace(call, name="sub" if call.name == "add" else "add"))


def other_number(episode: Episode, rng: random.Random) -> Episode:
    return change_call(episode, rng, lambda call: replace(call, right=another(call.right, rng)))


def change_call(episode: Episode, rng: random.Random, change: Callable[[CalculatorCall], CalculatorCall]) -> Episode:
    """One call changed, and the rest from its result."""
    calls, at = list(episode.calls), rng.randrange(len(episode.calls))
    calls[at] = change(calls[at])
    return chain_calls(calls[0].left, calls)


def old_result(episode: Episode, rng: random.Random) -> Episode:
    """One call goes on from a wrong number: an earlier result or another one; the rest from there."""
    calls, at = list(episode.calls), rng.randrange(len(episode.calls))
    seen = [calls[0].left, *(call.result for call in calls[: max(0, at - 1)])]
    calls[at] = replace(calls[at], left=rng.choice((rng.choice(seen), another(calls[at].left, rng))))
    rest = chain_calls(calls[at].result, calls[at + 1 :])
    return make_episode(calls[0].left, (*calls[: at + 1], *rest.calls))


def call_missing(episode: Episode, rng: random.Random) -> Episode:
    calls, at = list(episode.calls), rng.randrange(len(episode.calls))
    return chain_calls(calls[0].left, calls[:at] + calls[at + 1 :])


def call_added(episode: Episode, rng: random.Random) -> Episode:
    """A call twice, or an invented one."""
    calls, at = list(episode.calls), rng.randrange(len(episode.calls))
    more = rng.choice((calls[at], CalculatorCall(name=rng.choice(tuple(SIGNS)), left=0, right=rng.randint(1, 12))))
    return chain_calls(calls[0].left, [*calls[: at + 1], more, *calls[at + 1 :]])


def other_answer(episode: Episode, rng: random.Random) -> Episode:
    """Right calls, then an answer that is not the last result."""
    seen = [episode.calls[0].left, *(call.result for call in episode.calls[:-1])]
    return replace(episode, answer=rng.choice((rng.choice(seen), another(episode.answer, rng))))


def another(value: int, rng: random.Random) -> int:
    """Another number, more often a close one."""
    while True:
        other = rng.choice((value + rng.choice((-1, 1)), value + rng.randint(-6, 6), rng.randint(0, 59)))
        if other != value and other >= 0:
            return other


CORRUPTIONS: tuple[Callable[[Episode, random.Random], Episode], ...] = (
    other_sign,
    other_sign,
    other_number,
    other_number,
    old_result,
    call_missing,
    call_added,
    other_answer,
)


def corrupt_episode(problem: Problem, rng: random.Random) -> Episode:
    """A random corruption of the right episode, sometimes two; sometimes the answer stays right."""
    episode = rng.choice(CORRUPTIONS)(right_episode(problem), rng)
    return rng.choice(CORRUPTIONS)(episode, rng) if episode.calls and rng.random() < 0.3 else episode


CALL = r"(add|sub)\( (-?\d{1,3}), (-?\d{1,3})\)"
ANSWERED_CALL = rf"> {CALL}\n\| = (-?\d{{1,3}})\n"
VIEW = re.compile(rf"(?:{ANSWERED_CALL})*> Answer: (?P<answer>-?\d{{1,3}})", re.ASCII)
CALLS = re.compile(ANSWERED_CALL, re.ASCII)


def parse_call(text: str) -> CalculatorCall | None:
    match = re.fullmatch(CALL, text, re.ASCII)
    return CalculatorCall(name=match[1], left=int(match[2]), right=int(match[3])) if match else None


def parse_view(view: str) -> Episode | None:
    """A view as an episode; None for any other text, even a view with one more character."""
    match = VIEW.fullmatch(view)
    if match is None:
        return None
    calls = tuple(
        CalculatorCall(name=name, left=int(left), right=int(right)) for name, left, right, _ in CALLS.findall(view)
    )
    return Episode(calls=calls, answer=int(match["answer"]))


def answers_right(problem: Problem, view: str) -> bool:
    """The hidden rule: a well-formed episode with the right final answer, whatever its calls."""
    episode = parse_view(view)
    return episode is not None and episode.answer == problem.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCall:
    """The right sum at a place beside the one that was called there; None: there is none."""

    right: str | None
    called: str | None

    @property
    def ok(self) -> bool:
        return self.right == self.called

    def __str__(self) -> str:
        return f"{self.right or '-'} / {self.called or '-'} {'ok' if self.ok else 'no'}"


def check_calls(problem: Problem, episode: Episode) -> tuple[CheckedCall, ...]:
    """Each sentence beside its call. A right call goes on from the last result shown, even if that is wrong: so each
    mistake counts once.
    """
    shown, checked = problem.steps[0].left, []
    for step, call in zip_longest(problem.steps, episode.calls):
        right = make_call(step, shown).sum if step else None
        checked.append(CheckedCall(right=right, called=call.sum if call else None))
        shown = call.result if call else shown
    return tuple(checked)


def check_answer(problem: Problem, episode: Episode) -> CheckedCall:
    shown = episode.calls[-1].result if episode.calls else problem.steps[0].left
    return CheckedCall(right=str(shown), called=str(episode.answer))


def score_of_calls(problem: Problem, view: str) -> int:
    """The score, 1 to 10, of a perfect judge: 10 if all calls and the answer are right, at most 5 otherwise."""
    episode = parse_view(view)
    if episode is None:
        return 1
    checked = [*check_calls(problem, episode), check_answer(problem, episode)]
    num_ok = sum(one.ok for one in checked)
    return 10 if num_ok == len(checked) else 1 + 4 * num_ok // len(checked)


def judgement_of_calls(problem: Problem, view: str) -> str:
    """The critique of a perfect judge: every right sum beside the one called, the answer, then the score."""
    episode = parse_view(view)
    if episode is None:
        return "Check: malformed.\nScore: 1"
    checked = "; ".join([*map(str, check_calls(problem, episode)), f"answer {check_answer(problem, episode)}"])
    return f"Check: {checked}.\nScore: {score_of_calls(problem, view)}"


def judge_prompt_of_view(question: str, view: str) -> str:
    """The user message that the tiny judge of calls is trained on."""
    return f"Q: {question}\nA:\n{view}"
