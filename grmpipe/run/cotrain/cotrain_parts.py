"""The second learner of a co-training run, put together: the GRM's ranks, its weight sync, what its flow runs on.

Starts processes where it is told to; runs no loop.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grmpipe.config.roles import Model
from grmpipe.config.run_config import RunConfig
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.envs.play import Play, RolloutRequest, play
from grmpipe.envs.single_turn import SingleTurn
from grmpipe.pipeline.interfaces import FlowConfig
from grmpipe.train.learner.learner_group import LearnerGroup
from grmpipe.train.learner.learner_spec import LearnerSpec, make_learner
from grmpipe.types import Prompt, Rollout
from grmpipe.validate.prepare import Prepared
from grmpipe.validate.weight_route import transport_of
from models.types import SamplingParams
from models.weights.transports import transport_kind
from scheduler.processes.actors import Cluster
from scheduler.routing.router import Router
from scheduler.weights.weight_sync import WeightSync

LEARNER = "grm_learner"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainableGrm:
    """A GRM with an optimizer of its own: what learns, what serves it, and the way between them."""

    model: Model
    engines: Router
    learner: LearnerGroup
    sync: WeightSync


async def start_grm_learner(cluster: Cluster, prepared: Prepared, run_dir: Path) -> tuple[LearnerGroup, str] | None:
    """Its ranks, and how its weights will travel; None where the GRM doesn't learn."""
    if not prepared.config.cotrain.enabled:
        return None
    same_machine = len(cluster.machines(LEARNER) | cluster.machines("grm")) == 1
    role = prepared.roles.served["grm"]
    transport = transport_of(role, prepared.config, prepared.placement, same_machine=same_machine)
    spec = grm_learner_spec(prepared, transport, run_dir)
    ranks = await cluster.start_group(LEARNER, functools.partial(make_learner, spec))
    return LearnerGroup(ranks), transport


def trainable_grm(
    prepared: Prepared, cluster: Cluster, started: tuple[LearnerGroup, str] | None, engines: Router | None
) -> TrainableGrm | None:
    """With the probe of its weight sync: the beginning of a question that the GRM is asked."""
    if started is None:
        return None
    assert prepared.grm is not None and engines is not None, "a GRM that learns has local engines"
    (learner, transport), role = started, prepared.roles.served[prepared.grm.name]
    sync = WeightSync(
        learner,
        prepared.grm.renderer.render(prepared.prompts.at(0).messages)[: role.sync.probe_tokens],
        role.sync,
        transport=transport,
        group=transport_kind(transport).group,
        ranks_per_engine=role.num_gpus,
        new_address=functools.partial(cluster.free_address, LEARNER),
    )
    return TrainableGrm(model=prepared.grm, engines=engines, learner=learner, sync=sync)


def grm_train(config: RunConfig) -> TrainConfig:
    """`train`, with what `cotrain` says instead."""
    cotrain = config.cotrain
    return dataclasses.replace(
        config.train,
        num_steps=num_grm_steps(config),
        groups_per_batch=cotrain.prompts_per_batch,
        group_size=cotrain.group_size,
        min_valid_siblings=2,
        max_staleness=0,
        lr=cotrain.lr,
    )


def num_grm_steps(config: RunConfig) -> int:
    cotrain = config.cotrain
    return cotrain.warmup_steps + math.ceil(cotrain.grm_steps_per_policy_step * config.train.num_steps)


def grm_algorithm(config: RunConfig) -> AlgorithmConfig:
    """GRPO, as SPCT trains a GRM by rule."""
    return AlgorithmConfig(kl_coefficient=config.cotrain.kl_coefficient)


def grm_learner_spec(prepared: Prepared, transport: str, run_dir: Path) -> LearnerSpec:
    config = prepared.config
    assert prepared.grm is not None
    role = prepared.roles.served[prepared.grm.name]
    return LearnerSpec(
        model_path=prepared.grm.path,
        train=grm_train(config),
        algorithm=grm_algorithm(config),
        max_new_tokens=config.judge.max_new_tokens,
        device=prepared.roles[LEARNER].device,
        sync_dtype=role.dtype,
        bucket_bytes=config.sync.bucket_mb << 20,
        checkpoint_names=role.engine.checkpoint_names,
        transport=transport,
        sync_dir=str(run_dir.absolute() / "grm_weights") if transport_kind(transport).folder else "",
        temperature=config.judge.temperature,
        lora=role.model.lora,
        adapter_dir=str(run_dir.absolute() / "grm_adapter"),
        seed=config.seed,
    )


def grm_flow(config: RunConfig) -> FlowConfig:
    """Synchronous: judging tasks are judged by the weights that learn from them."""
    train = grm_train(config)
    return FlowConfig(
        num_steps=train.num_steps,
        groups_per_batch=train.groups_per_batch,
        group_size=train.group_size,
        min_valid_siblings=train.min_valid_siblings,
        max_staleness=train.max_staleness,
        group_deadline_s=config.rollout.group_deadline_s + config.judge.timeout_s,
        rollout_concurrency=config.judge.max_concurrency,
        judge_concurrency=config.judge.max_concurrency,
        seed=config.seed,
        group_prefix="lesson",
        rollout_max_failure_rate=config.rollout.max_failure_rate,
        rollout_failure_window=config.rollout.failure_window,
        rollout_pause_s=config.rollout.pause_s,
        max_zero_advantage_groups=int(config.cotrain.dynamic_sampling_batches * train.groups_per_batch),
        algorithm=grm_algorithm(config),
    )


def grm_play(config: RunConfig, grm: TrainableGrm) -> Play:
    """One judgement of a judging task, sampled as in judging."""
    params = SamplingParams(max_new_tokens=config.judge.max_new_tokens, temperature=config.judge.temperature)

    async def judged(request: RolloutRequest, judging_task: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        return await play(request, SingleTurn(judging_task), grm.engines, grm.model.renderer, params, 1, on_first_token)

    return judged


def grm_too_long(config: RunConfig, grm: Model) -> Callable[[Prompt], bool]:
    """Whether a judging task leaves no room for a critique in the GRM's window."""

    def check(judging_task: Prompt) -> bool:
        return len(grm.renderer.render(judging_task.messages)) + config.judge.max_new_tokens > grm.context_tokens

    return check
