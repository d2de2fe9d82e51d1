"""Low-rank adapters for frozen weights (LoRA, arXiv 2106.09685). The only module that imports peft.

    h = W x + scale * B (A x),  scale = alpha / rank

B begins at 0, so a model with new adapters gives the same outputs. Frozen weights keep the dtype they were loaded in.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from grmpipe.models.lm.causal_lm import outline_causal_lm
from grmpipe.models.lm.unshard import Outgoing, Piece, list_pieces, unshard
from grmpipe.models.model_files import hash_weights, read_json
from grmpipe.models.settings import LoraConfig

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

    from grmpipe.models.lm.parallelize import Architecture

ADAPTER = "default"  # peft's name for a single adapter
ADAPTER_FILE, BASE_HASH = "adapter_model.safetensors", "base_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The adapter of one linear layer. R: rank, I: inputs, O: outputs."""

    a_RI: nn.Parameter
    b_OR: nn.Parameter
    scale: float

    @property
    def change_OI(self) -> Tensor:
        """The change of the layer's weight. Whole tensors, or B's rows on several ranks with A whole on each."""
        a_RI, b_OR = self.a_RI.detach(), self.b_OR.detach()
        if isinstance(a_RI, DTensor):
            a_RI = a_RI.redistribute(placements=[Replicate()] * a_RI.device_mesh.ndim)
        return self.scale * (b_OR @ a_RI)


def find_targets(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """The last parts of the names of linear layers that get adapters; all within the blocks if the configuration names
    none. Raises ValueError that names one that doesn't exist.
    """
    from grmpipe.models.lm.parallelize import decoder_layers  # late: engines don't need it

    there = {
        name.rpartition(".")[2]
        for layer in decoder_layers(model)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
    unknown = [name for name in lora.target_modules if name not in there]
    if unknown or not there:
        raise ValueError(
            f"lora.target_modules: no block of this {type(model).__name__} has a linear layer "
            f"{unknown[0] if unknown else ''!r}; known: {', '.join(sorted(there)) or 'none'}"
        )
    return sorted(lora.target_modules or there)


def check_targets(path: str, lora: LoraConfig) -> None:
    """Raises ValueError if the model at `path` can't have such adapters. Reads no weights, needs no peft."""
    find_targets(outline_causal_lm(path), lora)


def check_adapter_files(base: str, lora: LoraConfig, typed: str) -> None:
    """Check that the adapter in `lora.path` is one of this base, of that rank. typed: the base's path as it was given.
    Raises ValueError (`<key>: ...`).
    """
    directory = lora.path or ""
    config, file = read_json(directory, "adapter_config.json"), Path(directory, ADAPTER_FILE)
    if not config or not file.is_file():
        raise ValueError(
            f"path: no adapter_config.json and {ADAPTER_FILE} in {directory}; give an adapter's directory as peft "
            "writes it, such as <run_dir>/adapter"
        )
    for ours, theirs in (("rank", "r"), ("alpha", "lora_alpha")):
        if config.get(theirs) != getattr(lora, ours):
            raise ValueError(
                f"{ours}: the adapter in {directory} has {config.get(theirs)}, got {getattr(lora, ours)}; type that"
            )
    with safe_open(file, framework="pt") as stored:
        hashed = (stored.metadata() or {}).get(BASE_HASH)
    named, names = str(config.get("base_model_name_or_path") or ""), {Path(base).name, Path(typed).name}
    if (hashed != hash_weights(base)) if hashed else (named and Path(named).name not in names):
        why = "; their hash differs" if hashed else ""
        raise ValueError(
            f"path: the adapter in {directory} was trained on other weights ({named}{why}) than {typed}; give an "
            "adapter of this base, or its own base"
        )
    add_adapters(outline_causal_lm(base), {ADAPTER: lora}, "float32")


def add_adapters(model: PreTrainedModel, loras: Mapping[str, LoraConfig], dtype: str, seed: int = 0) -> PreTrainedModel:
    """Add adapters of `dtype` to a model, by name, and freeze it. Its modules get other names: see `plain_name`.

    `seed`: of A of new ones, the same on all ranks.
    """
    from peft import inject_adapter_in_model

    configs = {name: _peft_config(model, lora, find_targets(model, lora)) for name, lora in loras.items()}
    for name, config in configs.items():
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            torch.manual_seed(seed)
            warnings.simplefilter("ignore", UserWarning)  # of a second adapter, which is meant
            inject_adapter_in_model(config, model, name)
        for _, low_rank in adapters(model, name):
            for parameter in (low_rank.a_RI, low_rank.b_OR):
                parameter.data = parameter.data.to(getattr(torch, dtype))
        if (directory := loras[name].path) is not None:
            load_adapter(model, name, directory)
    model.eval()
    return model


@torch.no_grad()
def load_adapter(model: nn.Module, name: str, directory: str) -> None:
    """Load an adapter from peft's files. Raises ValueError (`path: ...`) for one of other layers or shapes."""
    stored = load_file(Path(directory) / ADAPTER_FILE)
    held = {
        f"base_model.model.{layer}.lora_{which}.weight": parameter
        for layer, low_rank in adapters(model, name)
        for which, parameter in (("A", low_rank.a_RI), ("B", low_rank.b_OR))
    }
    for key in sorted(stored.keys() ^ held.keys()) or held:
        here, there = held.get(key), stored.get(key)
        if here is None or there is None or here.shape != there.shape:
            raise ValueError(
                f"path: the adapter in {directory} is of another base, or of other layers: it has "
                f"{'no ' + key if there is None else f'{key} of shape {tuple(there.shape)}'}, the model "
                f"{'no such layer' if here is None else tuple(here.shape)}; give an adapter of this base, with its "
                "lora.rank and lora.target_modules"
            )
        here.copy_(there)


def with_adapters(lora: LoraConfig, frozen_dtype: str, seed: int = 0) -> Architecture:
    """Causal language models with new adapters; frozen weights are held in their own type."""
    from grmpipe.models.lm.parallelize import CAUSAL_LM, Architecture

    def load(path: str, dtype: str) -> PreTrainedModel:
        return add_adapters(CAUSAL_LM.load(path, frozen_dtype), {ADAPTER: lora}, dtype, seed)

    def outline(path: str, dtype: str) -> PreTrainedModel:
        # Without values: an outline takes those of the loaded model.
        return add_adapters(CAUSAL_LM.outline(path, frozen_dtype), {ADAPTER: replace(lora, path=None)}, dtype, seed)

    return Architecture(load=load, outline=outline)


def adapters(model: nn.Module, name: str = ADAPTER) -> Iterator[tuple[str, LowRank]]:
    """Name of a linear layer -> its part of an adapter, in the order of the model; none in a plain model."""
    for layer, module in model.named_modules():
        if (low_rank := find_adapter(module, name)) is not None:
            yield layer, low_rank


def find_adapter(module: Any, name: str = ADAPTER) -> LowRank | None:
    """A layer's part of an adapter; None for a layer without one."""
    if name not in list_names(module):
        return None
    return LowRank(a_RI=module.lora_A[name].weight, b_OR=module.lora_B[name].weight, scale=float(module.scaling[name]))


def list_names(module: Any) -> tuple[str, ...]:
    """The names of a layer's adapters; none for a plain layer."""
    return tuple(module.lora_A) if hasattr(module, "lora_A") else ()  # peft may not be installed: no class to check


@contextmanager
def with_adapter(model: nn.Module, name: str) -> Iterator[None]:
    """Context: the model with this adapter alone, without any if it has none of that name. Only for inference."""
    layers: list[Any] = [module for module in model.modules() if list_names(module)]
    before = [layer._active_adapter for layer in layers]
    try:
        for layer in layers:  # peft's own switch would also change which parameters need gradients
            layer._active_adapter = [name] if name in layer.lora_A else []
        yield
    finally:
        for layer, names in zip(layers, before, strict=True):
            layer._active_adapter = names


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context: the model as it was loaded, the reference of a KL. Only for passes without backward.

    It sets the scale to 0: peft's own switch would remove `requires_grad` from the adapters without FSDP2 noticing.
    """
    layers: list[Any] = [module for module in model.modules() if find_adapter(module) is not None]
    scales = [layer.scaling[ADAPTER] for layer in layers]
    try:
        for layer in layers:
            layer.scaling[ADAPTER] = 0.0
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[ADAPTER] = scale


# -- weights out ---------------------------------------------------------------------------------------------------


def rename_adapter(sent: str, name: str) -> str:
    """The name of a learner's tensor in a model with several adapters, of which this one is meant."""
    return sent.replace(f".{ADAPTER}.", f".{name}.")


def name_in_file(sent: str) -> str:
    """The name in an adapter's file of a learner's tensor."""
    return f"base_model.model.{sent.replace(f'.{ADAPTER}.', '.')}"


def outline_adapter(model: PreTrainedModel, lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """The tensors of a file of such an adapter: name -> shape."""
    targets = find_targets(model, lora)
    shapes: dict[str, tuple[int, int]] = {}
    for layer, module in model.named_modules():
        if isinstance(module, nn.Linear) and layer.rpartition(".")[2] in targets:
            prefix = f"base_model.model.{layer}.lora_"
            shapes |= {f"{prefix}A.weight": (lora.rank, module.in_features)}
            shapes |= {f"{prefix}B.weight": (module.out_features, lora.rank)}
    return shapes


def plain_name(name: str) -> str:
    """The name of a tensor in the model without adapters."""
    return name.replace(".base_layer.", ".")


def list_outgoing(model: nn.Module, lora: LoraConfig, dtype: str) -> Outgoing:
    """The tensors of a push: adapters under peft's names, or merged weights under the names of the plain model; then
    weights without adapters are sent once and are fixed from then on.
    """
    low_ranks = {f"{name}.base_layer.weight": low_rank for name, low_rank in adapters(model)}
    trained = {id(p) for low_rank in low_ranks.values() for p in (low_rank.a_RI, low_rank.b_OR)}
    if lora.sync == "adapters":
        return Outgoing(changing=[piece for piece in list_pieces(model, dtype) if id(piece.tensor) in trained])
    held: torch.dtype = getattr(torch, dtype)
    fixed, changing = [], []
    for piece in list_pieces(model, dtype):
        plain = plain_name(piece.name)
        if (low_rank := low_ranks.get(piece.name)) is not None:
            merged = partial(_merged, piece.tensor, low_rank, held)
            changing.append(Piece(name=plain, tensor=piece.tensor, unsharded=merged))
        elif id(piece.tensor) not in trained:
            fixed.append(Piece(name=plain, tensor=piece.tensor, unsharded=piece.unsharded))
    return Outgoing(changing=changing, fixed=fixed)


def merge_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of the plain model, from a whole one with adapters. Sums are in the adapters' type."""
    plain = dict(state)
    for name, low_rank in adapters(model):
        a_RI, b_OR = (plain.pop(f"{name}.lora_{which}.{ADAPTER}.weight") for which in "AB")
        key = f"{name}.base_layer.weight"
        plain[key] = plain[key].to(a_RI.dtype) + low_rank.scale * (b_OR @ a_RI)
    return {plain_name(name): tensor for name, tensor in plain.items()}


def save_adapters(directory: str, model: PreTrainedModel, state: Mapping[str, Tensor], lora: LoraConfig) -> None:
    """Write adapters in peft's format, from a whole state dict of the model."""
    kept = {
        name_in_file(key): state[key].contiguous()
        for name, _ in adapters(model)
        for key in (f"{name}.lora_A.{ADAPTER}.weight", f"{name}.lora_B.{ADAPTER}.weight")
    }
    config = _peft_config(model, lora, sorted({name.rpartition(".")[2] for name, _ in adapters(model)}))
    config.inference_mode = True
    Path(directory).mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    base = hash_weights(str(model.config.name_or_path))
    save_file(kept, Path(directory) / ADAPTER_FILE, metadata={"format": "pt"} | ({BASE_HASH: base} if base else {}))


def _peft_config(model: PreTrainedModel, lora: LoraConfig, targets: list[str]) -> PeftConfig:
    from peft import LoraConfig as PeftConfig
    from peft import TaskType

    return PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number works
        lora_dropout=0.0,
        target_modules=targets,
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=model.config.name_or_path,
    )


@torch.no_grad()
def _merged(weight: Tensor, low_rank: LowRank, dtype: torch.dtype) -> Tensor:
    """W + scale * B A, whole. With several ranks each adds its own rows, and the cast result is gathered."""
    return unshard(weight.detach().to(low_rank.a_RI.dtype) + low_rank.change_OI, dtype)
