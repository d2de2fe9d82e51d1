"""Counts of principles and of early stops."""

from __future__ import annotations

import pytest

from grmpipe.pipeline.counters import Counters, FlowCounters, flow_metrics
from grmpipe.types import Failed, Judgement, JudgeReport, StopAudit, Verdict
from models.types import Completion, VersionSpan

VERDICT = Verdict(rewards=(), score=5.0, breakdown={}, score_std=0.0, num_judgements=1)


def completion(num_tokens: int) -> Completion:
    span = VersionSpan(model="grm", version=0, start=0, end=num_tokens)
    ids = tuple(range(num_tokens))
    return Completion(token_ids=ids, logprobs=(-1.0,) * num_tokens, text="x", finish_reason="stop", versions=(span,))


def judgement(num_tokens: int) -> Judgement:
    written = completion(num_tokens)
    return Judgement(
        group_id="g", siblings=(0,), scores=(5.0,), prompt_ids=(1,), completion=written, grm="grm", version=0
    )


def test_principles_are_asked_for_and_cost_tokens_and_enter_no_vote() -> None:
    counters = FlowCounters()
    counters.report(JudgeReport(verdict=VERDICT, judgements=(judgement(7),), principles=completion(30)))
    assert (counters.step.asked, counters.step.counted, counters.step.judge_tokens) == (2, 1, 37)


def test_saved_tokens_and_the_error_of_audited_stops_are_told_and_outlive_a_checkpoint() -> None:
    counters = FlowCounters()
    counters.report(JudgeReport(verdict=VERDICT, saved_tokens=40))
    for stopped, full in ((9.0, 8.0), (5.0, 5.5)):
        audit = StopAudit(stopped_after=2, stopped_score=stopped, full_score=full)
        counters.report(JudgeReport(verdict=VERDICT, audit=audit))
    metrics = flow_metrics(counters.step, seconds=1.0)
    assert (metrics["judge/saved_tokens"], metrics["judge/early_stop_error"]) == (40, pytest.approx(0.75))
    counters.close_step()
    restored = Counters.restored(counters.saved())
    assert (restored.saved_tokens, restored.audits, restored.audit_error) == (40, 2, 1.5)


def test_without_an_early_stop_nothing_is_said_of_one() -> None:
    counters = FlowCounters()
    counters.report(JudgeReport(verdict=Failed(stage="judge", cause="undecided", attempts=1)))
    assert not any("early_stop" in name or "saved" in name for name in flow_metrics(counters.step, seconds=1.0))
