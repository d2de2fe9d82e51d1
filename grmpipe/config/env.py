"""Settings of the environment that the policy acts in, and the table of environments. Imports none of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grmpipe.config.isolation import IsolationConfig

# Kind -> its class, which is constructed with each rollout's prompt. A new one is a file in grmpipe/envs/, a row here,
# a YAML in conf/env/ and a test.
DEFAULT_ENV = "single_turn"
ENVS = {DEFAULT_ENV: "grmpipe.envs.single_turn.SingleTurn"}
CUSTOM = "custom"


@dataclass(frozen=True)
class EnvConfig:
    """The environment that the policy acts in."""

    kind: str = (
        DEFAULT_ENV  # Environment of a rollout; single_turn: one prompt, one answer; custom: a class of your own.
    )
    target: str = ""  # For custom: dotted path of the class.
    options: dict[str, Any] = field(default_factory=dict)  # For custom: arguments of the class after the prompt.
    isolation: IsolationConfig = field(default_factory=IsolationConfig)

    def __post_init__(self) -> None:
        if self.kind not in (*ENVS, CUSTOM):
            raise ValueError(f"kind: unknown env {self.kind!r}; known: {', '.join((*ENVS, CUSTOM))}")
        if self.is_custom and not self.target:
            raise ValueError("target: is empty; for kind=custom type env.target=my_package.my_module.MyEnv")
        for key, value in (("target", self.target), ("options", self.options)):
            if value and not self.is_custom:
                raise ValueError(f"{key}: is for an env of your own; type env.kind=custom, or leave it out")

    @property
    def is_custom(self) -> bool:
        return self.kind == CUSTOM

    @property
    def path(self) -> str:
        """The dotted path of the environment's class."""
        return self.target if self.is_custom else ENVS[self.kind]
