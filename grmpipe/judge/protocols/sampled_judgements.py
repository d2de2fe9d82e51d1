"""Samples k judgements of one question: all at once, or in waves until they are enough."""

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from grmpipe.judge.protocols.early_stop import Stop
from grmpipe.scheduler.run_together import raise_first_failure
from grmpipe.types import Failed, Judgement

Results = Sequence[Judgement | Failed]  # of one index: failures before each retry, then the last result

IN_FULL = Stop(first=1 << 30, wave=1, enough=lambda judgements, num_left: False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledJudgements:
    """The results of sampling.

    stopped_after: how many of the first indices were enough; None if all were needed.
    enough:        the judgements of these.
    saved_tokens:  tokens of judgements that were never requested, at the mean length of the answers; requests cancelled
                   in flight count as spent.
    """

    judgements: tuple[Judgement, ...] = ()
    failures: tuple[Failed, ...] = ()
    enough: tuple[Judgement, ...] = ()
    stopped_after: int | None = None
    saved_tokens: int = 0


async def sample_judgements(
    ask: Callable[[int], Awaitable[Results]], num_judgements: int, stop: Stop = IN_FULL
) -> SampledJudgements:
    """Call `ask(index)` for each judgement. When they are enough, those in flight are cancelled, which frees the
    engine.
    """
    if num_judgements == 1:  # needs no task of its own
        return gather_results([await ask(0)])
    results: list[Results] = []
    tasks: list[asyncio.Task[Results]] = []
    stopped_after: int | None = None
    async with raise_first_failure() as group:
        while len(results) < num_judgements and (stopped_after is None or stop.auditing):
            if len(results) == len(tasks):
                wave = num_judgements if stop.auditing else stop.wave if tasks else stop.first
                indices = range(len(tasks), min(num_judgements, len(tasks) + wave))
                tasks += [group.create_task(ask_one(ask, index)) for index in indices]
            results.append(await tasks[len(results)])
            num_left = num_judgements - len(results)
            undecided = stopped_after is None and num_left > 0 and len(results) >= stop.first
            if undecided and stop.enough(list_judgements(results), num_left):
                stopped_after = len(results)
        for task in tasks[len(results) :]:
            task.cancel()
    return gather_results(results, stopped_after=stopped_after, num_unasked=num_judgements - len(tasks))


async def ask_one(ask: Callable[[int], Awaitable[Results]], index: int) -> Results:
    return await ask(index)


def gather_results(
    results: Sequence[Results], *, stopped_after: int | None = None, num_unasked: int = 0
) -> SampledJudgements:
    judgements = list_judgements(results)
    lengths = [judgement.completion.num_tokens for judgement in judgements]
    return SampledJudgements(
        judgements=judgements,
        failures=tuple(result for some in results for result in some if isinstance(result, Failed)),
        enough=list_judgements(results[:stopped_after]),
        stopped_after=stopped_after,
        saved_tokens=round(num_unasked * statistics.fmean(lengths)) if num_unasked and lengths else 0,
    )


def list_judgements(results: Sequence[Results]) -> tuple[Judgement, ...]:
    return tuple(result for some in results for result in some if isinstance(result, Judgement))
