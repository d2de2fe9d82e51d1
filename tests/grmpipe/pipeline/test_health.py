"""The breaker opens for a pause, is half-open after it, and then closes or stops the run."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmpipe.pipeline.health import ServiceHealth, Unfit
from grmpipe.types import Failed, Verdict

GOOD = Verdict(rewards=(), score=5, breakdown={}, score_std=0, num_judgements=1)
TIMEOUT = Failed(stage="judge", cause="timeout", attempts=1, detail="no answer within 120 s")
UNPARSEABLE = Failed(stage="judge", cause="unparseable", attempts=2, detail="it ends with 'hm'")


class Watched(ServiceHealth):
    """The health of a judge at moments that a test names."""

    def __init__(self, window: int = 16, max_failure_rate: float = 0.25) -> None:
        self.now_s = 0.0
        super().__init__(
            "judging",
            max_failure_rate=max_failure_rate,
            window=window,
            pause_s=30.0,
            counted="verdicts",
            key="judge.max_failure_rate",
            now=lambda: self.now_s,
        )

    def at(self, now_s: float) -> Watched:
        self.now_s = now_s
        return self


def feed(watched: Watched, now_s: float, *verdicts: Verdict | Failed) -> str:
    for verdict in verdicts:
        with contextlib.suppress(Unfit):
            watched.at(now_s).record(verdict)
    return watched.state


def test_the_gate_waits_for_a_quarter_of_its_window() -> None:
    watched = Watched()
    assert feed(watched, 0, TIMEOUT, TIMEOUT, TIMEOUT) == "closed"
    assert feed(watched, 0, TIMEOUT) == "open"


def test_a_rate_at_the_limit_is_fine_and_one_above_it_pauses() -> None:
    watched = Watched()
    assert feed(watched, 0, *[GOOD] * 12, *[TIMEOUT] * 4) == "closed"
    assert feed(watched, 0, TIMEOUT) == "open"


def test_breaker_pauses_then_is_half_open_with_an_empty_window_then_stops() -> None:
    watched = Watched()
    feed(watched, 100.0, *[TIMEOUT] * 4)
    assert (watched.at(129.9).state, watched.at(120.0).pause_left_s) == ("open", 10.0)
    assert (watched.at(130.0).state, watched.pause_left_s) == ("half-open", 0.0)
    assert feed(watched, 131.0, TIMEOUT, TIMEOUT, TIMEOUT) == "half-open"
    assert feed(watched, 131.0, UNPARSEABLE) == "stopped"
    assert (watched.at(1e9).state, watched.pause_left_s) == ("stopped", 0.0)
    assert feed(watched, 1e9, *[GOOD] * 100) == "stopped"


def test_verdicts_that_arrive_in_the_pause_do_not_count() -> None:
    watched = Watched()
    feed(watched, 0.0, *[TIMEOUT] * 4)
    feed(watched, 15.0, *[TIMEOUT] * 50)
    assert feed(watched, 31.0, *[GOOD] * 15) == "half-open"
    assert feed(watched, 31.0, GOOD) == "closed"


def test_a_whole_window_below_the_rate_earns_another_pause() -> None:
    watched = Watched()
    feed(watched, 0.0, *[TIMEOUT] * 4)
    assert feed(watched, 31.0, *[GOOD] * 15, *[TIMEOUT] * 5) == "open"
    assert feed(watched, 62.0, *[TIMEOUT] * 4) == "stopped"


def test_old_verdicts_leave_the_window() -> None:
    watched = Watched()
    feed(watched, 0, *[GOOD] * 1000)
    assert feed(watched, 0, *[TIMEOUT] * 5) == "open"


def test_cause_of_a_pause_names_failures_with_counts() -> None:
    watched = Watched()
    assert watched.cause == ""
    feed(watched, 0.0, GOOD, TIMEOUT, TIMEOUT, UNPARSEABLE)
    assert watched.cause == (
        "3 of the last 4 verdicts failed (75%; judge.max_failure_rate=0.25): 2 timeout, 1 unparseable; "
        "the last one: it ends with 'hm'"
    )
    feed(watched, 30.0, *[TIMEOUT] * 4)
    assert "again after a pause of 30 s: 4 timeout" in watched.cause


def test_at_the_end_all_results_count_however_few_and_whenever_they_came() -> None:
    watched = Watched()
    feed(watched, 0.0, GOOD, TIMEOUT)
    with pytest.raises(Unfit, match=r"^1 of 2 verdicts failed \(50%; judge.max_failure_rate=0.25\): 1 timeout; "):
        watched.check()
    feed(watched, 0.0, GOOD, GOOD)
    watched.check()
    feed(watched, 0.0, *[TIMEOUT] * 20)
    assert watched.state == "open"
    with pytest.raises(Unfit, match="21 of 24"):
        watched.check()
    all_may_fail = Watched(max_failure_rate=1.0)
    all_may_fail.check()
    feed(all_may_fail, 0.0, TIMEOUT)
    with pytest.raises(Unfit, match="1 of 1"):
        all_may_fail.check()


@given(failures=st.lists(st.booleans(), max_size=200), window=st.integers(1, 40))
def test_a_breaker_opens_exactly_when_the_window_exceeds_the_rate(failures: list[bool], window: int) -> None:
    watched = Watched(window)
    for count in range(1, len(failures) + 1):
        watched.record(TIMEOUT if failures[count - 1] else GOOD)
        recent = failures[:count][-window:]
        exceeded = len(recent) >= max(1, window // 4) and sum(recent) / len(recent) > 0.25
        assert watched.state == ("open" if exceeded else "closed")
        if exceeded:
            break


def test_the_cause_names_the_judges_whose_failures_they_are() -> None:
    watched = Watched()
    watched.record(UNPARSEABLE, ("second", "third"))
    for verdict in (TIMEOUT, UNPARSEABLE, UNPARSEABLE):
        watched.record(verdict, ("second",))
    cause = watched.cause
    assert "3 unparseable, 1 timeout; judges that failed: second in 4, third in 1; the last one: it ends" in cause


def test_another_reason_pauses_first_and_stops_the_second_time() -> None:
    watched = Watched()
    watched.trip("too long-winded")
    assert (watched.at(1.0).state, watched.pause_left_s) == ("open", 29.0)
    watched.at(2.0).trip("in the pause it is told nothing new")
    assert watched.at(31.0).state == "half-open"
    with pytest.raises(Unfit, match="too long-winded, again after a pause of 30 s"):
        watched.at(40.0).trip("too long-winded")
    assert watched.at(41.0).state == "stopped"
