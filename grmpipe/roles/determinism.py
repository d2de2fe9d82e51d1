"""Checks that a run can be repeated bit for bit (train.deterministic).

Settings that depend on the order in which answers arrive, or on the other requests in an engine, are refused. Every
refusal is a ConfigError that names the key and what to type.
"""

from collections.abc import Iterator

from grmpipe.config.engine_kinds import engines_that
from grmpipe.config.keys.entry_names import POLICY
from grmpipe.config.reward import arrival_orders
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.roles.roles import Roles
from grmpipe.scheduler.placement import Placement

FINE_TUNING = ("train_judge_rft", "train_meta_rm")
CHECKED = ("train", "plan", "simulate", *FINE_TUNING)


def check_deterministic(config: RunConfig, placement: Placement, roles: Roles) -> None:
    """Raises ConfigError for a run that shall be deterministic, and can't."""
    if config.train.deterministic and config.task in CHECKED:
        for refusal in list_refusals(config, placement, roles):
            raise ConfigError(f"train.deterministic: {refusal}, or train.deterministic=false")


def list_refusals(config: RunConfig, placement: Placement, roles: Roles) -> Iterator[str]:
    """What prevents a deterministic run: settings that depend on the order of arrival, places and engines."""
    if config.task in FINE_TUNING:
        yield f"task={config.task} learns from judgements in the order in which they arrive; type task=train"
    for role in config.trained_grms:
        yield (
            "a GRM that learns judges under a new version when its step ends; type "
            f"{config.models[role].key}.train.enabled=false"
        )
    if config.critic.enabled:
        yield "a critic values rollouts together as they arrive; type critic=none algorithm.estimator=grpo"
    if config.judging.by_policy:
        yield "a policy that judges itself judges under a new version when its step ends; type judge.model=grm"
    if POLICY in config.teachers:
        yield (
            "a policy that teaches itself scores under a new version when its step ends; type "
            "'algorithm.distill.teachers={default: teacher}' +grm@models.teacher=policy"
        )
    for model in (model for model in config.models.values() if model.policy_updates):
        yield (
            "a model that takes over the policy's weights judges or teaches under them when its step ends; type "
            f"{model.key}.policy_updates=[]"
        )
    for judge in config.judging.generative.values():
        key = judge.key
        if judge.early_stop.kind == "relaxed":
            yield (
                f"{key}.early_stop.kind=relaxed compares with the scores that came before; type "
                f"{key}.early_stop.kind=none"
            )
        if judge.principles.kind != "inline":
            yield (
                f"{key}.principles.kind=shared writes principles that failed again for the rollout that comes next; "
                f"type {key}.principles.kind=inline"
            )
    for judge in config.judging.scalar.values():
        if judge.scalar.max_batch_tokens > 1:
            key = f"{judge.key}.scalar.max_batch_tokens"
            yield f"a reward model scores together what arrives together; type {key}=1"
    yield from arrival_orders(config.rewards)
    if config.uses_meta_rm and config.meta_rm.max_batch_tokens > 1:
        yield "a meta-RM scores together what arrives together; type meta_rm.max_batch_tokens=1"
    for name, pool in placement.pools.items():  # whose work depends on the load
        if pool.elastic:
            yield f"slots of the pool {name} move with the backlog; type placement.pools.{name}.elastic=false"
        if pool.time_shared:
            yield (
                f"the pool {name} puts engines to sleep between requests; type placement.pools.{name}.time_shared=false"
            )
    able = " or ".join(engines_that(lambda kind: kind.batch_invariant))
    for served in roles.served.values():
        if not served.engine.batch_invariant:
            yield (
                f"with {served.key}.engine={served.model.engine} a request's tokens depend on its batch; type "
                f"{served.key}.engine={able}"
            )
    for placed in roles.values():
        if placed.device != "cpu":
            yield (
                f"{placed.name} is on a GPU, whose sums have no fixed order; type "
                f"placement.pools.{placed.pool}.resource=cpu"
            )
