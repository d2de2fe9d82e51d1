"""Starts the ranks of the critic. Runs no loop."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from grmpipe.config.critic import critic_train
from grmpipe.config.roles import ResolvedRole
from grmpipe.config.run_config import RunConfig
from grmpipe.train.critic.critic import Critic
from grmpipe.train.critic.critic_group import CriticGroup
from grmpipe.validate.critic_model import CriticModel
from scheduler.events import EventSink
from scheduler.processes.actors import Cluster

ROLE = "critic"


async def start_critic(
    cluster: Cluster, model: CriticModel | None, config: RunConfig, roles: Mapping[str, ResolvedRole], events: EventSink
) -> Critic | None:
    """Start the critic. None if no estimator needs one."""
    if model is None:
        return None
    from grmpipe.train.critic.critic_learner import CriticLearner, CriticSpec  # late: it imports torch

    spec = CriticSpec(
        model_path=model.path,
        tokenizer_path=model.tokenizer_path,
        train=critic_train(config.critic, config.train),
        device=roles[ROLE].device,
        value_clip=config.critic.value_clip,
        updates_per_batch=config.critic.updates(config.algorithm, config.train),
    )
    ranks = await cluster.start_group(ROLE, functools.partial(CriticLearner, spec))
    group = CriticGroup(ranks, events, config.critic.parallel.cp)
    return Critic(group, config.critic, config.train, config.algorithm, config.rollout.max_new_tokens, config.seed)
