"""The table of engines. A new one is an EngineKind in its own file and a row here; a user's own has a dotted path."""

import inspect
from collections.abc import Callable

from grmpipe.config.keys.dotted_path import find_at, is_dotted
from grmpipe.models.engines.embedded.embedded_kind import EmbeddedKind
from grmpipe.models.engines.engine_kind import AnyEngine, EngineKind
from grmpipe.models.engines.openai.openai_kind import OpenAIKind
from grmpipe.models.engines.sglang.sglang_kind import SglangKind
from grmpipe.models.engines.vllm.vllm_kind import VllmKind

ENGINE_KINDS: dict[str, type[AnyEngine]] = {
    "embedded": EmbeddedKind,
    "vllm": VllmKind,
    "sglang": SglangKind,
    "openai": OpenAIKind,
}


def engine_kind(name: str, key: str) -> type[AnyEngine]:
    """A row of the table, or the class at a dotted path. Raises ValueError, which begins with the key."""
    if name in ENGINE_KINDS:
        return ENGINE_KINDS[name]
    if not is_dotted(name):
        known = ", ".join(ENGINE_KINDS)
        raise ValueError(f"{key}: unknown engine {name!r}; known: {known}, or the dotted path of an EngineKind")
    found = find_at(name, key)
    if not inspect.isclass(found) or not issubclass(found, EngineKind) or inspect.isabstract(found):
        raise ValueError(
            f"{key}: {name} is no engine; it must be a class derived from "
            "grmpipe.models.engines.engine_kind.EngineKind, with `read_options` and `make`"
        )
    return found


def engines_that(can: Callable[[type[AnyEngine]], bool]) -> list[str]:
    """Names in the table of the engines for which `can` is true, for messages."""
    return [name for name, kind in ENGINE_KINDS.items() if can(kind)]
