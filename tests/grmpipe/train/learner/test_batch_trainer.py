"""The open batch on the driver: which groups start early, which wait, and what the learner gets."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest

from grmpipe.algorithm.parts import ESTIMATORS
from grmpipe.algorithm.settings import ReplayBufferConfig
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.types import Completion, VersionSpan
from grmpipe.pipeline.interfaces import TrainedBatch
from grmpipe.train.batching.packer import MicroBatchRound, pack_trees
from grmpipe.train.batching.prefix_tree import PrefixTree
from grmpipe.train.batching.samples import count
from grmpipe.train.batching.seqlen_balancing import work
from grmpipe.train.learner.batch_trainer import BatchTrainer
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.train.non_finite_gradients import NonFiniteGradients
from grmpipe.types import Failed, JudgedGroup, MicroBatch, Prompt, RewardSpan, Rollout, TrainingSample, Turn, Verdict

ONE_ROLLOUT = TrainConfig(micro_batch_tokens=3)  # every rollout is longer: every take fills a round


class RecordingRanks:
    """An ActorGroup of two ranks that records the calls, and returns log-probs of -2."""

    size = 2

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.accumulated: list[MicroBatch] = []

    async def call(self, rank: int, method: str, *args: object) -> object:
        raise NotImplementedError(method)

    async def call_all(self, method: str, *args: object) -> list[object]:
        self.calls.append(method)
        return [{}, {}]

    async def call_each(self, method: str, args_by_rank: Sequence[tuple[object, ...]]) -> list[object]:
        self.calls.append(method)
        batches = [args[0] for args in args_by_rank]
        assert all(isinstance(batch, MicroBatch) for batch in batches)
        if method == "accumulate":
            self.accumulated += batches  # type: ignore[arg-type]
            return [{}, {}]
        # type: ignore[attr-defined]
        return [np.where(batch.loss_mask_E > 0, -2.0, 0.0).astype(np.float32) for batch in batches]

    async def close(self) -> None: ...

    def advantage_of(self, token: int) -> float:
        """The advantage of the trained tokens with this id, the same for all."""
        found = {
            float(advantage)
            for batch in self.accumulated
            for token_id, trained, advantage in zip(
                batch.token_ids_T, batch.loss_mask_E, batch.advantages_E, strict=True
            )
            if trained and token_id == token
        }
        (advantage,) = found
        return advantage


def judged(number: int, *rewards: float) -> JudgedGroup:
    """A group whose sibling i wrote three tokens 10 * number + i; the sampler's log-probs are -1."""
    rollouts = []
    for sibling in range(len(rewards)):
        completion = Completion(
            token_ids=(10 * number + sibling,) * 3,
            logprobs=(-1.0,) * 3,
            text="",
            finish_reason="stop",
            versions=(VersionSpan(model="policy", version=0, start=0, end=3),),
        )
        turn = Turn(new_ids=(1,), completion=completion)
        rollouts.append(Rollout(group_id=f"g{number}", sibling=sibling, turns=(turn,), status="finished"))
    verdicts = tuple(
        Verdict(rewards=(RewardSpan(turn=0, start=0, end=3, value=reward),), score=0.0, breakdown={}, score_std=0.0,
                num_judgements=1)
        for reward in rewards
    )  # fmt: skip
    prompt = Prompt(prompt_id=str(number), messages=())
    return JudgedGroup(group_id=f"g{number}", prompt=prompt, rollouts=tuple(rollouts), verdicts=verdicts)


def train(algorithm: AlgorithmConfig, *groups: JudgedGroup) -> tuple[RecordingRanks, list[int]]:
    """Train one batch. Also returns the number of rounds accumulated after each group was taken."""
    ranks = RecordingRanks()
    rounds = []

    async def run() -> None:
        trainer = BatchTrainer(LearnerRanks(ranks), ONE_ROLLOUT, algorithm, max_new_tokens=4)
        for group in groups:
            await trainer.take(group)
            rounds.append(ranks.calls.count("accumulate"))
        await trainer.step(groups)

    asyncio.run(run())
    return ranks, rounds


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_estimators_of_groups_start_early_and_estimators_of_batches_wait(name: str) -> None:
    _, rounds = train(AlgorithmConfig(estimator=name), judged(1, 0.0, 1.0), judged(2, 0.0, 1.0), judged(3, 0.0, 1.0))
    assert rounds == ([1, 2, 3] if ESTIMATORS[name].need == "group" else [0, 0, 0])


def test_an_idle_learner_starts_on_a_part_of_a_micro_batch() -> None:
    ranks = RecordingRanks()
    rounds = []

    async def run() -> None:
        trainer = BatchTrainer(LearnerRanks(ranks), TrainConfig(micro_batch_tokens=32), AlgorithmConfig())
        groups = [judged(number, 0.0, 1.0) for number in (1, 2, 3)]
        for group in groups:  # of 7 packed tokens; a quarter of two ranks' micro-batches is 16
            await trainer.take(group)
            await trainer.while_waiting()
            rounds.append(ranks.calls.count("accumulate"))
        await trainer.step(groups)

    asyncio.run(run())
    assert rounds == [0, 0, 1]
    trained = np.concatenate([batch.token_ids_T[batch.loss_mask_E > 0] for batch in ranks.accumulated])
    assert sorted(trained.tolist()) == sorted([10, 11, 20, 21, 30, 31] * 3)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if ESTIMATORS[name].need == "batch"])
def test_estimator_of_batches_does_not_start_while_it_waits(name: str) -> None:
    ranks = RecordingRanks()

    async def run() -> None:
        trainer = BatchTrainer(LearnerRanks(ranks), ONE_ROLLOUT, AlgorithmConfig(estimator=name), max_new_tokens=4)
        await trainer.take(judged(1, 0.0, 1.0))
        await trainer.while_waiting()
        assert "accumulate" not in ranks.calls

    asyncio.run(run())


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_the_whole_batch_is_trained_once(name: str) -> None:
    ranks, _ = train(AlgorithmConfig(estimator=name), judged(1, 0.0, 1.0), judged(2, 5.0, 7.0))
    trained = np.concatenate([batch.token_ids_T[batch.loss_mask_E > 0] for batch in ranks.accumulated])
    assert sorted(trained.tolist()) == sorted([10, 11, 20, 21] * 3)
    assert ranks.calls[-1] == "step" and "old_pass" not in ranks.calls


def test_whitening_is_over_the_groups_of_the_batch() -> None:
    ranks, _ = train(AlgorithmConfig(estimator="reinforce_pp"), judged(1, 0.0, 1.0), judged(2, 2.0, 5.0))
    found = [ranks.advantage_of(token) for token in (10, 11, 20, 21)]
    assert found == pytest.approx(np.array([-2, -1, 0, 3]) / np.sqrt(3.5), abs=1e-5)


def test_a_batch_does_not_remember_the_one_before() -> None:
    ranks = RecordingRanks()

    async def run() -> None:
        trainer = BatchTrainer(LearnerRanks(ranks), ONE_ROLLOUT, AlgorithmConfig(estimator="reinforce_pp"))
        for number, high in ((1, 99.0), (2, 1.0)):
            await trainer.take(group := judged(number, 0.0, high))
            await trainer.step([group])
        await trainer.take(judged(3, 0.0, 77.0))
        await trainer.discard()
        await trainer.take(group := judged(4, 0.0, 1.0))
        await trainer.step([group])

    asyncio.run(run())
    assert ranks.advantage_of(21) == ranks.advantage_of(41) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp"])
def test_several_updates_fix_pi_old_before_the_first(name: str) -> None:
    algorithm = AlgorithmConfig(estimator=name, updates_per_batch=2)
    ranks, rounds = train(algorithm, judged(1, 0.0, 1.0), judged(2, 0.0, 1.0))
    assert rounds == [0, 0]
    assert ranks.calls == ["old_pass", "old_pass", "accumulate", "step", "accumulate", "step"]


def test_each_update_learns_from_the_same_groups_in_any_order_of_arrival() -> None:
    algorithm = AlgorithmConfig(updates_per_batch=2)
    groups = [judged(number, 0.0, 1.0) for number in range(1, 7)]
    firsts = []
    for order in (groups, groups[::-1]):
        ranks, _ = train(algorithm, *order)
        half = len(ranks.accumulated) // 2
        firsts.append({int(token) for batch in ranks.accumulated[:half] for token in batch.token_ids_T})
    assert firsts[0] == firsts[1] != {0, 1, 10, 11, 20, 21, 30, 31}


def test_gradients_that_are_not_finite_for_their_advantages_name_the_groups() -> None:
    class Diverged(RecordingRanks):
        async def call_all(self, method: str, *args: object) -> list[object]:
            if method == "step":
                raise NonFiniteGradients(math.nan)
            return await super().call_all(method, *args)

    def told(*groups: JudgedGroup) -> str:
        trainer = BatchTrainer(LearnerRanks(Diverged()), ONE_ROLLOUT, AlgorithmConfig(), max_new_tokens=4)

        async def step() -> None:
            for group in groups:
                await trainer.take(group)
            await trainer.step(groups)

        with pytest.raises(NonFiniteGradients) as raised:
            asyncio.run(step())
        return str(raised.value)

    assert "of 1 groups are not finite (g2)" in told(judged(1, 0.0, 1.0), judged(2, math.nan, 1.0))
    assert "try a lower train.lr" in told(judged(1, 0.0, 1.0))


def test_a_kl_in_the_reward_is_asked_for_before_anything_is_trained() -> None:
    """k1 of every token is -1 - (-2) = 1 nat: both siblings pay 3 x 0.1, and the advantages stay as they were."""
    algorithm = AlgorithmConfig(estimator="dr_grpo", kl_coefficient=0.1, kl_in_reward=True, kl_estimator="k1")
    ranks, _ = train(algorithm, judged(1, 0.0, 1.0))
    assert ranks.calls == ["reference_logprobs", "accumulate", "step"]
    assert [ranks.advantage_of(token) for token in (10, 11)] == pytest.approx([-0.5, 0.5])


def test_a_kl_in_the_reward_is_each_rollouts_own() -> None:
    """The sibling with one more token is further from the reference."""
    long = judged(1, 1.0, 1.0)
    first, second = long.rollouts
    completion = Completion(
        token_ids=(11,),
        logprobs=(-1.0,),
        text="",
        finish_reason="stop",
        versions=(VersionSpan(model="policy", version=0, start=0, end=1),),
    )
    short = Rollout(group_id="g1", sibling=1, turns=(Turn(new_ids=(1,), completion=completion),), status=second.status)
    verdicts = tuple(
        Verdict(rewards=(RewardSpan(turn=0, start=0, end=end, value=1.0),), score=0.0, breakdown={}, score_std=0.0,
                num_judgements=1)
        for end in (3, 1)
    )  # fmt: skip
    group = JudgedGroup(group_id="g1", prompt=long.prompt, rollouts=(first, short), verdicts=verdicts)
    algorithm = AlgorithmConfig(estimator="dr_grpo", kl_coefficient=0.1, kl_in_reward=True, kl_estimator="k1")
    ranks, _ = train(algorithm, group)
    assert [ranks.advantage_of(token) for token in (10, 11)] == pytest.approx([-0.1, 0.1])


def test_dpo_weighs_the_pair_by_their_log_ratios_and_takes_no_kl_from_the_rewards() -> None:
    """Each of the 3 tokens is -1 - (-2) = 1 nat from the reference, for both siblings: beta sigmoid(0) = beta / 2."""
    algorithm = AlgorithmConfig(
        estimator="dpo", loss="policy_gradient", aggregation="constant", kl_coefficient=0.5, kl_in_reward=True,
        kl_estimator="k1",
    )  # fmt: skip
    ranks, _ = train(algorithm, judged(1, 0.0, 1.0))
    assert ranks.calls == ["reference_logprobs", "accumulate", "step"]
    assert [ranks.advantage_of(token) for token in (10, 11)] == pytest.approx([-0.25, 0.25])


def test_a_trained_group_is_trained_once_more_before_the_next_ones_come() -> None:
    """Two groups per batch, one of them again in the next; all of version 0, and at most one version old."""
    ranks = RecordingRanks()
    config = TrainConfig(micro_batch_tokens=4, groups_per_batch=2, max_staleness=1)
    seen, told = [], []

    async def run() -> None:
        trainer = BatchTrainer(LearnerRanks(ranks), config, AlgorithmConfig(replay_buffer=ReplayBufferConfig(groups=1)))
        for first in (1, 3, 5):
            groups = [judged(number, 0.0, 1.0) for number in (first, first + 1)]
            for group in groups:
                await trainer.take(group)
            told.append((await trainer.step(groups)).metrics["train/replayed_groups"])
            seen.append([int(batch.token_ids_T[-1]) // 10 for batch in ranks.accumulated[::2]])
            ranks.accumulated.clear()

    asyncio.run(run())
    assert seen == [[1, 2], [1, 3, 4], [5, 6]]  # at version 2 those of version 0 are too old
    assert told == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_pp"])
def test_a_step_tells_the_mean_advantage_of_each_rollout_that_has_one(estimator: str) -> None:
    group = judged(1, 0.0, 0.5, 1.0)
    lost = Failed(stage="judge", cause="timeout", attempts=1)
    group = dataclasses.replace(group, verdicts=(group.verdicts[0], lost, group.verdicts[2]))

    async def run() -> TrainedBatch:
        algorithm = AlgorithmConfig(estimator=estimator)
        trainer = BatchTrainer(LearnerRanks(RecordingRanks()), ONE_ROLLOUT, algorithm, max_new_tokens=4)
        await trainer.take(group)
        return await trainer.step([group])

    advantages = asyncio.run(run()).advantages
    assert advantages.keys() == {(group.group_id, 0), (group.group_id, 2)}
    low, high = advantages[group.group_id, 0], advantages[group.group_id, 2]
    assert 0.7 < high < 1.5, "of a token, not of all three"
    assert low == pytest.approx(-high)


@pytest.mark.parametrize("proximal", ["interpolated", "sampler"])
def test_no_pass_for_pi_old_where_no_ratio_is_against_it(proximal: str) -> None:
    algorithm = AlgorithmConfig(updates_per_batch=2, proximal=proximal, correction="none")
    ranks, _ = train(algorithm, judged(1, 0.0, 1.0), judged(2, 0.0, 1.0))
    assert ranks.calls == ["accumulate", "step", "accumulate", "step"]


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_pp"])
@pytest.mark.parametrize("prefix_sharing", [True, False])
def test_siblings_share_their_prompt_or_have_it_each(estimator: str, prefix_sharing: bool) -> None:
    """Eight siblings, of three tokens after a shared one, in pairs; also for a batch that is waited for."""
    ranks = RecordingRanks()
    config = TrainConfig(micro_batch_tokens=1000, prefix_sharing=prefix_sharing)

    async def run() -> None:
        trainer = BatchTrainer(LearnerRanks(ranks), config, AlgorithmConfig(estimator=estimator), max_new_tokens=4)
        await trainer.take(group := judged(1, *(0.0, 1.0) * 4))
        metrics = (await trainer.step([group])).metrics
        assert metrics["train/rank_imbalance"] == pytest.approx(1.0)
        assert metrics["train/packed_tokens"] == (28 if prefix_sharing else 32)
        assert metrics["train/unshared_tokens"] == 32

    asyncio.run(run())
    assert [len(batch.token_ids_T) for batch in ranks.accumulated] == ([14, 14] if prefix_sharing else [16, 16])


def test_several_updates_report_the_tokens_of_all_of_them() -> None:
    ranks = RecordingRanks()
    config = TrainConfig(micro_batch_tokens=1000)

    async def run() -> dict[str, float]:
        trainer = BatchTrainer(LearnerRanks(ranks), config, AlgorithmConfig(updates_per_batch=2), max_new_tokens=4)
        for group in (groups := [judged(1, 0.0, 1.0), judged(2, 0.0, 1.0)]):
            await trainer.take(group)
        return (await trainer.step(groups)).metrics

    metrics = asyncio.run(run())
    assert ranks.calls.count("step") == 2
    assert metrics["train/unshared_tokens"] == 4 * 4
    assert metrics["train/loss_tokens"] == sum(batch.loss_mask_E.sum() for batch in ranks.accumulated)


def test_updates_without_a_trained_token_are_skipped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Four groups for three updates, of which two, then none, have a rollout that wasn't truncated."""
    ranks, config = RecordingRanks(), TrainConfig(micro_batch_tokens=1000, groups_per_batch=4)

    async def run() -> list[dict[str, float]]:
        trainer = BatchTrainer(LearnerRanks(ranks), config, AlgorithmConfig(updates_per_batch=3), mask_truncated=True)
        told = []
        for whole in ((2, 3), ()):
            groups = [judged(number, 0.0, 1.0) for number in (1, 2, 3, 4)]
            groups = [group if number in whole else cut(group) for number, group in enumerate(groups, 1)]
            for group in groups:
                await trainer.take(group)
            told.append((await trainer.step(groups)).metrics)
        return told

    some, none = asyncio.run(run())
    assert ranks.calls.count("step") == 6, "the version of the run counts all of them"
    assert (some["train/skipped_updates"], none["train/skipped_updates"]) == (1.0, 3.0)
    assert (some["train/loss_tokens"], none["train/loss_tokens"]) == (12.0, 0.0)
    trained = {int(token) for batch in ranks.accumulated for token in batch.token_ids_T[batch.places_E] if token > 1}
    assert trained == {20, 21, 30, 31}, "nothing is computed of what isn't trained"
    (warning,) = caplog.messages
    assert warning.startswith("rollout.truncated: every rollout of this batch was truncated")


def cut(group: JudgedGroup) -> JudgedGroup:
    rollouts = tuple(dataclasses.replace(rollout, status="truncated") for rollout in group.rollouts)
    return dataclasses.replace(group, rollouts=rollouts)


def test_attention_to_a_shared_prompt_counts_as_work_of_the_siblings_rank() -> None:
    """Both ranks have 16384 tokens: one a single sample, the other two siblings, which both attend to their prompt."""
    long = PrefixTree.of([trained(0, 8192, 4096), trained(1, 8192, 4096)])
    alone = [PrefixTree.of([trained(0, 2048, 14_336)])]
    ranks = RecordingRanks()

    async def run() -> float:
        learner = LearnerRanks(ranks)
        await learner.accumulate(MicroBatchRound(micro_batches=(pack_trees([long]), pack_trees(alone))))
        return (await learner.step(count(long.samples, 0)))["train/rank_imbalance"]

    works = [work(12_288) + work(4096, 8192), work(16_384)]
    assert asyncio.run(run()) == pytest.approx(max(works) * 2 / sum(works))


def trained(sibling: int, prompt_tokens: int, answer_tokens: int) -> TrainingSample:
    before, length = (0,) * prompt_tokens, prompt_tokens + answer_tokens
    return TrainingSample(
        group_id="g", sibling=sibling, segment=0, token_ids=(7,) * prompt_tokens + (sibling,) * answer_tokens,
        loss_mask=before + (1,) * answer_tokens, sampler_logprobs=(0.0,) * length, advantages=(0.0,) * length,
        versions=(VersionSpan(model="policy", version=0, start=prompt_tokens, end=length),),
    )  # fmt: skip
