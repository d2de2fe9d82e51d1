"""Checks a retraining from a run before anything starts.

Every refusal is a ConfigError that names the key and what to type.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from grmpipe.config.io.key_errors import section
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.data.demonstrations import Demonstrations
from grmpipe.roles.find_models import find_model
from grmpipe.roles.learners import check_divides, check_learns, check_parallel
from grmpipe.roles.machines import check_machine
from grmpipe.roles.role_placement import check_slots
from grmpipe.roles.roles import Model, Roles, resolve_roles
from grmpipe.run_dir.recorded_run import RecordedRun, open_recorded
from grmpipe.scheduler.placement import Placement, PlacementConfig, place
from grmpipe.validate.data import read_demonstrations


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRetraining:
    """A checked retraining, ready to start."""

    config: RunConfig
    policy: Model
    placement: Placement
    roles: Roles
    recorded: RecordedRun
    demonstrations: Demonstrations | None = None  # that the policy imitates


def prepare_retraining(config: RunConfig) -> PreparedRetraining:
    """Assign the learner's slots, open the recorded run, find the policy, and check that they fit each other."""
    with section(""):
        placement = place(without_time_sharing(config.placement), config.roles, config.served, config.learners)
        roles = resolve_roles(config, placement)
    check_slots(roles["learner"])
    check_parallel(config, placement)
    check_machine(config, placement)
    assert config.data.retrain_from is not None
    with section("data.retrain_from: "):
        recorded = open_recorded(Path(config.data.retrain_from))
    check_sizes(config, recorded)
    policy = find_model(roles.served["policy"], config)
    check_learns(policy, "policy")
    check_divides(config, "learner", "policy", policy.path)
    check_tokens(config, policy, recorded)
    return PreparedRetraining(
        config=config,
        policy=policy,
        placement=placement,
        roles=roles,
        recorded=recorded,
        demonstrations=read_demonstrations(config, policy),
    )


def without_time_sharing(placement: PlacementConfig) -> PlacementConfig:
    """The placement without time sharing: the learner is alone on its slots."""
    pools = {name: replace(pool, time_shared=False) for name, pool in placement.pools.items()}
    return replace(placement, pools=pools)


def check_sizes(config: RunConfig, recorded: RecordedRun) -> None:
    for key, wanted, held in (
        ("group_size", config.train.group_size, recorded.group_size),
        ("groups_per_batch", config.train.groups_per_batch, recorded.groups_per_batch),
    ):
        if wanted != held:
            raise ConfigError(f"train.{key}: {wanted}, but {recorded.rollouts} has {held}; type train.{key}={held}")
    if recorded.max_staleness > config.train.max_staleness:
        raise ConfigError(
            f"train.max_staleness: {config.train.max_staleness}, but {recorded.rollouts} has groups that were trained "
            f"{recorded.max_staleness} versions old; type train.max_staleness={recorded.max_staleness}"
        )


def check_tokens(config: RunConfig, policy: Model, recorded: RecordedRun) -> None:
    """Check that the recorded ids are this model's, by re-rendering the prompts of the first batch."""
    with section("data.retrain_from: "):
        first = recorded.batch(1)
    for group in first:
        rollout = group.rollouts[0]
        sent = rollout.turns[0].new_ids
        sampled = [i for one in group.rollouts for turn in one.turns for i in turn.completion.token_ids]
        in_env = rollout.took_s > 0  # which may have shown tools, or other messages
        if max(*sent, *sampled) >= policy.renderer.vocab_size or (
            not in_env and policy.renderer.render(group.prompt.messages) != sent
        ):
            raise ConfigError(
                f"policy.path: the tokenizer or the chat template of {config.policy.path} differs from that of "
                f"{recorded.rollouts}: the ids of prompt {group.prompt.prompt_id} differ; give the policy that "
                "the recorded run started from"
            )
