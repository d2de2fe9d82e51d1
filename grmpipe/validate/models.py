"""Models that a run needs: found, with a tokenizer of theirs. Loads no weights."""

from __future__ import annotations

from collections.abc import Callable

from grmpipe.config.roles import Model, ServedRole
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.validate.engines import context_limit_of
from grmpipe.validate.sections import section
from models.hub import find_files, is_hub_name
from models.lm.packable_configs import is_known_to_pack
from models.renderer import Renderer
from models.settings import ModelConfig
from models.tiny.resolve import resolve_model

Progress = Callable[[str, float], None]  # (what, share done)


def find_model(role: ServedRole, config: RunConfig, progress: Progress, *, weights: bool = True) -> Model:
    """Make a tiny model or fetch one from the hub if need be; its tokenizer can chat.

    Raises NotHere for a hub name that can't be had now; any other mistake is a ConfigError.
    """
    name, options = role.name, role.model
    with section(f"{name}."):
        directory = find_files(resolve_model(options.path, progress), weights=weights)
        renderer = Renderer.load(directory, options.chat_template, options.chat_template_kwargs)
    check_vocabulary(name, options, renderer)
    window = context_limit_of(role, renderer.context_tokens)
    # The machines of a joined cluster have caches of their own: they go by the hub name.
    by_name = config.cluster.address is not None and is_hub_name(options.path)
    return Model(name=name, path=options.path if by_name else directory, renderer=renderer, context_tokens=window)


def check_learns(model: Model) -> None:
    """Can it be trained on packed samples? By its config and its outline; the learner asks its weights too."""
    if is_known_to_pack(model.path):
        return
    from models.lm.packed_check import check_trainable  # late: an outline takes torch and transformers' models, seconds

    with section(f"{model.name}."):
        check_trainable(model.path)


def check_vocabulary(name: str, options: ModelConfig, renderer: Renderer) -> None:
    """A tokenizer that gives ids which the model has no row for is another model's."""
    if renderer.num_token_ids > renderer.vocab_size:
        raise ConfigError(
            f"{name}.path: the tokenizer in {options.path} has ids up to {renderer.num_token_ids - 1}, the model "
            f"there has {renderer.vocab_size} rows (vocab_size in config.json): they don't match; give a "
            "directory with the model's own tokenizer"
        )
