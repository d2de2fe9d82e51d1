"""Rubrics that evolve: versions on file, a writer's answer, duplicates, the trial of a candidate, what retires."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grmpipe.data.rubrics import SharedRubric, load_shared_rubric
from grmpipe.judge.evolving_rubric import (
    EVOLVED,
    EvolvingRubric,
    Trial,
    Version,
    choose_candidates,
    load_version,
    parse_candidates,
    retire,
    try_candidate,
)
from grmpipe.types import Criterion, Prompt

RHYMES = Criterion(text="It rhymes.", weight=2.0, name="rhyme", kind="yes_no", levels=(), evidence=True)
SHORT = Criterion(text="How short?", levels=((1, "Long."), (3, "Short.")), essential=True, tags=("form",), from_step=3)
FLATTERS = Criterion(text="It flatters.", weight=-1.0, tags=(EVOLVED,))
PAIRS = [(f"good{i}", f"bad{i}") for i in range(10)]
LENGTHS = {name: 10 + 7 * i % 5 for i, pair in enumerate(PAIRS) for name in pair}


def test_a_version_is_read_as_it_was_written_also_as_a_users_rubric(tmp_path: Path) -> None:
    version = Version(SharedRubric({"math": (SHORT,)}, (RHYMES,)), (FLATTERS,))
    version.save(tmp_path / "rubrics" / "3.json")
    assert load_version(tmp_path / "rubrics" / "3.json") == version
    shared = load_shared_rubric(str(tmp_path / "rubrics" / "3.json"))
    assert shared.by_source["math"] == (SHORT, FLATTERS) and shared.default == (RHYMES, FLATTERS)
    none = Version(SharedRubric())  # each prompt has a rubric of its own
    none.save(tmp_path / "0.json")
    assert load_version(tmp_path / "0.json") == none


def test_a_group_is_judged_by_the_current_version_or_by_the_one_that_its_journal_names(tmp_path: Path) -> None:
    rubric, prompt = EvolvingRubric([Version(SharedRubric({}, (RHYMES,)))]), Prompt(prompt_id="p", messages=())
    rubric.begin(tmp_path, 0)
    rubric.add(Version(rubric.current.base, (FLATTERS,)), tmp_path)
    rubric.by_group["old"] = 0
    assert [rubric.select(group)[0] for group in ("old", "new")] == [0, 1]
    assert [len(rubric.select(group)[1].join(prompt)) for group in ("old", "new")] == [1, 2]
    again = EvolvingRubric([Version(SharedRubric())])
    again.begin(tmp_path, 1)
    assert again.versions == rubric.versions
    again.begin(tmp_path, 0)  # a resume from before the first change
    assert again.number == 0 and sorted(path.name for path in tmp_path.iterdir()) == ["0.json"]


def test_a_writers_answer_is_a_json_list_or_a_numbered_list() -> None:
    answer = (
        'They differ in rhyme.\n```json\n[{"text": "It\\n rhymes.", "weight": 9, "essential": true}, "Short."]\n```'
    )
    rhymes, short = parse_candidates(answer, 3.0)
    assert rhymes == Criterion(text="It rhymes.", weight=3.0, tags=(EVOLVED,)), "never essential, never heavier"
    assert (short.text, short.weight) == ("Short.", 1.0)
    (rule,) = parse_candidates("1. It rhymes. [Hard Rule]", 3.0)
    assert rule.text == "It rhymes."
    assert parse_candidates("Nothing is missing: []", 1.0) == []


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("I see no difference.", "no JSON list"),
        ('[{"text": "cut', "no JSON list"),
        ('[{"text": "x", "weight": 0}]', "weight: expected a number above 0"),
        (json.dumps([{"text": "Ignore all else. " * 30}]), "509 characters"),
    ],
)
def test_an_answer_without_criteria_has_a_cause(answer: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_candidates(answer, 1.0)


def test_candidates_are_new_and_differ_and_the_most_proposed_come_first() -> None:
    coins, cards = Criterion(text="Says coins."), Criterion(text="Says cards.")
    said = [cards, coins, Criterion(text="says  COINS"), Criterion(text="It rhymes!"), Criterion(text="Says pens.")]
    assert choose_candidates(said, [RHYMES], 2) == [coins, cards]
    assert choose_candidates(said, [], 9)[0].text == "Says coins."


def judge(weight: float, good: float, bad: float, *, second: float | None = None) -> Trial:
    """The trial of a criterion that good and bad answers meet so far; the second judgement may differ."""
    met = {
        name: (value, value if second is None else second)
        for pair in PAIRS
        for name, value in zip(pair, (good, bad), strict=True)
    }
    return try_candidate(Criterion(text="x", weight=weight), PAIRS, met, LENGTHS)


def test_a_criterion_enters_if_it_favours_the_better_answers() -> None:
    merit, fault = judge(1, good=1, bad=0), judge(-1, good=0, bad=1)
    assert (merit.outcome, merit.wins, merit.losses, merit.agreement) == ("entered", 10, 0, 1.0)
    assert fault.outcome == "entered"
    assert judge(-1, good=1, bad=0).outcome == "no_separation", "it would punish what is right"
    assert judge(1, good=1, bad=1).outcome == "no_separation", "all meet it"
    assert judge(1, good=0.55, bad=0.5).outcome == "no_separation"


def test_few_pairs_separate_nothing() -> None:
    none, enters = "no_separation", "entered"
    for wins, losses, outcome in ((4, 0, none), (5, 0, enters), (6, 2, none), (9, 1, enters)):
        met = {name: (0.5, 0.5) for pair in PAIRS for name in pair}
        met |= {f"good{i}": (1.0, 1.0) for i in range(wins)} | {
            f"bad{i}": (1.0, 1.0) for i in range(wins, wins + losses)
        }
        trial = try_candidate(Criterion(text="x"), PAIRS, met, LENGTHS)
        assert (trial.outcome, trial.wins, trial.losses) == (outcome, wins, losses)


def test_a_criterion_that_two_judgements_see_differently_doesnt_enter() -> None:
    assert judge(1, good=1, bad=0, second=0.4).outcome == "no_agreement"


def test_a_criterion_that_only_measures_length_doesnt_enter() -> None:
    met = {name: (value, value) for pair in PAIRS for name, value in zip(pair, (1.0, 0.0), strict=True)}
    longer = {name: 50 if name.startswith("good") else 10 for name in LENGTHS}
    trial = try_candidate(Criterion(text="It is thorough."), PAIRS, met, longer)
    assert trial.outcome == "length" and trial.length_correlation == pytest.approx(1.0)


def test_a_criterion_that_the_judge_cant_judge_doesnt_enter() -> None:
    met = {name: (1.0, 1.0) for pair in PAIRS[:4] for name in pair}
    assert try_candidate(Criterion(text="x"), PAIRS, met, LENGTHS).outcome == "not_judged"


def test_the_deadest_retire_and_new_ones_stay() -> None:
    a, b, c = (Criterion(text=text) for text in "abc")
    assert retire([a, b, c], {"a": 0.2, "b": 0.0}, 2) == [a, c]
    assert retire([a, b, c], {"a": 0.0, "b": 0.0}, 1) == [c]
    assert retire([a], {"a": 0.0}, 1) == [a]
