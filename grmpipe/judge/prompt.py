"""The judge's prompt: a Jinja template, with the work under judgement behind a fence. Knows no tokens and no engine.

The fence: every line of the policy's text begins with "> ", whatever kind of line break it follows, so that no text of
the policy can start a line of the prompt. A template may only print the fenced text, never compute with it: a filter
could remove the fence. Each of several texts has its own fence. Principles have none: the judge wrote them before there
was any text of the policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from grmpipe.config.judge import JudgeConfig, Scale
from grmpipe.config.judge_protocols import DEFAULT_PROTOCOL, protocol_named
from grmpipe.types import Criterion, Prompt
from models.types import Message

TEMPLATES = Path(__file__).parent / "templates"
ITEM_OF = {"responses": "response", "steps": "step"}  # lists of texts, and the name of each in a loop
FIELDS = ("question", "messages", "reference", "criteria", "principles", "num_scores", "score_min", "score_max")
NEIGHBOURS = ("previtem", "nextitem")  # attributes of a loop that hold its texts under another name
SHOWN_PLAINLY_IN = (nodes.Template, nodes.If, nodes.For)
PROBE = Prompt(
    prompt_id="probe",
    messages=(Message(role="user", content="a question"),),
    reference="an answer",
    rubric=(Criterion(text="a criterion"),),
)
PROBE_PRINCIPLES = "what matters here"
JINJA = ImmutableSandboxedEnvironment(undefined=StrictUndefined)


class JudgePrompt:
    """A template, checked on construction: ValueError names the template and the field.

    shared_principles: whether the judge wrote them before any response, so that the template must show them.
    """

    def __init__(
        self,
        template_text: str,
        *,
        name: str = "template",
        scale: Scale | None = None,
        protocol: str = DEFAULT_PROTOCOL,
        shared_principles: bool = False,
    ) -> None:
        self._label = f"template {name}"
        self._scale = scale or Scale()
        kind = protocol_named(protocol)
        self._shown = kind.template_field
        self._needs = ("criteria",) * (kind.scores == "criteria") + ("principles",) * shared_principles
        check(self._label, parsed(self._label, template_text), self._shown, self._needs)
        self._template = JINJA.from_string(template_text)
        self._try_out()

    @classmethod
    def load(
        cls,
        template: str,
        scale: Scale | None = None,
        *,
        protocol: str = DEFAULT_PROTOCOL,
        shared_principles: bool = False,
    ) -> JudgePrompt:
        """Load a template. `template` is the name of a shipped file (tiny, pointwise, ...) or a path."""
        path = path_of("template", template)
        text = path.read_text(encoding="utf-8")
        return cls(text, name=str(path), scale=scale, protocol=protocol, shared_principles=shared_principles)

    @classmethod
    def of(cls, config: JudgeConfig) -> JudgePrompt:
        ahead = config.principles == "shared"
        return cls.load(config.template, config.scale, protocol=config.protocol, shared_principles=ahead)

    def render(self, prompt: Prompt, *texts: str, principles: str | None = None) -> str:
        """The prompt for one text of the policy, or for several in the order shown.

        ValueError if the template needs something that this prompt doesn't have.
        """
        fences = [fenced(text) for text in texts]
        assert self._shown in ITEM_OF or len(fences) == 1, "this template shows one response"
        rubric = [{"text": criterion.text, "weight": criterion.weight} for criterion in prompt.rubric]
        fields = {
            "question": question_of(prompt),
            "messages": prompt.messages,
            self._shown: fences if self._shown in ITEM_OF else fences[0],
            "num_scores": len(rubric) if "criteria" in self._needs else len(fences),
            "score_min": self._scale.low,
            "score_max": self._scale.high,
        }
        # Undefined if absent: the text "None" must not reach a judge.
        known = {"reference": prompt.reference, "criteria": rubric or None, "principles": principles}
        fields |= {name: value for name, value in known.items() if value is not None}
        try:
            return self._template.render(fields)
        except UndefinedError as error:
            raise ValueError(
                f"{self._label}, prompt {prompt.prompt_id}: {error.message}; add the fields of the template "
                "to the prompts, or type a judge.template without them"
            ) from error

    def _try_out(self) -> None:
        """Render once with samples, to find what only rendering shows: joined texts, an include, a branch that hides
        the response.
        """
        texts = [f"what the policy wrote, {part}" for part in range(2 if self._shown in ITEM_OF else 1)]
        try:
            shown = self.render(PROBE, *texts, principles=PROBE_PRINCIPLES)
        except Exception as error:  # a user's template may raise anything
            raise ValueError(f"{self._label}: {error}") from error
        if not all(fenced(text) in shown for text in texts):
            raise ValueError(f"{self._label}: hides the field {self._shown} if a prompt has a reference")


class PrinciplesPrompt:
    """A template that asks for principles before there is any response: it shows only the question."""

    FIELDS = ("question", "messages", "reference", "criteria")

    def __init__(self, template: str) -> None:
        path = path_of("principles_template", template)
        self._label, text = f"principles_template {path}", path.read_text(encoding="utf-8")
        refuse_unknown(self._label, parsed(self._label, text), self.FIELDS)
        self._template = JINJA.from_string(text)
        self.render(PROBE)

    def render(self, prompt: Prompt) -> str:
        """The prompt that asks for principles. ValueError if the template needs something that this prompt doesn't
        have.
        """
        known = {"reference": prompt.reference, "criteria": prompt.rubric or None}
        fields = {"question": question_of(prompt), "messages": prompt.messages}
        fields |= {name: value for name, value in known.items() if value is not None}
        try:
            return self._template.render(fields)
        except Exception as error:  # a user's template may raise anything
            raise ValueError(f"{self._label}, prompt {prompt.prompt_id}: {error}") from error


def path_of(key: str, template: str) -> Path:
    shipped = TEMPLATES / f"{template}.jinja"
    path = shipped if shipped.is_file() else Path(template)
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in TEMPLATES.glob("*.jinja")))
        raise ValueError(f"{key}: no file {template!r}; type one of {names}, or the path of a Jinja file")
    return path


def fenced(text: str) -> str:
    """The text with "> " before every line. Line breaks are those of str.splitlines, which include form feeds and
    U+2028.
    """
    return "\n".join(f"> {line}" for line in text.splitlines() or [""])


def question_of(prompt: Prompt) -> str:
    """The last message of the user."""
    for message in reversed(prompt.messages):
        if message.role == "user":
            return message.content
    raise ValueError(f"prompt {prompt.prompt_id}: has no message with role user; a judge needs a question")


def parsed(label: str, template_text: str) -> nodes.Template:
    try:
        return JINJA.parse(template_text)
    except TemplateSyntaxError as error:
        raise ValueError(f"{label}, line {error.lineno}: {error.message}") from error


def check(label: str, tree: nodes.Template, shown: str, needs: Sequence[str]) -> None:
    """Check that a template uses only known fields and prints the policy's text unchanged."""
    refuse_unknown(label, tree, (*FIELDS, shown))
    used = {node.name for node in tree.find_all(nodes.Name)}
    for field in (shown, *needs):
        if field not in used:
            raise ValueError(f"{label}: doesn't use the field {field}; put {how_to_show(field)} where it belongs")
    guarded = {shown, ITEM_OF.get(shown, shown)}
    num_uses = sum(node.name in guarded for node in tree.find_all(nodes.Name))
    loops = [loop for loop in tree.find_all(nodes.For) if goes_over(loop, shown)] if shown in ITEM_OF else []
    printed = [node.name for node in plain_prints(tree) if node.name == ITEM_OF.get(shown, shown)]
    around = any(node.attr in NEIGHBOURS for node in tree.find_all(nodes.Getattr))
    if num_uses != len(printed) + 2 * len(loops) or around:
        raise ValueError(
            f"{label}: {shown} may only be printed, as {how_to_show(shown)}: no filter, test, assignment or "
            "block around it, which could remove its fence"
        )


def refuse_unknown(label: str, tree: nodes.Template, known: Sequence[str]) -> None:
    for field in sorted(meta.find_undeclared_variables(tree) - set(known)):
        raise ValueError(f"{label}: unknown field {field!r}; known: {', '.join(known)}")


def how_to_show(field: str) -> str:
    if (item := ITEM_OF.get(field)) is None:
        return f"{{{{ {field} }}}}"
    return f"{{% for {item} in {field} %}}{{{{ {item} }}}}{{% endfor %}}"


def goes_over(loop: nodes.For, field: str) -> bool:
    """Whether a loop is `for response in responses` and nothing more."""
    if not isinstance(loop.iter, nodes.Name) or not isinstance(loop.target, nodes.Name):
        return False
    return (loop.iter.name, loop.target.name) == (field, ITEM_OF[field]) and loop.test is None


def plain_prints(node: nodes.Node) -> Iterator[nodes.Name]:
    """The names that a node prints unchanged."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Output):
            yield from (part for part in child.nodes if isinstance(part, nodes.Name))
        elif isinstance(child, SHOWN_PLAINLY_IN):
            yield from plain_prints(child)
