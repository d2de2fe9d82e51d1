"""The tensors that an engine's model takes in a push, by their names in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from grmpipe.models.lm.causal_lm import outline_causal_lm
from grmpipe.models.lm.checkpoint_names import CheckpointNames
from grmpipe.models.types import WeightTensor


class Taken:
    """The tensors that a model takes, by name, with their shapes. A tied tensor has all its names."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], own_names: Mapping[str, str]) -> None:
        self.shapes, self.own_names = shapes, own_names

    @staticmethod
    def of(model_path: str) -> Taken:
        """The tensors in checkpoints of the model; if transformers lacks it, the engine's own loader decides alone."""
        try:
            model = outline_causal_lm(model_path)
        except ValueError:
            return Taken({}, {})
        return Taken(*CheckpointNames(model).list_engine_tensors())

    def own_name(self, tensor: WeightTensor) -> str:
        """The engine's name of a tensor. Raises ValueError for one that doesn't fit."""
        if not self.shapes:
            return tensor.name
        shape = self.shapes.get(tensor.name)
        if shape is None:
            raise ValueError(f"weights: the engine's model has no tensor {tensor.name!r}; is it the same architecture?")
        if shape != tensor.shape:
            raise ValueError(f"weights: {tensor.name!r} arrived as {tensor.shape}, the engine has {shape}")
        return self.own_names[tensor.name]

    def all_in(self, names: Iterable[str]) -> bool:
        return bool(self.own_names) and set(self.own_names.values()) <= set(names)
