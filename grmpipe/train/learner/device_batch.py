"""A micro-batch on the model's device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from grmpipe.algorithm.corrections import Taught
from grmpipe.models.lm.causal_lm import PackedLogprobs
from grmpipe.models.lm.packing import Prefixes
from grmpipe.types import MicroBatch, TeacherEntries


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """A MicroBatch on the model's device."""

    token_ids_T: Tensor
    position_ids_T: Tensor
    sample_lengths_S: Tensor
    prefixes: Prefixes
    wanted_T: Tensor  # bool, tokens with a trained entry
    places_E: Tensor
    rollout_lengths_R: Tensor
    loss_mask_E: Tensor
    sampler_logprobs_E: Tensor
    advantages_E: Tensor
    versions_E: Tensor
    teacher: DeviceTeacher | None

    @staticmethod
    def of(micro_batch: MicroBatch, device: torch.device) -> DeviceBatch:
        here = partial(torch.tensor, device=device)  # copies: arrays that come through an object store are read-only
        wanted_T = np.zeros(len(micro_batch.token_ids_T), dtype=np.bool_)
        wanted_T[micro_batch.places_E[micro_batch.loss_mask_E > 0]] = True
        return DeviceBatch(
            token_ids_T=here(micro_batch.token_ids_T),
            position_ids_T=here(micro_batch.position_ids_T),
            sample_lengths_S=here(micro_batch.sample_lengths_S),
            prefixes=Prefixes(parents_S=here(micro_batch.parents_S), lengths_S=here(micro_batch.prefix_lengths_S)),
            wanted_T=here(wanted_T),
            places_E=here(micro_batch.places_E),
            rollout_lengths_R=here(micro_batch.rollout_lengths_R),
            loss_mask_E=here(micro_batch.loss_mask_E),
            sampler_logprobs_E=here(micro_batch.sampler_logprobs_E),
            advantages_E=here(micro_batch.advantages_E),
            versions_E=here(micro_batch.versions_E),
            teacher=DeviceTeacher.of(micro_batch.teacher, device),
        )

    def likely_ids(self) -> Tensor | None:
        """[T, K]: the teacher's likely tokens in the place of each packed token; None if none are compared. A token
        that several samples train has the same ones in each.
        """
        if self.teacher is None or self.teacher.top_ids_EK is None:
            return None
        ids_EK = self.teacher.top_ids_EK
        ids_TK = ids_EK.new_zeros(len(self.token_ids_T), ids_EK.shape[1])
        is_taught_E = self.teacher.taught_E > 0
        ids_TK[self.places_E[is_taught_E]] = ids_EK[is_taught_E]
        return ids_TK


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTeacher:
    """TeacherEntries on the model's device."""

    taught_E: Tensor
    logprobs_E: Tensor
    top_ids_EK: Tensor | None
    top_logprobs_EK: Tensor | None

    @staticmethod
    def of(teacher: TeacherEntries | None, device: torch.device) -> DeviceTeacher | None:
        if teacher is None:
            return None

        def here(values: np.ndarray) -> Tensor:
            return torch.tensor(values, device=device)

        top_ids_EK, top_logprobs_EK = teacher.top_ids_EK, teacher.top_logprobs_EK
        return DeviceTeacher(
            taught_E=here(teacher.taught_E),
            logprobs_E=here(teacher.logprobs_E),
            top_ids_EK=None if top_ids_EK is None else here(top_ids_EK),
            top_logprobs_EK=None if top_logprobs_EK is None else here(top_logprobs_EK),
        )

    def beside(self, own: PackedLogprobs, places_E: Tensor) -> Taught:
        """With the policy's log-probs of the same tokens."""
        return Taught(
            taught_T=self.taught_E,
            logprobs_T=self.logprobs_E,
            top_TK=self.top_logprobs_EK,
            own_top_TK=None if own.also_TK is None else own.also_TK[places_E],
        )
