"""The profile that a configuration names, read beside what the data sheets say. It fits nothing itself."""

from __future__ import annotations

from contextlib import suppress

from grmpipe.capacity.lower_bound import LEARNING
from grmpipe.capacity.plan.costs import CostUnknown, Seated, cores_of, speed_of
from grmpipe.capacity.plan.profile import Profile, read_profile
from grmpipe.capacity.plan.survey import Survey
from models.types import EngineSpeed


def profile_of(survey: Survey) -> Profile | None:
    """What it can't tell apart is divided as the data sheets would. Raises ConfigError where there is no such run."""
    path = survey.config.plan.profile
    return read_profile(path, cores_of(survey), believed(survey)) if path else None


def believed(survey: Survey) -> dict[str, EngineSpeed]:
    """Of each role's engine, as far as its device and its model are known."""
    speeds = {}
    for role in survey.models:
        if role not in LEARNING:
            with suppress(CostUnknown):
                seated = Seated(seating=survey.seating(role), pool=survey.placement.seats[role][0].pool)
                speeds[role] = speed_of(role, survey, None, seated)
    return speeds
