"""Checks that no key of the command line is typed in vain. Starts nothing."""

from __future__ import annotations

from collections.abc import Sequence, Set

from grmpipe.config.evaluation import OF_JUDGE, OF_POLICY
from grmpipe.config.run_config import ConfigError, RunConfig

OF_PLAYING = ("policy", "data", "rollout")  # sections that only an evaluation of a policy reads


def check_typed_keys(config: RunConfig, typed: Sequence[str], read_by_others: Set[str] = frozenset()) -> None:
    """Check that task=evaluate reads the typed keys. What a recipe or a group sets isn't typed. Raises ConfigError.

    read_by_others: keys that other keys take their values from.
    """
    if config.task != "evaluate":
        return
    what = config.evaluate.what
    for key in typed:
        section, _, name = key.partition(".")
        if what == "judge" and is_of_playing(section, name, config) and key not in read_by_others:
            raise ConfigError(
                f"{key}: task=evaluate measures the judge against labels (evaluate.what=judge), and would ignore this "
                "key; to evaluate the policy type evaluate.what=policy, or evaluate.what=both; otherwise leave the key "
                "out"
            )
        if what == "policy" and section == "evaluate" and name.split(".")[0] in OF_JUDGE:
            raise ConfigError(
                f"{key}: evaluate.what=policy measures no judge, and would ignore this key; type evaluate.what=both, "
                "or leave the key out"
            )
        if what != "judge" and key in ("data.path", "data.eval_path") and config.evaluate.prompts is not None:
            raise ConfigError(
                f"{key}: the policy answers evaluate.prompts, and this key would be ignored; leave one of them out"
            )


def is_of_playing(section: str, name: str, config: RunConfig) -> bool:
    if section == "evaluate":
        return name.split(".")[0] in OF_POLICY
    return bool(name) and section in OF_PLAYING and not (section == "policy" and config.judging.by_policy)
