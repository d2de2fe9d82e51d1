"""Makes the time-shared pool of a run's learner and engines. Decides no phase."""

from __future__ import annotations

from collections.abc import Mapping

from grmpipe.train.learner.time_shared_learner import TimeSharedLearnerGroup
from grmpipe.validate.prepare import Prepared
from scheduler.events import EventSink
from scheduler.routing.router import Router
from scheduler.slots.health import BringCurrent
from scheduler.slots.time_share import LEARNER, SharedRole, TimeShare


def time_share_of(
    prepared: Prepared,
    routers: Mapping[str, Router],
    bring_current: Mapping[str, BringCurrent],
    learner: TimeSharedLearnerGroup,
    events: EventSink,
) -> TimeShare:
    """The time-shared pool of the learner, which must have freed its device before."""
    time_sharing = {name: prepared.roles.served[name] for name in prepared.placement.time_sharing_roles}
    roles = {
        name: SharedRole(
            router=routers[name],
            bring_current=bring_current[name],
            sleeps=role.sleeps,
            lends=role.device == "cuda",
            is_pushed_to=role.learner == LEARNER,
        )
        for name, role in time_sharing.items()
    }
    share = TimeShare(prepared.roles[LEARNER].pool, roles, learner, events)
    learner.learner_phase = share.learner_phase
    return share
