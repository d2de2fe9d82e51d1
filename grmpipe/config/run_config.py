"""RunConfig: what a run reads, and what follows from it. `resolve_config` makes it of what is typed."""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Self

from grmpipe.config.grm import GrmTrainConfig, ModelEntry
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.keys.entry_names import ENV, JUDGE, POLICY
from grmpipe.config.reward import RewardConfig, RewardTree
from grmpipe.config.run_judges import Judging
from grmpipe.config.run_sections import RunKeys, SharedSections
from grmpipe.config.task_settings import EVALUATIONS
from grmpipe.models.engines.engine_kind import AnyEngine
from grmpipe.models.settings import LoraConfig, ParallelConfig, PriceConfig


class ConfigError(ValueError):
    """A bad configuration, in words a user can act on. Exit code 2."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(SharedSections, RunKeys):
    """The settings of one run, checked, with all defaults filled in.

    models:  role -> model, for every model that engines may serve, the policy first.
    judges:  name -> judge, including those that the reward doesn't use.
    rewards: the composition that makes the reward, with those that it may name.
    """

    models: Mapping[str, ModelEntry]
    judges: Mapping[str, JudgeConfig]
    rewards: RewardTree

    def without_adapters(self) -> Self:
        """The same models without new adapters: nothing is to train them."""
        models = {
            role: model if model.lora.path is not None else replace(model, lora=LoraConfig())
            for role, model in self.models.items()
        }
        return replace(self, models=models)

    @property
    def policy(self) -> ModelEntry:
        return self.models[POLICY]

    @functools.cached_property
    def judging(self) -> Judging:
        """The judges that the reward uses, and the models that they may ask."""
        judges = {name: self.judges[name] for name in self.rewards.judges()}
        return Judging(judges, self.models, self.teachers, self.writers)

    @property
    def teachers(self) -> tuple[str, ...]:
        """The models that teach the policy. Only a training of the policy has some."""
        return tuple(dict.fromkeys(self.algorithm.distill.by_source.values())) if self.trains_policy else ()

    @property
    def writers(self) -> tuple[str, ...]:
        """The models that write criteria. Only a training of the policy has some."""
        found = (self.judges[name].rubric.evolve.writer for name in self.rewards.judges())
        return tuple(dict.fromkeys(one for one in found if one is not None)) if self.trains_policy else ()

    @property
    def trains_policy(self) -> bool:
        """Whether the task trains a policy on rollouts, or predicts such a training."""
        return self.task in ("train", "plan", "simulate") and self.data.retrain_from is None

    @functools.cached_property
    def asked(self) -> Judging:
        """The judges that a run asks: those that the reward uses, then those that only watch."""
        return self.include_watchers(self.watchers)

    def include_watchers(self, watchers: Collection[str]) -> Judging:
        """The judges that the reward uses, then those of these watchers."""
        watching = (name for watcher in watchers for name in self.rewards.list_judges(watcher))
        judges = {name: self.judges[name] for name in (*self.judging.judges, *watching)}
        return Judging(judges, self.models, self.teachers, self.writers)

    @property
    def watchers(self) -> Mapping[str, float]:
        """Judge or composition that only watches -> its share of the groups. Only a training of the policy has some; a
        service answers by every judge of its configuration, an evaluation of judges measures every one, and a probe
        asks one for the truth.
        """
        if self.task == "serve":
            used = {JUDGE, *self.rewards.judges(), *(one.name for one in self.rewards.in_use())}
            return {name: 0.0 for name in (*self.judges, *self.rewards.entries) if name not in used}
        if self.task == "evaluate" and self.evaluate.what != "policy":
            return {name: 0.0 for name in self.judges if name not in (JUDGE, *self.rewards.judges())}
        if self.task == "probe_judge":
            return {name: 0.0 for name in self.judges.keys() - self.rewards.judges() if name == self.probe.truth}
        return self.judge_monitor.watchers if self.trains_policy else {}

    @property
    def main_judge(self) -> JudgeConfig:
        """The judge on whose scale labels and the scores of all judges together are."""
        return self.judges[self.judging.main]

    @property
    def truth(self) -> JudgeConfig:
        """The judge whose rule says what is right, whoever judges: the first one, or the one in training."""
        return self.main_judge if self.main_judge.kind == "label" else self.judges[JUDGE]

    def may_ask(self, role: str, source: str) -> bool:
        """Whether a model that judges may be asked about prompts of a source."""
        return not self.judging.select_asking(role).keys().isdisjoint(self.rewards.judges(source))

    @property
    def judged_by_model(self) -> bool:
        """Whether a language model judges, here or remote."""
        return bool(self.judging.generative)

    @property
    def served(self) -> tuple[str, ...]:
        """Roles that engines serve in this run, here or remote."""
        return (POLICY, *self.asked.roles)

    @property
    def learners(self) -> dict[str, str]:
        """Role whose weights are trained -> role that trains it. Nothing learns in an evaluation."""
        if not self.trains:
            return {}
        return {role: self.models[role].learner for role in (POLICY, *self.trained_grms)}

    @property
    def parallel(self) -> dict[str, ParallelConfig]:
        """Role that trains a model -> how its ranks share it."""
        judging = {self.models[role].learner: train.parallel for role, train in self.trained_grms.items()}
        return {"learner": self.train.parallel, "critic": self.critic.parallel, **judging}

    def key_of_learner(self, learner: str) -> str:
        """The section of a role that trains a model."""
        own = {model.learner: f"{model.key}.train" for model in self.models.values()}
        return {**own, "learner": "train", "critic": "critic"}[learner]

    @property
    def trained_grms(self) -> dict[str, GrmTrainConfig]:
        """Role -> settings of its learner, for the GRMs that are trained next to the policy. Judging a run again trains
        none: a GRM judges as it was at the start of the run.
        """
        if self.task == "rejudge":
            return {}
        return {role: model.train for role, model in self.models.items() if model.train.enabled}

    def find_refitting(self, judge: str) -> RewardConfig | None:
        """The cascade whose second judge labels what its first one, this judge, says: its calibration is refitted."""
        own = self.trained_grms.get(self.judges[judge].model)
        for one in self.rewards.in_use():
            is_between = one.kind == "cascade" and one.first == judge and own is not None and one.then == own.labeller
            if is_between and one.unsure_band is not None and one.unsure_above_std is None:
                return one
        return None

    @property
    def learning_cascades(self) -> tuple[str, ...]:
        """The cascades in use of whose first judges one is a GRM that trains next to the policy."""
        learning = {name for role in self.trained_grms for name in self.judging.select_asking(role)}
        cascades = (one for one in self.rewards.in_use() if one.kind == "cascade" and one.first is not None)
        return tuple(one.name for one in cascades if learning.intersection(self.rewards.list_judges(str(one.first))))

    @property
    def self_judging_share(self) -> float:
        """The share of the groups in which the policy learns to judge; 0: none, or the task plays no rollouts."""
        return (self.algorithm.self_judging.share or 0.0) if self.trains_policy else 0.0

    @property
    def learns_to_judge(self) -> tuple[str, ...]:
        """The models that learn from judging tasks: GRMs next to the policy, and a policy that judges itself."""
        return (*self.trained_grms, *((POLICY,) if self.self_judging_share else ()))

    @property
    def prices(self) -> dict[str, PriceConfig]:
        """The prices of the models behind endpoints that the run asks, by role."""
        return {role: model.price for role, model in self.outside_models.items()}

    @property
    def outside_models(self) -> dict[str, ModelEntry]:
        """The models behind endpoints that the run asks, by role."""
        roles = self.asked.asked_roles
        return {role: self.models[role] for role in roles if self.find_engine_kind(role).outside}

    def find_adapters(self, host: str) -> dict[str, LoraConfig]:
        """The adapters that the engines of a model apply themselves, by the names of their models."""
        return {
            role: model.lora
            for role in self.served
            if (model := self.models[role]).host == host and model.lora.in_engines
        }

    def find_engine_kind(self, role: str) -> type[AnyEngine]:
        return self.judging.find_engine_kind(role)

    @property
    def trains(self) -> bool:
        """Whether the task trains a model."""
        return self.task not in (*EVALUATIONS, "score", "serve", "rejudge", "play")

    @property
    def uses_meta_rm(self) -> bool:
        """Whether the vote uses a meta-RM. One in training weights no vote."""
        weights_no_vote = self.task == "train_meta_rm" or self.data.retrain_from is not None
        return bool(self.asked.weighted) and not weights_no_vote

    @property
    def plays(self) -> bool:
        """Whether episodes are played: an evaluation of a judge alone, or judging again, plays nothing."""
        evaluates = self.task in ("evaluate", "probe_judge") and self.evaluate.what != "judge"
        return self.trains or evaluates or self.task == "play"

    @property
    def places_envs(self) -> bool:
        """Whether environments live in hosts of their own, on slots of a pool; else in the run itself."""
        return ENV in self.placement.roles and self.plays

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that need a place."""
        if self.data.retrain_from is not None:
            return ("learner",)
        asks_critic = self.critic.enabled and self.trains
        learners = tuple(learner for role, learner in self.learners.items() if role != POLICY)
        more = ("meta_rm",) * self.uses_meta_rm + ("critic",) * asks_critic + (ENV,) * self.places_envs
        hosts = (role for role in self.asked.host_roles if role != POLICY)
        judging = (*hosts, *self.asked.scorer_roles)
        return (POLICY, "learner", *judging, *learners, *more)
