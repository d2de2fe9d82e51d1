"""What may differ between a run and its resumption."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from grmpipe.config import RunConfig
from grmpipe.config_secrets import is_secret_key, without_secrets
from grmpipe.observe.redact import SEALED, seal

# None of it changes what is trained. Who samples may change, too: every token brings its log-prob and version along.
FREE_ON_RESUME = (
    "task", "resume", "run_dir", "objective", "tracking", "cluster", "placement", "sync", "health", "balance", "plan",
    "simulate", "evaluate", "watch",
    "engine", "policy.engine", "policy.engine_options", "policy.lora.sync", "grm.engine", "grm.engine_options",
    "grm.lora.sync", "rollout.group_deadline_s", "judge.timeout_s", "rollout.max_failure_rate",
    "rollout.failure_window", "rollout.pause_s", "train.async_checkpoints", "train.export_dtype",
)  # fmt: skip
# But not, of engines, what decides which prompts fit, or may make another model of the same files.
ENGINE_KEYS = ("engine.", "policy.engine_options.", "grm.engine_options.")
BOUND_ON_RESUME = ("max_context_tokens", "options", "extra_body", "chat_markup")


def changed_keys(old: RunConfig, new: RunConfig) -> list[str]:
    """Keys that differ and may not between a run and its resumption, as `key: old -> new`, without secrets.

    A secret may differ: a key that was rotated makes no other model.
    """
    before, after = (dict(_leaves(dataclasses.asdict(config))) for config in (old, new))
    was, now = (dict(_leaves(without_secrets(config, free_on_resume))) for config in (old, new))
    return [
        f"{key}: {was.get(key)} -> {_as_told(was.get(key), now.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not free_on_resume(key)
        if was.get(key) != _as_told(was.get(key), now.get(key)) and not _is_secret(key, was.get(key), now.get(key))
    ]


def _is_secret(key: str, *values: object) -> bool:
    """Numbers under such a name are counts."""
    return is_secret_key(key) and all(value is None or isinstance(value, str) for value in values)


def _as_told(old: object, new: object) -> object:
    """The new value as a hash, where only a hash is known of the old one."""
    return seal(new) if isinstance(old, str) and isinstance(new, str) and SEALED.fullmatch(old) else new


def free_on_resume(key: str) -> bool:
    names = key.split(".")
    under = any(names[: len(free)] == free for free in (section.split(".") for section in FREE_ON_RESUME))
    return under and not (key.startswith(ENGINE_KEYS) and any(name in BOUND_ON_RESUME for name in names))


def _leaves(values: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
