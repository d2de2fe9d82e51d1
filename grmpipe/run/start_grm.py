"""The GRM that a judge asks: the engines of this run, or a model behind an endpoint. Judges nothing."""

from __future__ import annotations

from collections.abc import Mapping

from grmpipe.config.roles import Model, Roles, ServedRole
from grmpipe.envs.reasoning_engine import ReasoningEngine
from grmpipe.judge.grm import Grm, LocalGrm, RemoteGrm
from grmpipe.judge.markup import Markup
from grmpipe.validate.engines import context_limit_of
from grmpipe.validate.prepare import Prepared
from models.types import ChatEngine, Engine
from scheduler.clock import ActiveClock
from scheduler.events import EventSink
from scheduler.routing.rate_limits import RateLimits


def remote_role(roles: Roles) -> ServedRole | None:
    """The role whose model is behind an endpoint."""
    return next((role for role in roles.served.values() if role.engine.endpoint is not None), None)


def connect_remote_judge(roles: Roles) -> ChatEngine | None:
    """The client of a judge behind an endpoint. None if there is none."""
    role = remote_role(roles)
    if role is None or (endpoint := role.engine.endpoint) is None:
        return None
    limits = RateLimits(requests_per_minute=endpoint.requests_per_minute, tokens_per_minute=endpoint.tokens_per_minute)
    return role.engine.connect(role.name, role.model, limits)


def find_grm(
    prepared: Prepared,
    local: Mapping[str, Engine],
    remote: ChatEngine | None,
    events: EventSink,
    answering: ActiveClock,
) -> Grm | None:
    """The GRM of a generative judge. None if no model judges.

    local: routers by role. answering: the clock that times the answers of local engines.
    """
    if remote is not None:
        role = remote_role(prepared.roles)
        assert role is not None and role.engine.endpoint is not None
        markup = Markup(role.engine.endpoint.chat_markup)
        return RemoteGrm(role.name, remote, context_limit_of(role, 0), events, markup, role.model.thinking_markers)
    if (grm := prepared.grm) is None:
        return None
    return local_grm(grm, local[grm.name], answering)


def local_grm(grm: Model, engine: Engine, answering: ActiveClock | None = None) -> LocalGrm:
    """A GRM on this run's engines, whose thoughts are marked."""
    sampler = ReasoningEngine(engine, grm.renderer)
    return LocalGrm(grm.name, sampler, grm.renderer, grm.context_tokens, answering, grm.renderer.thinking)
