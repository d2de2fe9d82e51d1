"""Prepared run -> its environments: where they live, how many at once, within which limits."""

import asyncio
import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from grmpipe.config.io.key_errors import section
from grmpipe.config.keys.entry_names import ENV
from grmpipe.config.run_config import RunConfig
from grmpipe.envs.env import EnvFault, Episode
from grmpipe.envs.env_factory import MakeEnv, env_factory
from grmpipe.envs.episode_slots import EpisodeSlots
from grmpipe.envs.opened_envs import OpenedEnvs
from grmpipe.envs.sandbox.crash_cleanup import sweep
from grmpipe.envs.sandbox.env_host import EnvHost, open_env_host
from grmpipe.envs.sandbox.env_hosts import EnvHosts
from grmpipe.envs.sandbox.host_member import HostMember, HostSetup
from grmpipe.judge.prompt import JudgePrompt
from grmpipe.judge.prompt_injection import TextGuard
from grmpipe.judge.tool_grm import GuardedTools, JudgeTools
from grmpipe.models.import_path import list_import_paths
from grmpipe.models.types import Message
from grmpipe.run.prepare import Prepared
from grmpipe.run.run_model import RunModel
from grmpipe.scheduler.events import EventSink, NoEvents
from grmpipe.scheduler.processes.actors import Cluster
from grmpipe.types import Prompt
from grmpipe.workflows.play_workflow import WorkflowPlayer, workflow_player

ANYTHING = Message(role="user", content="?")  # no tool sees it
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envs:
    """The environments of a run. make: a new one for each episode, unless the user's workflow plays it.

    counts: what became of those that were opened. hosts: on slots of a pool; None: they live in the run itself.
    events: gets the spans of a workflow.
    """

    slots: EpisodeSlots
    make: MakeEnv | None = None
    workflow: WorkflowPlayer | None = None
    hosts: EnvHosts | None = None
    counts: OpenedEnvs = field(default_factory=OpenedEnvs)
    events: EventSink = field(default_factory=NoEvents)
    opened: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def close(self) -> None:
        """End what is still open."""
        await self.opened.aclose()


async def start_envs(cluster: Cluster, config: RunConfig, run_dir: Path, events: EventSink) -> Envs:
    """Start what environments live in. Raises ConfigError if one can't be made, or isolated as required, where it will
    live.
    """
    env = config.env
    if env.env_kind.is_single:
        return Envs(make=env_factory(env), slots=EpisodeSlots())
    slots = EpisodeSlots(env.capacity)
    async with AsyncExitStack() as opening:
        with section("env."):
            if env.env_kind.is_workflow:
                workflow = workflow_player(env)
                opening.push_async_callback(workflow.close)
                return Envs(
                    workflow=workflow, slots=slots, counts=workflow.counts, events=events, opened=opening.pop_all()
                )
            if config.places_envs:
                hosts = await start_hosts(cluster, config, run_dir, events)
                opening.push_async_callback(hosts.close)
                return Envs(make=hosts.env, slots=slots, counts=hosts.counts, hosts=hosts, opened=opening.pop_all())
            host = await opening.enter_async_context(
                open_env_host(env, run_dir=run_dir, data=find_data(config), events=events)
            )
        if host.lacks:
            log.warning("environments run with less isolation than they should: %s", host.lacks)
        return Envs(make=host.env, slots=slots, counts=host.counts, opened=opening.pop_all())
    raise AssertionError("an exit stack that hides an exception")


async def start_hosts(cluster: Cluster, config: RunConfig, run_dir: Path, events: EventSink) -> EnvHosts:
    """Start a host on each seat of the role. Raises ValueError that begins with a key of `env`."""
    await asyncio.to_thread(sweep, run_dir)  # an earlier process of this run may have had its environments here
    members = await cluster.start_members(ENV, functools.partial(HostMember, host_setup(config, run_dir)), meet=False)
    hosts = EnvHosts(
        ENV,
        members,
        restart=functools.partial(cluster.restart_member, ENV),
        config=config.env,
        health=config.slots.health,
        events=events,
    )
    try:
        await hosts.start()
    except BaseException:
        await hosts.close()
        raise
    return hosts


async def start_judge_tools(
    prepared: Prepared, models: Mapping[str, RunModel], run_dir: Path, events: EventSink
) -> AsyncExitStack:
    """Start what the tools of judges live in, and list them once, as their prompts show them. The caller closes it."""
    async with AsyncExitStack() as opening:
        for judge in prepared.config.asked.generative.values():
            if not judge.tools.is_set:
                continue
            with section(f"{judge.key}.tools."):
                hosted = open_env_host(
                    judge.tools.make_env(), run_dir=run_dir, data=find_data(prepared.config), events=events
                )
                host = await opening.enter_async_context(hosted)
                if host.lacks:
                    log.warning("tools of %s run with less isolation than they should: %s", judge.key, host.lacks)
                env = host.env()
                try:
                    listed = await env.open(Episode(prompt=Prompt(prompt_id="tools", messages=(ANYTHING,))))
                except EnvFault as fault:
                    raise ValueError(f"mcp: {fault}") from fault
                finally:
                    await env.close()
            guard = JudgePrompt.of(judge).guard if judge.tools.state else None
            models[judge.model].tools[judge.name] = JudgeTools(
                make_env=functools.partial(make_guarded, host, guard), specs=tuple(listed.tools)
            )
        return opening.pop_all()
    raise AssertionError("an exit stack that hides an exception")


def make_guarded(host: EnvHost, guard: TextGuard | None) -> GuardedTools:
    return GuardedTools(host.env(), guard)


def host_setup(config: RunConfig, run_dir: Path) -> HostSetup:
    return HostSetup(
        config=config.env,
        run_dir=str(run_dir.absolute()),
        data=find_data(config),
        paths=tuple(list_import_paths()),
    )


def find_data(config: RunConfig) -> tuple[str, ...]:
    """The files that a configuration names, but for those of its environment."""

    def list_texts(value: object) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from itertools.chain.from_iterable(map(list_texts, value.values()))
        elif isinstance(value, Sequence):
            yield from itertools.chain.from_iterable(map(list_texts, value))

    sections = {name: value for name, value in asdict(config).items() if name != "env"}
    return tuple(sorted({str(Path(text).absolute()) for text in list_texts(sections) if is_file(text)}))


def is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # longer than a path may be; a zero byte
        return False
