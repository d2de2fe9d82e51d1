"""Conversations that a chat template has turned into text, as messages again: by the template's markers, without a
tokenizer. Pure.

Trainers store and send prompts in this form, with special tokens (`<|im_start|>user ..`) or without them (`user ..`). A
text is taken apart only where its markers have one meaning; all else is refused with a quote.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from grmpipe.models.chat.tool_call_checks import quote_start
from grmpipe.models.types import Message

# What stands before a conversation, or fills up its left side.
BEGINNINGS = (
    "<s>",
    "<bos>",
    "<pad>",
    "<|begin_of_text|>",
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<｜begin▁of▁sentence｜>",
)
# Tokens that end a response or fill up its right side. `</s>` is HTML too, so it counts only behind Mistral's prompts.
ENDS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|finetune_right_pad_id|>",
    "<|eot|>", "<end_of_turn>", "<turn|>", "<|end|>", "<eos>", "<pad>", "<｜end▁of▁sentence｜>",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateForm:
    """How a family of chat templates writes a conversation.

    header:    a regular expression for what begins a message; its first group that matched names the role.
    roles:     that name -> the role.
    ends:      what ends a message.
    needs_end: whether each message has its end; without it the next header may end one.
    leads:     whether a system message stands before the first header.
    """

    header: re.Pattern[str]
    roles: Mapping[str, str]
    ends: tuple[str, ...]
    needs_end: bool = True
    leads: bool = False


ROLES = {name: name for name in ("system", "user", "assistant", "tool")}
LLAMA_ROLES = ROLES | {"ipython": "tool"}
# Read from the chat templates of Qwen2.5, Qwen3, LFM2 and Nemotron 3; Llama 3 and 4; Gemma 2 to 4; Mistral 7B v0.1 to
# v0.3 and Small 3; DeepSeek-V3 and R1; Phi-3 and GLM-4.
FORMS: Mapping[str, TemplateForm] = {
    "ChatML": TemplateForm(header=re.compile(r"<\|im_start\|>(\w+)\n"), roles=ROLES, ends=("<|im_end|>",)),
    "Llama 3": TemplateForm(
        header=re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n"),
        roles=LLAMA_ROLES,
        ends=("<|eot_id|>", "<|eom_id|>"),
    ),
    "Llama 4": TemplateForm(
        header=re.compile(r"<\|header_start\|>(\w+)<\|header_end\|>\n\n"), roles=LLAMA_ROLES, ends=("<|eot|>",)
    ),
    "Gemma": TemplateForm(
        header=re.compile(r"<start_of_turn>(\w+)\n"),
        roles={"user": "user", "model": "assistant"},
        ends=("<end_of_turn>",),
    ),
    "Gemma 4": TemplateForm(
        header=re.compile(r"<\|turn>(\w+)\n"),
        roles={"system": "system", "user": "user", "model": "assistant"},
        ends=("<turn|>",),
    ),
    "Mistral": TemplateForm(
        header=re.compile(r"\[(SYSTEM_PROMPT|/?INST)\]"),
        roles={"SYSTEM_PROMPT": "system", "INST": "user", "/INST": "assistant"},
        ends=("[/SYSTEM_PROMPT]", "</s>"),
        needs_end=False,
    ),
    "DeepSeek": TemplateForm(
        header=re.compile(r"<｜(User|Assistant)｜>"),
        roles={"User": "user", "Assistant": "assistant"},
        ends=("<｜end▁of▁sentence｜>",),
        needs_end=False,
        leads=True,
    ),
    "Phi or GLM": TemplateForm(
        header=re.compile(r"<\|(system|user|assistant|observation)\|>\n?"),
        roles=ROLES | {"observation": "tool"},
        ends=("<|end|>",),
        needs_end=False,
    ),
}
OTHER_MARKER = re.compile(r"<[|｜][^<>\s]{1,40}>")  # what a template of another family begins with
EMPTY_THOUGHT = re.compile(r"\A<think>\s*</think>\s*")  # what templates write where an answer had no thought


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A templated text, taken apart.

    messages: the complete ones.
    begun:    the assistant's message that the text begins and doesn't end: empty where a prompt asks for a response,
              `<think>` and a line break where its template begins the thought; None: the last message is complete.
    ends:     the tokens that end a response in this template.
    """

    messages: tuple[Message, ...]
    begun: str | None
    ends: tuple[str, ...] = ENDS


def split_templated(text: str) -> Conversation | None:
    """The messages of a conversation with its special tokens, without empty system messages. None for a text without
    markers. Raises ValueError with a quote for one that has them in an order that no template writes, or begins with
    those of another family.
    """
    first = {name: match.start() for name, form in FORMS.items() if (match := form.header.search(text))}
    if not first:
        if OTHER_MARKER.match(strip_beginnings(text)):
            raise ValueError(f"{quote(text)} has markers of none of the known templates ({', '.join(FORMS)})")
        return None
    name = min(first, key=first.__getitem__)
    form, lead = FORMS[name], strip_beginnings(text[: first[name]])
    messages: list[Message] = []
    if lead and form.leads:
        messages.append(Message(role="system", content=lead))
    elif lead:
        raise ValueError(f"expected {name}'s first marker at the beginning, found {quote(lead)} before it")
    headers = list(form.header.finditer(text, first[name]))
    for header, following in zip(headers, [*headers[1:], None], strict=True):
        role = form.roles.get(header[1])
        if role is None:
            raise ValueError(f"{quote(header[0])}: {name} has the roles {', '.join(form.roles)}")
        content = text[header.end() : len(text) if following is None else following.start()]
        whole = remove_end_tokens(content, (*form.ends, *BEGINNINGS) if following is None else form.ends)
        if stray := next((end for end in form.ends if end in whole), None):
            raise ValueError(f"{name}'s {stray} stands within a message: {quote(whole[whole.index(stray) :])}")
        is_ended = whole != content
        if following is None and role == "assistant" and not is_ended:
            return Conversation(messages=tuple(messages), begun=content, ends=(*ENDS, *form.ends))
        if not is_ended and form.needs_end:
            raise ValueError(f"a message of {name} has no {form.ends[0]}: {quote(content)}")
        whole = whole if form.needs_end else whole.strip()
        if role != "system" or whole.strip():
            messages.append(Message(role=role, content=EMPTY_THOUGHT.sub("", whole) if role == "assistant" else whole))
    return Conversation(messages=tuple(messages), begun=None, ends=(*ENDS, *form.ends))


# A prompt without its special tokens, in which only the names of the roles are left: Qwen's and Gemma's, then Llama's.
STRIPPED = tuple(
    (re.compile(rf"(?:system{gap}(?P<system>.*?){between})?user{gap}(?P<user>.*){between}{last}{gap}", re.DOTALL), name)
    for gap, between, last, name in (
        ("\n", "\n", "(?:assistant|model)", r"^(?:{})$"),
        ("\n\n", "", "assistant", r"(?:{})\n\n"),
    )
)


def split_stripped(text: str) -> Conversation | None:
    """The messages of a prompt that was decoded without its special tokens: at most a system message, a user's, then
    the assistant's header. None for a text that isn't one; ValueError with a quote for one that a role's name within a
    message makes ambiguous, as a conversation of several turns is.
    """
    text, begun = split_begun(text)
    if not text.endswith(("assistant\n", "model\n", "assistant\n\n")):  # or each `user` in it would be tried
        return None
    for form, name in STRIPPED:
        if (match := form.fullmatch(text)) is None:
            continue
        for roles in ("user", "assistant|model"):
            found = list(re.finditer(name.format(roles), text, re.MULTILINE))
            if len(found) > 1:
                raise ValueError(
                    f"the special tokens are gone, and {found[0][0].strip()!r} stands {len(found)} times where a "
                    f"message may begin: {quote(text[found[-2].start() :])}"
                )
        messages = [Message(role=role, content=match[role]) for role in ("system", "user") if match[role] is not None]
        return Conversation(messages=tuple(messages), begun=begun)
    return None


def split_begun(text: str) -> tuple[str, str]:
    """The text up to the assistant's header, and the thought that the template has begun, or closed, behind it."""
    match = re.search(r"<think>\s*(?:</think>\s*)?\Z", text)
    return (text, "") if match is None else (text[: match.start()], match[0])


def remove_end_tokens(response: str, ends: Collection[str] = ENDS) -> str:
    """A response without the tokens that end it and fill it up; as it is if it was cut before them."""
    end = place = len(response)
    while place > 0:
        if response[place - 1].isspace():
            place -= 1
        elif token := next((token for token in ends if response.endswith(token, 0, place)), None):
            end = place = place - len(token)
        else:
            break
    return response[:end]


def strip_beginnings(text: str) -> str:
    pattern = "|".join(map(re.escape, BEGINNINGS))
    match = re.match(rf"(?:\s*+(?:{pattern}))*+", text)
    return text[match.end() if match else 0 :].strip()


def quote(text: str) -> str:
    return repr(quote_start(text))
