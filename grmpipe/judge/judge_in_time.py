"""Judges a whole group outside the pipeline, until a deadline."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from grmpipe.judge.pointwise_adapter import NOT_TAKEN
from grmpipe.judge.verdict import make_failure, only_finite, report_failures
from grmpipe.scheduler.run_together import raise_first_failure
from grmpipe.types import Judge, JudgeReport, JudgeTask, Prompt, Rollout

LATE = report_failures(make_failure("timeout", "group deadline", attempts=1))


async def judge_in_time(
    judge: Judge,
    prompt: Prompt,
    rollouts: Sequence[Rollout],
    limit: AbstractAsyncContextManager[object],
    priority: int = 0,
) -> tuple[JudgeReport, ...]:
    """The reports on all siblings, in their order: when the limit raises TimeoutError, those that are missing have
    timed out. The lowest priority goes first. A judge that compares can't take one alone: it is refused.
    """
    session = judge.open(prompt, rollouts[0].group_id, len(rollouts))
    judge_tasks = [*session.begin()]
    for rollout in rollouts:
        judge_tasks += session.add(rollout)
    if not judge_tasks:
        return (NOT_TAKEN,) * len(rollouts)
    reports: dict[int, JudgeReport] = {}

    async def do(judge_task: JudgeTask) -> None:
        for sibling, report in (await session.judge(judge_task, priority)).items():
            reports[sibling] = only_finite(report)

    try:
        async with limit, raise_first_failure() as tasks:
            for judge_task in judge_tasks:
                tasks.create_task(do(judge_task))
    except TimeoutError:
        pass
    return tuple(reports.get(rollout.sibling, LATE) for rollout in rollouts)
