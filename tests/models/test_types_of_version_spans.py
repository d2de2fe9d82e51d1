"""Stretches of tokens become version spans that cover them without gaps."""

from __future__ import annotations

from grmpipe.models.types import VersionSpan, join_spans


def span(version: int, start: int, end: int) -> VersionSpan:
    return VersionSpan(model="policy", version=version, start=start, end=end)


def test_neighbours_of_one_version_become_one_span_and_empty_stretches_none() -> None:
    stretches = [(3, 0, 2), (3, 2, 5), (4, 5, 5), (5, 5, 6), (5, 6, 9)]
    assert join_spans("policy", stretches, latest=5) == (span(3, 0, 5), span(5, 5, 9))


def test_a_version_that_sampled_nothing_separates_nothing() -> None:
    assert join_spans("policy", [(3, 0, 2), (4, 2, 2), (3, 2, 3)], latest=3) == (span(3, 0, 3),)


def test_a_completion_without_tokens_has_an_empty_span_of_the_latest_version() -> None:
    assert join_spans("policy", [(3, 0, 0)], latest=4) == (span(4, 0, 0),)
