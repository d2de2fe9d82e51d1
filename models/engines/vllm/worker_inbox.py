"""What the receiving ends of pushes in vLLM's workers have in common: their process group and errors."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from grmpipe.models.engines.taken_tensors import Taken
from grmpipe.models.engines.vllm.vllm_weights import Applied, PlainBucket, encode_errors
from grmpipe.models.types import GroupLink
from grmpipe.models.weights.process_group import BroadcastLink


class WorkerInbox(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not read
    """The receiving end of pushes, one per worker.

    checksums: one per tensor received since the push began; applied: their effect on this worker, once it ended.
    """

    init_info_cls = GroupLink
    update_info_cls = PlainBucket

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.checksums: dict[str, str] = {}
        self.applied: Applied | None = None
        self._group = BroadcastLink(device, get_tensor_model_parallel_rank())
        self._taken = Taken.of(vllm_config.model_config.model)

    def init_transfer_engine(self, init_info: GroupLink) -> None:
        with encode_errors():
            self._group.join(init_info)

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Load all of a bucket, or nothing and raise an error with the tensor that doesn't fit; the update is then
        over.
        """
        with encode_errors():
            try:
                self.receive_weights(self.parse_update_info(update_info))
            except BaseException:
                self._group.leave()  # otherwise the sender waits for us until its timeout
                self.drop()
                raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    @abstractmethod
    def receive_weights(self, update_info: PlainBucket) -> None:
        """Load all of a bucket, or nothing and raise."""

    @abstractmethod
    def drop(self) -> None:
        """Drop an unfinished push."""

    def shutdown(self) -> None:
        self._group.leave()
