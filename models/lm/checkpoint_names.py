"""The names and shapes of a model's tensors in checkpoints. transformers holds some of them fused (the experts of a
mixture) or under other names; serving engines know those of checkpoints.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from grmpipe.models.lm.causal_lm import make_on_meta

EXPERT = re.compile(r"(?<=\.experts\.)\d+")
Shapes = dict[str, tuple[int, ...]]


class CheckpointNames:
    """Names in checkpoints, by transformers' conversion of a model family. Each tensor is converted without any other.

    Follows from the configuration alone, so that all ranks and all receivers agree.
    """

    def __init__(self, outline: PreTrainedModel) -> None:
        """Raises ValueError for a family whose tensors can't be converted one by one."""
        self._outline = outline
        conversions = get_model_conversion_mapping(outline, add_legacy=False)
        # A prefix of all names isn't part of the family: it is another way to save the same model.
        self._same = all(isinstance(conversion, PrefixChange) for conversion in conversions)
        self._refuse_what_needs_several()

    @staticmethod
    def of(config: PreTrainedConfig) -> CheckpointNames:
        return CheckpointNames(make_on_meta(AutoModelForCausalLM, copy.deepcopy(config), "float32"))

    def convert(self, name: str, tensor: Tensor, experts: Sequence[int] | None = None) -> dict[str, Tensor]:
        """A whole tensor of the model as in the checkpoint: one tensor, or several for fused experts; views if
        possible. experts: the numbers of those in `tensor`, if it has only some; see `separates`.
        """
        if self._same:
            return {name: tensor}
        converted = revert_weight_conversion(self._outline, {name: tensor})
        return converted if experts is None else {_numbered(key, experts): held for key, held in converted.items()}

    def shapes(self, name: str, shape: Sequence[int], experts: Sequence[int] | None = None) -> Shapes:
        """Name -> shape of the results of `convert`. Computes nothing."""
        converted = self.convert(name, torch.empty(tuple(shape), device="meta"), experts)
        return {name: tuple(tensor.shape) for name, tensor in converted.items()}

    def separates(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a checkpoint has this tensor expert by expert, so that some experts can be converted alone."""
        if self._same or len(shape) != 3 or not name.rpartition(".")[0].endswith("experts"):
            return False
        last = self.shapes(name, (1, *shape[1:]), (shape[0] - 1,))
        whole = self.shapes(name, shape)
        return last.items() <= whole.items() and len(whole) == shape[0] * len(last)

    def list_engine_tensors(self) -> tuple[Shapes, dict[str, str]]:
        """The tensors that an engine started from such a checkpoint takes: name -> shape, and name -> first name. A
        tied tensor has several names.
        """
        first = {id(parameter): name for name, parameter in self._outline.named_parameters()}
        shapes: Shapes = {}
        held: dict[str, str] = {}
        for name, tensor in self._outline.state_dict(keep_vars=True).items():
            own, under = (self.shapes(n, tensor.shape) for n in (name, first.get(id(tensor), name)))
            shapes |= own
            held |= dict(zip(own, under, strict=True))
        return shapes, held

    def _refuse_what_needs_several(self) -> None:
        if self._same:
            return
        state: Mapping[str, Tensor] = self._outline.state_dict()
        try:
            alone = [entry for name, tensor in state.items() for entry in self.shapes(name, tensor.shape).items()]
            whole = revert_weight_conversion(self._outline, dict(state))
        except Exception as error:
            raise _refusal(self._outline, f"{error!r}") from error
        expected = [(name, tuple(tensor.shape)) for name, tensor in whole.items()]
        if sorted(alone) != sorted(expected):
            different = min((Counter(alone) - Counter(expected)) + (Counter(expected) - Counter(alone)))
            raise _refusal(self._outline, f"{different[0]!r} is built from several tensors")


def _numbered(name: str, experts: Sequence[int]) -> str:
    """The name with an expert's own number in place of its position."""
    return EXPERT.sub(lambda position: str(experts[int(position[0])]), name, count=1)


def _refusal(outline: PreTrainedModel, why: str) -> ValueError:
    return ValueError(
        f"engine: the weights of a {outline.config.model_type!r} model can't be sent tensor by tensor under the names "
        f"of its checkpoints ({why}); type engine=embedded"
    )
