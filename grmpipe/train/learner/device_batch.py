"""A micro-batch on the model's device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from grmpipe.types import MicroBatch
from models.lm.packing import Prefixes


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
        )
