"""The metrics of a step, from its counts, its batch, its ledger and the learner's own; and what is known of a rollout
once it is trained. Pure.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from grmpipe.algorithm.parts import all_advantages_zero
from grmpipe.algorithm.rewards import place_rewards
from grmpipe.config.train import AlgorithmConfig
from grmpipe.judge.composition.cascade_counts import CascadeCounts
from grmpipe.judge.kinds.rule import Rule
from grmpipe.judge.monitor.position_bias import correlation
from grmpipe.judge.verdict import get_reward
from grmpipe.pipeline.counters import Counters
from grmpipe.pipeline.interfaces import RolloutKey, RolloutTimes, StepReport
from grmpipe.scheduler.admission import Ledger
from grmpipe.types import Failed, JudgedGroup, Metrics, TrainedRollout, Verdict


def step_metrics(
    report: StepReport,
    counts: Counters,
    ledger: Ledger,
    right: Mapping[RolloutKey, float],
    algorithm: AlgorithmConfig,
    *,
    mask_truncated: bool,
) -> Metrics:
    """All metrics of one step. right: how right its rollouts are by the rule."""
    return {
        **flow_metrics(counts, report.stalls.steps_s),
        **batch_metrics(report.groups, report.step - 1, algorithm, mask_truncated=mask_truncated),
        **truth_metrics(right),
        **with_pace(report.learner, report.learner_busy_s),
        "time/step_s": report.stalls.steps_s,
        "time/train_s": report.learner_busy_s,
        **{f"stall/{name}": seconds for name, seconds in asdict(report.stalls).items() if name != "steps_s"},
        "stall/envs_s": counts.envs.stall_s(report.stalls.rollouts_s),
        "stall/groups_s": report.stalls.for_groups_s,
        "stall/engines_idle_s": report.policy_idle_s,
        "sync/push_s": report.sync.seconds,
        "sync/pause_s": report.sync.pause_seconds,
        "sync/bytes": float(report.sync.num_bytes),
        "sync/weight_bytes": float(report.sync.weight_bytes),
        "sync/probe_error_nats": report.sync.probe_error,
        "groups/in_flight": float(ledger.in_flight),
        **{f"groups/dropped_{cause}": float(count) for cause, count in ledger.dropped.items()},
    }


def truth_metrics(right: Mapping[RolloutKey, float]) -> Metrics:
    """How right a batch is by the rule, on average. Empty if there are no references."""
    return {"train/true_accuracy": statistics.fmean(right.values())} if right else {}


def flow_metrics(counts: Counters, seconds: float) -> Metrics:
    """Metrics of the rollouts and judgements that ended in a step of `seconds`."""
    judging = counts.judging.metrics(seconds) | counts.judging.early_stop_metrics()
    metrics = {
        "rollout/finished": float(counts.rollouts),
        "rollout/truncated_share": counts.truncated / counts.rollouts if counts.rollouts else 0.0,
        "rollout/tokens": float(counts.policy_tokens),
        "rollout/tokens_per_s": (counts.policy_tokens - counts.kept_policy_tokens) / seconds,
        **{f"judge/{key}": value for key, value in judging.items()},
        "judge/aborted_tasks": float(counts.aborted),
        "judge/voided_verdicts": float(counts.voided),
        **counts.envs.metrics(),
    }
    if counts.forced:
        metrics["rollout/forced_share"] = counts.forced / counts.rollouts
    for name, judge in counts.by_judge.items():
        own = judge.metrics(seconds) | judge.mean_scores()
        metrics |= {f"judge/{name}/{key}": value for key, value in own.items()}
    if counts.teaching.scored or counts.teaching.failed:
        metrics |= {"teacher/scored": float(counts.teaching.scored), "teacher/tokens": float(counts.teaching.tokens)}
        metrics |= {f"teacher/failed_{cause}": float(n) for cause, n in sorted(counts.teaching.failed.items())}
    for name, cascade in counts.cascades.items():
        metrics |= {f"cascade/{name}/{key}": value for key, value in cascade_metrics(cascade).items()}
    return metrics


def cascade_metrics(counts: CascadeCounts) -> Metrics:
    """Metrics of a cascade: what it escalated, and the error of its sure verdicts as far as the audit knows it."""
    known = {
        "audit_error": counts.mean_error,
        "audit_error_se": counts.standard_error,
        "flipped_share": counts.flipped_share,
    }
    return {
        "rollouts": float(counts.rollouts),
        "unsure_share": counts.unsure_share,
        "escalated_share": counts.escalated_share,
        "audited": float(counts.audited),
        **{name: value for name, value in known.items() if value is not None},
    }


def batch_metrics(
    groups: Sequence[JudgedGroup], version: int, algorithm: AlgorithmConfig, *, mask_truncated: bool = False
) -> Metrics:
    """Metrics of the batch that version `version` was trained on: scores, rewards, lengths, staleness. Judging tasks
    among the prompts have their own, and enter only the staleness.
    """
    ages = [version - group.version for group in groups]
    metrics = {"staleness/mean": statistics.fmean(ages), "staleness/max": float(max(ages))}
    answered = [group for group in groups if not group.prompt.self_judging]
    if answered:
        metrics |= group_metrics(answered, algorithm, mask_truncated=mask_truncated)
    if len(answered) < len(groups):
        judged = [group for group in groups if group.prompt.self_judging]
        found = group_metrics(judged, algorithm, mask_truncated=mask_truncated)
        metrics |= {f"self_judging/{new}": found[name] for name, new in SELF_JUDGING.items() if name in found}
        metrics["self_judging/share"] = len(judged) / len(groups)
    return metrics


# Metric of a batch -> its name under self_judging/, for judging tasks among the prompts.
SELF_JUDGING = {
    "train/reward": "reward",
    "train/zero_advantage_share": "zero_advantage_share",
    "response_length/mean": "response_length_mean",
}


def group_metrics(groups: Sequence[JudgedGroup], algorithm: AlgorithmConfig, *, mask_truncated: bool) -> Metrics:
    """Metrics of groups of one kind: scores, rewards, lengths."""
    pairs = [pair for group in groups for pair in zip(group.rollouts, group.verdicts, strict=True)]
    lengths = [rollout.num_sampled_tokens for rollout, _ in pairs]
    metrics = {
        **spread("response_length/", lengths),
        **spread("prompt_length/", [len(rollout.turns[0].new_ids) for rollout, _ in pairs if rollout.turns]),
        "train/siblings_without_verdict": float(sum(isinstance(verdict, Failed) for _, verdict in pairs)),
    }
    valid = [
        (length, verdict)
        for length, (_, verdict) in zip(lengths, pairs, strict=True)
        if isinstance(verdict, Verdict) and verdict.rewards
    ]
    if not valid:
        return metrics
    zero = [has_zero_advantages(group, algorithm, mask_truncated=mask_truncated) for group in groups]
    return metrics | reward_metrics(valid) | {"train/zero_advantage_share": statistics.fmean(zero)}


def reward_metrics(valid: Sequence[tuple[int, Verdict]]) -> Metrics:
    """Metrics of the rewards and scores of a batch. valid: the length of each rollout with a reward, and its
    verdict.
    """
    verdicts = [verdict for _, verdict in valid]
    metrics = {
        "train/grm_score": statistics.fmean(v.score for v in verdicts),
        "train/reward": statistics.fmean(v.outcome for v in verdicts),
        "train/reward_std": statistics.pstdev(v.outcome for v in verdicts),
        "judge/score_std": statistics.fmean(v.score_std for v in verdicts),
    }
    correlated = correlation([float(length) for length, _ in valid], [verdict.score for verdict in verdicts])
    if correlated is not None:
        metrics["judge/score_length_correlation"] = correlated
    for name in sorted({name for verdict in verdicts for name in verdict.breakdown}):
        parts = [verdict.breakdown[name] for verdict in verdicts if name in verdict.breakdown]
        metrics |= {**spread(f"reward/{name}_", parts), f"reward/{name}_std": statistics.pstdev(parts)}
    return metrics


def spread(name: str, values: Sequence[float]) -> Metrics:
    """Mean and bounds of values, as metrics whose names begin with `name`."""
    if not values:
        return {}
    return {
        f"{name}mean": statistics.fmean(values),
        f"{name}min": float(min(values)),
        f"{name}max": float(max(values)),
    }


def has_zero_advantages(group: JudgedGroup, algorithm: AlgorithmConfig, *, mask_truncated: bool = False) -> bool:
    """Whether the estimator gives all trained siblings an advantage of zero, before any penalty: nothing to learn
    from.
    """
    placed = [
        place_rewards(rollout, verdict, mask_truncated=mask_truncated)
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True)
        if isinstance(verdict, Verdict)
    ]
    return all_advantages_zero(placed, algorithm)


def with_pace(learnt: Metrics, seconds: float) -> Metrics:
    """The metrics of a learner's step, with its speed in the `seconds` in which it worked.

    MFU is that of PaLM (arXiv 2204.02311, appendix B): operations that the model needs over the peak of all ranks. What
    activation checkpointing computes again doesn't count; that would be hardware FLOPs utilization (HFU). Devices whose
    peak is unknown, such as cores, have none.
    """
    metrics, flops, peak = dict(learnt), learnt.get("perf/model_flops"), learnt.get("perf/peak_flops_per_s")
    if not seconds > 0:
        return metrics
    for name, tokens in (("tokens_per_s", "train/packed_tokens"), ("trained_tokens_per_s", "train/loss_tokens")):
        if tokens in learnt:
            metrics[f"learner/{name}"] = learnt[tokens] / seconds
    if flops is not None:
        metrics["perf/model_flops_per_s"] = flops / seconds
        if peak is not None:
            metrics["perf/mfu"] = flops / (peak * seconds)
    return metrics


DECIMALS_S = 3


def check_truth(groups: Sequence[JudgedGroup], is_right: Rule) -> dict[RolloutKey, float]:
    """How right each rollout is by the rule: reported, never trained on. Groups without a reference that the rule can
    read are left out.
    """
    return {
        (group.group_id, rollout.sibling): right
        for group in groups
        for rollout, right in zip(group.rollouts, _rule_on(group, is_right), strict=False)
    }


def _rule_on(group: JudgedGroup, is_right: Rule) -> list[float]:
    reference = group.prompt.reference
    if reference is None or group.prompt.self_judging:  # whose reference is a label, which the rule would misread
        return []
    try:
        return [is_right(rollout.answer, reference) for rollout in group.rollouts]
    except ValueError:
        return []


def describe_trained(
    step: int,
    groups: Sequence[JudgedGroup],
    advantages: Mapping[RolloutKey, float],
    right: Mapping[RolloutKey, float],
    times: Mapping[RolloutKey, RolloutTimes],
) -> list[TrainedRollout]:
    """The lines of trained.jsonl of a step."""
    return [
        _describe(step, (group.group_id, rollout.sibling), verdict, advantages, right, times)
        for group in groups
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True)
    ]


def _describe(
    step: int,
    key: RolloutKey,
    verdict: Verdict | Failed,
    advantages: Mapping[RolloutKey, float],
    right: Mapping[RolloutKey, float],
    times: Mapping[RolloutKey, RolloutTimes],
) -> TrainedRollout:
    group_id, sibling = key
    found = times.get(key)
    judged_s = found.judged_s if found is not None else None
    return TrainedRollout(
        group_id=group_id,
        sibling=sibling,
        step=step,
        reward=get_reward(verdict),
        advantage=advantages.get(key),
        right=right.get(key),
        rollout_s=None if found is None else round(found.ended_s - found.began_s, DECIMALS_S),
        judging_s=None if found is None or judged_s is None else round(judged_s - found.ended_s, DECIMALS_S),
    )
