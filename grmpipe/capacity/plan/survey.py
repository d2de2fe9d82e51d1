"""What is known of a run when it is planned: places, data, models by file or by shape. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from grmpipe.capacity.plan.candidates import Seating
from grmpipe.config.roles import Model, Roles, ServedRole, resolve_roles
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.validate.context_limits import check_judges, check_policy
from grmpipe.validate.critic_model import find_critic
from grmpipe.validate.data import Data, read_data
from grmpipe.validate.engines import check_installed, check_tensor_parallel, context_limit_of
from grmpipe.validate.models import Progress, check_learns, find_model
from grmpipe.validate.places import seat_roles
from grmpipe.validate.prepare import check_objective
from grmpipe.validate.seats import check_machine
from grmpipe.validate.sections import ModelNotHere, section
from grmpipe.validate.swap import check_swap
from models.hub import find_files
from models.lm.footprint import Footprint, Heads, footprint_of, footprint_of_shape, heads_of
from models.tiny.resolve import resolve_model
from scheduler.devices import DeviceSpec, device_called, find_device
from scheduler.placement import Placement, PoolConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A role's model as far as it is known here: by its files, or by the configured shape."""

    role: str
    model: Model | None  # None: its files aren't here
    footprint: Footprint | None
    context_tokens: int  # 0: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The input of a plan. `unchecked`: what only the run's own machines can check."""

    config: RunConfig
    placement: Placement
    roles: Roles
    data: Data
    models: Mapping[str, Sized]  # role (of a served model, critic, meta_rm) -> model
    devices: Mapping[str, DeviceSpec | None]  # configured pool -> device of its slots; None: unknown
    unchecked: tuple[str, ...]

    def under(self, config: RunConfig) -> Survey:
        """The same run with another configuration, in the same places."""
        return replace(self, config=config, roles=resolve_roles(config, self.placement))

    def pool(self, role: str) -> PoolConfig:
        return self.placement.pools[self.placement.seats[role][0].pool]

    def seating(self, role: str) -> Seating:
        seats = self.placement.seats[role]
        return Seating(replicas=len(seats), width=len(seats[0].slots))


def survey_run(config: RunConfig, progress: Progress) -> Survey:
    """The checks of a run; those that need its machines are skipped, the others still refuse."""
    devices = find_devices(config)
    seated, roles = seat_roles(config)
    placement = with_memory(seated, devices)
    data = read_data(config)
    check_objective(config)
    unchecked = []
    for check in (lambda: check_machine(config, placement), lambda: check_installed(roles, config)):
        try:
            check()
        except ConfigError as error:
            unchecked.append(f"{error}, or run on a machine that has them")
    models: dict[str, Sized] = {}
    for role in roles.seated:
        models[role.name], lacking = size_model(role, config, progress)
        unchecked += lacking
        check_heads(models[role.name], role)
        if role.learner is not None and (learning := models[role.name].model) is not None:
            check_learns(learning)
    if "critic" in config.roles:
        models["critic"] = size_critic(config, models["policy"], progress)
    if config.uses_meta_rm:
        models["meta_rm"], lacking = size_meta_rm(config, progress)
        unchecked += lacking
    if (policy := models["policy"].model) is not None:
        check_policy(config, policy, data)
    found = [sized.model for sized in models.values() if sized.model is not None]
    check_judges(config, roles, found, data)
    check_swap(roles, found)
    return Survey(
        config=config,
        placement=placement,
        roles=roles,
        data=data,
        models=models,
        devices=devices,
        unchecked=tuple(unchecked),
    )


def find_devices(config: RunConfig) -> dict[str, DeviceSpec | None]:
    """Pool -> device: as configured, otherwise as found here."""
    found: dict[str, DeviceSpec | None] = {}
    for name, pool in config.placement.pools.items():
        called = pool.device or (device_here() if pool.resource == "gpu" else "cpu")
        try:
            found[name] = find_device(called, config.plan.devices) if called else None
        except ValueError as error:
            raise ConfigError(f"placement.pools.{name}.device: {error}") from error
    return found


def device_here() -> str | None:
    import torch  # late: a run on cores has no GPU to ask for

    return device_called(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def with_memory(placement: Placement, devices: Mapping[str, DeviceSpec | None]) -> Placement:
    """The placement with the memory of each kind of GPU, for pools that don't set it."""
    pools = {name: pool_with_memory(pool, devices[name]) for name, pool in placement.pools.items()}
    return replace(placement, pools=pools)


def pool_with_memory(pool: PoolConfig, device: DeviceSpec | None) -> PoolConfig:
    if pool.memory_gb is not None or device is None or pool.resource == "cpu":
        return pool
    return replace(pool, memory_gb=device.memory_gb)


def size_model(role: ServedRole, config: RunConfig, progress: Progress) -> tuple[Sized, list[str]]:
    """A model's sizes, and notes on what is unknown."""
    name, shape = role.name, role.model.shape
    try:
        model = find_model(role, config, progress, weights=False)
    except ModelNotHere as error:
        learns = ", whether it can be trained" if role.learner is not None else ""
        lacking = [f"{error} (its chat template, whether prompts fit its window{learns})"]
        if not shape.declared:
            lacking.append(f"memory of {name}: declare {role.key}.shape, as in conf/policy/qwen3_8b.yaml")
            return Sized(role=name, model=None, footprint=None, context_tokens=0), lacking
        window = context_limit_of(role, shape.context_tokens)
        return Sized(role=name, model=None, footprint=footprint_of_shape(shape), context_tokens=window), lacking
    sized = Sized(role=name, model=model, footprint=footprint_of(model.path), context_tokens=model.context_tokens)
    return sized, []


def size_critic(config: RunConfig, policy: Sized, progress: Progress) -> Sized:
    """The trunk of a language model: the critic's head has one number, slightly less than estimated."""
    if config.critic.path is None:
        return replace(policy, role="critic")
    if policy.model is None:  # whether the tokenizers are the same can't be checked
        return Sized(role="critic", model=None, footprint=None, context_tokens=0)
    with section("critic."):
        found = find_critic(config, policy.model, progress)
    return replace(policy, role="critic", model=None, footprint=footprint_of(found.path))


def size_meta_rm(config: RunConfig, progress: Progress) -> tuple[Sized, list[str]]:
    """A meta-RM's sizes. That it was trained from the GRM is checked by the run itself."""
    assert config.meta_rm.path is not None
    footprint, lacking = None, []
    try:
        footprint = footprint_of(find_files(resolve_model(config.meta_rm.path, progress), weights=False))
    except ValueError as error:
        lacking = [f"meta_rm.{error} (its memory and its work)"]
    return Sized(role="meta_rm", model=None, footprint=footprint, context_tokens=0), lacking


def check_heads(sized: Sized, role: ServedRole) -> None:
    """Check that the GPUs of an engine can share the model, as far as it is known here."""
    shape = role.model.shape
    if sized.model is not None:
        check_tensor_parallel(role, heads_of(sized.model.path))
    elif shape.declared:
        check_tensor_parallel(role, Heads(query=shape.num_heads, key=shape.num_kv_heads))
