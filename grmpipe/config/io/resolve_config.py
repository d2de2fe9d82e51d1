"""What is typed -> what a run reads: one map of each kind, every default filled in, all checked; and back."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from grmpipe.config.cross_checks import check_across
from grmpipe.config.grm import GrmConfig, ModelEntry
from grmpipe.config.judge import JudgeConfig, JudgeEntry
from grmpipe.config.keys.entry_names import GRM, JUDGE, LEARNER, POLICY, REWARD, check_names
from grmpipe.config.reward import RewardConfig, RewardTree
from grmpipe.config.run_config import RunConfig
from grmpipe.config.run_sections import RunKeys, RunSections, SharedSections
from grmpipe.config.train import TrainConfig
from grmpipe.models.settings import AUTO, PolicyConfig
from grmpipe.scheduler.placement import PlacementConfig

Section = TypeVar("Section", PolicyConfig, GrmConfig, JudgeConfig, RewardConfig)
BY_DEVICE = {True: "bfloat16", False: "float32"}  # the meaning of dtype=auto, on a GPU and elsewhere


def resolve_config(typed: RunSections) -> RunConfig:
    """The configuration of a run. No other code asks for the device of a role, or which judge is typed first. Raises
    ValueError that names a key.
    """
    check_names("models", typed.models)
    check_names("judges", typed.judges)
    placement = resolve_placement(typed)
    first = {JUDGE: JudgeEntry(**vars(typed.judge))}
    config = RunConfig(
        **copy_shared(typed) | {"placement": placement, "train": resolve_training(placement, typed.train)},
        models={model.name: resolve_serving(placement, model, typed.engine.kind) for model in list_models(typed)},
        judges=first | {name: JudgeEntry.of(judge, name) for name, judge in typed.judges.items()},
        rewards=RewardTree.of(typed.reward, typed.rewards),
    )
    check_across(config)
    return config


def fill_sections(config: RunConfig) -> RunSections:
    """The configuration as a user may type it, with every default filled in."""
    models = select_entries(GrmConfig, config.models)
    judges = select_entries(JudgeConfig, config.judges)
    rewards = select_entries(RewardConfig, config.rewards.entries)
    del models[POLICY]
    return RunSections(
        **copy_shared(config),
        policy=select_entries(PolicyConfig, {POLICY: config.policy})[POLICY],
        grm=models.pop(GRM),
        models=models,
        judge=judges.pop(JUDGE),
        judges=judges,
        reward=rewards.pop(REWARD),
        rewards=rewards,
    )


def select_entries(cls: type[Section], entries: Mapping[str, Section]) -> dict[str, Section]:
    """The entries by name, without what isn't typed there."""
    return {
        name: cls(**{spec.name: getattr(entry, spec.name) for spec in fields(cls)}) for name, entry in entries.items()
    }


def copy_shared(sections: RunKeys) -> dict[str, Any]:
    """What a run reads as it is typed."""
    return {spec.name: getattr(sections, spec.name) for cls in (RunKeys, SharedSections) for spec in fields(cls)}


def list_models(typed: RunSections) -> Iterator[ModelEntry]:
    """All models, the policy first."""
    yield ModelEntry(**vars(typed.policy), name=POLICY, key=POLICY)
    yield ModelEntry(**vars(typed.grm))
    for name, model in typed.models.items():
        yield ModelEntry(**vars(model), name=name, key=f"models.{name}")


def resolve_placement(typed: RunSections) -> PlacementConfig:
    """The placement, in which further models without a place have that of the first one, and their learners that of its
    learner.
    """
    roles = dict(typed.placement.roles)
    for name in typed.models:
        for own, first in ((name, GRM), (name + LEARNER, GRM + LEARNER)):
            if own not in roles and first in roles:
                roles[own] = roles[first]
    return replace(typed.placement, roles=roles)


def resolve_serving(placement: PlacementConfig, model: ModelEntry, engine: str) -> ModelEntry:
    """The model with the dtype for the device of its engines. engine: the kind for models without one of their own."""
    dtype = BY_DEVICE[placement.on_gpu(model.name)] if model.dtype == AUTO else model.dtype
    return replace(model, engine=model.engine or engine, dtype=dtype)


def resolve_training(placement: PlacementConfig, train: TrainConfig) -> TrainConfig:
    """The learner's settings, with those that its device chooses."""
    on_gpu, checkpointing = placement.on_gpu("learner"), train.activation_checkpointing
    if checkpointing is None:
        checkpointing = "full" if on_gpu or train.activation_offload else "none"
    dtype = BY_DEVICE[on_gpu] if train.dtype == AUTO else train.dtype
    return replace(train, dtype=dtype, activation_checkpointing=checkpointing)
