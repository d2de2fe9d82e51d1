"""Checks that the environment can be made, and that policy, limits and capacity fit it."""

import asyncio

from grmpipe.config.io.key_errors import section
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.envs.env_factory import env_factory
from grmpipe.envs.fault_owner import exception_at
from grmpipe.envs.sandbox.env_host import check_isolation
from grmpipe.envs.tools.mcp_tools import check_mcp_installed, check_servers
from grmpipe.models.chat.tool_calls import FORMATS
from grmpipe.models.types import Message, ToolSpec
from grmpipe.roles.roles import Model
from grmpipe.workflows.play_workflow import workflow_player

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
        if not (config.places_envs and config.cluster.address is not None):  # else each host checks its own machine
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
    if not policy.renderer.takes_tools:
        raise ConfigError(
            f"policy.chat_template: the chat template of {config.policy.path} has no place for tools; give a model "
            "that knows tools, or as policy.chat_template a Jinja file that lists them"
        )
    if policy.renderer.tool_parser_name is None:
        raise ConfigError(
            f"policy.tool_parser: the chat template of {config.policy.path} asks for calls in a format that is not "
            f"known here; type policy.tool_parser={', '.join(FORMATS)}, or the dotted path of your own"
        )
    with section("policy."):
        policy.renderer.render((Message(role="user", content="?"),), (PROBE,))
        policy.renderer.extend((Message(role="tool", content="!", name=PROBE.name),), (PROBE,))
    if config.rollout.max_turns < 2:
        raise ConfigError(
            "rollout.max_turns: 1 ends a rollout with its first call, before any result is read; type "
            "rollout.max_turns=8, or as many calls as a task may need and one turn for the answer"
        )
