"""Checks a run before anything starts.

Every refusal is a ConfigError that names the key and what to type.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from grmpipe.config.io.key_errors import section
from grmpipe.config.keys.entry_names import JUDGE, POLICY
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.data.demonstrations import Demonstrations
from grmpipe.data.stream import PromptStream
from grmpipe.evaluation.held_out import EVAL_METRICS
from grmpipe.judge.kinds import math_rule
from grmpipe.judge.kinds.custom_judge import load_custom_judge
from grmpipe.judge.kinds.function_judge import FunctionJudge
from grmpipe.judge.kinds.labels import find_rule
from grmpipe.judge.kinds.rule import Rule
from grmpipe.models.lm.footprint import read_heads
from grmpipe.observe.summary import Summary
from grmpipe.roles.find_models import (
    CRITIC,
    META_RM,
    check_teacher,
    find_critic,
    find_meta_rm,
    find_model,
    find_remote_teachers,
    find_scalar_models,
)
from grmpipe.roles.learners import (
    check_divides,
    check_learns,
    check_lora_targets,
    check_peft,
    check_routing,
    check_weight_names,
)
from grmpipe.roles.machines import check_machine
from grmpipe.roles.role_placement import seat_roles
from grmpipe.roles.roles import Model, Roles, resolve_roles
from grmpipe.scheduler.placement import Placement
from grmpipe.types import Prompt
from grmpipe.validate.context_limits import check_judges, check_policy, check_scalar_judges
from grmpipe.validate.data import load_stored_tasks, read_data, read_demonstrations
from grmpipe.validate.env import check_env, check_tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A checked run, ready to start."""

    config: RunConfig
    models: Mapping[str, Model]  # by role, but for those that only an endpoint knows
    prompts: PromptStream
    held_out: tuple[Prompt, ...]
    placement: Placement
    roles: Roles
    # Stored judging tasks, by GRM that is trained next to the policy.
    judging_tasks: Mapping[str, PromptStream | None] = field(default_factory=dict)
    demonstrations: Demonstrations | None = None  # that the policy imitates

    @property
    def is_right(self) -> Rule:
        """The rule that only metrics use, unless the user makes it the judge."""
        return find_rule(self.config.truth)

    @property
    def policy(self) -> Model:
        return self.models[POLICY]

    @property
    def generating(self) -> tuple[Model, ...]:
        """The models that engines may serve here: the policy, and those that judge or teach."""
        served = self.roles.served
        return tuple(model for name, model in self.models.items() if name in served and not served[name].engine.outside)

    def under(self, config: RunConfig) -> Prepared:
        """The same run with another configuration, in the same places."""
        return replace(self, config=config, roles=resolve_roles(config, self.placement))


def prepare(config: RunConfig) -> Prepared:
    """Assign places, read data, find models, and check that they fit each other. Raises ConfigError."""
    placement, roles = seat_roles(config)
    check_machine(config, placement)
    roles.check_installed(joined=config.cluster.address is not None)
    math_rule.check_installed(config.judges.values())
    check_peft(config)
    data = read_data(config)
    check_objective(config)
    check_env(config)
    policy = find_model(roles.served[POLICY], config)
    models = {POLICY: policy} | {role: find_model(roles.served[role], config) for role in config.asked.local_roles}
    models |= find_remote_teachers(config, roles) | find_scalar_models(config)
    prepared = Prepared(
        config=config,
        models=models | find_scalar_heads(config, models),
        prompts=PromptStream(
            data.train, seed=config.seed, shuffle=config.data.shuffle, max_epochs=config.data.max_epochs
        ),
        held_out=data.held_out,
        placement=placement,
        roles=roles,
        judging_tasks={role: load_stored_tasks(config, role, data) for role in config.trained_grms},
        demonstrations=read_demonstrations(config, policy),
    )
    check_models(prepared)
    check_tools(config, policy)
    check_policy(config, policy, data)
    check_judges(config, roles, prepared.generating, data)
    check_scalar_judges(config, prepared.models, data)
    check_judges_without_model(config)
    return prepared


def find_scalar_heads(config: RunConfig, models: Mapping[str, Model]) -> dict[str, Model]:
    """The meta-RM, if a vote uses one (it reads the judgements of the GRMs whose votes it weights), and the critic."""
    found = {}
    if META_RM in config.roles:
        read = {judge.model for judge in config.asked.weighted.values()}
        with section("meta_rm."):
            found[META_RM] = find_meta_rm(config, [models[role] for role in config.asked.local_roles if role in read])
    if CRITIC in config.roles:
        with section("critic."):
            found[CRITIC] = find_critic(config, models[POLICY])
        check_divides(config, CRITIC, CRITIC, found[CRITIC].path)
    return found


def check_models(prepared: Prepared) -> None:
    """Check that each model fits its engines, and that those that learn can."""
    config, roles = prepared.config, prepared.roles
    for model in prepared.generating:
        role = roles.served[model.name]
        if role.learner is not None and config.trains:
            check_learns(model, role.key)
            check_divides(config, role.learner, role.key, model.path)
        check_lora_targets(model, config)
        check_weight_names(model, role)
        if role.num_gpus > 1:
            role.check_tensor_parallel(read_heads(model.path))
    for name in config.teachers:
        role = roles.served[name]
        check_teacher(prepared.models[name], role, prepared.policy, config)
    check_routing(config, prepared.policy, roles.served[POLICY])


def check_judges_without_model(config: RunConfig) -> None:
    """Check that judges of the user's own can be made, and that an environment gives the rewards that a judge takes."""
    for judge in config.asked.judges.values():
        if judge.kind == "env" and config.env.env_kind.is_single:
            raise ConfigError(
                f"{judge.key}.kind: env takes the environment's rewards, and env.kind={config.env.kind} gives "
                f"none; choose another env, or type {judge.key}.kind=rule"
            )
        if judge.kind == "custom":
            with section(f"{judge.key}."):
                load_custom_judge(judge)
        if judge.kind == "function":
            with section(f"{judge.key}."):
                FunctionJudge(judge)


def check_objective(config: RunConfig) -> None:
    """Check that the objective is a number that summary.json can hold. Whether it will is known only at the end."""
    judges = config.judging.judges
    by_judge = [f"{name}_accuracy" for name in judges if name != JUDGE] if len(judges) > 1 else []
    eval_keys = [f"eval.{when}.{name}" for when in ("initial", "final") for name in (*EVAL_METRICS, *by_judge)]
    first = config.objective.split(".")[0]
    known = config.objective in eval_keys if first == "eval" else first in {spec.name for spec in fields(Summary)}
    if not known:
        near = difflib.get_close_matches(config.objective, eval_keys, n=1) or ["eval.final.grm_accuracy"]
        raise ConfigError(
            f"objective: {config.objective!r} is no number of summary.json; did you mean {near[0]}? "
            f"Metrics of eval: {', '.join(eval_keys)}"
        )
