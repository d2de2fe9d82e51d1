"""Finds the models of a run: those that engines serve, reward models, the meta-RM and the critic."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from grmpipe.config.grm import ModelEntry
from grmpipe.config.io.key_errors import section
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.data.catalogs import resolve_model
from grmpipe.models.chat.renderer import Renderer, mean_the_same
from grmpipe.models.engines.engine_kind import AnyEngine
from grmpipe.models.hub import find_files, is_hub_name
from grmpipe.models.model_files import read_json
from grmpipe.models.settings import ModelConfig
from grmpipe.roles.roles import Model, ServedRole, make_option_key, resolve_engine
from grmpipe.scheduler.placement import ClusterConfig

TEACHERS = "algorithm.distill.teachers"
CRITIC, META_RM = "critic", "meta_rm"  # their roles
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")


def find_model(role: ServedRole, cluster: ClusterConfig, *, weights: bool = True) -> Model:
    """Find a role's model: make a tiny one or fetch it from the hub if necessary. Checks its chat template.

    Raises ModelNotHere for a hub name that can't be fetched now; any other mistake is a ConfigError.
    """
    name, options = role.name, role.model
    with section(f"{role.key}."):
        directory = find_files(resolve_model(options.path), weights=weights)
        check_generates(directory, options.path)
        renderer = Renderer.load(
            directory,
            options.chat_template,
            options.chat_template_kwargs,
            options.thinking_markers,
            options.tool_parser,
        )
        _ = renderer.thinking  # it renders a message, which a chat template may refuse
    check_vocabulary(role.key, options, renderer)
    window = role.resolve_context_limit(renderer.context_tokens)
    # The machines of a joined cluster have their own caches: they load by the hub name.
    by_name = cluster.is_joined and is_hub_name(options.path)
    return Model(name=name, path=options.path if by_name else directory, renderer=renderer, context_tokens=window)


def check_generates(directory: str, path: str) -> None:
    """Raises ValueError (`path: ...`) for a classifier: without a head over tokens it writes noise."""
    names = read_json(directory, "config.json").get("architectures") or ()
    if names and all(str(name).endswith(CLASSIFIERS) for name in names):
        raise ValueError(
            f"path: {path!r} holds {names[0]}, a reward model that writes no text; give a language model, or, to score "
            "with this one, type judge=scalar"
        )


def check_vocabulary(key: str, options: ModelConfig, renderer: Renderer) -> None:
    """Check that the model has a row for every id of its tokenizer."""
    if renderer.num_token_ids > renderer.vocab_size:
        raise ConfigError(
            f"{key}.path: the tokenizer in {options.path} has ids up to {renderer.num_token_ids - 1}, the model "
            f"there has {renderer.vocab_size} rows (vocab_size in config.json): they don't match; give a "
            "directory with the model's own tokenizer"
        )


def check_teacher(teacher: Model, role: ServedRole, policy: Model, policy_path: str, top_k: int) -> None:
    """Check that a teacher reads the policy's tokens, as many, and that its engines give as many likely ones as are
    compared. policy_path: as typed.
    """
    if not mean_the_same(teacher.renderer, policy.renderer):
        raise ConfigError(
            f"{role.key}.path: {role.model.path} has a different tokenizer than the policy ({policy_path}), "
            f"whose own tokens a teacher scores; give a model with the same tokenizer, or leave it out of {TEACHERS}"
        )
    if teacher.context_tokens < policy.context_tokens:
        raise ConfigError(
            f"{role.key}.path: {role.model.path} reads {teacher.context_tokens} tokens, and the policy's rollouts have "
            f"up to {policy.context_tokens}; give a teacher with at least that context window, or leave it out of "
            f"{TEACHERS}"
        )
    if top_k > (most := role.engine.most_likely_tokens):
        raise ConfigError(
            f"algorithm.distill.top_k: the engines of {teacher.name} give at most {most} likely tokens; type "
            f"algorithm.distill.top_k={most} or less, or (on vLLM) +{role.key}.engine_options.options.max_logprobs="
            f"{top_k}"
        )


def find_scalar_models(config: RunConfig) -> dict[str, Model]:
    """The reward models with one label that scalar judges ask, here or behind an endpoint, by role. Checks their chat
    templates. Raises ConfigError, which begins with the model's section.
    """
    found = {}
    for role in config.asked.scalar_roles:
        options, engine = config.models[role], resolve_engine(role, config)
        if engine.endpoint is not None:
            with section(f"{options.key}."):
                found[role] = find_remote_model(options, engine)
            with section(""):
                engine.check_installed(role, options, make_option_key(options, engine))
            continue
        with section(f"{options.key}."):
            directory = find_files(resolve_model(options.path), weights=True)
            check_one_label(directory)
            renderer = load_renderer(directory, options)
        check_vocabulary(options.key, options, renderer)
        # The machines of a joined cluster have their own caches: they load by the hub name.
        by_name = config.cluster.is_joined and is_hub_name(options.path)
        path = options.path if by_name else directory
        found[role] = Model(name=role, path=path, renderer=renderer, context_tokens=renderer.context_tokens)
    return found


def find_remote_teachers(teachers: Iterable[ServedRole]) -> dict[str, Model]:
    """Find the tokenizers of the teachers that endpoints serve. Raises ConfigError, which begins with a section."""
    found = {}
    for role in teachers:
        if role.engine.outside:
            with section(f"{role.key}."):
                found[role.name] = find_remote_model(role.model, role.engine)
    return found


def find_remote_model(options: ModelEntry, engine: AnyEngine) -> Model:
    """Find the tokenizer of a model that an endpoint serves, and that is sent token ids."""
    assert engine.endpoint is not None
    tokenizer = engine.endpoint.scorer_tokenizer(options)
    try:
        directory = find_files(resolve_model(tokenizer), weights=False)
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
    from grmpipe.models.lm.packed_check import unpackable  # late: seconds, which few runs need
    from grmpipe.models.lm.scalar_head import outline_scalar_head, scalar_config

    scalar_config(directory)
    if (why := unpackable(outline_scalar_head(directory))) is not None:
        raise ValueError(
            f"path: {directory!r} can't be scored here: {why}; serve it with vLLM or SGLang and type engine=openai for "
            "it, or give a reward model of Llama, Mistral, Qwen2 or Qwen3"
        )


def load_renderer(directory: str, options: ModelConfig) -> Renderer:
    return Renderer.load(directory, options.chat_template, options.chat_template_kwargs)


def find_meta_rm(path: str, grms: Sequence[tuple[Model, ModelEntry]]) -> Model:
    """Find the meta-RM of these GRMs, each with its section. Raises ValueError (`path: ...`) if it has no scalar head,
    or another tokenizer than one whose votes it weights.
    """
    directory = find_files(resolve_model(path), weights=True)
    from grmpipe.models.lm.packed_check import check_packable  # late: seconds, which few runs need
    from grmpipe.models.lm.scalar_head import outline_scalar_head, scalar_config

    scalar_config(directory)
    check_packable(outline_scalar_head(directory), directory)
    windows = [find_shared_limit(directory, *grm) for grm in grms]
    return Model(name=META_RM, path=directory, renderer=grms[0][0].renderer, context_tokens=min(windows))


def find_shared_limit(directory: str, grm: Model, entry: ModelEntry) -> int:
    """The context window of a model that reads what the GRM read and wrote. Raises ValueError for another tokenizer."""
    try:
        renderer = Renderer.load(directory, entry.chat_template)
    except ValueError as error:
        if not str(error).startswith("chat_template"):
            raise
        raise ValueError(
            f"path: the tokenizer in {directory} has no chat template; copy the GRM's tokenizer files there"
        ) from error
    if not mean_the_same(renderer, grm.renderer):
        raise ValueError(
            f"path: {directory} has a different tokenizer than {grm.name} ({entry.path}), "
            "and a meta-RM reads the GRM's own tokens; give one that was trained from this GRM or its base "
            "(+experiment=train_meta_rm)"
        )
    return renderer.context_tokens


def find_critic(path: str | None, policy: Model, entry: ModelEntry) -> Model:
    """Find the critic's model. Raises ValueError (`path: ...`) if it can't have a scalar head, has another tokenizer or
    a smaller window. path: null for the policy's; entry: the policy's section.
    """
    from grmpipe.models.lm.packed_check import check_packable  # late: seconds, which few runs need
    from grmpipe.models.lm.scalar_head import outline_scalar_head

    if path is None:
        check_packable(outline_scalar_head(policy.path), policy.path)
        return replace(policy, name=CRITIC)
    directory = find_files(resolve_model(path), weights=True)
    check_packable(outline_scalar_head(directory), directory)
    renderer = Renderer.load(directory, entry.chat_template)
    if not mean_the_same(renderer, policy.renderer):
        raise ValueError(
            f"path: {path} has a different tokenizer than the policy ({entry.path}), and a critic reads the "
            "policy's own tokens; give a model of the same family, or critic.path=null"
        )
    if renderer.context_tokens < policy.context_tokens:
        raise ValueError(
            f"path: {path} reads {renderer.context_tokens} tokens, the policy up to {policy.context_tokens}; "
            "give a model with at least that context window, or critic.path=null"
        )
    return replace(policy, name=CRITIC, path=directory)
