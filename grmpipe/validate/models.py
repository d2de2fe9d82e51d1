"""Finds the models of a run and their tokenizers. Loads no weights."""

from __future__ import annotations

from collections.abc import Callable

from grmpipe.config.roles import Model, ServedRole
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.data.catalogs import resolve_model
from grmpipe.validate.engines import context_limit_of
from grmpipe.validate.sections import section
from models.chat.renderer import Renderer
from models.hub import find_files, is_hub_name
from models.lm.packable_configs import is_known_to_pack
from models.model_files import read_json
from models.settings import ModelConfig

CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
Progress = Callable[[str, float], None]  # (what, share done)


def find_model(role: ServedRole, config: RunConfig, progress: Progress, *, weights: bool = True) -> Model:
    """Find a role's model: make a tiny one or fetch it from the hub if necessary. Checks its chat template.

    Raises ModelNotHere for a hub name that can't be fetched now; any other mistake is a ConfigError.
    """
    name, options = role.name, role.model
    with section(f"{role.key}."):
        directory = find_files(resolve_model(options.path, progress), weights=weights)
        check_generates(directory, options.path)
        renderer = Renderer.load(
            directory,
            options.chat_template,
            options.chat_template_kwargs,
            options.thinking_markers,
            options.tool_parser,
        )
    check_vocabulary(role.key, options, renderer)
    window = context_limit_of(role, renderer.context_tokens)
    # The machines of a joined cluster have their own caches: they load by the hub name.
    by_name = config.cluster.address is not None and is_hub_name(options.path)
    return Model(name=name, path=options.path if by_name else directory, renderer=renderer, context_tokens=window)


def check_generates(directory: str, path: str) -> None:
    """Raises ValueError (`path: ...`) for a classifier: without a head over tokens it writes noise."""
    names = read_json(directory, "config.json").get("architectures") or ()
    if names and all(str(name).endswith(CLASSIFIERS) for name in names):
        raise ValueError(
            f"path: {path!r} holds {names[0]}, a reward model that writes no text; give a language model, or, to score "
            "with this one, type judge=scalar"
        )


def check_learns(model: Model, key: str) -> None:
    """Check that the model can be trained on packed samples, by its config and outline; the learner also checks its
    weights.
    """
    if is_known_to_pack(model.path):
        return
    from models.lm.packed_check import check_trainable  # late: an outline takes torch and transformers' models, seconds

    with section(f"{key}."):
        check_trainable(model.path)


def check_vocabulary(key: str, options: ModelConfig, renderer: Renderer) -> None:
    """Check that the model has a row for every id of its tokenizer."""
    if renderer.num_token_ids > renderer.vocab_size:
        raise ConfigError(
            f"{key}.path: the tokenizer in {options.path} has ids up to {renderer.num_token_ids - 1}, the model "
            f"there has {renderer.vocab_size} rows (vocab_size in config.json): they don't match; give a "
            "directory with the model's own tokenizer"
        )
