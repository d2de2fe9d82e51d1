"""All-to-all between ranks, with gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Splits = list[int] | None  # rows for each rank; None: equal parts


def exchange_rows(rows: Tensor, group: dist.ProcessGroup, sends: Splits = None, receives: Splits = None) -> Tensor:
    """Rows for other ranks -> rows from them, in the order of ranks; the gradient goes the same way back. A collective,
    and so is its backward pass.
    """
    received: Tensor = _Exchange.apply(rows, sends, receives, group)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: Splits, receives: Splits, group: dist.ProcessGroup) -> Tensor:
        ctx.way_back = (receives, sends, group)
        num_rows = len(rows) if receives is None else sum(receives)
        received = rows.new_empty((num_rows, *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        returned: Tensor = _Exchange.apply(gradients[0], *ctx.way_back)  # type: ignore[no-untyped-call]
        return returned, None, None, None
