"""The judge's prompt: a Jinja template, with the work under judgement guarded (grmpipe/judge/prompt_injection.py).

A template in a model's own format declares the model's markers and the signs of its verdict
(`{% set markers = [...] %}`); any other has a fence. A template may only print the guarded text, never compute with it:
a filter could remove the guard. Each of several responses has its own guard, as has a conversation of several messages.
Principles have none: the judge wrote them before there was any text of the policy.

A template is a conversation: one user message, or a block for each message.

    {% block system %}How to judge.{% endblock %}
    {% block user %}{{ question }} {{ response }}{% endblock %}

The name of a block is the role of its message, and a role may occur several times. An empty block `messages` stands for
the messages of the prompt, under their own roles. An empty block `assistant` before the last one is the judge's first
turn: it is sampled, and the last block asks for the second one, which has the verdict.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeGuard

from jinja2 import FileSystemLoader, StrictUndefined, Template, TemplateSyntaxError, UndefinedError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from grmpipe.config.io.key_errors import section
from grmpipe.config.judge import JudgeConfig, Scale
from grmpipe.config.judge_protocols import DEFAULT_PROTOCOL, JudgeProtocol, protocol_named
from grmpipe.data.rubrics import SharedRubric, load_shared_rubric
from grmpipe.judge.prompt_injection import TextGuard
from grmpipe.judge.trajectory import Passage, Trajectory, of_text
from grmpipe.models.types import Message
from grmpipe.types import Criterion, Prompt

JSON = "json"  # the only filter of a guarded text: what it writes is as broken, and stays within its quotes
SHARED = Path(__file__).parent / "templates" / "shared"  # the only files that a template can include
JINJA = ImmutableSandboxedEnvironment(undefined=StrictUndefined, loader=FileSystemLoader(SHARED))
JINJA.filters[JSON] = lambda text: json.dumps(text, ensure_ascii=False)
MARKERS = "markers"
MESSAGES = "messages"
ASSISTANT = "assistant"
ROLES = ("user", ASSISTANT)  # the roles that a model takes besides those of its format


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
        roles = [block.name for block in blocks]
        own = [at for at, block in enumerate(blocks) if block.name == ASSISTANT and all(map(is_blank, block.body))]
        self.has_own_turn = bool(own)
        if roles[-1:] == [ASSISTANT] or (own and (own, roles[-1]) != ([len(roles) - 2], "user")):
            raise ValueError(
                f"{label}: ends with the blocks {', '.join(roles[-3:])}; the judge's first turn is an empty block "
                "assistant before the last block, which is the user's, and what its answer begins with is judge.prefill"
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

        messages: the prompt's. ValueError if a block stands for them, and one has a role that the model can't take.
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


TEMPLATES = Path(__file__).parent / "templates"
ITEM_OF = {"responses": "response", "steps": "step"}  # lists of texts, and the name of each in a loop
PAIR = ("response_a", "response_b")  # a template of pairs may name its two texts instead
FIELDS = (
    "question", "messages", "reference", "criteria", "principles", "num_scores", "score_min", "score_max", "score_step",
    "has_environment",
)  # fmt: skip
NEIGHBOURS = ("previtem", "nextitem")  # attributes of a loop that hold its texts under another name
SHOWN_PLAINLY_IN = (nodes.Template, nodes.If, nodes.For)
NOT_OF_THE_POLICY = ("system", "assistant")  # messages in which a judge expects no work to judge
PROBE = Prompt(
    prompt_id="probe",
    messages=(Message(role="user", content="a question"),),
    reference="an answer",
    rubric=(Criterion(text="a criterion"),),
)
EXAMPLE = re.compile(r"\bN\b")  # where the score stands in the line that asks for it
PROBE_PRINCIPLES = "what matters here"
CRITERION = "a criterion that no template has"
OWN_ALONE = SharedRubric()


class JudgePrompt:
    """A template, checked on construction: ValueError names the template and the field.

    shared_principles: whether the judge wrote them before any response, so that the template must show them.
    example: see find_example.
    probe_messages: the prompt of made-up texts.
    """

    def __init__(
        self,
        template_text: str,
        *,
        name: str = "template",
        scale: Scale | None = None,
        protocol: str = DEFAULT_PROTOCOL,
        shared_principles: bool = False,
        rubric: SharedRubric = OWN_ALONE,
    ) -> None:
        self._rubric = rubric
        self._prefill: tuple[Message, ...] = ()
        self._label = f"template {name}"
        self._scale = scale or Scale()
        self.example = find_example(template_text, self._scale)
        kind = protocol_named(protocol)
        self._template = ConversationTemplate(self._label, template_text)
        self.guard = TextGuard.of(self._label, self._template.markers)
        self._shown = fields_shown(kind, self._template.tree)
        self._gives_one_score = kind.gives_one_score
        self._needs = ("criteria",) * (kind.scores == "criteria") + ("principles",) * shared_principles
        check(self._label, self._template, self._shown, self._needs)
        self.probe_messages = self._try_out()

    @classmethod
    def load(
        cls,
        template: str,
        scale: Scale | None = None,
        *,
        protocol: str = DEFAULT_PROTOCOL,
        shared_principles: bool = False,
        rubric: SharedRubric = OWN_ALONE,
    ) -> JudgePrompt:
        """Load a template. `template` is the name of a shipped file (tiny, pointwise, ...) or a path."""
        path = find_template("template", template)
        text = path.read_text(encoding="utf-8")
        return cls(
            text, name=str(path), scale=scale, protocol=protocol, shared_principles=shared_principles, rubric=rubric
        )

    @classmethod
    def of(cls, config: JudgeConfig) -> JudgePrompt:
        ahead, rubric = config.principles.kind == "shared", load_rubric(config)
        made = cls.load(config.template, config.scale, protocol=config.protocol, shared_principles=ahead, rubric=rubric)
        if config.rubric.path is not None and not made.shows_criteria:
            raise ValueError(f"rubric.path: template {config.template} shows no criteria; type judge=rubric")
        if config.prefill:
            made._prefill = (Message(role=ASSISTANT, content=config.prefill),)
            made.probe_messages += made._prefill
        return made

    @property
    def has_own_turn(self) -> bool:
        """Whether the judge writes two turns: an empty message stands for the first one."""
        return self._template.has_own_turn

    @cached_property
    def shows_criteria(self) -> bool:
        """Whether a judge reads the criteria of a rubric."""
        probe = replace(PROBE, rubric=(Criterion(text=CRITERION),))
        return any(CRITERION in one.content for one in self._render(probe, self.blanks, PROBE_PRINCIPLES))

    @cached_property
    def shows_reference(self) -> bool:
        """Whether a judge reads a prompt's reference."""
        return any(node.name == "reference" for node in self._template.tree.find_all(nodes.Name))

    @property
    def blanks(self) -> tuple[str, ...]:
        """Empty texts, as few as the template can show: to measure it."""
        return ("",) * len(self._shown)

    def find_rubric(self, prompt: Prompt) -> tuple[Criterion, ...]:
        """The criteria by which this judge judges a prompt: its own, then those of judge.rubric.path."""
        return self._rubric.join(prompt)

    def render(
        self,
        prompt: Prompt,
        *responses: Trajectory | str,
        principles: str | None = None,
        criteria: Sequence[Criterion] | None = None,
    ) -> tuple[Message, ...]:
        """The messages for one response, or for several in the order shown: trajectories, or texts of the policy.
        After them what the judge's answer begins with.

        criteria: those of the rubric that are asked about; None: all.

        ValueError if the template needs something that this prompt doesn't have.
        """
        return (*self._render(prompt, responses, principles, criteria), *self._prefill)

    def _render(
        self,
        prompt: Prompt,
        responses: Sequence[Trajectory | str],
        principles: str | None,
        criteria: Sequence[Criterion] | None = None,
    ) -> tuple[Message, ...]:
        shown = [of_text(response) if isinstance(response, str) else response for response in responses]
        asked = self.find_rubric(prompt) if criteria is None else criteria
        self._check_weights(prompt, asked)
        rubric = show_criteria(asked)
        fields = make_fields(self._template, self.guard, prompt) | {
            "num_scores": 1 if self._gives_one_score else len(rubric) if "criteria" in self._needs else len(shown),
            "score_min": self._scale.low,
            "score_max": self._scale.high,
            "score_step": self._scale.step,
            "has_environment": any(trajectory.has_environment for trajectory in shown),
        }
        fields |= self._guarded(shown)
        # Undefined if absent: the text "None" must not reach a judge.
        known = {"reference": prompt.reference, "criteria": rubric or None, "principles": principles}
        fields |= {name: value for name, value in known.items() if value is not None}
        try:
            return self._template.render(fields, self.guard.messages(prompt.messages))
        except UndefinedError as error:
            raise ValueError(
                f"{self._label}, prompt {prompt.prompt_id}: {error.message}; add the fields of the template "
                "to the prompts, or type a judge.template without them"
            ) from error
        except ValueError as error:
            raise ValueError(f"{self._label}, prompt {prompt.prompt_id}: {error}") from error

    def _check_weights(self, prompt: Prompt, rubric: Sequence[Criterion]) -> None:
        """A judge of one score sees only texts, by which a fault would be a merit."""
        unlike = [one for one in rubric if one.weight < 0 or one.essential or one.evidence or one.from_step]
        if unlike and "criteria" not in self._needs and self.shows_criteria:
            raise ValueError(
                f"{self._label}, prompt {prompt.prompt_id}: it shows criteria without weight, and "
                f"{unlike[0].text[:60]!r} is a fault, essential, needs evidence, or begins at a step; type "
                "judge=rubric, or word it as a plain merit"
            )

    def _guarded(self, responses: Sequence[Trajectory]) -> dict[str, object]:
        """The fields that hold the responses."""
        shown = self.guard.trajectories(responses)
        if self._shown[0] in ITEM_OF:
            return {self._shown[0]: shown}
        assert len(shown) == len(self._shown), f"this template shows {', '.join(self._shown)}"
        return dict(zip(self._shown, shown, strict=True))

    def _try_out(self) -> tuple[Message, ...]:
        """Render with samples, without and with an environment, to find what only rendering shows: joined texts, an
        include, a branch that hides the response. Returns the messages without one.
        """
        num_texts = 2 if self._shown[0] in ITEM_OF else len(self._shown)
        texts = [f"what the policy wrote, {part}" for part in range(num_texts)]
        played = [
            Trajectory(passages=(Passage(voice="policy", text=text), Passage(voice="environment", text="what it says")))
            for text in texts
        ]
        try:
            messages = self.render(PROBE, *texts, principles=PROBE_PRINCIPLES)
            of_episode = self.render(PROBE, *played, principles=PROBE_PRINCIPLES)
        except Exception as error:  # a user's template may raise anything
            raise ValueError(f"{self._label}: {error}") from error
        if not all(any(self.guard.text(text) in message.content for message in messages) for text in texts):
            raise ValueError(f"{self._label}: hides the field {self._shown[0]} if a prompt has a reference")
        for one in self.guard.trajectories(played):
            spelt = (one, json.dumps(one, ensure_ascii=False))
            if not any(text in message.content for message in of_episode for text in spelt):
                raise ValueError(f"{self._label}: hides the field {self._shown[0]} if has_environment")
        if self._template.markers and not is_all_json(self._template.tree, self._shown):
            check_markers(self._label, messages, texts, self.guard)
        return messages


class PrinciplesPrompt:
    """A template that asks for principles before there is any response: it shows only the question."""

    FIELDS = ("question", "messages", "reference", "criteria")

    def __init__(self, template: str, rubric: SharedRubric = OWN_ALONE) -> None:
        self._rubric = rubric
        path = find_template("principles.template", template)
        self._label, text = f"principles.template {path}", path.read_text(encoding="utf-8")
        self._template = ConversationTemplate(self._label, text)
        self._guard = TextGuard.of(self._label, self._template.markers)
        refuse_unknown(self._label, self._template.tree, self.FIELDS)
        self.render(PROBE)

    @classmethod
    def of(cls, config: JudgeConfig) -> PrinciplesPrompt | None:
        """None: each judgement writes its own."""
        if config.principles.kind != "shared":
            return None
        return cls(config.principles.template, load_rubric(config))

    def render(self, prompt: Prompt) -> tuple[Message, ...]:
        """The messages that ask for principles. ValueError if the template needs something that this prompt doesn't
        have.
        """
        known = {"reference": prompt.reference, "criteria": show_criteria(self._rubric.join(prompt)) or None}
        fields = make_fields(self._template, self._guard, prompt)
        fields |= {name: value for name, value in known.items() if value is not None}
        try:
            return self._template.render(fields, self._guard.messages(prompt.messages))
        except Exception as error:  # a user's template may raise anything
            raise ValueError(f"{self._label}, prompt {prompt.prompt_id}: {error}") from error


def show_criteria(rubric: Sequence[Criterion]) -> list[dict[str, object]]:
    """The criteria as templates see them."""
    return [
        {
            "text": one.whole_text,
            "title": one.text,
            "meanings": dict(one.levels),
            "weight": one.weight,
            "kind": one.kind,
            "levels": [score for score, _ in one.levels],
            "evidence": one.evidence,
        }
        for one in rubric
    ]


def load_rubric(config: JudgeConfig) -> SharedRubric:
    with section(f"{config.key}.rubric."):
        return load_shared_rubric(config.rubric.path)


def find_last_begin(judges: Iterable[JudgeConfig], prompts: Iterable[Prompt]) -> int:
    """The step of training from which on all criteria hold; 0: they hold from the start."""
    shared = (rubric for judge in judges for rubric in load_rubric(judge).rubrics)
    rubrics = (*shared, *(prompt.rubric for prompt in prompts))
    return max((one.from_step for rubric in rubrics for one in rubric), default=0)


def find_example(template_text: str, scale: Scale) -> str:
    """A verdict as the template asks for it: its last line with a score for the N in it. Empty: it has none."""
    last = template_text.rstrip().rpartition("\n")[2].strip()
    return "" if "{{" in last or "{%" in last or not EXAMPLE.search(last) else EXAMPLE.sub(str(scale.high), last)


def find_template(key: str, template: str) -> Path:
    shipped = TEMPLATES / f"{template}.jinja"
    path = shipped if shipped.is_file() else Path(template)
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in TEMPLATES.glob("*.jinja")))
        raise ValueError(f"{key}: no file {template!r}; type one of {names}, or the path of a Jinja file")
    return path


def make_fields(template: ConversationTemplate, guard: TextGuard, prompt: Prompt) -> dict[str, object]:
    """The fields about the prompt. A template that doesn't show the messages one by one gets the whole conversation as
    the question.
    """
    question = find_question(prompt)
    if len(prompt.messages) > 1 and not template.shows_messages:
        question = guard.conversation(prompt.messages)
    return {"question": question, "messages": guard.messages(prompt.messages)}


def with_texts(prompt: Prompt, change: Callable[[str], str]) -> Prompt:
    """The prompt with the texts of its conversation changed; the only message of a prompt stays as it is."""
    if len(prompt.messages) == 1:
        return prompt
    return replace(prompt, messages=tuple(replace(one, content=change(one.content)) for one in prompt.messages))


def find_question(prompt: Prompt) -> str:
    """The last message of the user."""
    for message in reversed(prompt.messages):
        if message.role == "user":
            return message.content
    raise ValueError(f"prompt {prompt.prompt_id}: has no message with role user; a judge needs a question")


def fields_shown(kind: JudgeProtocol, tree: nodes.Template) -> tuple[str, ...]:
    """The fields that hold the policy's texts in this template."""
    used = {node.name for node in tree.find_all(nodes.Name)}
    return PAIR if kind.about == "pair" and used & set(PAIR) else kind.template_fields


def check(label: str, template: ConversationTemplate, shown: Sequence[str], needs: Sequence[str]) -> None:
    """Check that a template uses only known fields and prints the policy's text unchanged, where it belongs."""
    tree = template.tree
    refuse_unknown(label, tree, (*FIELDS, *shown))
    used = {node.name for node in tree.find_all(nodes.Name)}
    for field in (*shown, *needs):
        if field not in used:
            raise ValueError(f"{label}: doesn't use the field {field}; put {how_to_show(field)} where it belongs")
    guarded = {*shown, *(ITEM_OF.get(field, field) for field in shown)}
    printable = {ITEM_OF.get(field, field) for field in shown}
    num_uses = sum(node.name in guarded for node in tree.find_all(nodes.Name))
    loops = [loop for loop in tree.find_all(nodes.For) if goes_over(loop, shown[0])]
    printed = [node.name for node in plain_prints(tree) if node.name in printable]
    around = any(node.attr in NEIGHBOURS for node in tree.find_all(nodes.Getattr))
    if num_uses != len(printed) + 2 * len(loops) or around:
        raise ValueError(
            f"{label}: {shown[0]} may only be printed, as {how_to_show(shown[0])}: no filter, test, assignment or "
            "block around it, which could remove its fence"
        )
    for role, part in template.parts:
        if role in NOT_OF_THE_POLICY and any(node.name in guarded for node in part.find_all(nodes.Name)):
            raise ValueError(f"{label}: {shown[0]} stands in the {role} message; put it into {{% block user %}}")


def check_markers(label: str, messages: Sequence[Message], texts: Sequence[str], guard: TextGuard) -> None:
    """Check that the markers match something in the text before and after each text of the policy."""
    between = "|".join(re.escape(guard.text(text)) for text in texts)
    for message in messages:
        pieces = re.split(between, message.content)
        for piece in pieces if len(pieces) > 1 else ():
            if piece.strip() and guard.text(piece) == piece:
                raise ValueError(
                    f"{label}: markers match nothing in {piece.strip()[-60:]!r}, next to the policy's text, which "
                    "could imitate it; add a regular expression for what stands there"
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
    if field not in ITEM_OF or not isinstance(loop.iter, nodes.Name) or not isinstance(loop.target, nodes.Name):
        return False
    return (loop.iter.name, loop.target.name) == (field, ITEM_OF[field]) and loop.test is None


def plain_prints(node: nodes.Node) -> Iterator[nodes.Name]:
    """The names that a node prints unchanged."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Output):
            parts = (part.node if is_json(part) else part for part in child.nodes)
            yield from (part for part in parts if isinstance(part, nodes.Name))
        elif isinstance(child, SHOWN_PLAINLY_IN):
            yield from plain_prints(child)


def is_all_json(tree: nodes.Template, shown: Sequence[str]) -> bool:
    """Whether each text of the policy is printed as JSON, whose quotes it can't end."""
    names = [ITEM_OF.get(field, field) for field in shown]
    quoted = [node.node for node in tree.find_all(nodes.Filter) if is_json(node)]
    printed = [one for one in plain_prints(tree) if one.name in names]
    return all(any(one is node for node in quoted) for one in printed)  # equal ones may be printed plainly too


def is_json(node: nodes.Node) -> TypeGuard[nodes.Filter]:
    """Whether a node is `text | json`."""
    return isinstance(node, nodes.Filter) and node.name == JSON and not (node.args or node.kwargs)
