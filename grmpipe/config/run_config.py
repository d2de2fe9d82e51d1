"""RunConfig: a run's configuration, with its defaults filled in and checked. Starts nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from grmpipe.config.cross_checks import check_across, check_reward
from grmpipe.config.judging import GRM, LEARNER, POLICY, check_names
from grmpipe.config.run_sections import RunSections
from models.settings import AUTO, ModelConfig

BY_DEVICE = {True: "bfloat16", False: "float32"}  # the meaning of dtype=auto, on a GPU and elsewhere


class ConfigError(ValueError):
    """A bad configuration, in words a user can act on. Exit code 2."""


@dataclass(frozen=True)
class RunConfig(RunSections):
    """The settings of one run."""

    def __post_init__(self) -> None:
        check_names("models", self.models)
        check_names("judges", self.judges)
        self._choose_engines()
        check_reward(self)
        self._seat_models()
        self._choose_by_device()
        check_across(self)

    def _choose_engines(self) -> None:
        """Give the models without an engine of their own that of `engine.kind`."""
        self._set_models(
            {
                role: dataclasses.replace(model, engine=self.engine.kind)
                for role, model in self.models_by_role.items()
                if not model.engine
            }
        )

    def _set_models(self, models: dict[str, ModelConfig]) -> None:
        """Replace some models."""
        first = {role: model for role, model in models.items() if role in (POLICY, GRM)}
        for name, section in first.items():
            object.__setattr__(self, name, section)
        object.__setattr__(self, "models", self.models | {r: m for r, m in models.items() if r not in first})
        self.__dict__.pop("judging", None)

    def _seat_models(self) -> None:
        """Give further models without a place that of the first one, and their learners that of its learner."""
        roles = dict(self.placement.roles)
        for role in self.models:
            for own, first in ((role, GRM), (role + LEARNER, GRM + LEARNER)):
                if own not in roles and first in roles:
                    roles[own] = roles[first]
        object.__setattr__(self, "placement", dataclasses.replace(self.placement, roles=roles))

    def _choose_by_device(self) -> None:
        """Replace `auto` and null by values for the device of each role: no other code asks for the device again."""
        self._set_models(
            {
                role: dataclasses.replace(model, dtype=BY_DEVICE[self.on_gpu(role)])
                for role, model in self.models_by_role.items()
                if model.dtype == AUTO
            }
        )
        train, on_gpu = self.train, self.on_gpu("learner")
        if train.dtype == AUTO:
            train = dataclasses.replace(train, dtype=BY_DEVICE[on_gpu])
        if train.activation_checkpointing is None:
            by_device = "full" if on_gpu or train.activation_offload else "none"
            train = dataclasses.replace(train, activation_checkpointing=by_device)
        object.__setattr__(self, "train", train)
