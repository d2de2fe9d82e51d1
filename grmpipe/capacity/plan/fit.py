"""Speeds from what was measured: least squares without negative costs. Pure; reads no files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from grmpipe.capacity.cost import LearnerSpeed
from models.types import EngineSpeed

MIN_REQUESTS = 20  # fewer requests can't determine five costs
MIN_VARIATION = 0.1  # relative spread of tokens per step from which the fixed cost of a step can be separated
BELIEF_SPREAD = 0.5  # of a cost: its prior standard deviation, as a share of the believed value
TOGETHER_S = 5e-4  # first tokens of one step are reported one after another

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRequest:
    """The timing of one request on an engine.

    begun_s: time of its first token; None: not recorded.
    shares: id of its prompt; of the requests that share one, the first pays its prefill. Empty: not shared.
    counts: whether it is fitted, or only ran next to the others.
    """

    start_s: float
    end_s: float
    prompt_tokens: int
    new_tokens: int
    begun_s: float | None = None
    shares: str = ""
    counts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFit:
    """The fitted speed of an engine. error: mean of |predicted - measured| over the mean measured duration. work_s:
    time of all requests, without the cost per request.
    """

    speed: EngineSpeed
    num_requests: int
    mean_rows: float
    error: float
    work_s: float
    all_requests: int

    def held_to(self, cpu_s: float) -> EngineFit:
        """The fit corrected by the CPU time of the engine's processes: time beyond the steps is counted per request,
        because requests are received and answered outside of steps; steps can't cost more than the total.
        """
        rest_s = (cpu_s - self.work_s) / self.all_requests
        less = min(1.0, cpu_s / self.work_s) if self.work_s else 1.0
        speed = replace(
            self.speed,
            step_s=self.speed.step_s * less,
            row_s=self.speed.row_s * less,
            cached_token_s=self.speed.cached_token_s * less,
            prefill_token_s=self.speed.prefill_token_s * less,
            request_s=max(0.0, rest_s),
        )
        return replace(self, speed=speed, work_s=self.work_s * less)


def fit_engine(
    engines: Sequence[Sequence[MeasuredRequest]],
    max_rows: int,
    believed: EngineSpeed | None = None,
    request_s: float = 0.0,
) -> EngineFit | None:
    """Fit one speed for all engines of a role, from stretches of time with a known number of steps, rows and new
    requests. None if there are too few requests.

    Requests that waited for a row (more than `max_rows` in flight) are ignored if their first token wasn't recorded. A
    prior fills in what the measurements can't separate: costs have the proportions of `believed` (None: about half of a
    step is fixed, a prompt's token costs as much as a row), and a request costs its engine's process `request_s`.
    """
    seen = [found for requests in engines if (found := Seen.of(requests, max_rows)).num_counted]
    table_R5 = np.concatenate([each.table_R5 for each in seen]) if seen else np.empty((0, 5))
    taken_R = np.concatenate([each.taken_R for each in seen]) if seen else np.empty(0)
    num_requests = sum(each.num_counted for each in seen)
    if num_requests < MIN_REQUESTS or not len(taken_R):
        return None
    costs = with_beliefs(table_R5, taken_R, believed_costs(table_R5, believed), request_s)
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
        num_requests=num_requests,
        mean_rows=float((table_R5[:, 1].sum()) / table_R5[:, 0].sum()),
        error=float(np.abs(table_R5 @ costs - taken_R).mean() / taken_R.mean()),
        work_s=float(sum((each.whole_5 for each in seen), np.zeros(5))[:4] @ costs[:4]),
        all_requests=sum(map(len, engines)),
    )


def believed_costs(table_R5: Floats, believed: EngineSpeed | None) -> Floats:
    """Prior costs of a step, a row, a cached token and a prompt's token; only their proportions count."""
    if believed is None:
        steps, rows, *_ = table_R5.sum(axis=0)
        return np.array([rows / steps, 1.0, 0.0, 1.0])
    return np.array([believed.step_s, believed.row_s, believed.cached_token_s, believed.prefill_token_s])


def with_beliefs(table_R5: Floats, taken_R: Floats, believed_4: Floats, request_s: float) -> Floats:
    """Least squares with a prior: the believed proportions, and requests that cost `request_s`. The prior counts less,
    the better the measurements agree.

    Each prior is one more measurement with the weight of a normal prior. A cost believed to be 0 has no prior.
    """
    noise_s = float(np.square(table_R5 @ nonnegative_least_squares(table_R5, taken_R) - taken_R).mean()) ** 0.5
    level = taken_R.sum() / max(float((table_R5[:, :4] @ believed_4).sum()), 1e-300)
    expected_5 = np.append(level * believed_4, request_s)
    weights_5 = np.where(expected_5 > 0, noise_s / (BELIEF_SPREAD * np.maximum(expected_5, 1e-300)), 0.0)
    return nonnegative_least_squares(
        np.concatenate([table_R5, np.diag(weights_5)]), np.concatenate([taken_R, weights_5 * expected_5])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The data of one engine. Columns: steps; rows of these steps; their cached tokens; new prompt tokens; new
    requests.

    table_R5, taken_R: of each stretch, and its seconds. whole_5: sums over all requests.
    """

    table_R5: Floats
    taken_R: Floats
    whole_5: Floats
    num_counted: int

    @classmethod
    def of(cls, requests: Sequence[MeasuredRequest], max_rows: int) -> Seen:
        joined_N, waited_N = joined(requests, max_rows)
        ends_N = np.array([r.end_s for r in requests])
        prompts_N = np.array([r.prompt_tokens for r in requests], dtype=np.float64)
        tokens_N = np.array([r.new_tokens for r in requests], dtype=np.float64)
        taken_N = np.maximum(ends_N - joined_N, 1e-9)
        rows = Level.of(joined_N, ends_N, np.ones(len(requests)))
        cached = Level.of(joined_N, ends_N, prompts_N + tokens_N / 2)
        rows_N = rows.between(joined_N, ends_N) / taken_N
        counts_N = np.array([r.counts for r in requests], dtype=bool) & (tokens_N > 0) & (rows_N <= max_rows)
        begin_R, end_R, steps_R = stretches(requests, joined_N, waited_N, counts_N)
        taken_R = np.maximum(end_R - begin_R, 1e-9)
        order = np.argsort(joined_N, kind="stable")
        new_N = prompts_N * new_prompts(requests, order)
        come = np.concatenate([[0.0], np.cumsum(new_N[order])])
        first_R, last_R = (np.searchsorted(joined_N[order], times) for times in (begin_R, end_R))
        rows_R, cached_R = (level.between(begin_R, end_R) / taken_R for level in (rows, cached))
        return cls(
            table_R5=np.stack(
                [steps_R, steps_R * rows_R, steps_R * cached_R, come[last_R] - come[first_R], last_R - first_R], axis=1
            ),
            taken_R=taken_R,
            whole_5=np.array(
                [
                    (tokens_N / np.maximum(rows_N, 1.0)).sum(),
                    tokens_N.sum(),
                    (tokens_N * (prompts_N + tokens_N / 2)).sum(),
                    new_N.sum(),
                    len(requests),
                ]
            ),
            num_counted=int(counts_N.sum()),
        )


def stretches(
    requests: Sequence[MeasuredRequest], joined_N: Floats, waited_N: NDArray[np.bool_], counts_N: NDArray[np.bool_]
) -> tuple[Floats, Floats, Floats]:
    """Stretches as (begin, end, steps). Requests that began in the same step end as many steps apart as their tokens
    differ, so their common part cancels. A request without a recorded beginning is its own stretch.
    """
    counted = np.flatnonzero(counts_N).tolist()
    found = [(joined_N[n], requests[n].end_s, requests[n].new_tokens) for n in counted if requests[n].begun_s is None]
    for cohort in cohorts(requests, counted):
        ended_s: dict[int, float] = {}  # tokens -> time of the end
        for n in cohort:
            new_tokens = requests[n].new_tokens
            ended_s[new_tokens] = min(ended_s.get(new_tokens, np.inf), requests[n].end_s)
        begun_s = min(begun(requests[n]) for n in cohort)
        if came := [joined_N[n] for n in cohort if not waited_N[n]]:
            found.append((min(came), begun_s, 1))
        steps = [(1, begun_s), *sorted(item for item in ended_s.items() if item[0] > 1)]
        found += [(t, then_s, more - n) for (n, t), (more, then_s) in itertools.pairwise(steps)]
    begin_R, end_R, steps_R = np.array(found, dtype=np.float64).reshape(-1, 3).T
    lasts = end_R > begin_R
    return begin_R[lasts], end_R[lasts], steps_R[lasts]


def cohorts(requests: Sequence[MeasuredRequest], counted: Sequence[int]) -> Iterator[list[int]]:
    """Groups of requests whose first tokens came in the same step."""
    seen = sorted((n for n in counted if requests[n].begun_s is not None), key=lambda n: begun(requests[n]))
    cohort: list[int] = []
    for n in seen:
        if cohort and begun(requests[n]) - begun(requests[cohort[-1]]) > TOGETHER_S:
            yield cohort
            cohort = []
        cohort.append(n)
    if cohort:
        yield cohort


def begun(request: MeasuredRequest) -> float:
    assert request.begun_s is not None
    return request.begun_s


def joined(requests: Sequence[MeasuredRequest], max_rows: int) -> tuple[Floats, NDArray[np.bool_]]:
    """The time when each request took its row, as far as known; and which had waited for it, by their first token."""
    starts, ends = np.array([r.start_s for r in requests]), np.array([r.end_s for r in requests])
    begun_N = np.array([np.nan if r.begun_s is None else r.begun_s for r in requests], dtype=np.float64)
    in_flight = np.searchsorted(np.sort(starts), starts, "right") - np.searchsorted(np.sort(ends), starts, "right")
    waited = (in_flight > max_rows) & ~np.isnan(begun_N)
    return np.where(waited, begun_N, starts), waited


def new_prompts(requests: Sequence[MeasuredRequest], order: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which requests brought a new prompt, in this order."""
    known: set[str] = set()
    new = np.ones(len(requests), dtype=bool)
    for index in order.tolist():
        if shares := requests[index].shares:
            new[index] = shares not in known
            known.add(shares)
    return new


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A sum over time of intervals with weights."""

    times: Floats
    area: Floats  # its integral up to each of the times

    @classmethod
    def of(cls, starts: Floats, ends: Floats, weights: Floats) -> Level:
        times = np.concatenate([starts, ends])
        order = np.argsort(times, kind="stable")
        times, level = times[order], np.cumsum(np.concatenate([weights, -weights])[order])
        return cls(times=times, area=np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(times))]))

    def between(self, begins: Floats, ends: Floats) -> Floats:
        """Its integrals between times."""
        return np.interp(ends, self.times, self.area) - np.interp(begins, self.times, self.area)


def fit_learner(tokens: Sequence[float], busy_s: Sequence[float]) -> tuple[LearnerSpeed, str] | None:
    """Fit a learner's speed to the tokens and seconds of each step. Also returns a note on what couldn't be separated.

    None for fewer than two steps.
    """
    if len(tokens) < 2 or not min(tokens) > 0:
        return None
    tokens_S, busy_S = np.array(tokens, dtype=np.float64), np.array(busy_s, dtype=np.float64)
    if len(tokens) >= 4 and tokens_S.std() / tokens_S.mean() >= MIN_VARIATION:
        token_s, step_s = nonnegative_least_squares(np.stack([tokens_S, np.ones(len(tokens_S))], axis=1), busy_S)
        return LearnerSpeed(token_s=float(token_s), step_s=float(step_s)), ""
    # The median step: a first step that compiles or allocates must not slow down all others.
    return (
        LearnerSpeed(token_s=float(np.median(busy_S / tokens_S)), step_s=0.0),
        "the optimizer step couldn't be separated from its tokens (steps too similar): it is counted per token",
    )


def nonnegative_least_squares(table_RC: Floats, target_R: Floats) -> Floats:
    """The exact solution for a few columns: the best of all subsets of columns whose solution has no negative entry."""
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
