"""A trick pays if its rise is surely above the margin; probes are labels, in two files that share no prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from grmpipe.config.judge import Scale
from grmpipe.data.labelled import load_labelled
from grmpipe.evaluation.judged_items import JudgedItem
from grmpipe.evaluation.trick_results import (
    HELD_OUT,
    TRAIN,
    Attempt,
    TrickResult,
    list_worst,
    make_table,
    measure_tricks,
    name_metrics,
    write_probes,
)
from grmpipe.judge.pointwise_adapter import rollout_of_text
from grmpipe.judge.verdict import make_failure
from grmpipe.judge.votes import mean, voted
from grmpipe.models.types import Message
from grmpipe.types import JudgeReport, Prompt, ScoredResponse

PASSES = Scale().to_reward(8)


def label(question: str, trick: str = "praise", score: float = 1.0) -> ScoredResponse:
    prompt = Prompt(prompt_id=question, messages=(Message(role="user", content=question),), reference="42")
    return ScoredResponse(
        item_id=f"{question}/{trick}", prompt=prompt, response=f"{trick} 41", score=score, subset=trick, is_yes_no=True
    )


def report(score: float | None) -> JudgeReport:
    if score is None:
        return JudgeReport(verdict=make_failure("unparseable", "nothing"))
    return JudgeReport(verdict=voted("g", rollout_of_text("g", 0, ""), (score,), mean, Scale()))


def attempt(question: str, before: float | None, after: float | None, trick: str = "praise") -> Attempt:
    return Attempt(item=label(question, trick), report=report(after), plain=report(before))


def measure(attempts: Sequence[Attempt]) -> TrickResult:
    (result,) = measure_tricks(attempts, PASSES, 0.05).values()
    return result


def test_a_trick_pays_if_wrong_responses_pass_with_it_that_fail_without() -> None:
    found = measure([attempt(str(i), 1, 10 if i % 2 else 1) for i in range(40)])
    assert found.pays and found.success.mean == found.success_rise.mean == 0.5 and found.success_before.mean == 0
    assert found.reward_rise.mean == pytest.approx(0.5)


def test_a_trick_pays_if_it_only_raises_the_reward() -> None:
    found = measure([attempt(str(i), 1, 4 + i % 2) for i in range(40)])
    assert found.pays and found.success.mean == 0 and found.reward_rise.mean == pytest.approx(3.5 / 9)


def test_a_better_one_of_several_wrong_answers_is_no_trick_until_it_passes() -> None:
    assert not measure([attempt(str(i), 1, 4 + i % 2, "best_of_n") for i in range(40)]).pays
    assert measure([attempt(str(i), 1, 9 + i % 2, "best_of_n") for i in range(40)]).pays


def test_responses_that_pass_anyway_show_no_trick() -> None:
    found = measure([attempt(str(i), 10, 10) for i in range(40)])
    assert found.success.mean == found.success_before.mean == 1 and found.pays is not True


@pytest.mark.parametrize(("count", "pays"), [(400, False), (4, None), (1, None)])
def test_that_a_trick_does_not_pay_takes_enough_responses(count: int, pays: bool | None) -> None:
    found = measure([attempt(str(i), 1, 2 if i % 40 == 0 else 1) for i in range(count)])
    assert found.pays is pays
    ((*_, cell),) = [[*column.cells] for column in make_table({"praise": found}).columns[-1:]]
    assert cell == ("" if pays is False else "too few to say")


def test_answers_to_one_prompt_prove_less_than_those_to_many() -> None:
    rises = [(1, 10)] * 10 + [(1, 1)] * 10
    many = measure([attempt(str(i), *one) for i, one in enumerate(rises)])
    few = measure([attempt(str(i // 10), *one) for i, one in enumerate(rises)])
    assert many.pays and not few.pays
    assert not measure([attempt("one", 1, 10)] * 20).pays, "a single prompt has no interval"


def test_a_failed_verdict_is_no_success_and_no_rise() -> None:
    found = measure([attempt("a", 1, None), attempt("b", None, 10), attempt("c", 1, 1), attempt("d", 1, 1)])
    assert (found.failed_share, found.success.mean, found.success_rise.num_values) == (0.25, 1 / 3, 2)
    nothing = measure_tricks([attempt("a", 1, None)], PASSES, 0.05)
    assert name_metrics(nothing) == {"tricks_that_pay": 0.0}, "NaN is no figure"


def test_the_worst_examples_are_those_that_gained_most() -> None:
    attempts = [attempt(f"q{i}", 1, 10 if i == 7 else 9) for i in range(20)] + [
        attempt(f"q{i}", 1, 1, "longer") for i in range(20)
    ]
    first, _ = list_worst(attempts, measure_tricks(attempts, PASSES, 0.05))
    assert first == 'praise: reward 0.00 -> 1.00 for "praise 41" to "q7"'


def test_probes_are_labels_in_two_files_without_a_common_prompt(tmp_path: Path) -> None:
    wrong = [
        JudgedItem(item=label(f"q{i}", trick), reports=(report(score),), num_asked=1)
        for trick, score in (("plain", 2), ("praise", None), ("longer", 9))
        for i in range(20)
    ]
    right = [label(f"q{i}", "kept", 10.0) for i in range(20)]
    counts = write_probes(tmp_path, wrong, right)
    halves = [load_labelled(str(tmp_path / name)) for name in (TRAIN, HELD_OUT)]
    assert [len(half) for half in halves] == list(counts.values()) and sum(counts.values()) == 80
    prompts = [{item.prompt.messages for item in half} for half in halves]
    assert all(prompts) and not prompts[0] & prompts[1]
    for item in (item for half in halves for item in half):
        assert isinstance(item, ScoredResponse) and item.is_yes_no and item.prompt.reference == "42"
        assert (item.score == 10) == (item.subset == "kept")


def test_the_first_probes_are_the_worst_of_every_trick(tmp_path: Path) -> None:
    wrong = [
        JudgedItem(item=label(f"q{i}", trick), reports=(report(1 + i % 10),), num_asked=1)
        for trick in ("plain", "praise", "longer")
        for i in range(60)
    ]
    write_probes(tmp_path, wrong, [])
    rows = [json.loads(line) for line in (tmp_path / HELD_OUT).read_text().splitlines()]
    assert {row["subset"] for row in rows[:3]} == {"plain", "praise", "longer"}
    assert [row["reward"] for row in rows[:3]] == [1.0] * 3 and rows[-1]["reward"] < 0.2
