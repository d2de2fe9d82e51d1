"""AdamW whose moments are held in 16 or 8 bits. Computes in the parameters' type, a few rows at a time.

State is plain tensors, sharded as their parameter: torch's checkpoints store it, and load it on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import tensor as distributed
from torch.distributed.tensor import DTensor

from grmpipe.train.compact_moments import BLOCK, from_8bit, num_blocks, to_8bit, to_bfloat16

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # name -> whether it has a sign
SCALE = "_scale"  # after the name of a moment in 8 bits: its blocks' largest magnitudes
FEWEST_8BIT_VALUES = 4096  # smaller parameters, and norms and biases, have moments in float32
VALUES_AT_ONCE = 1 << 24


class CompactAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) with moments of `state_dtype`: bfloat16, by stochastic rounding, or int8, by blocks.

    An update uses the moments before they are rounded. The noise of stochastic rounding is a function of the step, the
    parameter and its shard: a run is the same again, and all copies of a shard are equal.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float,
        state_dtype: str, eps: float = 1e-8,
    ) -> None:  # fmt: skip
        assert state_dtype in ("bfloat16", "int8"), state_dtype
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})
        self._state_dtype = state_dtype
        self._random: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state.update(self._new_state(parameter))
                    state["step"] += 1
                    self._update(index, parameter, state, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which casts all state to the type of its parameter."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in MOMENTS:
                if name in state:
                    state[name] = state[name].to(self._dtype_of(name + SCALE in state))

    def _dtype_of(self, in_blocks: bool) -> torch.dtype:
        if self._state_dtype == "bfloat16":
            return torch.bfloat16
        return torch.uint8 if in_blocks else torch.float32

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        in_blocks = self._state_dtype == "int8" and _has_blocks(parameter)
        state = {"step": torch.tensor(0)}
        for name in MOMENTS:
            state[name] = _zeros(parameter, self._dtype_of(in_blocks))
            if in_blocks:
                state[name + SCALE] = _zeros(parameter, torch.float32, by_block=True)
        return state

    def _update(self, index: int, parameter: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> None:
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        random = self._seeded(step, index, parameter)
        assert parameter.grad is not None
        named = {name: _local(state[name]) for name in state if name != "step"}
        for rows in _rows({"": _local(parameter), "grad": _local(parameter.grad), **named}):
            values, grad = rows.pop(""), rows.pop("grad")
            grad = grad.to(values.dtype)
            mean = self._read(rows, "exp_avg").to(values.dtype).lerp_(grad, 1 - beta1)
            square = self._read(rows, "exp_avg_sq").to(values.dtype).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            self._write(rows, "exp_avg", mean, random)
            self._write(rows, "exp_avg_sq", square, random)
            values.mul_(1 - group["lr"] * group["weight_decay"])
            divisor = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
            values.addcdiv_(mean, divisor, value=-group["lr"] / (1 - beta1**step))

    def _read(self, rows: Mapping[str, Tensor], name: str) -> Tensor:
        if name + SCALE in rows:
            return from_8bit(rows[name], rows[name + SCALE], MOMENTS[name])
        return rows[name].float()

    def _write(self, rows: Mapping[str, Tensor], name: str, values: Tensor, random: torch.Generator) -> None:
        if name + SCALE in rows:
            codes, scale = to_8bit(values, MOMENTS[name])
            rows[name].copy_(codes)
            rows[name + SCALE].copy_(scale)
        else:
            exact = self._state_dtype == "int8"
            rows[name].copy_(values if exact else to_bfloat16(values, random))

    def _seeded(self, step: int, index: int, parameter: Tensor) -> torch.Generator:
        device = parameter.device
        random = self._random.setdefault(device, torch.Generator(device))
        return random.manual_seed(((step << 20) + index << 20) + _shard_of(parameter))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_of(parameter: Tensor) -> int:
    """The number of this rank's shard; equal on ranks with copies of it."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh, number = parameter.device_mesh, 0
    for dim, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            number = number * mesh.size(dim) + mesh.get_local_rank(dim)
    return number


def _has_blocks(parameter: Tensor) -> bool:
    """Whether its moments are held in blocks. A row that is sharded (of experts that many ranks share) must be so
    between two blocks.
    """
    whole_blocks = _local(parameter).shape[-1:] == parameter.shape[-1:] or _local(parameter).shape[-1] % BLOCK == 0
    return parameter.ndim > 1 and parameter.numel() >= FEWEST_8BIT_VALUES and whole_blocks


def _zeros(parameter: Tensor, dtype: torch.dtype, *, by_block: bool = False) -> Tensor:
    """Zeros, sharded as the parameter; one for each value, or for each block of them."""
    shape = (*parameter.shape[:-1], num_blocks(parameter.shape[-1])) if by_block else tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype, device=parameter.device)
    mesh, placements = parameter.device_mesh, parameter.placements
    return distributed.zeros(shape, dtype=dtype, device_mesh=mesh, placements=placements)


def _rows(named: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The same rows of all tensors, some at a time."""
    whole = named[""]
    if whole.ndim == 0 or whole.numel() <= VALUES_AT_ONCE:
        yield dict(named)
        return
    num_rows = max(1, VALUES_AT_ONCE * len(whole) // whole.numel())
    for pieces in zip(*(tensor.split(num_rows) for tensor in named.values()), strict=True):
        yield dict(zip(named, pieces, strict=True))
