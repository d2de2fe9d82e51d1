"""Trained ids are the sampled ids; a failed sibling is left out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.algorithm.distill import DistillConfig
from grmpipe.algorithm.parts import ESTIMATORS
from grmpipe.algorithm.rewards import count_sampled
from grmpipe.algorithm.settings import OverlongConfig, PassAtK
from grmpipe.config.train import AlgorithmConfig
from grmpipe.judge.verdict import only_finite
from grmpipe.models.types import AskedAnswer, Completion, TokenScores, VersionSpan
from grmpipe.train.batching.samples import count, kl_of_sample, mean_advantages, rollout_key, split_rollout, to_samples
from grmpipe.train.critic.value_samples import make_sequences, values_of_samples
from grmpipe.types import Failed, JudgedGroup, JudgeReport, Prompt, RewardSpan, Rollout, TeacherScores, Turn, Verdict

TIMEOUT = Failed(stage="judge", cause="timeout", attempts=3)


def verdict(*values: float) -> Verdict:
    spans = tuple(RewardSpan(turn=0, start=i, end=i + 1, value=value) for i, value in enumerate(values))
    return Verdict(rewards=spans, score=0.0, breakdown={}, score_std=0.0, num_judgements=1)


def completion(ids: tuple[int, ...], version: int = 0) -> Completion:
    return Completion(
        token_ids=ids,
        logprobs=tuple(-0.1 * (i + 1) for i in range(len(ids))),
        text="",
        finish_reason="stop",
        versions=(VersionSpan(model="policy", version=version, start=0, end=len(ids)),),
    )


def rollout(sibling: int, *turns: tuple[tuple[int, ...], tuple[int, ...]]) -> Rollout:
    """Turns by their whole prompts, and sampled tokens."""
    played: list[Turn] = []
    so_far: tuple[int, ...] = ()
    for i, (prompt, ids) in enumerate(turns):
        rewritten = bool(played) and prompt[: len(so_far)] != so_far
        new_ids = prompt if rewritten else prompt[len(so_far) :]
        played.append(Turn(new_ids=new_ids, completion=completion(ids, i), rewritten=rewritten))
        so_far = prompt + ids
    return Rollout(group_id="g", sibling=sibling, turns=tuple(played), status="finished")


def group(rollouts: list[Rollout], verdicts: list[Verdict | Failed]) -> JudgedGroup:
    prompt = Prompt(prompt_id="p", messages=())
    return JudgedGroup(group_id="g", prompt=prompt, rollouts=tuple(rollouts), verdicts=tuple(verdicts))


# Of the same batch.
OTHER = group(
    [replace(rollout(0, ((1,), (2, 3))), group_id="h"), replace(rollout(1, ((1,), (4,))), group_id="h")],
    [verdict(0.5), verdict(2.0)],
)
ids = st.lists(st.integers(0, 9), min_size=1, max_size=5).map(tuple)
rewards = st.floats(-10, 10, allow_nan=False)


@st.composite
def judged_groups(draw: st.DrawFn) -> JudgedGroup:
    verdicts = draw(st.lists(st.one_of(rewards.map(verdict), st.just(TIMEOUT)), min_size=2, max_size=6))
    verdicts += [verdict(0.0), verdict(1.0)]
    turns = st.lists(st.tuples(ids, ids), min_size=1, max_size=3)
    return group([rollout(i, *draw(turns)) for i in range(len(verdicts))], verdicts)


@given(judged_groups(), st.sampled_from(sorted(ESTIMATORS)), st.sampled_from(["population", "sample"]), ids, st.data())
def test_failed_siblings_change_nothing_in_their_batch(
    judged: JudgedGroup, estimator: str, std: str, other_ids: tuple[int, ...], data: st.DataObject
) -> None:
    algorithm = AlgorithmConfig(estimator=estimator, std=std, pass_at_k=PassAtK(k=2))
    failures = [i for i, found in enumerate(judged.verdicts) if isinstance(found, Failed)]
    rollouts, verdicts = list(judged.rollouts), list(judged.verdicts)
    for i in failures:
        rollouts[i] = rollout(i, (other_ids, other_ids))
        cause = data.draw(st.sampled_from(["timeout", "refused", "died", "unparseable", "truncated", "too_long"]))
        verdicts[i] = Failed(stage="judge", cause=cause, attempts=data.draw(st.integers(1, 9)))
        if data.draw(st.booleans()):  # as a custom judge may give it
            number = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
            verdicts[i] = only_finite(JudgeReport(verdict=verdict(number))).verdict
    samples = to_samples([judged, OTHER], algorithm)
    assert samples == to_samples([group(rollouts, verdicts), OTHER], algorithm)
    kept = [i for i in range(len(verdicts)) if i not in failures]
    without = group([judged.rollouts[i] for i in kept], [judged.verdicts[i] for i in kept])
    assert samples == to_samples([without, OTHER], algorithm)
    assert not {sample.sibling for sample in samples if sample.group_id == "g"} & set(failures)


@given(judged_groups())
def test_trained_ids_are_the_sampled_ids(judged: JudgedGroup) -> None:
    samples = to_samples([judged], AlgorithmConfig())
    for played, found in zip(judged.rollouts, judged.verdicts, strict=True):
        if isinstance(found, Failed):
            continue
        own = [sample for sample in samples if sample.sibling == played.sibling]
        trained = [
            (token, logprob)
            for sample in own
            for token, mask, logprob in zip(sample.token_ids, sample.loss_mask, sample.sampler_logprobs, strict=True)
            if mask
        ]
        sampled = [
            pair
            for turn in played.turns
            for pair in zip(turn.completion.token_ids, turn.completion.logprobs, strict=True)
        ]
        assert trained == sampled
        for sample in own:
            assert all(mask or (lp == adv == 0) for mask, lp, adv in zip(
                sample.loss_mask, sample.sampler_logprobs, sample.advantages, strict=True))  # fmt: skip
            covered = [t for span in sample.versions for t in range(span.start, span.end)]
            assert covered == [t for t, mask in enumerate(sample.loss_mask) if mask]


def test_an_advantage_counts_by_how_far_its_judgements_agree() -> None:
    rollouts = [rollout(sibling, ((1,), (2,))) for sibling in range(3)]
    verdicts = [replace(verdict(value), score_std=spread) for value, spread in ((3.0, 0.0), (0.0, 2.0), (0.0, 4.0))]
    judged = group(rollouts, list(verdicts))
    weighed = to_samples([judged], AlgorithmConfig(estimator="dr_grpo", weight_half_std=2.0))
    assert [sample.advantages[-1] for sample in weighed] == pytest.approx([2.0, -1.0 / 2, -1.0 / 5])
    alike = to_samples([judged], AlgorithmConfig(estimator="dr_grpo"))
    assert [sample.advantages[-1] for sample in alike] == [2.0, -1.0, -1.0]


def two_turns(second_prompt: tuple[int, ...]) -> JudgedGroup:
    return group([rollout(0, ((1, 2), (3,)), (second_prompt, (5, 6))), rollout(1, ((1, 2), (9,)))],
                 [verdict(1.0), verdict(-1.0)])  # fmt: skip


def test_continued_turns_become_one_sample() -> None:
    sample, _ = to_samples([two_turns((1, 2, 3, 4))], AlgorithmConfig(estimator="dr_grpo"))
    assert sample.token_ids == (1, 2, 3, 4, 5, 6)
    assert sample.loss_mask == (0, 0, 1, 0, 1, 1)
    assert sample.advantages == (0, 0, 1, 0, 1, 1)
    assert [(span.version, span.start, span.end) for span in sample.versions] == [(0, 2, 3), (1, 4, 6)]


def test_a_rewritten_history_starts_a_segment() -> None:
    first, second, _ = to_samples([two_turns((1, 2, 4))], AlgorithmConfig(estimator="dr_grpo"))
    assert (first.segment, first.token_ids, first.loss_mask) == (0, (1, 2, 3), (0, 0, 1))
    assert (second.segment, second.token_ids, second.loss_mask) == (1, (1, 2, 4, 5, 6), (0, 0, 0, 1, 1))
    assert first.advantages[-1] == second.advantages[-1] == 1


def test_spans_add_up_to_the_outcome() -> None:
    rollouts = [rollout(0, ((1,), (2, 3))), rollout(1, ((1,), (4,)))]
    spread = to_samples([group(rollouts, [verdict(0.25, 0.75), verdict(0.0)])], AlgorithmConfig())
    assert spread == to_samples([group(rollouts, [verdict(1.0), verdict(0.0)])], AlgorithmConfig())


def test_each_segment_has_the_advantages_of_its_own_tokens() -> None:
    """Two turns of 1 and 2 sampled tokens, whose history is rewritten in between."""
    first, second = split_rollout(two_turns((1, 2, 4)).rollouts[0], np.array([0.5, 1.0, -1.0]))
    assert first.advantages == (0, 0, 0.5)
    assert second.advantages == (0, 0, 0, 1.0, -1.0)


def test_rewards_of_steps_reach_the_tokens_of_their_step() -> None:
    """Returns (1, 3) and (1, 0) at two steps of one token: equal at the first, +-1 at the second."""
    rollouts = [rollout(0, ((1,), (2, 3))), rollout(1, ((1,), (4, 5)))]
    judged = group(rollouts, [verdict(-2.0, 3.0), verdict(1.0, 0.0)])
    better, worse = to_samples([judged], AlgorithmConfig(estimator="process"))
    assert better.advantages == pytest.approx((0, 0, 1), abs=1e-5)
    assert worse.advantages == pytest.approx((0, 0, -1), abs=1e-5)


def test_a_long_answer_is_worth_less_than_a_short_one_that_is_as_good() -> None:
    algorithm = AlgorithmConfig(estimator="dr_grpo", overlong_buffer=OverlongConfig(share=0.5))
    judged = group([rollout(0, ((1,), (2, 3, 4))), rollout(1, ((1,), (2,)))], [verdict(1.0), verdict(1.0)])
    long, short = to_samples([judged], algorithm, max_new_tokens=4)
    assert (long.advantages[-1], short.advantages[-1]) == (-0.25, 0.25)


def test_a_distance_to_the_reference_is_taken_off_its_rollouts_reward() -> None:
    algorithm = AlgorithmConfig(estimator="dr_grpo", kl_coefficient=0.5, kl_in_reward=True)
    judged = group([rollout(0, ((1,), (2, 3))), rollout(1, ((1,), (4,)))], [verdict(1.0), verdict(1.0)])
    far, near = to_samples([judged], algorithm, kl={("g", 0): np.array([1.0, 1.0]), ("g", 1): np.array([0.0])})
    assert (far.advantages[-1], near.advantages[-1]) == (-0.5, 0.5)


def test_a_group_with_one_verdict_is_refused() -> None:
    with pytest.raises(ValueError, match="min_valid_siblings"):
        to_samples([group([rollout(0, ((1,), (2,))), rollout(1, ((1,), (2,)))], [verdict(1.0), TIMEOUT])],
                   AlgorithmConfig())  # fmt: skip


def test_a_sample_without_trained_tokens_is_no_sequence() -> None:
    samples = to_samples([two_turns((1, 2, 3, 4))], AlgorithmConfig())
    silent = replace(samples[0], loss_mask=(0,) * 6, group_id="h")
    totals = count([*samples, silent], oldest_version=4)
    assert (totals.num_loss_tokens, totals.num_sequences, totals.num_groups, totals.oldest_version) == (4, 2, 2, 4)


def test_inserted_tokens_are_never_trained() -> None:
    """A thinking budget inserts the end of a thought: the learner sees it, and gets no gradient from it. So it is with
    what asks for a verdict.
    """
    thought = replace(completion((5, 6, 7, 8, 9)), inserted=(1, 3))
    asked = replace(thought, asked=AskedAnswer(start=4, end=5, text_start=9))
    (sample,) = split_rollout(replace(rollout(0), turns=(Turn(new_ids=(1, 2), completion=asked),)), np.ones(5))
    assert sample.loss_mask == (0, 0, 1, 0, 0, 1, 0) and count_sampled(asked, 5) == 2
    (sample,) = split_rollout(replace(rollout(0), turns=(Turn(new_ids=(1, 2), completion=thought),)), np.ones(5))
    assert sample.token_ids == (1, 2, 5, 6, 7, 8, 9)
    assert sample.loss_mask == (0, 0, 1, 0, 0, 1, 1)
    assert sample.advantages == (0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0)


@pytest.mark.parametrize("estimator", ["reinforce_pp", "gae", "gae_raw", "gae_turns"])
def test_inserted_tokens_cost_no_kl_and_have_a_critics_value(estimator: str) -> None:
    """The critic values the state before each; the policy didn't choose them."""
    thought = replace(completion((5, 6, 7, 8, 9)), inserted=(1, 3))
    rollouts = [replace(rollout(i), turns=(Turn(new_ids=(1, 2), completion=thought),)) for i in range(2)]
    samples = [sample for one in rollouts for sample in make_sequences(one)]
    kl = {rollout_key(sample): kl_of_sample(sample, np.full(7, -2.0), "k1") for sample in samples}
    assert kl["g", 0] == pytest.approx([1.9, 0.0, 0.0, 1.6, 1.5])
    values = values_of_samples(samples, [np.arange(7.0)] * 2)
    assert values["g", 0].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    algorithm = AlgorithmConfig(estimator=estimator, kl_coefficient=0.1, kl_in_reward=True, kl_estimator="k1")
    critics = values if algorithm.estimator_kind.needs_critic else None
    trained = to_samples([group(rollouts, [verdict(1.0), verdict(0.0)])], algorithm, kl=kl, values=critics)
    assert [np.flatnonzero(sample.advantages).tolist() for sample in trained] == [[2, 5, 6]] * 2


AVERAGE_NO_SIBLINGS = {"dpo", "gae", "gae_raw", "gae_turns", "raft", "reinforce_pp"}
CUT = 3  # the sibling of each group that was truncated
LENGTHS = (3, 5, 2)  # of the others
REWARDS = {"g": (0.0, 1.0, 0.25, 0.75), "h": (2.0, -1.0, 0.5, 4.0)}


def answer(group_id: str, sibling: int, num_tokens: int, *, budget: bool) -> Rollout:
    """One turn. budget: two tokens are inserted after the first one."""
    sampled = completion(tuple(range(10, 10 + num_tokens)))
    if budget:
        ids, logprobs = sampled.token_ids, sampled.logprobs
        spans = (VersionSpan(model="policy", version=0, start=0, end=num_tokens + 2),)
        sampled = replace(sampled, token_ids=(ids[0], 7, 8, *ids[1:]), logprobs=(logprobs[0], 0.0, 0.0, *logprobs[1:]),
                          versions=spans, inserted=(1, 3))  # fmt: skip
    status = "truncated" if sibling == CUT else "finished"
    return Rollout(group_id=group_id, sibling=sibling, turns=(Turn(new_ids=(1, 2), completion=sampled),), status=status)  # type: ignore[arg-type]


def estimated(
    estimator: str, truncated: str, *, cut_tokens: int = 9, budget: bool = False
) -> dict[tuple[str, int], list[float]]:
    """The advantages of the trained tokens of each trained rollout of two groups, each of three answers and a truncated
    one, whose rewards are given at the end of the first tokens and at the end. Holds that whatever counts trained
    tokens counts these.
    """
    algorithm = AlgorithmConfig(
        estimator=estimator, gamma=0.9, gae_lambda=0.8, kl_coefficient=0.1, kl_in_reward=True, kl_estimator="k1",
        pass_at_k=PassAtK(k=2), loss="policy_gradient", aggregation="constant",
    )  # fmt: skip
    groups, kl, values = [], {}, {}
    for group_id, rewards in REWARDS.items():
        lengths = LENGTHS if truncated == "fail" else (*LENGTHS, cut_tokens)
        rollouts = [answer(group_id, sibling, length, budget=budget) for sibling, length in enumerate(lengths)]
        ends = [(3 if budget else 1, len(one.turns[0].completion.token_ids)) for one in rollouts]
        verdicts = [
            Verdict(rewards=(RewardSpan(turn=0, start=0, end=first, value=0.1 * reward),
                             RewardSpan(turn=0, start=first, end=last, value=reward)),
                    score=0.0, breakdown={}, score_std=0.0, num_judgements=1)
            for reward, (first, last) in zip(rewards, ends, strict=False)
        ]  # fmt: skip
        groups.append(replace(group(rollouts, list(verdicts)), group_id=group_id))
        for one in rollouts:
            of_sampled = np.arange(len(one.turns[0].completion.token_ids) - 2 * budget) / 10 * (one.sibling != CUT)
            kl[rollout_key(one)] = np.insert(of_sampled, [1, 1], 0.0) if budget else of_sampled
            values[rollout_key(one)] = np.insert(of_sampled, [1, 1], 99.0) if budget else of_sampled
    critics = values if algorithm.estimator_kind.needs_critic else None
    samples = to_samples(groups, algorithm, kl=kl, values=critics, mask_truncated=truncated == "mask")
    found = {
        rollout_key(sample): np.array(sample.advantages)[np.array(sample.loss_mask) > 0].tolist() for sample in samples
    }
    totals = count(samples, 0)
    assert (totals.num_loss_tokens, totals.num_sequences) == (sum(map(len, found.values())), len(found))
    assert mean_advantages(samples) == {key: pytest.approx(np.mean(own)) for key, own in found.items()}
    return found


@pytest.mark.parametrize("budget", [False, True])
@pytest.mark.parametrize("truncated", ["train", "mask", "fail"])
@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_every_estimator_has_one_definition_of_a_trained_token(estimator: str, truncated: str, budget: bool) -> None:
    found = estimated(estimator, truncated, budget=budget)
    trained = {(group_id, sibling) for group_id in REWARDS for sibling in range(4 if truncated == "train" else 3)}
    assert found.keys() == trained
    if ESTIMATORS[estimator].need == "batch":
        everything = np.concatenate(list(found.values()))
        assert (everything.mean(), everything.std()) == pytest.approx((0.0, 1.0), abs=1e-5)
    if budget:  # what was inserted changes nothing of what was sampled
        plain = estimated(estimator, truncated)
        assert all(found[key] == pytest.approx(plain[key]) for key in trained)
    if truncated == "mask":  # only by its reward, in its group's baseline
        longer = estimated(estimator, truncated, cut_tokens=900, budget=budget)
        assert all(found[key] == pytest.approx(longer[key]) for key in trained)
        if estimator in AVERAGE_NO_SIBLINGS:
            without = estimated(estimator, "fail", budget=budget)
            assert all(found[key] == pytest.approx(without[key]) for key in trained)


def taught(*by_turn: list[float]) -> TeacherScores:
    scores = tuple(
        TokenScores(
            logprobs_N=np.array(own, np.float32),
            top_ids_NK=np.array([[10, 11]] * len(own), np.int32),
            top_logprobs_NK=np.array([[-0.5, -1.5]] * len(own), np.float32),
        )
        for own in by_turn
    )
    return TeacherScores(teacher="t", by_turn=scores)


def test_a_teachers_scores_stand_on_the_sampled_tokens_of_each_segment() -> None:
    """The third turn begins from a rewritten history: a segment of its own."""
    episode = rollout(0, ((1, 2), (3, 4)), ((1, 2, 3, 4, 9), (5,)), ((8,), (6,)))
    first, second = split_rollout(episode, np.zeros(4), taught([-3.0, -4.0], [-5.0], [-6.0]))
    assert first.teacher is not None and second.teacher is not None
    assert first.teacher.logprobs_N.tolist() == [0.0, 0.0, -3.0, -4.0, 0.0, -5.0]
    assert second.teacher.logprobs_N.tolist() == [0.0, -6.0]
    assert first.teacher.top_ids_NK is not None
    assert first.teacher.top_ids_NK.tolist() == [[0, 0], [0, 0], [10, 11], [10, 11], [0, 0], [10, 11]]


@pytest.mark.parametrize("form", ["loss", "advantage"])
def test_only_as_an_advantage_the_teacher_changes_those_of_the_rewards(form: str) -> None:
    rollouts = [rollout(i, ((1, 2), (3, 4))) for i in range(2)]
    verdicts = [
        replace(verdict(1.0), teacher=taught([-0.3, -0.1])),
        replace(verdict(0.0), teacher=taught([-0.1, -0.7])),
    ]
    algorithm = AlgorithmConfig(distill=DistillConfig(teachers={"default": "t"}, form=form, coefficient=2.0))
    plain = to_samples([group(rollouts, [verdict(1.0), verdict(0.0)])], AlgorithmConfig())
    samples = to_samples([group(rollouts, verdicts)], algorithm)
    added = [np.subtract(one.advantages, other.advantages) for one, other in zip(samples, plain, strict=True)]
    # The sampler's log-probs are -0.1 and -0.2.
    expected = [[0.0, 0.0, -0.4, 0.2], [0.0, 0.0, 0.0, -1.0]] if form == "advantage" else [[0.0] * 4] * 2
    np.testing.assert_allclose(added, expected, atol=1e-6)


def test_without_rewards_every_advantage_is_0() -> None:
    rollouts = [rollout(i, ((1, 2), (3, 4))) for i in range(2)]
    absent = Verdict(rewards=(), score=0.0, breakdown={}, score_std=0.0, num_judgements=0)
    samples = to_samples([group(rollouts, [absent, absent])], AlgorithmConfig())
    assert len(samples) == 2 and not any(any(sample.advantages) for sample in samples)
