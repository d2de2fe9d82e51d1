"""Counts of principles, of early stops, of several judges and of cascades."""

from __future__ import annotations

import dataclasses
import json

import pytest

from grmpipe.models.types import Completion, VersionSpan
from grmpipe.pipeline.counters import Counters, FlowCounters
from grmpipe.pipeline.interfaces import UncountedWork
from grmpipe.pipeline.step_metrics import flow_metrics
from grmpipe.types import (
    CascadeEvent,
    Failed,
    FailedJudgement,
    Judgement,
    JudgeReport,
    RewardSpan,
    Rollout,
    StopAudit,
    Turn,
    Verdict,
)

VERDICT = Verdict(
    rewards=(RewardSpan(turn=0, start=0, end=1, value=0.5),), score=5.0, breakdown={}, score_std=0.0, num_judgements=1
)


def completion(num_tokens: int) -> Completion:
    span = VersionSpan(model="grm", version=0, start=0, end=num_tokens)
    ids = tuple(range(num_tokens))
    return Completion(token_ids=ids, logprobs=(-1.0,) * num_tokens, text="x", finish_reason="stop", versions=(span,))


def rollout() -> Rollout:
    return Rollout(group_id="g", sibling=0, turns=(Turn(new_ids=(1,), completion=completion(5)),), status="finished")


def judgement(num_tokens: int) -> Judgement:
    written = completion(num_tokens)
    return Judgement(
        group_id="g", siblings=(0,), scores=(5.0,), prompt_ids=(1,), completion=written, grm="grm", version=0
    )


def test_principles_are_asked_for_and_cost_tokens_and_enter_no_vote() -> None:
    counters = FlowCounters()
    counters.step.report(JudgeReport(verdict=VERDICT, judgements=(judgement(7),), principles=completion(30)))
    assert (counters.step.judging.asked, counters.step.judging.counted, counters.step.judging.judge_tokens) == (
        2,
        1,
        37,
    )


def test_saved_tokens_and_errors_of_early_stops_are_counted_and_survive_a_checkpoint() -> None:
    counters = FlowCounters()
    counters.step.report(JudgeReport(verdict=VERDICT, saved_tokens=40))
    for stopped, full in ((9.0, 8.0), (5.0, 5.5)):
        audit = StopAudit(stopped_after=2, stopped_score=stopped, full_score=full)
        counters.step.report(JudgeReport(verdict=VERDICT, audit=audit))
    metrics = flow_metrics(counters.step, seconds=1.0)
    assert (metrics["judge/saved_tokens"], metrics["judge/early_stop_error"]) == (40, pytest.approx(0.75))
    counters.close_step()
    restored = Counters.restore(counters.total.to_dict())
    assert (restored.judging.saved_tokens, restored.judging.audits, restored.judging.audit_error) == (40, 2, 1.5)


def test_drafted_and_accepted_tokens_of_judgements_are_metrics_where_an_engine_drafts() -> None:
    counters = FlowCounters()
    counters.step.report(JudgeReport(verdict=VERDICT, judgements=(judgement(7),)))
    assert "judge/drafted_tokens" not in flow_metrics(counters.step, seconds=1.0)
    drafted = dataclasses.replace(completion(7), drafted_tokens=6, accepted_tokens=4)
    failed = FailedJudgement(stage="judge", cause="unparseable", attempts=1, prompt_ids=(1,), completion=drafted)
    counters.step.report(JudgeReport(verdict=VERDICT, failures=(failed, failed)))
    metrics = flow_metrics(counters.step, seconds=1.0)
    assert (metrics["judge/drafted_tokens"], metrics["judge/accepted_tokens"]) == (12, 8)


def test_without_an_early_stop_nothing_is_said_of_one() -> None:
    counters = FlowCounters()
    counters.step.report(JudgeReport(verdict=Failed(stage="judge", cause="undecided", attempts=1)))
    assert not any("early_stop" in name or "saved" in name for name in flow_metrics(counters.step, seconds=1.0))


def of_two_judges() -> JudgeReport:
    cheap = JudgeReport(verdict=VERDICT, judgements=(judgement(7),), principles=completion(30))
    refused = Failed(stage="judge", cause="refused", attempts=0)
    good = JudgeReport(verdict=refused, judgements=(judgement(5),), failures=(refused,), principles=completion(10))
    return JudgeReport(
        verdict=refused,
        judgements=(*cheap.judgements, *good.judgements),
        failures=good.failures,
        principles=cheap.principles,
        by_judge={"cheap": cheap, "good": good},
        cascades=(
            CascadeEvent(cascade="reward", rollouts=4, unsure=1),
            CascadeEvent(cascade="reward", audited=4, error=2),
        ),
    )


def test_what_several_judges_did_is_counted_by_judge_and_once_in_the_totals() -> None:
    counters = FlowCounters()
    counters.step.report(of_two_judges())
    counts, by_judge = counters.step.judging, counters.step.by_judge
    assert (counts.asked, counts.counted, counts.judge_tokens, counts.failed) == (5, 2, 52, {"refused": 1})
    assert (by_judge["cheap"].asked, by_judge["cheap"].judge_tokens, by_judge["cheap"].verdicts) == (2, 37, 1)
    assert (by_judge["good"].asked, by_judge["good"].judge_tokens, by_judge["good"].verdicts) == (3, 15, 0)
    metrics = flow_metrics(counters.step, seconds=1.0)
    assert (metrics["judge/tokens"], metrics["judge/cheap/tokens"], metrics["judge/good/tokens"]) == (52, 37, 15)
    assert (metrics["judge/cheap/score_mean"], metrics["judge/good/failed_refused"]) == (5.0, 1.0)
    assert "judge/good/score_mean" not in metrics
    assert (metrics["cascade/reward/escalated_share"], metrics["cascade/reward/audit_error"]) == (0.0, 0.5)
    assert "cascade/reward/audit_error_se" not in metrics, "one audit has no standard error"


def test_counts_by_judge_outlive_a_checkpoint_as_json() -> None:
    counters, restored = FlowCounters(), FlowCounters()
    counters.step.report(of_two_judges())
    counters.close_step()
    restored.restore(json.loads(json.dumps(counters.total.to_dict())), {})
    assert restored.total == counters.total
    restored.step.report(of_two_judges())
    total = restored.total_so_far()
    assert (total.by_judge["good"].asked, total.cascades["reward"].audited) == (6, 8)


def test_kept_work_is_counted_in_the_first_step_and_its_tokens_took_none_of_its_time() -> None:
    counters, restored = FlowCounters(), FlowCounters()
    counters.step.report(of_two_judges())
    counters.close_step()
    counters.step.report(of_two_judges())  # between the step and its checkpoint
    restored.restore(*(json.loads(json.dumps(saved)) for saved in (counters.total.to_dict(), counters.step.to_dict())))
    report, void = of_two_judges(), JudgeReport(verdict=VERDICT, judgements=(judgement(9),))
    restored.add_recovered(UncountedWork(rollouts=(rollout(),), reports=(report,), void_reports=(void,)))
    assert flow_metrics(restored.step, seconds=2.0).items() >= {
        "rollout/finished": 1, "rollout/tokens": 5, "rollout/tokens_per_s": 0, "judge/asked": 10, "judge/tokens": 104,
        "judge/tokens_per_s": 0, "judge/cheap/tokens": 74, "judge/cheap/tokens_per_s": 0,
    }.items()  # fmt: skip
    restored.step.rollout(rollout())
    restored.step.report(report)
    metrics = flow_metrics(restored.step, seconds=2.0)
    assert (metrics["rollout/tokens_per_s"], metrics["judge/tokens_per_s"]) == (2.5, 26)
    total = restored.total_so_far()
    assert (total.judging.asked, total.void_asked, total.void_judge_tokens) == (20, 1, 9)


def test_an_episode_from_before_a_resume_has_no_times_of_this_process() -> None:
    counters = FlowCounters()
    counters.add_recovered(UncountedWork(rollouts=(dataclasses.replace(rollout(), took_s=2.0, boot_s=1.0),)))
    metrics = flow_metrics(counters.step, seconds=1.0)
    assert metrics["env/turns_mean"] == 1 and "env/boot_s_mean" not in metrics


def test_a_single_judge_is_counted_under_no_name() -> None:
    counters = FlowCounters()
    counters.step.report(JudgeReport(verdict=VERDICT, judgements=(judgement(7),)))
    assert counters.step.by_judge == {}
    assert not any(name.count("/") > 1 for name in flow_metrics(counters.step, seconds=1.0))
