"""The open batch on the driver: judged groups in, gradients as they come, one optimizer step (or a few) out."""

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.data.demonstrations import Demonstrations
from grmpipe.pipeline.interfaces import TrainedBatch
from grmpipe.scheduler.admission import is_stale
from grmpipe.train.batching.packer import MicroBatchRound, Packer, pack_rounds
from grmpipe.train.batching.samples import (
    Kl,
    count,
    kl_of_rollouts,
    mean_advantages,
    select_judged,
    shuffle_into_updates,
    split_rollout,
    to_samples,
    without_finite_advantages,
)
from grmpipe.train.critic.critic import Critic
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.train.non_finite_gradients import NonFiniteGradients
from grmpipe.types import BatchTotals, JudgedGroup, Metrics, OldPass, TrainingSample

log = logging.getLogger(__name__)


class ReplayBuffer:
    """Replays at most `groups_per_batch` groups per batch, the youngest first, and each once: a group that is trained
    often is soon older than any bound on staleness, and what it has to teach was learned the first time.
    """

    def __init__(self, groups_per_batch: int, *, max_age: int) -> None:
        """max_age: versions between a group's oldest token and the batch that replays it."""
        self._groups_per_batch = groups_per_batch
        self._max_age = max_age
        self._kept: list[JudgedGroup] = []

    def keep(self, groups: Sequence[JudgedGroup]) -> None:
        """Keep groups that were just trained."""
        if self._groups_per_batch > 0:
            self._kept += groups

    def sample(self, version: int) -> list[JudgedGroup]:
        """Groups to replay in a batch that starts from this version. Drops those that are too old."""
        young = [group for group in self._kept if not is_stale(group.version, version, self._max_age)]
        young.sort(key=lambda group: group.version, reverse=True)
        self._kept = young[self._groups_per_batch :]
        return young[: self._groups_per_batch]


SKIPPED = "train/skipped_updates"
# Metrics that are summed over the updates of a batch.
SUMMED = ("train/packed_tokens", "train/unshared_tokens", "train/loss_tokens", "perf/model_flops", SKIPPED)


class BatchTrainer:
    """Consumes groups, produces steps. Waits only for the learner.

    Micro-batches are trained while the rest of the batch is still rolling out (early start), unless the estimator needs
    the whole batch or there are several updates: then the batch is collected and split, and pi_old is computed first.
    """

    def __init__(
        self,
        learner: LearnerRanks,
        train: TrainConfig,
        algorithm: AlgorithmConfig,
        max_new_tokens: int = 0,
        critic: Critic | None = None,
        seed: int = 0,
        *,
        mask_truncated: bool = False,
        demonstrations: Demonstrations | None = None,
    ) -> None:
        """`max_new_tokens`: a turn's limit; needed if long answers are penalised. `critic`: if advantages need one.
        `seed`: for the split of groups over several updates. mask_truncated: see to_samples. demonstrations: those that
        each optimizer step imitates.
        """
        assert max_new_tokens > 0 or algorithm.overlong_buffer.share == 0, "a penalty for length needs the limit"
        self._learner = learner
        self._critic = critic
        self._algorithm = algorithm
        self._seed = seed
        self._updates = min(algorithm.updates_per_batch, train.groups_per_batch)
        self._replay = ReplayBuffer(algorithm.replay_buffer.groups, max_age=train.max_staleness)
        self._max_new_tokens, self._mask_truncated = max_new_tokens, mask_truncated
        self._demonstrations = demonstrations
        self._max_tokens = train.max_packed_tokens
        self._shared = train.prefix_sharing
        self._packer = Packer(self._max_tokens, learner.dp_size, self._shared, algorithm.needs_whole_rollouts)
        self._waits_for_batch = algorithm.estimator_kind.need == "batch"
        self._kl_is_in_reward = algorithm.kl_in_reward and algorithm.kl_coefficient > 0
        self._num_taken = 0  # groups of the open batch
        self._replayed: list[JudgedGroup] = []  # groups of an earlier batch that are trained again in the open one
        self._kl: dict[tuple[str, int], np.ndarray] = {}
        self._values: dict[tuple[str, int], np.ndarray] = {}  # the critic's
        self._samples: list[TrainingSample] = []  # from the groups taken, or from the whole batch

    @property
    def starts_early(self) -> bool:
        return self._updates == 1 and not self._waits_for_batch

    async def take(self, group: JudgedGroup) -> None:
        """Add a group. Replayed groups are trained first, while there is nothing else to train."""
        if self._num_taken == 0:
            self._replayed = self._replay.sample(self._version)
            for earlier in self._replayed:
                await self._include(earlier)
        self._num_taken += 1
        await self._include(group)

    async def _include(self, group: JudgedGroup) -> None:
        if self._kl_is_in_reward:
            self._kl |= await self._kl_of(group)
        if self._critic is not None:
            self._values |= await self._critic.take(group, self._kl if self._kl_is_in_reward else None)
        if self._waits_for_batch or self._policy_rests:
            return
        samples = self._estimated([group])
        self._samples += samples
        if self.starts_early:
            for round_ in self._packer.add(samples):
                await self._learner.accumulate(round_)

    async def while_waiting(self) -> bool:
        rounds = self._packer.early()
        for round_ in rounds:
            await self._learner.accumulate(round_)
        return bool(rounds)

    async def step(self, batch: Sequence[JudgedGroup]) -> TrainedBatch:
        """End the batch of the groups taken. Nothing of it is left, even if the learner refused it."""
        assert len(batch) == self._num_taken, (len(batch), self._num_taken)
        try:
            metrics = await self._learn([*self._replayed, *batch])
            # Only now: a batch that the learner refused must not be replayed.
            self._replay.keep(batch)
            if self._algorithm.replay_buffer.groups > 0:
                metrics |= {"train/replayed_groups": float(len(self._replayed))}
            return TrainedBatch(metrics=metrics, advantages=mean_advantages(self._samples))
        finally:
            self._forget()

    async def _learn(self, groups: Sequence[JudgedGroup]) -> Metrics:
        """Train policy and critic at the same time. If one fails, the error is raised after both have ended."""
        if self._critic is None:
            return await self._improve(groups)
        both = [self._critic.step()] if self._policy_rests else [self._improve(groups), self._critic.step()]
        metrics: Metrics = {}
        for outcome in await asyncio.gather(*both, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
            metrics |= outcome
        return metrics

    async def _improve(self, groups: Sequence[JudgedGroup]) -> Metrics:
        """Make the policy's steps."""
        if self._waits_for_batch:
            self._samples = [*self._estimated(groups)]
        if self._mask_truncated and not self._samples:
            log.warning(
                "rollout.truncated: every rollout of this batch was truncated, and mask trains none of them: the "
                "weights stay as they are; if that goes on, type a larger rollout.max_new_tokens, or "
                "rollout.truncated=train"
            )
        try:
            return await (self._several_updates if self._updates > 1 else self._one_update)(groups, self._samples)
        except NonFiniteGradients as error:
            found = tuple(without_finite_advantages(self._samples))
            raise NonFiniteGradients(error.norm, error.lr_key, found) from None

    @property
    def _policy_rests(self) -> bool:
        return self._critic is not None and self._critic.learns_alone

    @property
    def _version(self) -> int:
        """Completed batches: the critic trains on each."""
        return self._learner.version // self._updates if self._critic is None else self._critic.version

    async def discard(self) -> None:
        """Drop the open batch: its gradients and samples."""
        self._packer.discard()
        self._forget()
        await self._learner.discard()
        if self._critic is not None:
            await self._critic.discard()

    def _forget(self) -> None:
        self._num_taken, self._replayed, self._samples, self._kl, self._values = 0, [], [], {}, {}

    def _estimated(self, groups: Sequence[JudgedGroup]) -> Sequence[TrainingSample]:
        kl = self._kl if self._kl_is_in_reward else None
        values = self._values if self._critic is not None else None
        return to_samples(
            groups, self._algorithm, self._max_new_tokens, kl, values, mask_truncated=self._mask_truncated
        )

    async def _kl_of(self, group: JudgedGroup) -> Kl:
        unweighed = [
            sample
            for rollout, _ in select_judged(group)
            for sample in split_rollout(rollout, np.zeros(rollout.num_sampled_tokens))
        ]
        rounds = self._pack(unweighed)
        references = [await self._learner.reference_logprobs(round_) for round_ in rounds]
        return kl_of_rollouts(rounds, references, self._algorithm.kl_estimator)

    async def _one_update(self, groups: Sequence[JudgedGroup], samples: Sequence[TrainingSample]) -> Metrics:
        totals = count(samples, min(group.version for group in groups))
        for round_ in self._packer.flush() if self.starts_early else self._pack(samples):
            await self._learner.accumulate(round_)
        return await self._end_update(totals)

    async def _several_updates(self, groups: Sequence[JudgedGroup], samples: Sequence[TrainingSample]) -> Metrics:
        """Train in several updates, over which the groups with trained samples are split at random. Returns the metrics
        of the last update that wasn't skipped, with the sums of SUMMED over all updates.
        """
        oldest = min(group.version for group in groups)
        ids = [sample.group_id for sample in samples]
        parts = [
            [sample for sample in samples if sample.group_id in some]
            for some in shuffle_into_updates(ids, self._updates, self._seed, self._version)
        ]
        packed = [self._pack(part) for part in parts]
        # For all updates before the first of them: their ratios are to one policy.
        old = [[await self._old_pass(round_) for round_ in rounds] for rounds in packed]
        updates = []
        for part, rounds, olds in zip(parts, packed, old, strict=True):
            for round_, old_pass in zip(rounds, olds, strict=True):
                await self._learner.accumulate(round_, old_pass)
            updates.append(await self._end_update(count(part, oldest)))
        last = next((update for update in reversed(updates) if SKIPPED not in update), updates[-1])
        known = [name for name in SUMMED if any(name in update for update in updates)]
        return last | {name: sum(update.get(name, 0.0) for update in updates) for name in known}

    async def _end_update(self, totals: BatchTotals) -> Metrics:
        """An optimizer step on what was accumulated, and on its demonstrations. Without a trained token it is skipped:
        nothing would divide the demonstrations' loss, and the version rises all the same, as it counts updates.
        """
        if totals.num_loss_tokens == 0:
            return await self._learner.step(totals) | {SKIPPED: 1.0}
        if self._demonstrations is not None:
            draw, version = self._demonstrations.draw, self._learner.version
            samples = await asyncio.to_thread(draw, version, self._algorithm.sft.rows_per_step)
            for round_ in self._pack(samples):
                await self._learner.imitate(round_, totals)
        return await self._learner.step(totals)

    async def _old_pass(self, round_: MicroBatchRound) -> Sequence[OldPass] | None:
        """The log-probs to take the ratio against; None if the ratio doesn't need them."""
        return await self._learner.old_pass(round_) if self._algorithm.proximal == "recomputed" else None

    def _pack(self, samples: Sequence[TrainingSample]) -> list[MicroBatchRound]:
        whole_rollouts = self._algorithm.needs_whole_rollouts
        return pack_rounds(samples, self._max_tokens, self._learner.dp_size, self._shared, whole_rollouts)
