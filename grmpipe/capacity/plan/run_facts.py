"""What is known of a run when it is planned: places, data, models by file or by shape."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from grmpipe.capacity.lower_bound import META_RM
from grmpipe.config.grm import ModelEntry
from grmpipe.config.io.key_errors import ModelNotHere, section
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.data.catalogs import resolve_model
from grmpipe.data.prompts import Data
from grmpipe.judge.calibration import read_calibration
from grmpipe.judge.context_limits import check_answer_fits, check_policy
from grmpipe.models.hub import find_files
from grmpipe.models.lm.footprint import Footprint, Heads, footprint_of_shape, read_footprint, read_heads
from grmpipe.models.settings import ModelShape
from grmpipe.roles.find_models import find_critic, find_model
from grmpipe.roles.learners import check_experts, check_learns
from grmpipe.roles.machines import check_machine
from grmpipe.roles.role_placement import seat_roles
from grmpipe.roles.roles import LearnerRole, Model, Roles, ServedRole, resolve_roles
from grmpipe.run.prepare import check_judges, check_objective, check_trackers
from grmpipe.run.run_prompts import check_canaries, load_stored_tasks, read_data, read_demonstrations
from grmpipe.scheduler.devices import DeviceSpec, device_called, find_device
from grmpipe.scheduler.placement import ClusterConfig, Placement, PoolConfig
from grmpipe.types import Prompt

LONGEST_PROMPTS = 8  # by characters: the one with the most tokens is most likely among them


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A role's model as far as it is known here: by its files, or by the configured shape."""

    role: str
    model: Model | None = None  # None: its files aren't here
    footprint: Footprint | None = None
    context_tokens: int = 0  # 0: unknown

    @staticmethod
    def of(model: Model) -> Sized:
        footprint = read_footprint(model.path)
        return Sized(role=model.name, model=model, footprint=footprint, context_tokens=model.context_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRoles:
    """A role's processes in a plan: `replicas` of `width` slots each, in one pool of the configuration."""

    replicas: int
    width: int
    pool: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The input of a plan.

    longest_prompts: some of the data's, by their characters, held-out ones included.
    unchecked:       what only the run's own machines can check.
    """

    config: RunConfig
    placement: Placement
    roles: Roles
    data: Data
    longest_prompts: tuple[Prompt, ...]
    models: Mapping[str, Sized]  # role (of a served model, a scorer, the critic) -> model
    devices: Mapping[str, DeviceSpec | None]  # configured pool -> device of its slots; None: unknown
    unchecked: tuple[str, ...]

    def under(self, config: RunConfig) -> RunFacts:
        """The same run with another configuration, in the same places."""
        return replace(self, config=config, roles=resolve_roles(config, self.placement))

    @property
    def scorer_dtypes(self) -> dict[str, str]:
        """Role -> dtype, of the models with a scalar head that are asked here: reward models, a meta-RM."""
        config = self.config
        found = {role: config.models[role].dtype for role in config.asked.scorer_roles}
        return found | ({META_RM: config.meta_rm.dtype} if config.uses_meta_rm else {})

    def pool(self, role: str) -> PoolConfig:
        return self.placement.pools[self.placement.seats[self.find_host(role)][0].pool]

    def find_host(self, role: str) -> str:
        """The role that has the seats of a role: another one's, if it is an adapter of that."""
        return self.config.models[role].host if role in self.config.models else role

    def list_hosted(self, host: str) -> list[str]:
        """The served models on the engines of a role, itself among them."""
        return [role for role in self.config.served if self.find_host(role) == host]

    def describe_seats(self, role: str) -> PlacedRoles:
        seats = self.placement.seats[self.find_host(role)]
        return PlacedRoles(replicas=len(seats), width=len(seats[0].slots), pool=seats[0].pool)


def collect_facts(config: RunConfig) -> RunFacts:
    """The checks of a run; those that need its machines are skipped, the others still refuse."""
    devices = find_devices(config.placement.pools, config.plan.devices)
    seated, roles = seat_roles(config)
    placement = with_memory(seated, devices)
    data = read_data(config)
    check_objective(config)
    unchecked = []
    joined = config.cluster.is_joined
    checks: list[Callable[[], None]] = [
        lambda: check_machine(config.cluster, placement),
        lambda: roles.check_installed(joined=joined),
        lambda: check_trackers(config),
    ]
    for check in checks:
        try:
            check()
        except ConfigError as error:
            unchecked.append(f"{error}, or run on a machine that has them")
    models, lacking = size_models(config, roles)
    if (policy := models["policy"].model) is not None:
        check_policy(config.rollout, policy, data)
    else:
        check_answer_fits(config.rollout, roles.served["policy"])
    check_files(config, data, policy)
    found = [sized.model for sized in models.values() if sized.model is not None]
    check_judges(config, roles, found, data)
    return RunFacts(
        config=config,
        placement=placement,
        roles=roles,
        data=data,
        longest_prompts=find_longest((*data.train, *data.held_out)),
        models=models,
        devices=devices,
        unchecked=(*unchecked, *lacking),
    )


def check_files(config: RunConfig, data: Data, policy: Model | None) -> None:
    """Check the files that a run reads at its start, beside those of its prompts."""
    check_canaries(config)
    for role in config.learns_to_judge:
        load_stored_tasks(config, role, data)
    if policy is not None:
        read_demonstrations(config.algorithm.sft.path, policy.renderer, config.seed)
    for judge in config.asked.judges.values():
        if judge.calibration is not None:
            with section(f"{judge.key}.calibration: "):
                read_calibration(judge.calibration)


def find_longest(prompts: Iterable[Prompt]) -> tuple[Prompt, ...]:
    """Those with the most characters."""
    return tuple(
        heapq.nlargest(LONGEST_PROMPTS, prompts, key=lambda prompt: sum(len(one.content) for one in prompt.messages))
    )


def size_models(config: RunConfig, roles: Roles) -> tuple[dict[str, Sized], list[str]]:
    """The sizes of all models, checked, and what couldn't be checked."""
    models: dict[str, Sized] = {}
    unchecked: list[str] = []
    for role in roles.seated:
        learner = None if role.learner is None else roles.learners[role.learner]
        models[role.name], lacking = size_model(role, config.cluster)
        unchecked += lacking
        check_heads(models[role.name], role, learner)
        if learner is not None and (learning := models[role.name].model) is not None:
            check_learns(learning, role.key)
            check_experts(learner, learning.path)
    if "critic" in config.roles:
        models["critic"] = size_critic(config.critic.path, models["policy"], config.policy)
    for name in config.asked.scorer_roles:
        entry = config.models[name]
        models[name], lacking = size_scorer(name, entry.key, entry.path, entry.shape)
        unchecked += lacking
    if config.uses_meta_rm:
        assert config.meta_rm.path is not None
        models[META_RM], lacking = size_scorer(META_RM, META_RM, config.meta_rm.path)
        unchecked += lacking
    return models, unchecked


AUTO, USUAL = "auto", "h100"


def find_devices(pools: Mapping[str, PoolConfig], own: Mapping[str, DeviceSpec]) -> dict[str, DeviceSpec | None]:
    """Pool -> device: as configured, otherwise as found here; `auto` without a GPU here is an H100."""
    found: dict[str, DeviceSpec | None] = {}
    for name, pool in pools.items():
        called = pool.device
        if called in (None, AUTO):
            called = (device_here() or (USUAL if called == AUTO else None)) if pool.resource == "gpu" else "cpu"
        try:
            found[name] = find_device(called, own) if called else None
        except ValueError as error:
            raise ConfigError(f"placement.pools.{name}.device: {error}") from error
    return found


def device_here() -> str | None:
    import torch  # late: a run on cores has no GPU to ask for

    return device_called(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def with_memory(placement: Placement, devices: Mapping[str, DeviceSpec | None]) -> Placement:
    """The placement with the memory of each kind of GPU, for pools that don't set it."""
    pools = dict(placement.pools)
    for name, pool in pools.items():
        if (device := devices[name]) is not None and pool.resource != "cpu" and pool.memory_gb is None:
            pools[name] = replace(pool, memory_gb=device.memory_gb)
    return replace(placement, pools=pools)


def size_model(role: ServedRole, cluster: ClusterConfig) -> tuple[Sized, list[str]]:
    """A model's sizes, and notes on what is unknown."""
    name, shape = role.name, role.model.shape
    try:
        model = find_model(role, cluster, weights=False)
    except ModelNotHere as error:
        learns = ", whether it can be trained" if role.learner is not None else ""
        lacking = [f"{error} (its chat template, whether prompts fit its window{learns})"]
        if not shape.declared:
            lacking.append(f"memory of {name}: declare {role.key}.shape, as in conf/policy/qwen3_8b.yaml")
            return Sized(role=name), lacking
        window = role.resolve_context_limit(shape.context_tokens)
        return Sized(role=name, footprint=footprint_of_shape(shape), context_tokens=window), lacking
    return Sized.of(model), []


def size_critic(path: str | None, policy: Sized, entry: ModelEntry) -> Sized:
    """The trunk of a language model: the critic's head has one number, slightly less than estimated."""
    if path is None:
        return replace(policy, role="critic")
    if policy.model is None:  # whether the tokenizers are the same can't be checked
        return Sized(role="critic")
    with section("critic."):
        found = find_critic(path, policy.model, entry)
    return replace(policy, role="critic", model=None, footprint=read_footprint(found.path))


def size_scorer(role: str, key: str, path: str, shape: ModelShape | None = None) -> tuple[Sized, list[str]]:
    """The sizes of a model with a scalar head. The run itself checks the tokenizer."""
    try:
        directory = find_files(resolve_model(path), weights=False)
    except ValueError as error:
        known = footprint_of_shape(shape) if shape is not None and shape.declared else None
        return Sized(role=role, footprint=known), [f"{key}.{error} (its scalar head)"]
    from grmpipe.models.lm.scalar_head import scalar_config  # late: seconds, which few plans need

    with section(f"{key}."):
        scalar_config(directory)
    return Sized(role=role, footprint=read_footprint(directory)), []


def check_heads(sized: Sized, role: ServedRole, learner: LearnerRole | None) -> None:
    """Check that the GPUs of an engine, and ranks that share samples, can share the model, as far as it is known
    here.
    """
    shape = role.model.shape
    if sized.model is not None:
        heads = read_heads(sized.model.path)
    elif shape.declared:
        heads = Heads(query=shape.num_heads, key=shape.num_kv_heads)
    else:
        return
    role.check_tensor_parallel(heads)
    if learner is not None:
        learner.check_query_heads(role.key, heads)
