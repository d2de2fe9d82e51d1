"""The guard around the texts that a judge is shown: a fence for each voice, or a model's own markers broken. Pure.

The guard keeps text of the policy, or of its environment, from passing for the prompt's own text, for another voice, or
for a verdict if the judge quotes it:

- The fence: every line of the policy begins with "> ", every line of tools and environment with "| ", whatever kind of
  line break it follows. A line without a fence is the template's, or a note of what was left out.
- Broken markers, for a template in a model's own format. What spells one of its markers gets a space after its first
  character. A text of the policy alone is shown as it is otherwise; with an environment there are fences as well, and
  a line that explains them.

A prompt of one message is shown as the data have it. Of a conversation every message is guarded: earlier answers may be
a policy's. In the place of the question each line begins with its role, "|user| ".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grmpipe.config.keys.user_code import shorten
from grmpipe.judge.markup import Markup
from grmpipe.judge.trajectory import Passage, Trajectory, Voice
from grmpipe.models.types import Message

LEAST_FENCED = 200  # characters of a fenced result that is never shortened
FENCES: dict[Voice, str] = {"policy": "> ", "environment": "| "}
LEGEND = 'The response begins each line with "> ", what tools and the environment answered with "| ".'
CONVERSATION_LEGEND = "Each line of the conversation begins with its role; the last message is to be answered."
ROLE_LABELS = Markup([r"(?m:^)(?:system|user|assistant|tool) ?:"], any_case=True)


@dataclass(frozen=True, slots=True)
class TextGuard:
    """The guard of a template. markers: the model's markers that it declares; None: it has a fence."""

    markers: Markup | None

    @staticmethod
    def of(label: str, markers: Sequence[str]) -> TextGuard:
        """The guard for these markers, in any case. ValueError for one that is no regular expression."""
        # A text that is shown without a fence could claim to have one.
        ours = (re.escape(LEGEND[:20]), re.escape(CONVERSATION_LEGEND[:40]))
        try:
            return TextGuard(Markup([*markers, *ours], any_case=True) if markers else None)
        except re.error as error:
            raise ValueError(f"{label}: markers: {error.pattern!r} is no regular expression: {error}") from error

    def text(self, text: str) -> str:
        """A text of the policy, guarded."""
        return fence_text(text) if self.markers is None else self.markers.break_markup(text)

    def trajectories(self, trajectories: Sequence[Trajectory]) -> list[str]:
        """Trajectories that are shown next to each other, guarded in the same way."""
        if self.markers is None:
            return [in_fences(trajectory) for trajectory in trajectories]
        if all(trajectory.is_of_policy for trajectory in trajectories):
            return [self.markers.break_markup(plain(trajectory)) for trajectory in trajectories]
        return [f"{LEGEND}\n{self.markers.break_markup(in_fences(trajectory))}" for trajectory in trajectories]

    def result(self, text: str) -> str:
        """What a tool returned about the work, guarded like its environment's texts. It becomes half longer at most:
        the fences of many short lines would fill the judge's window.
        """
        kept, fenced = len(text), fence_text(text, "environment")
        while len(fenced) > max(LEAST_FENCED, 1.5 * len(text)):
            kept //= 2
            fenced = fence_text(shorten(text, kept), "environment")
        return fenced if self.markers is None else self.markers.break_markup(fenced)

    def messages(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages of a prompt, for a template that shows them one by one."""
        if len(messages) == 1:
            return tuple(messages)
        if self.markers is None:
            return tuple(replace(one, content=after(role_fence(one), one.content)) for one in messages)
        return tuple(
            replace(one, content=ROLE_LABELS.break_markup(self.markers.break_markup(one.content))) for one in messages
        )

    def conversation(self, messages: Sequence[Message]) -> str:
        """Several messages as one text, in the place of the question. An empty line separates two of the same role."""
        shown, role = CONVERSATION_LEGEND, ""
        for one in messages:
            text = one.content if self.markers is None else self.markers.break_markup(one.content)
            shown += ("\n\n" if one.role == role else "\n") + after(role_fence(one), text)
            role = one.role
        return shown


def fence_text(text: str, voice: Voice = "policy") -> str:
    """The text with the voice's fence before every line."""
    return after(FENCES[voice], text)


def role_fence(message: Message) -> str:
    """Begins like the environment's fence, so that no quotation of it is read as a verdict."""
    return f"|{message.role}| "


def after(fence: str, text: str) -> str:
    """Line breaks are those of str.splitlines, which include form feeds and U+2028."""
    return "\n".join(f"{fence}{line}" for line in text.splitlines() or [""])


def in_fences(trajectory: Trajectory) -> str:
    """All passages in their fences; notes have none. An empty line separates two of the same voice."""
    shown = ""
    before: Passage | None = None
    for passage in trajectory.passages:
        if before is not None:
            shown += "\n\n" if before.voice == passage.voice else "\n"
        shown += passage.text if passage.voice == "note" else fence_text(passage.text, passage.voice)
        before = passage
    return shown


def plain(trajectory: Trajectory) -> str:
    """A trajectory as text for people: in fences, unless the policy's is the only voice."""
    if not trajectory.is_of_policy:
        return in_fences(trajectory)
    return "\n\n".join(passage.text for passage in trajectory.passages)
