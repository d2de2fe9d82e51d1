"""Errors of keys that a user typed: what is wrong, and what to type instead. Reads Hydra's messages, imports no
Hydra.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import io
import re
import shlex
import textwrap
import tokenize
import typing
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from grmpipe.config.keys.entry_names import FIRST, ROLES, first_apart
from grmpipe.config.keys.secrets import may_be_secret
from grmpipe.config.run_config import ConfigError
from grmpipe.config.run_sections import RunSections
from grmpipe.models.hub import NotHere

NOISE = ("Error merging override", "Could not override", "full_key:", "reference_type=", "object_type=", "provider=")
# Sections of earlier versions -> those that have their values; a name behind one stays where {} is.
MOVED = {"grms": "models", "cotrain": "grm.train", "cotrains": "models.{}.train"}
# Keys of earlier versions that nothing has taken the place of -> what to do instead.
REMOVED = {"judge.examples": "write examples into a template of your own and type judge.template=<its path>"}
# What verl, TRL, slime, AReaL and prime-rl call a key: its name, with as much of its sections as tells it from others.
ELSEWHERE = {
    theirs: ours
    for ours, names in {
        "train.group_size": "n num_generations n_samples_per_prompt rollouts_per_example gconfig.n_samples",
        "train.groups_per_batch": (
            "train_batch_size rollout_batch_size train_dataset.batch_size orchestrator.batch_size "
            "per_device_train_batch_size"
        ),
        "train.num_steps": "total_training_steps max_steps num_rollout",
        "data.max_epochs": "total_epochs num_train_epochs num_epoch",
        "train.lr": "learning_rate optim.lr",
        "train.checkpoint_every": "save_freq save_steps ckpt.interval save_interval",
        "train.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
        "train.compile": "torch_compile use_torch_compile",
        "train.micro_batch_tokens": (
            "gradient_accumulation_steps ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu max_tokens_per_gpu"
        ),
        "train.dtype": "bf16",
        "tracking.trackers": "logger report_to use_wandb",
        "evaluate.every": "test_freq eval_steps eval_interval eval_strategy eval.interval",
        "train.max_staleness": "max_head_offpolicyness max_async_level max_off_policy_steps staleness_threshold",
        "rollout.max_new_tokens": (
            "max_response_length max_completion_length rollout_max_response_len rollout.max_tokens "
            "gconfig.max_new_tokens sampling.max_tokens"
        ),
        "judge.max_new_tokens": "judge.max_tokens",
        "budget.max_cost": "max_budget cost_limit",
        "budget.max_tokens": "token_limit",
        "grm.price.input": "input_cost_per_token",
        "grm.price.output": "output_cost_per_token",
        "grm.price.cached": "cache_read_input_token_cost",
        "data.path": "train_files prompt_data train_dataset.path dataset_name",
        "data.eval_path": "val_files eval_prompt_data eval_dataset",
        "policy.path": "model_name_or_path model.path model.name actor.path hf_checkpoint",
        "algorithm.estimator": "adv_estimator advantage_estimator",
        "algorithm.kl_coefficient": "kl_loss_coef beta kl_coef kl_ctl use_kl_loss",
        "algorithm.updates_per_batch": (
            "ppo_mini_batch_size steps_per_generation num_steps_per_rollout global_batch_size"
        ),
        "judge.function": "reward_funcs custom_reward_function.path custom_reward_function.name custom_rm_path",
        "judge.kind": "rm_type",
        "reward.mix": "reward_weights",
        "grm.path": "reward_model.model.path",
        "policy.lora.rank": "lora_rank lora_r",
        "policy.lora.alpha": "lora_alpha",
        "train.max_grad_norm": "grad_clip clip_grad",
        "train.schedule": "lr_scheduler_type lr_decay_style",
        "train.warmup_steps": "warmup_ratio",
        "train.parallel.cp": "ulysses_sequence_parallel_size context_parallel_size",
        "rollout.truncated": "mask_truncated_completions",
        "engine.kind": "rollout.name use_vllm vllm_mode",
        "engine.vllm.max_context_tokens": "max_model_len max_prompt_length seq_len",
        "algorithm.kl_estimator": "kl_loss_type",
        "algorithm.entropy_coefficient": "entropy_coeff entropy_coef",
        "algorithm.clip_low": "clip_ratio clip_ratio_low eps_clip epsilon",
        "algorithm.clip_high": "clip_ratio_high eps_clip_high epsilon_high",
        "algorithm.dual_clip.ratio": "clip_ratio_c delta",
        "algorithm.aggregation": "loss_agg_mode",
        "algorithm.std": "norm_adv_by_std_in_grpo scale_rewards",
        "algorithm.dynamic_sampling_batches": (
            "filter_groups.enable over_sampling_batch_size oversampling_factor dynamic_sampling_filter_path"
        ),
        "algorithm.gae_lambda": "lam",
        "algorithm.replay_buffer.groups": "ppo_epochs num_iterations",
        "placement.pools": "n_gpus_per_node nnodes num_nodes",
        "tracking.wandb.project": "project_name wandb_project wandb.project",
        "run_dir": "default_local_dir output_dir save",
        "resume": "resume_mode load resume_step",
        "rollout.temperature": "actor_rollout_ref.rollout.temperature sampling.temperature",
        "rollout.max_turns": "max_assistant_turns max_tool_calling_iterations",
        "rollout.max_concurrency": "max_concurrent_rollouts max_inflight_rollouts max_inflight_episodes",
        "engine.vllm.options": "enforce_eager",
        "engine.vllm.max_batch_rows": "max_num_seqs",
        "engine.vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
        "engine.sglang.mem_fraction": "sglang_mem_fraction_static mem_fraction_static",
        "train.parallel.ep": "expert_model_parallel_size",
        "train.optimizer.betas": "adam_beta1 adam_beta2",
        "train.optimizer.offload": "optimizer_offload",
        "algorithm.loss": "loss_type importance_sampling_level policy_loss.loss_mode",
        "algorithm.correction": "vllm_importance_sampling_correction rollout_is use_tis",
        "algorithm.tis.cap": "tis_clip rollout_is_threshold tis_imp_ratio_cap vllm_importance_sampling_cap",
        "algorithm.sapo.temperature_neg": "sapo_temperature_neg",
        "algorithm.sapo.temperature_pos": "sapo_temperature_pos",
        "evaluate.num_samples": "n_samples_per_eval_prompt",
        "data.columns": "input_key label_key prompt_key",
        "data.shuffle": "rollout_shuffle shuffle_dataset",
        "env.kind": "env.id env.name",
        "env.target": "custom_generate_function_path",
        "env.functions": "tool_config_path tools",
        "placement.roles": (
            "colocate actor_num_gpus_per_node rollout_num_gpus rollout_num_gpus_per_engine tensor_model_parallel_size "
            "vllm_tensor_parallel_size inference.parallel.tp"
        ),
        "tracking.table_every": "log_completions log_val_generations num_completions_to_print",
        "tracking.wandb.run_name": "wandb_group wandb.name",
        "policy.lora.target_modules": "lora_target_modules target_modules",
        "policy.chat_template_kwargs": "apply_chat_template_kwargs",
        "sync.transport": "update_weight_transport weight_broadcast.type",
        "sync.delta": "update_weight_mode",
    }.items()
    for theirs in names.split()
}
OWN = ("path", "file")  # choices of a group that take a file of the user's own


def explain(error: Exception) -> str:
    """One readable message for an error that Hydra or OmegaConf found while composing."""
    typed = getattr(error, "override", None)  # what Hydra can't parse: its text doesn't always name it
    if isinstance(typed, str):
        return explain_unparsed(typed, str(error).splitlines()[0])
    text = f"{error}\n{error.__cause__ or ''}"
    return next(filter(None, (reading(text) for reading in READINGS)))


def under_key(path: str, text: str) -> str:
    """An error of a section with its key in front. What it says to type names the section's own keys: a further judge
    is checked by the same code as the first one.

    path: the section's, with a dot at its end, as in `judges.safety.`; empty for none.
    """
    section, _, rest = path.partition(".")
    if rest and (first := FIRST.get(section)):
        entry = f"{section}.{rest.partition('.')[0]}"
        text = re.sub(rf"\b{first}\.(?=[a-z])", f"{entry}.", text)
        text = re.sub(rf"\b{first}=(?=[a-z])", f"{first}@{entry}=", text)
    return text if text.startswith(path) else f"{path}{text}"


@contextmanager
def section(path: str) -> Iterator[None]:
    """Context: a ValueError raised inside gets the section's key in front, unless it already names its section."""
    try:
        yield
    except ConfigError:
        raise
    except NotHere as error:
        raise ModelNotHere(f"{path}{error}") from error
    except ValueError as error:
        raise ConfigError(under_key(path, str(error))) from error


class ModelNotHere(ConfigError):
    """A hub name that can't be fetched now. task=plan continues without the model."""


# -- keys ----------------------------------------------------------------------------------------------------------


def list_keys(beside: str = "") -> list[str]:
    """Every key with a fixed name, including sections; of sections with members of any name, those of `beside`."""
    return [key for key, _ in _keys_beside(beside)]


def unknown_key(key: str, known: Sequence[str]) -> str:
    """The message for a key that doesn't exist: with the nearest ones, or all of its section, or where to find all."""
    if new := explain_moved_key(key):
        return f"unknown key {key!r}; type {new}"
    if instead := next((words for old, words in REMOVED.items() if f"{key}.".startswith(f"{old}.")), ""):
        return f"unknown key {key!r}: it was removed; {instead}"
    if near := nearest(key, known):
        return f"unknown key {key!r}; did you mean {' or '.join(near)}?"
    section = key.rpartition(".")[0]
    beside = [name_leaf(other) for other in known if section and other.rpartition(".")[0] == section]
    return f"unknown key {key!r}; " + (f"{section} has {', '.join(beside)}" if beside else "see docs/configuration.md")


def explain_moved_key(key: str) -> str:
    """What to type instead of a key of an earlier version, also behind the @ of a choice; empty for other keys."""
    group, at, path = key.rpartition("@")
    for old, new in MOVED.items():
        if f"{path}.".startswith(f"{old}."):
            rest = path[len(old) + 1 :]
            if "{}" in new:
                name, _, rest = rest.partition(".")
                new = new.format(name or "<name>")
            return f"{group}{at}{new}.{rest}".rstrip(".")
    return ""


@functools.cache
def _in_blocks() -> dict[str, str]:
    """The keys of blocks as other frameworks spell them: algorithm.tis_cap -> algorithm.tis.cap."""
    split = ((key, key.rsplit(".", 1)) for key in list_keys() if key.count(".") == 2)
    return {f"{block}_{leaf}": key for key, (block, leaf) in split}


def nearest(key: str, known: Sequence[str]) -> list[str]:
    """Known keys that may be meant, the likeliest first."""
    if in_block := _in_blocks().get(key):
        return [in_block]
    section, _, leaf = key.rpartition(".")
    by_likeness = sorted(known, key=lambda other: -difflib.SequenceMatcher(None, key, other).ratio())
    parts = key.split(".")
    foreign = next(filter(None, (ELSEWHERE.get(".".join(parts[first:])) for first in range(len(parts)))), None)
    if foreign is not None and len(parts) > 1 and foreign != ELSEWHERE.get(leaf):  # its section says what is meant
        return [foreign]
    # The right leaf in the wrong section is the most common mistake.
    same_leaf = [other for other in by_likeness if name_leaf(other) == leaf]
    if meant := [*filter(None, [foreign]), *same_leaf]:
        return meant[:3]
    beside = [name_leaf(other) for other in known if other.rpartition(".")[0] == section]
    close = [name for name in difflib.get_close_matches(leaf, beside, n=2, cutoff=0.6) if shares_words(leaf, name)]
    if close or (close := find_keys_by_words(leaf, section, beside)[:2]):
        return [f"{section}.{name}" if section else name for name in close]
    return difflib.get_close_matches(key, known, n=2, cutoff=0.8)


def shares_words(typed: str, known: str) -> bool:
    """Whether at least half of the words of a typed key are, up to a slip, words of a known one; or it is a slip as a
    whole. Letters alone make drop_zero_advantage like negative_advantage_w.
    """
    words, others = typed.split("_"), known.split("_")
    shared = sum(bool(difflib.get_close_matches(word, others, n=1, cutoff=0.7)) for word in words)
    return 2 * shared >= len(words) or difflib.SequenceMatcher(None, typed, known).ratio() >= 0.8


def find_keys_by_words(typed: str, section: str, beside: Sequence[str]) -> list[str]:
    """The keys of a section whose sentence has all words of a typed key of several words: another framework's name of
    what it does.
    """
    words = [word for word in typed.lower().split("_") if len(word) > 2]
    if len(words) < 2:
        return []
    meanings = dict(_meanings(f"{section}." if section else ""))
    return [name for name in beside if all(word in f"{name} {meanings.get(name, '')}".lower() for word in words)]


def is_misspelt(name: str, known: Sequence[str]) -> bool:
    """Whether a name that may be the user's own is probably meant to be a known one."""
    return name not in known and bool(difflib.get_close_matches(name, known, n=1))


def name_leaf(key: str) -> str:
    return key.rpartition(".")[2]


# -- Hydra's messages
# ----------------------------------------------------------------------------------------------------


def no_such_choice(text: str) -> str:
    """The message for a file that a group of conf/ doesn't have."""
    found = re.search(r"Could not (?:find|load) '([^']+)'", text)
    if not found:
        return ""
    available = re.search(r"Available options in '([^']+)':\n((?:\t[^\n]*\n?)*)", text)
    group = available[1] if available else found[1].rpartition("/")[0]
    name, options = found[1].removeprefix(f"{group}/"), available[2].split() if available else []
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.7)
    message = f"{group}: there is no {name!r}" + (f"; did you mean {near[0]}?" if near else "")
    if options:
        message += f"{' There' if near else '; there'} are {', '.join(options)}"
    if group == "experiment" and not near:
        message += f"; to name the run type experiment_name={name}"
    own = [option for option in OWN if option in options]
    return message + (f"; for your own type {group}={own[0]} {group}.path={name}" if own and not near else "")


def no_such_default(text: str) -> str:
    """The message for a group that conf/config.yaml chooses nothing of, typed without +."""
    found = re.search(r"To append to your default list use \+([^=\s]+)=(\S+)", text)
    if not found:
        return ""
    if explain_moved_key(found[1]):
        return unknown_key(found[1], ())
    message = f"{found[1]}: nothing of it is chosen; to choose {found[2]} type +{found[1]}={found[2]}"
    return f"{message}, to name the run experiment_name={found[2]}" if found[1] == "experiment" else message


def explain_double_choice(text: str) -> str:
    found = re.search(r"Multiple values for (\S+)\. To override a value use 'override \S+: ([^']+)'", text)
    return f"{found[1]}: is already chosen; to choose another type {found[1]}={found[2]}, without +" if found else ""


def explain_unparsed(typed: str, said: str) -> str:
    """The message for an argument that Hydra's grammar can't read, and how to quote it. said: by Hydra."""
    key, equals, value = typed.partition("=")
    if not equals or not re.fullmatch(r"[+~]{0,2}[\w./@:$-]+", key):
        return f"{typed}: is not of the form key=value, as +experiment=quickstart is"
    if value.lstrip()[:1] in ("[", "{"):
        return f"{key}: {value} can't be read ({said}); a text with = # ( ) or spaces in it needs quotes of its own"
    text = re.sub(r'(\\*)"', r'\1\1\\"', value)  # a backslash is one, but before a quote
    text = re.sub(r"(\\+)$", r"\1\1", text)
    shown, text = ("its value", "...") if may_be_secret(key) else (value, text)
    quoted = shlex.quote(f'{key}="{text}"')
    return (
        f"{key}: {shown} holds characters that Hydra reads as its own; quote it, within quotes for the shell: {quoted}"
    )


def no_such_member(text: str) -> str:
    """The message for a member that a section of named ones lacks: OmegaConf adds it only together with the section."""
    missing = "is not in struct" in text or re.search(r"Error merging override \+.* is not a subclass of", text, re.S)
    typed = re.search(r"(?:To append to your config use|Error merging override) \+{1,2}([^=\s]+)=(.*)", text)
    if not missing or not typed:
        return ""
    key, value = typed.groups()
    for section in (section for section, hint in _keys(RunSections) if find_member_class(hint)):
        if key == section:
            return f"{section}: has no such entry; to add one type {_choice_of_member(section, *_only(value))}"
        if key.startswith(f"{section}."):
            names = key.removeprefix(f"{section}.").split(".")
            lacking = re.search(r"is not in struct\s+full_key: (\S+)", text)
            if lacking and lacking[1] != f"{section}.{names[0]}":  # the member is there, and lacks a key
                return ""
            if section == "placement.roles" and is_misspelt(names[0], ROLES):
                return unknown_key(f"{section}.{names[0]}", [f"{section}.{role}" for role in ROLES])
            if FIRST.get(section) == names[0]:
                return first_apart(section, ".".join(names), value)
            for name in reversed(names[1:]):
                value = f"{{{name}: {value}}}"
            return f"{section}.{names[0]}: {section} has no {names[0]}; to add one type " + _choice_of_member(
                section, names[0], value
            )
    return ""


def _only(value: str) -> tuple[str, str]:
    """The name and the value of a typed mapping with one entry."""
    name, _, inner = value.removeprefix("{").removesuffix("}").partition(":")
    return name.strip(), inner.strip()


def _choice_of_member(section: str, name: str, value: str) -> str:
    """What adds a member: the choice of one of its group's files if the value is a word, else its keys."""
    if section in FIRST and re.fullmatch(r"\w+", value):
        return f"+{FIRST[section]}@{section}.{name}={value}"
    return f"'+{section}={{{name}: {value}}}'"


def no_choice(arguments: Sequence[str]) -> str:
    """The message for a group of conf/ that is set to null, which chooses none of its files; empty for other errors."""
    key = next((typed.removesuffix("=null") for typed in arguments if typed.endswith("=null") and "." not in typed), "")
    return f"{key}: null chooses no file of conf/{key}; leave it out, or type one of them" if key else ""


def not_there_yet(text: str) -> str:
    """The message for a key of a section whose keys the user names."""
    found = re.search(r"Could not override '([^']+)'", text)
    for section, hint in _keys_beside(found[1]) if found else ():
        own_keys = typing.get_origin(hint) is dict and not find_member_class(hint)
        if found and own_keys and f"{found[1]}.".startswith(f"{section}."):
            return f"{found[1]}: {section} doesn't have it; to add it type +{found[1]}=..."
    return ""


def no_single_value(text: str) -> str:
    """The message for a value given to a section of keys."""
    found = re.search(r"Error merging override ([^=+\s]+)=.*is not a subclass of \w+\. value: (\S+)", text, re.S)
    inner = [key for key in list_keys(f"{found[1]}.") if key.rpartition(".")[0] == found[1]] if found else []
    if not found or not inner:
        return ""
    return f"{found[1]}: is a section with keys ({', '.join(map(name_leaf, inner))}); type {inner[0]}={found[2]}"


def no_such_key(text: str) -> str:
    found = re.search(r"Could not override '([^']+)'", text) or re.search(r"full_key: (\S+)", text)
    if not found or not ("not in" in text or "Key '" in text):
        return ""
    return unknown_key(found[1], list_keys(found[1]))


def as_it_is(text: str) -> str:
    """Hydra's message with the key in front, without the parts for Hydra's developers."""
    found = re.search(r"Could not override '([^']+)'", text) or re.search(r"full_key: (\S+)", text)
    said = [line.strip() for line in text.splitlines() if line.strip()]
    useful = list(dict.fromkeys(line for line in said if not line.startswith(NOISE)))
    return f"{found[1]}: {useful[0]}" if found and useful else " ".join(useful or said)


READINGS = (
    no_such_choice, no_such_default, explain_double_choice, no_such_member, not_there_yet, no_single_value,
    no_such_key, as_it_is,
)  # fmt: skip


def find_member_class(hint: object) -> type | None:
    """The class of the members, for a section whose members have any names; None for other sections."""
    inner = typing.get_args(hint)[1] if typing.get_origin(hint) is dict else None
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def _keys_beside(beside: str) -> Iterator[tuple[str, object]]:
    """Every key with a fixed name and its type; of sections with members of any name, those of `beside`."""
    for key, hint in _keys(RunSections):
        yield key, hint
        if (member := find_member_class(hint)) and beside.startswith(f"{key}."):
            name = beside.removeprefix(f"{key}.").split(".")[0]
            yield from _keys(member, f"{key}.{name}.")


def _meanings(path: str) -> Iterator[tuple[str, str]]:
    """The keys of a section with a fixed name, and the sentence of each."""
    cls: object = RunSections
    for name in filter(None, path.split(".")):
        cls = typing.get_type_hints(cls).get(name) if isinstance(cls, type) else None
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        yield from read_comments(cls).items()


def _keys(cls: type, path: str = "") -> Iterator[tuple[str, object]]:
    hints = typing.get_type_hints(cls)
    for spec in dataclasses.fields(cls):
        hint, key = hints[spec.name], f"{path}{spec.name}"
        yield key, hint
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _keys(hint, f"{key}.")


# -- the comments of a dataclass's fields: what the keys of a configuration mean ---------------------------------------


def read_comments(cls: type) -> dict[str, str]:
    """Field -> its comment, without the #. Raises ValueError for a field with one in both places."""
    inherited = {
        name: text
        for base in cls.__bases__
        if dataclasses.is_dataclass(base)
        for name, text in read_comments(base).items()
    }
    return inherited | read_own_comments(cls)


def read_own_comments(cls: type) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(cls))
    beside, alone = comment_lines(source)
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for field in definition.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            behind = [beside[line] for line in find_lines(field) if line in beside]
            above = [alone[line] for line in block_above(field.lineno, alone)]
            if behind and above:
                raise ValueError(f"{cls.__name__}.{field.target.id}: has a comment behind it and one above; keep one")
            found[field.target.id] = " ".join(behind or above)
    return found


def comment_lines(source: str) -> tuple[dict[int, str], dict[int, str]]:
    """Line -> comment: those after code, and those alone in their line."""
    beside: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            where = alone if token.line.lstrip().startswith("#") else beside
            where[token.start[0]] = token.string.removeprefix("#").strip()
    return beside, alone


def find_lines(field: ast.AnnAssign) -> range:
    return range(field.lineno, (field.end_lineno or field.lineno) + 1)


def block_above(line: int, alone: Collection[int]) -> range:
    """The lines of comment that end right above a line."""
    first = line
    while first - 1 in alone:
        first -= 1
    return range(first, line)
