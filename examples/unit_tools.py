"""Typed functions as tools. Each public function is one; its docstring is what the policy reads of it.

PYTHONPATH=examples python launch.py +experiment=quickstart env=tools env.functions=unit_tools rollout.max_turns=4 \
    judge.format.truncation=middle
"""

from __future__ import annotations

from typing import Literal

from grmpipe.envs.env import PolicyFault

METRES = {"mm": 0.001, "cm": 0.01, "m": 1.0, "km": 1000.0, "in": 0.0254, "ft": 0.3048, "mi": 1609.344}
Unit = Literal["mm", "cm", "m", "km", "in", "ft", "mi"]


def convert(amount: float, from_unit: Unit, to_unit: Unit) -> float:
    """Convert a length from one unit to another.

    Args:
        amount: the length, in from_unit
        from_unit: the unit that it has
        to_unit: the unit that you want
    """
    return round(amount * METRES[from_unit] / METRES[to_unit], 6)


async def divide(a: float, b: float) -> float:
    """Divide a by b."""
    if b == 0:
        raise PolicyFault("b is 0")  # the policy reads this, and what else is raised about a call, with its type
    return a / b
