"""The model of a critic: finds it, and checks it against the policy. Loads nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from grmpipe.config.roles import Model
from grmpipe.config.run_config import RunConfig
from grmpipe.data.catalogs import resolve_model
from models.chat.renderer import Renderer
from models.hub import find_files


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticModel:
    """The model that the critic's ranks load. It reads the policy's tokens."""

    path: str
    tokenizer_path: str


def find_critic(config: RunConfig, policy: Model, progress: Callable[[str, float], None]) -> CriticModel:
    """Find the critic's model. Raises ValueError (`path: ...`) if it can't have a scalar head, has another tokenizer or
    a smaller window.
    """
    from models.lm.packed_check import check_packable  # late: seconds, which few runs need
    from models.lm.scalar_head import outline_scalar_head

    path = config.critic.path
    if path is None:
        check_packable(outline_scalar_head(policy.path), policy.path)
        return CriticModel(path=policy.path, tokenizer_path=policy.path)
    directory = find_files(resolve_model(path, progress), weights=True)
    check_packable(outline_scalar_head(directory), directory)
    renderer = Renderer.load(directory, config.policy.chat_template)
    if not renderer.means_the_same(policy.renderer):
        raise ValueError(
            f"path: {path} has a different tokenizer than the policy ({config.policy.path}), and a critic reads the "
            "policy's own tokens; give a model of the same family, or critic.path=null"
        )
    if renderer.context_tokens < policy.context_tokens:
        raise ValueError(
            f"path: {path} reads {renderer.context_tokens} tokens, the policy up to {policy.context_tokens}; "
            "give a model with at least that context window, or critic.path=null"
        )
    return CriticModel(path=directory, tokenizer_path=policy.path)
