"""Lets the stock SGLang wheel start where there is no GPU: what exists for GPUs alone becomes an empty module.

build.sh puts this file and a .pth that imports it into the environment, so that SGLang's child processes find it too.
Nothing is imported here but the standard library: it runs at every start of the interpreter.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types

GPU_ONLY = frozenset(
    {"av", "cutlass", "decord", "flashinfer", "quack", "sgl_kernel", "timm", "torchaudio", "triton_kernels"}
)


class Names(type):
    """Makes a class for every name that is asked of a class, as modules do below."""

    def __getattr__(cls, name: str) -> object:
        return _name(cls, name)


class Nothing(types.ModuleType):
    """A module with every name in it: a class that may be inherited from and called, and does nothing."""

    def __getattr__(self, name: str) -> object:
        return _name(self, name)


def _name(owner: object, name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    value = Names(name, (), {"__init__": lambda self, *args, **kwargs: None})
    setattr(owner, name, value)
    return value


class GpuOnly(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of GPU_ONLY, with all below them, and makes each a Nothing."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> object:
        if fullname == "torchvision":
            _skip_operators_of_torchvision()
        if fullname.partition(".")[0] in GPU_ONLY:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return _changed(fullname, path) if fullname in CHANGED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Nothing(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _let_torch_attention_be_deterministic(choices: types.ModuleType) -> None:
    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")


def _leave_kernels_as_they_are(batch_invariant_ops: types.ModuleType) -> None:
    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None


def _hash_without_a_kernel(murmur_hash: types.ModuleType) -> None:
    """MurmurHash3 of (seed, position, column), as its GPU kernel does it: a wheel for GPUs lacks the one for CPUs."""
    import torch

    def rotated(bits: torch.Tensor, places: int) -> torch.Tensor:
        return (bits << places | bits >> (32 - places)) & 0xFFFFFFFF

    def mixed(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        block = rotated(block * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        return rotated(state ^ block, 13) * 5 + 0xE6546B64 & 0xFFFFFFFF

    def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
        seed = seed.to(torch.int64)[:, None]
        state = torch.zeros_like(seed)
        for block in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, positions.to(torch.int64)[:, None], col_indices):
            state = mixed(state, block.to(torch.int64))
        state = state ^ 16
        state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return state ^ state >> 16

    murmur_hash.murmur_hash32 = murmur_hash32


# SGLang draws by a request's own seed only in its deterministic mode, which it offers for GPU kernels alone.
CHANGED = {
    "sglang.srt.arg_groups.choices": _let_torch_attention_be_deterministic,
    "sglang.kernels.ops.sampling.murmur_hash": _hash_without_a_kernel,
    "sglang.srt.batch_invariant_ops": _leave_kernels_as_they_are,
}


def _changed(fullname: str, path: object) -> object:
    """The module as it is, changed once it has run."""
    spec = importlib.machinery.PathFinder.find_spec(fullname, path)
    run = spec.loader.exec_module

    def run_and_change(module: types.ModuleType) -> None:
        run(module)
        CHANGED[fullname](module)

    spec.loader.exec_module = run_and_change
    return spec


def _skip_operators_of_torchvision() -> None:
    """Its compiled part is for another build of torch; describing operators that aren't there ends its import."""
    import torch.library

    register_fake = torch.library.register_fake

    def register(name: str, *args: object, **kwargs: object) -> object:
        if str(name).startswith("torchvision::"):
            return lambda function: function
        return register_fake(name, *args, **kwargs)

    torch.library.register_fake = register


sys.meta_path.insert(0, GpuOnly())
