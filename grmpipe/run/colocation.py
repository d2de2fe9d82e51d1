"""A run whose learner and engines have their slots by turns: put together. Decides no turn."""

from __future__ import annotations

from collections.abc import Mapping

from grmpipe.config.roles import can_sleep, device_of
from grmpipe.train.learner.offload import LearnerByTurns
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
