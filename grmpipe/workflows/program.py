"""Workflows as programs: one process group per episode, which asks the policy at the gateway.

stdin    the task: {"messages": [..], "info": {..}, "prompt_id": "..", "seed": 0, "options": {..}}
env      OPENAI_BASE_URL (and GRMPIPE_BASE_URL), OPENAI_API_KEY
stdout   nothing: the judge alone decides; else its last line is the reward as JSON: a number, or numbers by name
exit     0; anything else is a failure of the environment, unless stderr ends with the traceback of an exception that is
         the policy's doing (env.policy_errors)
"""

import asyncio
import contextlib
import os
import re
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import msgspec

from grmpipe.envs.env import EnvFault
from grmpipe.envs.fault_owner import RaisedElsewhere
from grmpipe.envs.process_group import DIED_BY_SIGNAL, end_group, last_bytes, start_group, wait_exited
from grmpipe.workflows.chat_json import message_json
from grmpipe.workflows.policy import Policy, Task

KEPT_OUTPUT_BYTES = 1 << 20
SHOWN_ERROR_CHARS = 1000
EXCEPTION = re.compile(r"([A-Za-z_]\w*(?:\.\w+)+)(?::|$)")


class Program:
    """A program, started for each episode."""

    def __init__(self, command: Sequence[str], options: Mapping[str, object]) -> None:
        self._command, self._options = tuple(command), dict(options)

    async def solve(self, task: Task, policy: Policy) -> object:
        place = {
            "GRMPIPE_BASE_URL": policy.base_url,
            "OPENAI_BASE_URL": policy.base_url,
            "OPENAI_API_KEY": policy.api_key,
        }
        try:
            process = await start_group(self._command, env=os.environ | place)
        except OSError as error:
            raise EnvFault(f"the program can't be started: {error}", "boot") from error
        try:
            return await self._result(process, task)
        finally:
            await asyncio.shield(end_group(process))

    async def close(self) -> None:
        """Every episode ends its own process."""

    async def _result(self, process: Process, task: Task) -> object:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        streams = (process.stdout, process.stderr)
        reading = [asyncio.ensure_future(last_bytes(stream, KEPT_OUTPUT_BYTES)) for stream in streams]
        try:
            with contextlib.suppress(ConnectionError):  # it need not read its task
                messages = [message_json(message) for message in task.messages]
                process.stdin.write(
                    msgspec.json.encode({**asdict(task), "messages": messages, "options": self._options})
                )
                await process.stdin.drain()
            process.stdin.close()
            await wait_exited(process)
            code = await end_group(process)  # what it left in the background holds the pipes open
            output, errors = [await one for one in reading]
            assert code is not None, "its pipes are closed"
        finally:
            for one in reading:
                one.cancel()
        if code:
            raise failure(code, errors.decode(errors="replace").strip())
        return reward_in(output.decode(errors="replace"))


def failure(code: int, errors: str) -> Exception:
    shown = errors[-SHOWN_ERROR_CHARS:]
    if code > DIED_BY_SIGNAL or code < 0:
        number = -code if code < 0 else code - DIED_BY_SIGNAL
        return EnvFault(f"the program died by signal {number}: {shown}", "died")
    return RaisedElsewhere(f"the program exited with {code}: {shown}", find_exception(errors))


def find_exception(errors: str) -> list[str]:
    """The exception that ended a Python program, by the last line of its traceback."""
    traced = errors.rpartition("Traceback (most recent call last)")[1]
    named = EXCEPTION.match(errors.splitlines()[-1]) if traced else None
    return [named[1]] if named else []


def reward_in(output: str) -> object:
    """The last line as JSON; None if nothing was printed. Raises EnvFault (protocol)."""
    lines = output.split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    if not last:
        return None
    try:
        return msgspec.json.decode(last)
    except msgspec.DecodeError as error:
        raise EnvFault(
            f"the last line that the program printed is no reward in JSON ({last[:200]!r}): {error}; print its log "
            "to stderr",
            "protocol",
        ) from error
