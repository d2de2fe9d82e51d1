"""What the stages of a pipeline wait for: by cause, in the metrics and in the log."""

from __future__ import annotations

import re
from dataclasses import asdict

import pytest
from pipeline_bench import Bench, Judge, Trainer, flow, long_tailed

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.pipeline.stall_times import StallTimes


def test_judging_starts_before_the_last_rollout_of_the_batch_ends() -> None:
    bench = Bench(flow(num_steps=1, max_staleness=0), lengths=long_tailed)
    bench.run()
    assert min(bench.judge.began) < max(bench.ended_rollouts)


def test_waiting_learner_starts_with_the_groups_it_has_and_the_journal_marks_them() -> None:
    bench = Bench(flow(max_staleness=0), lengths=long_tailed)
    bench.run()
    assert set(bench.trainer.waited) == {1, 2, 3}  # never with an empty batch, nor with a full one
    firsts = [groups[0].group_id for groups in bench.trainer.steps]
    assert bench.journal.early and set(bench.journal.early) <= set(firsts)


def test_wait_of_60_s_names_its_groups_and_their_causes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One rollout never ends; the second batch keeps a place for its group. Another group ends after 50 s."""
    bench = Bench(
        flow(num_steps=3, group_deadline_s=100.0),
        lengths=lambda context: 10**6 if context.request_id == "g000002/1/t0" else 20,
        judge=Judge(delay=lambda rollout: 50.0 if rollout.group_id == "g000009" else 0.1),
    )
    bench.run()
    (told,) = [record.message for record in caplog.records if "the learner waits for groups" in record.message]
    hangs = r"pending: g000002 \(rolling out: rollouts missing: 1; verdicts missing: 1; the policy has begun; 40 s to"
    assert re.search(hangs, told)
    assert re.search(r"; g000009 \(ready: the open batch's places are for groups .* due before it: g000002\)", told)


def total_waits(bench: Bench) -> StallTimes:
    return sum((report.stalls for report in bench.reports), StallTimes())


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_every_second_of_a_step_is_a_wait_the_learners_work_or_the_push(max_staleness: int) -> None:
    bench = Bench(flow(num_steps=12, max_staleness=max_staleness), lengths=long_tailed)
    bench.run()
    for report in bench.reports:
        times = report.stalls
        assert times.steps_s == pytest.approx(
            times.for_groups_s + report.learner_busy_s + times.weight_sync_s, abs=1e-3
        )
        assert times.weight_sync_s == pytest.approx(bench.sync_s, abs=1e-3)
        assert 0 <= times.training_s <= report.learner_busy_s + 1e-3


def test_a_slow_judge_a_slow_policy_and_a_slow_learner_are_each_named_by_their_waits() -> None:
    slow_judge = Bench(flow(num_steps=12), judge=Judge(delay=lambda rollout: 3.0), lengths=lambda context: 10)
    slow_policy = Bench(flow(num_steps=12), lengths=lambda context: 300)
    slow_learner = Bench(flow(num_steps=12), trainer=Trainer(step_s=3.0), lengths=lambda context: 10)
    for bench, name in ((slow_judge, "verdicts_s"), (slow_policy, "rollouts_s"), (slow_learner, "training_s")):
        bench.run()
        times = asdict(total_waits(bench))
        steps_s = times.pop("steps_s")
        assert max(times, key=times.__getitem__) == name
        assert times[name] > 0.5 * steps_s


def test_the_last_steps_which_need_no_new_groups_hold_no_engine_up() -> None:
    bench = Bench(flow(num_steps=3, max_staleness=0), trainer=Trainer(step_s=2.0))
    bench.run()
    assert [round(report.stalls.training_s) for report in bench.reports] == [2, 2, 0]


def test_a_judge_that_serves_the_nearly_complete_and_the_due_first_lets_the_learner_begin_sooner() -> None:
    def first_step_s(ranked: bool) -> float:
        bench = Bench(
            flow(num_steps=6, judge_concurrency=1), judge=Judge(delay=lambda rollout: 0.2), lengths=long_tailed
        )

        async def go() -> None:
            pipeline = bench.build()
            if not ranked:
                pipeline._producer.judging._rank = lambda item: 0  # in the order of arrival
            await pipeline.run()

        run_virtually(go)
        return bench.reports[0].stalls.steps_s

    assert first_step_s(ranked=True) < 0.9 * first_step_s(ranked=False)
