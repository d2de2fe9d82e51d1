"""From judged groups to training samples: which tokens are trained, the advantage and the KL of each, and in which
update. Pure.
"""

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from grmpipe.algorithm.distill import DistillConfig
from grmpipe.algorithm.parts import EstimatorKind, estimate
from grmpipe.algorithm.rewards import Rewards, Values, charge_by_token, place_rewards, shape_rewards
from grmpipe.config.train import AlgorithmConfig
from grmpipe.models.seeds import derive_seed
from grmpipe.models.types import ANY_EXPERT, TokenScores, VersionSpan
from grmpipe.train.batching.packer import MicroBatchRound, PackedLayout
from grmpipe.types import BatchTotals, JudgedGroup, MicroBatch, Rollout, TeacherScores, TrainingSample, Turn, Verdict

Kl = Mapping[tuple[str, int], np.ndarray]  # (group_id, sibling) -> nats, [C] by token of its completions


def to_samples(
    groups: Sequence[JudgedGroup],
    algorithm: AlgorithmConfig,
    max_new_tokens: int = 0,
    kl: Kl | None = None,
    values: Values | None = None,
    *,
    mask_truncated: bool = False,
) -> tuple[TrainingSample, ...]:
    """One or more samples per trained sibling. A sibling without a verdict has none and enters no average.

    groups:         groups whose advantages are estimated together: one, or the batch if the estimator needs it.
    max_new_tokens: a turn's limit; the length penalty is measured from it.
    kl:             KL to the reference, if it is subtracted from the rewards.
    values:         values of the critic, if there is one.
    mask_truncated: a truncated rollout has no sample; its verdict stays in its group's baseline.

    Raises ValueError for a group with fewer than two verdicts.
    """
    judged, kind = [select_judged(group) for group in groups], algorithm.estimator_kind
    rewards = [
        [
            compute_rewards(
                rollout, verdict, algorithm, kind, max_new_tokens, kl, values, mask_truncated=mask_truncated
            )
            for rollout, verdict in siblings
        ]
        for siblings in judged
    ]
    return tuple(
        sample
        for siblings, group, advantages in zip(judged, rewards, estimate(rewards, algorithm), strict=True)
        for (rollout, verdict), own, advantages_N in zip(siblings, group, advantages, strict=True)
        if own.is_trained
        for sample in split_rollout(
            rollout,
            trust_in(verdict, algorithm.weight_half_std) * with_inserted(rollout, advantages_N)
            + teacher_advantages(rollout, verdict, algorithm.distill),
            verdict.teacher,
        )
    )


def mark_sampled(rollout: Rollout) -> np.ndarray:
    """[C] bool, for the C tokens of all completions: True for the N sampled ones."""
    sampled_C, begin = np.ones(sum(len(turn.completion.token_ids) for turn in rollout.turns), dtype=bool), 0
    for turn in rollout.turns:
        for first, last in turn.completion.unsampled:
            sampled_C[begin + first : begin + last] = False
        begin += len(turn.completion.token_ids)
    return sampled_C


def with_inserted(rollout: Rollout, of_sampled_N: np.ndarray) -> np.ndarray:
    """[C] float64: an entry for each token of the completions, 0 for inserted ones."""
    sampled_C = mark_sampled(rollout)
    values_C = np.zeros(len(sampled_C))
    values_C[sampled_C] = of_sampled_N
    return values_C


def teacher_advantages(rollout: Rollout, verdict: Verdict, distill: DistillConfig) -> np.ndarray | float:
    """[C] float64: -coefficient * (log mu - log pi_teacher) of each token of the completions, where mu sampled it: the
    advantage by token of a reverse KL (Tinker's and prime-rl's form). 0 without a teacher.
    """
    if verdict.teacher is None or distill.form != "advantage":
        return 0.0
    turns = zip(rollout.turns, verdict.teacher.by_turn, strict=True)
    of_turns = [scores.logprobs_N - np.array(turn.completion.logprobs) for turn, scores in turns]
    advantages_C: np.ndarray = distill.coefficient * np.concatenate(of_turns)
    return advantages_C


def compute_rewards(
    rollout: Rollout,
    verdict: Verdict,
    algorithm: AlgorithmConfig,
    kind: EstimatorKind,
    max_new_tokens: int = 0,
    kl: Kl | None = None,
    values: Values | None = None,
    *,
    mask_truncated: bool = False,
) -> Rewards:
    """The inputs of advantages and value targets: rewards minus penalties, and the critic's values. kind: of the
    algorithm's estimator.
    """
    key = rollout_key(rollout)
    kl_N = None if kl is None else kl[key][mark_sampled(rollout)]
    charged_N = None if kind.by_token or kind.by_log_ratio else kl_N
    placed = place_rewards(rollout, verdict, mask_truncated=mask_truncated)
    rewards = shape_rewards(placed, rollout, algorithm, max_new_tokens, charged_N)
    if kind.by_log_ratio and kl_N is not None:
        rewards = replace(rewards, log_ratio=float(kl_N.sum()))
    if kind.by_token and kl_N is not None:
        rewards = charge_by_token(rewards, algorithm.kl_coefficient * kl_N)
    return rewards if values is None else replace(rewards, expected_N=values[key][mark_sampled(rollout)])


def trust_in(verdict: Verdict, weight_half_std: float | None) -> float:
    """The factor of an advantage: 1 if the judgements agree, 1/2 if their deviation is `weight_half_std`.

    tau^2 / (tau^2 + sigma^2): the reliability of a measurement with noise sigma of values that differ by tau.
    """
    if weight_half_std is None:
        return 1.0
    return 1 / (1 + (verdict.score_std / weight_half_std) ** 2)


def select_judged(group: JudgedGroup) -> list[tuple[Rollout, Verdict]]:
    """Rollouts with a verdict, and their verdicts."""
    return [
        (rollout, verdict)
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True)
        if isinstance(verdict, Verdict)
    ]


def split_rollout(
    rollout: Rollout, advantages_C: np.ndarray, teacher: TeacherScores | None = None
) -> tuple[TrainingSample, ...]:
    """One sample per segment. `advantages_C`: one per token of the completions, turn by turn; those of inserted tokens
    aren't read.
    """
    sampled_C = mark_sampled(rollout)
    ends = [*itertools.accumulate(len(turn.completion.token_ids) for turn in rollout.turns)]
    by_turn = [(sampled_C[start:end], advantages_C[start:end]) for start, end in itertools.pairwise((0, *ends))]
    samples, first = [], 0
    for segment, turns in enumerate(rollout.segments()):
        here = slice(first, first + len(turns))
        scored = None if teacher is None else place_scores(turns, teacher.by_turn[here])
        samples.append(_sample(rollout, segment, turns, by_turn[here], scored))
        first += len(turns)
    return tuple(samples)


def count(samples: Sequence[TrainingSample], oldest_version: int) -> BatchTotals:
    """The sizes of a batch. A sequence is a rollout with a trained token, whatever the number of its samples."""
    trained = [sum(sample.loss_mask[1:]) for sample in samples]  # nothing predicts a first token
    rollouts = {rollout_key(sample) for sample, tokens in zip(samples, trained, strict=True) if tokens > 0}
    return BatchTotals(
        num_loss_tokens=sum(trained),
        num_sequences=len(rollouts),
        num_groups=len({sample.group_id for sample in samples}),
        oldest_version=oldest_version,
    )


def mean_advantages(samples: Sequence[TrainingSample]) -> dict[tuple[str, int], float]:
    """The mean advantage of each rollout over its trained tokens; none for a rollout without one."""
    sums: dict[tuple[str, int], float] = {}
    trained: dict[tuple[str, int], int] = {}
    for sample in samples:
        key = rollout_key(sample)
        sums[key] = sums.get(key, 0.0) + sum(sample.advantages)
        trained[key] = trained.get(key, 0) + sum(sample.loss_mask)
    return {key: total / trained[key] for key, total in sums.items() if trained[key]}


def without_finite_advantages(samples: Sequence[TrainingSample]) -> list[str]:
    """Ids of the groups with a sample whose advantages aren't all finite, in order."""
    return sorted({sample.group_id for sample in samples if not np.isfinite(sample.advantages).all()})


PromptedTurn = tuple[tuple[int, ...], Turn]  # a turn, after its whole prompt


def place_scores(turns: Sequence[PromptedTurn], by_turn: Sequence[TokenScores]) -> TokenScores:
    """The scores of completions on the tokens of their segment: zeros elsewhere."""
    prompt_ids, last = turns[-1]
    num_tokens = len(prompt_ids) + len(last.completion.token_ids)

    def place(columns: Sequence[np.ndarray | None]) -> np.ndarray | None:
        if (first := columns[0]) is None:
            return None
        placed = np.zeros((num_tokens, *first.shape[1:]), first.dtype)
        for (before, turn), column in zip(turns, columns, strict=True):
            placed[len(before) : len(before) + len(turn.completion.token_ids)] = column
        return placed

    logprobs_T = place([scores.logprobs_N for scores in by_turn])
    assert logprobs_T is not None
    return TokenScores(
        logprobs_N=logprobs_T,
        top_ids_NK=place([scores.top_ids_NK for scores in by_turn]),
        top_logprobs_NK=place([scores.top_logprobs_NK for scores in by_turn]),
    )


def _sample(
    rollout: Rollout,
    segment: int,
    turns: Sequence[PromptedTurn],
    by_turn: Sequence[tuple[np.ndarray, np.ndarray]],  # whether each token was sampled, and its advantage
    teacher: TokenScores | None,
) -> TrainingSample:
    token_ids: tuple[int, ...] = ()
    mask: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    versions: list[VersionSpan] = []
    for (prompt_ids, turn), (sampled_C, advantages_C) in zip(turns, by_turn, strict=True):
        start, sampled = len(prompt_ids), turn.completion
        mask += [0] * (start - len(token_ids)) + sampled_C.astype(int).tolist()
        logprobs += [0.0] * (start - len(token_ids)) + list(sampled.logprobs)
        advantages += [0.0] * (start - len(token_ids)) + (advantages_C * sampled_C).tolist()
        versions += [
            VersionSpan(model=span.model, version=span.version, start=start + span.start, end=start + span.end)
            for span in sampled.versions
        ]
        token_ids = prompt_ids + sampled.token_ids
    return TrainingSample(
        group_id=rollout.group_id,
        sibling=rollout.sibling,
        segment=segment,
        token_ids=token_ids,
        loss_mask=tuple(mask),
        sampler_logprobs=tuple(logprobs),
        advantages=tuple(advantages),
        versions=tuple(versions),
        num_turns=len(turns),
        experts_TLK=_experts([turn for _, turn in turns], len(token_ids)),
        teacher=teacher,
    )


def _experts(turns: Sequence[Turn], num_tokens: int) -> np.ndarray | None:
    """The experts of each token when it was first fed: a prompt repeats the tokens of earlier turns."""
    known = [turn.completion.experts_TLK for turn in turns if turn.completion.experts_TLK is not None]
    if not known:
        return None
    experts_TLK = np.full((num_tokens, *known[0].shape[1:]), ANY_EXPERT, dtype=np.int16)
    num_filled = 0
    for turn_experts_TLK in known:
        experts_TLK[num_filled : len(turn_experts_TLK)] = turn_experts_TLK[num_filled:]
        num_filled = len(turn_experts_TLK)
    return experts_TLK


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
    """The KL of the tokens of a sample's completions, [N]. 0 for its first token, which nothing predicts, and for
    inserted ones, which the policy didn't sample.
    """
    import torch  # late: every driver packs samples, few ask a reference

    from grmpipe.algorithm.objective import kl

    sampler_T = torch.tensor(sample.sampler_logprobs, dtype=torch.float64)
    kl_T = kl(kl_estimator, sampler_T, torch.from_numpy(reference_T.astype(np.float64)))
    kl_T[0] = 0.0
    nats_N: np.ndarray = (kl_T.numpy() * sample.loss_mask)[sample.of_completions()]
    return nats_N


def shuffle_into_updates(group_ids: Iterable[str], num_updates: int, seed: int, version: int) -> list[set[str]]:
    """`num_updates` nearly equal sets, shuffled with `seed` for the batch after `version`. With fewer ids the last ones
    are empty: their updates are skipped.

    The order of the ids doesn't matter: groups arrive by length, and the longest would always come last, when the
    weights have moved most.
    """
    ids = sorted(set(group_ids))
    random.Random(derive_seed(seed, f"updates after version {version}")).shuffle(ids)
    return [set(ids[update::num_updates]) for update in range(num_updates)]
