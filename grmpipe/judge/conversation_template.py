"""Jinja templates of conversations: one user message, or a block for each message.

    {% block system %}How to judge.{% endblock %}
    {% block user %}{{ question }} {{ response }}{% endblock %}

The name of a block is the role of its message, and a role may occur several times. An empty block `messages` stands for
the messages of the prompt, under their own roles. A template without blocks is one user message.
`{% set markers = [...] %}` declares a model's own markers, as regular expressions (grmpipe/judge/prompt.py).
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import FileSystemLoader, StrictUndefined, Template, TemplateSyntaxError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from grmpipe.models.types import Message

SHARED = Path(__file__).parent / "templates" / "shared"  # the only files that a template can include
JINJA = ImmutableSandboxedEnvironment(undefined=StrictUndefined, loader=FileSystemLoader(SHARED))
MARKERS = "markers"
MESSAGES = "messages"
ROLES = ("user", "assistant")  # of messages that a model takes besides those of its format


class ConversationTemplate:
    """A template, split into its messages. Raises ValueError that begins with `label`."""

    def __init__(self, label: str, text: str) -> None:
        tree = parse_template(label, text)
        blocks = [node for node in tree.body if isinstance(node, nodes.Block)]
        loose = [node for node in tree.body if not isinstance(node, nodes.Block)]
        declared = [node for node in loose if declares_markers(node)]
        rest = [node for node in loose if node not in declared]
        self.markers = tuple(marker for node in declared for marker in markers_in(label, node))
        self.is_one_message = not blocks
        if blocks and not all(isinstance(node, nodes.Assign) or is_blank(node) for node in rest):
            raise ValueError(
                f"{label}: has text outside of its blocks; put every message into one, "
                "{% block system %}...{% endblock %} or {% block user %}...{% endblock %}"
            )
        for block in blocks:
            if block.name == MESSAGES and not all(map(is_blank, block.body)):
                raise ValueError(
                    f"{label}: the block messages stands for the prompt's own messages; type "
                    "{% block messages %}{% endblock %}"
                )
        set_first = [node for node in rest if isinstance(node, nodes.Assign)]
        self.parts = [(block.name, make_tree([*set_first, *block.body])) for block in blocks] or [
            ("user", make_tree(rest))
        ]
        self.tree = make_tree([*rest, *(node for block in blocks for node in block.body)])
        self._messages: list[tuple[str, Template]] = []
        for role, part in self.parts:
            self._messages.append((role, JINJA.from_string(part)))

    @property
    def shows_messages(self) -> bool:
        """Whether it shows the messages of the prompt one by one."""
        return self.has_block_of_messages or any(node.name == MESSAGES for node in self.tree.find_all(nodes.Name))

    @property
    def has_block_of_messages(self) -> bool:
        return any(role == MESSAGES for role, _ in self.parts)

    def render(self, fields: Mapping[str, object], messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages, without the line breaks around the text of a block.

        messages: of the prompt. ValueError if a block stands for them, and one has a role that the model can't take.
        """
        if self.is_one_message:
            return tuple(Message(role=role, content=template.render(fields)) for role, template in self._messages)
        made: list[Message] = []
        for role, template in self._messages:
            if role == MESSAGES:
                made += map(check_role, messages)
            else:
                made.append(Message(role=role, content=template.render(fields)))
        return tuple(Message(role=one.role, content=one.content.strip("\n")) for one in made)


def check_role(message: Message) -> Message:
    if message.role not in ROLES:
        raise ValueError(
            f"a message has the role {message.role}, and the model that is asked takes {' and '.join(ROLES)} only; "
            "leave such messages out of the prompts, or type another judge"
        )
    return message


def parse_template(label: str, template_text: str) -> nodes.Template:
    try:
        return JINJA.parse(template_text)
    except TemplateSyntaxError as error:
        raise ValueError(f"{label}, line {error.lineno}: {error.message}") from error


def make_tree(body: list[nodes.Node]) -> nodes.Template:
    tree = nodes.Template(body, lineno=1)
    tree.set_environment(JINJA)
    return tree


def declares_markers(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name) and node.target.name == MARKERS


def markers_in(label: str, node: nodes.Node) -> list[str]:
    """The expressions of `{% set markers = ["...", ...] %}`."""
    assert isinstance(node, nodes.Assign)
    declared: object = None
    if isinstance(node.node, nodes.Expr):
        with contextlib.suppress(nodes.Impossible):  # it isn't a constant
            declared = node.node.as_const()
    if not isinstance(declared, list) or not declared or not all(isinstance(one, str) for one in declared):
        raise ValueError(f'{label}: markers must be a list of regular expressions, such as ["</?answer>"]')
    return declared


def is_blank(node: nodes.Node) -> bool:
    """Whether a node prints only whitespace."""
    return isinstance(node, nodes.Output) and all(
        isinstance(part, nodes.TemplateData) and not part.data.strip() for part in node.nodes
    )
