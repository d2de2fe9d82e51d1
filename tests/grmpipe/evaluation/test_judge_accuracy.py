"""A judge is right if the label is its strict winner or its score; failures and ties are reported, and never right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from grmpipe.config.judge import Scale
from grmpipe.evaluation.evaluation_files import show, write_files
from grmpipe.evaluation.judge_accuracy import Recount, evaluate
from grmpipe.evaluation.judged_items import JudgedItem, decide_outcome
from grmpipe.judge.pointwise_adapter import rollout_of_text
from grmpipe.judge.votes import mean, voted
from grmpipe.models.types import Completion, Message
from grmpipe.run.tasks.evaluate_judge import name_metrics
from grmpipe.types import (
    Failed,
    FailedJudgement,
    Judgement,
    JudgeReport,
    Prompt,
    RankedResponses,
    ScoredResponse,
    mark_best,
)

SCALE = Scale()
ASKED = Prompt(prompt_id="p", messages=(Message(role="user", content="6 x 7?"),))
RECOUNT = Recount(ks=(1, 2, 4), vote=mean, most=100, seed=0)


def ranked(*responses: str, best: int = 0, item_id: str = "r", subset: str = "") -> RankedResponses:
    return RankedResponses(
        item_id=item_id, prompt=ASKED, responses=responses, grades=mark_best(best, len(responses)), subset=subset
    )


def scored(score: float) -> ScoredResponse:
    return ScoredResponse(item_id="s", prompt=ASKED, response="42", score=score)


def said(num_tokens: int) -> Completion:
    return Completion(
        token_ids=(7,) * num_tokens, logprobs=(0.0,) * num_tokens, text="", finish_reason="stop", versions=()
    )


def judgement(sibling: int, score: float) -> Judgement:
    return Judgement(
        group_id="g", siblings=(sibling,), scores=(score,), prompt_ids=(), completion=said(5), grm="grm", version=0
    )


def report(sibling: int, *scores: float, unparseable: int = 0) -> JudgeReport:
    failures = (
        FailedJudgement(stage="judge", cause="unparseable", attempts=1, prompt_ids=(), completion=said(3)),
    ) * unparseable
    if not scores:
        failed = Failed(stage="judge", cause="truncated", attempts=4)
        return JudgeReport(verdict=failed, failures=failures or (failed,))
    verdict = voted("generative", rollout_of_text("g", sibling, "x"), scores, mean, SCALE)
    return JudgeReport(
        verdict=verdict, judgements=tuple(judgement(sibling, score) for score in scores), failures=failures
    )


@pytest.mark.parametrize(
    ("scores", "outcome"),
    [({0: 8, 1: 7, 2: 1}, "right"), ({0: 7, 1: 8, 2: 1}, "wrong"), ({0: 8, 1: 1, 2: 8}, "tied"),
     ({0: 9, 1: 1}, "failed"), ({1: 1, 2: 1}, "failed"), ({}, "failed")],
)  # fmt: skip
def test_the_best_must_stand_strictly_above_all_others(scores: dict[int, float], outcome: str) -> None:
    assert decide_outcome(ranked("a", "b", "c"), scores, 8) == outcome


@pytest.mark.parametrize(
    ("score", "outcome"), [(8.0, "right"), (7.5, "right"), (8.49, "right"), (8.5, "wrong"), (7.4, "wrong")]
)
def test_a_score_is_right_if_it_rounds_to_the_label(score: float, outcome: str) -> None:
    assert decide_outcome(scored(8), {0: score}, 8) == outcome
    assert decide_outcome(scored(8), {}, 8) == "failed"


@pytest.mark.parametrize(
    ("grades", "scores", "outcome"),
    [
        ((2, 2, 1), (9, 7, 3), "right"), ((2, 2, 1), (9, 3, 3), "tied"), ((2, 2, 1), (9, 2, 3), "wrong"),
        ((1, 1, 1), (5, 5, 5), "right"), ((1, 1, 1), (5, 5, 6), "wrong"), ((3, 1, 2), (9, 5, 2), "right"),
    ],
)  # fmt: skip
def test_all_of_the_highest_grade_must_be_above_the_others(
    grades: tuple[float, ...], scores: tuple[float, ...], outcome: str
) -> None:
    item = replace(ranked("a", "b", "c"), grades=grades)
    assert decide_outcome(item, dict(enumerate(scores)), 8) == outcome


def test_a_label_between_two_scores_is_rounded_as_the_judges_score_is() -> None:
    assert [decide_outcome(scored(5.5), {0: score}, 8) for score in (5.4, 5.5, 6.4)] == ["wrong", "right", "right"]


def test_failed_items_stay_in_the_denominator_and_are_counted_by_cause() -> None:
    good = JudgedItem(item=ranked("a", "b"), reports=(report(0, 9), report(1, 2)), num_asked=1)
    lost = JudgedItem(item=ranked("a", "b"), reports=(report(0, 9), report(1, unparseable=2)), num_asked=1)
    result = evaluate([good, lost], SCALE, Recount(ks=(1,), vote=mean, most=9, seed=0))
    assert (result.overall.judged.accuracy, result.overall.judged.failed_share) == (0.5, 0.5)
    assert result.overall.by_k[1].accuracy == 0.5
    assert result.failed_items == {"truncated": 1}
    assert result.failed_judgements == {"unparseable": 2}
    assert (result.num_judgements, result.num_tokens) == (5, 3 * 5 + 2 * 3)


def test_items_that_the_judge_could_not_be_asked_about_are_in_no_figure_and_counted() -> None:
    down = Failed(stage="judge", cause="refused", attempts=2)
    good = JudgedItem(item=ranked("a", "b"), reports=(report(0, 9), report(1, 2)), num_asked=1)
    lost = JudgedItem(item=ranked("a", "b"), reports=(report(0, 9), JudgeReport(verdict=down)), num_asked=1)
    result = evaluate([good, lost], SCALE, Recount(ks=(1,), vote=mean, most=9, seed=0))
    assert (result.overall.judged.accuracy, result.overall.judged.num_items) == (1.0, 1)
    assert (result.overall.by_k[1].accuracy, result.failed_items, result.lost_items) == (1.0, {}, {"refused": 1})
    assert name_metrics(result, "judge")["lost_items"] == 1
    unasked = JudgeReport(verdict=replace(down, attempts=0))
    assert replace(lost, reports=(unasked, unasked)).outage is None, "a rule without a reference asked nobody"


def test_smaller_votes_are_means_over_all_subsets() -> None:
    """Three of four judgements see the winner: a single one is right in 3 of 4, two in 3 of 6 and tied in the rest."""
    item = ranked("a", "b")
    one = JudgedItem(item=item, reports=(report(0, 9, 9, 9, 1), report(1, 5, 5, 5, 5)), num_asked=4)
    result = evaluate([one], SCALE, RECOUNT).overall
    assert result.by_k[1].accuracy == 0.75
    assert (result.by_k[2].accuracy, result.by_k[2].tied_share) == (0.5, 0.5)
    assert result.by_k[4].accuracy == result.judged.accuracy == 1.0


def test_a_failed_judgement_is_missing_in_the_subsets_that_hold_it() -> None:
    one = JudgedItem(item=ranked("a", "b"), reports=(report(0, 9, unparseable=1), report(1, 5, 5)), num_asked=2)
    result = evaluate([one], SCALE, Recount(ks=(1, 2), vote=mean, most=9, seed=0)).overall
    assert (result.by_k[1].accuracy, result.by_k[1].failed_share) == (0.5, 0.5)
    assert result.by_k[2].accuracy == 1.0


def test_the_meta_rm_guides_the_recounted_votes() -> None:
    """Three of four judgements are wrong, and the meta-RM knows which: the better half of four is a tie."""
    reports = (report(0, 9, 1, 1, 1), report(1, 5, 5, 5, 5))
    one = JudgedItem(
        item=ranked("a", "b"), reports=reports, num_asked=4, meta_rm_weights=(0.9, 0.1, 0.1, 0.1, 0.5, 0.5, 0.5, 0.5)
    )
    result = evaluate([one], SCALE, RECOUNT).overall
    assert result.by_k[2].accuracy == 0.0
    assert result.with_meta_rm[2].accuracy == 0.5


def test_subsets_are_measured_alone_and_costs_are_split_by_judgements() -> None:
    right = JudgedItem(item=ranked("a", "b", subset="sums"), reports=(report(0, 9, 9), report(1, 2, 2)), num_asked=2)
    wrong = JudgedItem(item=ranked("a", "b", subset="prose"), reports=(report(0, 2, 2), report(1, 9, 9)), num_asked=2)
    result = evaluate([right, wrong], SCALE, Recount(ks=(1, 2), vote=mean, most=9, seed=0))
    assert {name: subset.judged.accuracy for name, subset in result.subsets.items()} == {"sums": 1.0, "prose": 0.0}
    assert result.tokens_by_k == {1: 10.0, 2: 20.0}
    whole = result.overall.judged
    assert (whole.accuracy, whole.num_items, whole.tied_share, whole.failed_share) == (0.5, 2, 0.0, 0.0)


def test_an_accuracy_of_one_has_an_interval_and_items_of_one_prompt_count_as_one() -> None:
    def item(number: int, question: str) -> JudgedItem:
        prompt = replace(ASKED, messages=(Message(role="user", content=question),))
        labelled = replace(ranked("a", "b", item_id=str(number)), prompt=prompt)
        return JudgedItem(item=labelled, reports=(report(0, 9), report(1, 2)), num_asked=1)

    different = evaluate([item(n, f"{n} x 7?") for n in range(9)], SCALE, replace(RECOUNT, ks=(1,))).overall.judged
    siblings = evaluate([item(n, f"{n // 3} x 7?") for n in range(9)], SCALE, replace(RECOUNT, ks=(1,))).overall.judged
    assert (different.accuracy, different.num_prompts, siblings.accuracy, siblings.num_prompts) == (1.0, 9, 1.0, 3)
    assert different.error > 0
    assert (different.low, siblings.low) == (pytest.approx(0.65, abs=0.01), pytest.approx(0.38, abs=0.01))
    metrics = name_metrics(
        evaluate([item(n, f"{n} x 7?") for n in range(9)], SCALE, replace(RECOUNT, ks=(1,))), "judge"
    )
    assert (metrics["accuracy_low"], metrics["accuracy_high"]) == (different.low, 1.0)


def test_costs_are_of_prompts_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def read(said: JudgeReport, num_tokens: int) -> JudgeReport:
        judgements = tuple(replace(one, prompt_ids=(1,) * num_tokens) for one in said.judgements)
        return replace(said, judgements=judgements)

    reports = (read(report(0, 9, 9), 100), read(report(1, 2, 2), 60))
    both = JudgedItem(item=ranked("a", "b"), reports=reports, num_asked=2)
    local = evaluate([both], SCALE, replace(RECOUNT, ks=(1, 2)))
    assert (local.num_prompt_tokens, local.prompt_tokens_by_k[1], local.tokens_by_k[1]) == (320, 160.0, 10.0)
    remote = evaluate(
        [JudgedItem(item=ranked("a", "b"), reports=(report(0, 9), report(1, 2)), num_asked=1)],
        SCALE,
        replace(RECOUNT, ks=(1,)),
    )
    assert remote.num_prompt_tokens is None, "an endpoint returns no token ids"
    show(local, 9, tmp_path)
    show(remote, 9, tmp_path)
    out = " ".join(capsys.readouterr().out.split())
    assert "tokens of prompts per item: 160 at k=1" in out and "tokens of prompts per item: not known here" in out


def test_length_bias_is_shown_next_to_that_of_the_labels() -> None:
    items = [ranked("short", "a much longer one", item_id=str(index)) for index in range(3)]
    judged = [JudgedItem(item=item, reports=(report(0, 2), report(1, 9)), num_asked=1) for item in items]
    bias = evaluate(judged, SCALE, Recount(ks=(1,), vote=mean, most=9, seed=0)).bias
    assert bias["score_length_correlation"] == pytest.approx(1.0)
    assert bias["label_length_correlation"] == pytest.approx(-1.0)


def composed(sibling: int, **scores: float | None) -> JudgeReport:
    """The report of a mean of judges, each with one score; None: it failed, and with it their mean."""
    own = {name: report(sibling, *([] if score is None else [score])) for name, score in scores.items()}
    known = [score for score in scores.values() if score is not None]
    together = report(sibling, *(known if len(known) == len(own) else []))
    return replace(
        together,
        by_judge=own,
        judgements=tuple(judgement for one in own.values() for judgement in one.judgements),
        failures=tuple(failure for one in own.values() for failure in one.failures),
    )


def test_composition_is_measured_along_with_its_judges() -> None:
    judged = [
        JudgedItem(item=ranked("a", "b"), reports=(composed(0, a=9, b=4), composed(1, a=2, b=5)), num_asked=1),
        JudgedItem(item=ranked("a", "b"), reports=(composed(0, a=9, b=9), composed(1, a=2, b=2)), num_asked=1),
        JudgedItem(item=ranked("a", "b"), reports=(composed(0, a=9, b=None), composed(1, a=2, b=2)), num_asked=1),
        JudgedItem(item=ranked("a", "b"), reports=(composed(0, a=9), composed(1, a=2)), num_asked=1),
    ]
    result = evaluate(judged, SCALE, replace(RECOUNT, ks=()))
    assert result.overall.judged.accuracy == 3 / 4
    a, b = result.by_judge["a"], result.by_judge["b"]
    assert (a.overall.judged.accuracy, a.overall.judged.num_items) == (1.0, 4)
    assert (b.overall.judged.accuracy, b.overall.judged.num_items) == (1 / 3, 3), "b was not asked about the last item"
    assert (b.overall.judged.failed_share, b.failed_judgements, a.failed_judgements) == (1 / 3, {"truncated": 1}, {})
    assert a.num_tokens + b.num_tokens == 5 * (8 + 5)
    metrics = name_metrics(replace(result, by_judge={"judge": a, "b": b}), "judge")
    assert (metrics["accuracy"], metrics["grm_accuracy"], metrics["b_failed_share"]) == (3 / 4, 1.0, 1 / 3)
    assert not [name for name in metrics if "judge" in name]


def test_costs_of_a_judge_include_items_that_it_saw_in_part() -> None:
    """Behind a gate that vetoes one of two responses, the inner judge sees the other one only."""
    both = JudgedItem(item=ranked("a", "b"), reports=(composed(0, a=9, b=9), composed(1, a=2, b=2)), num_asked=1)
    half = JudgedItem(item=ranked("a", "b"), reports=(composed(0, a=9, b=9), composed(1, a=2)), num_asked=1)
    lost = JudgedItem(item=ranked("a", "b"), reports=(composed(0, a=9, b=None), composed(1, a=2)), num_asked=1)
    result = evaluate([both, half, lost], SCALE, replace(RECOUNT, ks=()))
    b = result.by_judge["b"]
    assert (b.num_judgements, b.failed_judgements, b.num_tokens) == (4, {"truncated": 1}, 3 * 5)
    assert sum(own.num_tokens for own in result.by_judge.values()) == result.num_tokens == (6 + 3) * 5
    assert sum(own.num_judgements for own in result.by_judge.values()) == result.num_judgements
    assert (b.overall.judged.num_items, b.overall.judged.accuracy) == (1, 1.0)


def test_a_judge_that_saw_no_item_as_a_whole_has_costs_and_no_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = [JudgedItem(item=ranked("a", "b"), reports=(composed(0, a=9, b=9), composed(1, a=2)), num_asked=1)]
    result = evaluate(judged, SCALE, replace(RECOUNT, ks=()))
    assert "b_accuracy" not in name_metrics(result, "judge") and "a_accuracy" in name_metrics(result, "judge")
    write_files(tmp_path, judged, result, SCALE, {"a": SCALE, "b": SCALE}, 8)
    show(result, 100, tmp_path)
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["b", "0", "-", "-", "-", "-", "1", "0", "5"] in rows
    written = json.loads((tmp_path / "evaluation.json").read_text())
    assert written["by_judge"]["b"]["overall"]["judged"]["accuracy"] is None


def test_two_judges_that_disagree_are_no_order_flips() -> None:
    def compared(order: tuple[int, int], *scores: float) -> JudgeReport:
        shown = replace(judgement(0, 0.0), siblings=order, scores=scores)
        return replace(report(0, 5), judgements=(shown,))

    own = {"a": compared((0, 1), 9, 1), "b": compared((1, 0), 9, 1)}
    first = replace(report(0, 5), by_judge=own)
    second = replace(report(1, 4), by_judge={"a": report(1, 4), "b": report(1, 4)})
    result = evaluate(
        [JudgedItem(item=ranked("x", "y"), reports=(first, second), num_asked=1)], SCALE, replace(RECOUNT, ks=())
    )
    assert "order_flips_share" not in result.bias
    assert (result.bias["first_place_share"], result.bias["ties_share"]) == (1.0, 0.0)


def test_no_line_holds_a_secret_that_a_server_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "planted-0123456789")
    denied = Failed(stage="judge", cause="refused", attempts=1, detail="401: the key planted-0123456789 is unknown")
    reports = (replace(report(0, 5), failures=(denied,)), report(1, 4))
    judged = [JudgedItem(item=ranked("a", "b"), reports=reports, num_asked=1)]
    write_files(tmp_path, judged, evaluate(judged, SCALE, replace(RECOUNT, ks=())), SCALE, {}, 8)
    written = (tmp_path / "judged.jsonl").read_text()
    assert "401: the key" in written and "planted-0123456789" not in written


def test_the_files_and_the_table_say_whose_scores_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judged = [JudgedItem(item=ranked("a", "b"), reports=(composed(0, a=9, b=None), composed(1, a=2, b=1)), num_asked=1)]
    result = evaluate(judged, SCALE, replace(RECOUNT, ks=()))
    write_files(tmp_path, judged, result, SCALE, {"a": SCALE, "b": Scale(low=0, high=100)}, 8)
    (line,) = [json.loads(line) for line in (tmp_path / "judged.jsonl").read_text().splitlines()]
    assert line["outcome"] == "failed"
    assert line["by_judge"]["a"] == {"outcome": "right", "scores": {"0": 9.0, "1": 2.0}, "failed": {}}
    assert line["by_judge"]["b"] == {"outcome": "failed", "scores": {"1": 0.0}, "failed": {"0": "truncated"}}
    assert [one["judge"] for one in line["judgements"]] == ["a", "a", "b"]
    show(result, 100, tmp_path)
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["a", "1", "100.0", "17-100", "0.0", "0.0", "2", "0", "10"] in rows
    assert ["b", "1", "0.0", "0-83", "0.0", "100.0", "2", "1", "5"] in rows
    assert ["together", "1", "0.0", "0-83", "0.0", "100.0", "4", "1", "15"] in rows
    assert ["by", "b", "(1", "truncated)"] in rows
