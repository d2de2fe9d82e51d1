"""A pipeline that continues from its state: each prompt is trained once, kept verdicts are mixed with no others."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import cast

import pytest
from pipeline_bench import Bench, Judge, LearningJudge, Prompts, Together, flow, long_tailed

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.data.stream import NothingToJudge
from grmpipe.pipeline.consumer import Interrupted
from grmpipe.pipeline.health import Unfit
from grmpipe.pipeline.interfaces import (
    PipelineState,
    RecoveredGroup,
    StepReport,
)
from grmpipe.types import (
    Failed,
    JudgeReport,
    Prompt,
    RewardSpan,
    Rollout,
    Verdict,
)


def test_run_ends_with_its_prompts_and_accounts_for_each() -> None:
    bench = Bench(flow(num_steps=100), prompts=Prompts(count=10))
    pipeline = bench.run()
    assert pipeline.version == 2
    assert (pipeline.ledger.trained, pipeline.ledger.dropped) == (8, {"end_of_prompts": 2})
    assert set(bench.journal.prompts) == {f"p{prompt_index}" for prompt_index in range(10)}


class WithGaps(Prompts):
    """Every third place is that of a judging task; until `since` there is none to give."""

    since = 0

    def at(self, prompt_index: int) -> Prompt:
        prompt = super().at(prompt_index)
        if prompt_index % 3 == 2 and prompt_index < self.since:
            raise NothingToJudge
        return replace(prompt, self_judging=prompt_index % 3 == 2)


def test_places_without_a_judging_task_stay_empty_and_open_no_group() -> None:
    prompts = WithGaps(count=30)
    prompts.since = 10
    bench = Bench(flow(num_steps=100), prompts=prompts)
    ledger = bench.run().ledger
    given = {f"p{place}" for place in range(30)} - {"p2", "p5", "p8"}
    assert set(bench.journal.prompts) == given
    assert ledger.submitted == len(given) == ledger.trained + ledger.dropped.total()


def test_a_judging_task_in_flight_that_a_resume_cant_make_again_leaves_its_place_empty() -> None:
    prompts = WithGaps(count=30)
    prompts.since = 30
    state = PipelineState(version=1, next_prompt_index=6, in_flight={2: "g000002", 4: "g000004"})
    bench = Bench(flow(num_steps=100), prompts=prompts, pipeline_state=state)
    ledger = bench.run().ledger
    assert set(bench.journal.prompts) == {"p4", *(f"p{place}" for place in range(6, 30) if place % 3 != 2)}
    assert ledger.in_flight == 0 and ledger.submitted == ledger.trained + ledger.dropped.total()


def test_labels_say_nothing_of_the_health_of_the_judge() -> None:
    """Half of the groups are judging tasks, on which the judge isn't asked; of the others it fails all."""
    failed = Failed(stage="judge", cause="timeout", attempts=1)
    asked = set[str]()

    def fails_on_answers(rollout: Rollout) -> Failed | None:
        asked.add(rollout.group_id)
        return None if int(rollout.group_id[1:]) % 3 == 2 else failed

    bench = Bench(flow(num_steps=2), prompts=WithGaps(), judge=Judge(mishap=fails_on_answers), max_failure_rate=0.7)
    with pytest.raises(Unfit):
        bench.run()


def test_interrupted_run_resumes_and_trains_each_prompt_once() -> None:
    first = Bench(flow(num_steps=8), lengths=long_tailed)

    async def stop_after_three() -> None:
        first.pipeline = first.build()
        first.after_step_hook = first.after_step

        async def after_step(report: StepReport) -> None:
            first.reports.append(report)
            if report.step == 3:
                first.pipeline.interrupt()

        first.pipeline.after_step = after_step
        await first.pipeline.run()

    with pytest.raises(Interrupted):
        run_virtually(stop_after_three)
    pipeline_state = first.pipeline.state()
    assert pipeline_state.version == 3
    done = {group.prompt.prompt_id for groups in first.trainer.steps for group in groups}
    kept = {
        prompt_index: RecoveredGroup(
            group_id=group_id, rollouts=tuple(r for r in first.journal.rollouts if r.group_id == group_id)
        )
        for prompt_index, group_id in pipeline_state.in_flight.items()
    }
    second = Bench(flow(num_steps=8), lengths=long_tailed, pipeline_state=pipeline_state, kept=kept)
    ledger = second.run().ledger
    trained = [group.prompt.prompt_id for groups in second.trainer.steps for group in groups]
    assert len(trained) == len(set(trained)) == 20
    assert not done & set(trained)
    assert done | set(trained) == {f"p{prompt_index}" for prompt_index in range(32)}
    assert ledger.submitted == ledger.trained == 32


def test_resumed_judge_of_whole_groups_judges_only_groups_that_lack_a_verdict() -> None:
    first = Bench(flow(num_steps=1, max_staleness=0))
    first.run()
    rollouts = [dataclasses.replace(r, group_id="g000000") for r in first.trainer.steps[0][0].rollouts]
    verdict = first.trainer.steps[0][0].verdicts[0]
    kept = {
        0: RecoveredGroup(group_id="g000000", rollouts=tuple(rollouts), reports={0: JudgeReport(verdict=verdict)}),
        1: RecoveredGroup(
            group_id="g000001",
            rollouts=tuple(dataclasses.replace(r, group_id="g000001") for r in rollouts),
            reports={sibling: JudgeReport(verdict=verdict) for sibling in range(4)},
        ),
    }
    bench = Bench(flow(num_steps=1, max_staleness=0), group_judge=Together(), kept=kept)
    bench.run()
    assert bench.group_judge.sessions["g000000"].held == [(), (0, 1, 2, 3)]
    assert bench.group_judge.sessions["g000001"].held == []
    assert {key: count for key, count in bench.journal.verdicts.items() if key[0] == "g000000"} == {
        ("g000000", sibling): 1 for sibling in (1, 2, 3)
    }


@pytest.mark.parametrize(("versions", "kept"), [((2, 2), True), ((1, 1), False), ((1, 2), False), ((1,) * 4, True)])
def test_verdicts_kept_over_a_resume_are_not_mixed_with_those_of_another_version(
    versions: tuple[int, ...], kept: bool
) -> None:
    """The judge is at version 2; two verdicts of four leave a group incomplete."""
    first = Bench(flow(num_steps=1, max_staleness=0))
    first.run()
    rollouts = tuple(dataclasses.replace(r, group_id="g000000") for r in first.trainer.steps[0][0].rollouts)
    span = RewardSpan(turn=0, start=0, end=1, value=0.5)
    old = Verdict(rewards=(span,), score=5.0, breakdown={}, score_std=0.0, num_judgements=1)
    reports = {n: JudgeReport(verdict=dataclasses.replace(old, grm_version=v)) for n, v in enumerate(versions)}
    work = RecoveredGroup(group_id="g000000", rollouts=rollouts, reports=reports)
    pipeline_state = PipelineState(version=0, next_prompt_index=1, in_flight={0: "g000000"}, judge_version=2)
    bench = Bench(
        flow(num_steps=1, max_staleness=0),
        judge=LearningJudge(version=2),
        pipeline_state=pipeline_state,
        kept={0: work},
    )
    bench.run()
    (group,) = [group for group in bench.trainer.steps[0] if group.group_id == "g000000"]
    got = [verdict.grm_version for verdict in group.verdicts if isinstance(verdict, Verdict)]
    assert got == (list(versions) + [2] * (4 - len(versions)) if kept else [2] * 4)
    assert sum(v.score == 5.0 for v in group.verdicts if isinstance(v, Verdict)) == (len(versions) if kept else 0)


@pytest.mark.parametrize("num_kept", [1, 4])
def test_where_rewards_depend_on_their_group_a_resume_keeps_the_verdicts_of_whole_groups_only(num_kept: int) -> None:
    first = Bench(flow(num_steps=1, max_staleness=0))
    first.run()
    before = next(group for group in first.trainer.steps[0] if group.group_id == "g000000")
    better = dataclasses.replace(cast(Verdict, before.verdicts[0]), score=9.0)  # by the second judge of a cascade
    reports = {sibling: JudgeReport(verdict=better) for sibling in range(num_kept)}
    bench = Bench(
        flow(num_steps=1, max_staleness=0, keeps_whole_groups=True),
        pipeline_state=PipelineState(next_prompt_index=1, in_flight={0: "g000000"}),
        kept={0: RecoveredGroup(group_id="g000000", rollouts=tuple(before.rollouts), reports=reports)},
    )
    bench.run()
    (group,) = [group for group in bench.trainer.steps[0] if group.group_id == "g000000"]
    kept = [isinstance(verdict, Verdict) and verdict.score == 9.0 for verdict in group.verdicts]
    assert kept == [num_kept == 4] * 4
