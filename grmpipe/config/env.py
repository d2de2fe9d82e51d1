"""Settings of the environment that the policy acts in, and the table of environments. Imports none of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grmpipe.config.isolation import IsolationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvKind:
    """What other modules must know of a kind of environment.

    path:      dotted path of its class; "": the user names it (env.target).
    needs:     the keys of this section that must be set, and that only kinds which need them may have.
    is_single: one prompt, one answer: it holds nothing, never fails and takes no time.
    has_tools: the policy calls tools, so its chat template must know them.
    """

    path: str = ""
    needs: tuple[str, ...] = ()
    is_single: bool = False
    has_tools: bool = False


# A new one is a file in grmpipe/envs/, a row here, a YAML in conf/env/ and a test.
DEFAULT_ENV = "single_turn"
ENVS: Mapping[str, EnvKind] = {
    DEFAULT_ENV: EnvKind(path="grmpipe.envs.single_turn.SingleTurn", is_single=True),
    "tools": EnvKind(path="grmpipe.envs.tools.tool_env.ToolEnv", needs=("functions",), has_tools=True),
    "custom": EnvKind(needs=("target",)),
}
WAYS_OUT = {
    "target": "type env.target=my_package.my_module.MyEnv",
    "functions": "type env.functions=my_package.my_module, a module with typed functions",
}


@dataclass(frozen=True)
class EnvConfig:
    """The environment that the policy acts in."""

    # Environment of a rollout; single_turn: one prompt, one answer; tools: typed functions that the policy calls;
    # custom: a class of your own.
    kind: str = DEFAULT_ENV
    target: str = ""  # For custom: dotted path of the class.
    functions: str = ""  # For tools: dotted path of a module, whose public functions are the tools.
    options: dict[str, Any] = field(default_factory=dict)  # For custom: arguments of the class.
    isolation: IsolationConfig = field(default_factory=IsolationConfig)
    boot_s: float = 60.0  # Limit on the start of an episode's environment.
    step_s: float = 30.0  # Limit on the environment's answer to a turn.
    close_s: float = 10.0  # Limit on the end of an episode's environment.
    episode_s: float = 600.0  # After this time no further turn begins; the rollout is judged as it is.
    attempts: int = 3  # [episodes] Most episodes of a sibling; the environment failed in all but the last.
    retry_s: float = 0.5  # Wait before the second episode; twice as long before each further one.
    # [episodes] Most episodes open at the same time. A group waits until there is room for all its siblings.
    capacity: int = 256
    boots_per_minute: float | None = None  # Most starts of environments in a minute; null: no limit.
    # [characters] Longest message of the environment; the middle of a longer one is left out.
    max_observation_chars: int = 8000
    # [share] Share of episodes that failed in all their attempts, above which no group is opened for pause_s; if it is
    # exceeded again, the run stops.
    max_failure_rate: float = 0.5
    failure_window: int = 64  # [episodes] Latest episodes that max_failure_rate is measured over.
    pause_s: float = 30.0  # Length of a pause, in which no group is opened.
    inject_faults: float = 0.0  # [share] Share of episodes in which the environment is made to fail, to test a run.

    def __post_init__(self) -> None:
        if self.kind not in ENVS:
            raise ValueError(f"kind: unknown env {self.kind!r}; known: {', '.join(ENVS)}")
        self._check_needs()
        for key in ("boot_s", "step_s", "close_s", "episode_s"):
            if not 0 < getattr(self, key) < math.inf:
                raise ValueError(f"{key}: must be above 0 and finite, in seconds, got {getattr(self, key)}")
        for key in ("attempts", "capacity", "max_observation_chars", "failure_window"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: must be at least 1, got {getattr(self, key)}")
        for key in ("retry_s", "pause_s"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"{key}: must be 0 or more, in seconds, got {getattr(self, key)}")
        if self.boots_per_minute is not None and not 0 < self.boots_per_minute < math.inf:
            raise ValueError(f"boots_per_minute: must be above 0, or null for no limit, got {self.boots_per_minute}")
        if not 0 < self.max_failure_rate <= 1:
            raise ValueError(
                f"max_failure_rate: must be above 0 and at most 1 (a share of episodes), got {self.max_failure_rate}"
            )
        if not 0 <= self.inject_faults < 1:
            raise ValueError(f"inject_faults: must be at least 0 and below 1, got {self.inject_faults}")

    def _check_needs(self) -> None:
        needs = self.env_kind.needs
        for key, way_out in WAYS_OUT.items():
            if key in needs and not getattr(self, key):
                raise ValueError(f"{key}: is empty; for kind={self.kind} {way_out}")
            if getattr(self, key) and key not in needs:
                kinds = [name for name, kind in ENVS.items() if key in kind.needs]
                raise ValueError(f"{key}: is for env.kind={' or '.join(kinds)}; type that, or leave it out")
        if self.options and "target" not in needs:
            raise ValueError("options: is for an env of your own; type env.kind=custom, or leave it out")

    @property
    def env_kind(self) -> EnvKind:
        return ENVS[self.kind]

    @property
    def is_custom(self) -> bool:
        """Whether its class is the user's."""
        return not self.env_kind.path

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the class."""
        return {key: getattr(self, key) for key in self.env_kind.needs if key != "target"} | self.options

    @property
    def path(self) -> str:
        """The dotted path of the environment's class."""
        return self.env_kind.path or self.target
