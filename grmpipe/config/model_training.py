"""How a model of a run learns: the policy by `train` and `algorithm`, a GRM next to it by its own section. Its learner,
its flow and the plan ask here.
"""

import dataclasses
import math
from dataclasses import dataclass

from grmpipe.config.critic import policy_train
from grmpipe.config.grm import GrmTrainConfig
from grmpipe.config.run_config import RunConfig
from grmpipe.config.train import AlgorithmConfig, TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraining:
    """The settings of a learner.

    max_new_tokens: most of one of its samples.
    temperature:    of the sampler, by which the learner divides logits too.
    first_version:  of the weights at its first update.
    prefix:         begins the names of its folders in the run's directory.
    """

    train: TrainConfig
    algorithm: AlgorithmConfig
    max_new_tokens: int
    temperature: float
    first_version: int = 0
    prefix: str = ""


def find_training(config: RunConfig, model: str) -> ModelTraining:
    """The settings by which a model of the run learns; model: its role."""
    if (own := config.trained_grms.get(model)) is not None:
        judge = config.judging.find_training_judge(model)
        return ModelTraining(
            train=grm_train(config.train, own),
            # GRPO, as SPCT trains a GRM by rule.
            algorithm=AlgorithmConfig(kl_coefficient=own.kl_coefficient),
            max_new_tokens=judge.max_new_tokens,
            temperature=judge.temperature,
            prefix=f"{model}_",
        )
    return ModelTraining(
        train=policy_train(config.critic, config.train),
        algorithm=config.algorithm,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        # The critic alone learns in these steps: the policy's versions count on.
        first_version=config.critic.warmup_steps if config.critic.enabled else 0,
    )


def grm_train(train: TrainConfig, own: GrmTrainConfig) -> TrainConfig:
    """The policy's settings, with those of the GRM instead. It is synchronous: judging tasks are judged by the weights
    that learn from them.
    """
    return dataclasses.replace(
        train,
        num_steps=own.warmup_steps + math.ceil(own.grm_steps_per_policy_step * train.num_steps),
        groups_per_batch=own.prompts_per_batch,
        group_size=own.group_size,
        min_valid_siblings=2,
        max_staleness=0,
        lr=own.lr,
        parallel=own.parallel,
    )
