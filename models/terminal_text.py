"""Text from outside, made safe for a terminal."""


def replace_controls(text: str) -> str:
    """The text without control characters: sequences of them recolour, clear or retitle a terminal, or reorder text."""
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)
