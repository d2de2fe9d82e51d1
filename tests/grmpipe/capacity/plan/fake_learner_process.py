"""Bytes that the learner holds on one of its ranks, counted in fake tensors: no weights, no GPU. Run by
test_memory.py: reads cases as JSON from the command line, writes a line of JSON for each.

The learner is the real one: its model is sharded by FSDP2 over a fake process group, with the attention of GPUs.
Integers (token ids, places, lengths) are real, because control flow depends on them; all else is fake.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten
from transformers import AutoConfig, PreTrainedModel

from grmpipe.config.io.yaml_io import from_values
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.lm import packed_attention
from grmpipe.models.lm import parallelize as parallelize_module
from grmpipe.models.lm.causal_lm import outline_causal_lm
from grmpipe.models.lm.parallel.ranks import RankMeshes
from grmpipe.models.lm.parallelize import parallelize
from grmpipe.models.settings import KEEP_ALL, Activations
from grmpipe.models.types import VersionSpan
from grmpipe.train.batching.packer import pack_trees
from grmpipe.train.batching.prefix_tree import PrefixTree
from grmpipe.train.learner import learner as learner_module
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.types import MicroBatch, TrainingSample

PROMPT_TOKENS, SIBLINGS = 256, 8


class Held(TorchDispatchMode):
    """Computes integers for real and all else in fake tensors; counts the bytes of living tensors."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake
        self._sizes: dict[int, int] = {}  # storage -> bytes
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            return NotImplemented  # it is called again with the local tensors
        if tensors:
            is_real = not any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)
        else:
            whole = not (kwargs.get("dtype") or torch.float32).is_floating_point
            is_real = whole or func.overloadpacket is torch.ops.aten.arange
        if is_real:
            with _disable_current_modes():
                out = func(*args, **kwargs)
                if func.overloadpacket is torch.ops.c10d.alltoall_base_:
                    args[0].copy_(args[1])  # from each rank as many tokens as to it
                return out
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], [place for index in args[1] for place in self._places(index)], *args[2:])
        with self._fake:
            out = func(*args, **kwargs)
        if func is torch.ops.aten.topk.default:
            out = type(out)((out[0], in_turns(*out[1].shape, args[0].shape[-1])))
        for leaf in tree_flatten(out)[0]:
            if isinstance(leaf, FakeTensor):
                self.note(leaf.untyped_storage())
        return out

    def _places(self, index: Tensor | None) -> tuple[Tensor | None, ...]:
        """The places of a mask, whose hits a fake tensor can't count."""
        if index is None or index.dtype != torch.bool:
            return (index,)
        with _disable_current_modes():
            return index.nonzero(as_tuple=True)

    def note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._gone, key)
        self._set(key, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.now += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    @contextmanager
    def resizes_noted(self) -> Iterator[None]:
        """FSDP2 frees a gathered parameter by emptying its storage."""
        resize = torch.UntypedStorage.resize_

        def noting(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, size)

        torch.UntypedStorage.resize_ = noting  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def in_turns(num_tokens: int, chosen: int, num_experts: int) -> Tensor:
    """The experts of each token [num_tokens, chosen], when all experts get as many tokens as any other."""
    with _disable_current_modes():
        return torch.arange(num_tokens * chosen).remainder(num_experts).view(num_tokens, chosen)


class NoMeter:
    """Reads no numbers, because there are none."""

    def __init__(self, device: torch.device) -> None: ...

    def add(self, *_: object) -> dict[str, float]:
        return {}


def micro_batch(num_tokens: int) -> MicroBatch:
    """Siblings with a short shared prompt: nearly all tokens are trained."""
    each = (num_tokens - PROMPT_TOKENS) // SIBLINGS
    samples = [
        TrainingSample(
            group_id="g",
            sibling=sibling,
            segment=0,
            token_ids=(1,) * PROMPT_TOKENS + (2 + sibling,) * each,
            loss_mask=(0,) * PROMPT_TOKENS + (1,) * each,
            sampler_logprobs=(0.0,) * (PROMPT_TOKENS + each),
            advantages=(0.0,) * PROMPT_TOKENS + (1.0,) * each,
            versions=(VersionSpan(model="policy", version=0, start=PROMPT_TOKENS, end=PROMPT_TOKENS + each),),
        )
        for sibling in range(SIBLINGS)
    ]
    return pack_trees([PrefixTree.of(samples)])


class NowhereHooks(torch.autograd.graph.saved_tensors_hooks):
    """In place of copies on the host, which don't count: forgets a tensor, and makes one as large when it is needed."""

    def __init__(self, **_: object) -> None:
        super().__init__(lambda tensor: (tensor.shape, tensor.dtype), lambda kept: torch.empty(kept[0], dtype=kept[1]))


def measure(
    model: dict[str, Any], ranks: int, num_tokens: int, train: dict[str, Any], algorithm: dict[str, Any]
) -> dict[str, float]:
    """GB of a rank: at most, between two micro-batches, in a micro-batch that is not the first, in an optimizer step.

    model: a config.json. train, algorithm: settings of these sections.
    """
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    held = Held(fake)

    def load(path: str, meshes: RankMeshes, device: torch.device, master: str, dtype: str,
             activations: Activations = KEEP_ALL, *_: object, **__: object) -> PreTrainedModel:  # fmt: skip
        model = outline_causal_lm(path, master)
        parallelize(model, meshes, dtype, activations)
        with held:
            model.to_empty(device=device)
        return model

    learner_module.probe_logprobs = lambda *_: None  # type: ignore[assignment]  # it reads numbers, and these are fake
    learner_module.find_files = lambda path, weights: path  # type: ignore[assignment]
    learner_module.BatchMetrics = NoMeter  # type: ignore[assignment, misc]
    learner_module.load_parallel = load  # type: ignore[assignment]
    parallelize_module.save_on_cpu = NowhereHooks  # type: ignore[assignment, misc]
    train = {"dtype": "bfloat16", **train}
    with tempfile.TemporaryDirectory() as path:
        AutoConfig.for_model(**model).save_pretrained(path)
        spec = LearnerSpec(
            model_path=path, train=from_values(TrainConfig, train),
            algorithm=AlgorithmConfig(**algorithm), max_new_tokens=num_tokens, device="cpu",
        )  # fmt: skip
        batch = micro_batch(num_tokens)
        with held.resizes_noted():
            learner = Learner(spec, 0, ranks)
            with held:
                for parameter in learner._model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                learner._optimizer.step()  # DTensor learns the shapes of results by computing them whole, once
                held.peak = held.now
                learner._optimizer.step()
                in_step = held.peak
                if spec.train.optimizer.offload:
                    learner._optimizer.state.clear()
                held.peak = resting = held.now
                learner.accumulate(batch)
    dist.destroy_process_group()
    return {
        "peak_gb": max(held.peak, in_step) / 1e9,
        "resting_gb": resting / 1e9,
        "micro_batch_gb": held.peak / 1e9,
        "step_gb": in_step / 1e9,
    }


if __name__ == "__main__":
    packed_attention._padded = packed_attention._varlen
    for case in json.loads(sys.argv[1]):
        began_s = time.monotonic()
        print(json.dumps({**measure(**case), "seconds": round(time.monotonic() - began_s, 1)}), flush=True)
