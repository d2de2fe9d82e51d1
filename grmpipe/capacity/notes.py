"""Notes on what is allowed but may not be meant: choices that are slow on a GPU, or suit only a tiny policy."""

from collections.abc import Mapping

from grmpipe.config.data import RolloutConfig
from grmpipe.config.run_config import RunConfig
from grmpipe.config.train import TrainConfig
from grmpipe.data.catalogs import is_made
from grmpipe.models.lm.footprint import Footprint
from grmpipe.roles.roles import Roles

LARGE = 1e9  # parameters from which the embedded engine, which has no CUDA graphs, slows a GPU down
HIGHEST_LR = 1e-5  # for all weights of a pretrained model; verl and TRL train with 1e-6
SHORT_ANSWER = RolloutConfig().max_new_tokens


def device_notes(train: TrainConfig, roles: Roles, footprints: Mapping[str, Footprint | None]) -> list[str]:
    """Notes on what is allowed on a GPU but may not be meant. footprints: role -> footprint, None if unknown."""
    notes = []
    on_gpus = [role for role in roles.values() if role.device == "cuda"]
    for role in (role for role in on_gpus if role.dtype_key and role.dtype == "float32"):
        notes.append(
            f"{role.dtype_key}: {role.name} computes in float32 on a GPU, without flash attention and without TF32: "
            f"slow, and with twice the memory; type {role.dtype_key}=bfloat16"
        )
    for role in (role for role in roles.hosts if role.device == "cuda" and role.engine.memory.grows_cache):
        footprint = footprints.get(role.name)
        if footprint is not None and footprint.num_parameters > LARGE:
            notes.append(
                f"{role.key}.engine: the {role.model.engine} engine serves {footprint.num_parameters / 1e9:.2g} B "
                "parameters on a GPU without graphs or paged memory, several times slower than vLLM; type "
                f"{role.key}.engine=vllm"
            )
    on_gpu = {role.name for role in on_gpus}
    if "learner" in on_gpu and not train.activations.recomputes and is_large(footprints.get("policy")):
        notes.append(
            "train.activation_checkpointing: without it the activations of all layers stay on the GPU; type "
            "train.activation_checkpointing=full"
        )
    return notes


def is_large(footprint: Footprint | None) -> bool:
    return footprint is not None and footprint.num_parameters > LARGE


def hyperparameter_notes(config: RunConfig) -> list[str]:
    """Notes on the policy's learning rate and answers, which the console and task=plan show."""
    path, lr = config.policy.path, config.train.lr
    if is_made(path):
        return []
    notes = []
    if config.policy.lora.rank == 0 and lr > HIGHEST_LR:
        notes.append(
            f"train.lr: {lr:g} for all weights of {path} is more than a pretrained model usually survives; "
            "type train.lr=1e-6"
        )
    if config.policy.lora.rank > 0 and lr < HIGHEST_LR:
        notes.append(f"train.lr: {lr:g} is low for adapters; type train.lr={HIGHEST_LR:g} or more")
    if config.task != "train_judge_rft" and config.rollout.max_new_tokens == SHORT_ANSWER:
        notes.append(
            f"rollout.max_new_tokens: {SHORT_ANSWER} tokens cut off most answers of {path}; "
            "type rollout.max_new_tokens=1024"
        )
    return notes
