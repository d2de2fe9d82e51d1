"""The model of a scalar judge: finds it here, or its tokenizer if an endpoint serves it. Loads no weights."""

from __future__ import annotations

from grmpipe.config.engine_kinds import engine_kind
from grmpipe.config.roles import Model
from grmpipe.config.run_config import RunConfig
from grmpipe.config.yaml_io import overlaid
from grmpipe.types import Prompt
from grmpipe.validate.context_limits import check_context_limit
from grmpipe.validate.data import Data
from grmpipe.validate.models import Progress, check_vocabulary
from grmpipe.validate.sections import section
from models.engines.engine_kind import AnyEngine
from models.hub import find_files, is_hub_name
from models.renderer import Renderer
from models.settings import EngineConfig, ModelConfig
from models.tiny.resolve import resolve_model
from models.types import Message

EMPTY_ANSWER = Message(role="assistant", content="")


def find_scalar_model(role: str, key: str, options: ModelConfig, config: RunConfig, progress: Progress) -> Model:
    """Find a reward model with one label that its scorers load here, and check its chat template.

    key: its section of the configuration. Raises ConfigError, which begins with that section.
    """
    with section(f"{key}."):
        directory = find_files(resolve_model(options.path, progress), weights=True)
        check_one_label(directory)
        renderer = load_renderer(directory, options)
        check_vocabulary(key, options, renderer)
    by_name = config.cluster.address is not None and is_hub_name(options.path)
    path = options.path if by_name else directory
    return Model(name=role, path=path, renderer=renderer, context_tokens=renderer.context_tokens)


def find_remote_scalar_model(role: str, key: str, options: ModelConfig, engine: AnyEngine, progress: Progress) -> Model:
    """Find the tokenizer of a reward model that an endpoint serves: the run renders and sends token ids."""
    tokenizer = engine.scorer_tokenizer(options)
    with section(f"{key}."):
        try:
            directory = find_files(resolve_model(tokenizer, progress), weights=False)
        except ValueError as error:
            raise ValueError(
                f"engine_options.tokenizer: {tokenizer!r} has no tokenizer here ({error}); type "
                f"+{key}.engine_options.tokenizer=<its Hugging Face directory or hub name>"
            ) from error
        renderer = load_renderer(directory, options)
    window = engine.options.max_context_tokens or renderer.context_tokens
    return Model(name=role, path=options.path, renderer=renderer, context_tokens=window)


def check_one_label(directory: str) -> None:
    """Raises ValueError (`path: ...`) for a model without a head of one number, or one that can't be packed."""
    from models.lm.packed_check import unpackable  # late: seconds, which few runs need
    from models.lm.scalar_head import outline_scalar_head, scalar_config

    scalar_config(directory)
    if (why := unpackable(outline_scalar_head(directory))) is not None:
        raise ValueError(
            f"path: {directory!r} can't be scored here: {why}; serve it with vLLM or SGLang and type engine=openai for "
            "it, or give a reward model of Llama, Mistral, Qwen2 or Qwen3"
        )


def load_renderer(directory: str, options: ModelConfig) -> Renderer:
    return Renderer.load(directory, options.chat_template, options.chat_template_kwargs)


def scalar_engine(options: ModelConfig, key: str, engines: EngineConfig) -> AnyEngine:
    """The engine kind of a scalar judge's model, with its options."""
    kind = engine_kind(options.engine, f"{key}.engine")
    return kind(overlaid(kind.shared_options(engines), options.engine_options, f"{key}.engine_options."))


def check_scalar_judge(config: RunConfig, key: str, model: Model, data: Data) -> None:
    """Check that the reward model's chat template accepts the prompts, and its window at least one of them with a full
    answer.
    """

    def length(prompt: Prompt) -> int:
        return len(model.renderer.render_whole((*prompt.messages, EMPTY_ANSWER)))

    kinds = {tuple(message.role for message in prompt.messages): prompt for prompt in (*data.held_out, *data.train)}
    with section(f"{key}."):
        for prompt in kinds.values():
            length(prompt)
    check_context_limit(
        name=model.name,
        context_tokens=model.context_tokens,
        key="rollout.max_new_tokens",
        new_tokens=config.rollout.max_new_tokens,
        lengths=((prompt, length(prompt)) for prompt in data.train),
        what="prompt in a conversation",
    )
