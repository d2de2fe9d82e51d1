"""From a verdict to the rewards that advantages are estimated from: their positions and penalties. Pure."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from grmpipe.algorithm.settings import AlgorithmSettings
from grmpipe.models.types import Completion
from grmpipe.types import Rollout, Verdict

# (group_id, sibling) -> the critic's values, [C] float64, by token of its completions
Values = Mapping[tuple[str, int], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """The rewards of a rollout and their positions. N: the tokens that the policy sampled, turn by turn, without those
    that a thinking budget inserted; K: steps, each ending at a reward.

    Step k holds the tokens [ends_K[k - 1], ends_K[k]), the first step from 0; its reward is on its last token. Spans
    that end at the same token are one step. Tokens after the last reward belong to no step.

    shares_K: each step's share of an outcome that is a mean of steps; None if rewards simply add up.
    expected_N: the critic's value before each token; None without a critic.
    log_ratio: sum over the tokens of log(mu / reference), for an estimator that weighs by it.
    turn_ends_U: where each of U turns ends; empty: all tokens are one turn.
    state_keys_U: the state in which the policy acted in each turn; an empty key, or none at all, is an unknown state.
    is_trained:   False for a rollout that only counts in its group's baseline (`rollout.truncated=mask`). The trained
                  tokens of a batch are the sampled tokens of its trained rollouts, for every estimator and metric.
    """

    num_tokens: int
    ends_K: tuple[int, ...]
    values_K: tuple[float, ...]
    shares_K: tuple[float, ...] | None = None
    expected_N: np.ndarray | None = None
    log_ratio: float = 0.0
    turn_ends_U: tuple[int, ...] = ()
    state_keys_U: tuple[str, ...] = ()
    is_trained: bool = True

    @property
    def outcome(self) -> float:
        return math.fsum(self.values_K)

    @property
    def earned_K(self) -> np.ndarray:
        """[K] float64: each step's own reward, on the same scale for any number of steps."""
        return np.array(self.values_K) / (1.0 if self.shares_K is None else np.array(self.shares_K))

    def by_token(self) -> np.ndarray:
        """[N] float64: each reward on its token, 0 elsewhere."""
        return self._on_tokens(self.values_K)

    @property
    def turns(self) -> list[slice]:
        """The tokens of each turn."""
        ends_U = self.turn_ends_U or (self.num_tokens,)
        return [slice(start, end) for start, end in zip((0, *ends_U), ends_U, strict=False)]

    def by_turn(self) -> np.ndarray:
        """[U] float64: the sum of each turn's rewards."""
        return self._in_turns(self.values_K)

    def shares_by_turn(self) -> np.ndarray | None:
        """[U] float64: each turn's share of an outcome that is a mean of steps; None if rewards simply add up."""
        return None if self.shares_K is None else self._in_turns(self.shares_K)

    def sum_by_turn(self) -> np.ndarray:
        """[U] float64: each turn's own reward, on the same scale for any number of turns."""
        values_U, shares_U = self.by_turn(), self.shares_by_turn()
        return (
            values_U if shares_U is None else np.divide(values_U, shares_U, np.zeros_like(values_U), where=shares_U > 0)
        )

    def over_turns(self, of_turns_U: np.ndarray) -> np.ndarray:
        """[N] float64: each token gets the value of its turn."""
        return np.repeat(of_turns_U, [tokens.stop - tokens.start for tokens in self.turns])

    def _in_turns(self, of_steps_K: tuple[float, ...]) -> np.ndarray:
        on_tokens_N = self._on_tokens(of_steps_K)
        return np.array([math.fsum(on_tokens_N[tokens]) for tokens in self.turns])

    def _on_tokens(self, of_steps_K: tuple[float, ...]) -> np.ndarray:
        on_tokens_N = np.zeros(self.num_tokens)
        np.add.at(on_tokens_N, np.maximum(np.array(self.ends_K) - 1, 0), of_steps_K)
        return on_tokens_N

    def spread(self, of_steps_K: np.ndarray) -> np.ndarray:
        """[N] float64: each token gets the value of its step, 0 after the last step."""
        lengths_K = np.diff(self.ends_K, prepend=0)
        over_N = np.zeros(self.num_tokens)
        over_N[: lengths_K.sum()] = np.repeat(of_steps_K, lengths_K)
        return over_N


def count_sampled(completion: Completion, end: int) -> int:
    """The tokens before `end` that were sampled, and not inserted."""
    return end - sum(min(end, last) - min(end, first) for first, last in completion.unsampled)


def place_rewards(rollout: Rollout, verdict: Verdict, *, mask_truncated: bool = False) -> Rewards:
    """The rewards that a verdict gives to training, on the rollout's sampled tokens: a reward for inserted ones is on
    the sampled one before them. mask_truncated: a truncated rollout isn't trained.
    """
    lengths = [count_sampled(turn.completion, len(turn.completion.token_ids)) for turn in rollout.turns]
    values: dict[int, float] = {}
    shares: dict[int, float] = {}
    for span in verdict.normalised or verdict.rewards:
        end = sum(lengths[: span.turn]) + count_sampled(rollout.turns[span.turn].completion, span.end)
        values[end] = values.get(end, 0.0) + span.value
        if span.share is not None:
            shares[end] = shares.get(end, 0.0) + span.share
    values = values or {sum(lengths): 0.0}
    ends = sorted(values)
    return Rewards(
        num_tokens=sum(lengths),
        ends_K=tuple(ends),
        values_K=tuple(values[end] for end in ends),
        shares_K=tuple(shares[end] for end in ends) if shares else None,
        turn_ends_U=tuple(itertools.accumulate(lengths)),
        state_keys_U=tuple(turn.state_key for turn in rollout.turns),
        is_trained=not (mask_truncated and rollout.status == "truncated"),
    )


def shape_rewards(
    rewards: Rewards, rollout: Rollout, algorithm: AlgorithmSettings, max_new_tokens: int, kl_N: np.ndarray | None
) -> Rewards:
    """The rewards with the penalties of the algorithm. `kl_N`: nats per token; None if the KL isn't in the reward."""
    if algorithm.overlong_buffer.share > 0:
        longest = max(len(turn.completion.token_ids) for turn in rollout.turns)
        share = overlong(longest, max_new_tokens, algorithm.overlong_buffer.share * max_new_tokens)
        rewards = charge(rewards, (0.0,) * (len(rewards.values_K) - 1) + (algorithm.overlong_buffer.penalty * share,))
    if kl_N is not None:
        rewards = charge(rewards, tuple(algorithm.kl_coefficient * kl for kl in by_step(rewards, kl_N)))
    return rewards


def charge_by_token(rewards: Rewards, costs_N: np.ndarray) -> Rewards:
    """The rewards with a cost per token. Each token becomes a step, so that its cost doesn't fall on earlier ones."""
    values = tuple((rewards.by_token() - costs_N).tolist())
    return replace(rewards, ends_K=tuple(range(1, len(values) + 1)), values_K=values, shares_K=None)


def overlong(num_tokens: int, max_tokens: int, buffer_tokens: float) -> float:
    """The share of the last `buffer_tokens` before the limit that an answer fills, 0 to 1 (DAPO, arXiv 2503.14476)."""
    return min(max(num_tokens - (max_tokens - buffer_tokens), 0) / buffer_tokens, 1.0)


def by_step(rewards: Rewards, costs_N: np.ndarray) -> list[float]:
    """Sums of a cost over the tokens of each step; tokens after the last reward count in the last step."""
    ends = (*rewards.ends_K[:-1], len(costs_N))
    return [math.fsum(costs_N[start:end]) for start, end in zip((0, *ends), ends, strict=False)]


def charge(rewards: Rewards, costs_K: tuple[float, ...]) -> Rewards:
    return replace(rewards, values_K=tuple(v - cost for v, cost in zip(rewards.values_K, costs_K, strict=True)))
