"""Demonstrations that the policy imitates beside its own rollouts: rows of a file, as training samples."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from grmpipe.config.keys.user_code import format_value
from grmpipe.data.prompts import parse_message, refuse_half_characters
from grmpipe.data.rows import Findings, Row, read_rows
from grmpipe.data.rubrics import require_text
from grmpipe.data.stream import permute
from grmpipe.models.types import Message, VersionSpan
from grmpipe.types import TrainingSample

if TYPE_CHECKING:
    from grmpipe.models.chat.renderer import Renderer

log = logging.getLogger(__name__)
AUTHOR = "demonstration"  # in place of the model that sampled a token
Conversation = tuple[Message, ...]
ANY_REPLY = (Message(role="user", content="-"),)


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Conversations in the order in which optimizer steps imitate them: each epoch shuffled anew.

    renderer: the policy's, which samples what assistants say here.
    """

    conversations: Sequence[Conversation]
    renderer: Renderer
    seed: int = 0

    def draw(self, update: int, count: int) -> list[TrainingSample]:
        """The samples of an optimizer step, from 0. One that the policy's window can't hold is left out, and logged."""
        size, found = len(self.conversations), []
        for place in range(update * count, (update + 1) * count):
            epoch, item = divmod(place, size)
            row = int(permute(size, self.seed, epoch)[item])
            sample = make_sample(self.conversations[row], self.renderer, name=f"demonstration {row + 1}")
            if len(sample.token_ids) > self.renderer.context_tokens > 0:
                log.warning(
                    "algorithm.sft.path: %s has %d tokens, more than the policy's window of %d: it isn't trained",
                    sample.group_id, len(sample.token_ids), self.renderer.context_tokens,
                )  # fmt: skip
                continue
            found.append(sample)
        num_tokens = sum(sum(sample.loss_mask) for sample in found)
        return [
            replace(sample, advantages=tuple(trained / num_tokens for trained in sample.loss_mask)) for sample in found
        ]


def make_sample(conversation: Conversation, renderer: Renderer, name: str) -> TrainingSample:
    """What assistants say, with the token that ends their turn, after the prompts that the policy would have had."""
    ended = renderer.extend(ANY_REPLY)
    unended = renderer.extend(ANY_REPLY, ended=False)
    end_ids = unended[: len(unended) - len(ended)] or renderer.stop_token_ids[:1]
    token_ids: tuple[int, ...] = ()
    loss_mask: tuple[int, ...] = ()
    versions: tuple[VersionSpan, ...] = ()
    begin = 0
    for place, message in enumerate(conversation):
        if message.role != "assistant":
            continue
        before = conversation[begin:place]
        between = renderer.extend(before) if token_ids else renderer.render(before)
        said = (*renderer.encode_inserted(message.content), *end_ids)
        token_ids += between + said
        start = len(token_ids) - len(said)
        versions += (VersionSpan(model=AUTHOR, version=0, start=start, end=len(token_ids)),)
        loss_mask += (0,) * len(between) + (1,) * len(said)
        begin = place + 1
    zeros = (0.0,) * len(token_ids)
    return TrainingSample(
        group_id=name, sibling=0, segment=0, token_ids=token_ids, loss_mask=loss_mask,
        sampler_logprobs=zeros, advantages=zeros, versions=versions,
    )  # fmt: skip


def load_demonstrations(path: str) -> tuple[Conversation, ...]:
    """All conversations of a .jsonl or .parquet file, in TRL's columns: `messages`, or `prompt` and `completion`, each
    a text or a list of {role, content}; a prompt that is a text is the user's message.

    ValueError names file, line (Parquet: row), field and what was expected.
    """
    file = Path(path)
    findings = Findings(file)
    fields = ("messages", "prompt", "completion")
    rows = tuple(parse_conversation(row, where) for _, where, row in read_rows(file, fields, findings))
    findings.report()
    if not rows:
        raise ValueError(
            f"{file}: holds no demonstrations; a line looks like "
            '{"prompt": "What is 6 x 7?", "completion": "6 x 7 = 42"}'
        )
    return rows


def parse_conversation(row: Row, where: str) -> Conversation:
    row = {field: value for field, value in row.items() if value is not None}
    if ("messages" in row) == ("prompt" in row) or ("prompt" in row) != ("completion" in row):
        raise ValueError(
            f"{where}: expected the field messages, or the fields prompt and completion; its fields: "
            f"{', '.join(row) or 'none'}"
        )
    fields = {"messages": ""} if "messages" in row else {"prompt": "user", "completion": "assistant"}
    messages = tuple(
        message for field, role in fields.items() for message in parse_field(row[field], role, f"{where}: {field}")
    )
    if messages[-1].role != "assistant" or messages[0].role == "assistant":
        raise ValueError(
            f"{where}: expected a conversation that an assistant's message ends and another one begins; its roles: "
            f"{', '.join(message.role for message in messages)}"
        )
    refuse_half_characters(((f"message {index + 1}", message.content) for index, message in enumerate(messages)), where)
    return messages


def parse_field(value: object, role: str, where: str) -> Iterator[Message]:
    """role: of a text; empty: a text isn't taken."""
    if role and isinstance(value, str):
        yield Message(role=role, content=require_text(value, where))
        return
    if not isinstance(value, list) or not value:
        expected = "a text or a list" if role else "a list"
        raise ValueError(f"{where}: expected {expected} of {{role, content}}, got {format_value(value)}")
    yield from (parse_message(message, f"{where}[{index}]") for index, message in enumerate(value))
