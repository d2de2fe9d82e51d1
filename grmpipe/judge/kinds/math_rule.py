"""A rule for answers that are mathematics, by the library math-verify. It is imported at the first use."""

import importlib.util
import re
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.run_config import ConfigError

INSTALL = 'pip install "grmpipe[math]"'
# A text in plain words. The library reads one as a product of its letters: "Paris" as a*i*p*r*s, the same as "pairs".
# Short products (xyz) and labels (ABC) are no such text.
TEXT = re.compile(r"(?i:yes|no)|(?=.*(?:[^\W\d_]{4}|[^\W\d_]{2}\s+[^\W\d_]))(?![A-Z]+$)(?:[^\W\d_]|[\s.,;:'’!?-])+")
TIMEOUT_S = 1  # per step of the library; a tower of powers would never end


def is_installed() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def check_installed(judges: Iterable[JudgeConfig]) -> None:
    """Raises ConfigError for a judge that needs the library, if it isn't there."""
    for judge in judges:
        if judge.rule == "math_verify" and not is_installed():
            raise ConfigError(f"{judge.key}.rule: math_verify needs math-verify; type {INSTALL}")


def means_the_same(text: str, reference: str) -> bool:
    r"""The answer of the text (its last box, or what comes last) equals the reference as mathematics: fractions, roots,
    intervals, sets, equations. Raises ValueError for a reference without mathematics.

    Works in the main thread only, because the library's timeouts are signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math_verify: its timeouts use signals, which only the main thread receives")
    from math_verify import verify

    expected = parse_reference(reference)
    if not expected or (expected[-1] == reference and TEXT.fullmatch(reference.strip())):
        raise ValueError(f"reference {reference[:80]!r} contains no mathematics; type judge.rule=contains_reference")
    return bool(verify(list(expected), parse_math(text), timeout_seconds=TIMEOUT_S))


@lru_cache(maxsize=4096)
def parse_reference(reference: str) -> tuple[object, ...]:
    marked = any(mark in reference for mark in ("$", "\\boxed{", "\\(", "\\["))
    return tuple(parse_math(reference if marked else f"${reference}$"))


def parse_math(text: str) -> Sequence[object]:
    from math_verify import parse

    found: Sequence[object] = parse(text, parsing_timeout=TIMEOUT_S)
    return found
