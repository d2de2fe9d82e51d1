"""A rubric that changes in the run: its versions, what a writer proposes, the trial of a candidate. Asks no model.

    answers of the run -> a writer (judge.rubric.evolve.writer) -> candidates -> without duplicates -> tried on stored
    pairs -> a new version, by which whole groups are judged

Read: RubricManager of open-instruct (open_instruct/rubrics/evolving_rubric_step.py of 06b596f), whose evolving rubrics
enter untried and leave by age; OnlineRubrics (arXiv 2510.07284) writes from pairs of the policy's answers and a
reference policy's; RLER (DR Tulu, arXiv 2511.19399) keeps those criteria whose scores differ within a group.
"""

import json
import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from grmpipe.config.judge_protocols import PROTOCOLS
from grmpipe.config.keys.entry_names import JUDGE
from grmpipe.data.rubrics import DEFAULT, SharedRubric, parse_criterion, split_list
from grmpipe.judge.votes import MET
from grmpipe.types import Criterion

FOLDER = "rubrics"  # in a run's directory: <version>.json, as judge.rubric.path reads it
# The protocol whose fields the writer's template shows: it reads a pair.
WRITER = next(name for name, protocol in PROTOCOLS.items() if protocol.about == "pair")
EVOLVED = "evolved"  # the tag of criteria that a writer wrote
MOST_ASKED = 8  # pairs that a writer is shown in a round
MAX_CHARS = 300  # of a criterion: what is longer may be a response that the writer was made to repeat
SAME_WORDS = 0.8  # share of common words from which on two criteria are the same
SAME_SCORES = 0.95  # correlation over the tried answers from which on two candidates are the same
CLEAR = 0.1  # least difference in how far two answers meet a criterion
SURE = 2.0  # standard errors
LEAST_AGREEMENT = 0.8  # share of answers that two judgements see on the same side
MOST_LENGTH = 0.8  # correlation with the length of the answer

Outcome = Literal["entered", "duplicate", "not_judged", "no_agreement", "length", "no_separation"]


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a rubric. evolved: the criteria that a writer wrote, for all sources; `base` are the others."""

    base: SharedRubric
    evolved: tuple[Criterion, ...] = ()

    @property
    def shared(self) -> SharedRubric:
        by_source = {source: (*rubric, *self.evolved) for source, rubric in self.base.by_source.items()}
        return SharedRubric(by_source, (*self.base.default, *self.evolved))

    @property
    def criteria(self) -> list[Criterion]:
        """All of them, each once."""
        rubrics = (*self.base.by_source.values(), self.base.default, self.evolved)
        return [*dict.fromkeys(one for rubric in rubrics for one in rubric)]

    @property
    def heaviest(self) -> float:
        """The largest weight that a criterion of a writer may have: none outweighs what people wrote."""
        return max((abs(one.weight) for one in self.criteria if EVOLVED not in one.tags), default=1.0)

    def save(self, path: Path) -> None:
        """Write a file for `judge.rubric.path`."""
        by_source = {**self.shared.by_source, DEFAULT: self.shared.default}
        shown = {source: [show_criterion(one) for one in rubric] for source, rubric in by_source.items() if rubric}
        path.parent.mkdir(exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(shown, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        draft.replace(path)


def load_version(path: Path) -> Version:
    """Read a version that a run has saved. Raises OSError or ValueError."""
    found = {DEFAULT: (), **json.loads(path.read_text(encoding="utf-8"))}
    rubrics = {source: [parse_criterion(one, str(path)) for one in rubric] for source, rubric in found.items()}
    base = {source: tuple(one for one in rubric if EVOLVED not in one.tags) for source, rubric in rubrics.items()}
    evolved = tuple(one for one in rubrics[DEFAULT] if EVOLVED in one.tags)
    return Version(SharedRubric(base, base.pop(DEFAULT)), evolved)


def find_folder(run_dir: Path, judge: str) -> Path:
    """The folder of a run with the versions of a judge's rubric."""
    return run_dir / FOLDER if judge == JUDGE else run_dir / FOLDER / judge


def show_criterion(criterion: Criterion) -> dict[str, object]:
    """A criterion as a rubric file has it, without what is as usual."""
    usual = Criterion(text="")
    levels = {str(score): meaning for score, meaning in criterion.levels}
    found = {"levels": levels, "tags": list(criterion.tags)}
    names = ("name", "weight", "kind", "essential", "evidence", "from_step")
    found |= {name: value for name in names if (value := getattr(criterion, name)) != getattr(usual, name)}
    return {"text": criterion.text} | {name: value for name, value in found.items() if value}


@dataclass(slots=True)
class EvolvingRubric:
    """The versions of a judge's rubric, the first one from `judge.rubric.path`. A group is judged by the version that
    is current when its session opens, or by the one that its journal names.
    """

    versions: list[Version]
    by_group: dict[str, int] = field(default_factory=dict)  # group_id -> version, of groups that are judged again

    @property
    def number(self) -> int:
        """Of the current version."""
        return len(self.versions) - 1

    @property
    def current(self) -> Version:
        return self.versions[-1]

    def select(self, group_id: str) -> tuple[int, SharedRubric]:
        """The version for a group."""
        number = self.by_group.get(group_id, self.number)
        return number, self.versions[number].shared

    def add(self, version: Version, folder: Path) -> None:
        version.save(folder / f"{len(self.versions)}.json")
        self.versions.append(version)

    def begin(self, folder: Path, number: int) -> None:
        """Begin at a version that a folder has, the first of which is this rubric's own; later files are void."""
        if number == 0:
            self.versions[0].save(folder / "0.json")
        self.versions[:] = [load_version(folder / f"{one}.json") for one in range(number + 1)]
        while (void := folder / f"{(number := number + 1)}.json").exists():
            void.unlink()


# -- what a writer proposes --------------------------------------------------------------------------------------------


def parse_candidates(text: str, heaviest: float) -> list[Criterion]:
    """The criteria in a writer's answer: a JSON list of them, or a numbered list as OpenRubrics has it. None of them is
    essential, or weighs more than `heaviest`. ValueError if there is no list, or one of its criteria is none.
    """
    start, end = text.find("["), text.rfind("]")
    found: object = split_list(text)
    if not found:
        try:
            found = json.loads(text[start : end + 1])
        except ValueError:
            found = None
    if not isinstance(found, list):
        raise ValueError("the answer has no JSON list of criteria")
    return [clean_candidate(parse_criterion(one, f"[{index}]"), heaviest) for index, one in enumerate(found)]


def clean_candidate(criterion: Criterion, heaviest: float) -> Criterion:
    """A candidate as it may enter. A policy's words may have reached its text, which stands outside of every fence."""
    text = " ".join(criterion.text.split())
    if len(text) > MAX_CHARS:
        raise ValueError(f"a criterion has {len(text)} characters; the limit is {MAX_CHARS}")
    weight = max(-heaviest, min(criterion.weight, heaviest))
    return Criterion(text=text, weight=weight, tags=(EVOLVED,), kind=criterion.kind, evidence=criterion.evidence)


def is_same(one: Criterion, other: Criterion) -> bool:
    """Whether two criteria say the same, by their words."""
    a, b = (set(re.findall(r"\w+", criterion.text.casefold())) for criterion in (one, other))
    return one.text == other.text or len(a & b) >= SAME_WORDS * len(a | b) > 0


def choose_candidates(proposed: Iterable[Criterion], known: Sequence[Criterion], most: int) -> list[Criterion]:
    """At most this many different new ones, those that were proposed most often first."""
    found: list[list[Criterion]] = []
    for one in proposed:
        same = next((group for group in found if is_same(one, group[0])), None)
        if same is not None:
            same.append(one)
        elif not any(is_same(one, old) for old in known):
            found.append([one])
    return [group[0] for group in sorted(found, key=len, reverse=True)][:most]


# -- the trial ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What became of a candidate. wins: pairs whose better answer it favours; losses: whose worse one."""

    outcome: Outcome
    wins: int = 0
    losses: int = 0
    agreement: float | None = None
    length_correlation: float | None = None


def try_candidate(
    criterion: Criterion,
    pairs: Sequence[tuple[str, str]],
    met: Mapping[str, tuple[float, float]],
    lengths: Mapping[str, int],
) -> Trial:
    """Try a candidate on pairs of answers, the better one first.

    met: answer -> how far it meets the criterion, by two judgements; answers without both aren't there.
    """
    judged = [(better, worse) for better, worse in pairs if better in met and worse in met]
    if 2 * len(judged) < len(pairs) or not judged:
        return Trial(outcome="not_judged")
    means = {answer: statistics.fmean(both) for answer, both in met.items()}
    differences = [math.copysign(1, criterion.weight) * (means[better] - means[worse]) for better, worse in judged]
    wins, losses = sum(one > CLEAR for one in differences), sum(one < -CLEAR for one in differences)
    agreement = statistics.fmean((first >= MET) == (second >= MET) for first, second in met.values())
    length = correlate([means[one] for one in means], [lengths[one] for one in means])
    outcome: Outcome = "entered"
    if agreement < LEAST_AGREEMENT:
        outcome = "no_agreement"
    elif wins - losses <= SURE * math.sqrt(wins + losses):  # of a fair coin: the standard error of the difference
        outcome = "no_separation"
    elif abs(length) > MOST_LENGTH:
        outcome = "length"
    return Trial(outcome=outcome, wins=wins, losses=losses, agreement=agreement, length_correlation=length)


def correlate(one: Sequence[float], other: Sequence[float]) -> float:
    """Pearson's correlation; 0 where one of both is constant."""
    try:
        return statistics.correlation(one, other)
    except statistics.StatisticsError:
        return 0.0


def retire(evolved: Sequence[Criterion], spreads: Mapping[str, float], most: int) -> list[Criterion]:
    """The criteria that stay: without the deadest, whose scores differ least over the latest verdicts. spreads: by
    text; a criterion without one is new, and stays. Of equal ones the newest stay.
    """
    dead_first = sorted(evolved, key=lambda one: spreads.get(one.text, math.inf))
    gone: Collection[Criterion] = dead_first[: max(0, len(evolved) - most)]
    return [one for one in evolved if one not in gone]


def as_merit(criterion: Criterion) -> Criterion:
    """The criterion alone in a rubric: its reward is how far it is met."""
    return replace(criterion, weight=1.0, essential=False, from_step=0)
