"""The judge's prompt: a Jinja template, with the work under judgement behind a fence. Knows no tokens and no engine.

The fence: every line of the policy's text begins with "> ", whatever kind of line break it follows, so that no text of
the policy can start a line of its own. A template may only print the fenced text, never compute with it: a filter could
take the fence away.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from grmpipe.judge.scale import Scale
from grmpipe.types import Prompt
from models.types import Message

TEMPLATES = Path(__file__).parent / "templates"
FIELDS = ("question", "messages", "response", "reference", "score_min", "score_max")
SHOWN_PLAINLY_IN = (nodes.Template, nodes.If, nodes.For)
PROBE = Prompt(prompt_id="probe", messages=(Message(role="user", content="a question"),), reference="an answer")
JINJA = ImmutableSandboxedEnvironment(undefined=StrictUndefined)


class JudgePrompt:
    """A template, checked when it is made: ValueError names the template and the field."""

    def __init__(self, template_text: str, *, name: str = "template", scale: Scale | None = None) -> None:
        self.name = name
        self._scale = scale or Scale()
        check(name, parsed(name, template_text))
        self._template = JINJA.from_string(template_text)
        self._try_out()

    @classmethod
    def load(cls, template: str, scale: Scale | None = None) -> JudgePrompt:
        """`template` is the name of a shipped file (tiny, pointwise, boxed) or a path."""
        shipped = TEMPLATES / f"{template}.jinja"
        path = shipped if shipped.is_file() else Path(template)
        if not path.is_file():
            names = ", ".join(sorted(file.stem for file in TEMPLATES.glob("*.jinja")))
            raise ValueError(f"template: no file {template!r}; type one of {names}, or the path of a Jinja file")
        return cls(path.read_text(encoding="utf-8"), name=str(path), scale=scale)

    def render(self, prompt: Prompt, response: str) -> str:
        """What the judge reads. ValueError if the template needs something that this prompt doesn't have."""
        fields = {
            "question": question_of(prompt),
            "messages": prompt.messages,
            "response": fenced(response),
            "score_min": self._scale.low,
            "score_max": self._scale.high,
        }
        if prompt.reference is not None:  # left undefined otherwise: "None" must not reach a judge
            fields["reference"] = prompt.reference
        try:
            return self._template.render(fields)
        except UndefinedError as error:
            raise ValueError(f"template {self.name}, prompt {prompt.prompt_id}: {error.message}") from error

    def _try_out(self) -> None:
        """What only shows in rendering shows now: a sum of texts, an include, a branch that hides the response."""
        try:
            shown = self.render(PROBE, "what the policy wrote")
        except Exception as error:  # a template is code of the user's, and may raise anything
            raise ValueError(f"template {self.name}: {error}") from error
        if fenced("what the policy wrote") not in shown:
            raise ValueError(f"template {self.name}: hides the field response where a prompt has a reference")


def fenced(text: str) -> str:
    """Every line behind "> ". Line breaks are those of str.splitlines: form feeds and U+2028 too."""
    return "\n".join(f"> {line}" for line in text.splitlines() or [""])


def question_of(prompt: Prompt) -> str:
    """The last thing that the user says."""
    for message in reversed(prompt.messages):
        if message.role == "user":
            return message.content
    raise ValueError(f"prompt {prompt.prompt_id}: has no message of role user; a judge needs a question")


def parsed(name: str, template_text: str) -> nodes.Template:
    try:
        return JINJA.parse(template_text)
    except TemplateSyntaxError as error:
        raise ValueError(f"template {name}, line {error.lineno}: {error.message}") from error


def check(name: str, tree: nodes.Template) -> None:
    """The template knows only our fields, and prints `response`, plainly."""
    for field in sorted(meta.find_undeclared_variables(tree) - set(FIELDS)):
        raise ValueError(f"template {name}: unknown field {field!r}; known: {', '.join(FIELDS)}")
    num_uses = sum(node.name == "response" for node in tree.find_all(nodes.Name))
    if num_uses == 0:
        raise ValueError(f"template {name}: doesn't use the field response; put {{{{ response }}}} where it belongs")
    if num_uses != sum(1 for node in plain_prints(tree) if node.name == "response"):
        raise ValueError(
            f"template {name}: response may only be printed, as {{{{ response }}}}: no filter, test, assignment or "
            "block around it, which could take its fence away"
        )


def plain_prints(node: nodes.Node) -> Iterator[nodes.Name]:
    """Names that go to the output as they are."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Output):
            yield from (part for part in child.nodes if isinstance(part, nodes.Name))
        elif isinstance(child, SHOWN_PLAINLY_IN):
            yield from plain_prints(child)
