"""LoRA adapters in vLLM's worker processes: received by our payloads, installed by vLLM's own LoRA manager, compared
with what its layers then hold. Never touches the model's weights.

    start -> bucket by bucket, kept here -> install -> report

The base weights are those that the engine was started with. Each adapter has an inbox; before its first push its B is
0, unless it comes from a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.lora.worker_manager import WorkerLoRAManager

from grmpipe.models.engines.vllm.vllm_weights import Applied, PlainBucket, encode_errors
from grmpipe.models.engines.vllm.worker_inbox import WorkerInbox
from grmpipe.models.types import ModelFiles, WeightTensor
from grmpipe.models.weights.receive_tensors import compute_checksums, receive_tensors

SENT_NAME = re.compile(r"(?P<layer>.+)\.lora_(?P<which>[AB])\.[^.]+\.weight")  # peft's, with the adapter's own name


@dataclass(frozen=True, slots=True, kw_only=True)
class SentAdapter:
    """What the name of a sent tensor says: the layer in the learner's model, and which of its two matrices."""

    layer: str
    is_a: bool

    @staticmethod
    def of(name: str) -> SentAdapter:
        if (parts := SENT_NAME.fullmatch(name)) is None:
            raise ValueError(
                f"weights: {name!r} is no adapter, but this engine receives adapters alone; set lora.sync=merged"
            )
        return SentAdapter(layer=parts["layer"], is_a=parts["which"] == "A")

    @property
    def file_name(self) -> str:
        """As in an adapter's file, by which vLLM knows it."""
        return f"base_model.model.{self.layer}.lora_{'A' if self.is_a else 'B'}.weight"


class AdapterInbox(WorkerInbox):
    """The receiving end of pushes of one adapter. `begin` comes before everything else."""

    @classmethod
    def beside(cls, other: WorkerInbox) -> AdapterInbox:
        """One more in the same worker."""
        return cls(other.config, other.vllm_config, other.device, other.model)

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._manager: WorkerLoRAManager | None = None
        self._request: LoRARequest | None = None
        self._helper: PEFTHelper | None = None
        self._arrived: dict[str, Tensor] = {}
        self._held: dict[str, Tensor] = {}  # the last complete push's: a later one may leave tensors out

    def begin(self, manager: WorkerLoRAManager, request: LoRARequest, rank: int, alpha: float) -> None:
        """Learn how the adapter's change is scaled, and install its file, or one that changes nothing."""
        self._manager, self._request = manager, request
        self._helper = PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[])
        if Path(request.lora_path).is_dir():
            manager.add_adapter(request)
        else:
            manager.add_dummy_lora(request, rank)

    def start_weight_update(self) -> None:
        self.drop()

    @torch.no_grad()
    def receive_weights(self, update_info: PlainBucket) -> None:
        bucket = update_info.restore_bucket()
        if isinstance(bucket.payload, ModelFiles):
            raise ValueError("weights: an engine with adapters keeps its base weights; set lora.sync=merged")
        for tensor in bucket.tensors:
            self._check(tensor)
        with receive_tensors(bucket, self._group) as tensors:
            checksums = compute_checksums(tensors)
            self._arrived |= {announced.name: tensor.to(self.device, copy=True) for announced, tensor in tensors}
        self.checksums |= checksums

    def finish_weight_update(self) -> None:
        """Does nothing: vLLM would drop all adapters after it."""

    @torch.no_grad()
    def install(self) -> None:
        """Replace the adapter by the one that arrived, and compare what the layers hold now."""
        self._held |= self._arrived
        self._arrived = {}
        if not self._held:
            self.applied = Applied(taken=[], still=[], moved=[])
            return
        with encode_errors():
            adapter = self._adapter(self._held)
        manager = self._layers
        manager.remove_adapter(adapter.id)
        manager.add_adapter(adapter)  # it packs q, k and v of a layer, and multiplies B by the scale
        manager.activate_adapter(adapter.id)
        different = set(self._different(adapter, manager))
        taken = sorted(name for name in self.checksums if adapter.get_lora(self._layer(name)) is not None)
        still = [name for name in taken if self._layer(name) in different]
        self.applied = Applied(taken=taken, still=still, moved=[])

    def drop(self) -> None:
        """Drop an unfinished push: the adapter of the last one stays installed."""
        self.checksums, self._arrived, self.applied = {}, {}, None

    def _check(self, tensor: WeightTensor) -> None:
        """Raises ValueError for an adapter that doesn't fit its layer, or whose layer doesn't exist."""
        sent = SentAdapter.of(tensor.name)
        weight = self._taken.shapes.get(f"{sent.layer}.weight")
        if self._layer(tensor.name) not in self._layers.modules or (self._taken.shapes and weight is None):
            raise ValueError(f"weights: the engine's model has no layer for {tensor.name!r}; set lora.sync=merged")
        if weight is not None:
            assert self._helper is not None
            outputs, inputs = weight
            expected = (self._helper.r, inputs) if sent.is_a else (outputs, self._helper.r)
            if expected != tensor.shape:
                raise ValueError(f"weights: {tensor.name!r} arrived as {tensor.shape}, the engine has {expected}")

    def _layer(self, name: str) -> str:
        """vLLM's layer of a sent tensor; several may share one (q, k and v)."""
        own, _ = parse_fine_tuned_lora_name(SentAdapter.of(name).file_name, find_renaming(self.model))
        packed = self._layers.packed_modules
        found: str = next((layer for layer, parts in packed.items() if own in parts), own)
        return found

    @property
    def _layers(self) -> LoRAModelManager:
        assert self._manager is not None, "begin comes first"
        return self._manager._adapter_manager

    def _adapter(self, tensors: dict[str, Tensor]) -> LoRAModel:
        assert self._helper is not None and self._request is not None, "begin comes first"
        return LoRAModel.from_lora_tensors(
            self._request.lora_int_id,
            {SentAdapter.of(name).file_name: tensor.clone() for name, tensor in tensors.items()},  # vLLM scales B
            self._helper,
            device=str(self.device),
            dtype=self._layers.lora_config.lora_dtype,
            weights_mapper=find_renaming(self.model),
        )

    def _different(self, adapter: LoRAModel, manager: LoRAModelManager) -> Iterator[str]:
        """The layers that hold another adapter than this one."""
        slot = manager.lora_index_to_id.index(adapter.id)
        for name, layer in manager.modules.items():
            weights = adapter.get_lora(name)
            if weights is not None and not holds(layer, slot, weights):
                yield name


def find_renaming(model: nn.Module):  # type: ignore[no-untyped-def]
    """vLLM's renaming of this family's modules, if it has one."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return mapper and mapper.get_rename_mapper()


def holds(layer: BaseLayerWithLoRA, slot: int, weights: LoRALayerWeights) -> bool:
    """Whether a layer holds this adapter, or its own part of it if it is sharded."""
    a, b = weights.lora_a, weights.lora_b
    if isinstance(b, list) and len(b) != layer.n_slices:
        a, b = layer.expand_packed_lora(a, b)
    if layer.tp_size > 1:
        a, b = layer.slice_lora_a(a), layer.slice_lora_b(b)
    return all(
        part is None or torch.equal(stack[slot, 0, : part.shape[0], : part.shape[1]], part)
        for stacks, parts in ((layer.lora_a_stacked, a), (layer.lora_b_stacked, b))
        for stack, part in zip(stacks, parts if isinstance(parts, list) else [parts], strict=True)
    )
