"""In which order those who wait are served: by urgency, which ages, so that nobody starves. Pure."""

from __future__ import annotations


def rank(*, arrival: int, urgency: int, patience: int) -> int:
    """The lowest rank is served first. Urgency 0 is the greatest; arrivals are numbered, alike ones are one party.

    Whoever is less urgent by n degrees is overtaken by none but the next n * patience arrivals: after these he is
    first, however many more come.
    """
    return arrival + patience * urgency
