"""Two judges are compared item by item, over prompts; other items, responses or labels are refused in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from grmpipe.config.judge import Scale
from grmpipe.evaluation.evaluation_files import JUDGE_RESULTS, show, write_files
from grmpipe.evaluation.judge_accuracy import Recount, evaluate
from grmpipe.evaluation.judge_comparison import (
    ItemVerdict,
    MeasuredJudge,
    compare_judges,
    read_earlier,
    tabulate,
)
from grmpipe.evaluation.judged_items import JudgedItem
from grmpipe.judge.pointwise_adapter import rollout_of_text
from grmpipe.judge.votes import mean, voted
from grmpipe.models.types import Message
from grmpipe.types import Failed, JudgeReport, Labelled, Prompt, RankedResponses, ScoredResponse

SCALE = Scale()
PASS = 8


def scored(number: int, score: float = 5, prompt: str = "") -> ScoredResponse:
    asked = Prompt(prompt_id="p", messages=(Message(role="user", content=prompt or f"{number}?"),))
    return ScoredResponse(item_id=f"i{number}", prompt=asked, response=f"answer {number}", score=score)


def judge_items(items: list[ScoredResponse], scores: list[float | None]) -> list[JudgedItem]:
    """None: the judge's service was down."""
    down = JudgeReport(verdict=Failed(stage="judge", cause="refused", attempts=2))
    return [
        JudgedItem(
            item=item,
            reports=(
                down
                if score is None
                else JudgeReport(verdict=voted("rule", rollout_of_text("g", 0, "x"), (score,), mean, SCALE)),
            ),
            num_asked=1,
        )
        for item, score in zip(items, scores, strict=True)
    ]


def measure(name: str, judged: list[JudgedItem]) -> MeasuredJudge:
    return MeasuredJudge(name=name, verdicts=tabulate(judged, SCALE, PASS))


def test_a_comparison_pairs_items_and_lists_those_that_only_one_has_right() -> None:
    items = [scored(number) for number in range(5)]
    better = measure("b", judge_items(items, [5, 5, 6, 5, None]))
    worse = measure("a", judge_items(items, [5, 9, 5, 7, 5]))
    found = compare_judges(better, worse, items)
    assert (found.num_items, found.accuracy.mean, found.accuracy.num_clusters) == (4, pytest.approx(1 / 4), 4)
    assert [(one.item_id, one.outcome, one.against_outcome) for one in found.parted] == [
        ("i1", "right", "wrong"), ("i2", "wrong", "right"), ("i3", "right", "wrong"),
    ]  # fmt: skip
    assert found.score_error is not None and found.score_error.mean == pytest.approx((0 - 4 + 1 - 2) / 4)


def test_of_yes_and_no_the_wrong_responses_that_pass_are_compared() -> None:
    items = [replace(scored(number), score=score, is_yes_no=True) for number, score in enumerate([1, 1, 1, 10, 10])]
    lenient, strict = (
        measure(name, judge_items(items, scores))
        for name, scores in (("lenient", [9, 9, 2, 9, 9]), ("strict", [9, 2, 2, 9, 2]))
    )
    found = compare_judges(lenient, strict, items)
    assert found.false_positives is not None
    assert (found.false_positives.mean, found.false_positives.num_values) == (pytest.approx(1 / 3), 3)
    assert found.accuracy.mean == 0, "one more wrong answer passes, and one more right one"


def test_items_of_one_prompt_count_as_one_in_the_interval() -> None:
    shared = [scored(number, prompt=f"{number // 10}?") for number in range(40)]
    alone = [scored(number) for number in range(40)]
    verdicts = {f"i{n}": ItemVerdict(outcome="right" if n % 20 < 10 else "wrong") for n in range(40)}
    wrong = MeasuredJudge(name="a", verdicts={name: ItemVerdict(outcome="wrong") for name in verdicts})
    by_prompt, by_item = (
        compare_judges(MeasuredJudge(name="b", verdicts=verdicts), wrong, items).accuracy for items in (shared, alone)
    )
    assert (by_prompt.mean, by_prompt.num_clusters) == (0.5, 4)
    assert by_prompt.high - by_prompt.low > 2 * (by_item.high - by_item.low)
    assert by_prompt.p > 0.05 > by_item.p


def test_judges_without_a_common_item_are_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = [scored(1), scored(2)]
    judged = judge_items(items, [5, None])
    other = measure("a", judge_items(items, [None, 5]))
    found = compare_judges(measure("b", judged), other, items)
    result = evaluate(judged, SCALE, Recount(ks=(), vote=mean, most=1, seed=0))
    show(replace(result, comparisons=(found,)), 1, tmp_path)
    assert "b and a share no item that both judged" in capsys.readouterr().out


def write_evaluation(run_dir: Path, judged: list[JudgedItem]) -> None:
    run_dir.mkdir()
    result = evaluate(judged, SCALE, Recount(ks=(), vote=mean, most=1, seed=0))
    write_files(run_dir, judged, result, SCALE, {}, PASS)


def test_an_earlier_evaluation_is_read_with_its_costs(tmp_path: Path) -> None:
    items = [scored(number) for number in range(3)]
    judged = judge_items(items, [5, 9, None])
    write_evaluation(tmp_path / "before", judged)
    results = json.loads((tmp_path / "before" / JUDGE_RESULTS).read_text())
    results |= {"num_tokens": 30, "seconds": 6.0, "cost_usd": 0.3}
    (tmp_path / "before" / JUDGE_RESULTS).write_text(json.dumps(results))
    found = read_earlier(tmp_path / "before", "before", JUDGE_RESULTS, items)
    assert found == MeasuredJudge(
        name="before", verdicts=tabulate(judged, SCALE, PASS), tokens=10, seconds=2, cost_usd=pytest.approx(0.1)
    )


@pytest.mark.parametrize(
    ("items", "told"),
    [
        ([scored(7)], "before has none of these items, which are compared by their ids; evaluate both judges on the"),
        ([scored(0, score=6)], "before has other labels of i0: 5 there, 6 here; evaluate both judges on the same"),
        ([RankedResponses(item_id="i0", prompt=scored(0).prompt, responses=("a", "b"), grades=(1, 0))],
         "before has other responses to i0; evaluate both on the same file (evaluate.path)"),
    ],
)  # fmt: skip
def test_an_earlier_evaluation_of_other_items_is_refused(tmp_path: Path, items: list[Labelled], told: str) -> None:
    write_evaluation(tmp_path / "before", judge_items([scored(0)], [5]))
    with pytest.raises(ValueError) as raised:
        read_earlier(tmp_path / "before", "before", JUDGE_RESULTS, items)
    assert told in str(raised.value)
    with pytest.raises(ValueError, match="nowhere has no judged.jsonl: it is no evaluation of a judge"):
        read_earlier(tmp_path / "nowhere", "nowhere", JUDGE_RESULTS, items)
    with (tmp_path / "before" / "judged.jsonl").open("a") as lines:
        lines.write('{"item_id": "cut')
    with pytest.raises(ValueError, match="judged.jsonl, line 2: .*; evaluate again"):
        read_earlier(tmp_path / "before", "before", JUDGE_RESULTS, items)
