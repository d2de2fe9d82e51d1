"""Estimators that give each turn of an episode its own advantage. Pure.

G: siblings of a group, N: sampled tokens of a rollout, U: its turns. All in float64.
"""

from collections.abc import Sequence

import numpy as np

from grmpipe.algorithm.advantages import (
    Advantages,
    Group,
    OfGroup,
    compare_at,
    gae,
    outcomes,
    over_tokens,
    returns,
    standardize,
    whiten,
)
from grmpipe.algorithm.rewards import Rewards
from grmpipe.algorithm.settings import AlgorithmSettings

# -- compared within the group ---------------------------------------------------------------------------------------


def to_come_by_turn(rewards: Rewards, gamma: float) -> np.ndarray:
    """[U]: the discounted return from each turn on; if the outcome is a mean of steps, their mean by share."""
    values_U, shares_U = rewards.by_turn(), rewards.shares_by_turn()
    returns_U = returns(values_U.tolist(), gamma)
    if shares_U is None:
        return returns_U
    still_U = returns(shares_U.tolist(), gamma)
    means_U: np.ndarray = np.divide(returns_U, still_U, np.zeros_like(returns_U), where=still_U > 0)
    return means_U


def among_equal_states(group: Group, values: Sequence[np.ndarray], algorithm: AlgorithmSettings) -> list[np.ndarray]:
    """[U] for each sibling: the value of each turn, compared as in GRPO with those of all turns of the group in the
    same state. 0 for a state that no other turn meets, and for an unknown one.
    """
    met: dict[str, list[tuple[int, int]]] = {}
    for sibling, rewards in enumerate(group):
        for turn, key in enumerate(rewards.state_keys_U):
            if key:
                met.setdefault(key, []).append((sibling, turn))
    advantages = [np.zeros(len(values_U)) for values_U in values]
    for places in met.values():
        for sibling, turn, advantage in compare_at(places, values, algorithm):
            advantages[sibling][turn] = advantage
    return advantages


def gigpo(group: Group, algorithm: AlgorithmSettings) -> OfGroup:
    """GRPO's advantage of the episode, plus `gigpo.step_advantage_w` times that of each turn's return from there on
    among all turns in the same state (GiGPO, arXiv 2505.10978, eq. 3 to 9).
    """
    episodes = over_tokens(group, standardize(outcomes(group), algorithm.std))
    found = [to_come_by_turn(rewards, algorithm.gamma) for rewards in group]
    steps = among_equal_states(group, found, algorithm)
    return [
        episode_N + algorithm.gigpo.step_advantage_w * rewards.over_turns(step_U)
        for rewards, episode_N, step_U in zip(group, episodes, steps, strict=True)
    ]


def mt_grpo(group: Group, algorithm: AlgorithmSettings) -> OfGroup:
    """GRPO's advantage of the outcome, plus in each turn before the last `mt_grpo.turn_advantage_coef` times that of
    the turn's own reward among the siblings that have it before their last (MT-GRPO, arXiv 2505.11821).

    The outcome is the reward of the last turn, of which those of the turns before aren't part, or that of the episode.
    """
    earned = [rewards.sum_by_turn() for rewards in group]
    whole = algorithm.mt_grpo.outcome == "episode"
    outcome_G = standardize(outcomes(group) if whole else np.array([one[-1] for one in earned]), algorithm.std)
    advantages = [np.full(len(earned_U), outcome) for earned_U, outcome in zip(earned, outcome_G, strict=True)]
    for turn in range(max(map(len, earned)) - 1):
        there = [(sibling, turn) for sibling, earned_U in enumerate(earned) if len(earned_U) > turn + 1]
        for sibling, _, advantage in compare_at(there, earned, algorithm):
            advantages[sibling][turn] += algorithm.mt_grpo.turn_advantage_coef * advantage
    return [rewards.over_turns(advantages_U) for rewards, advantages_U in zip(group, advantages, strict=True)]


# -- by a critic's values --------------------------------------------------------------------------------------------


def gae_of_turns(rewards: Rewards, algorithm: AlgorithmSettings) -> tuple[np.ndarray, np.ndarray]:
    """[N] advantages and returns: GAE over turns, then within each turn towards its return (VAGEN's bi-level GAE, arXiv
    2510.16907). Without a critic's values they are taken as 0.

    The value of a turn is that before its last token. So a reward before that token belongs to the step from the turn
    before: VAGEN has rewards at the ends of turns only.
    """
    expected_N = np.zeros(rewards.num_tokens) if rewards.expected_N is None else rewards.expected_N
    rewards_N, turns = rewards.by_token(), [tokens for tokens in rewards.turns if tokens.stop > tokens.start]
    last_U = np.array([tokens.stop - 1 for tokens in turns])
    inner_U = np.array([rewards_N[tokens.start : tokens.stop - 1].sum() for tokens in turns])
    steps_U = rewards_N[last_U] + np.append(inner_U[1:], 0.0)
    everyone_U = np.ones(len(turns))
    _, returns_U = gae(
        steps_U, expected_N[last_U], everyone_U, algorithm.gae_turns.high_level_gamma, algorithm.gae_lambda
    )
    rewards_N[last_U] = returns_U
    within = [
        gae(rewards_N[t], expected_N[t], np.ones(t.stop - t.start), algorithm.gamma, algorithm.gae_lambda)
        for t in turns
    ]
    advantages_N, returns_N = (np.concatenate(column) for column in zip(*within, strict=True))
    return advantages_N, returns_N


def gae_turns(groups: Sequence[Group], algorithm: AlgorithmSettings) -> Advantages:
    """Advantages over turns and within them from a critic's values, whitened over the batch."""
    raw = [[gae_of_turns(rewards, algorithm)[0] for rewards in group] for group in groups]
    return whiten(groups, raw, algorithm.std)
