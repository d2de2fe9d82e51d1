"""What the wires have in common: what one asks, what it is answered, how long its client waits; and the texts that
trainers send, as rows of task=score. Pure.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from grmpipe.config.keys.user_code import format_value
from grmpipe.data.rows import Findings, Row, parse_json
from grmpipe.data.templated import BEGINNINGS, ENDS, FORMS, remove_end_tokens, split_templated
from grmpipe.models.chat.tool_call_checks import quote_start


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A response that a trainer wants judged.

    row:        a row of task=score without its responses.
    response:   a text, or messages.
    group_id:   of the siblings; empty: those to an equal row.
    group_size: how many they are, where the row says it; None: the URL may.
    """

    row: Row
    response: str | list[object]
    group_id: str = ""
    group_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What a trainer gets for a response. imputed: why the judge has no verdict on it, so that it has the mean of its
    siblings; empty: the judge's own.
    """

    value: float
    imputed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How a trainer asks a reward model at a URL.

    path:      of the URL; {judge} is the name of a judge or composition, or `reward`.
    fields:    of its request, in words for an error.
    read:      a request -> the responses in it. Raises ValueError that begins with the field.
    write:     the request and the rewards, in the order of `read` -> the answer, as JSON.
    timeout_s: how long the client waits for an answer; None: as long as it takes.
    tries:     how often it asks until it gives up.
    gap_s:     longest time between two of them.
    """

    path: str
    fields: str
    read: Callable[[Row], list[Asked]]
    write: Callable[[Row, Sequence[Reward]], object]
    timeout_s: float | None
    tries: int = 1
    gap_s: float = 0.0


# What makes an object in a label fields of the row: without them it is the reference itself, as tests of code are.
LABEL_FIELDS = ("reference", "rubric", "source", "messages", "prompt", "prompt_id", "info", "group_id", "group_size")
LABEL = Path("label")
BEGINNING = re.compile(rf"(?:\s*+(?:{'|'.join(map(re.escape, BEGINNINGS))}))*+\s*+")
TAIL = 64  # characters of a prompt by which the rest of one is found that was cut from the left


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPrompt:
    """A prompt as a trainer sent it.

    text:  empty where it sent messages.
    row:   its field of a row.
    begun: what the template has written of the response, such as `<think>` and a line break.
    ends:  tokens that may end the response.
    """

    text: str
    row: Row
    begun: str = ""
    ends: tuple[str, ...] = ENDS

    def complete(self, response: str) -> str:
        """The whole response: with what the template wrote of it, without its end tokens."""
        return self.begun + remove_end_tokens(response, self.ends)


def read_prompt(prompt: object, where: str) -> SentPrompt:
    """A text, templated or plain, or messages. Raises ValueError."""
    if isinstance(prompt, list):
        return SentPrompt(text="", row={"messages": prompt})
    text = require_string(prompt, where, "a text, or messages (a list of {role, content})")
    try:
        conversation = split_templated(text)
    except ValueError as error:
        raise ValueError(f"{where}: can't be taken apart into messages: {error}") from None
    if conversation is None:
        return SentPrompt(text=text, row={"prompt": text})
    if conversation.begun is None:
        raise ValueError(
            f"{where}: ends with a complete message, expected the header of the assistant's: "
            f"{quote_start(text[-TAIL:])!r}; template prompts with add_generation_prompt"
        )
    messages: list[object] = [{"role": one.role, "content": one.content} for one in conversation.messages]
    return SentPrompt(text=text, row={"messages": messages}, begun=conversation.begun, ends=conversation.ends)


def make_asked(row: Row, response: str | list[object], label: Row) -> Asked:
    """The question about a response. row: of its prompt; a prompt in the label, which is from `read_label`, replaces
    it. Raises ValueError.
    """
    fields = dict(label)
    group_id, group_size = fields.pop("group_id", None), fields.pop("group_size", None)
    if group_id is not None and (isinstance(group_id, bool) or not isinstance(group_id, str | int)):
        raise ValueError(f"label.group_id: expected a text or a whole number, got {format_value(group_id)}")
    if group_size is not None and (isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1):
        raise ValueError(f"label.group_size: expected a whole number from 1 on, got {format_value(group_size)}")
    return Asked(
        row=fields if {"messages", "prompt"} & fields.keys() else row | fields,
        response=response,
        group_id="" if group_id is None else str(group_id),
        group_size=group_size,
    )


def cut_response(query: str, prompt: SentPrompt, where: str) -> str:
    """What stands behind the prompt in a query that was decoded from the tokens of both. Raises ValueError.

    The prompt alone says where the response begins: it may hold the template's markers itself.
    """
    for text in (prompt.text, unicodedata.normalize("NFC", prompt.text)):  # many tokenizers normalise
        bare, whole = text[skip_beginning(text) :], query[skip_beginning(query) :]
        if whole.startswith(bare):
            return whole[len(bare) :]
        # The trainer may have cut the prompt from the left: then the query begins with the rest of it.
        tail = bare[-TAIL:]
        place = query.find(tail, 0, len(text))
        while place >= 0:
            end = place + len(tail)
            if text.endswith(query[:end]):
                return query[end:]
            place = query.find(tail, place + 1, len(text))
    # A decoder may write other white space around special tokens: then as many headers belong to the prompt as it has.
    for form in FORMS.values():
        headers, found = list(form.header.finditer(prompt.text)), list(form.header.finditer(query))
        if headers and len(found) >= len(headers):
            end = found[len(headers) - 1].end()
            if squeeze(query[:end]) == squeeze(prompt.text[: headers[-1].end()]):
                return query[end:].lstrip().removeprefix(prompt.begun.strip())
    raise ValueError(
        f"{where}: expected the prompt at its beginning, {quote_start(prompt.text)!r}, got {quote_start(query)!r}"
    )


def skip_beginning(text: str) -> int:
    match = BEGINNING.match(text)
    return match.end() if match else 0


def squeeze(text: str) -> str:
    """The text without white space and without what stands before a conversation."""
    return "".join(unicodedata.normalize("NFC", text[skip_beginning(text) :]).split())


def read_label(label: object, where: str) -> Row:
    """The fields of a row that a label gives: those of an object, or of its JSON text, that has one of LABEL_FIELDS;
    else the label is the reference, and an empty one is none. Raises ValueError.
    """
    if label is None or (isinstance(label, str) and not label.strip()):
        return {}
    found = label
    if isinstance(label, str):
        try:
            found = parse_json(label, where, Findings(LABEL)) if label.lstrip().startswith("{") else label
        except ValueError:
            found = label  # such as a set in LaTeX
    if isinstance(found, dict) and found.keys() & set(LABEL_FIELDS):
        if given := found.keys() & {"response", "responses"}:
            raise ValueError(f"{where}: has the field {min(given)}, which is the policy's to write")
        return {name: value for name, value in found.items() if value is not None}
    if isinstance(label, str) or (isinstance(label, int | float) and not isinstance(label, bool)):
        return {"reference": label}
    if isinstance(label, dict):
        return {"reference": json.dumps(label, sort_keys=True)}
    raise ValueError(f"{where}: expected a text, a number or an object, got {format_value(label)}")


def require_string(value: object, where: str, expected: str = "a text") -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: expected {expected}, got {format_value(value)}")
    return value
