"""A calculator for the word problems of tiny://tools/train, as functions that a policy calls.

env=tools env.functions=grmpipe.tiny.tools data.path=tiny://tools/train
"""

replayable = True  # a call that is repeated brings the same result


def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return f"= {a + b}"


def sub(a: int, b: int) -> str:
    """The difference of two numbers."""
    return f"= {a - b}"
