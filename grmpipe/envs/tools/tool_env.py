"""The environment of typed functions: runs the policy's calls, and ends with its first turn without one. No model."""

from __future__ import annotations

from grmpipe.envs.env import Action, Episode, Observation, Opening, PolicyFault
from grmpipe.envs.tools.function_tools import specs_of, tools_of
from models.types import Message, ToolCall


class ToolEnv:
    """Shows the prompt's messages and the tools of a module. Wrong calls are answered in text: they are the policy's.

    functions: dotted path of the module.
    """

    def __init__(self, functions: str) -> None:
        self._tools = {tool.spec.name: tool for tool in tools_of(functions)}

    async def open(self, episode: Episode) -> Opening:
        return Opening(messages=episode.prompt.messages, tools=specs_of(list(self._tools.values())))

    async def step(self, action: Action) -> Observation:
        if not action.tool_calls and not action.errors:
            return Observation(done=True)
        messages, faults = [], []
        for call in action.tool_calls:
            try:
                text = await self._result(call)
            except PolicyFault as fault:
                text = str(fault)
                faults.append(fault.kind)
            messages.append(Message(role="tool", content=text, name=call.name, tool_call_id=call.call_id))
        messages += [Message(role="tool", content=error) for error in action.errors]
        return Observation(messages=messages, faults=(*faults, *("malformed" for _ in action.errors)))

    async def close(self) -> None:
        """It holds nothing."""

    async def _result(self, call: ToolCall) -> str:
        tool = self._tools.get(call.name)
        if tool is None:
            raise PolicyFault(f"there is no tool {call.name}; known: {', '.join(self._tools)}", "unknown_tool")
        return await tool.call(call)
