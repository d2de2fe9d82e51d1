"""Plays an episode whose loop the user owns: runs his function, and makes a rollout of what was recorded.

When time is up (env.episode_s), finished turns stay and the rollout is truncated, unless the policy wasn't asked for
the last env.step_s: then the workflow hangs, and the environment failed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, cast

from grmpipe.config.env import EnvConfig
from grmpipe.config.keys.dotted_path import find_at
from grmpipe.config.keys.user_code import MAX_CHARS, call_guarded, describe_code
from grmpipe.envs.checked_env import NO_RULES
from grmpipe.envs.env import EnvFault, PolicyFault
from grmpipe.envs.fault_owner import FaultRules, decide_fault, fault_rules, readable
from grmpipe.envs.limited_env import StageLimits
from grmpipe.envs.opened_envs import OpenedEnvs
from grmpipe.envs.play import DECIMALS_S, RolloutRequest
from grmpipe.types import Prompt, Rollout, TruncationReason
from grmpipe.workflows.chat import ChatRefused
from grmpipe.workflows.episode_chat import EpisodeChat, EpisodeChats
from grmpipe.workflows.outcome import Rewards, plain_rewards, read_rewards
from grmpipe.workflows.policy import Policy, Task
from grmpipe.workflows.recorded_calls import RecordedCall, in_line, make_turns
from grmpipe.workflows.server import Gateway, check_gateway_installed

log = logging.getLogger(__name__)

WORKFLOW = "the workflow"


class Solver(Protocol):
    """Runs the workflow of an episode: in this process, in another, or as a program."""

    async def solve(self, task: Task, policy: Policy) -> object:
        """What the workflow returned. Raises what it raised, or EnvFault if it couldn't be run to its end."""
        ...

    async def close(self) -> None:
        """End what was started for episodes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an episode ended. fault: what the policy did wrong in the end."""

    returned: object = None
    reason: TruncationReason = ""
    fault: PolicyFault | None = None


class WorkflowPlayer:
    """Plays the episodes of a run. It raises EnvFault, or what failed the engine.

    limits: on how long a workflow may run without asking the policy once its time is up, and after it was cancelled.
    owner:  the user's code, in words.
    counts: what became of the episodes' workflows.
    """

    def __init__(
        self,
        solver: Solver,
        gateway: Gateway,
        limits: StageLimits,
        rules: FaultRules = NO_RULES,
        owner: str = WORKFLOW,
    ) -> None:
        self._solver = solver
        self._gateway = gateway
        self._limits = limits
        self._rules = rules
        self._owner = owner
        self.counts = OpenedEnvs()

    async def play(
        self, chats: EpisodeChats, request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]
    ) -> Rollout:
        begun_s = asyncio.get_running_loop().time()
        episode = chats.open(request, on_first_token)
        policy = Policy(episode.chat, lambda: self._gateway.admit(episode))
        task = Task(messages=prompt.messages, info=prompt.info, prompt_id=prompt.prompt_id, seed=request.seed)
        try:
            ending = await self._ending(run_contained(self._solver.solve(task, policy), self._owner), episode)
        finally:
            episode.end()
            self._gateway.dismiss(episode)
            await policy.close()
        took_s = round(asyncio.get_running_loop().time() - begun_s, DECIMALS_S)
        return replace(make_rollout(request, prompt, episode, ending, self._owner), took_s=took_s)

    async def close(self) -> None:
        await self._solver.close()
        await self._gateway.close()

    async def _ending(self, doing: Coroutine[object, object, object], episode: EpisodeChat) -> Ending:
        """Run the workflow to its end, to a failure of the engine, or to the end of its time."""
        self.counts.opened += 1
        solving = asyncio.ensure_future(doing)
        ends: set[asyncio.Future[object]] = {solving, episode.failed}
        try:
            await asyncio.wait(ends, timeout=episode.limits.episode_s, return_when=asyncio.FIRST_COMPLETED)
            idle_s, refusal, in_time = episode.idle_s, episode.refusal, solving.done()
        finally:
            if solving.done():
                self.counts.closed += 1
            else:
                self.counts.killed += 1
                await _cancelled(solving, self._limits.close_s)
            if solving.done() and not solving.cancelled():
                solving.exception()  # it was read: asyncio would complain otherwise
        if episode.failed.done():
            episode.failed.result()
        if not in_time:
            return _out_of_time(episode, idle_s, self._limits)
        return _ended_itself(solving, refusal, self._rules, self._owner, has_acted=bool(episode.calls))


def workflow_player(config: EnvConfig) -> WorkflowPlayer:
    """Plays the workflow that the settings name. Raises ValueError, which begins with the key, for one that can't
    run.
    """
    place = config.workflow_place
    if place.by_url:
        check_gateway_installed()
    make = cast(Callable[[object, Mapping[str, object]], Solver], find_at(place.path, "runs_in"))
    program = f"the program {' '.join(config.command)}"
    return WorkflowPlayer(
        make(getattr(config, place.needs), config.options),
        Gateway(),
        StageLimits.of(config),
        fault_rules(config.policy_errors),
        program if config.command else describe_code(find_at(config.target, "target")),
    )


async def run_contained(doing: Awaitable[object], owner: str) -> object:
    """What a workflow returns. It runs in a task of its own, which passes on what would end the process."""
    with call_guarded(owner, (Exception, asyncio.CancelledError)):
        return await doing


async def _cancelled(solving: asyncio.Future[object], close_s: float) -> None:
    solving.cancel()
    _, left = await asyncio.wait({solving}, timeout=close_s)
    if left:
        log.warning("a workflow didn't end within env.close_s = %g s after it was cancelled", close_s)


def _out_of_time(episode: EpisodeChat, idle_s: float, limits: StageLimits) -> Ending:
    if not episode.calls or idle_s >= limits.step_s:
        episode_s = episode.limits.episode_s
        raise EnvFault(
            f"the workflow took longer than env.episode_s = {episode_s:g} s, and didn't ask the policy for the last "
            f"{idle_s:.1f} s",
            "timeout",
        )
    return Ending(reason="time")


def _ended_itself(
    solving: asyncio.Future[object], refusal: ChatRefused | None, rules: FaultRules, owner: str, *, has_acted: bool
) -> Ending:
    """refusal: of the workflow's last request. What the workflow raises after it is its answer to the refusal."""
    reason: TruncationReason = "" if refusal is None else refusal.reason
    try:
        return Ending(returned=solving.result(), reason=reason)
    except EnvFault:
        raise
    except (Exception, asyncio.CancelledError) as error:  # the user's code may raise anything
        if reason and not isinstance(error, PolicyFault):
            log.info("a workflow ended with %s: %s, after: %s", type(error).__name__, error, refusal)
            return Ending(reason=reason)
        fault = decide_fault(error, owner, rules, has_acted=has_acted)
        if isinstance(fault, PolicyFault):
            return Ending(fault=readable(fault, MAX_CHARS), reason=reason)
        raise fault from error


def make_rollout(
    request: RolloutRequest, prompt: Prompt, episode: EpisodeChat, ending: Ending, owner: str = WORKFLOW
) -> Rollout:
    """The recorded calls as a rollout. Raises EnvFault if there are none, or for rewards that are no numbers."""
    line = in_line(episode.calls)
    if not line:
        refused = "" if episode.refusal is None else f"; it was refused: {episode.refusal}"
        raise EnvFault(f"{owner} ended without a turn of the policy{refused}", "protocol")
    if ending.fault is not None:
        line[-1].faults += (ending.fault.kind,)
    completion_ids = [call.reply.completion_id for call in line]
    rewards: Rewards = read_rewards(plain_rewards(ending.returned, owner), completion_ids, owner)
    reason = ending.reason or find_truncation(line[-1])
    return Rollout(
        group_id=request.group_id,
        sibling=request.sibling,
        turns=tuple(make_turns(line, rewards)),
        status="truncated" if reason else "finished",
        reason=reason,
        attempt=request.attempt,
        opening=() if line[0].messages == prompt.messages else line[0].messages,
        boot_s=episode.boot_s,
    )


def find_truncation(last: RecordedCall) -> TruncationReason:
    """What cut the last turn."""
    if last.completion.finish_reason != "length":
        return ""
    return "context" if last.window_is_bound else "tokens"
