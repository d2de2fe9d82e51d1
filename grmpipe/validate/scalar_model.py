"""The models of scalar judges: finds those with scorers here, and the tokenizers of the others. Loads no weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from grmpipe.config.grm import ModelEntry
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.roles import Model, option_key_of, resolve_engine
from grmpipe.config.run_config import RunConfig
from grmpipe.data.catalogs import resolve_model
from grmpipe.types import Prompt
from grmpipe.validate.context_limits import check_context_limit, longest_response
from grmpipe.validate.data import Data
from grmpipe.validate.models import Progress, check_vocabulary
from grmpipe.validate.sections import section
from models.chat.renderer import Renderer
from models.engines.engine_kind import AnyEngine
from models.hub import find_files, is_hub_name
from models.settings import ModelConfig
from models.types import Message

EMPTY_ANSWER = Message(role="assistant", content="")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundScalarModel:
    """A reward model of scalar judges, found and checked. An engine with an endpoint serves it elsewhere."""

    model: Model
    engine: AnyEngine


def find_scalar_models(config: RunConfig, progress: Progress) -> tuple[FoundScalarModel, ...]:
    """Find the reward models that scalar judges ask. Raises ConfigError, which begins with the model's section."""
    found = []
    for role in config.judging.scalar_roles:
        options, engine = config.models[role], resolve_engine(role, config)
        with section(f"{options.key}."):
            if engine.endpoint is None:
                model = find_scalar_model(role, config, progress)
            else:
                model = find_remote_scalar_model(options, engine, progress)
        if engine.endpoint is None:
            check_vocabulary(options.key, options, model.renderer)
        else:
            with section(""):
                engine.check_installed(role, options, option_key_of(options, engine))
        found.append(FoundScalarModel(model=model, engine=engine))
    return tuple(found)


def find_scalar_model(role: str, config: RunConfig, progress: Progress) -> Model:
    """Find a reward model with one label that scorers load here, and check its chat template.

    Raises ValueError (`path: ...`, `chat_template: ...`).
    """
    options = config.models[role]
    directory = find_files(resolve_model(options.path, progress), weights=True)
    check_one_label(directory)
    renderer = load_renderer(directory, options)
    # The machines of a joined cluster have their own caches: they load by the hub name.
    by_name = config.cluster.address is not None and is_hub_name(options.path)
    path = options.path if by_name else directory
    return Model(name=role, path=path, renderer=renderer, context_tokens=renderer.context_tokens)


def find_remote_scalar_model(options: ModelEntry, engine: AnyEngine, progress: Progress) -> Model:
    """Find the tokenizer of a reward model that an endpoint serves: the run renders and sends token ids."""
    assert engine.endpoint is not None
    tokenizer = engine.endpoint.scorer_tokenizer(options)
    try:
        directory = find_files(resolve_model(tokenizer, progress), weights=False)
    except ValueError as error:
        raise ValueError(
            f"engine_options.tokenizer: no tokenizer of {tokenizer!r} is here ({error}); type "
            f"+{options.key}.engine_options.tokenizer=<its Hugging Face directory or hub name>"
        ) from error
    renderer = load_renderer(directory, options)
    window = engine.options.max_context_tokens or renderer.context_tokens
    return Model(name=options.name, path=options.path, renderer=renderer, context_tokens=window)


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


def check_scalar_judges(config: RunConfig, found: Collection[FoundScalarModel], policy: Model, data: Data) -> None:
    """Check that each reward model can read the prompts with a full answer or episode."""
    models = {one.model.name: one.model for one in found}
    response_tokens = longest_response(config, policy.context_tokens)
    for judge in config.judging.scalar.values():
        check_scalar_judge(config, judge, models[judge.model], data, response_tokens)


def check_scalar_judge(config: RunConfig, judge: JudgeConfig, model: Model, data: Data, response_tokens: int) -> None:
    """Check that a reward model's chat template accepts the prompts, and its window at least one of them with a full
    answer, or with an episode and what its environment showed.
    """

    def length(prompt: Prompt) -> int:
        return len(model.renderer.render_whole((*prompt.messages, EMPTY_ANSWER)))

    kinds = {tuple(message.role for message in prompt.messages): prompt for prompt in (*data.held_out, *data.train)}
    with section(f"{config.models[model.name].key}."):
        for prompt in kinds.values():
            length(prompt)
    cut = ""
    if not config.env.env_kind.is_single:
        cut = (
            "type a smaller rollout.max_turns, rollout.max_new_tokens or env.max_observation_chars, or give a reward "
            "model with a larger window"
        )
    check_context_limit(
        name=model.name,
        context_tokens=model.context_tokens,
        key="rollout.max_new_tokens",
        new_tokens=response_tokens,
        lengths=((prompt, length(prompt)) for prompt in data.train),
        what=f"prompt that {judge.key} reads",
        cut=cut,
    )
