"""A run's groups with the verdicts of both judges, and the advantages that the run's estimator gives to each. Reads
only.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from grmpipe.config.run_config import RunConfig
from grmpipe.evaluation.verdict_comparison import ComparedGroup, ComparedRollout, mean
from grmpipe.judge.kinds.labels import rule_of
from grmpipe.judge.kinds.rule import Rule
from grmpipe.pipeline.counters import ruled
from grmpipe.run_dir.recorded_run import RecordedGroups
from grmpipe.run_dir.stored_groups import StoredGroups
from grmpipe.train.batching.samples import judged_siblings, to_samples
from grmpipe.types import Failed, JudgedGroup, Verdict

Advantages = Mapping[tuple[str, int], float]  # (group_id, sibling) -> mean over the trained tokens


def read_compared(stored: StoredGroups, again: RecordedGroups, config: RunConfig) -> Iterator[ComparedGroup]:
    """The groups that were judged again, step by step: a batch is in memory at a time."""
    judged = [group_id for group_id in stored.steps if group_id in again.verdict_places]
    for step, group_ids in itertools.groupby(judged, key=stored.steps.__getitem__):
        names = list(group_ids)
        if step is None:
            for name in names:
                yield compare_group(None, stored.run.group(name), again.group(name), {}, {}, rule_of(config.truth))
            continue
        old, new = [stored.run.group(name) for name in names], [again.group(name) for name in names]
        old_advantages, new_advantages = advantages_of(old, config), advantages_of(new, config)
        for one, other in zip(old, new, strict=True):
            yield compare_group(step, one, other, old_advantages, new_advantages, rule_of(config.truth))


def compare_group(
    step: int | None, old: JudgedGroup, new: JudgedGroup, old_advantages: Advantages, new_advantages: Advantages,
    is_right: Rule,
) -> ComparedGroup:  # fmt: skip
    right: Sequence[float | None] = ruled(old, is_right) or [None] * len(old.rollouts)
    return ComparedGroup(
        group_id=old.group_id,
        step=step,
        rollouts=tuple(
            ComparedRollout(
                old=reward_of(old_verdict),
                new=reward_of(new_verdict),
                right=how_right,
                old_advantage=old_advantages.get((old.group_id, rollout.sibling)),
                new_advantage=new_advantages.get((old.group_id, rollout.sibling)),
            )
            for rollout, old_verdict, new_verdict, how_right in zip(
                old.rollouts, old.verdicts, new.verdicts, right, strict=True
            )
        ),
    )


def reward_of(verdict: Verdict | Failed) -> float | None:
    return verdict.outcome if isinstance(verdict, Verdict) else None


def advantages_of(groups: Sequence[JudgedGroup], config: RunConfig) -> Advantages:
    """The advantages of a batch, without a KL in the reward, which needs the learner. None with too few verdicts, and
    with an estimator that needs a critic.
    """
    kind, least = config.algorithm.estimator_kind, max(2, config.train.min_valid_siblings)
    whole = [group for group in groups if len(judged_siblings(group)) >= least]
    if kind.needs_critic or not whole:
        return {}
    found: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for together in [whole] if kind.need == "batch" else [[group] for group in whole]:
        for sample in to_samples(together, config.algorithm, config.rollout.max_new_tokens):
            values = [value for value, trained in zip(sample.advantages, sample.loss_mask, strict=True) if trained]
            found[sample.group_id, sample.sibling] += values
    return {key: mean(values) for key, values in found.items() if values}
