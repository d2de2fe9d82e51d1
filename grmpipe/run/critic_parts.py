"""The critic of a run, put together: its model found and checked, its ranks, how it hears of rollouts. Runs no loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from grmpipe.config.critic import critic_train
from grmpipe.config.roles import Model, device_of
from grmpipe.config.run_config import RunConfig
from grmpipe.pipeline.interfaces import Journal
from grmpipe.train.critic.critic import Critic
from grmpipe.train.critic.critic_group import CriticGroup
from grmpipe.train.critic.critic_learner import CriticLearner, CriticSpec
from grmpipe.train.critic.values import Valuer
from grmpipe.types import JudgeReport, Prompt, Rollout
from models.hub import find_files
from models.lm.packed_check import check_packable
from models.lm.scalar_head import outline_scalar_head
from models.renderer import Renderer
from models.tiny.resolve import resolve_model
from scheduler.events import EventSink
from scheduler.placement import Placement
from scheduler.processes.actors import Cluster

ROLE = "critic"


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticModel:
    """What its ranks load: it reads the policy's own tokens."""

    path: str
    tokenizer_path: str


def find_critic(config: RunConfig, policy: Model, progress: Callable[[str, float], None]) -> CriticModel:
    """Raises ValueError (`path: ...`) for what can have no scalar head, another tokenizer or a smaller window."""
    path = config.critic.path
    if path is None:
        check_packable(outline_scalar_head(policy.path), policy.path)
        return CriticModel(path=policy.path, tokenizer_path=policy.path)
    directory = find_files(resolve_model(path, progress), weights=True)
    check_packable(outline_scalar_head(directory), directory)
    renderer = Renderer.load(directory, config.policy.chat_template)
    if not renderer.means_the_same(policy.renderer):
        raise ValueError(
            f"path: {path} has another tokenizer than the policy ({config.policy.path}), and a critic reads the "
            "policy's own tokens; give a model of the same family, or critic.path=null"
        )
    if renderer.context_tokens < policy.context_tokens:
        raise ValueError(
            f"path: {path} reads {renderer.context_tokens} tokens, the policy writes up to {policy.context_tokens}; "
            "give a model with a window as large, or critic.path=null"
        )
    return CriticModel(path=directory, tokenizer_path=policy.path)


async def start_critic(
    cluster: Cluster, model: CriticModel | None, config: RunConfig, placement: Placement, events: EventSink
) -> Critic | None:
    """Its ranks; None where no advantage asks one."""
    if model is None:
        return None
    spec = CriticSpec(
        model_path=model.path,
        tokenizer_path=model.tokenizer_path,
        train=critic_train(config.critic, config.train),
        device=device_of(ROLE, placement),
        value_clip=config.critic.value_clip,
        updates_per_batch=config.critic.updates(config.algorithm, config.train),
    )
    ranks = await cluster.start_group(ROLE, functools.partial(CriticLearner, spec))
    group = CriticGroup(ranks, events)
    return Critic(group, config.critic, config.train, config.algorithm, config.rollout.max_new_tokens, config.seed)


class ValuedJournal:
    """A journal whose rollouts the critic hears of as well, until their group ends."""

    def __init__(self, journal: Journal, valuer: Valuer) -> None:
        self._journal = journal
        self._valuer = valuer

    def rollout(self, draw: int, prompt: Prompt, rollout: Rollout) -> None:
        self._journal.rollout(draw, prompt, rollout)
        self._valuer.add(rollout)

    def judged(self, rollout: Rollout, report: JudgeReport) -> None:
        self._journal.judged(rollout, report)

    def group_ended(
        self,
        group_id: str,
        draw: int,
        prompt_id: str,
        outcome: Literal["trained", "dropped"],
        step: int | None = None,
        cause: str | None = None,
        version: int | None = None,
        early: bool = False,
    ) -> None:
        self._journal.group_ended(group_id, draw, prompt_id, outcome, step, cause, version, early)
        self._valuer.forget(group_id)
