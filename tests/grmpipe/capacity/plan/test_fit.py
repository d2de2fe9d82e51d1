"""Speeds recovered from the timings of an engine of known speed, step by step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.capacity.plan.fit import Level, MeasuredRequest, Seen, fit_engine, fit_learner, nonnegative_least_squares
from models.types import EngineSpeed

SPEED = EngineSpeed(step_s=0.005, row_s=0.0002, cached_token_s=2e-6, prefill_token_s=1e-4, max_rows=64)


def decoded(
    speed: EngineSpeed, requests: list[tuple[float, int, int]], sees_first_tokens: bool = False
) -> list[MeasuredRequest]:
    """The timings of an engine with (arrival, prompt tokens, new tokens): all rows in step, new ones prefilled
    first.
    """
    waiting, running, done, now_s = sorted(requests), [], [], 0.0
    while waiting or running:
        if not running:
            now_s = max(now_s, waiting[0][0])
        while waiting and waiting[0][0] <= now_s and len(running) < speed.max_rows:
            start_s, prompt, new = waiting.pop(0)
            now_s += prompt * speed.prefill_token_s
            running.append([start_s, prompt, new, 0, 0.0])
        cached = sum(prompt + sampled for _, prompt, _, sampled, _ in running)
        now_s += speed.step_s + len(running) * speed.row_s + cached * speed.cached_token_s
        for row in running:
            row[3] += 1
            row[4] = row[4] or now_s
        done += [
            MeasuredRequest(
                start_s=start_s,
                begun_s=begun_s if sees_first_tokens else None,
                end_s=now_s,
                prompt_tokens=prompt,
                new_tokens=new,
            )
            for start_s, prompt, new, sampled, begun_s in running
            if sampled == new
        ]
        running = [row for row in running if row[3] < row[2]]
    return done


def load(seed: int, waves: int = 30) -> list[tuple[float, int, int]]:
    """Waves of different width, half a minute apart: single requests and full batches."""
    random = np.random.default_rng(seed)
    return [
        (30.0 * wave + float(random.uniform(0, 0.2)), int(random.integers(20, 400)), int(random.integers(20, 300)))
        for wave in range(waves)
        for _ in range(int(random.integers(1, 60)))
    ]


def test_an_engines_costs_are_found_again() -> None:
    requests = decoded(SPEED, load(1))
    fit = fit_engine([requests], max_rows=64)
    assert fit is not None
    assert fit.error < 0.06
    for name in ("step_s", "row_s", "cached_token_s", "prefill_token_s"):
        assert getattr(fit.speed, name) == pytest.approx(getattr(SPEED, name), rel=0.25), name


def test_a_fit_foretells_other_batches() -> None:
    fit = fit_engine([decoded(SPEED, load(1))], max_rows=64)
    assert fit is not None
    for width in (1, 8, 32, 60):
        wave = [(0.0, 100, 200)] * width
        real, foretold = (max(r.end_s for r in decoded(speed, wave)) for speed in (SPEED, fit.speed))
        assert foretold == pytest.approx(real, rel=0.12)


def test_engines_of_a_role_are_fitted_together_and_requests_apart() -> None:
    one, other = decoded(SPEED, load(1)), decoded(SPEED, load(2))
    both = fit_engine([one, other], max_rows=64)
    assert both is not None
    assert both.num_requests == len(one) + len(other)
    ignored = [dataclasses.replace(r, counts=i % 2 == 0) for i, r in enumerate(one)]
    half = fit_engine([ignored], max_rows=64)
    assert half is not None
    assert half.num_requests == -(-len(one) // 2)
    assert half.speed.row_s == pytest.approx(both.speed.row_s, rel=0.3)


def test_few_requests_are_no_fit() -> None:
    assert fit_engine([], max_rows=64) is None
    assert fit_engine([decoded(SPEED, [(0.0, 10, 10)] * 5)], max_rows=64) is None


def test_requests_that_waited_for_a_row_tell_nothing_of_a_rows_speed() -> None:
    crowd = decoded(dataclasses.replace(SPEED, max_rows=4), [(0.0, 20, 50)] * 200)
    assert fit_engine([crowd], max_rows=4) is None


def test_rows_over_time_are_those_under_way() -> None:
    starts, ends = np.array([0.0, 1.0, 4.0]), np.array([2.0, 3.0, 5.0])
    # The first is alone for a second and with others for another.
    assert Level.of(starts, ends, np.ones(3)).between(starts, ends).tolist() == [3.0, 3.0, 1.0]


def test_a_learners_tokens_and_step_are_distinct_overrides_where_steps_differ() -> None:
    tokens = [1000.0, 2000.0, 4000.0, 3000.0]
    fit = fit_learner(tokens, [0.5 + 0.001 * n for n in tokens])
    assert fit is not None
    assert fit[0].token_s == pytest.approx(0.001)
    assert fit[0].step_s == pytest.approx(0.5)
    assert fit[1] == ""


def test_steps_alike_are_counted_per_token_and_that_is_said() -> None:
    fit = fit_learner([1000.0] * 5, [2.0, 1.0, 1.0, 1.0, 1.1])
    assert fit is not None
    assert (fit[0].token_s, fit[0].step_s) == (0.001, 0.0)
    assert "couldn't be separated" in fit[1]
    assert fit_learner([1000.0], [1.0]) is None


@given(st.lists(st.floats(0, 10), min_size=3, max_size=3))
def test_costs_that_are_not_negative_are_found_exactly(costs: list[float]) -> None:
    table = np.random.default_rng(0).uniform(0, 1, (20, 3))
    assert nonnegative_least_squares(table, table @ np.array(costs)) == pytest.approx(costs, abs=1e-6)


def test_no_cost_is_negative_whatever_was_measured() -> None:
    table = np.random.default_rng(1).uniform(0, 1, (50, 4))
    assert (nonnegative_least_squares(table, table @ np.array([1.0, -1.0, 0.5, -0.2])) >= 0).all()


def alike(rows: int, prompt: int, noise: float) -> list[MeasuredRequest]:
    """Batches of one size, prompts of one length; about 10 ms per token and 64 ms for new requests."""
    random = np.random.default_rng(3)
    requests = []
    for wave in range(60):
        new = int(random.integers(20, 80))
        taken_s = (0.064 + 0.01 * new) * float(random.normal(1.0, noise))
        requests += [
            MeasuredRequest(start_s=10.0 * wave, end_s=10.0 * wave + taken_s, prompt_tokens=prompt, new_tokens=new)
            for _ in range(rows)
        ]
    return requests


def test_what_batches_of_one_size_cannot_tell_is_divided_about_evenly() -> None:
    fit = fit_engine([alike(rows=60, prompt=20, noise=0.1)], max_rows=64, request_s=1e-3)
    assert fit is not None
    growing_s = 60 * fit.speed.row_s + 60 * 45 * fit.speed.cached_token_s
    assert 0.4 < fit.speed.step_s / growing_s < 1.6
    assert fit.speed.step_s + growing_s == pytest.approx(0.01, rel=0.25)
    assert fit.speed.request_s == pytest.approx(1e-3, rel=0.3)


def test_of_siblings_the_first_pays_for_their_prompt() -> None:
    one, other = (MeasuredRequest(start_s=0.0, end_s=1.0, prompt_tokens=30, new_tokens=9, shares=name) for name in "ab")
    table = Seen.of([one, one, one, other], max_rows=64).table_R5
    assert table[:, 3].tolist() == [60.0] * 4
    assert table[:, 4].tolist() == [4.0] * 4


def test_requests_that_began_with_one_step_tell_the_steps_between_their_ends() -> None:
    ends = {5: 1.0, 9: 1.4, 20: 3.6}
    requests = [
        MeasuredRequest(start_s=0.0, begun_s=0.5, end_s=end_s, prompt_tokens=30, new_tokens=new)
        for new, end_s in ends.items()
    ]
    seen = Seen.of(requests, max_rows=64)
    assert seen.table_R5[:, 0].tolist() == [1, 4, 4, 11]
    assert seen.taken_R == pytest.approx([0.5, 0.5, 0.4, 2.2])
    assert (seen.table_R5[:, 1] / seen.table_R5[:, 0]).tolist() == pytest.approx([3, 3, 2, 1])


def test_an_engine_that_always_has_more_than_it_takes_is_fitted_by_first_tokens() -> None:
    full = dataclasses.replace(SPEED, max_rows=8)
    random = np.random.default_rng(5)
    load = [(0.0, int(random.integers(20, 400)), int(random.integers(20, 300))) for _ in range(300)]
    seen = decoded(full, load, sees_first_tokens=True)
    fit = fit_engine([seen], max_rows=8, believed=SPEED)
    assert fit is not None
    wave = [(0.0, 100, 200)] * 8
    real, foretold = (max(r.end_s for r in decoded(speed, wave)) for speed in (full, fit.speed))
    assert foretold == pytest.approx(real, rel=0.1)
    assert fit_engine([decoded(full, load)], max_rows=8) is None


def test_what_batches_of_one_size_cannot_tell_is_divided_as_it_is_believed() -> None:
    believed = EngineSpeed(step_s=1.0, row_s=0.15, cached_token_s=0.0, prefill_token_s=0.1, max_rows=64)
    fit = fit_engine([alike(rows=60, prompt=20, noise=0.1)], max_rows=64, believed=believed)
    assert fit is not None
    assert fit.speed.step_s < 0.3 * 60 * fit.speed.row_s


def test_what_a_process_took_beyond_its_steps_is_its_requests_and_steps_take_no_more_than_it() -> None:
    fit = fit_engine([alike(rows=60, prompt=20, noise=0.1)], max_rows=64)
    assert fit is not None
    more, less = fit.held_to(fit.work_s + 3600 * 2e-3), fit.held_to(fit.work_s / 2)
    assert more.speed.request_s == pytest.approx(2e-3)
    assert more.speed.row_s == fit.speed.row_s
    assert less.speed.row_s == pytest.approx(fit.speed.row_s / 2)
    assert less.speed.request_s == 0.0
