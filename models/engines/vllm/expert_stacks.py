"""The tensors of single experts on their way into one vLLM worker, joined to one for all experts of a layer.

vLLM's loader takes half a millisecond of Python for each tensor, and a mixture of 30 B parameters has 18,432 of
experts. `RoutedExperts.weight_loader` (vLLM 0.32, fused_moe/routed_experts.py) takes all experts of a layer at once if
it gets three dimensions. The fused names that its `load_weights` knows would lead to a call for each expert again.
"""

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

EXPERT_TENSOR = re.compile(r"(?P<layer>.+\.experts)\.(?P<number>\d+)\.(?P<projection>\w+)\.weight")


class ExpertStacks:
    """The stacks of one worker's layers; tensors of others pass.

    members: stack -> the names of the tensors that it has so far.
    """

    def __init__(self, layers: Iterable[RoutedExperts]) -> None:
        self._layers = {layer.layer_name: layer for layer in layers}
        self.members: dict[str, list[str]] = {}
        self._filling: dict[str, Tensor] = {}

    def clear(self) -> None:
        """Forget the tensors of a push."""
        self.members, self._filling = {}, {}

    def join(self, name: str, tensor: Tensor, device: torch.device) -> tuple[str, Tensor] | None:
        """A copy of the tensor on the device, or the stack that it completes, each with its name. None: it waits in its
        stack for the other experts.
        """
        expert = EXPERT_TENSOR.fullmatch(name)
        if expert is None or (layer := self._layers.get(expert["layer"])) is None:
            return name, tensor.to(device, copy=True)
        stack, number = f"{expert['layer']}.{expert['projection']}", layer.global_num_experts
        if stack not in self.members:
            self._filling[stack] = torch.empty((number, *tensor.shape), dtype=tensor.dtype, device=device)
            self.members[stack] = []
        self._filling[stack][int(expert["number"])].copy_(tensor)
        self.members[stack].append(name)
        return (stack, self._filling.pop(stack)) if len(self.members[stack]) == number else None

    def load(self, name: str, tensor: Tensor) -> bool:
        """Give a stack to its layer. False: it is another tensor."""
        layer_name, _, projection = name.rpartition(".")
        if (layer := self._layers.get(layer_name)) is None:
            return False
        shards = {layer.ckpt_gate_proj_name: "w1", layer.ckpt_down_proj_name: "w2", layer.ckpt_up_proj_name: "w3"}
        held = "w2_weight" if shards[projection] == "w2" else "w13_weight"
        parameter = layer.get_parameter(held)
        parameter.weight_loader(
            param=parameter, loaded_weight=tensor, weight_name=held, shard_id=shards[projection], expert_id=0,
            return_success=True,
        )  # fmt: skip
        return True

    def refuse_incomplete(self) -> None:
        """Raises ValueError that names a stack without all its experts."""
        for stack in self._filling:
            number = self._layers[stack.rpartition(".")[0]].global_num_experts
            raise ValueError(f"weights: {stack} came for {len(self.members[stack])} of {number} experts; send all")


def list_whole_layers(model: nn.Module) -> list[RoutedExperts]:
    """The layers of experts that this worker has all experts of (no expert parallelism), each once, in the type that is
    sent.
    """
    layers = (layer for layer in model.modules() if isinstance(layer, RoutedExperts))
    return [
        layer
        for layer in layers
        if isinstance(layer.quant_method, UnquantizedFusedMoEMethod)
        and layer.moe_config.num_local_experts == layer.moe_config.num_experts == layer.moe_config.num_logical_experts
    ]
