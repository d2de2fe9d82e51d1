"""A run's groups with the verdicts of both judges, and the advantages that the run's estimator gives to each. Reads
only.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from grmpipe.config.data import RolloutConfig
from grmpipe.config.run_config import RunConfig
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.evaluation.verdict_comparison import ComparedGroup, ComparedRollout
from grmpipe.judge.kinds.labels import find_rule
from grmpipe.judge.verdict import get_reward
from grmpipe.pipeline.interfaces import RolloutKey
from grmpipe.pipeline.step_metrics import check_truth
from grmpipe.run_dir.recorded_run import RecordedGroups
from grmpipe.run_dir.stored_groups import StoredGroups
from grmpipe.train.batching.samples import mean_advantages, select_judged, to_samples
from grmpipe.types import JudgedGroup

Advantages = Mapping[RolloutKey, float]  # mean over the trained tokens


def read_compared(stored: StoredGroups, again: RecordedGroups, config: RunConfig) -> Iterator[ComparedGroup]:
    """The groups that were judged again, step by step: a batch is in memory at a time."""
    judged = [group_id for group_id in stored.steps if group_id in again.judgements.places]
    for step, group_ids in itertools.groupby(judged, key=stored.steps.__getitem__):
        if step is not None:
            yield from compare_batch(step, stored.run, again, list(group_ids), config)
            continue
        for group_id in group_ids:
            yield from compare_batch(None, stored.run, again, [group_id], config)


def compare_batch(
    step: int | None, run: RecordedGroups, again: RecordedGroups, group_ids: Sequence[str], config: RunConfig
) -> Iterator[ComparedGroup]:
    """The groups of a step. Those that no step trained have no advantages."""
    old, new = [run.group(group_id) for group_id in group_ids], [again.group(group_id) for group_id in group_ids]
    before: Advantages = {}
    after: Advantages = {}
    if step is not None:
        before, after = (
            estimate_advantages(groups, config.algorithm, config.train, config.rollout) for groups in (old, new)
        )
    right = check_truth(old, find_rule(config.truth))
    for one, other in zip(old, new, strict=True):
        rollouts = tuple(
            ComparedRollout(
                old=get_reward(old_verdict),
                new=get_reward(new_verdict),
                right=right.get(key := (one.group_id, rollout.sibling)),
                old_advantage=before.get(key),
                new_advantage=after.get(key),
            )
            for rollout, old_verdict, new_verdict in zip(one.rollouts, one.verdicts, other.verdicts, strict=True)
        )
        yield ComparedGroup(group_id=one.group_id, step=step, rollouts=rollouts)


def estimate_advantages(
    groups: Sequence[JudgedGroup], algorithm: AlgorithmConfig, train: TrainConfig, rollout: RolloutConfig
) -> Advantages:
    """The advantages of a batch, without a KL in the reward, which needs the learner. None with too few verdicts, and
    with an estimator that needs a critic.
    """
    kind, least = algorithm.estimator_kind, max(2, train.min_valid_siblings)
    whole = [group for group in groups if len(select_judged(group)) >= least]
    if kind.needs_critic or not whole:
        return {}
    batches = [whole] if kind.need == "batch" else [[group] for group in whole]
    mask = rollout.truncated == "mask"
    by_batch = [to_samples(batch, algorithm, rollout.max_new_tokens, mask_truncated=mask) for batch in batches]
    return mean_advantages([sample for samples in by_batch for sample in samples])
