"""Models in GGUF files, as llama.cpp and Ollama read them: converted once to a Hugging Face directory in the cache."""

import logging
import tempfile
from pathlib import Path

import xxhash

from grmpipe.models.stored_files import find_cache_folder

log = logging.getLogger(__name__)

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
