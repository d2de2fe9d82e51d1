"""A micro-batch on the model's device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grmpipe.algorithm.corrections import Taught
from grmpipe.models.lm.causal_lm import PackedLogprobs
from grmpipe.models.lm.device_copy import copy_to_device
from grmpipe.models.lm.packing import Prefixes
from grmpipe.types import MicroBatch, OldPass, TeacherEntries


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """A MicroBatch for a pass of the model: lengths, prefixes and `wanted_T` on the host, all else on the model's
    device.
    """

    sample_lengths_S: Tensor
    prefixes: Prefixes
    wanted_T: Tensor  # bool, tokens with a trained entry
    token_ids_T: Tensor
    position_ids_T: Tensor
    places_E: Tensor
    rollout_lengths_R: Tensor
    loss_mask_E: Tensor
    sampler_logprobs_E: Tensor
    advantages_E: Tensor
    versions_E: Tensor
    old_logprobs_T: Tensor | None = None
    experts_TLK: Tensor | None = None
    teacher: DeviceTeacher | None

    @staticmethod
    def of(micro_batch: MicroBatch, device: torch.device, old: OldPass | None = None) -> DeviceBatch:
        """old: the earlier pass over it, if there was one. Experts that it chose replace those to replay."""
        arrays = {
            "token_ids_T": micro_batch.token_ids_T,
            "position_ids_T": micro_batch.position_ids_T,
            "places_E": micro_batch.places_E,
            "rollout_lengths_R": micro_batch.rollout_lengths_R,
            "loss_mask_E": micro_batch.loss_mask_E,
            "sampler_logprobs_E": micro_batch.sampler_logprobs_E,
            "advantages_E": micro_batch.advantages_E,
            "versions_E": micro_batch.versions_E,
        }
        if old is not None:
            arrays["old_logprobs_T"] = old.logprobs_T
        experts_TLK = micro_batch.experts_TLK if old is None or old.experts_TLK is None else old.experts_TLK
        if experts_TLK is not None:
            arrays["experts_TLK"] = experts_TLK
        taught = {} if micro_batch.teacher is None else _list_arrays(micro_batch.teacher, micro_batch)
        copies = copy_to_device([*arrays.values(), *taught.values()], device)
        there = dict(zip([*arrays, *taught], copies, strict=True))
        wanted_T = torch.zeros(len(micro_batch.token_ids_T), dtype=torch.bool)
        wanted_T[micro_batch.places_E[micro_batch.loss_mask_E > 0]] = True
        return DeviceBatch(
            # Copies: arrays that come through an object store are read-only.
            sample_lengths_S=torch.tensor(micro_batch.sample_lengths_S),
            prefixes=Prefixes(
                parents_S=torch.tensor(micro_batch.parents_S), lengths_S=torch.tensor(micro_batch.prefix_lengths_S)
            ),
            wanted_T=wanted_T,
            teacher=DeviceTeacher(**{name: there[name] for name in taught}) if taught else None,
            **{name: there[name] for name in arrays},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTeacher:
    """TeacherEntries on the model's device.

    likely_ids_TK: the likely tokens in the place of each packed token; None: none are compared.
    """

    taught_E: Tensor
    logprobs_E: Tensor
    top_logprobs_EK: Tensor | None = None
    likely_ids_TK: Tensor | None = None

    def beside(self, own: PackedLogprobs, places_E: Tensor) -> Taught:
        """With the policy's log-probs of the same tokens."""
        return Taught(
            taught_T=self.taught_E,
            logprobs_T=self.logprobs_E,
            top_TK=self.top_logprobs_EK,
            own_top_TK=None if own.also_TK is None else own.also_TK[places_E],
        )


def _list_arrays(teacher: TeacherEntries, micro_batch: MicroBatch) -> dict[str, np.ndarray]:
    """The arrays of a DeviceTeacher."""
    arrays = {"taught_E": teacher.taught_E, "logprobs_E": teacher.logprobs_E}
    ids_EK, logprobs_EK = teacher.top_ids_EK, teacher.top_logprobs_EK
    if ids_EK is None or logprobs_EK is None:
        return arrays
    # A token that several samples train has the same ones in each.
    ids_TK, is_taught_E = np.zeros((len(micro_batch.token_ids_T), ids_EK.shape[1]), ids_EK.dtype), teacher.taught_E > 0
    ids_TK[micro_batch.places_E[is_taught_E]] = ids_EK[is_taught_E]
    return {**arrays, "top_logprobs_EK": logprobs_EK, "likely_ids_TK": ids_TK}
