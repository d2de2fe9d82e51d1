"""Prepares a run: places, models and data, found and checked before anything starts.

What the configuration alone shows is refused when it is read. Here stands what must be looked up, or needs several
parts of a run. Every refusal is a ConfigError that names the key and what to type.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from grmpipe.algorithm.made_batch import try_own_parts
from grmpipe.config.io.key_errors import section
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.keys.entry_names import JUDGE, POLICY
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.data.demonstrations import Demonstrations
from grmpipe.data.prompts import Data
from grmpipe.data.stream import PromptStream
from grmpipe.envs.env_factory import env_factory
from grmpipe.envs.fault_owner import exception_at
from grmpipe.envs.sandbox.env_host import check_isolation
from grmpipe.envs.tools.function_tools import check_state
from grmpipe.envs.tools.mcp_tools import check_mcp_installed, check_servers
from grmpipe.evaluation.held_out import EVAL_METRICS
from grmpipe.judge.calibration import CalibrationInUse, describe_judge, find_difference, read_calibration
from grmpipe.judge.context_limits import check_judge, check_policy, check_scalar_judge, longest_response
from grmpipe.judge.evolving_rubric import WRITER, EvolvingRubric
from grmpipe.judge.kinds import math_rule
from grmpipe.judge.kinds.function_judge import FunctionJudge, load_custom_judge
from grmpipe.judge.kinds.labels import find_rule
from grmpipe.judge.kinds.rule import Rule
from grmpipe.judge.prompt import JudgePrompt, find_last_begin
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.chat.tool_calls import FORMATS
from grmpipe.models.lm.footprint import read_heads
from grmpipe.models.types import Message, ToolSpec
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
from grmpipe.run.run_prompts import check_canaries, load_stored_tasks, read_data, read_demonstrations
from grmpipe.scheduler.placement import Placement
from grmpipe.types import Prompt
from grmpipe.workflows.play_workflow import workflow_player

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A checked run, ready to start."""

    config: RunConfig
    models: Mapping[str, Model]  # by role, but for those that only an endpoint knows
    prompts: PromptStream
    held_out: tuple[Prompt, ...]
    placement: Placement
    roles: Roles
    # Stored judging tasks, by model that learns to judge: a GRM next to the policy, or the policy.
    judging_tasks: Mapping[str, PromptStream | None] = field(default_factory=dict)
    demonstrations: Demonstrations | None = None  # that the policy imitates
    rubrics: dict[str, EvolvingRubric] = field(default_factory=dict)  # that change in the run, by judge
    calibrations: dict[str, CalibrationInUse] = field(default_factory=dict)  # by judge that has one
    predicted_pause_s: float | None = None  # the plan's: of the policy's engines, for a push

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
    check_machine(config.cluster, placement)
    joined = config.cluster.is_joined  # whose machines have their own environments
    roles.check_installed(joined=joined)
    math_rule.check_installed(config.judges.values())
    check_peft(() if joined else reversed([*config.models.values()]))
    data = read_data(config)
    check_canaries(config)
    check_objective(config)
    with section(""):
        try_own_parts(config.algorithm, config.train.group_size, config.rollout.max_new_tokens)
    check_env(config)
    policy = find_model(roles.served[POLICY], config.cluster)
    models = {POLICY: policy}
    models |= {role: find_model(roles.served[role], config.cluster) for role in config.asked.local_roles}
    models |= find_remote_teachers(roles.served[name] for name in config.teachers) | find_scalar_models(config)
    if META_RM in config.roles:  # it reads the judgements of the GRMs whose votes it weights
        read = {judge.model for judge in config.asked.weighted.values()}
        grms = [(models[role], config.models[role]) for role in config.asked.local_roles if role in read]
        assert config.meta_rm.path is not None
        with section("meta_rm."):
            models[META_RM] = find_meta_rm(config.meta_rm.path, grms)
    if CRITIC in config.roles:
        with section("critic."):
            models[CRITIC] = find_critic(config.critic.path, policy, config.policy)
        check_divides(roles.learners[CRITIC], CRITIC, models[CRITIC].path)
    answered = config.train.groups_per_batch * (1 - config.self_judging_share)  # groups of a step that answer prompts
    last_begin = find_last_begin(config.judging.judges.values(), data.train)
    if last_begin > config.train.num_steps and config.task == "train":
        log.warning(
            "a criterion begins at step %d, and the run has %d steps (train.num_steps): nothing is judged by it in "
            "training", last_begin, config.train.num_steps,
        )  # fmt: skip
    prepared = Prepared(
        config=config,
        models=models,
        prompts=PromptStream(
            data.train,
            seed=config.seed,
            shuffle=config.data.shuffle,
            max_epochs=config.data.max_epochs,
            groups_per_step=answered if last_begin else None,
        ),
        held_out=data.held_out,
        placement=placement,
        roles=roles,
        judging_tasks={role: load_stored_tasks(config, role, data) for role in config.learns_to_judge},
        demonstrations=read_demonstrations(config.algorithm.sft.path, policy.renderer, config.seed),
    )
    check_fit(prepared, data)
    check_calibrations(prepared)
    return prepared


def check_fit(prepared: Prepared, data: Data) -> None:
    """Check that each model fits its engines and what it reads, and that those that learn can."""
    config, roles = prepared.config, prepared.roles
    for model in prepared.generating:
        role = roles.served[model.name]
        if role.learner is not None:
            check_learns(model, role.key)
            check_divides(roles.learners[role.learner], role.key, model.path)
        check_lora_targets(model, role.model)
        check_weight_names(model, role)
        if role.num_gpus > 1:
            role.check_tensor_parallel(read_heads(model.path))
    for name in config.teachers:
        role = roles.served[name]
        check_teacher(prepared.models[name], role, prepared.policy, config.policy.path, config.algorithm.distill.top_k)
    if config.trains:
        check_routing(config.algorithm.router_replay, prepared.policy, roles.served[POLICY])
    check_tools(config, prepared.policy)
    check_policy(config.rollout, prepared.policy, data)
    check_all_judges(prepared, data)


def check_judges(config: RunConfig, roles: Roles, models: Collection[Model], data: Data) -> None:
    """Check all judges that ask a model which is known: one of these, or one behind an endpoint."""
    known = {model.name: model for model in models}
    policy_tokens = known[POLICY].context_tokens if POLICY in known else 0
    longest, group_size = longest_response(config.rollout, config.env, policy_tokens), config.train.group_size
    for judge in config.asked.generative.values():
        role = roles.served[judge.model]
        if role.name in known or role.engine.outside:
            if judge.tools.is_set:
                check_calls(role.key, config.models[role.name].path, known[role.name].renderer)
            check_judge(judge, role, known.get(role.name), data, group_size, longest, config.env)


def check_all_judges(prepared: Prepared, data: Data) -> None:
    """Check that all judges can read what they are to judge, that those of the user's own can be made, and that an
    environment gives the rewards that a judge takes.
    """
    config = prepared.config
    check_judges(config, prepared.roles, prepared.generating, data)
    longest = longest_response(config.rollout, config.env, prepared.policy.context_tokens)
    for judge in config.asked.scalar.values():
        key = config.models[judge.model].key
        check_scalar_judge(judge, key, prepared.models[judge.model], data, longest, config.env)
    for judge in config.asked.judges.values():
        if judge.kind == "env" and config.env.env_kind.is_single:
            raise ConfigError(
                f"{judge.key}.kind: env takes the environment's rewards, and env.kind={config.env.kind} gives "
                f"none; choose another env, or type {judge.key}.kind=rule"
            )
    check_own_judges(config)


def check_own_judges(config: RunConfig) -> None:
    """Check that the judges of the user's own can be made, and prompts for writers of criteria."""
    for judge in config.asked.judges.values():
        if judge.rubric.evolve.writer is not None:
            with section(f"{judge.key}.rubric.evolve."):
                JudgePrompt.load(judge.rubric.evolve.template, protocol=WRITER)
        with section(f"{judge.key}."):
            if judge.kind == "custom":
                load_custom_judge(judge)
            if judge.kind == "function":
                FunctionJudge(judge)


def check_trackers(config: RunConfig) -> None:
    """Check that each tracker has what it writes with."""
    if missing := config.tracking.find_missing():
        raise ConfigError(missing)


def check_calibrations(prepared: Prepared) -> None:
    """Check that each calibration is of the judge that uses it, and that this one stays what it is."""
    config = prepared.config
    for judge in config.asked.judges.values():
        if judge.calibration is None:
            continue
        with section(f"{judge.key}.calibration: "):
            calibration = read_calibration(judge.calibration)
            if difference := find_difference(calibration, describe_own_judge(prepared, judge)):
                raise ValueError(
                    f"{judge.calibration} is of another judge: {difference}; undo that, or calibrate this judge: "
                    "task=calibrate"
                )
            passes = judge.scale.to_reward(config.data.labels.pass_score)
            if max(calibration.rewards) < passes:
                log.warning(
                    "%s.calibration: no calibrated reward is above %.2f, and data.labels.pass_score=%d means %.2f: "
                    "nothing passes; type a lower data.labels.pass_score",
                    judge.key, max(calibration.rewards), config.data.labels.pass_score, passes,
                )  # fmt: skip
            changes = judge.model in config.learners or config.models[judge.model].policy_updates
            refits = config.find_refitting(judge.name) is not None and calibration.target != "better"
            if judge.kind == "generative" and config.trains and changes and not refits:
                raise ValueError(
                    f"{judge.model} changes during the run, and a calibration is of a judge as it is; type "
                    f"{judge.key}.calibration=null. Only that of a cascade's first judge is refitted, if labels_from "
                    "of its model is the second judge, unsure_band alone says when it is unsure, and the labels were "
                    "of single responses"
                )


def describe_own_judge(prepared: Prepared, judge: JudgeConfig) -> dict[str, str]:
    """What a judge of the run is (`describe_judge`)."""
    if judge.kind not in ("generative", "scalar"):
        return describe_judge(judge, None, None, None)
    found = prepared.models.get(judge.model)
    here = found is not None and Path(found.path).exists()  # machines of a joined cluster load by the hub name
    return describe_judge(
        judge,
        prepared.config.models[judge.model].path,
        found.path if found is not None and here else None,
        None if found is None else found.renderer,
    )


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


PROBE = ToolSpec(name="probe", description="", parameters={"type": "object", "properties": {}})


def check_env(config: RunConfig) -> None:
    """Check the class and its limits, before any model is looked for."""
    env, rollout, train = config.env, config.rollout, config.train
    with section("env."):
        if env.env_kind.is_workflow:
            workflow_player(env)
        else:
            env_factory(env)
        if not env.command:  # a program's exceptions need not be here
            for path in env.policy_errors:
                exception_at(path)
        if env.mcp:
            check_mcp_installed()
            if not config.places_envs:  # else each host tries them on its own machine
                asyncio.run(check_servers(env))
        if not (config.places_envs and config.cluster.is_joined):  # else each host checks its own machine
            check_isolation(env.isolation)
    if env.env_kind.is_single:
        return
    if env.capacity < train.group_size and config.trains:  # whose answers come one by one
        raise ConfigError(
            f"env.capacity: {env.capacity} episodes at once are fewer than the {train.group_size} of a group, which "
            f"begin together; type env.capacity={train.group_size} or more"
        )
    if env.episode_s >= rollout.group_deadline_s:
        raise ConfigError(
            f"env.episode_s: {env.episode_s:g} s isn't below rollout.group_deadline_s = {rollout.group_deadline_s:g} "
            "s, the time to roll out and judge a group; type a longer rollout.group_deadline_s, or a shorter "
            "env.episode_s"
        )


def check_tools(config: RunConfig, policy: Model) -> None:
    """Check that the policy can be given tools, and gets a turn after its first call."""
    if not config.env.env_kind.has_tools:
        return
    check_calls("policy", config.policy.path, policy.renderer)
    with section("env."):
        check_state(config.env.functions, is_given=False)
    if config.rollout.max_turns < 2:
        raise ConfigError(
            "rollout.max_turns: 1 ends a rollout with its first call, before any result is read; type "
            "rollout.max_turns=8, or as many calls as a task may need and one turn for the answer"
        )


def check_calls(key: str, path: str | None, renderer: Renderer) -> None:
    """Check that a model can be given tools, and its calls be read. key: its section."""
    if not renderer.takes_tools:
        raise ConfigError(
            f"{key}.chat_template: the chat template of {path} has no place for tools; give a model "
            f"that knows tools, or as {key}.chat_template a Jinja file that lists them"
        )
    if renderer.tool_parser_name is None:
        raise ConfigError(
            f"{key}.tool_parser: the chat template of {path} asks for calls in a format that is not "
            f"known here; type {key}.tool_parser={', '.join(FORMATS)}, or the dotted path of your own"
        )
    with section(f"{key}."):
        renderer.render((Message(role="user", content="?"),), (PROBE,))
        renderer.extend((Message(role="tool", content="!", name=PROBE.name),), (PROBE,))
