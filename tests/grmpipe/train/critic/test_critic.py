"""The critic on the driver: when values are computed, of which version, and what is learned."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from grmpipe.config.critic import CriticConfig
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.types import Completion, VersionSpan
from grmpipe.train.critic.critic import Critic
from grmpipe.train.critic.critic_ranks import CriticLearnerRanks
from grmpipe.train.critic.value_samples import ValueBatch
from grmpipe.train.critic.values import ValueCache
from grmpipe.train.learner.batch_trainer import BatchTrainer
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.train.scalar.scalar_batch import PackedSequences
from grmpipe.types import Failed, JudgedGroup, MicroBatch, Prompt, RewardSpan, Rollout, Turn, Verdict

TRAIN = TrainConfig(groups_per_batch=2, group_size=2, micro_batch_tokens=8, num_steps=9)
GAE = AlgorithmConfig(estimator="gae_raw")


class CriticRanks:
    """An ActorGroup of one rank, whose head gives at each token the token's id + 1000 times its version."""

    size = 1

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asked: list[list[int]] = []  # token ids of each call for values
        self.learned: list[ValueBatch] = []
        self.version = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def call(self, rank: int, method: str, *args: object) -> object:
        raise NotImplementedError(method)

    async def call_all(self, method: str, *args: object) -> list[object]:
        self.calls.append(method)
        self.version += method == "step"
        return [{"critic/value_loss": 0.0}]

    async def call_each(self, method: str, args_by_rank: Sequence[tuple[object, ...]]) -> list[object]:
        ((batch,),) = args_by_rank
        self.calls.append(method)
        if method == "accumulate":
            assert isinstance(batch, ValueBatch)
            self.learned.append(batch)
            return [None]
        assert isinstance(batch, PackedSequences)
        self.asked.append(batch.token_ids_T.tolist())
        said_T = (batch.token_ids_T + 1000 * self.version).astype(np.float32)
        await self.gate.wait()
        return [said_T]

    async def close(self) -> None: ...


class PolicyRanks:
    """An ActorGroup of one rank of the policy's learner."""

    size = 1

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.accumulated: list[MicroBatch] = []

    async def call(self, rank: int, method: str, *args: object) -> object:
        raise NotImplementedError(method)

    async def call_all(self, method: str, *args: object) -> list[object]:
        self.calls.append(method)
        return [{"train/loss": 0.0}]

    async def call_each(self, method: str, args_by_rank: Sequence[tuple[object, ...]]) -> list[object]:
        self.calls.append(method)
        ((batch, *_),) = args_by_rank
        assert isinstance(batch, MicroBatch)
        if method == "accumulate":
            self.accumulated.append(batch)
            return [{}]
        return [np.full(len(batch.token_ids_T), -2.0, dtype=np.float32) * (batch.loss_mask_E > 0)]

    async def close(self) -> None: ...


def judged(number: int, *rewards: float | Failed) -> JudgedGroup:
    """A group whose sibling i wrote two tokens 10 * number + i after the prompt (1, 5); log-probs are -1."""
    rollouts = []
    for sibling in range(len(rewards)):
        completion = Completion(
            token_ids=(10 * number + sibling,) * 2, logprobs=(-1.0,) * 2, text="", finish_reason="stop",
            versions=(VersionSpan(model="policy", version=0, start=0, end=2),),
        )  # fmt: skip
        turn = Turn(new_ids=(1, 5), completion=completion)
        rollouts.append(Rollout(group_id=f"g{number}", sibling=sibling, turns=(turn,), status="finished"))
    verdicts = tuple(
        reward
        if isinstance(reward, Failed)
        else Verdict(
            rewards=(RewardSpan(turn=0, start=0, end=2, value=reward),), score=0.0, breakdown={}, score_std=0.0,
            num_judgements=1,
        )
        for reward in rewards
    )  # fmt: skip
    prompt = Prompt(prompt_id=str(number), messages=())
    return JudgedGroup(group_id=f"g{number}", prompt=prompt, rollouts=tuple(rollouts), verdicts=verdicts)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def make_critic(ranks: CriticRanks, algorithm: AlgorithmConfig = GAE, **config: object) -> Critic:
    critic = CriticConfig(enabled=True, **config)  # type: ignore[arg-type]
    return Critic(CriticLearnerRanks(ranks), critic, TRAIN, algorithm, max_new_tokens=4)


def make_valuer(ranks: CriticRanks) -> ValueCache:
    return ValueCache(CriticLearnerRanks(ranks), max_tokens=100, groups_per_batch=2)


class Echo:
    """An ActorGroup of four ranks that answer with what they got and their number."""

    size = 4

    async def call(self, rank: int, method: str, *args: object) -> object:
        raise NotImplementedError(method)

    async def call_all(self, method: str, *args: object) -> list[object]:
        raise NotImplementedError(method)

    async def call_each(self, method: str, args_by_rank: Sequence[tuple[object, ...]]) -> list[object]:
        return [(rank, *args) for rank, args in enumerate(args_by_rank)]

    async def close(self) -> None: ...


def test_neighbouring_ranks_that_share_samples_get_one_batch_and_the_first_answers() -> None:
    async def scene() -> None:
        group = CriticLearnerRanks(Echo(), cp=2)
        assert group.dp_size == 2
        assert await group.scores(("first", "second")) == [(0, "first"), (2, "second")]  # type: ignore[arg-type]

    asyncio.run(scene())


# -- values ------------------------------------------------------------------------------------------------------------


def test_values_are_what_the_head_says_one_token_before() -> None:
    async def work() -> None:
        values = await make_valuer(CriticRanks()).take_values(judged(1, 0.0, 1.0))
        assert {key: found.tolist() for key, found in values.items()} == {("g1", 0): [5, 10], ("g1", 1): [5, 11]}

    run(work)


def test_a_group_is_valued_ahead_once_it_is_rolled_out_and_no_more_than_the_batch_has_places() -> None:
    async def work() -> None:
        ranks = CriticRanks()
        value_cache = make_valuer(ranks)
        loop = asyncio.create_task(value_cache.run())
        groups = [judged(number, 0.0, 1.0) for number in range(1, 5)]
        await settle()
        assert ranks.asked == []
        value_cache.watch(lambda: [group.rollouts for group in groups])
        value_cache.groups_changed()
        await settle()
        assert sorted({token for call in ranks.asked for token in call} - {1, 5}) == [10, 11, 20, 21]
        assert value_cache.knows(groups[0]) and not value_cache.knows(groups[2])
        await value_cache.take_values(groups[0])
        assert value_cache.num_asked == 4, "what is known isn't asked for again"
        loop.cancel()

    run(work)


def test_values_asked_for_before_a_step_are_not_those_of_the_batch_after_it() -> None:
    async def work() -> None:
        ranks = CriticRanks()
        critic = make_critic(ranks)
        loop = asyncio.create_task(critic.value_cache.run())
        first, later = judged(1, 0.0, 1.0), judged(2, 0.0, 1.0)
        await critic.take(first, None)
        ranks.gate.clear()  # the call for the later group is in progress when the critic steps
        critic.value_cache.watch(lambda: [later.rollouts])
        critic.value_cache.groups_changed()
        await settle()
        stepping = asyncio.create_task(critic.step())
        await settle()
        ranks.gate.set()
        await stepping
        values = await critic.take(later, None)
        assert {key: found.tolist() for key, found in values.items()} == {
            ("g2", 0): [1005, 1020], ("g2", 1): [1005, 1021],
        }  # fmt: skip
        loop.cancel()

    run(work)


# -- learning ----------------------------------------------------------------------------------------------------------


def batch_of(critic: CriticRanks) -> dict[int, tuple[list[float], list[float]]]:
    """token id -> values and returns of the trained tokens, by the token they belong to."""
    found: dict[int, tuple[list[float], list[float]]] = {}
    for batch in critic.learned:
        for t in np.flatnonzero(batch.weights_T):
            values, returns = found.setdefault(int(batch.token_ids_T[t + 1]), ([], []))
            values.append(float(batch.values_T[t]))
            returns.append(float(batch.returns_T[t]))
    return found


def test_targets_are_returns_and_passes_begin_while_the_batch_is_open() -> None:
    async def work() -> None:
        ranks = CriticRanks()
        critic = make_critic(ranks)
        await critic.take(judged(1, 0.25, 1.0), None)
        await settle()
        assert ranks.calls == ["scores", "accumulate"]  # two rollouts fill a batch of 8 tokens
        await critic.take(judged(2, -1.0, 0.0), None)
        told = await critic.step()
        assert ranks.calls[-1] == "step" and critic.version == 1
        assert batch_of(ranks) == {
            10: ([5, 10], [0.25, 0.25]), 11: ([5, 11], [1, 1]), 20: ([5, 20], [-1, -1]), 21: ([5, 21], [0, 0]),
        }  # fmt: skip
        assert told["critic/return_mean"] == pytest.approx(0.0625)
        assert told["critic/precomputed_share"] == 0.0

    run(work)


def test_failed_rollouts_are_in_no_target_and_change_none() -> None:
    async def work() -> None:
        found = []
        for placeholder in (
            Failed(stage="judge", cause="timeout", attempts=3),
            Failed(stage="judge", cause="unparseable", attempts=1),
        ):
            ranks, policy = CriticRanks(), PolicyRanks()
            algorithm = AlgorithmConfig(estimator="gae")
            trainer = BatchTrainer(LearnerRanks(policy), TRAIN, algorithm, 4, make_critic(ranks, algorithm))
            group = judged(1, 0.25, 1.0, placeholder)
            if placeholder.cause == "unparseable":  # also its own text
                failed = group.rollouts[2]
                longer = replace(failed.turns[0], new_ids=(1, 2, 3))
                group = replace(group, rollouts=(*group.rollouts[:2], replace(failed, turns=(longer,))))
            batch = [group, judged(2, -1.0, 0.0)]
            for group in batch:
                await trainer.take(group)
            await trainer.step(batch)
            targets = batch_of(ranks)
            assert set(targets) == {10, 11, 20, 21}
            found.append((targets, [batch.advantages_E.tolist() for batch in policy.accumulated]))
        assert found[0] == found[1]

    run(work)


def test_advantages_are_the_returns_less_the_values_of_the_critic() -> None:
    async def work() -> None:
        policy = PolicyRanks()
        trainer = BatchTrainer(
            LearnerRanks(policy), replace(TRAIN, micro_batch_tokens=6), GAE, 4, make_critic(CriticRanks())
        )
        await trainer.take(group := judged(1, 0.25, 1.0))
        assert policy.calls == ["accumulate"], "what needs no batch starts early"
        await trainer.step([group])
        (batch,) = policy.accumulated
        by_token = dict(zip(batch.token_ids_T.tolist(), batch.advantages_E.tolist(), strict=True))
        assert (by_token[10], by_token[11]) == (0.25 - 10, 1.0 - 11)

    run(work)


def test_in_warm_up_the_critic_learns_and_the_policy_does_not_pass_at_all() -> None:
    async def work() -> None:
        ranks, policy = CriticRanks(), PolicyRanks()
        critic = make_critic(ranks, warmup_steps=2)
        trainer = BatchTrainer(LearnerRanks(policy), TRAIN, GAE, 4, critic)
        for step in range(3):
            await trainer.take(group := judged(1, 0.25, 1.0))
            metrics = (await trainer.step([group])).metrics
            assert ranks.calls.count("step") == critic.version == step + 1
            assert ("train/loss" in metrics) is (step == 2)
            assert policy.calls == (["accumulate", "step"] if step == 2 else [])

    run(work)


@pytest.mark.parametrize(("critic_updates", "steps"), [(None, 2), (1, 1)])
def test_several_updates_split_the_batch_and_the_version_counts_batches(critic_updates: int | None, steps: int) -> None:
    async def work() -> None:
        ranks, policy = CriticRanks(), PolicyRanks()
        algorithm = replace(GAE, updates_per_batch=2)
        critic = make_critic(ranks, algorithm, updates_per_batch=critic_updates)
        trainer = BatchTrainer(LearnerRanks(policy), TRAIN, algorithm, 4, critic)
        batch = [judged(1, 0.25, 1.0), judged(2, -1.0, 0.0)]
        for group in batch:
            await trainer.take(group)
        await trainer.step(batch)
        assert ranks.calls.count("step") == steps and critic.version == 1
        assert set(batch_of(ranks)) == {10, 11, 20, 21}
        assert all(max(values) < 100 for values, _ in batch_of(ranks).values()), "all are of the first version"

    run(work)


def truncated(group: JudgedGroup, *siblings: int) -> JudgedGroup:
    rollouts = tuple(
        replace(one, status="truncated") if one.sibling in siblings else one for one in group.rollouts
    )  # fmt: skip
    return replace(group, rollouts=rollouts)


@pytest.mark.parametrize("updates", [1, 2])
def test_a_masked_rollout_teaches_neither_policy_nor_critic_and_batches_of_them_count(updates: int) -> None:
    async def work() -> None:
        ranks, policy = CriticRanks(), PolicyRanks()
        algorithm = replace(GAE, updates_per_batch=updates)
        critic = Critic(CriticLearnerRanks(ranks), CriticConfig(enabled=True), TRAIN, algorithm, 4, mask_truncated=True)
        trainer = BatchTrainer(LearnerRanks(policy), TRAIN, algorithm, 4, critic, mask_truncated=True)
        whole, cut = judged(1, 0.25, 1.0), judged(2, -1.0, 0.0)
        for step, batch in enumerate(
            [[truncated(whole, 0), truncated(cut, 0, 1)], [truncated(whole, 0, 1), truncated(cut, 0, 1)]]
        ):
            for group in batch:
                await trainer.take(group)
            metrics = (await trainer.step(batch)).metrics
            assert (critic.version, policy.calls.count("step")) == (step + 1, (step + 1) * updates)
            assert metrics.get("train/skipped_updates", 0.0) == (updates - 1 if step == 0 else updates)
            assert ("critic/return_mean" in metrics) is (step == 0)
        assert batch_of(ranks) == {11: ([5, 11], [1, 1])}
        assert np.concatenate([one.token_ids_T[one.loss_mask_E > 0] for one in policy.accumulated]).tolist() == [11, 11]

    run(work)


def test_a_kl_in_the_reward_is_paid_token_by_token() -> None:
    """k1 of each token is 1 nat: 0.2 remains to be charged at the first, 0.1 at the last."""

    async def work() -> None:
        ranks, policy = CriticRanks(), PolicyRanks()
        algorithm = replace(GAE, kl_coefficient=0.1, kl_in_reward=True, kl_estimator="k1")
        trainer = BatchTrainer(LearnerRanks(policy), TRAIN, algorithm, 4, make_critic(ranks, algorithm))
        await trainer.take(group := judged(1, 1.0, 1.0))
        await trainer.step([group])
        assert batch_of(ranks)[10][1] == pytest.approx([0.8, 0.9])

    run(work)


def test_a_dropped_batch_leaves_nothing_in_the_next() -> None:
    async def work() -> None:
        ranks = CriticRanks()
        critic = make_critic(ranks)
        await critic.take(judged(1, 99.0, 1.0), None)
        await critic.discard()
        assert ranks.calls[-1] == "discard"
        ranks.learned.clear()
        await critic.take(judged(2, -1.0, 0.0), None)
        await critic.step()
        assert set(batch_of(ranks)) == {20, 21}

    run(work)
