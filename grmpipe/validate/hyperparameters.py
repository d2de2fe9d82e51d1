"""Notes on hyperparameters that suit a tiny policy, not the one that is trained. Refuses nothing."""

from __future__ import annotations

from grmpipe.config.data import RolloutConfig
from grmpipe.config.run_config import RunConfig
from grmpipe.data.catalogs import is_made

HIGHEST_LR = 1e-5  # of all weights of a pretrained model; verl and TRL train with 1e-6
SHORT_ANSWER = RolloutConfig().max_new_tokens


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
