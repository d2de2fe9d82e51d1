"""The form of refusals: a ConfigError that names the key."""

from collections.abc import Iterator
from contextlib import contextmanager

from grmpipe.config.io.key_errors import under_key
from grmpipe.config.run_config import ConfigError
from grmpipe.models.hub import NotHere


@contextmanager
def section(path: str) -> Iterator[None]:
    """Context: a ValueError raised inside gets the section's key in front, unless it already names its section."""
    try:
        yield
    except ConfigError:
        raise
    except NotHere as error:
        raise ModelNotHere(f"{path}{error}") from error
    except ValueError as error:
        raise ConfigError(under_key(path, str(error))) from error


class ModelNotHere(ConfigError):
    """A hub name that can't be fetched now. task=plan continues without the model."""
