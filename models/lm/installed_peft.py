"""Whether peft is installed. Imports neither it nor torch."""

from __future__ import annotations

import importlib.metadata

from models.settings import INSTALL_PEFT


def peft_missing() -> str | None:
    """What to type if peft isn't installed. None if it is."""
    try:
        importlib.metadata.version("peft")
    except importlib.metadata.PackageNotFoundError:
        return f"peft is not installed; type `{INSTALL_PEFT}`"
    return None
