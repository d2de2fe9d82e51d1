"""The runs that faults are put into. Each takes some seconds; its files say what was lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from faults.endpoint import NAME, HostileEndpoint, serve_endpoint

NUM_STEPS = 6
AGENT = Path(__file__).with_name("hostile_agent.py")
NUM_SIBLINGS = NUM_STEPS * 4 * 4
COMMON = (
    f"train.num_steps={NUM_STEPS}", "train.groups_per_batch=4", "train.group_size=4", "train.checkpoint_every=1",
    "data.num_eval_prompts=4", "judge_monitor.every=0", "tracking=none", "rollout.pause_s=1",
    "slots.health.hung_after_s=6", "slots.health.check_every_s=1", "sync.deadline_s=20",
)  # fmt: skip
JURY = (
    "+experiment=jury", "cluster=inprocess", "judge.max_failure_rate=0.9",
    "judge.limits.timeout_s=13", f"models.{NAME}.engine=openai", f"models.{NAME}.path=judge",
    "reward.vote=mean",
)  # fmt: skip
HOSTILE = (
    "+experiment=tools", "env=custom", "env.target=benchmarks.faults.hostile_tools.HostileTools",
    "env.functions=''", "env.isolation.kind=process", "env.isolation.cpu_s=2", "env.boot_s=5", "env.step_s=2",
    "env.close_s=2", "env.max_failure_rate=1", "env.attempts=4",
    "+env.options={functions: grmpipe.tiny.tools, share: 0.15}",
)  # fmt: skip
TOOLS = (*HOSTILE, "cluster=inprocess")
HOSTS = (*HOSTILE, "cluster=ray", "+placement.roles={env: {pool: judging}}")
COTRAIN = (
    "+experiment=cotrain", "cluster=inprocess", "grm.train.warmup_steps=1", "grm.train.prompts_per_batch=4",
    "grm.train.group_size=4", "grm.train.num_items=32",
)  # fmt: skip
AGENTS = (
    "+experiment=quickstart", "cluster=inprocess", "env=workflow", "env.runs_in=command",
    f"env.command=[{sys.executable},-S,{AGENT}]", "env.episode_s=10",
    "env.max_failure_rate=1", "env.attempts=4", "rollout.max_turns=12", "judge.format.truncation=middle",
)  # fmt: skip
ON_VLLM = ("+experiment=quickstart", "cluster=ray", "engine=vllm", "engine.vllm.kv_cache_mb=32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """roles: the seats with processes of their own. judges_outside: one of its judges is behind a hostile endpoint.
    has_agents: its episodes are programs. needs: a package. limit_s: of a process, from its start to its end.
    temporary_mb: of the disk for its temporary files, among them Ray's, and what a compiler writes.
    """

    name: str
    overrides: tuple[str, ...]
    roles: tuple[str, ...] = ()
    judges_outside: bool = False
    has_agents: bool = False
    needs: str = "grmpipe"
    limit_s: float = 180.0
    temporary_mb: int = 96


ALL_SCENARIOS = (
    Scenario(name="quickstart", overrides=("+experiment=quickstart", "cluster=inprocess")),
    Scenario(name="jury", overrides=JURY, judges_outside=True),
    Scenario(
        name="quickstart on Ray",
        overrides=("+experiment=quickstart", "cluster=ray"),
        roles=("policy-0", "grm-0", "learner-0"),
    ),
    Scenario(name="tools", overrides=TOOLS),
    Scenario(name="co-training", overrides=COTRAIN),
    Scenario(name="agents", overrides=AGENTS, has_agents=True),
    Scenario(name="tools on hosts", overrides=HOSTS, roles=("policy-0", "env-0", "learner-0")),
    Scenario(
        name="vLLM",
        overrides=ON_VLLM,
        roles=("policy-0", "grm-0", "learner-0"),
        needs="vllm",
        limit_s=600,
        temporary_mb=512,
    ),
)
SCENARIOS = [one for one in ALL_SCENARIOS if find_spec(one.needs)]


@contextmanager
def prepare(scenario: Scenario, seed: int) -> Iterator[tuple[tuple[str, ...], HostileEndpoint | None]]:
    """Context: the overrides of a run, with the endpoint outside of it."""
    overrides = (*scenario.overrides, *COMMON, f"seed={seed}")
    if not scenario.judges_outside:
        yield overrides, None
        return
    with serve_endpoint(seed, 0.1) as endpoint:
        yield (*overrides, f"+models.{NAME}.engine_options={{base_url: '{endpoint.url}', api_key_env: ''}}"), endpoint
