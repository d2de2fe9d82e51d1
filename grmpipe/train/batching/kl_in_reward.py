"""The KL of each token to the reference, for a KL that is subtracted from the rewards. Pure."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from grmpipe.train.batching.packer import MicroBatchRound, PackedLayout
from grmpipe.types import MicroBatch, Rollout, TrainingSample

Kl = Mapping[tuple[str, int], np.ndarray]  # (group_id, sibling) -> nats, [C] by token of its completions


def rollout_key(rollout: Rollout | TrainingSample) -> tuple[str, int]:
    return rollout.group_id, rollout.sibling


def kl_of_rollouts(
    rounds: Sequence[MicroBatchRound], references: Sequence[Sequence[np.ndarray]], kl_estimator: str
) -> dict[tuple[str, int], np.ndarray]:
    """KL(mu || reference) of the sampled tokens; mu is the sampling policy, known before anything is trained.

    references: [round][rank] -> log pi_ref over the packed tokens.
    """
    by_segment = {
        (*rollout_key(sample), sample.segment): kl_of_sample(sample, reference_T, kl_estimator)
        for round_, by_rank in zip(rounds, references, strict=True)
        for samples, micro_batch, packed_T in zip(round_.samples, round_.micro_batches, by_rank, strict=True)
        for sample, reference_T in unpack(samples, micro_batch, packed_T)
    }
    found: dict[tuple[str, int], np.ndarray] = {}
    for (group_id, sibling, _), nats_N in sorted(by_segment.items(), key=lambda item: item[0]):
        key = (group_id, sibling)
        found[key] = np.concatenate([found[key], nats_N]) if key in found else nats_N
    return found


def unpack(
    samples: Sequence[TrainingSample], micro_batch: MicroBatch, packed_T: np.ndarray
) -> Iterator[tuple[TrainingSample, np.ndarray]]:
    """Each sample with its entries of a packed array, those of its prefix included."""
    layout = PackedLayout.of(micro_batch)
    for place, sample in enumerate(samples):
        yield sample, packed_T[layout.places(place, np.arange(len(sample.token_ids)))]


def kl_of_sample(sample: TrainingSample, reference_T: np.ndarray, kl_estimator: str) -> np.ndarray:
    """The KL of the tokens of a sample's completions, [N]. Its first token costs nothing: nothing predicts it; nor do
    inserted ones: the policy didn't sample them.
    """
    import torch  # late: every driver packs samples, few ask a reference

    from grmpipe.algorithm.losses import kl

    sampler_T = torch.tensor(sample.sampler_logprobs, dtype=torch.float64)
    kl_T = kl(kl_estimator, sampler_T, torch.from_numpy(reference_T.astype(np.float64)))
    kl_T[0] = 0.0
    return (kl_T.numpy() * sample.loss_mask)[sample.of_completions()]
