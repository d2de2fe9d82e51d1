"""What goes between the run and a worker, as frames: a length of four bytes, then MessagePack.

run -> worker   Open, Step, Close
worker -> run   Confined; Began, then one of Opened, Observed, BlamedPolicy, BlamedEnv; Closed
supervisor -> run   Ended
"""

import asyncio
import struct
import traceback
from dataclasses import replace
from typing import TypeVar

import msgspec

from grmpipe.config.keys.user_code import shorten
from grmpipe.envs.env import Action, EnvFault, Episode, Observation, Opening, PolicyFault
from grmpipe.envs.sandbox.confinement import Missing
from grmpipe.types import EnvCause

MAX_FRAME = 8 * 2**20  # bytes; a longer one is never read
MAX_DETAIL = 20_000  # characters of a traceback, or of a fault's text
MAX_TEXT = 200_000  # characters of all messages of an observation that is too long for a frame
T = TypeVar("T")
_LENGTH = struct.Struct("<I")


class Open(msgspec.Struct, frozen=True, tag=True):
    episode: Episode


class Step(msgspec.Struct, frozen=True, tag=True):
    action: Action


class Close(msgspec.Struct, frozen=True, tag=True):
    pass


class Confined(msgspec.Struct, frozen=True, tag=True):
    """The worker is confined. missing: what it couldn't give up."""

    missing: tuple[Missing, ...] = ()


class Began(msgspec.Struct, frozen=True, tag=True):
    """The environment's code runs from here on: before, it was transport."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    opening: Opening


class Observed(msgspec.Struct, frozen=True, tag=True):
    observation: Observation


class BlamedPolicy(msgspec.Struct, frozen=True, tag=True):
    """A PolicyFault."""

    text: str
    kind: str
    ends: bool = False


class BlamedEnv(msgspec.Struct, frozen=True, tag=True):
    """An EnvFault, or an exception of the environment. trace: where it was raised, or empty."""

    detail: str
    cause: EnvCause
    trace: str = ""


def report_fault(fault: PolicyFault | EnvFault) -> BlamedPolicy | BlamedEnv:
    """The report of a fault."""
    if isinstance(fault, PolicyFault):
        return BlamedPolicy(str(fault)[:MAX_DETAIL], fault.kind, fault.ends)
    trace = "".join(traceback.format_exception(fault.__cause__)) if fault.__cause__ is not None else ""
    return BlamedEnv(str(fault)[:MAX_DETAIL], fault.cause, trace[-MAX_DETAIL:])


class Closed(msgspec.Struct, frozen=True, tag=True):
    pass


class Ended(msgspec.Struct, frozen=True, tag=True):
    """All processes of the worker have ended.

    signal: the one that ended the environment's process; 0: it exited with `exit_code`.
    cpu_s:  CPU time of that process, with its children that it waited for; 0: unknown.
    limit:  which limit ended it, in words, or empty.
    output: the end of what they wrote to stdout and stderr.
    """

    signal: int
    exit_code: int
    cpu_s: float = 0.0
    limit: str = ""
    output: str = ""


Request = Open | Step | Close
Reply = Opened | Observed | BlamedPolicy | BlamedEnv | Closed
Report = Confined | Began | Reply | Ended

_encoder = msgspec.msgpack.Encoder()
requests = msgspec.msgpack.Decoder(Request)
reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


class BadFrame(Exception):
    """The other end doesn't speak this protocol: a frame is too long, or can't be decoded."""


def frame(message: Request | Report) -> bytes:
    """A message with its length. Raises BadFrame if it is too long, or holds what isn't plain data."""
    body = encode_body(message)
    return _LENGTH.pack(len(body)) + body


def encode_body(message: Request | Report) -> bytes:
    """A message without its length. Raises BadFrame."""
    try:
        body = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadFrame(f"{type(message).__name__} holds what is not plain data: {error}") from None
    if len(body) > MAX_FRAME:
        raise BadFrame(f"{type(message).__name__} takes {len(body):,} bytes, more than {MAX_FRAME:,}")
    return body


async def body_of_next(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame's message, not decoded. None at the end of the stream, in the midst of a frame too. Raises
    BadFrame.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME:
            raise BadFrame(f"a frame of {length:,} bytes, more than {MAX_FRAME:,}")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def next_message(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """The next message of `requests` or `reports`. None at the end. Raises BadFrame."""
    body = await body_of_next(reader)
    return None if body is None else decode_body(decoder, body)


def decode_body(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFrame(str(error)) from None


def fit_observation(observation: Observation) -> Observation:
    """The observation for a frame. Where it is too long, the middle is cut out of the messages that are longer than
    their share of MAX_TEXT.
    """
    messages = observation.messages
    if sum(len(message.content) for message in messages) <= MAX_FRAME // 4:
        return observation
    share = MAX_TEXT // len(messages)
    return replace(observation, messages=[replace(one, content=shorten(one.content, share)) for one in messages])
