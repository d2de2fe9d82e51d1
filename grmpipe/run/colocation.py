"""A run whose learner and engines have their slots by turns: put together. Decides no turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from grmpipe.config.roles import can_sleep, device_of
from grmpipe.pipeline.interfaces import Trainer
from grmpipe.train.learner_by_turns import LearnerByTurns
from grmpipe.types import JudgedGroup, Metrics
from grmpipe.validate.prepare import Prepared
from scheduler.events import EventSink
from scheduler.routing.router import Router
from scheduler.slots.health import BringCurrent
from scheduler.slots.time_share import SharedRole, TimeShare


def time_share_of(
    prepared: Prepared,
    routers: Mapping[str, Router],
    bring_current: Mapping[str, BringCurrent],
    learner: LearnerByTurns,
    events: EventSink,
) -> TimeShare:
    """The turns of the learner's pool; the learner has given its device up by then."""
    placement = prepared.placement
    pool = placement.seats["learner"][0].pool
    roles = {
        role: SharedRole(
            router=routers[role],
            bring_current=bring_current[role],
            sleeps=can_sleep(role, prepared.config, placement),
            lends=device_of(role, placement) == "cuda",
            is_pushed_to=role == "policy",
        )
        for role in placement.time_sharing_roles
    }
    share = TimeShare(pool, roles, learner, events)
    learner.turn = share.turn
    return share


def begin_turn(share: TimeShare) -> Callable[[], Awaitable[Metrics]]:
    """For a step of the learner's: what became free for it, and of it when the engines went on."""

    async def begin() -> Metrics:
        await share.to_learner()
        return {f"memory/freed_by_{who}_gb": num_bytes / 1e9 for who, num_bytes in share.freed_bytes.items()}

    return begin


class TrainerByTurns:
    """Keeps the groups of a batch until the learner has its device, then trains on them in the order they came: without
    an early start. The turn that a step begins ends with the push of its weights.

    begin_turn: returns, as metrics, what became free for it.
    """

    def __init__(self, trainer: Trainer, begin_turn: Callable[[], Awaitable[Metrics]]) -> None:
        self._trainer = trainer
        self._begin_turn = begin_turn
        self._groups: list[JudgedGroup] = []

    async def take(self, group: JudgedGroup) -> None:
        self._groups.append(group)

    async def while_waiting(self) -> bool:
        return False  # the engines have the device

    async def step(self) -> Metrics:
        freed = await self._begin_turn()
        groups, self._groups = self._groups, []
        for group in groups:
            await self._trainer.take(group)
        return await self._trainer.step() | freed

    async def discard(self) -> None:
        self._groups = []
        await self._trainer.discard()
