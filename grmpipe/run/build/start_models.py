"""Starts the models of a run: their engines, learners and scorers here, and the clients of those elsewhere.

    learners and engines (on a shared GPU the policy's learner first) -> maintenance -> scorers, endpoints

An evaluation starts the same models, of which none learns.
"""

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from grmpipe.config.critic import critic_train
from grmpipe.config.keys.entry_names import POLICY
from grmpipe.config.model_training import find_training
from grmpipe.config.run_config import RunConfig
from grmpipe.config.train import LAYERS
from grmpipe.envs.thinking_budget import ReasoningEngine
from grmpipe.judge.grm import LocalGrm, RemoteGrm
from grmpipe.judge.markup import Markup
from grmpipe.models.adapter_view import AdapterView
from grmpipe.models.engines.endpoint_use import EndpointUse
from grmpipe.models.engines.engine_kind import AnyEngine
from grmpipe.models.seeds import derive_seed
from grmpipe.models.types import (
    ChatEngine,
    DescribesStart,
    Engine,
    Generates,
    RequestLog,
    Scorer,
    ServesAdapters,
    Usage,
)
from grmpipe.models.weights.transports import transport_kind
from grmpipe.observe.budget_gate import BudgetGate
from grmpipe.roles.find_models import CRITIC, META_RM
from grmpipe.roles.role_placement import resolve_transport
from grmpipe.roles.roles import Model, Roles, ServedRole, make_option_key, resolve_engine
from grmpipe.run.features.policy_updates import PolicyUpdates, UpdatedModel
from grmpipe.run.prepare import Prepared
from grmpipe.run.run_model import RunModel
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.processes.actors import Cluster
from grmpipe.scheduler.routing.rate_limits import RateLimits
from grmpipe.scheduler.routing.router import Continuation, Router
from grmpipe.scheduler.routing.scorers import ScorerPool
from grmpipe.scheduler.slots.time_share import put_to_sleep
from grmpipe.scheduler.weights.stored_weights import StoredWeights
from grmpipe.scheduler.weights.weight_sync import WeightSync
from grmpipe.train.critic.critic_ranks import CriticLearnerRanks
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.train.learner.make_learner import make_learner, make_offloading_learner
from grmpipe.train.learner.time_shared_learner import TimeSharedLearnerRanks

log = logging.getLogger(__name__)

MOST_PROBE_TOKENS = 32
MakeEngine = Callable[[int], Engine]  # rank of its seat -> engine; sent to the engine's process
Stops = Callable[[ActiveClock, str], None]  # lets a clock stand still while the engines of a role can't answer


def list_models(prepared: Prepared) -> dict[str, RunModel]:
    """The models of a run before anything of them runs."""
    config = prepared.config
    names = dict.fromkeys((*prepared.models, *config.asked.asked_roles))
    return {
        name: RunModel(name=name, entry=config.models.get(name, config.policy), found=prepared.models.get(name))
        for name in names
    }


# -- engines and learners ----------------------------------------------------------------------------------------------


async def start_engines_and_learners(
    cluster: Cluster, prepared: Prepared, models: Mapping[str, RunModel], events: EventSink, run_dir: Path
) -> None:
    """All engines start at the same time, and with them the policy's learner: on a shared GPU before them; in a
    time-shared pool it frees the device first. Then the other learners start.
    """
    learning = {role.name: role for role in prepared.roles.seated if role.learner is not None}
    begin = functools.partial(start_trained, cluster, prepared, run_dir)
    first = [begin(models[POLICY], learning.pop(POLICY))] if POLICY in learning else []
    if prepared.placement.time_sharing_roles:
        await asyncio.gather(*first)
        first = []
    *_, routers = await asyncio.gather(*first, start_routers(cluster, prepared, events))
    assert isinstance(routers, dict)
    for name, router in routers.items():
        models[name].engines = router
    await asyncio.gather(*(begin(models[name], one) for name, one in learning.items()))
    if CRITIC in models:
        models[CRITIC].learner_role = CRITIC
        models[CRITIC].ranks = await start_critic(cluster, prepared, events)


async def start_trained(cluster: Cluster, prepared: Prepared, run_dir: Path, model: RunModel, role: ServedRole) -> None:
    """Start a model's learner, and connect it with the model's engines."""
    transport = transport_between(cluster, prepared, role)
    model.learner_role = name_learner(role)
    model.ranks = learner = await start_learner(cluster, prepared, role, transport, run_dir)
    if prepared.config.train.compile == LAYERS and (left_out := await learner.list_uncompiled()):
        log.warning("train.compile: of %s %s", role.name, left_out)
    model.sync = WeightSync(
        learner,
        pick_probe(model.files, prepared),
        role.sync,
        transport=transport,
        group=transport_kind(transport).group,
        ranks_per_engine=role.num_gpus,
        new_address=functools.partial(cluster.free_address, model.learner_role),
    )


async def make_policy_updates(
    prepared: Prepared, models: Mapping[str, RunModel], learner: LearnerRanks, run_dir: Path
) -> PolicyUpdates:
    """The models of a run that take over the policy's weights."""
    config, updated = prepared.config, []
    for role in prepared.roles.seated:
        if after := config.models[role.name].list_updates(config.train.num_steps):
            model = models[role.name]
            first = await read_by(next(iter(model.router.members.alive.values())), model.files, prepared)
            model.sync = WeightSync(first, first.probe_ids, first.config, transport="files")
            updated.append(
                UpdatedModel(
                    name=model.name,
                    after=after,
                    engines=model.router,
                    sync=model.sync,
                    first=first,
                    rate=model.entry.policy_update_rate,
                    judges=bool(config.asked.select_asking(model.name)),
                )
            )
    return PolicyUpdates(updated, learner, config.policy, run_dir)


# -- scorers -----------------------------------------------------------------------------------------------------------


async def start_scorers(
    cluster: Cluster, prepared: Prepared, models: Mapping[str, RunModel], events: EventSink, budget: BudgetGate
) -> None:
    """Start the processes of the meta-RM and of reward models that judges ask, or connect their endpoints."""
    config = prepared.config
    asking = {
        name: max(judge.scalar.max_batch_tokens for judge in config.asked.scalar.values() if judge.model == name)
        for name in config.asked.scalar_roles
    }
    here = {name: max_tokens for name, max_tokens in asking.items() if not config.find_engine_kind(name).outside}
    dtypes = {name: config.models[name].dtype for name in here}
    if META_RM in models:
        here[META_RM], dtypes[META_RM] = config.meta_rm.max_batch_tokens, config.meta_rm.dtype
    begin = functools.partial(start_scorer_pool, cluster, prepared, events)
    pools = await asyncio.gather(
        *(begin(models[name].files, dtypes[name], max_tokens) for name, max_tokens in here.items())
    )
    for pool in pools:
        models[pool.role].scorer_pool, models[pool.role].scorer = pool, LoggedScorer(pool, budget.of_model(pool.role))
    for model in (models[name] for name in asking if name not in here):
        engine = resolve_engine(model.name, config)
        assert engine.endpoint is not None
        client = engine.endpoint.connect_scorer(model.entry, endpoint_use(model, engine, budget))
        model.scorer, model.clients = client, (client,)
        budget.clocks.add(answering := ActiveClock())
        model.scorer_clock = answering


async def start_scorer_pool(
    cluster: Cluster, prepared: Prepared, events: EventSink, model: Model, dtype: str, max_batch_tokens: int
) -> ScorerPool:
    """Start a process on each seat of the role, as one scorer. max_batch_tokens: most in one forward pass."""
    from grmpipe.models.engines.scorer import ScalarScorer, ScorerSpec  # late: it imports torch

    device = prepared.roles[model.name].device
    spec = ScorerSpec(path=model.path, dtype=dtype, device=device, max_batch_tokens=max_batch_tokens)
    members = await cluster.start_members(model.name, functools.partial(ScalarScorer, spec), meet=False)
    return ScorerPool(
        model.name,
        members,
        restart=functools.partial(cluster.restart_member, model.name),
        max_replacements=prepared.config.slots.health.max_replacements,
        max_batch_tokens=max_batch_tokens,
        events=events,
    )


# -- models as judges ask them, and as they teach ----------------------------------------------------------------------


def connect_judging(
    prepared: Prepared,
    models: Mapping[str, RunModel],
    events: EventSink,
    budget: BudgetGate,
    stops: Stops,
    run_id: str,
) -> None:
    """Let generative judges ask their models, and teachers score: on engines here, or behind endpoints. A model behind
    an endpoint that does both has two clients, under the same limits.
    """
    config = prepared.config
    asked = {judge.model for judge in config.asked.generative.values()}.union(config.writers)
    for model in models.values():
        if (role := prepared.roles.served.get(model.name)) is None:
            continue
        if (endpoint := role.engine.endpoint) is not None:
            use = endpoint_use(model, role.engine, budget, run_id)
            if model.name in asked:
                client = endpoint.connect(model.name, model.entry, use)
                budget.clocks.add(answering := ActiveClock())
                model.grm, model.clients = remote_grm(role, client, events, answering), (client,)
            if model.name in config.teachers:
                teacher = endpoint.connect_teacher(model.name, model.entry, use)
                model.teacher, model.clients = teacher, (*model.clients, teacher)
            continue
        if model.name in asked:
            stops(answering := ActiveClock(), model.name)
            model.grm = local_grm(model.files, model.router, answering, budget.of_model(model.name))
        if model.name in config.teachers:
            model.teacher = model.router


def endpoint_use(model: RunModel, engine: AnyEngine, budget: BudgetGate, run_id: str = "") -> EndpointUse:
    """What the clients of a model's endpoint get. Each model has limits of its own."""
    assert engine.endpoint is not None
    limits = RateLimits(
        requests_per_minute=engine.endpoint.requests_per_minute, tokens_per_minute=engine.endpoint.tokens_per_minute
    )
    return EndpointUse(
        model_key=model.entry.key,
        option_key=make_option_key(model.entry, engine),
        limits=limits,
        requests=budget.of_model(model.name),
        answers=budget.answers,
        run_id=run_id,
    )


def local_grm(
    grm: Model, engine: Generates, answering: ActiveClock | None = None, requests: RequestLog | None = None
) -> LocalGrm:
    """A GRM on this run's engines, whose thoughts are marked."""
    sampler = ReasoningEngine(engine, grm.renderer)
    thinking = grm.renderer.thinking
    window, decode = grm.context_tokens, grm.renderer.decode
    return LocalGrm(grm.name, sampler, grm.renderer, window, answering, thinking, requests, decode)


def remote_grm(role: ServedRole, client: ChatEngine, events: EventSink, answering: ActiveClock) -> RemoteGrm:
    assert role.engine.endpoint is not None
    markup = Markup(role.engine.endpoint.chat_markup)
    window, markers = role.resolve_context_limit(0), role.model.thinking_markers
    return RemoteGrm(role.name, client, window, events, markup, markers, answering)


class LoggedScorer:
    """A Scorer."""

    def __init__(self, scorer: Scorer, requests: RequestLog) -> None:
        self._scorer = scorer
        self._requests = requests

    async def score(self, token_ids: Sequence[int], priority: int = 0) -> float:
        number = self._requests.begin_request(retry=False)
        score = await self._scorer.score(token_ids, priority)
        self._requests.end_request(number, Usage(prompt=len(token_ids)))
        return score


# -- engines behind their routers --------------------------------------------------------------------------------------


async def start_routers(cluster: Cluster, prepared: Prepared, events: EventSink) -> dict[str, Router]:
    """Start all engines, by role. Of roles that share a device's memory, one sleeps before the next one starts."""
    in_turn: dict[str, list[Model]] = {}
    for role in prepared.roles.hosts:
        together = f"pool {role.pool}" if role.is_time_shared else role.name
        in_turn.setdefault(together, []).append(prepared.models[role.name])
    started = await asyncio.gather(*(start_in_turn(cluster, some, prepared, events) for some in in_turn.values()))
    routers = {role: router for some in started for role, router in some.items()}
    for role in (role for role in prepared.roles.seated if role.model.adapter_of):
        engines = routers[role.model.adapter_of].members.alive
        views = {name: view_adapter(engine, role.name) for name, engine in engines.items()}
        routers[role.name] = make_router(prepared.models[role.name], views, prepared, events)
    return {role.name: routers[role.name] for role in prepared.roles.seated}


def view_adapter(engine: Engine, name: str) -> Engine:
    """One of the models of an engine whose kind applies adapters."""
    return AdapterView(cast(ServesAdapters, engine), name)


async def start_in_turn(
    cluster: Cluster, models: Sequence[Model], prepared: Prepared, events: EventSink
) -> dict[str, Router]:
    """Start the engines of one model, or of several that share a device's memory: only the first one's stay awake."""
    routers: dict[str, Router] = {}
    for model in reversed(models):
        routers[model.name] = await start_engines(cluster, model, prepared, events)
        if model is not models[0]:
            await put_to_sleep(routers[model.name])
    return routers


def engine_factory(model: Model, roles: Roles, seed: int) -> MakeEngine:
    """A function that makes the engine of a seat of the role."""
    role = roles.served[model.name]
    return functools.partial(role.engine.make, role.engine_spec(model.path, seed))


def describe_starts(models: Mapping[str, RunModel]) -> Iterator[str]:
    """What the start of a model's first engine found, a line for each model whose engines say so."""
    for model in models.values():
        engines = model.engines.members.alive if model.engines is not None else {}
        for name, engine in itertools.islice(engines.items(), 1):
            if isinstance(engine, DescribesStart) and (found := engine.describe_start()):
                yield f"{name}{f' (of {len(engines)})' if len(engines) > 1 else ''}: {found}"


async def start_engines(cluster: Cluster, model: Model, prepared: Prepared, events: EventSink) -> Router:
    make_engine = engine_factory(model, prepared.roles, prepared.config.seed)
    return make_router(model, await cluster.start_engines(model.name, make_engine), prepared, events)


async def read_by(engine: Engine, model: Model, prepared: Prepared) -> StoredWeights:
    """The weights of a model that an engine has just loaded."""
    role = prepared.roles.served[model.name]
    sync = replace(role.sync, probe_tolerance=role.sync.tolerance({role.dtype}))  # their bucket has no dtype
    probe_ids = pick_probe(model, prepared)
    return StoredWeights(path=model.path, probe_ids=probe_ids, logprobs=await engine.score(probe_ids), config=sync)


def pick_probe(model: Model, prepared: Prepared) -> tuple[int, ...]:
    """Tokens that show whether two copies of a model are equal: the beginning of a prompt of the data."""
    return tuple(model.renderer.render(prepared.prompts.at(0).messages)[:MOST_PROBE_TOKENS])


def make_router(model: Model, engines: Mapping[str, Engine], prepared: Prepared, events: EventSink) -> Router:
    moves = prepared.roles.served[model.name].takes_turns
    return Router(model.name, engines, events, make_continuation(model, prepared.roles) if moves else None)


def make_continuation(model: Model, roles: Roles) -> Continuation:
    """What a request needs to migrate, by how its engine makes random numbers."""
    by_position = roles.served[model.name].engine.seeds_by_position
    return Continuation(decode=model.renderer.decode, seed_after=same_seed if by_position else other_seed)


def same_seed(seed: int, num_sampled: int) -> int:
    return seed


def other_seed(seed: int, num_sampled: int) -> int:
    return derive_seed(seed, f"after {num_sampled}")


# -- learners: what their ranks are started with -----------------------------------------------------------------------


def learner_spec(config: RunConfig, roles: Roles, model: Model, transport: str, run_dir: Path) -> LearnerSpec:
    """What each rank of the learner of a served model is started with."""
    role, training, folder = roles.served[model.name], find_training(config, model.name), run_dir.absolute()
    return LearnerSpec(
        model_path=model.path,
        train=training.train,
        algorithm=training.algorithm,
        max_new_tokens=training.max_new_tokens,
        device=roles[name_learner(role)].device,
        sync_dtype=role.dtype,
        bucket_bytes=role.sync.bucket_mb << 20,
        checkpoint_names=role.engine.checkpoint_names,
        transport=transport,
        delta=role.sync.delta,
        sync_dir=str(folder / f"{training.prefix}weights") if transport_kind(transport).folder else "",
        temperature=training.temperature,
        first_version=training.first_version,
        lora=role.model.lora,
        adapter_dir=str(folder / f"{training.prefix}adapter"),
        seed=config.seed,
    )


def name_learner(role: ServedRole) -> str:
    """The role of the ranks that train it."""
    assert role.learner is not None, f"{role.name} doesn't learn"
    return role.learner


def transport_between(cluster: Cluster, prepared: Prepared, role: ServedRole) -> str:
    """The transport of a trained model's weights, now that its machines are known."""
    same_machine = len(cluster.machines(name_learner(role)) | cluster.machines(role.model.host)) == 1
    transport = resolve_transport(role, prepared.config, prepared.placement, same_machine=same_machine)
    log.info("weights are sent to the engines of %s by %s", role.name, transport)
    return transport


async def start_learner(
    cluster: Cluster, prepared: Prepared, role: ServedRole, transport: str, run_dir: Path
) -> LearnerRanks:
    """Start the ranks of a model whose engines get their weights. In a time-shared pool they then free the device."""
    learner, model = name_learner(role), prepared.models[role.name]
    spec = learner_spec(prepared.config, prepared.roles, model, transport, run_dir)
    cp = spec.train.parallel.cp
    if not prepared.placement.is_time_shared(learner):
        return LearnerRanks(await cluster.start_members(learner, functools.partial(make_learner, spec)), cp)
    ranks = await cluster.start_members(learner, functools.partial(make_offloading_learner, spec))
    sharing = TimeSharedLearnerRanks(ranks, cp)
    await sharing.keep_on_device("nothing")
    return sharing


async def start_critic(cluster: Cluster, prepared: Prepared, events: EventSink) -> CriticLearnerRanks:
    """Start the ranks of the critic, which reads the policy's tokens."""
    from grmpipe.train.critic.critic_learner import CriticLearner, CriticSpec  # late: it imports torch

    config = prepared.config
    spec = CriticSpec(
        model_path=prepared.models[CRITIC].path,
        tokenizer_path=prepared.policy.path,
        train=critic_train(config.critic, config.train),
        device=prepared.roles[CRITIC].device,
        value_clip=config.critic.value_clip,
        updates_per_batch=config.critic.updates(config.algorithm, config.train),
    )
    actors = await cluster.start_members(CRITIC, functools.partial(CriticLearner, spec))
    return CriticLearnerRanks(actors, events, config.critic.parallel.cp)
