"""The form of every refusal: a ConfigError that names the key. Checks nothing itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from grmpipe.config.run_config import ConfigError
from models.hub import NotHere


@contextmanager
def section(path: str) -> Iterator[None]:
    """A ValueError of what is checked inside gets the section's key in front, unless it names its section itself."""
    try:
        yield
    except ConfigError:
        raise
    except NotHere as error:
        raise ModelNotHere(f"{path}{error}") from error
    except ValueError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(path) else f"{path}{text}") from error


class ModelNotHere(ConfigError):
    """A hub name that can't be had now. task=plan goes on without it."""
