"""The roles of a run: what follows for each of them from the configuration and the placement. Starts nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from grmpipe.config.engine_kinds import engine_kind
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.yaml_io import overlaid
from models.engines.engine_kind import AnyEngine, EngineSpec
from models.renderer import Renderer
from models.settings import ModelConfig
from scheduler.placement import Placement
from scheduler.weights.weight_sync import SyncConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A role's model, found and checked.

    path:           what its processes load.
    context_tokens: prompt and new tokens together: the model's window, or the engine's where that is smaller.
    """

    name: str  # the role's: policy, grm
    path: str
    renderer: Renderer
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRole:
    """A role that has a place in a run.

    device:    cuda or cpu.
    num_gpus:  of one process, which share its model; 1 on a CPU.
    dtype:     that it computes in, and `dtype_key`, where a user sets it; empty: not one of its own.
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
        """Has it slots here? An endpoint has none."""
        return self.num_replicas > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRole(ResolvedRole):
    """A role whose model engines serve, here or behind an endpoint.

    engine:       its kind, with the role's own options over those of the kind.
    learner:      the role that trains its weights; None: they stay as they are.
    is_elastic:   its engines are on slots that change their role.
    shares_with:  other roles that one engine of each slot serves too, by changing its weights.
    return_routed_experts: its engines tell the experts of each token, for the learner to replay.
    sync:         how close they must come to their learner: less close where their options say that they quantise.
    """

    model: ModelConfig
    engine: AnyEngine
    learner: str | None
    is_elastic: bool
    shares_with: tuple[str, ...]
    return_routed_experts: bool
    sync: SyncConfig

    @property
    def sleeps(self) -> bool:
        """Can its engines give any memory back while others need it?"""
        return self.engine.sleeps(self.device)

    @property
    def frees_device(self) -> bool:
        """Can they give a device's memory back, the weights too?"""
        return self.engine.frees_device(self.device)

    @property
    def is_time_shared(self) -> bool:
        """Do its engines hand a device's memory to those of another role?"""
        return self.is_elastic and not self.shares_with and self.frees_device

    @property
    def takes_weights(self) -> bool:
        """Does anybody bring its engines other weights than they started with?"""
        return self.learner is not None or bool(self.shares_with)

    def option_key(self, name: str) -> str:
        """Where a user sets an option of its engine, so that it counts."""
        own = name in self.model.engine_options or not self.engine.section
        return f"{self.name}.engine_options.{name}" if own else f"engine.{self.engine.section}.{name}"

    def engine_spec(self, path: str, seed: int) -> EngineSpec:
        """What each of its engines is made of. path: of its model, as the engine's process finds it."""
        return EngineSpec(
            path=path,
            role=self.name,
            dtype=self.model.dtype,
            device=self.device,
            num_gpus=self.num_gpus,
            seed=seed,
            chat_template=self.model.chat_template,
            lora=self.model.lora,
            takes_weights=self.takes_weights,
            return_routed_experts=self.return_routed_experts,
        )


@dataclass(frozen=True, slots=True)
class Roles(Mapping[str, ResolvedRole]):
    """Every role of a run by its name: those with a place, and those that are served."""

    by_name: Mapping[str, ResolvedRole]
    served: Mapping[str, ServedRole]

    def __getitem__(self, name: str) -> ResolvedRole:
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    @property
    def seated(self) -> tuple[ServedRole, ...]:
        """Served ones with engines here."""
        return tuple(role for role in self.served.values() if role.is_seated)

    def engine_on_slot(self, name: str) -> AnyEngine:
        """The engine that serves a role, with the options of all roles that it serves."""
        role = self.served[name]
        others = (self.served[other].engine for other in role.shares_with)
        return functools.reduce(lambda one, other: one.wider(other), others, role.engine)


def resolve_roles(config: RunConfig, placement: Placement) -> Roles:
    """Once, when the placement is known. ConfigError names an option of an engine that doesn't exist."""
    engines = {name: resolve_engine(name, config) for name in config.served}
    served = {name: resolve_served(name, engines, config, placement) for name in engines}
    others = {name: resolve_other(name, config, placement) for name in placement.seats if name not in served}
    return Roles({**served, **others}, served)


def resolve_engine(role: str, config: RunConfig) -> AnyEngine:
    """The kind that serves a role, with its options: `engine.<kind>` with the role's `engine_options` over it."""
    model = config.models[role]
    kind = engine_kind(model.engine, f"{role}.engine")
    shared = kind.shared_options(config.engine)
    if not dataclasses.is_dataclass(shared):
        raise ConfigError(f"{role}.engine: the options of {model.engine} are no dataclass")
    return kind(overlaid(shared, model.engine_options, f"{role}.engine_options."))


def resolve_served(name: str, engines: Mapping[str, AnyEngine], config: RunConfig, placement: Placement) -> ServedRole:
    model, shares_with = config.models[name], sharing_engine(name, engines, config.balance.swap, placement)
    return ServedRole(
        **place_of(name, placement),
        name=name,
        dtype=model.dtype,
        dtype_key=f"{name}.dtype",
        model=model,
        engine=engines[name],
        learner=config.learners.get(name),
        is_elastic=name in placement.seats and placement.is_elastic(name),
        shares_with=shares_with,
        return_routed_experts=config.algorithm.router_replay == "rollout" and "policy" in (name, *shares_with),
        sync=sync_of(engines[name], config.sync),
    )


def resolve_other(name: str, config: RunConfig, placement: Placement) -> ResolvedRole:
    """A learner, a critic, a meta-RM."""
    own = {"learner": config.train.dtype, "critic": config.critic.dtype or config.train.dtype}
    keys = {"learner": "train.dtype", "critic": "critic.dtype"}
    return ResolvedRole(**place_of(name, placement), name=name, dtype=own.get(name, ""), dtype_key=keys.get(name, ""))


class SeatFacts(TypedDict):
    """What a role's seats say of it."""

    pool: str
    num_replicas: int
    device: str
    num_gpus: int


def place_of(role: str, placement: Placement) -> SeatFacts:
    if role not in placement.seats:
        return SeatFacts(pool="", num_replicas=0, device="cpu", num_gpus=1)
    seats = placement.seats[role]
    return SeatFacts(
        pool=seats[0].pool,
        num_replicas=len(seats),
        device=placement.device_of(role),
        num_gpus=placement.gpus_per_process(role),
    )


def sharing_engine(role: str, engines: Mapping[str, AnyEngine], swap: str, placement: Placement) -> tuple[str, ...]:
    """Other roles on its elastic slots, where each slot has one engine for all of them."""
    slots = placement.elastic_slots(placement.seats[role][0].pool) if role in placement.seats else {}
    here = tuple(next(iter(slots.values()))) if slots else ()
    if not here or not is_one_engine([engines[name] for name in here], swap, placement.device_of(role)):
        return ()
    return tuple(name for name in here if name != role)


def is_one_engine(engines: Sequence[AnyEngine], swap: str, device: str) -> bool:
    """By `balance.swap`, or by itself where the roles are on one kind that swaps weights and share a GPU, and the
    engines were not made to sleep: to wake one is faster than to load it."""
    if swap != "auto":
        return swap == "weights"
    first = engines[0]
    alike = first.swaps_weights and all(type(other) is type(first) for other in engines)
    return alike and device == "cuda" and not all(engine.sleep_mode for engine in engines)


def sync_of(engine: AnyEngine, sync: SyncConfig) -> SyncConfig:
    if not engine.quantizes:
        return sync
    told = sync.probe_tolerance_quantized
    return dataclasses.replace(sync, probe_tolerance=told, probe_tolerance_16bit=told)
