"""The GRMs that judges ask: the engines of this run, which may take over the policy's weights, or models behind
endpoints.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from grmpipe.config.roles import Model, Roles
from grmpipe.config.run_config import RunConfig
from grmpipe.envs.thinking_budget import ReasoningEngine
from grmpipe.judge.grm import Grm, LocalGrm, RemoteGrm
from grmpipe.judge.markup import Markup
from grmpipe.models.engines.endpoint_use import EndpointUse
from grmpipe.models.types import ChatEngine, Generates, RemoteTeacher, RequestLog
from grmpipe.run.build.engines import read_by
from grmpipe.run.features.policy_updates import PolicyUpdates, UpdatedModel
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.routing.rate_limits import RateLimits
from grmpipe.scheduler.routing.router import Router
from grmpipe.scheduler.weights.weight_sync import WeightSync
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.validate.engines import resolve_context_limit
from grmpipe.validate.prepare import Prepared

LogOf = Callable[[str], RequestLog]  # a model -> what counts the requests to it
Stops = Callable[[ActiveClock, str], None]  # lets a clock stand still while the engines of a role can't answer


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModels:
    """The clients of models behind endpoints, by role: of those that judges ask, and of those that teach. A model that
    does both has two, under the same limits.
    """

    judging: Mapping[str, ChatEngine]
    teaching: Mapping[str, RemoteTeacher]

    @property
    def clients(self) -> tuple[ChatEngine | RemoteTeacher, ...]:
        return (*self.judging.values(), *self.teaching.values())


def connect_endpoints(config: RunConfig, roles: Roles, requests: LogOf, run_id: str) -> RemoteModels:
    """Make the clients of models behind endpoints. Each model has limits of its own."""
    asked = {judge.model for judge in config.asked.generative.values()}
    judging: dict[str, ChatEngine] = {}
    teaching: dict[str, RemoteTeacher] = {}
    for role in roles.served.values():
        if (endpoint := role.engine.endpoint) is None:
            continue
        limits = RateLimits(
            requests_per_minute=endpoint.requests_per_minute, tokens_per_minute=endpoint.tokens_per_minute
        )
        use = EndpointUse(
            model_key=role.key,
            option_key=role.option_key,
            limits=limits,
            requests=requests(role.name),
            run_id=run_id,
        )
        if role.name in asked:
            judging[role.name] = endpoint.connect(role.name, role.model, use)
        if role.name in config.teachers:
            teaching[role.name] = endpoint.connect_teacher(role.name, role.model, use)
    return RemoteModels(judging=judging, teaching=teaching)


def find_grms(
    prepared: Prepared,
    local: Mapping[str, Generates],
    remote: Mapping[str, ChatEngine],
    events: EventSink,
    requests: LogOf,
    stops: Stops | None = None,
) -> dict[str, Grm]:
    """Role -> the GRM that generative judges ask. local: routers by role. remote: clients by role."""
    grms: dict[str, Grm] = {role: remote_grm(prepared.roles, role, client, events) for role, client in remote.items()}
    for role in {judge.model for judge in prepared.config.asked.generative.values()} - grms.keys():
        model, answering = prepared.model[role], ActiveClock()
        if stops is not None:
            stops(answering, role)
        grms[role] = local_grm(model, local[role], answering, requests(role))
    return grms


def local_grm(
    grm: Model, engine: Generates, answering: ActiveClock | None = None, requests: RequestLog | None = None
) -> LocalGrm:
    """A GRM on this run's engines, whose thoughts are marked."""
    sampler = ReasoningEngine(engine, grm.renderer)
    thinking = grm.renderer.thinking
    return LocalGrm(grm.name, sampler, grm.renderer, grm.context_tokens, answering, thinking, requests)


def remote_grm(roles: Roles, role: str, client: ChatEngine, events: EventSink) -> RemoteGrm:
    served = roles.served[role]
    assert served.engine.endpoint is not None
    markup = Markup(served.engine.endpoint.chat_markup)
    return RemoteGrm(role, client, resolve_context_limit(served, 0), events, markup, served.model.thinking_markers)


async def make_policy_updates(
    prepared: Prepared, routers: Mapping[str, Router], learner: LearnerRanks, run_dir: Path
) -> PolicyUpdates:
    """The models of a run that take over the policy's weights."""
    config, grms = prepared.config, []
    for model in prepared.grms:
        settings = config.models[model.name]
        if after := settings.list_updates(config.train.num_steps):
            engines = routers[model.name]
            first = await read_by(next(iter(engines.members.alive.values())), model, prepared)
            sync = WeightSync(first, first.probe_ids, first.config, transport="files")
            grms.append(
                UpdatedModel(
                    name=model.name,
                    after=after,
                    engines=engines,
                    sync=sync,
                    first=first,
                    rate=settings.policy_update_rate,
                    judges=bool(config.asked.select_asking(model.name)),
                )
            )
    return PolicyUpdates(grms, learner, config.policy, run_dir)
