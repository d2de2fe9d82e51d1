"""Reads the profile that a configuration names, with the speeds of data sheets as prior. Fits nothing itself."""

from __future__ import annotations

from contextlib import suppress

from grmpipe.capacity.plan.costs import CostUnknown, Seated, cores_of, speed_of
from grmpipe.capacity.plan.profile import Profile, read_profile
from grmpipe.capacity.plan.survey import Survey
from models.types import EngineSpeed


def profile_of(survey: Survey) -> Profile | None:
    """The profile. What it can't separate is divided as in the data sheets. Raises ConfigError if there is no such
    run.
    """
    path = survey.config.plan.profile
    return read_profile(path, cores_of(survey), believed(survey)) if path else None


def believed(survey: Survey) -> dict[str, EngineSpeed]:
    """Role -> engine speed by the data sheets, for known devices and models."""
    speeds = {}
    for role in (role.name for role in survey.roles.seated):
        with suppress(CostUnknown):
            seated = Seated(seating=survey.seating(role), pool=survey.placement.seats[role][0].pool)
            speeds[role] = speed_of(role, survey, None, seated)
    return speeds
