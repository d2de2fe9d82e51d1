"""Checks that no key of the command line is typed in vain."""

from collections.abc import Sequence
from dataclasses import dataclass

from grmpipe.config.keys.entry_names import GRM, JUDGE
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.task_settings import OF_JUDGE, OF_POLICY

OF_PLAYING = ("policy", "data", "rollout")  # sections that only an evaluation of a policy reads
PAUSE = "rollout.pause_s"  # how long judging pauses, whatever is evaluated
UNUSED_BY_PROBE = ("ks", "against", "pass_k", "greedy")
OF_TRUTH = f"{JUDGE}.rule"  # says what is right, whoever judges


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReads:
    """What decides which keys an evaluation (task=evaluate, calibrate or probe_judge) reads; known before the
    configuration is checked.

    by_policy:      whether a judge may ask the policy.
    read_by_others: keys that other keys take their values from.
    """

    what: str  # evaluate.what
    task: str = "evaluate"
    has_prompts: bool  # evaluate.prompts isn't null
    by_policy: bool = False
    read_by_others: frozenset[str] = frozenset()


def check_typed_keys(reads: EvaluationReads, typed: Sequence[str]) -> None:
    """Check that task=evaluate reads the typed keys. What a recipe or a group sets isn't typed. Raises ConfigError."""
    for key in typed:
        section, _, name = key.partition(".")
        own = name.split(".")[0] if section == "evaluate" else ""
        if own == "every" or (reads.task == "probe_judge" and own in UNUSED_BY_PROBE):
            raise ConfigError(f"{key}: task={reads.task} would ignore this key; leave it out")
        if reads.what == "judge" and (own in OF_POLICY or is_of_playing(key, reads)):
            raise ConfigError(
                f"{key}: task={reads.task} measures the judge against labels (evaluate.what=judge), and would ignore "
                "this key; to evaluate the policy type evaluate.what=policy, or evaluate.what=both; otherwise leave "
                "the key out"
            )
        if reads.what == "policy" and own in OF_JUDGE:
            raise ConfigError(
                f"{key}: evaluate.what=policy measures no judge, and would ignore this key; type evaluate.what=both, "
                "or leave the key out"
            )
        if reads.what != "judge" and reads.has_prompts and key in ("data.path", "data.eval_path"):
            raise ConfigError(
                f"{key}: the policy answers evaluate.prompts, and this key would be ignored; leave one of them out"
            )


def check_typed_judges(config: RunConfig, typed: Sequence[str], read_by_others: frozenset[str]) -> None:
    """Check that a training without rewards has a use for the judge and the GRM that were typed. Those that nobody
    typed are there by default, and are ignored. Raises ConfigError.
    """
    unused = {JUDGE} - config.asked.judges.keys() | {GRM} - set(config.asked.asked_roles)
    for key in typed:
        if key.split(".")[0] in unused and key != OF_TRUTH and key not in read_by_others:
            raise ConfigError(
                f"{key}: with reward=none no judge is asked, and this key would be ignored; leave it out, or type "
                "reward=single"
            )


def is_of_playing(key: str, reads: EvaluationReads) -> bool:
    section, _, name = key.partition(".")
    asked = (section == "policy" and reads.by_policy) or name.startswith(("labels", "columns")) or key == PAUSE
    return bool(name) and section in OF_PLAYING and not asked and key not in reads.read_by_others
