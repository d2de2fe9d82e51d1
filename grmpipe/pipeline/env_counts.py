"""Counts of episodes, their turns and what went wrong, per step and in total; their metrics."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from grmpipe.counts import Counts
from grmpipe.types import Failed, Metrics, Rollout


@dataclass(slots=True)
class EnvCounts(Counts):
    """Counts of episodes in an environment that takes time or may fail; all zero in a run of single turns.

    rewritten:     turns after a history that a workflow rewrote, or of a parallel one.
    faults:        of the environment, by cause: one for each episode that it failed.
    failed:        siblings whose episodes all failed.
    policy_faults: what the policy did wrong, by kind.
    truncated:     episodes by what truncated them; of single turns too.
    rewards:       sums of the rewards that environments gave, by name; rewarded: the episodes that have one.
    tokens:        prompts, completions and observations, each counted once.
    prefilled:     tokens of prompts that engines computed; more than `tokens` if they compute turns again.
    boot_s, step_s: times of this step and process only, to take quantiles of.
    """

    episodes: int = 0
    turns: int = 0
    rewritten: int = 0
    tokens: int = 0
    prefilled: int = 0
    failed: int = 0
    env_s: float = 0.0
    took_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    policy_faults: Counter[str] = field(default_factory=Counter)
    truncated: Counter[str] = field(default_factory=Counter)
    rewards: Counter[str] = field(default_factory=Counter)
    rewarded: Counter[str] = field(default_factory=Counter)
    boot_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def rollout(self, rollout: Rollout) -> None:
        if rollout.reason:
            self.truncated[rollout.reason] += 1
        if not rollout.took_s:
            return
        self.rewards.update(rewards := rollout.env_rewards)
        self.rewarded.update(rewards.keys())
        self.episodes += 1
        self.turns += len(rollout.turns)
        self.rewritten += sum(turn.rewritten for turn in rollout.turns)
        self.tokens += sum(len(turn.new_ids) for turn in rollout.turns) + rollout.num_sampled_tokens
        self.prefilled += sum(map(len, rollout.prompts()))
        self.prefilled -= sum(turn.completion.cached_tokens for turn in rollout.turns)
        self.env_s += rollout.env_s
        self.took_s += rollout.took_s
        self.boot_s.append(rollout.boot_s)
        self.step_s += [turn.env_s for turn in rollout.turns]
        self.faults.update(failure.cause for failure in rollout.env_failures)
        self.policy_faults.update(kind for turn in rollout.turns for kind in turn.faults)

    def episode_failed(self, failures: Sequence[Failed]) -> None:
        """Count a sibling whose episodes all failed."""
        self.failed += 1
        self.faults.update(failure.cause for failure in failures)

    @property
    def time_share(self) -> float:
        """The environments' share of the time of all episodes."""
        return self.env_s / self.took_s if self.took_s else 0.0

    def stall_s(self, rollouts_s: float) -> float:
        """The part of a wait for rollouts for which the environments are to blame: an estimate."""
        return rollouts_s * self.time_share

    def metrics(self) -> Metrics:
        """Metrics of a step; without an environment only what truncated the rollouts."""
        metrics = {f"rollout/truncated_{reason}": float(n) for reason, n in sorted(self.truncated.items())}
        if self.episodes + self.failed == 0:
            return metrics
        metrics |= {f"env/faults_{cause}": float(n) for cause, n in sorted(self.faults.items())}
        metrics |= {f"env/policy_faults_{kind}": float(n) for kind, n in sorted(self.policy_faults.items())}
        metrics |= {f"env/reward_{name}": total / self.rewarded[name] for name, total in sorted(self.rewards.items())}
        metrics["env/failed_episodes"] = float(self.failed)
        metrics["env/time_share"] = self.time_share
        if self.episodes:
            metrics["env/turns_mean"] = self.turns / self.episodes
            metrics["env/prefilled_share"] = self.prefilled / self.tokens
            if self.rewritten:
                metrics["env/rewritten_share"] = self.rewritten / self.turns
        if self.boot_s:
            metrics["env/boot_s_mean"] = statistics.fmean(self.boot_s)
            metrics["env/step_s_p50"], metrics["env/step_s_p95"] = np.quantile(self.step_s, [0.5, 0.95]).tolist()
        return metrics
