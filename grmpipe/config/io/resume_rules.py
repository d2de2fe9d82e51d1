"""What may differ between a run and its resumption. Pure."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from grmpipe.config.io.resolve_config import fill_sections
from grmpipe.config.keys.entry_names import FIRST
from grmpipe.config.keys.secrets import SEALED, is_secret_key, seal, without_secrets
from grmpipe.config.run_config import RunConfig

# A key may change if it changes neither the tokens of a sample, nor its verdict, nor what the algorithm makes of both:
# the length and learning rate of the run, its limits of time, what it measures, and where the work runs.
FREE_ON_RESUME = (
    "resume", "run_dir", "objective", "tracking", "cluster", "placement", "sync", "slots", "plan",
    "simulate", "evaluate", "calibrate", "probe", "judge_monitor", "journals", "new.dir", "serve",
    "budget", "policy.price", "grm.price",
    # The sampler may change: every token carries its log-prob and version.
    "engine", "policy.engine", "policy.engine_options", "policy.lora.sync", "grm.engine", "grm.engine_options",
    "grm.lora.sync",
    # The learning rate is a function of the completed share of the run.
    "train.num_steps", "train.lr", "train.warmup_steps", "train.schedule", "train.max_grad_norm",
    "critic.lr", "critic.lr_warmup_steps", "grm.train.lr",
    # The split and saving of a batch: the gradients are the same.
    "train.micro_batch_tokens", "train.prefix_sharing", "train.activation_checkpointing", "train.compile",
    "train.activation_offload", "train.optimizer.offload", "train.checkpoint_every", "train.async_checkpoints",
    "train.keep_checkpoints", "train.export_dtype", "train.parallel", "critic.parallel", "grm.train.parallel",
    "meta_rm.max_batch_tokens",
    # Deadlines, pauses, retries and concurrency: they decide what fails, never the content.
    "judge.limits", "judge.max_failure_rate", "rollout.max_failure_rate", "rollout.pause_s",
    "rollout.group_deadline_s", "rollout.min_tokens_per_s", "rollout.max_concurrency",
    # Sizes that only task=plan reads.
    "policy.shape", "grm.shape",
)  # fmt: skip
# Exceptions, for engines: keys that decide which prompts fit, or that may change the model made from the same files.
ENGINE_KEYS = ("engine.", "policy.engine_options.", "grm.engine_options.")
BOUND_ON_RESUME = ("max_context_tokens", "options", "quantization", "extra_body", "chat_markup")
START_KEYS = ("resume", "run_dir", "new.dir")  # keys that say how the run is started, or that no run reads
NEW_RUN = "start a new run with resume=never and another run_dir"  # the way out; a run's directory takes no second run


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChange:
    """A key that a resume changes. Secrets are shown as a hash."""

    key: str
    old: str
    new: str


def find_changed_keys(old: RunConfig, new: RunConfig) -> list[str]:
    """Keys that differ between a run and its resumption but must not, as `key: old -> new`, without secrets.

    A secret may differ: a rotated API key doesn't change the model.
    """
    typed = fill_sections(old), fill_sections(new)
    before, after = (dict(list_leaves(dataclasses.asdict(sections))) for sections in typed)
    was, now = (dict(list_leaves(without_secrets(sections, free_on_resume))) for sections in typed)
    return [
        f"{key}: {was.get(key)} -> {_sealed_alike(was.get(key), now.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not free_on_resume(key)
        if was.get(key) != _sealed_alike(was.get(key), now.get(key)) and not _is_secret(key, was.get(key), now.get(key))
    ]


def changes_on_resume(old: RunConfig, new: RunConfig) -> tuple[ConfigChange, ...]:
    """Keys that differ and may differ."""
    was, now = (dict(list_leaves(without_secrets(fill_sections(config), free_on_resume))) for config in (old, new))
    return tuple(
        ConfigChange(key=key, old=str(was.get(key)), new=str(_sealed_alike(was.get(key), now.get(key))))
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != _sealed_alike(was.get(key), now.get(key)) and free_on_resume(key) and key not in START_KEYS
    )


def _is_secret(key: str, *values: object) -> bool:
    """Whether a key and its values are a secret. Numbers under such a name are counts."""
    return is_secret_key(key) and all(value is None or isinstance(value, str) for value in values)


def _sealed_alike(old: object, new: object) -> object:
    """The new value as a hash, if only a hash of the old one is known."""
    return seal(new) if isinstance(old, str) and isinstance(new, str) and SEALED.fullmatch(old) else new


def free_on_resume(key: str) -> bool:
    key = as_first(key)
    names = key.split(".")
    under = any(names[: len(free)] == free for free in (section.split(".") for section in FREE_ON_RESUME))
    return under and not (key.startswith(ENGINE_KEYS) and any(name in BOUND_ON_RESUME for name in names))


def as_first(key: str) -> str:
    """The same key of the first judge, model or learner, for one of further ones: judges.safety.vote -> judge.vote."""
    section, _, rest = key.partition(".")
    return f"{FIRST[section]}.{rest.partition('.')[2]}" if section in FIRST else key


def list_leaves(values: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    """(key with its sections, value)."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from list_leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
