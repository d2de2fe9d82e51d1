"""Finds a model's files on this machine: a directory as it is, a hub name or a converted GGUF file in the cache."""

import json
import re
from pathlib import Path

from models.gguf_files import SUFFIX, convert_gguf

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
WEIGHT_FILES = ("*.safetensors", "*.bin")
ANSWER_TIMEOUT_S = 5.0  # of the hub, when asked for its files


class NotHere(ValueError):
    """A hub name whose files are neither in the cache nor available now. Another machine may have them."""


def find_files(path: str, *, weights: bool) -> str:
    """The directory of a model. A hub name is fetched (without `weights` only its small files), or found in the cache.

    HF_HUB_OFFLINE is respected; an unreachable hub is noticed within seconds. Raises NotHere, or ValueError for a path
    that is neither a directory with a model nor a hub name.
    """
    directory = _fetched(path, weights) if is_hub_name(path) else _directory(path)
    if not (Path(directory) / "config.json").is_file():
        raise ValueError(
            f"path: {path!r} holds no config.json; give a Hugging Face model directory{_found_in(Path(directory))}"
        )
    if weights and not any(list(Path(directory).glob(pattern)) for pattern in WEIGHT_FILES):
        if is_hub_name(path):
            raise NotHere(f"path: {path!r} has no weights in the cache (*.safetensors){how(path)}")
        raise ValueError(f"path: {path!r} holds no weights (*.safetensors); give a complete model")
    return directory


def is_hub_name(path: str) -> bool:
    """Whether a path is a hub name; a directory of the same name takes precedence."""
    return HUB_NAME.fullmatch(path) is not None and not path.endswith(SUFFIX) and not Path(path).is_dir()


def _directory(path: str) -> str:
    """Absolute, because other processes may have other working directories."""
    if path.endswith(SUFFIX) and Path(path).is_file():
        return convert_gguf(path)
    if not Path(path).is_dir():
        raise ValueError(
            f"path: no directory {path!r}; give a Hugging Face model directory{_found_in(Path(path).parent)}, a "
            "GGUF file or a hub name"
        )
    return str(Path(path).resolve())


def _found_in(folder: Path) -> str:
    """The models in a folder, such as a run's, in brackets."""
    inside = sorted(str(found.parent) for found in folder.glob("*/config.json"))
    return f" ({', '.join(inside[:3])} {'is one' if len(inside) == 1 else 'are some'})" if inside else ""


def _fetched(path: str, weights: bool) -> str:
    from huggingface_hub import snapshot_download  # late: a third of a second, which a model in a folder does without
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [*SMALL_FILES, "*.safetensors"] if weights else list(SMALL_FILES)
    try:
        return snapshot_download(path, allow_patterns=patterns, etag_timeout=ANSWER_TIMEOUT_S)
    except LocalEntryNotFoundError as error:
        beside = _found_in(Path(path).parent)
        raise NotHere(f"path: no directory {path!r}, and the hub can't be reached{how(path)}{beside}") from error
    except HfHubHTTPError as error:
        said = next(line for line in str(error).splitlines() if line.strip())
        raise ValueError(f"path: no directory {path!r}, and the hub refuses it ({said}); give another path") from error


def find_missing_files(path: str) -> str:
    """What a model's files lack on this machine, and what to type; empty if nothing. Fetches nothing."""
    if "://" in path:  # made by the project itself
        return ""
    from huggingface_hub import snapshot_download  # late, as above
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        patterns = [*SMALL_FILES, *WEIGHT_FILES]
        directory = Path(
            snapshot_download(path, allow_patterns=patterns, local_files_only=True)
            if is_hub_name(path)
            else _directory(path)
        )
    except LocalEntryNotFoundError:
        return f"{path} isn't in the cache{how(path)}"
    except ValueError as error:
        return str(error).removeprefix("path: ")
    index = directory / "model.safetensors.index.json"
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else set()
    lacking = sorted(name for name in {"config.json", *names} if not (directory / name).is_file())
    if not lacking and not any(list(directory.glob(pattern)) for pattern in WEIGHT_FILES):
        lacking = ["*.safetensors"]
    return f"{path} lacks {', '.join(lacking[:3])}{how(path)}" if lacking else ""


def how(path: str) -> str:
    return f"; on a machine with network access type `hf download {path}`, or give the model's directory"
