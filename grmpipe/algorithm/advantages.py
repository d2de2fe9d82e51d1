"""From rewards to advantages. Pure. The table of estimators is in grmpipe/algorithm/parts.py.

Rollouts without a reward aren't here, so they can't enter a baseline.

G: siblings of a group with a verdict. N: sampled tokens of a rollout. K: its steps. All in float64: in float32 the
rounding of a mean of equal rewards is as large as the epsilon it is divided by.

A rollout that isn't trained (`Rewards.is_trained`) is one of its group's siblings wherever these are averaged. It is in
no choice among siblings and no mean over tokens, and what it gets itself is dropped.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from grmpipe.algorithm.rewards import Rewards
from grmpipe.algorithm.settings import MIN_GROUP_STD, AlgorithmSettings

Group = Sequence[Rewards]
OfGroup = list[np.ndarray]  # one [N] per sibling
Advantages = list[OfGroup]  # one per group
EstimateGroup = Callable[[Group, AlgorithmSettings], OfGroup]  # need=group
EstimateBatch = Callable[[Sequence[Group], AlgorithmSettings], Advantages]  # need=batch
Targets = Callable[[Rewards, AlgorithmSettings], tuple[np.ndarray, np.ndarray]]


# -- one reward for a rollout, compared within its group -------------------------------------------------------------


def center(rewards_G: np.ndarray) -> np.ndarray:
    """Group-relative advantage without std scaling (Dr.GRPO, arXiv 2503.20783)."""
    centered_G: np.ndarray = rewards_G - rewards_G.mean()
    return centered_G


def standardize(rewards_G: np.ndarray, std: str) -> np.ndarray:
    """Group-relative advantage in units of the group's standard deviation (GRPO, arXiv 2402.03300).

    MIN_GROUP_STD is added to the deviation: rewards that differ by much less give advantages near 0, and no advantage
    exceeds sqrt(G - 1) in size. `std` none: only centered.
    """
    if std == "none":
        return center(rewards_G)
    spread = rewards_G.std(ddof=1 if std == "sample" else 0)
    scaled_G: np.ndarray = center(rewards_G) / (spread + MIN_GROUP_STD)
    return scaled_G


def compare_at(
    places: Sequence[tuple[int, int]], values: Sequence[np.ndarray], algorithm: AlgorithmSettings
) -> list[tuple[int, int, float]]:
    """(sibling, step, advantage) for some steps of siblings, whose values are compared as GRPO compares outcomes. None
    for a single one.
    """
    if len(places) < 2:
        return []
    there_G = np.array([values[sibling][step] for sibling, step in places])
    compared_G = standardize(there_G, algorithm.std)
    return [(*place, advantage) for place, advantage in zip(places, compared_G, strict=True)]


def leave_one_out(rewards_G: np.ndarray) -> np.ndarray:
    """Each reward minus the mean of the others, G / (G - 1) (r - mean) (RLOO, arXiv 2402.14740)."""
    return center(rewards_G) * len(rewards_G) / (len(rewards_G) - 1)


def best_of_k(rewards_G: np.ndarray, k: int) -> np.ndarray:
    """The contribution of a sibling to the best of k: the mean of max over the k-subsets that contain it, minus the
    mean over all k-subsets, in units of the deviation over all. With rewards of 0 and 1 that is pass@k training (arXiv
    2508.10751).

    Exact, by counting: with rewards in ascending order, the j-th is the max of C(j, k - 1) subsets (j from 0). A group
    of k siblings or fewer has one subset, and advantages of 0.
    """
    size, k = len(rewards_G), min(k, len(rewards_G))
    order = np.argsort(rewards_G, kind="stable")
    rising_G = rewards_G[order]
    as_max_G = np.array([math.comb(j, k - 1) / math.comb(size, k) for j in range(size)])
    mean = float(as_max_G @ rising_G)
    spread = math.sqrt(float(as_max_G @ (rising_G - mean) ** 2))
    # Sibling i is the max of C(i, k - 1) subsets that contain it, and a later j is the max of C(j - 1, k - 2) of them.
    holding = math.comb(size - 1, k - 1)
    own_G = np.array([math.comb(i, k - 1) / holding for i in range(size)]) * rising_G
    later_G = np.array([math.comb(j - 1, k - 2) / holding if j > 0 and k > 1 else 0.0 for j in range(size)]) * rising_G
    with_it_G = own_G + later_G[::-1].cumsum()[::-1] - later_G
    advantages_G = np.empty(size)
    advantages_G[order] = (with_it_G - mean) / (spread + MIN_GROUP_STD)
    return advantages_G


def outcomes(group: Group) -> np.ndarray:
    return np.array([rewards.outcome for rewards in group], dtype=np.float64)


def over_tokens(group: Group, advantages_G: np.ndarray) -> OfGroup:
    """Give every token of a rollout the rollout's advantage."""
    return [np.full(rewards.num_tokens, advantage) for rewards, advantage in zip(group, advantages_G, strict=True)]


def grpo(group: Group, algorithm: AlgorithmSettings) -> OfGroup:
    return over_tokens(group, standardize(outcomes(group), algorithm.std))


def dr_grpo(group: Group, algorithm: AlgorithmSettings) -> OfGroup:
    return over_tokens(group, center(outcomes(group)))


def rloo(group: Group, algorithm: AlgorithmSettings) -> OfGroup:
    return over_tokens(group, leave_one_out(outcomes(group)))


def pass_at_k(group: Group, algorithm: AlgorithmSettings) -> OfGroup:
    return over_tokens(group, best_of_k(outcomes(group), algorithm.pass_at_k.k))


def raft(group: Group, algorithm: AlgorithmSettings) -> OfGroup:
    """1 for the trained siblings with the highest reward among them, 0 for all others: with policy_gradient that is the
    likelihood of the best of n (RAFT, arXiv 2304.06767). Rewards that differ by MIN_GROUP_STD or less are equal; a
    group whose trained siblings all have equal rewards has no best one.
    """
    outcomes_G, trained_G = outcomes(group), np.array([rewards.is_trained for rewards in group])
    best_G = trained_G & (outcomes_G >= outcomes_G[trained_G].max(initial=-math.inf) - MIN_GROUP_STD)
    return over_tokens(group, np.where(best_G & (best_G != trained_G).any(), 1.0, 0.0))


def dpo(group: Group, algorithm: AlgorithmSettings) -> OfGroup:
    """Online DPO (arXiv 2402.04792): the best trained sibling is chosen, the worst rejected, and all others have no
    advantage.

    With h = log(pi / reference) of a rollout, the loss -log sigmoid(beta (h_chosen - h_rejected)) has the gradient of
    policy_gradient with the advantages +-beta sigmoid(-beta (h_chosen - h_rejected)). Of siblings with the same reward
    the first one counts; a group without two trained siblings whose rewards differ by more than MIN_GROUP_STD has no
    pair.
    """
    outcomes_G, advantages_G = outcomes(group), np.zeros(len(group))
    trained = [sibling for sibling, rewards in enumerate(group) if rewards.is_trained]
    if len(trained) < 2:
        return over_tokens(group, advantages_G)
    chosen, rejected = max(trained, key=outcomes_G.__getitem__), min(trained, key=outcomes_G.__getitem__)
    if outcomes_G[chosen] - outcomes_G[rejected] > MIN_GROUP_STD:
        beta, margin = algorithm.kl_coefficient, group[chosen].log_ratio - group[rejected].log_ratio
        advantages_G[chosen] = beta * sigmoid(-beta * margin)
        advantages_G[rejected] = -advantages_G[chosen]
    return over_tokens(group, advantages_G)


def sigmoid(logit: float) -> float:
    """The sigmoid, without overflow for large logits."""
    power = math.exp(-abs(logit))
    return (1 if logit >= 0 else power) / (1 + power)


# -- rewards within a rollout ----------------------------------------------------------------------------------------


def returns(values_K: Sequence[float], gamma: float) -> np.ndarray:
    """The sum of rewards from each step on: R_k = r_k + gamma R_{k+1}."""
    returns_K, to_come = np.empty(len(values_K)), 0.0
    for k in reversed(range(len(values_K))):
        returns_K[k] = to_come = values_K[k] + gamma * to_come
    return returns_K


def to_come(rewards: Rewards, earned_K: Sequence[float], gamma: float) -> np.ndarray:
    """The reward from each step on: the return if rewards add up; if the outcome is a mean of steps, their mean by
    share, so that a rollout of more steps gets no more.
    """
    if rewards.shares_K is None:
        return returns(earned_K, gamma)
    shared_K = [share * earned for share, earned in zip(rewards.shares_K, earned_K, strict=True)]
    means_K: np.ndarray = returns(shared_K, gamma) / returns(rewards.shares_K, gamma)
    return means_K


def process(group: Group, algorithm: AlgorithmSettings) -> OfGroup:
    """The reward from step k on, compared with that of all siblings that have a step k, as GRPO compares outcomes. A
    step that no other sibling has gets 0.
    """
    found = [to_come(rewards, rewards.earned_K.tolist(), algorithm.gamma) for rewards in group]
    advantages = [np.zeros(len(returns_K)) for returns_K in found]
    for k in range(max(map(len, found))):
        there = [(sibling, k) for sibling, returns_K in enumerate(found) if len(returns_K) > k]
        for sibling, step, advantage in compare_at(there, found, algorithm):
            advantages[sibling][step] = advantage
    return [rewards.spread(advantages_K) for rewards, advantages_K in zip(group, advantages, strict=True)]


def process_grpo(group: Group, algorithm: AlgorithmSettings) -> OfGroup:
    """GRPO's process supervision (arXiv 2402.03300, section 4.1.3): all step rewards of a group are normalised
    together; a token's advantage is their sum from its step on, or their mean if the outcome is a mean of steps.
    """
    everyone = np.concatenate([rewards.earned_K for rewards in group])
    normal = standardize(everyone, algorithm.std)
    by_sibling = np.split(normal, np.cumsum([len(rewards.values_K) for rewards in group])[:-1])
    return [
        rewards.spread(to_come(rewards, normal_K.tolist(), algorithm.gamma))
        for rewards, normal_K in zip(group, by_sibling, strict=True)
    ]


def gae(
    rewards_N: np.ndarray, values_N: np.ndarray, mask_N: np.ndarray, gamma: float = 1.0, lam: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns from a critic's values: delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam
    A_{t+1}; the return is A + V, before any whitening (GAE, arXiv 1506.02438).

    Tokens with `mask_N` 0 (from the environment) aren't sampled: V and A of the next sampled token pass through, and
    both results are 0. Put a reward for such a token on the sampled token before it.
    """
    # Indexing an array is 10 times slower.
    rewards, values, mask = rewards_N.tolist(), values_N.tolist(), mask_N.tolist()
    advantages, next_value, next_advantage = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            next_value, next_advantage = values[t], delta + gamma * lam * next_advantage
            advantages[t] = next_advantage
    advantages_N = np.array(advantages)
    return advantages_N, (advantages_N + values_N) * mask_N


def compute_gae(rewards: Rewards, algorithm: AlgorithmSettings) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns of a rollout. Without a critic's values they are taken as 0, as a new head predicts."""
    expected_N = np.zeros(rewards.num_tokens) if rewards.expected_N is None else rewards.expected_N
    sampled_N = np.ones(rewards.num_tokens)
    return gae(rewards.by_token(), expected_N, sampled_N, algorithm.gamma, algorithm.gae_lambda)


def gae_raw(group: Group, algorithm: AlgorithmSettings) -> OfGroup:
    """Advantages from a critic's values (GAE, arXiv 1506.02438); siblings don't matter."""
    return [compute_gae(rewards, algorithm)[0] for rewards in group]


# -- over the whole batch --------------------------------------------------------------------------------------------


def whiten(groups: Sequence[Group], advantages: Advantages, std: str) -> Advantages:
    """Scale to zero mean and unit deviation over all trained tokens of the batch: long rollouts weigh more. `std` none:
    only to zero mean.
    """
    trained = [
        advantages_N
        for group, by_sibling in zip(groups, advantages, strict=True)
        for rewards, advantages_N in zip(group, by_sibling, strict=True)
        if rewards.is_trained
    ]
    everything = np.concatenate(trained) if trained else np.empty(0)
    if len(everything) < 2:
        return advantages
    spread = 1.0 if std == "none" else everything.std(ddof=1 if std == "sample" else 0) + MIN_GROUP_STD
    return [[(advantages_N - everything.mean()) / spread for advantages_N in group] for group in advantages]


def reinforce_pp(groups: Sequence[Group], algorithm: AlgorithmSettings) -> Advantages:
    """Returns, whitened over the batch (REINFORCE++, arXiv 2501.03262). With a KL in the reward, a token's return is
    the outcome minus the KL from there on.
    """
    raw = [[rewards.spread(returns(rewards.values_K, algorithm.gamma)) for rewards in group] for group in groups]
    return whiten(groups, raw, algorithm.std)


def reinforce_pp_baseline(groups: Sequence[Group], algorithm: AlgorithmSettings) -> Advantages:
    """Outcomes minus their group's mean, whitened over the batch (REINFORCE++-baseline, arXiv 2501.03262)."""
    raw = [over_tokens(group, center(outcomes(group))) for group in groups]
    return whiten(groups, raw, algorithm.std)


def gae_whitened(groups: Sequence[Group], algorithm: AlgorithmSettings) -> Advantages:
    """Advantages from a critic's values, whitened over the batch, as in PPO."""
    return whiten(groups, [gae_raw(group, algorithm) for group in groups], algorithm.std)


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
