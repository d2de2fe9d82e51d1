"""Recorded calls of the policy -> the turns of a rollout, in one line. Pure: samples and renders nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from grmpipe.models.types import Completion, Message, ToolSpec
from grmpipe.types import Turn
from grmpipe.workflows.chat import ChatReply


@dataclass(slots=True, eq=False, kw_only=True)
class RecordedCall:
    """One call of the policy, with the ids that its engine saw and sampled.

    number:     in the order of the calls' starts.
    parent:     the call that it continues: its prompt begins with the parent's prompt and completion, id by id.
    new_ids:    the prompt after the parent's ids; the whole prompt without a parent.
    room:       tokens that the completion could have, and whether the context window set the bound.
    faults:     kinds of what the policy did wrong.
    env_s:      time after it in which the policy wasn't asked.
    """

    number: int
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    parent: RecordedCall | None
    prompt_ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    completion: Completion
    reply: ChatReply
    window_is_bound: bool = False
    faults: tuple[str, ...] = ()
    env_s: float = 0.0

    @property
    def conversation(self) -> tuple[Message, ...]:
        """What a call that continues this one begins with."""
        return (*self.messages, self.reply)

    @property
    def new_messages(self) -> tuple[Message, ...]:
        """The messages after the parent's conversation."""
        return self.messages if self.parent is None else self.messages[len(self.parent.conversation) :]


def find_continued_call(
    calls: Sequence[RecordedCall], messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]
) -> RecordedCall | None:
    """The call whose conversation is the longest beginning of the messages. A cut completion has no end of turn, so
    nothing continues it.
    """
    found = [
        call
        for call in calls
        if len(messages) > (length := len(call.conversation))
        and call.completion.finish_reason == "stop"
        and call.tools == tools
        and num_shared(messages, call.conversation) == length
    ]
    parents = {call.parent for call in calls}

    def fit(call: RecordedCall) -> tuple[int, bool, bool]:
        own = messages[len(call.messages)].tool_calls
        named = [one.call_id for one in own] == [one.call_id for one in call.reply.tool_calls]
        return len(call.conversation), named, call not in parents

    return max(found, key=fit, default=None)


def in_line(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """The calls in one line, in which each chain stays together; the chain with the latest call is the last.

    A chain: calls of which each continues the one before. A second continuation of the same call begins a new chain.
    """
    chains: list[list[RecordedCall]] = []
    for call in sorted(calls, key=lambda call: call.number):
        chain = next((chain for chain in chains if chain[-1] is call.parent), None)
        if chain is None:
            chains.append([call])
        else:
            chain.append(call)
    return [call for chain in sorted(chains, key=lambda chain: chain[-1].number) for call in chain]


def make_turns(line: Sequence[RecordedCall], rewards: Mapping[str, Mapping[str, float]]) -> Iterator[Turn]:
    """The turns of calls in one line. rewards: completion id -> rewards by name."""
    for place, call in enumerate(line):
        continues = place > 0 and call.parent is line[place - 1]
        yield Turn(
            new_ids=call.new_ids if continues else call.prompt_ids,
            completion=call.completion,
            rewritten=place > 0 and not continues,
            tool_calls=call.reply.tool_calls,
            replies=_replies_before(line, place + 1),
            rewards=dict(rewards.get(call.reply.completion_id, {})),
            faults=call.faults,
            env_s=call.env_s,
        )


def _replies_before(line: Sequence[RecordedCall], place: int) -> tuple[Message, ...]:
    """What the workflow said between the call before `place` and the one there.

    After a rewritten history: what no earlier call was given, without the policy's own replies, which are turns
    themselves. An assistant's message that the workflow wrote or edited is none of them.
    """
    if place == len(line):
        return ()
    call, before = line[place], line[:place]
    if call.parent is before[-1]:
        return call.new_messages
    shared = max(num_shared(call.messages, other.conversation) for other in before)
    return tuple(message for message in call.messages[shared:] if not any(same(message, one.reply) for one in line))


def num_shared(messages: Sequence[Message], others: Sequence[Message]) -> int:
    """The number of first messages in which two conversations agree."""
    pairs = zip(messages, others, strict=False)
    return next(
        (number for number, (one, other) in enumerate(pairs) if not same(one, other)), min(len(messages), len(others))
    )


def same(one: Message, other: Message) -> bool:
    """Whether two messages say the same. The ids of calls don't count: few templates show them. Nor does white space
    around the policy's own words, which clients strip: its recorded ids stay.
    """
    is_policys = one.role == "assistant"
    return (
        one.role == other.role
        and (one.content.strip() == other.content.strip() if is_policys else one.content == other.content)
        and len(one.tool_calls) == len(other.tool_calls)
        and all(
            call.name == also.name and call.arguments == also.arguments
            for call, also in zip(one.tool_calls, other.tool_calls, strict=True)
        )
    )
