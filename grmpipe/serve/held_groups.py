"""Requests of trainers that can't be told "failed": held while a failed judgement is asked again, and while siblings
are still to come that the reward depends on.

A response comes alone, as one of a group that its trainer compares. It is judged when it comes, except by judges that
compare siblings: they get the group once it is whole. What fails is asked again, with growing pauses, for as long as
the client waits; then it is told why there is no verdict, and its next try finds what was asked meanwhile.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import fsum

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.reward import RewardTree
from grmpipe.config.task_settings import ServeConfig
from grmpipe.data.rows import Row
from grmpipe.observe.recorder import JudgedSibling
from grmpipe.serve.admission import Admission, Refused
from grmpipe.serve.call_log import Imputations
from grmpipe.serve.open_calls import digest_question
from grmpipe.serve.wire import Asked, Reward

MAX_PAUSE_S = 30.0  # between two judgements of a response that fails
FEWEST_JUDGED = 2  # siblings that a mean is of: a single one's reward would leave it no advantage

# Takes a row of task=score, the name of a judge or composition, and who asks. Raises Refused, and ValueError.
JudgeRow = Callable[[Row, str, str], Awaitable[Sequence[JudgedSibling]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedJudges:
    """max_failure_rate: above it the service is degraded."""

    judges: Mapping[str, JudgeConfig]
    rewards: RewardTree
    max_failure_rate: float

    @property
    def names(self) -> list[str]:
        return sorted({*self.judges, *self.rewards.entries})

    def repeats(self, name: str, row: Row) -> bool:
        """Whether an equal question would get equal judgements."""
        return row.get("prompt_id") is not None or all(
            judge.kind != "generative" or judge.temperature == 0 for judge in self._asked(name)
        )

    def compares(self, name: str) -> bool:
        """Whether a reward depends on siblings."""
        waits = name in self.rewards.entries and self.rewards.below(name).waits_for_siblings()
        return waits or any(judge.waits_for_siblings for judge in self._asked(name))

    def describe(self) -> Mapping[str, object]:
        judges = {
            name: {"kind": judge.kind, "model": judge.model, "scale": [judge.scale.low, judge.scale.high]}
            for name, judge in self.judges.items()
        }
        return {
            "judges": judges,
            "compositions": {name: {"kind": one.kind} for name, one in self.rewards.entries.items()},
        }

    def _asked(self, name: str) -> Iterator[JudgeConfig]:
        return (self.judges[one] for one in self.rewards.list_judges(name) if one in self.judges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Who asks, whom, and how long it waits.

    sender:    who is told apart: siblings of two senders are of two groups.
    timeout_s: of a request.
    tries:     how often the client asks; gap_s: the longest time between two tries.
    """

    judge: str
    client: str
    sender: str
    group_size: int | None
    timeout_s: float
    tries: int
    gap_s: float

    @property
    def hold_s(self) -> float:
        """Until shortly before the client's timeout."""
        return max(self.timeout_s / 2, self.timeout_s - max(1.0, 0.05 * self.timeout_s))


@dataclass(slots=True, eq=False)
class _Sibling:
    """A response of a group, and the request that waits for its reward.

    answer:   its reward, or why it is refused.
    is_asked: whether a request waits now.
    is_done:  whether one was answered: an equal request after that is another sibling.
    reward:   the judge's; None: it has failed, or isn't judged.
    cause:    of the last failure; empty: none. name: of that judgement in the journal.
    """

    response: str | list[object]
    began_s: float
    answer: asyncio.Future[Reward]
    is_asked: bool = True
    is_done: bool = False
    reward: float | None = None
    cause: str = ""
    detail: str = ""
    name: str = ""
    num_judged: int = 0
    task: asyncio.Task[None] | None = None  # judges it alone
    end: asyncio.TimerHandle | None = None  # while nobody waits


@dataclass(slots=True, eq=False)
class _Group:
    """Siblings to one row.

    name:    its group_id, else the prompt's: the names of its judgements begin with it.
    is_over: nobody else joins.
    changed: set, and replaced, at each judgement and arrival.
    """

    key: tuple[object, ...]
    name: str
    row: Row
    call: Call
    size: int
    began_s: float
    compares: bool
    siblings: list[_Sibling] = field(default_factory=list)
    is_over: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None  # judges them together
    end: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        return len(self.siblings) >= self.size

    @property
    def is_judged(self) -> bool:
        """Whether all siblings are there and were judged, be it without a verdict."""
        return self.is_full and all(one.num_judged for one in self.siblings)

    def describe(self, sibling: _Sibling) -> str:
        """Why it has no reward."""
        if sibling.cause:
            detail = f" ({sibling.detail})" if sibling.detail else ""
            return f"no verdict: {sibling.cause}{detail}, judged {sibling.num_judged} times; ask again"
        if self.compares and self.task is None:
            return f"group_size={self.size}: it waits for its siblings, {len(self.siblings)} are here; ask again"
        return "it is still being judged; ask again"

    def note_change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class HeldGroups:
    """The requests of all wires that wait for a reward.

    judge:       asks the judge once.
    is_degraded: whether too many of the latest responses have no verdict.
    """

    def __init__(
        self,
        serve: ServeConfig,
        judges: ServedJudges,
        judge: JudgeRow,
        is_degraded: Callable[[], bool],
        imputations: Imputations,
    ) -> None:
        self._serve = serve
        self._judges = judges
        self._judge = judge
        self._is_degraded = is_degraded
        self._imputations = imputations
        self._imputes = serve.on_failure == "mean_of_group"
        self._groups: dict[tuple[object, ...], list[_Group]] = {}  # several: with one key, the next begins
        self._held = Admission(serve.max_in_flight)
        self._ending = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Requests that wait."""
        return self._held.in_flight

    async def ask(self, asked: Asked, call: Call) -> Reward:
        """The reward of a response. Raises Refused: 503 with the cause of a failure, shortly before the client gives
        up; and ValueError for what can't be judged.
        """
        with self._held.admit(call.client, 1):
            group, sibling = self._join(asked, call)
            try:
                async with asyncio.timeout(call.hold_s):
                    reward = await asyncio.shield(sibling.answer)
                sibling.is_done = True
            except TimeoutError:
                raise Refused(503, group.describe(sibling)) from None
            finally:
                self._leave(group, sibling)
        return reward

    def end(self) -> None:
        """Ask nothing again, and wait for no sibling: what is being judged is answered, the rest refused."""
        self._ending.set()
        for group in [one for groups in self._groups.values() for one in groups]:
            group.note_change()
            if group.compares and group.task is None:
                self._refuse(group.siblings, Refused(503, "the service is ending"))

    # -- groups --------------------------------------------------------------------------------------------------------

    def _join(self, asked: Asked, call: Call) -> tuple[_Group, _Sibling]:
        """The place of a response: that of an earlier try of the same request, a new one in a group that isn't whole,
        or the first of a new group.
        """
        compares = self._judges.compares(call.judge)
        size = self._find_size(asked, call, compares)
        said = asked.group_id if size > 1 else ""
        key = (call.sender, call.judge, size, said or digest(asked.row), "" if size > 1 else digest(asked.response))
        groups = self._groups.setdefault(key, [])
        for one in groups:
            for sibling in one.siblings:
                if not sibling.is_asked and not sibling.is_done and sibling.response == asked.response:
                    sibling.is_asked = True
                    if sibling.end is not None:
                        sibling.end.cancel()
                    one.note_change()
                    return one, sibling
        now_s = asyncio.get_running_loop().time()
        group = next((one for one in groups if not (one.is_over or one.is_full or one.task)), None)
        if said and (group or groups):
            if (group or groups[0]).row != asked.row:
                raise ValueError(
                    f"group_id: the siblings of {said!r} have another prompt or other fields than this one"
                )
            if group is None:
                raise ValueError(f"group_id: {said!r} has its group_size={size} siblings already")
        if group is None:
            name = asked.group_id or str(asked.row.get("prompt_id") or digest(asked.row))
            group = _Group(key=key, name=name, row=asked.row, call=call, size=size, began_s=now_s, compares=compares)
            groups.append(group)
            if size > 1:
                wait_s = self._serve.group_wait_s
                group.end = asyncio.get_running_loop().call_later(wait_s, self._close, group)
        answer = asyncio.get_running_loop().create_future()
        sibling = _Sibling(response=asked.response, began_s=now_s, answer=answer)
        group.siblings.append(sibling)
        group.note_change()
        if not compares:
            sibling.task = asyncio.create_task(self._settle([sibling], self._judge_alone(group, sibling)))
        elif group.is_full:
            members = list(group.siblings)
            group.task = asyncio.create_task(self._settle(members, self._judge_together(group, members)))
        return group, sibling

    def _find_size(self, asked: Asked, call: Call, compares: bool) -> int:
        """How many siblings are waited for. Raises Refused."""
        given = asked.group_size or call.group_size
        most = self._serve.max_in_flight
        if given is not None and given > most:
            raise ValueError(f"group_size: at most serve.max_in_flight={most}, got {given}")
        if compares and (given is None or given < 2):
            raise Refused(
                400, f"group_size: {call.judge} compares the siblings of a group, so it has to know how many they are; "
                "ask ..?group_size=<responses per prompt>, or for an evaluation another judge"
            )  # fmt: skip
        if self._imputes and given is None:
            raise Refused(
                400, "group_size: serve.on_failure=mean_of_group has to know how many responses a group has; ask "
                "..?group_size=<responses per prompt>, and for an evaluation ..?group_size=1"
            )  # fmt: skip
        return given if given is not None and (compares or self._imputes) else 1

    def _close(self, group: _Group) -> None:
        """The time for siblings is over."""
        group.is_over = True
        group.note_change()
        if group.compares and group.task is None:
            self._refuse(
                group.siblings,
                Refused(
                    503, f"group_size={group.size}: only {len(group.siblings)} siblings came within serve.group_wait_s="
                    f"{self._serve.group_wait_s:g}"
                ),
            )  # fmt: skip
        self._forget_if_done(group)

    def _leave(self, group: _Group, sibling: _Sibling) -> None:
        """The request has ended: with its answer, or for now."""
        sibling.is_asked = False
        if sibling.answer.done() and not sibling.answer.cancelled() and sibling.answer.exception() is not None:
            self._end_sibling(group, sibling)  # what was refused is asked anew
        elif sibling.is_done:
            self._forget_if_done(group)
        else:
            loop = asyncio.get_running_loop()
            sibling.end = loop.call_later(group.call.gap_s, self._end_sibling, group, sibling)

    def _end_sibling(self, group: _Group, sibling: _Sibling) -> None:
        """Its client won't come again."""
        if sibling in group.siblings:
            group.siblings.remove(sibling)
        if sibling.task is not None:
            sibling.task.cancel()
        if group.task is not None and not group.siblings:
            group.task.cancel()
        group.note_change()
        self._forget_if_done(group)

    def _forget_if_done(self, group: _Group) -> None:
        if (group.is_full or group.is_over or not group.siblings) and all(one.is_done for one in group.siblings):
            if group.end is not None:
                group.end.cancel()
            group.is_over = True
            groups = self._groups.get(group.key, [])
            if group in groups:
                groups.remove(group)
            if not groups:
                self._groups.pop(group.key, None)

    def _refuse(self, siblings: Sequence[_Sibling], error: Exception) -> None:
        for one in siblings:
            if not one.answer.done():
                one.answer.set_exception(error)
                one.answer.exception()  # it may have no request at the moment

    # -- judging -------------------------------------------------------------------------------------------------------

    async def _settle(self, siblings: Sequence[_Sibling], judging: Coroutine[object, object, None]) -> None:
        """Judge, and refuse what raises."""
        try:
            await judging
        except Exception as error:
            self._refuse(siblings, error)

    async def _judge_alone(self, group: _Group, sibling: _Sibling) -> None:
        for attempt in itertools.count():
            await self._judge_once(group, [sibling], attempt)
            if sibling.reward is not None:
                sibling.answer.set_result(Reward(value=sibling.reward))
                return
            if self._imputes and group.size > 1:
                await self._wait_for_siblings(group, sibling)
                if rewards := self._list_judged(group):
                    self._impute(group, sibling, rewards)
                    return
            await self._pause(group, [sibling], attempt)

    async def _judge_together(self, group: _Group, members: Sequence[_Sibling]) -> None:
        """All get a reward of one judging: those of two don't compare."""
        for attempt in itertools.count():
            await self._judge_once(group, members, attempt)
            failed = [one for one in members if one.reward is None]
            if not failed or (self._imputes and self._list_judged(group)):
                for one in members:
                    if one.reward is not None:
                        one.answer.set_result(Reward(value=one.reward))
                    else:
                        self._impute(group, one, self._list_judged(group))
                return
            await self._pause(group, members, attempt)

    async def _judge_once(self, group: _Group, siblings: Sequence[_Sibling], attempt: int) -> None:
        """Judge, under a name that an equal question has too, and no other attempt: it gives the seeds."""
        responses = [one.response for one in siblings]
        name = f"{group.name}-{digest(responses)}" + (f"-{attempt + 1}" if attempt else "")
        try:
            judged = await self._judge(
                group.row | {"prompt_id": name, "responses": responses}, group.call.judge, group.call.client
            )
        except Refused as error:
            if error.status != 429:
                raise
            judged = None  # too much is being judged: as good as a failure, since the client waits
            for one in siblings:
                one.cause, one.detail = "busy", str(error)
        for one, verdict in zip(siblings, judged or (), strict=judged is not None):
            one.reward, one.cause, one.detail, one.name = verdict.reward, verdict.failed, verdict.detail, name
            one.num_judged += 1
            if one.reward is None and not one.cause:
                one.cause = "no reward"
        group.note_change()

    async def _pause(self, group: _Group, siblings: Sequence[_Sibling], attempt: int) -> None:
        """Nothing is judged again for clients that are away between two tries, and may not come back."""
        pause_s = min(2.0**attempt, MAX_PAUSE_S)
        try:
            await asyncio.wait_for(self._ending.wait(), pause_s)
        except TimeoutError:
            while not (any(one.is_asked for one in siblings) or self._ending.is_set()):
                with suppress(TimeoutError):
                    await asyncio.wait_for(group.changed.wait(), MAX_PAUSE_S)
        if self._ending.is_set():
            raise Refused(503, "the service is ending")

    async def _wait_for_siblings(self, group: _Group, sibling: _Sibling) -> None:
        """Until all are judged, for serve.group_wait_s at most, and no longer than the client asks again."""
        clock, call = asyncio.get_running_loop().time, group.call
        until_s = sibling.began_s + call.tries * call.hold_s - 1
        while not (group.is_judged or group.is_over or self._ending.is_set()) and clock() < until_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(group.changed.wait(), until_s - clock())

    def _list_judged(self, group: _Group) -> list[float]:
        """The rewards of the judged siblings, for their mean; empty: too few, or the judge fails too often."""
        rewards = [one.reward for one in group.siblings if one.reward is not None]
        return [] if len(rewards) < FEWEST_JUDGED or self._is_degraded() else rewards

    def _impute(self, group: _Group, sibling: _Sibling, rewards: list[float]) -> None:
        mean = fsum(rewards) / len(rewards)
        sibling.answer.set_result(Reward(value=mean, imputed=sibling.cause))
        self._imputations.record(
            judge=group.call.judge, client=group.call.client, group_id=sibling.name, cause=sibling.cause,
            detail=sibling.detail, mean=mean, of=len(rewards),
        )  # fmt: skip


def digest(value: object) -> str:
    return digest_question(value)[:16]
