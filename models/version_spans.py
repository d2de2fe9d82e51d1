"""Version spans of a completion from stretches of its tokens. Pure."""

from collections.abc import Iterable

from grmpipe.models.types import VersionSpan


def join_spans(model: str, stretches: Iterable[tuple[int, int, int]], latest: int) -> tuple[VersionSpan, ...]:
    """The spans of stretches (version, start, end), which follow each other: neighbours of one version become one, and
    those without a token none. Without any token: an empty span of the version `latest`.
    """
    spans: list[VersionSpan] = []
    for version, start, end in stretches:
        if start >= end:
            continue
        if spans and spans[-1].version == version:
            start = spans.pop().start
        spans.append(VersionSpan(model=model, version=version, start=start, end=end))
    return tuple(spans) or (VersionSpan(model=model, version=latest, start=0, end=0),)
