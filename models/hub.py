"""Finds a model's files on this machine: a directory as it is, a hub name or a converted GGUF file in the cache."""

import logging
import re
import tempfile
from pathlib import Path

import xxhash

from grmpipe.models.model_files import PlainConfig, read_json
from grmpipe.models.stored_files import find_cache_folder

log = logging.getLogger(__name__)

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
WEIGHT_FILES = ("*.safetensors", "*.bin")
ANSWER_TIMEOUT_S = 5.0  # for the hub, when asked for its files


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
    if weights:
        _check_weights(Path(directory), path)
    return directory


def _check_weights(directory: Path, path: str) -> None:
    """Check that files of weights are whole and have the shapes of config.json, by their headers alone.

    Raises ValueError (`path: ...`).
    """
    from safetensors import SafetensorError, safe_open  # late, as below

    shards = _shards(directory)
    if lacking := sorted(name for name in shards if not (directory / name).is_file()):
        raise ValueError(
            f"path: {path!r} lacks {', '.join(lacking[:3])}, {len(lacking)} of the {len(shards)} files of its weights; "
            "give a complete model"
        )
    config = PlainConfig.read(str(directory))
    for file in [directory / name for name in sorted(shards)] or sorted(directory.glob(WEIGHT_FILES[0])):
        try:
            with safe_open(file, "np") as tensors:
                for name in [one for one in [*tensors.keys()] if one.endswith("embed_tokens.weight")]:
                    if config is not None:
                        _check_embedding(tuple(tensors.get_slice(name).get_shape()), config, path)
        except SafetensorError as error:
            raise ValueError(
                f"path: {str(file)!r} is no whole file of weights ({error}; {file.stat().st_size} bytes); "
                "fetch it again"
            ) from error


def _check_embedding(shape: tuple[int, ...], config: PlainConfig, path: str) -> None:
    expected = config.vocab_size, config.values.get("hidden_size", shape[-1])
    if shape != expected:
        raise ValueError(
            f"path: the weights in {path!r} have {shape[0]} rows of {shape[-1]} for tokens, and its config.json says "
            f"{expected[0]} of {expected[1]} (vocab_size, hidden_size): they are of two models; give a directory with "
            "the weights' own config.json and tokenizer"
        )


def _shards(directory: Path) -> set[str]:
    """The files of weights that an index names. Empty without one: then there is one file, or it has no index."""
    return set((read_json(str(directory), "model.safetensors.index.json").get("weight_map") or {}).values())


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
    lacking = sorted(name for name in {"config.json", *_shards(directory)} if not (directory / name).is_file())
    if not lacking and not any(list(directory.glob(pattern)) for pattern in WEIGHT_FILES):
        lacking = ["*.safetensors"]
    return f"{path} lacks {', '.join(lacking[:3])}{how(path)}" if lacking else ""


def how(path: str) -> str:
    return f"; on a machine with network access type `hf download {path}`, or give the model's directory"


SUFFIX = ".gguf"
# Half the size of float32, and finer than any quantization; engine and learner cast it to their own dtype.
DTYPE = "float16"


def convert_gguf(path: str) -> str:
    """The directory with the model of a GGUF file: weights, tokenizer, chat template. The file is read again only if
    its place, size or time changed: every task asks, and it may hold gigabytes. Raises ValueError (`path: ...`).
    """
    file = Path(path).resolve()
    found = file.stat()
    cache = find_cache_folder() / "gguf"
    which = f"{file} {found.st_size} {found.st_mtime_ns}"
    directory = cache / f"{file.stem}-{xxhash.xxh3_64_hexdigest(which.encode())}"
    if directory.is_dir():  # it appears whole or not at all
        return str(directory)
    quantization = _check(file)
    log.warning(
        "%s (%s, %.1f GB) is converted to %s in %s; a policy is trained from these weights, and saved as them",
        path, quantization, found.st_size / 1e9, DTYPE, directory,
    )  # fmt: skip
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{file.stem}.", dir=cache) as unfinished:
        made = Path(unfinished) / "model"
        _convert(file, made)
        try:
            made.rename(directory)
        except OSError:  # another process was faster
            if not directory.is_dir():
                raise
    return str(directory)


def _check(file: Path) -> str:
    """How its weights are stored. Raises ValueError for a file that can't be converted."""
    try:
        from gguf import GGUFReader, LlamaFileType
    except ImportError as error:
        raise ValueError(f"path: {str(file)!r} is read by gguf; type: pip install 'grmpipe[gguf]'") from error
    try:
        reader = GGUFReader(file)
        architecture, stored = (reader.get_field(f"general.{name}") for name in ("architecture", "file_type"))
        family = str(architecture.contents()) if architecture is not None else "no architecture"
        kind = LlamaFileType(int(stored.contents())).name if stored is not None else "an unknown quantization"
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ValueError(f"path: {str(file)!r} is no whole GGUF file ({error}); fetch it again") from error
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    known = sorted({*GGUF_SUPPORTED_ARCHITECTURES} - {"general", "tokenizer"})  # sections of a file, listed with them
    if family not in known:
        raise ValueError(
            f"path: {str(file)!r} has the architecture {family}, which transformers can't read from a GGUF file; give "
            f"the model's Hugging Face directory or hub name. It reads {', '.join(known)}"
        )
    return kind.removeprefix("MOSTLY_")


def _convert(file: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(file.parent), file.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise ValueError(
            f"path: {str(file)!r} can't be read by transformers ({error}); give the model's Hugging Face directory or "
            "hub name"
        ) from error
    # The weights are plain numbers now: without this transformers takes them for quantized ones, and saves none.
    vars(model).update(hf_quantizer=None, is_quantized=False)
    for holder, attribute in ((model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(holder, attribute):
            delattr(holder, attribute)
    assert all(values.is_floating_point() for values in model.parameters()), "still quantized"
    model.to(getattr(torch, DTYPE)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
