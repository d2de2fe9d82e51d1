"""The roles of a run: what follows for each from the configuration and the placement."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypedDict

from grmpipe.config.engine_kinds import engines_that
from grmpipe.config.grm import ModelEntry
from grmpipe.config.io.key_errors import section
from grmpipe.config.io.yaml_io import overlaid
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.engine_kind import AnyEngine, Endpoint, EngineSpec
from grmpipe.models.lm.footprint import Heads
from grmpipe.models.settings import ROUTER, LoraConfig, ParallelConfig
from grmpipe.scheduler.placement import Placement
from grmpipe.scheduler.weights.weight_push import TOLERANCE_QUANTIZED, SyncConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A role's model, found and checked.

    path:           local path that its processes load.
    context_tokens: limit on prompt and new tokens together: the model's window, or the engine's if that is smaller.
    """

    name: str  # the role's: policy, grm, a name in models
    path: str
    renderer: Renderer
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRole:
    """A role that has a place in a run.

    device:    cuda or cpu.
    num_gpus:  GPUs of one process, over which its model is sharded; 1 on a CPU.
    dtype:     type it computes in; `dtype_key`: the key that sets it. Empty: the role has no dtype of its own.
    """

    name: str
    pool: str = ""
    num_replicas: int = 0
    device: str = "cpu"
    num_gpus: int = 1
    dtype: str = ""
    dtype_key: str = ""

    @property
    def is_seated(self) -> bool:
        """Whether it has slots here. An endpoint has none."""
        return self.num_replicas > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRole(ResolvedRole):
    """A role whose model is served by engines, here or behind an endpoint.

    engine:       its engine kind, with the role's options over those of the kind.
    learner:      the role that trains its weights; None: they never change.
    is_elastic:   whether its engines are on elastic slots.
    takes_turns:  whether its engines leave their slots to a learner or to another role's engines at times.
    return_routed_experts: whether its engines return the experts of each token, for router replay.
    sync:         how close their log-probs must be to the learner's: less close if their options quantize the weights.
    speculation:  where its engines take drafts of tokens from.
    batch_invariant: whether a request's tokens must not depend on those beside it.
    adapters:     those that its engines apply themselves, by the name of their model; if it is an adapter of another
                  role's model, that role has them, and the seats.
    """

    model: ModelEntry
    engine: AnyEngine
    learner: str | None
    is_elastic: bool
    takes_turns: bool
    return_routed_experts: bool
    sync: SyncConfig
    speculation: str
    batch_invariant: bool
    adapters: Mapping[str, LoraConfig]

    @property
    def is_shared(self) -> bool:
        """Whether its engines serve several models."""
        return bool(self.model.adapter_of) or not self.adapters.keys() <= {self.name}

    @property
    def sleeps(self) -> bool:
        """Whether its engines can free some memory while others need it."""
        return self.engine.memory.sleeps(self.device)

    @property
    def frees_device(self) -> bool:
        """Whether its engines can free a device's memory, including the weights."""
        return self.engine.memory.frees_device(self.device)

    @property
    def is_time_shared(self) -> bool:
        """Whether its engines share a device in time with those of another role."""
        return self.is_elastic and self.frees_device

    @property
    def takes_weights(self) -> bool:
        """Whether its engines get other weights than those they started with."""
        return self.learner is not None or bool(self.model.policy_updates)

    @property
    def key(self) -> str:
        """The configuration's section of its model."""
        return self.model.key

    def option_key(self, name: str) -> str:
        """The key that sets an option of its engine."""
        return make_option_key(self.model, self.engine)(name)

    def engine_spec(self, path: str, seed: int) -> EngineSpec:
        """The specification of each of its engines. path: its model's, as the engine's process finds it."""
        return EngineSpec(
            path=path,
            role=self.name,
            dtype=self.model.dtype,
            device=self.device,
            num_gpus=self.num_gpus,
            seed=seed,
            chat_template=self.model.chat_template,
            adapters=self.adapters,
            takes_weights=self.takes_weights or self.is_shared,
            return_routed_experts=self.return_routed_experts,
            speculation=self.speculation,
            sleeps=self.takes_turns and self.frees_device,
            batch_invariant=self.batch_invariant,
        )

    def check_speculation(self) -> None:
        """Check that its engines can draft tokens, if they shall. A remote endpoint is asked for none."""
        if self.speculation == "none" or self.engine.outside:
            return
        if why := self.engine.why_no_drafts(self.device):
            raise ConfigError(f"engine.speculation: {why}; type engine.speculation=none")

    def check_joined(self) -> None:
        """Check that each replica has one server, whose slot is its own: servers that already run take no turns."""
        joined, replicas = self.engine.joined, self.num_replicas
        if joined and self.takes_turns:
            sharing = "elastic" if self.is_elastic else "time_shared"
            raise ConfigError(
                f"{self.option_key('urls')}: servers that already run have no slots in the placement; "
                f"type placement.pools.{self.pool}.{sharing}=false"
            )
        if joined and joined != replicas:
            raise ConfigError(
                f"{self.option_key('urls')}: {joined} servers for {replicas} replicas of {self.name}; give one per "
                f"replica, or type placement.roles.{self.name}.replicas={joined}"
            )

    def check_adapters(self) -> None:
        """Check that its engines can apply adapters here, if they have some."""
        if self.adapters and (why := self.engine.why_no_adapters(self.device)):
            able = " or ".join(engines_that(lambda kind: kind.applies_adapters and kind is not type(self.engine)))
            models = ", ".join(self.adapters)
            raise ConfigError(
                f"{self.key}.engine: {why}, and it has those of {models}; type {self.key}.engine={able}, or "
                "lora.sync=merged and no adapter_of for each"
            )

    def check_limits(self, endpoint: Endpoint, judge: JudgeConfig) -> None:
        """Check that all judgements that may be in flight can be sent before they time out."""
        per_minute = endpoint.requests_per_minute
        if per_minute and judge.limits.max_concurrency * 60 / per_minute > judge.limits.timeout_s:
            fitting = int(judge.limits.timeout_s * per_minute / 60)
            key = self.option_key("requests_per_minute")
            raise ConfigError(
                f"{judge.key}.limits.max_concurrency: {judge.limits.max_concurrency} judgements in flight take "
                f"{judge.limits.max_concurrency * 60 / per_minute:.0f} s to send at "
                f"{key}={per_minute}, and time out after {judge.key}.limits.timeout_s={judge.limits.timeout_s:g}; "
                f"type {judge.key}.limits.max_concurrency={max(1, fitting // 2)}, or a longer "
                f"{judge.key}.limits.timeout_s"
            )
        if tokens := endpoint.tokens_per_minute:
            one_s = judge.max_new_tokens * 60 / tokens  # without the prompt
            if one_s > judge.limits.timeout_s:
                key = self.option_key("tokens_per_minute")
                fitting = math.ceil(60 * judge.max_new_tokens / judge.limits.timeout_s)
                raise ConfigError(
                    f"{key}: a judgement of {judge.key}.max_new_tokens={judge.max_new_tokens} uses {one_s:.0f} s of "
                    f"the {tokens} tokens per minute, and waiting judgements time out after "
                    f"{judge.key}.limits.timeout_s={judge.limits.timeout_s:g}; "
                    f"type {key}={2 * fitting} or more, 0 for no limit, or a lower {judge.key}.max_new_tokens"
                )

    def check_tensor_parallel(self, heads: Heads) -> None:
        """Check that each GPU gets the same number of attention heads, and whole key heads or copies of one."""
        num_gpus = self.num_gpus
        fits = heads.query % num_gpus == 0 and (heads.key % num_gpus == 0 or num_gpus % heads.key == 0)
        if not fits:
            fitting = [
                n for n in range(1, num_gpus) if heads.query % n == 0 and (heads.key % n == 0 or n % heads.key == 0)
            ]
            raise ConfigError(
                f"placement.roles.{self.name}.slots_per_replica: {num_gpus} GPUs can't share {heads.query} attention "
                f"heads and {heads.key} key heads evenly; type "
                f"placement.roles.{self.name}.slots_per_replica={fitting[-1]}"
            )

    def resolve_context_limit(self, model_tokens: int) -> int:
        """The context window for its requests: its engine's, which may not exceed the model's (0: unknown)."""
        window = self.engine.options.max_context_tokens or model_tokens
        if window > model_tokens > 0:
            key = self.option_key("max_context_tokens")
            raise ConfigError(
                f"{key}: {window} exceeds the context window of {self.name} ({self.model.path}); "
                f"type {key}={model_tokens} or less, 0 for all of it"
            )
        return window


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerRole(ResolvedRole):
    """A role that trains a model.

    key:             the configuration's section of its settings.
    parallel:        how its ranks share the model.
    needs_routers:   whether the model must have routers, to compute in float32. A judge or a critic that is trained
                     next to a mixture may be dense.
    has_scalar_head: whether its model gives one number.
    """

    key: str
    parallel: ParallelConfig
    needs_routers: bool = False
    has_scalar_head: bool = False

    def check_ranks(self) -> None:
        """Check that copies, shared samples or divided experts fit the number of ranks."""
        with section(f"{self.key}.parallel."):
            self.parallel.check_ranks(self.num_replicas)

    def check_query_heads(self, section_of_model: str, heads: Heads) -> None:
        """Check that ranks that share samples can have equal numbers of the query heads of their model."""
        cp, key = self.parallel.cp, f"{self.key}.parallel.cp"
        if heads.query % cp:
            fitting = max(n for n in range(1, cp) if heads.query % n == 0)
            raise ConfigError(
                f"{key}: {cp} ranks can't divide the {heads.query} query heads of {section_of_model}.path evenly; "
                f"type {key}={fitting}"
            )


@dataclass(frozen=True, slots=True)
class Roles(Mapping[str, ResolvedRole]):
    """All roles of a run by name: those with a place, and those that are served."""

    by_name: Mapping[str, ResolvedRole]
    served: Mapping[str, ServedRole]

    def __getitem__(self, name: str) -> ResolvedRole:
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    @property
    def learners(self) -> dict[str, LearnerRole]:
        """The roles with ranks here that train a model."""
        return {name: role for name, role in self.items() if isinstance(role, LearnerRole)}

    def check_installed(self, *, joined: bool) -> None:
        """Check that what the engines need is installed. joined: whether the machines are those of a joined cluster,
        which have their own environments.
        """
        for role in self.served.values():
            if role.engine.outside or not joined:
                with section(""):
                    role.engine.check_installed(role.name, role.model, role.option_key)

    @property
    def seated(self) -> tuple[ServedRole, ...]:
        """Served roles with engines here."""
        return tuple(role for role in self.served.values() if role.is_seated)

    @property
    def hosts(self) -> tuple[ServedRole, ...]:
        """Those whose engines are their own; they may serve the others as adapters."""
        return tuple(role for role in self.seated if not role.model.adapter_of)


def resolve_roles(config: RunConfig, placement: Placement) -> Roles:
    """Resolve all roles, once the placement is known. ConfigError names an option of an engine that doesn't exist."""
    served: dict[str, ServedRole] = {}
    others: dict[str, ResolvedRole] = {}
    parallel = config.parallel
    for name, engine in {name: resolve_engine(name, config) for name in config.served}.items():
        model = config.models[name]
        host = model.host
        is_elastic = host in placement.seats and placement.is_elastic(host)
        served[name] = ServedRole(
            **find_place(host, placement),
            name=name,
            dtype=model.dtype,
            dtype_key=f"{model.key}.dtype",
            model=model,
            engine=engine,
            learner=config.learners.get(name),
            is_elastic=is_elastic,
            takes_turns=is_elastic or host in placement.time_sharing_roles,
            return_routed_experts=config.algorithm.router_replay == "rollout" and model.plays,
            sync=resolve_sync(engine, config.sync),
            speculation="none" if model.plays else config.engine.speculation,
            batch_invariant=config.train.deterministic and engine.batch_invariant,
            adapters={} if model.adapter_of else config.find_adapters(name),
        )
    for name in (name for name in placement.seats if name not in served):
        others[name] = ResolvedRole(**find_place(name, placement), name=name)
        if name in config.asked.scorer_roles:
            model = config.models[name]
            others[name] = replace(others[name], dtype=model.dtype, dtype_key=f"{model.key}.dtype")
        if name in parallel:
            sets_dtype = name in ("learner", "critic")
            others[name] = LearnerRole(
                **find_place(name, placement),
                name=name,
                dtype=config.train.dtype if sets_dtype else "",
                dtype_key="train.dtype" if sets_dtype else "",
                key=config.key_of_learner(name),
                parallel=parallel[name],
                needs_routers=name == "learner" and ROUTER in config.train.fp32_modules,
                has_scalar_head=name == "critic",
            )
    return Roles({**served, **others}, served)


def make_option_key(model: ModelEntry, engine: AnyEngine) -> Callable[[str], str]:
    """An option of a model's engine -> the key that sets it."""

    def option_key(name: str) -> str:
        own = name in model.engine_options or not engine.section
        return f"{model.key}.engine_options.{name}" if own else f"engine.{engine.section}.{name}"

    return option_key


def resolve_engine(role: str, config: RunConfig) -> AnyEngine:
    """The engine kind of a role, with its options: `engine.<kind>` with the role's `engine_options` over it."""
    model, kind = config.models[config.models[role].host], config.find_engine_kind(role)
    shared = kind.read_options(config.engine)
    if not dataclasses.is_dataclass(shared):
        raise ConfigError(f"{model.key}.engine: the options of {model.engine} are no dataclass")
    return kind(overlaid(shared, model.engine_options, f"{model.key}.engine_options."))


class SeatFacts(TypedDict):
    """The facts of a role that follow from its seats."""

    pool: str
    num_replicas: int
    device: str
    num_gpus: int


def find_place(role: str, placement: Placement) -> SeatFacts:
    if role not in placement.seats:
        return SeatFacts(pool="", num_replicas=0, device="cpu", num_gpus=1)
    seats = placement.seats[role]
    return SeatFacts(
        pool=seats[0].pool,
        num_replicas=len(seats),
        device=placement.find_device_kind(role),
        num_gpus=placement.gpus_per_process(role),
    )


def resolve_sync(engine: AnyEngine, sync: SyncConfig) -> SyncConfig:
    if not engine.quantizes or sync.probe_tolerance is not None:
        return sync
    return replace(sync, probe_tolerance=TOLERANCE_QUANTIZED)
