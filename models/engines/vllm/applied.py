"""The effect of a push on the parameters of one vLLM worker: which tensors went into which parameters, and whether
these changed.

A tensor counts as taken when a parameter's weight loader was called with it. A parameter that took a tensor with other
bytes than in the last push must also have other bytes, unless its layer quantizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import layerwise

from grmpipe.models.engines.vllm.vllm_weights import Applied
from grmpipe.models.weights.checksums import tensor_checksums

Named = tuple[str, Tensor]
UNQUANTIZED = "Unquantized"  # the prefix of vLLM's methods that keep a weight's type


class Application:
    """Observes pushes into one worker's model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, str] = {}  # parameter -> digest
        self._last_sent: dict[str, str] = {}
        self._parameters: dict[int, str] = {}  # loaded parameters, by identity
        self._holders: dict[str, set[str]] = {}
        self._unseen: set[str] = set()  # tensors merged with others before a parameter took them

    def begin(self) -> None:
        """Call before vLLM takes its parameters apart."""
        self._before = self._before or self._digests()
        self._holders, self._unseen = {}, set()

    def broke_off(self) -> None:
        """After an interrupted push some parameters may have new bytes: earlier checksums say nothing about them."""
        self._before, self._last_sent = {}, {}

    def read_from_files(self) -> None:
        """The parameters were read from files, not from a push."""
        self._last_sent = {}

    @contextmanager
    def watch(
        self, tensors: Iterable[Named], members: Mapping[str, Sequence[str]] | None = None
    ) -> Iterator[Iterator[Named]]:
        """Pass these tensors to vLLM's loader within the block. members: name -> the tensors that were joined to it."""
        names: dict[int, Sequence[str]] = {}
        under_way: list[Sequence[str]] = []

        def handed() -> Iterator[Named]:
            for name, tensor in tensors:
                under_way.append((members or {}).get(name, (name,)))
                names[_storage(tensor)] = under_way[-1]
                yield name, tensor

        parameters = {
            id(parameter): f"{module_name}.{name}"
            for module_name, module in self._model.named_modules()
            for name, parameter in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        }
        merged = False
        count: Callable[..., Any] = layerwise.get_numel_loaded

        def seen(loader: Callable[..., Any], arguments: inspect.BoundArguments) -> Any:
            nonlocal merged
            values = list(arguments.arguments.values())
            sources = [names[_storage(v)] for v in values if isinstance(v, Tensor) and _storage(v) in names]
            merged = merged or not sources
            into = next((parameters[id(v)] for v in values if id(v) in parameters), "")
            for name in chain.from_iterable(sources or under_way[-1:]):
                self._holders.setdefault(name, set()).update({into} - {""})
            return count(loader, arguments)

        layerwise.get_numel_loaded = seen
        try:
            yield handed()
        finally:
            layerwise.get_numel_loaded = count
        if merged:  # its tensors are unknown
            self._unseen |= set(chain.from_iterable(under_way))

    def end(self, sent: Mapping[str, str]) -> Applied:
        """Call after vLLM put its parameters together again. `sent`: name -> checksum of the received tensors."""
        after = self._digests()
        changed = {parameter for parameter, digest in after.items() if self._before.get(parameter) != digest}
        comparable = after.keys() & self._before.keys() - self._quantized()
        last = self._last_sent
        others = {name for name, checksum in sent.items() if checksum and last.get(name, checksum) != checksum}
        moved = {name for name, holders in self._holders.items() if holders & changed}
        still = {name for name in others - moved if (held := self._holders.get(name)) and held <= comparable}
        self._before, self._last_sent = after, {**last, **sent}
        return Applied(taken=sorted(self._holders.keys() | self._unseen), still=sorted(still), moved=sorted(moved))

    def _digests(self) -> dict[str, str]:
        """The digests of parameters. Without those that a CPU kernel holds in its own form, next to an empty
        parameter.
        """
        tensors = {name: tensor for name, tensor in self._model.named_parameters() if tensor.numel()}
        return dict(zip(tensors, tensor_checksums(list(tensors.values())), strict=True))

    def _quantized(self) -> set[str]:
        """Parameters whose bytes may stay the same when their tensors change a little."""
        return {
            f"{module_name}.{name}"
            for module_name, module in self._model.named_modules()
            if not type(getattr(module, "quant_method", None)).__name__.startswith((UNQUANTIZED, "NoneType"))
            for name, _ in module.named_parameters(recurse=False)
        }


def _storage(tensor: Tensor) -> int:
    return 0 if tensor.device.type == "meta" else tensor.untyped_storage().data_ptr()
