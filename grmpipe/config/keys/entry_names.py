"""Names of models, judges and compositions: those of the first ones, and those that further ones may have."""

import re
from collections.abc import Collection

POLICY = "policy"  # section and role of the model in training
JUDGE, GRM, REWARD = "judge", "grm", "reward"  # sections and names of the first judge, model that judges, composition
FIRST = {"models": GRM, "judges": JUDGE, "rewards": REWARD}  # section of further ones -> that of the first one
ENV = "env"  # the role of hosts of environments
ROLES = ("policy", "learner", "grm", "grm_learner", "meta_rm", "critic", ENV)  # roles that every placement may seat
LEARNER = "_learner"  # the end of the name of the role that trains a judging model
RESERVED = ("policy", "learner", "grm", "meta", "meta_rm", "critic", "env")
# A judge's accuracy is the metric <name>_accuracy, and a model's metrics are <name>/...: names that would make others.
METRICS = (
    "true", "alarm", "cascade", "driver", "engines", "eval", "experts", "groups", "judge_monitor", "memory",
    "mismatch", "moves", "perf", "prompt_length", "response_length", "reward", "rollout", "slots", "staleness",
    "stall", "sync", "time", "train",
)  # fmt: skip


def first_apart(section: str, key: str, value: str = "<value>") -> str:
    """The error of a first judge, model or composition that is typed as if it were a further one."""
    first = FIRST[section]
    rest = key.partition(".")[2] or "<key>"
    return f"{section}.{first}: the first one has a section of its own; type {first}.{rest}={value}"


def check_names(section: str, names: Collection[str]) -> None:
    """Check the names of further judges or models: they are part of keys, of metrics, and of names of processes."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z]\w*", name):
            raise ValueError(f"{section}.{name}: a name has letters, digits and '_', and begins with a letter")
        if FIRST[section] == name:
            raise ValueError(first_apart(section, name))
        if name in (JUDGE, *RESERVED, *METRICS) or name.endswith(LEARNER):
            raise ValueError(
                f"{section}.{name}: the name is taken, by a role or by metrics of a run; choose another one, that "
                f"doesn't end in {LEARNER}"
            )
