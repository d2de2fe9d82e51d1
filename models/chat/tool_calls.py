"""The formats in which models write calls of tools, by the names of vLLM's --tool-call-parser. Reads, never executes.

A parser takes a completion's answer, without its thought, and the tools that the model was given. It raises nothing: a
call that can't be read is an error in the turn. Whether a tool exists and its arguments fit is for the caller to say.
"""

import inspect
import logging
import re
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from grmpipe.models.chat.json_tool_calls import CALL_START, parse_hermes, parse_llama3_json, parse_mistral
from grmpipe.models.chat.pythonic_tool_calls import parse_pythonic
from grmpipe.models.chat.xml_tool_calls import parse_qwen3_coder
from grmpipe.models.import_path import import_module
from grmpipe.models.types import ParsedTurn, ToolSpec

log = logging.getLogger(__name__)

ToolParser = Callable[[str, Sequence[ToolSpec]], ParsedTurn]
AUTO_PARSER = "auto"  # found in the chat template
MAX_ANSWER_CHARS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format of calls.

    template: regular expressions that are all found in a chat template which asks for it.
    marker:   what a call can't be read without.
    unmarked: the format that is left if the marker is a special token, which a completion's text doesn't show.
    """

    parse: ToolParser
    template: tuple[str, ...]
    marker: str = ""
    unmarked: str = ""


# In the order in which a template is looked through.
FORMATS: dict[str, ToolFormat] = {
    "qwen3_coder": ToolFormat(parse=parse_qwen3_coder, template=(r"<tool_call>", r"<function=")),
    "hermes": ToolFormat(
        parse=parse_hermes,
        template=(r"<tool_call>", r'\\?"arguments\\?"'),
        marker=CALL_START,
        unmarked="llama3_json",
    ),
    "mistral": ToolFormat(parse=parse_mistral, template=(r"\[TOOL_CALLS\]",)),
    "pythonic": ToolFormat(parse=parse_pythonic, template=(r"""name(?:['"]\])?\s*[+~]\s*['"]\(['"]""",)),
    "llama3_json": ToolFormat(parse=parse_llama3_json, template=(r'"parameters"', r"ipython|python_tag")),
}


def detect_format(template: str, hidden: Collection[str] = ()) -> str | None:
    """The name of the format that a chat template asks for; None if it is none of the known ones.

    hidden: special tokens, which the text of a completion doesn't show.
    """
    for name, known in FORMATS.items():
        if all(re.search(pattern, template) for pattern in known.template):
            return known.unmarked if known.marker in hidden else name
    return None


def check_tool_parser(name: str) -> None:
    """Check the name of a format, "auto", or the dotted path of a user's own parser, which is imported."""
    if name != AUTO_PARSER:
        parser_named(name)


def parser_named(name: str) -> ToolParser:
    """The parser of a format, or the one at a dotted path. Raises ValueError (`tool_parser: ...`)."""
    if name in FORMATS:
        return FORMATS[name].parse
    module_name, _, own = name.rpartition(".")
    if not module_name:
        raise ValueError(
            f"tool_parser: unknown value {name!r}; known: {', '.join((AUTO_PARSER, *FORMATS))}; or the dotted path of "
            "a function of yours, as my_module.my_parser"
        )
    found = vars(import_module(module_name, "tool_parser")).get(own)
    if not callable(found) or not _takes_two(found):
        raise ValueError(f"tool_parser: {name} must be a function that takes (text, tools)")
    return _own(name, found)


def _takes_two(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind("", ())
    except (TypeError, ValueError):  # ValueError: it has no readable signature
        return False
    return True


def _own(name: str, function: Callable[..., object]) -> ToolParser:
    """A user's parser. One that raises can't read the answer, as json.loads can't: that is an error in the turn."""
    seen: set[str] = set()

    def parse(text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
        try:
            turn = function(text, tools)
        except (Exception, SystemExit) as error:
            kind = type(error).__name__
            place = traceback.extract_tb(error.__traceback__)[-1]
            # The first of each kind is for the console, the others are for run.log.
            log.log(
                logging.INFO if kind in seen else logging.WARNING,
                "tool_parser: %s raised %s: %s (%s:%s); the answer counts as a call that can't be read",
                name, kind, error, place.filename, place.lineno,
            )  # fmt: skip
            seen.add(kind)
            return ParsedTurn(content=text, errors=(f"the call can't be read ({kind}: {error})",))
        if not isinstance(turn, ParsedTurn):
            raise ValueError(f"tool_parser: {name} must return a ParsedTurn, and returned a {type(turn).__name__}")
        return turn

    return parse


def read_turn(parse: ToolParser, text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
    """The turn in a completion's answer. One that is too long to be read has no calls."""
    if len(text) > MAX_ANSWER_CHARS:
        return ParsedTurn(content=text, errors=(f"an answer over {MAX_ANSWER_CHARS} characters is not read for calls",))
    return parse(text, tools)
