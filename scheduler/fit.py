"""Speeds from what was measured: least squares without negative costs. Pure; reads no files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.types import EngineSpeed
from scheduler.cost import LearnerSpeed

MIN_REQUESTS = 20  # a fit of five costs on fewer says nothing
STEP_SPREAD = 0.25  # of a step: how far its fixed part may well be from half of it, before anything was seen
MIN_VARIATION = 0.1  # relative spread of tokens per step from which a step's fixed cost can be told apart

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What an engine did for somebody.

    shares: names its prompt; of the requests that share one, the first to come pays its prefill. Empty: it shares none.
    counts: whether it is to be fitted, or only was there beside the others.
    """

    start_s: float
    end_s: float
    prompt_tokens: int
    new_tokens: int
    shares: str = ""
    counts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFit:
    """error: mean of |predicted - measured| over the mean measured duration."""

    speed: EngineSpeed
    num_requests: int
    mean_rows: float
    error: float


def fit_engine(engines: Sequence[Sequence[Request]], max_rows: int, request_s: float = 0.0) -> EngineFit | None:
    """One speed for all engines of a role, from what each request took: by its tokens, its company, the newcomers.

    None where there are too few requests. Those that mostly waited for a row (more than `max_rows` in flight) don't
    count. Beliefs stand in for what the measurements can't tell apart: where batches were of one size, half of a step
    is taken to grow with them; where prompts were of one length, a request costs its engine's process `request_s`.
    """
    features, durations = [], []
    for requests in engines:
        rows, taken = describe_requests(requests, max_rows)
        features.append(rows)
        durations.append(taken)
    table_R5 = np.concatenate(features) if features else np.empty((0, 5))
    taken_R = np.concatenate(durations) if durations else np.empty(0)
    if len(taken_R) < MIN_REQUESTS:
        return None
    costs = with_beliefs(table_R5, taken_R, request_s)
    step_s, row_s, cached_token_s, prefill_token_s, request_s = costs.tolist()
    return EngineFit(
        speed=EngineSpeed(
            step_s=step_s,
            row_s=row_s,
            cached_token_s=cached_token_s,
            prefill_token_s=prefill_token_s,
            max_rows=max_rows,
            request_s=request_s,
        ),
        num_requests=len(taken_R),
        mean_rows=float((table_R5[:, 1].sum()) / table_R5[:, 0].sum()),
        error=float(np.abs(table_R5 @ costs - taken_R).mean() / taken_R.mean()),
    )


def with_beliefs(table_R5: Floats, taken_R: Floats, request_s: float) -> Floats:
    """Least squares, drawn to steps of which half is fixed and to requests that cost `request_s`; the less, the better
    the measurements agree by themselves.

    A belief is one more measurement, its weight that of a normal prior. Requests of one batch err together.
    """
    free = nonnegative_least_squares(table_R5, taken_R)
    tokens, rows, cached, *_ = table_R5.sum(axis=0)
    noise_s = (float(np.square(table_R5 @ free - taken_R).mean()) * max(1.0, rows / tokens)) ** 0.5
    half_fixed = np.array([tokens, -rows, -cached, 0.0, 0.0]) * noise_s / (2 * STEP_SPREAD * taken_R.sum())
    known = np.array([0.0, 0.0, 0.0, 0.0, noise_s / max(request_s, 1e-12)])
    beliefs = np.stack([half_fixed, known])
    return nonnegative_least_squares(
        np.concatenate([table_R5, beliefs]), np.concatenate([taken_R, beliefs @ [0.0, 0.0, 0.0, 0.0, request_s]])
    )


def describe_requests(requests: Sequence[Request], max_rows: int) -> tuple[Floats, Floats]:
    """For each request that counts: its steps; the rows of those steps; their cached tokens; the prompts that came in
    meanwhile and weren't there yet; the requests that came in, itself included. And what it took."""
    starts, ends = np.array([r.start_s for r in requests]), np.array([r.end_s for r in requests])
    prompts = np.array([r.prompt_tokens for r in requests], dtype=np.float64)
    tokens = np.array([r.new_tokens for r in requests], dtype=np.float64)
    taken = ends - starts
    rows = over_time(starts, ends, np.ones(len(requests))) / np.maximum(taken, 1e-9)
    cached = over_time(starts, ends, prompts + tokens / 2) / np.maximum(taken, 1e-9)
    order = np.argsort(starts, kind="stable")
    come = np.concatenate([[0.0], np.cumsum((prompts * new_prompts(requests, order))[order])])
    first, last = np.searchsorted(starts[order], starts), np.searchsorted(starts[order], ends)
    usable = np.array([r.counts for r in requests], dtype=bool) & (taken > 0) & (tokens > 0) & (rows <= max_rows)
    table = np.stack([tokens, tokens * rows, tokens * cached, come[last] - come[first], last - first], axis=1)
    return table[usable], taken[usable]


def new_prompts(requests: Sequence[Request], order: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which of the requests brought a prompt that none before it, in this order, had brought."""
    known: set[str] = set()
    new = np.ones(len(requests), dtype=bool)
    for index in order.tolist():
        if shares := requests[index].shares:
            new[index] = shares not in known
            known.add(shares)
    return new


def over_time(starts: Floats, ends: Floats, weights: Floats) -> Floats:
    """For each interval: the integral, over it, of the sum of the weights of all that are under way."""
    times = np.concatenate([starts, ends])
    changes = np.concatenate([weights, -weights])
    order = np.argsort(times, kind="stable")
    times, level = times[order], np.cumsum(changes[order])
    area = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(times))])
    return np.interp(ends, times, area) - np.interp(starts, times, area)


def fit_learner(tokens: Sequence[float], busy_s: Sequence[float]) -> tuple[LearnerSpeed, str] | None:
    """From the tokens of each step and what the learner took for them; with a word on what couldn't be told apart.

    None where there are fewer than two steps.
    """
    if len(tokens) < 2 or not min(tokens) > 0:
        return None
    tokens_S, busy_S = np.array(tokens, dtype=np.float64), np.array(busy_s, dtype=np.float64)
    if len(tokens) >= 4 and tokens_S.std() / tokens_S.mean() >= MIN_VARIATION:
        token_s, step_s = nonnegative_least_squares(np.stack([tokens_S, np.ones(len(tokens_S))], axis=1), busy_S)
        return LearnerSpeed(token_s=float(token_s), step_s=float(step_s)), ""
    # The median step: a first one that compiles or allocates must not slow down all the others.
    return (
        LearnerSpeed(token_s=float(np.median(busy_S / tokens_S)), step_s=0.0),
        "the optimizer step couldn't be told from its tokens (steps too much alike): it is counted per token",
    )


def nonnegative_least_squares(table_RC: Floats, target_R: Floats) -> Floats:
    """The exact solution for a handful of columns: the best of all subsets whose solution has no negative entry."""
    num_columns = table_RC.shape[1]
    scale = np.maximum(np.abs(table_RC).max(axis=0), 1e-300)
    best, least = np.zeros(num_columns), float(target_R @ target_R)
    for size in range(1, num_columns + 1):
        for columns in map(list, itertools.combinations(range(num_columns), size)):
            part = table_RC[:, columns] / scale[columns]
            found = np.linalg.lstsq(part, target_R, rcond=None)[0]
            rest = target_R - part @ found
            if found.min() >= 0 and (left := float(rest @ rest)) < least * (1 - 1e-12):
                best, least = np.zeros(num_columns), left
                best[columns] = found / scale[columns]
    return best
