"""Checks across the sections of a configuration. Each raises ValueError that names a key and the way out."""

from collections.abc import Mapping

from grmpipe.algorithm.distill import BETTER_ANSWER, CRITIQUE
from grmpipe.config.budget import check_budget
from grmpipe.config.critic import check_critic
from grmpipe.config.engine_kinds import engines_that
from grmpipe.config.env import EnvConfig
from grmpipe.config.grm import ModelEntry
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.keys.entry_names import ENV, POLICY, ROLES
from grmpipe.config.reward_checks import (
    check_doubts,
    check_normalised_units,
    check_rewards,
    check_rewards_used,
    check_scales,
    check_watchers,
)
from grmpipe.config.run_config import RunConfig
from grmpipe.config.run_judges import check_all_used, check_judging, check_teachers
from grmpipe.config.task_settings import EVALUATIONS
from grmpipe.config.train import (
    check_interpolated,
    check_log_ratio,
    check_pass_k,
    check_replay_buffer,
    check_router_replay,
    check_skipped,
    check_spread,
)
from grmpipe.models.engines.engine_kind import AnyEngine
from grmpipe.scheduler.placement import ClusterConfig, PlacementConfig
from grmpipe.scheduler.processes.call_limits import WORK_FACTOR

MAX_EPISODES = 900  # at once on a host: calls of one process that wait at once are limited (ray_cluster.py)
MAX_CALL_SHARE = 0.8  # what an environment may take of the limit of a call; the rest is for the way


def check_across(config: RunConfig) -> None:
    """All checks, once the defaults are filled in."""
    check_reward(config)
    check_run(config)
    check_budget(config.budget, config.outside_models)
    check_algorithm(config)
    check_policy_engine(config.policy, config.find_engine_kind(POLICY))
    check_places(config)
    check_retrain(config)
    check_cotrain(config)
    check_self_judging(config)
    check_critic_alone(config)
    check_updated_by_policy(config)
    check_lora(config)
    check_meta_rm(config)
    check_simulated(config)
    check_states(config)
    check_labels(config)
    check_measured(config.rewards.find_weighed_members(), config.judging.generative)


def check_run(config: RunConfig) -> None:
    """Check that the task has the data and the judge that it needs."""
    if not config.data.path and config.task not in EVALUATIONS:  # which train on no prompts
        raise ValueError("data.path: missing; give a .jsonl or .parquet file, or type data.path=tiny://train")
    if config.task == "train_judge_rft" and config.main_judge.kind != "label":
        raise ValueError(
            "task: train_judge_rft learns from labelled judgements; type judge=label data.path=... as well"
        )


def check_algorithm(config: RunConfig) -> None:
    check_pass_k(config.algorithm, config.train.group_size)
    check_replay_buffer(config.algorithm, config.train.max_staleness)
    check_interpolated(config.algorithm, config.train.max_staleness)
    check_skipped(config.algorithm, config.train)
    check_log_ratio(config.algorithm)
    check_router_replay(config.algorithm, config.train.groups_per_batch)
    for judge in config.judging.generative.values():
        check_spread(config.algorithm, judge.num_judgements)
    check_critic(config.critic, config.algorithm, config.train)


def check_places(config: RunConfig) -> None:
    known = dict.fromkeys((*ROLES, *(role for model in config.models.values() for role in (model.name, model.learner))))
    for role in config.placement.roles:
        if role not in known:
            raise ValueError(f"placement.roles.{role}: there is no such role; known: {', '.join(known)}")
    if config.places_envs:
        check_env_hosts(config.env, config.placement, config.cluster)


def check_env_hosts(env: EnvConfig, placement: PlacementConfig, cluster: ClusterConfig) -> None:
    """Check that there are environments to place, on cores, within what a host and its calls can take."""
    key, where = f"placement.roles.{ENV}", placement.roles[ENV]
    if env.env_kind.is_single:
        raise ValueError(f"{key}: env.kind={env.kind} has no environments to place; type env=tools, or leave it out")
    if env.env_kind.is_workflow:
        raise ValueError(
            f"{key}: workflows run where the server is that they ask the policy at, on the run's own machine; leave "
            "it out, or write an env (env=custom)"
        )
    if placement.on_gpu(ENV):
        cores = [name for name, pool in placement.pools.items() if pool.resource == "cpu"]
        way_out = f"type {key}.pool={' or '.join(cores)}" if cores else "add a pool with resource=cpu"
        raise ValueError(f"{key}.pool: environments need cores, and the pool {where.pool} has GPUs; {way_out}")
    if env.capacity > MAX_EPISODES * where.replicas:
        raise ValueError(
            f"{key}.replicas: {where.replicas} hosts are too few for env.capacity = {env.capacity} episodes, at most "
            f"{MAX_EPISODES} each; type {key}.replicas={-(-env.capacity // MAX_EPISODES)} or more"
        )
    longest = max(env.boot_s, env.step_s)
    if longest > MAX_CALL_SHARE * WORK_FACTOR * cluster.call_timeout_s:
        raise ValueError(
            f"cluster.call_timeout_s: a host that boots or steps for {longest:g} s would count as dead; type "
            f"cluster.call_timeout_s={longest / (MAX_CALL_SHARE * WORK_FACTOR):.0f} or more, or shorter env.boot_s "
            "and env.step_s"
        )


def check_reward(config: RunConfig) -> None:
    """Check the judges, the models that they ask, and the reward that is made of their verdicts."""
    kind = config.algorithm.estimator_kind
    check_rewards(config.rewards, config.judges, group_baseline=kind.has_zero_groups)
    check_normalised_units(config.rewards, config.algorithm)
    check_watchers(config.watchers, config.rewards, config.judges)
    for judge in (config.judges[one] for name in config.watchers for one in config.rewards.list_judges(name)):
        if judge.rubric.evolve.writer is not None:
            raise ValueError(
                f"{judge.key}.rubric.evolve.writer: a judge that only watches keeps its rubric; type "
                f"{judge.key}.rubric.evolve.writer=null"
            )
    watching = [config.rewards.below(name) for name in config.watchers if name in config.rewards.entries]
    for tree in (config.rewards, *watching):
        check_doubts(tree, config.judges)
        check_scales(tree, config.judges)
    check_judging(config.asked)
    check_distillation(config)
    if config.trains:  # others measure any one of them
        watch = config.judge_monitor.watchers
        teachers = config.algorithm.distill.by_source.values()
        check_all_used(config.include_watchers(watch), config.judges, teachers)
        check_rewards_used(config.rewards, watch)
    for judge in config.judging.judges.values() if len(config.judging.judges) > 1 else ():
        if judge.kind == "label":
            raise ValueError(f"{judge.key}.kind: label is for a judge in training, alone; type reward=single")


def check_distillation(config: RunConfig) -> None:
    """Check the teachers, what the policy learns from beside them, and that both score at one temperature."""
    distill, key = config.algorithm.distill, "algorithm.distill.teachers"
    check_teachers(config.judging)
    if config.trains_policy and not config.judging.judges and not distill.teachers:
        raise ValueError(
            "reward.kind: none gives no rewards, and no teacher teaches the policy; type "
            f"'{key}={{default: <model>}}', or reward=single"
        )
    if not distill.teachers:
        return
    if config.rollout.temperature != 1:
        raise ValueError(
            f"rollout.temperature: teachers score at temperature 1, and the policy samples at "
            f"{config.rollout.temperature:g}; type rollout.temperature=1, or leave out {key}"
        )
    if config.algorithm.dynamic_sampling_batches > 0:
        raise ValueError(
            "algorithm.dynamic_sampling_batches: groups of equal rewards learn from their teacher, and would be "
            f"replaced; type algorithm.dynamic_sampling_batches=0, or leave out {key}"
        )
    if not config.judging.judges and not config.algorithm.estimator_kind.has_zero_groups:
        raise ValueError(
            f"algorithm.estimator: {config.algorithm.estimator} estimates from rewards, and reward=none gives none; "
            "type algorithm=grpo, which gives every token the advantage 0 then"
        )
    key = "algorithm.distill.context"  # what a teacher reads more than the policy
    if POLICY in config.teachers and distill.context is None:
        raise ValueError(
            "algorithm.distill.teachers: the policy itself teaches only what it reads beside the prompt; type "
            f"'{key}=\"\\n\\n{{critique}}\"', or a model beside the policy"
        )
    kinds = [judge.protocol_kind for judge in config.judging.generative.values()]
    if CRITIQUE in distill.context_fields and not any(kind.scores != "turns" and not kind.compares for kind in kinds):
        raise ValueError(
            f"{key}: {{critique}} is what a generative judge writes about one response, and this run has none that "
            "does; type judge=pointwise, or leave {critique} out"
        )
    if BETTER_ANSWER in distill.context_fields and (not config.judging.judges or config.train.group_size == 1):
        raise ValueError(
            f"{key}: {{better_answer}} needs rewards of siblings; type reward=single and train.group_size=2 or more, "
            "or leave {better_answer} out"
        )


def check_policy_engine(policy: ModelEntry, kind: type[AnyEngine]) -> None:
    """Check that the policy's engines take weights."""
    if not kind.transports:
        able = " or ".join(engines_that(lambda kind: bool(kind.transports)))
        raise ValueError(
            f"policy.engine: {policy.engine} can't receive weights or return log-probs, so it can't serve a "
            f"model in training; type policy.engine={able}"
        )


def check_updated_by_policy(config: RunConfig) -> None:
    """Check the models that take over the policy's weights: they are asked, start as the policy, and don't learn."""
    updated = {role: model for role, model in config.models.items() if model.policy_updates}
    for role, model in updated.items():
        key = f"{model.key}.policy_updates"
        if role not in config.judging.roles:
            raise ValueError(
                f"{key}: only a language model that judges or teaches beside the policy takes over its weights"
            )
        if model.path != config.policy.path:
            raise ValueError(
                f"{key}: {model.path} is another model than {config.policy.path}, whose weights it would get; type "
                f"{model.key}.path='${{policy.path}}'"
            )
        if role in config.trained_grms:
            raise ValueError(f"{key}: {role} learns itself; type {model.key}.train.enabled=false")
        if not config.judging.find_engine_kind(role).reads_model_files:
            able = " or ".join(engines_that(lambda kind: kind.reads_model_files))
            raise ValueError(f"{key}: {model.engine} can't read a model's files; type {model.key}.engine={able}")
        last = max(model.list_updates(config.train.num_steps), default=model.policy_updates)
        if last >= config.train.num_steps:
            raise ValueError(
                f"{key}: {last} is not before the last step, train.num_steps = {config.train.num_steps}; leave it out"
            )


def check_labels(config: RunConfig) -> None:
    """Check the score that passes, for judges that learn from labels and for a jury that weighs by accuracy."""
    labelled = [judge for judge in config.judging.judges.values() if judge.kind == "label"]
    labelled += [judge for role in config.learns_to_judge for judge in config.judging.select_asking(role).values()]
    if config.rewards.find_weighed_members():
        labelled.append(config.main_judge)
    for judge in labelled:
        key = judge.key
        if not judge.scale.low < config.data.labels.pass_score <= judge.scale.high:
            raise ValueError(
                f"data.labels.pass_score: must be above {key}.scale.low = {judge.scale.low} and at most "
                f"{key}.scale.high = {judge.scale.high}, got {config.data.labels.pass_score}; type the lowest "
                f"of its scores "
                "that passes an answer"
            )


def check_measured(weighed: Mapping[str, str], judges: Mapping[str, JudgeConfig]) -> None:
    """Check that the accuracy of a jury's members can be measured, on held-out answers that have no siblings."""
    for name, judge in judges.items():
        if name in weighed and judge.protocol_kind.compares:
            path = weighed[name]
            raise ValueError(
                f"{path}.vote: accuracy is measured on single held-out answers, and {name} compares several; type "
                f"{path}.vote=mean, or {judge.key}.protocol=pointwise"
            )


def check_retrain(config: RunConfig) -> None:
    """Check that retraining from a run trains only the policy."""
    if config.data.retrain_from is None:
        return
    if config.task != "train":
        raise ValueError(
            f"data.retrain_from: task={config.task} can't replay; type task=train, or data.retrain_from=null"
        )
    alone = "data.retrain_from trains only the policy"
    for key in (f"{config.models[role].key}.train.enabled" for role in config.trained_grms):
        raise ValueError(f"{key}: {alone}; type {key}=false")
    if config.critic.enabled:
        raise ValueError(f"critic.enabled: {alone}; type critic=none algorithm.estimator=grpo")


def check_meta_rm(config: RunConfig) -> None:
    """Check that a vote that needs a meta-RM has one, with something to read."""
    if config.task == "train_meta_rm" and (judge := config.main_judge).tools.is_set:
        raise ValueError(
            f"{judge.key}.tools.functions: a meta-RM learns from judgements of one turn; type "
            f"{judge.key}.tools.functions='' {judge.key}.tools.mcp={{}}"
        )
    if not config.uses_meta_rm:
        return
    judge = next(iter(config.judging.weighted.values()))
    key = f"{judge.key}.vote"
    if config.task == "simulate":
        raise ValueError(
            f"{key}: task=simulate asks no meta-RM, whose work is small compared with the GRM's; type task=plan "
            f"for its work and memory, or {key}=mean to simulate the rest of the run"
        )
    if config.meta_rm.path is None:
        raise ValueError(
            f"meta_rm.path: {key}={judge.vote} needs a meta-RM, and there is none; train one by "
            f"+experiment=train_meta_rm and type meta_rm.path=<its run_dir>/meta_rm, or {key}=mean"
        )


def check_hosted(model: ModelEntry, config: RunConfig) -> None:
    """Check that a model is an adapter of another one, on engines that can serve both."""
    key, host = f"{model.key}.adapter_of", config.models.get(model.adapter_of)
    own = f"leave {key} out, for engines of its own"
    if host is None or host.adapter_of or host is model:
        hosts = [role for role, one in config.models.items() if not one.adapter_of and one is not model]
        raise ValueError(
            f"{key}: {model.adapter_of!r} is no model with engines of its own; type one of {', '.join(hosts)}"
        )
    kind = config.find_engine_kind(host.name)
    if kind.outside:
        raise ValueError(
            f"{key}: {host.engine} serves {host.name} elsewhere; {own}, and type {model.key}.engine={host.engine} "
            f"{model.key}.path=<the adapter's name at the endpoint, as in vLLM's --lora-modules>"
        )
    for name in ("path", "dtype", "engine"):
        mine, its = getattr(model, name), getattr(host, name)
        if mine != its:
            raise ValueError(
                f"{model.key}.{name}: {mine} differs from {host.key}.{name}={its}, and an adapter has its base; type "
                f"{model.key}.{name}={its}, or {own}"
            )
    if model.engine_options:
        raise ValueError(
            f"{model.key}.engine_options: the engines are those of {host.name}; type {host.key}.engine_options"
        )
    if not config.trains and model.lora.path is None:
        raise ValueError(
            f"{model.key}.lora.path: missing; without it {model.name} is its base; type the adapter's directory, as in "
            f"{model.key}.lora.path=<run_dir>/{model.name}_adapter"
        )
    if not model.lora.in_engines:
        rank = model.lora.rank or 16
        raise ValueError(
            f"{key}: {model.name} is no adapter; type {model.key}.lora.rank={rank} {model.key}.lora.sync=adapters"
        )
    updated = next((one for one in (model, host) if one.policy_updates), None)
    if updated is not None:
        raise ValueError(f"{updated.key}.policy_updates: would change the base of adapters; {own}")
    if host.name in config.learners and not host.lora.in_engines:
        raise ValueError(
            f"{key}: all weights of {host.name} change in this run, which are the base of {model.name}; type "
            f"{host.key}.lora.rank={host.lora.rank or model.lora.rank} {host.key}.lora.sync=adapters, or {own}"
        )
    if config.task in ("simulate", "train_meta_rm"):
        raise ValueError(f"{key}: task={config.task} gives each model engines of its own; {own}")


def check_lora(config: RunConfig) -> None:
    """Check that adapters belong to a model that learns, or come from files, and go to an engine that applies them."""
    for role in config.served:
        if (model := config.models[role]).adapter_of:
            check_hosted(model, config)
    for model in config.models.values():
        if model.lora.path is not None and not model.lora.in_engines:
            raise ValueError(
                f"{model.key}.lora.path: needs {model.key}.lora.rank={model.lora.rank or '<its rank>'} "
                f"{model.key}.lora.sync=adapters"
            )
    if config.task in EVALUATIONS:  # which have no adapters but those
        return
    for role, model in config.models.items():
        key, kind = model.key, config.find_engine_kind(role)
        if model.lora.in_engines and not kind.applies_adapters:
            able = " or ".join(engines_that(lambda kind: kind.applies_adapters))
            raise ValueError(
                f"{key}.lora.sync: {model.engine} can't receive adapters alone; type {key}.lora.sync=merged, "
                f"or {key}.engine={able}"
            )
        if model.lora.in_engines and model.lora.rank > kind.max_adapter_rank:
            raise ValueError(
                f"{key}.lora.rank: {model.engine} applies adapters up to rank {kind.max_adapter_rank}, got "
                f"{model.lora.rank}; type {key}.lora.sync=merged, or a lower rank"
            )
        # If the policy is the judge itself, it takes its settings from the GRM's.
        if (
            model.lora.learns
            and model.lora.path is None
            and role not in config.learners
            and config.main_judge.kind != "label"
        ):
            raise ValueError(
                f"{key}.lora.rank: the GRM doesn't learn in this run; type {key}.lora.rank=0, "
                f"{key}.train.enabled=true, or {key}.lora.path=<an adapter's directory>"
            )
    if config.policy.lora.learns and config.task == "train_meta_rm":
        raise ValueError(
            "policy.lora.rank: task=train_meta_rm trains all weights of a meta-RM; type policy.lora.rank=0"
        )


def check_simulated(config: RunConfig) -> None:
    """Check that task=simulate knows the environment, the judge and the number of scores in a judgement."""
    if config.task != "simulate":
        return
    if not config.env.env_kind.is_single:
        raise ValueError(
            "env.kind: task=simulate knows only single turns; to see the rest of the run type env=single_turn"
        )
    for judge in config.judging.judges.values():
        key = judge.key
        if judge.kind == "scalar":
            raise ValueError(
                f"{key}.kind: task=simulate asks no scalar reward model, whose work is small compared with a GRM's; "
                f"type task=plan for its work, or {key}=rule to simulate the rest"
            )
        if judge.kind in ("custom", "function"):
            raise ValueError(f"{key}.kind: task=simulate knows no judge of yours; to see the rest type {key}=rule")
        if not judge.is_simulated:
            raise ValueError(
                f"{key}.protocol: task=simulate doesn't know the number of scores in a {judge.protocol} "
                "judgement; to see the rest of the run type judge=pointwise"
            )


STATELESS = {"serve": "what it serves", "score": "a file of responses", "calibrate": "a file of labels",
             "probe_judge": "its replies", "train_meta_rm": "a file of labels"}  # fmt: skip


def check_states(config: RunConfig) -> None:
    """Check that what judges with `tools.state` judge was played in an environment that can give its state."""
    for judge in config.asked.judges.values():
        if not judge.tools.state:
            continue
        key = f"{judge.key}.tools.state"
        learner = config.trained_grms.get(judge.model)
        about = STATELESS.get(config.task, "")
        if config.task == "evaluate" and config.evaluate.what != "policy":
            about = "a file of labels"
        if about:
            raise ValueError(f"{key}: task={config.task} judges {about}, without states; type {key}=false")
        if learner is not None:
            raise ValueError(
                f"{key}: labelled judgements have no states; type "
                f"{config.models[judge.model].key}.train.enabled=false, or {key}=false"
            )
        if config.env.env_kind.path or config.env.env_kind.is_workflow:
            raise ValueError(
                f"{key}: env.kind={config.env.kind} gives no state; type env=custom env.target=my_module.MyEnv, an "
                f"environment that returns saved=..., or {key}=false"
            )
        if config.judge_monitor.every and config.trains_policy:
            raise ValueError(
                f"{key}: canaries and adversarial replies have no states; type judge_monitor.every=0, or {key}=false"
            )


def check_cotrain(config: RunConfig) -> None:
    """Check that GRMs that are trained are served here, sample their judgements, and are compared within groups."""
    for role, cotrain in config.trained_grms.items():
        model = config.models[role]
        key = f"{model.key}.train"
        if role not in config.judging.local_roles:
            raise ValueError(
                f"{key}.enabled: there is no local GRM to train; type judge.kind=generative, with a "
                f"{model.key}.path and a {model.key}.engine other than openai"
            )
        if config.task == "simulate":
            raise ValueError(
                f"{key}.enabled: task=simulate simulates no flow of judging tasks; type task=plan for its work and "
                f"memory, or {key}.enabled=false to simulate the rest of the run"
            )
        judge = config.judging.find_training_judge(role)
        if cotrain.labeller is not None:
            check_labeller(config, role, cotrain.labeller, f"{key}.labels_from")
        if (scores := judge.protocol_kind.scores) in ("steps", "criteria"):
            check_labels_of_parts(config, role, scores)
        if judge.protocol_kind.about == "pair" and cotrain.rollout_share > 0 and cotrain.labels_from is None:
            raise ValueError(
                f"{key}.rollout_share: the rule labels single rollouts, and a judge of pairs learns from pairs; type "
                f"{key}.labels_from=<another judge of the run>, or {key}.rollout_share=0 with rankings as "
                f"{key}.data_path"
            )
        if not judge.temperature > 0:
            raise ValueError(f"{key}.enabled: greedy judgements are all alike; type judge.temperature=1")
        if config.algorithm.estimator_kind.need == "batch":
            raise ValueError(
                f"algorithm.estimator: {config.algorithm.estimator} compares over a whole batch, and its groups may be "
                f"judged by different versions of a GRM that learns; with {key}.enabled type algorithm.estimator=grpo"
            )


def check_labels_of_parts(config: RunConfig, role: str, scores: str) -> None:
    """Check that a judge of steps or criteria has labels of these: a rule, or a judge of responses, gives none."""
    cotrain, key = config.trained_grms[role], f"{config.models[role].key}.train"
    alike = [name for name, one in config.judging.generative.items() if one.protocol_kind.scores == scores]
    others = [name for name in alike if config.judging.generative[name].model != role]
    way_out = f"{key}.labels_from={others[0] if others else f'<a .jsonl file of labels of {scores}>'}"
    if cotrain.labels_from is None and cotrain.rollout_share > 0:
        raise ValueError(
            f"{key}.rollout_share: the rule labels whole rollouts, and this judge learns from labels of {scores}; type "
            f"{way_out}, or {key}.rollout_share=0 with a file of such labels as {key}.data_path"
        )
    if cotrain.labeller is not None and cotrain.labeller not in others:
        raise ValueError(
            f"{key}.labels_from: {cotrain.labeller} says nothing of single {scores}, from which this judge learns; "
            f"type {way_out}"
        )


def check_labeller(config: RunConfig, role: str, labeller: str, key: str) -> None:
    """Check that who labels for a GRM judges in this run, and that no label goes back to the GRM itself."""
    rewards, judges = config.rewards, config.judging.judges
    known = list(dict.fromkeys([*judges, *(one.name for one in rewards.in_use())]))
    if labeller not in known:
        raise ValueError(
            f"{key}: {labeller!r} is no judge or composition of the reward, whose verdicts are there anyway; type "
            f"one of {', '.join(known)}, or a .jsonl file of labels"
        )
    waiting, seen = [(role, labeller)], {role}
    while waiting:
        learner, name = waiting.pop()
        for judge in (judges[one] for one in rewards.list_judges(name)):
            model = judge.model if judge.kind == "generative" else None
            if model == role and learner != role:
                raise ValueError(
                    f"{key}: {labeller} learns from {role} in turn, so that each would learn the other's mistakes; "
                    f"type {config.models[learner].key}.train.labels_from=null"
                )
            if model == role:
                others = [one for one in judges if judges[one].model != role or judges[one].kind != "generative"]
                raise ValueError(
                    f"{key}: {labeller} asks {role} itself, which would learn its own mistakes; type "
                    f"{key}={others[0] if others else '<a .jsonl file of labels>'}"
                )
            further = config.trained_grms[model].labeller if model in config.trained_grms else None
            if model is not None and further is not None and model not in seen:
                seen.add(model)
                waiting.append((model, further))


def check_self_judging(config: RunConfig) -> None:
    """Check that a policy that learns to judge is the judge, and that both kinds of groups can share a batch."""
    if not config.self_judging_share:
        return
    key = "algorithm.self_judging.share"
    if not config.judging.by_policy:
        judges = config.judging.generative.values()
        others = "; ".join(f"{judge.key}.model={judge.model}" for judge in judges) or "no judge asks a model"
        raise ValueError(
            f"{key}: a policy learns to judge where it is the judge as it is, and here {others}; type "
            "judge.model=policy, or train another model that judges by its own section: grm.train.enabled=true"
        )
    if config.task == "simulate":
        raise ValueError(
            f"{key}: task=simulate simulates no judging tasks; type task=plan for their work, or {key}=null to "
            "simulate the rest of the run"
        )
    judge, rollout = config.judging.find_training_judge(POLICY), config.rollout
    if judge.tools.is_set:
        raise ValueError(
            f"{judge.key}.tools.functions: the policy's batches hold judgements of one turn; type "
            f"{judge.key}.tools.functions='' {judge.key}.tools.mcp={{}}, or train the judge alone by "
            "+experiment=judge_with_tools"
        )
    if judge.temperature != rollout.temperature:
        raise ValueError(
            f"{judge.key}.temperature: a learner scores its batch at one temperature, and judgements are sampled at "
            f"{judge.temperature:g}, rollouts at {rollout.temperature:g}; type {judge.key}.temperature="
            f"{rollout.temperature:g}"
        )
    of_whole = judge.protocol_kind.about != "pair" and judge.protocol_kind.scores == "responses"
    if not of_whole and config.algorithm.self_judging.data_path is None:
        wanted = "rankings" if judge.protocol_kind.about == "pair" else f"labels of {judge.protocol_kind.scores}"
        raise ValueError(
            f"algorithm.self_judging.data_path: a rule labels single rollouts, and this judge learns from {wanted}; "
            "give a file of them, on other prompts"
        )
    if config.algorithm.overlong_buffer.share > 0 and judge.max_new_tokens > rollout.max_new_tokens:
        raise ValueError(
            "algorithm.overlong_buffer.share: answers cost more and more towards rollout.max_new_tokens = "
            f"{rollout.max_new_tokens}, and judgements may be longer; type {judge.key}.max_new_tokens="
            f"{rollout.max_new_tokens} or less"
        )
    if config.algorithm.estimator_kind.need == "batch":
        raise ValueError(
            f"algorithm.estimator: {config.algorithm.estimator} compares over a whole batch, in which rewards of "
            "answers and of judgements are on two scales; type algorithm.estimator=grpo"
        )
    if config.critic.enabled:
        raise ValueError(
            "critic.enabled: a critic learns the scale of one reward, and judgements have another than answers; type "
            "critic=none algorithm.estimator=grpo"
        )


def check_critic_alone(config: RunConfig) -> None:
    """Check that a critic is trained next to a policy that is played and judged, by a judge that doesn't change."""
    if not config.critic.enabled:
        return
    if config.task in ("train_judge_rft", "train_meta_rm"):
        raise ValueError(
            f"critic.enabled: task={config.task} uses no critic; type critic=none algorithm.estimator=grpo"
        )
    for model in (config.models[role] for role in config.trained_grms):
        raise ValueError(
            "critic.enabled: a critic learns the scale of one judge, and a GRM that learns changes it; "
            f"type critic=none algorithm.estimator=grpo, or {model.key}.train.enabled=false"
        )
