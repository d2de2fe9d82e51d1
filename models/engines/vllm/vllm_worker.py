"""The part that runs in vLLM's worker processes: weights are received by our payloads and loaded by vLLM's layerwise
reload.

vLLM imports this module as `worker_extension_cls`. Nothing here touches requests or caches.

A layer's weights may come in several buckets; vLLM keeps them until the layer is complete. A layer that gets only some
tensors (q of q, k, v) takes the rest from its present weights, so a push may leave tensors out.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from grmpipe.models.engines.vllm.applied import Application
from grmpipe.models.engines.vllm.expert_stacks import ExpertStacks, list_whole_layers
from grmpipe.models.engines.vllm.options import OWNER_PID, SOCKETS, WEIGHT_BACKEND
from grmpipe.models.engines.vllm.vllm_requests import adapter_request
from grmpipe.models.engines.vllm.vllm_weights import Applied, PlainBucket, encode_errors, under_sent_names
from grmpipe.models.engines.vllm.worker_inbox import WorkerInbox
from grmpipe.models.types import ModelFiles
from grmpipe.models.weights.receive_tensors import compute_checksums, receive_tensors

if TYPE_CHECKING:
    from grmpipe.models.engines.vllm.adapter_inbox import AdapterInbox

Kernels = dict[UnquantizedFusedMoEMethod, FusedMoEKernel | None]


class Inbox(WorkerInbox):
    """The receiving end of pushes of weights."""

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._sent: set[str] = set()
        self._application = Application(model)
        self._experts = ExpertStacks(list_whole_layers(model))
        self._kernels: Kernels = {}

    def start_weight_update(self) -> None:
        self.drop()
        self._application.begin()
        self._kernels = take_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)

    @torch.no_grad()
    def receive_weights(self, update_info: PlainBucket) -> None:
        bucket = update_info.restore_bucket()
        if isinstance(bucket.payload, ModelFiles):
            self._load(self._stored(bucket.payload.path))
            self._application.read_from_files()
            return
        names = [self._taken.own_name(tensor) for tensor in bucket.tensors]
        self._sent |= set(names)
        with receive_tensors(bucket, self._group) as tensors:
            checksums = compute_checksums(tensors)
            # Copies: vLLM may keep them until a later bucket, when the sender's memory is reused.
            own = [self._experts.join(name, one, self.device) for name, (_, one) in zip(names, tensors, strict=True)]
        with self._application.watch(filter(None, own), self._experts.members) as handed:
            self._load(handed)
        self.checksums |= checksums

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        with encode_errors():
            try:
                self._experts.refuse_incomplete()
                if not self._taken.all_in(self._sent):
                    fill_up(self.model)
                finalize_layerwise_reload(self.model, self.model_config)
            except BaseException:
                self.drop()
                raise
        repack_heads(self.model)
        put_back(self._kernels)
        own = {name: self._taken.own_names.get(name, name) for name in self.checksums}
        applied = self._application.end({own[name]: checksum for name, checksum in self.checksums.items()})
        self.applied = under_sent_names(applied, own)
        self._sent = set()
        self._experts.clear()

    def drop(self) -> None:
        """Drop an unfinished push: incomplete layers get their earlier weights back.

        Otherwise its tensors would be loaded with the next push's.
        """
        if self._sent:
            self._application.broke_off()
        self.checksums, self._sent, self.applied = {}, set(), None
        self._experts.clear()
        for layer in self.model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(layer, info)
                info.reset()
        put_back(self._kernels)

    def _stored(self, path: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors in a model's files, read as vLLM does at its start."""
        model = copy(self.model_config)
        model.model, model.revision = path, None
        loader = get_model_loader(self.vllm_config.load_config)
        if not isinstance(loader, DefaultModelLoader):
            raise ValueError(
                f"engine.vllm.options.load_format: {type(loader).__name__} can't read the files of another model"
            )
        yield from loader.get_all_weights(model, self.model)

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        under_way: list[str] = []

        def pairs() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                under_way.append(name)
                if not self._experts.load(name, tensor):
                    yield name, tensor

        try:
            with disable_mtp_completeness_check():
                self.model.load_weights(pairs())
        except Exception as error:
            raise ValueError(f"weights: vLLM can't load {under_way[-1:]}: {error!r}") from error


class WeightReceiver:
    """Further methods of the worker, for `collective_rpc`."""

    weight_transfer_engine: WorkerInbox
    _adapter_inboxes: dict[str, AdapterInbox]
    model_runner: LoRAModelRunnerMixin
    _weight_update_active: bool
    device: torch.device

    def begin_adapter(self, name: str, number: int, rank: int, alpha: float, path: str | None) -> None:
        """For an engine with adapters: before its first push and its first request."""
        from grmpipe.models.engines.vllm.adapter_inbox import AdapterInbox

        inbox = AdapterInbox.beside(self.weight_transfer_engine)
        inbox.begin(self.model_runner.lora_manager, adapter_request(name, number, path), rank, alpha)
        self._adapter_inboxes = {
            **getattr(self, "_adapter_inboxes", {}),
            name: inbox,
        }  # vLLM makes no instance of this class

    def start_adapter(self, name: str, link: dict[str, Any] | None) -> None:
        """Begin a push of an adapter: join its group, or leave one."""
        inbox = self._adapter_inboxes[name]
        if link is None:
            inbox.shutdown()
        else:
            inbox.init_transfer_engine(inbox.parse_init_info(link))
        inbox.start_weight_update()

    def receive_adapter(self, name: str, bucket: dict[str, Any]) -> None:
        self._adapter_inboxes[name].update_weights(bucket)

    def install_adapter(self, name: str) -> None:
        """End a push of an adapter."""
        self._adapter_inboxes[name].install()

    def take_report(self, adapter: str) -> tuple[dict[str, str], Applied | None]:
        """The checksums of the last push's tensors, and its effect on this worker's parameters."""
        inbox = self._adapter_inboxes[adapter] if adapter else self.weight_transfer_engine
        checksums, inbox.checksums = inbox.checksums, {}
        return checksums, inbox.applied

    def drop_update(self, adapter: str) -> None:
        if adapter:
            self._adapter_inboxes[adapter].drop()
            return
        self.weight_transfer_engine.drop()
        self._weight_update_active = False

    def free_device_bytes(self) -> int:
        """Free bytes of the device; 0 on a CPU, whose memory all processes share."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0


def fill_up(model: nn.Module) -> None:
    """Complete layers that got only some of their tensors, from their present weights."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        came, whole = info.load_numel, info.load_numel_total or 0
        if 0 < came < whole and info.kernel_tensors is not None and not is_deferred_attention_layer(layer):
            _fill_up_layer(layer, info)


def _fill_up_layer(layer: nn.Module, info: LayerReloadingInfo) -> None:
    method = getattr(layer, "quant_method", None)
    if not (method is None or isinstance(method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))):
        raise ValueError(
            f"weights: only some tensors of a {type(layer).__name__} arrived, and vLLM keeps it in its own format "
            f"({type(method).__name__}); send all of them (all of its parts in lora.target_modules)"
        )
    assert info.kernel_tensors is not None
    held, _ = info.kernel_tensors
    materialize_layer(layer, info)
    for name, tensor in held.items():
        target = layer.get_parameter(name)
        target.data.copy_(tensor if tensor.shape == target.shape else _unpacked(layer, tensor, target))


def _unpacked(layer: nn.Module, packed: Tensor, like: Tensor) -> Tensor:
    """A weight that vLLM keeps only for its CPU kernel: the kernel applied to the identity gives its transpose."""
    identity = torch.eye(like.shape[1], dtype=like.dtype)
    unpacked: Tensor = layer.cpu_linear(identity, packed, None).t()  # type: ignore[operator]
    return unpacked


def repack_heads(model: nn.Module) -> None:
    """Renew the copy of a head's weight in its CPU kernel; for a tied head nothing else does."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and layer.weight.device.type == "cpu":
            layer.quant_method.process_weights_after_loading(layer)


def take_expert_kernels(model: nn.Module) -> Kernels:
    """Take the packed form of experts on a CPU, which vLLM makes only for a layer with a new kernel."""
    methods = {
        layer.quant_method
        for layer in model.modules()
        if isinstance(layer, RoutedExperts) and isinstance(layer.quant_method, UnquantizedFusedMoEMethod)
        if layer.w13_weight.device.type == "cpu"
    }
    kernels = {method: method.moe_kernel for method in methods}
    for method in methods:
        method.moe_kernel = None
    return kernels


def put_back(kernels: Kernels) -> None:
    """Put the kernels back for layers that got no weights."""
    for method, kernel in kernels.items():
        if method.moe_kernel is None:
            method.moe_kernel = kernel
    kernels.clear()


def end_with(owner_pid: int) -> None:
    """End with the owner: a killed owner can't end its children, which would keep their memory and devices."""
    core_pid = os.getppid()

    def wait() -> None:
        select.select([os.pidfd_open(owner_pid)], [], [])
        if core_pid != owner_pid:
            os.kill(core_pid, signal.SIGKILL)
        shutil.rmtree(os.environ[SOCKETS], ignore_errors=True)  # there until its first answer
        os._exit(1)

    threading.Thread(target=wait, name="owner", daemon=True).start()


def _set_up_process() -> None:
    WeightTransferEngineFactory.register_engine(WEIGHT_BACKEND, Inbox)
    torch.cpu._init_amx()  # without the kernel's permission the first bfloat16 product dies of SIGILL
    # It warns of every layer without new weights: tied heads, and tensors that a push leaves out.
    logging.getLogger(layerwise.__name__).setLevel(logging.ERROR)
    if OWNER_PID in os.environ and hasattr(os, "pidfd_open"):
        end_with(int(os.environ[OWNER_PID]))


_set_up_process()
