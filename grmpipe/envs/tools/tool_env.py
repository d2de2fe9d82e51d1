"""The environment of tools: runs the policy's calls, and ends with its first turn without one."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from grmpipe.config.env import ToolCallLimits
from grmpipe.config.keys.user_code import UserCodeError, call_guarded, describe_code
from grmpipe.envs.env import Action, EnvFault, Episode, Observation, Opening, PolicyFault
from grmpipe.envs.fault_owner import fault_rules, is_answer_to_call
from grmpipe.envs.tools.function_tools import FunctionTool, are_replayable, load_tools
from grmpipe.envs.tools.mcp_tools import McpServers, OpenServers
from grmpipe.models.types import Message, ToolCall, ToolSpec
from grmpipe.scheduler.event_loop import TimeIsUp, within

RAISED = "raised"  # the kind of a fault: a tool raised an exception about its call
NOTED: set[tuple[str, str]] = set()  # tools, and what they raised
log = logging.getLogger(__name__)


class Tool(Protocol):
    """A tool that the policy may call."""

    @property
    def spec(self) -> ToolSpec: ...

    async def call(self, call: ToolCall) -> str:
        """The result as text. Raises PolicyFault or EnvFault."""
        ...


class ToolEnv:
    """Shows the prompt's messages, and tools. Wrong calls are answered in text: they are the policy's.

    functions: dotted path of a module, whose functions are tools; empty: none. A module that sets `replayable = True`
               says that calls may be repeated, and bring the same results then: see Opening.
    servers:   further tools.
    limits:    on the calls of a turn.
    """

    def __init__(
        self, functions: str = "", servers: McpServers | None = None, limits: ToolCallLimits | None = None
    ) -> None:
        self._tools: dict[str, Tool] = {tool.spec.name: tool for tool in (load_tools(functions) if functions else ())}
        self._replayable = servers is None and bool(functions) and are_replayable(functions)
        self._servers = servers
        self._limits = limits or ToolCallLimits()
        self._rules = fault_rules(self._limits.policy_errors)
        self._opened: OpenServers | None = None
        self._state = b""  # that functions with a State read

    async def open(self, episode: Episode) -> Opening:
        self._state = episode.saved
        if self._servers is not None:
            self._opened = await self._servers.open()
            for tool in self._opened.tools:
                self._add(tool)
        specs = tuple(tool.spec for tool in self._tools.values())
        return Opening(messages=episode.prompt.messages, tools=specs, replayable=self._replayable)

    async def step(self, action: Action) -> Observation:
        if not action.tool_calls and not action.errors:
            return Observation(done=True)
        messages, faults = [], []
        results = await self._results(action.tool_calls, action.left_s)
        for call, result in zip(action.tool_calls, results, strict=True):
            if isinstance(result, PolicyFault):
                faults.append(result.kind)
            messages.append(Message(role="tool", content=str(result), name=call.name, tool_call_id=call.call_id))
        messages += [Message(role="tool", content=error) for error in action.errors]
        return Observation(messages=messages, faults=(*faults, *("malformed" for _ in action.errors)))

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    def _add(self, tool: Tool) -> None:
        name = tool.spec.name
        if name in self._tools:
            raise EnvFault(f"two tools are called {name}; rename one, or leave its server out of env.mcp", "protocol")
        self._tools[name] = tool

    async def _results(self, calls: Sequence[ToolCall], within_s: float) -> list[str | PolicyFault]:
        """The results in the calls' order. Raises the first EnvFault, or what a tool raised, and ends the others."""
        room = asyncio.Semaphore(self._limits.max_parallel_calls)
        end_s = asyncio.get_running_loop().time() + min(self._limits.turn_s, within_s)
        running = [asyncio.ensure_future(self._result_in_time(call, room, end_s)) for call in calls]
        try:
            return list(await asyncio.gather(*running))
        finally:
            if left := [each for each in running if not each.done()]:
                for each in left:
                    each.cancel()
                await asyncio.wait(left)

    async def _result_in_time(self, call: ToolCall, room: asyncio.Semaphore, end_s: float) -> str | PolicyFault:
        """A limit that passes is the call's result: what a call does follows from its arguments."""
        async with room:
            left_s = end_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                return PolicyFault(f"{call.name} was not called: the calls before it took too long", "timeout")
            limit_s = min(self._limits.call_s, left_s)
            try:
                return await within(limit_s, self._result(call), f"env.step, {call.name}")
            except TimeIsUp:
                return PolicyFault(f"{call.name} did not end within {limit_s:.3g} s, and was given up", "timeout")
            except PolicyFault as fault:
                return fault

    async def _result(self, call: ToolCall) -> str:
        tool = self._tools.get(call.name)
        if tool is None:
            raise PolicyFault(f"there is no tool {call.name}; known: {', '.join(self._tools)}", "unknown_tool")
        try:
            with call_guarded(f"the tool {describe_owner(tool)}", (PolicyFault, EnvFault)):
                return await (tool.call(call, self._state) if isinstance(tool, FunctionTool) else tool.call(call))
        except UserCodeError as error:
            if not is_answer_to_call(error, self._rules):
                raise
            kind = type(error.__cause__).__name__
            if (call.name, kind) not in NOTED:
                NOTED.add((call.name, kind))
                log.warning("%s; its caller reads that as the result (env/policy_faults_%s)", error, RAISED)
            raise PolicyFault(f"{call.name} raised {kind}: {error.__cause__}", RAISED) from error


def describe_owner(tool: Tool) -> str:
    """The function of a tool, or the name of one on a server."""
    return describe_code(tool.function) if isinstance(tool, FunctionTool) else tool.spec.name
