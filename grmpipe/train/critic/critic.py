"""The critic's side of a batch, on the driver: values for the policy's advantages, and its own steps on their targets.

A step of the run is also a step of the critic: its version equals the policy's, the number of completed batches.
"""

import asyncio

import numpy as np

from grmpipe.algorithm.rewards import Values
from grmpipe.algorithm.value_loss import value_quality
from grmpipe.config.critic import CriticConfig, critic_train
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.train.batching.samples import Kl, compute_rewards, select_judged, shuffle_into_updates
from grmpipe.train.critic.critic_ranks import CriticLearnerRanks
from grmpipe.train.critic.value_samples import ValuePacker, ValueRound, ValueSample, value_samples
from grmpipe.train.critic.values import ValueCache
from grmpipe.types import JudgedGroup, Metrics


class Critic:
    """Consumes groups; produces their values, and one or a few steps at the end of the batch.

    The targets of a group are known when it is judged: its gradients are accumulated while the rest of the batch is
    still rolling out and the policy's learner works, unless a batch has several updates.
    """

    def __init__(
        self,
        ranks: CriticLearnerRanks,
        config: CriticConfig,
        train: TrainConfig,
        algorithm: AlgorithmConfig,
        max_new_tokens: int = 0,
        seed: int = 0,
        *,
        mask_truncated: bool = False,
    ) -> None:
        """`max_new_tokens`: of a turn; needed if long answers are penalised. `seed`: the same as for the policy's
        batch. mask_truncated: the critic, like the policy, learns nothing from truncated rollouts.
        """
        max_tokens = critic_train(config, train).max_packed_tokens
        self.ranks = ranks
        self.value_cache = ValueCache(ranks, max_tokens=max_tokens, groups_per_batch=train.groups_per_batch)
        self._config = config
        self._algorithm = algorithm
        self._max_new_tokens, self._mask_truncated = max_new_tokens, mask_truncated
        self._seed = seed
        self._max_tokens = max_tokens
        self._updates = config.updates(algorithm, train)
        self._packer = ValuePacker(max_tokens, ranks.dp_size)
        self._samples: list[ValueSample] = []
        self._passes: list[asyncio.Task[None]] = []  # the open batch's, in progress or done
        self._waited_s = 0.0
        self._num_ahead = 0  # groups of the open batch whose values were known when they were taken
        self._num_taken = 0

    @property
    def version(self) -> int:
        """Completed batches."""
        return self.ranks.version // self._updates

    @property
    def learns_alone(self) -> bool:
        """Whether only the critic trains: in the first steps of a run."""
        return self.version < self._config.warmup_steps

    async def take(self, group: JudgedGroup, kl: Kl | None) -> Values:
        """Add a judged group to the batch. Returns its values; its training passes continue in the background."""
        self._num_taken += 1
        self._num_ahead += self.value_cache.knows(group)
        began_s = asyncio.get_running_loop().time()
        values = await self.value_cache.take_values(group)
        self._waited_s += asyncio.get_running_loop().time() - began_s
        samples = self._targets(group, kl, values)
        self._samples += samples
        if self._updates == 1:
            self._pass(self._packer.add(samples))
        return values

    async def step(self) -> Metrics:
        """End the batch. Values requested meanwhile belong to the next batch."""
        quality = value_quality(*self._values_and_returns()) if self._samples else {}
        self.value_cache.rest()
        try:
            metrics = await (self._several_updates() if self._updates > 1 else self._one_update())
        finally:
            batch_metrics = self._close_batch()
        return {**metrics, **quality, **batch_metrics}

    async def discard(self) -> None:
        """Drop the open batch: its gradients and samples."""
        await asyncio.gather(*self._passes, return_exceptions=True)
        self._close_batch()
        await self.ranks.discard()

    def _targets(self, group: JudgedGroup, kl: Kl | None, values: Values) -> list[ValueSample]:
        samples, kind = list[ValueSample](), self._algorithm.estimator_kind
        for rollout, verdict in select_judged(group):
            rewards = compute_rewards(
                rollout,
                verdict,
                self._algorithm,
                kind,
                self._max_new_tokens,
                kl,
                values,
                mask_truncated=self._mask_truncated,
            )
            if not rewards.is_trained:
                continue
            _, returns_N = kind.targets(rewards, self._algorithm)
            assert rewards.expected_N is not None
            samples += value_samples(rollout, rewards.expected_N, returns_N)
        return samples

    def _pass(self, rounds: list[ValueRound]) -> None:
        self._passes += [asyncio.create_task(self.ranks.accumulate(round_)) for round_ in rounds]

    async def _one_update(self) -> Metrics:
        self._pass(self._packer.flush())
        await asyncio.gather(*self._passes)
        return await self.ranks.step()

    async def _several_updates(self) -> Metrics:
        """Train in several updates, split by groups at random. Returns the metrics of the last one that had targets."""
        metrics: Metrics = {}
        ids = {sample.group_id for sample in self._samples}
        for chosen in shuffle_into_updates(ids, self._updates, self._seed, self.version):
            packer = ValuePacker(self._max_tokens, self.ranks.dp_size)
            samples = [sample for sample in self._samples if sample.group_id in chosen]
            for round_ in packer.add(samples) + packer.flush():
                await self.ranks.accumulate(round_)
            metrics = await self.ranks.step() or metrics
        return metrics

    def _values_and_returns(self) -> tuple[np.ndarray, np.ndarray]:
        """Values and returns, [N] each, over the tokens of the batch that have a target."""
        trained_T = np.concatenate([np.asarray(sample.loss_mask, dtype=bool) for sample in self._samples])
        columns = ([sample.values for sample in self._samples], [sample.returns for sample in self._samples])
        values_T, returns_T = (np.concatenate([np.asarray(column) for column in some]) for some in columns)
        return values_T[trained_T], returns_T[trained_T]

    def _close_batch(self) -> Metrics:
        metrics = {
            "critic/wait_s": self._waited_s,
            "critic/precomputed_share": self._num_ahead / max(1, self._num_taken),
        }
        self._packer.discard()
        self._samples, self._passes = [], []
        self._waited_s, self._num_ahead, self._num_taken = 0.0, 0, 0
        self.value_cache.resume()
        return metrics
