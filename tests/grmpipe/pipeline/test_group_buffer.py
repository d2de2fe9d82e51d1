"""A group has one state at a time and one owner, which can say why it does not train; nothing is lost in any order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grmpipe.models.types import Completion, VersionSpan
from grmpipe.pipeline.group import OPEN, Group, GroupState
from grmpipe.pipeline.group_buffer import GroupBuffer
from grmpipe.pipeline.interfaces import FlowConfig, PipelineState, RecoveredGroup
from grmpipe.pipeline.producer import list_being_judged
from grmpipe.pipeline.stall_times import GroupSupply
from grmpipe.pipeline.why_waiting import NUM_SHOWN, describe_pending, measure_batch, why_waiting
from grmpipe.types import Failed, GroupEnd, JudgeReport, Prompt, RewardSpan, Rollout, Turn, Verdict

LOST = Failed(stage="judge", cause="truncated", attempts=2)


@dataclass
class Journal:
    rollouts: list[tuple[str, int]] = field(default_factory=list)
    verdicts: list[tuple[str, int]] = field(default_factory=list)
    ends: list[GroupEnd] = field(default_factory=list)

    def rollout(self, prompt_index: int, prompt: Prompt, rollout: Rollout) -> None:
        self.rollouts.append((rollout.group_id, rollout.sibling))

    def record_verdict(self, rollout: Rollout, report: JudgeReport) -> None:
        assert rollout.group_id not in {end.group_id for end in self.ends}, "a line of a group that has ended"
        self.verdicts.append((rollout.group_id, rollout.sibling))

    def group_ended(self, end: GroupEnd) -> None:
        self.ends.append(end)


@dataclass
class Bench:
    """A buffer of groups of two siblings in batches of two, with a clock that a test sets."""

    max_staleness: int = 0
    groups_per_batch: int = 2
    group_size: int = 2
    max_zero_advantage_groups: int = 0
    deterministic: bool = False
    pipeline_state: PipelineState = field(default_factory=PipelineState)
    kept: dict[int, RecoveredGroup] = field(default_factory=dict)
    now_s: float = 100.0
    journal: Journal = field(default_factory=Journal)
    supplies: list[GroupSupply] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = FlowConfig(
            num_steps=12, groups_per_batch=self.groups_per_batch, group_size=self.group_size, min_valid_siblings=1,
            max_staleness=self.max_staleness, group_deadline_s=60.0, rollout_concurrency=1, judge_concurrency=1, seed=0,
            max_zero_advantage_groups=self.max_zero_advantage_groups, deterministic=self.deterministic,
        )  # fmt: skip
        self.buffer = GroupBuffer(
            config,
            self.journal,
            on_change=self.supplies.append,
            pipeline_state=self.pipeline_state,
            kept=self.kept,
        )

    def open(self) -> Group:
        prompt_index = self.buffer.ledger.next_prompt_index
        group, _ = self.buffer.open(prompt_index, Prompt(prompt_id=f"p{prompt_index}", messages=()))
        group.set_deadline(self.now_s)
        return group

    def roll_out(self, group: Group) -> None:
        for sibling in range(self.group_size):
            assert self.buffer.add_rollout(group, rollout(group.group_id, sibling, self.buffer.version))

    def judge(self, group: Group, *, alike: bool = False) -> None:
        for sibling in range(self.group_size):
            assert self.buffer.add_report(group, sibling, report(1.0 if alike else sibling))

    def make_ready(self) -> Group:
        group = self.open()
        self.roll_out(group)
        self.judge(group)
        return group

    def why(self, group: Group) -> str:
        return why_waiting(self.buffer, group.group_id, self.now_s)


def rollout(group_id: str, sibling: int, version: int = 0) -> Rollout:
    span = VersionSpan(model="policy", version=version, start=0, end=1)
    completion = Completion(token_ids=(1,), logprobs=(-1.0,), text="", finish_reason="stop", versions=(span,))
    turn = Turn(new_ids=(0,), completion=completion)
    return Rollout(group_id=group_id, sibling=sibling, turns=(turn,), status="finished")


def report(score: float) -> JudgeReport:
    span = RewardSpan(turn=0, start=0, end=1, value=score)
    return JudgeReport(verdict=Verdict(rewards=(span,), score=score, breakdown={}, score_std=0.0, num_judgements=1))


# -- states ------------------------------------------------------------------------------------------------------------


def test_a_group_goes_through_every_state_once_and_is_journalled_once() -> None:
    bench = Bench(groups_per_batch=1)
    group = bench.open()
    seen = [group.state]
    bench.roll_out(group)
    seen.append(group.state)
    bench.judge(group)
    seen.append(group.state)
    assert bench.buffer.take() == group.to_judged_group()
    seen.append(group.state)
    assert bench.buffer.end_step() == (group.to_judged_group(),)
    seen.append(group.state)
    assert [state.name for state in seen] == ["ROLLING_OUT", "JUDGING", "READY", "TAKEN", "TRAINED"]
    assert bench.journal.rollouts == bench.journal.verdicts == [("g000000", 0), ("g000000", 1)]
    assert bench.journal.ends == [
        GroupEnd(group_id="g000000", prompt_index=0, prompt_id="p0", outcome="trained", step=1, version=0)
    ]
    assert (bench.buffer.version, bench.buffer.groups) == (1, {})


@pytest.mark.parametrize("state", [GroupState.ROLLING_OUT, GroupState.JUDGING, GroupState.READY])
def test_dropped_group_frees_its_place_from_any_state(state: GroupState) -> None:
    bench = Bench()
    group, _ = bench.open(), bench.open()
    assert bench.buffer.capacity == 0
    if state is not GroupState.ROLLING_OUT:
        bench.roll_out(group)
    if state is GroupState.READY:
        bench.judge(group)
    assert group.state is state
    bench.buffer.drop(group, "some_cause")
    assert bench.buffer.capacity == 1
    assert bench.buffer.counts().dropped == {"some_cause": 1}
    assert bench.buffer.take() is None
    assert [(end.group_id, end.cause) for end in bench.journal.ends] == [("g000000", "some_cause")]


def test_no_group_skips_a_state_or_comes_back() -> None:
    group = Bench().open()
    with pytest.raises(AssertionError, match="from rolling out to taken"):
        group.take()
    group.drop("rollout_died")
    with pytest.raises(AssertionError, match="from dropped to dropped"):
        group.drop("stale")


def test_an_open_group_loses_its_judge_session_when_it_is_open_no_more() -> None:
    bench = Bench()
    group = bench.open()
    group.session = object()  # type: ignore[assignment]
    bench.roll_out(group)
    assert group.session is not None
    bench.judge(group)
    assert group.session is None


def test_void_verdicts_are_asked_for_again() -> None:
    bench = Bench()
    group = bench.open()
    bench.roll_out(group)
    group.judging_begun = True
    bench.buffer.add_report(group, 0, report(1))
    assert list_being_judged(bench.buffer.groups.values()) == [group]
    assert group.void_verdicts() == 1
    assert (group.state, list_being_judged(bench.buffer.groups.values())) == (GroupState.JUDGING, [])
    bench.judge(group)
    assert group.state is GroupState.READY


def test_at_its_deadline_a_group_is_ready_with_timeouts_or_dropped() -> None:
    bench = Bench()
    unjudged, unplayed = bench.open(), bench.open()
    bench.roll_out(unjudged)
    bench.buffer.add_report(unjudged, 0, report(1))
    (timeout,) = bench.buffer.expire(unjudged)
    assert (unjudged.state, timeout.cause) == (GroupState.READY, "timeout")
    assert bench.buffer.expire(unplayed) == []
    assert (unplayed.state, unplayed.cause) == (GroupState.DROPPED, "rollout_timeout")
    assert bench.buffer.counts().dropped == {"rollout_timeout": 1}


def test_a_group_whose_rewards_are_alike_is_dropped_while_the_step_has_a_share_left() -> None:
    bench = Bench(max_zero_advantage_groups=1)
    first, second = bench.open(), bench.open()
    for group in (first, second):
        bench.roll_out(group)
        for sibling in range(2):
            bench.buffer.add_report(group, sibling, report(3))
    assert (first.state, first.cause) == (GroupState.DROPPED, "zero_advantage")
    assert second.state is GroupState.READY
    assert len(bench.journal.verdicts) == 4, "also those of the dropped one"


def test_groups_are_rolled_out_from_their_last_rollout_until_a_batch_takes_them() -> None:
    bench = Bench()
    half, judged, ready = bench.open(), bench.open(), bench.open()
    bench.buffer.add_rollout(half, rollout(half.group_id, 0))
    for group in (judged, ready):
        bench.roll_out(group)
    bench.judge(ready)
    assert [[found.group_id for found in group.rollouts] for group in bench.buffer.untaken.list_rolled_out()] == [
        [ready.group_id] * 2,
        [judged.group_id] * 2,
    ]
    bench.buffer.take()
    bench.buffer.drop(judged, "judge_timeout")
    assert not [*bench.buffer.untaken.list_rolled_out()]


def test_a_deadline_moves_with_the_first_token_only() -> None:
    bench = Bench()
    group = bench.open()
    assert group.deadline_s == 160
    bench.now_s = 150
    group.first_token(bench.now_s)
    assert group.deadline_s == 210
    bench.now_s = 170
    group.first_token(bench.now_s)
    assert group.deadline_s == 210


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_stall_times_see_every_change_of_the_buffer(max_staleness: int) -> None:
    """A group that rolls out is due in the open batch if no later one may train it."""
    bench, is_due = Bench(max_staleness=max_staleness), max_staleness == 0
    group = bench.open()
    bench.open()
    bench.roll_out(group)
    bench.judge(group)
    bench.buffer.take()
    assert bench.supplies == [
        GroupSupply(lacks_due=is_due),
        GroupSupply(lacks_due=is_due),
        GroupSupply(lacks_due=is_due, num_judging=1),
        GroupSupply(lacks_due=is_due, num_ready=1),
        GroupSupply(lacks_due=is_due),
    ]


# -- why it does not train ---------------------------------------------------------------------------------------------


def test_why_a_group_rolls_out_names_what_is_missing_and_whether_it_has_begun() -> None:
    bench = Bench()
    group = bench.open()
    bench.now_s += 20
    assert bench.why(group) == (
        "rolling out: rollouts missing: 0, 1; verdicts missing: 0, 1; no token yet; 40 s to its deadline"
    )
    group.first_token(bench.now_s)
    bench.buffer.add_rollout(group, rollout(group.group_id, 1))
    assert bench.why(group) == (
        "rolling out: rollouts missing: 0; verdicts missing: 0, 1; the policy has begun; 60 s to its deadline"
    )


def test_why_a_group_is_judged_names_the_missing_verdicts_and_whether_the_judge_has_begun() -> None:
    bench = Bench()
    group = bench.open()
    bench.roll_out(group)
    assert "judging: rollouts missing: none; verdicts missing: 0, 1; the judge has not begun" in bench.why(group)
    group.judging_begun = True
    bench.buffer.add_report(group, 1, report(1))
    assert "verdicts missing: 0; the judge has begun" in bench.why(group)


def test_why_a_ready_group_waits_names_those_that_its_place_is_kept_for() -> None:
    bench = Bench(max_staleness=1)
    for _ in range(2):
        bench.make_ready()
    older = [bench.open(), bench.open()]
    for _ in range(2):
        bench.buffer.take()
    bench.buffer.end_step()
    young = bench.make_ready()
    assert bench.buffer.take() is None
    assert bench.why(young) == (
        "ready: the open batch's places are for groups that are due before it: g000002, g000003"
    )
    bench.buffer.drop(older[0], "rollout_died")
    assert bench.why(young) == "ready: it may be taken: the learner is busy"
    bench.roll_out(older[1])
    bench.judge(older[1])
    while bench.buffer.places_left:
        assert bench.buffer.take() is not None
    late = bench.make_ready()
    assert bench.why(late) == "ready: the open batch is full"


def test_why_a_taken_group_waits_says_how_full_the_batch_is() -> None:
    bench = Bench()
    group = bench.make_ready()
    bench.buffer.take()
    assert bench.why(group) == "taken: the open batch has 1 of 2 groups"
    bench.make_ready()
    bench.buffer.take()
    assert bench.why(group) == "taken: the open batch is full: its step ends it"


def test_why_a_group_is_gone_is_how_it_ended() -> None:
    bench = Bench(groups_per_batch=1)
    trained = bench.make_ready()
    bench.buffer.take()
    bench.buffer.end_step()
    dropped = bench.open()
    bench.buffer.drop(dropped, "rollout_refused")
    assert bench.why(trained) == "trained: in step 1"
    assert bench.why(dropped) == "dropped: rollout_refused"
    assert why_waiting(bench.buffer, "g000009", bench.now_s).startswith("not in flight")


def test_a_stale_group_says_so_until_the_next_take_drops_it() -> None:
    """Opened at version 0, ready when version 1 trains."""
    bench = Bench(groups_per_batch=1, max_staleness=0)
    stale = bench.open()
    bench.roll_out(stale)
    bench.buffer.ledger.version = 1
    bench.judge(stale)
    assert bench.why(stale) == "ready: too old for the open batch: version 0 of 1; it will be dropped"
    assert bench.buffer.take() is None
    assert bench.why(stale) == "dropped: stale"


def test_a_group_of_a_resume_waits_to_be_opened_again_and_comes_with_its_work() -> None:
    pipeline_state = PipelineState(version=1, next_prompt_index=3, in_flight={2: "g000002"}, dropped={"stale": 1})
    kept = RecoveredGroup(group_id="g000002~1", rollouts=(rollout("g000002~1", 0, version=1),))
    bench = Bench(pipeline_state=pipeline_state, kept={2: kept})
    assert bench.buffer.ledger.prompts_to_reopen == [2]
    assert why_waiting(bench.buffer, "g000002~1", bench.now_s) == "not opened again since the resume"
    assert bench.buffer.ledger.state(bench.buffer.groups.values(), 0).in_flight == {2: "g000002~1"}
    group, found = bench.buffer.open(2, Prompt(prompt_id="p2", messages=()))
    assert (group.group_id, found, group.opened_at) == ("g000002~1", kept, 1)
    assert (bench.buffer.ledger.next_prompt_index, bench.buffer.ledger.prompts_to_reopen) == (3, [])
    assert bench.buffer.ledger.state(bench.buffer.groups.values(), 7) == replace(
        pipeline_state, in_flight={2: "g000002~1"}, judge_version=7
    )
    assert (bench.buffer.counts().submitted, bench.buffer.counts().trained) == (4, 2)


@pytest.mark.parametrize(("begun_version", "opened_at"), [(0, 0), (2, 1), (None, 1)])
def test_a_group_of_a_resume_is_as_old_as_the_oldest_turn_that_goes_on(
    begun_version: int | None, opened_at: int
) -> None:
    pipeline_state = PipelineState(version=2, next_prompt_index=3, in_flight={2: "g000002"})
    rollouts = (rollout("g000002", 0, version=1),)
    kept = RecoveredGroup(group_id="g000002", rollouts=rollouts, begun_version=begun_version)
    bench = Bench(pipeline_state=pipeline_state, kept={2: kept})
    group, _ = bench.buffer.open(2, Prompt(prompt_id="p2", messages=()))
    assert group.opened_at == opened_at


def test_after_a_recovery_there_is_no_burst() -> None:
    bench = Bench(max_staleness=1, pipeline_state=PipelineState(version=10, next_prompt_index=24, dropped={"stale": 4}))
    assert (bench.buffer.counts().trained, bench.buffer.counts().submitted, bench.buffer.capacity) == (20, 24, 4)


def test_pending_groups_come_due_first_without_those_of_the_batch_and_not_all() -> None:
    bench = Bench(groups_per_batch=NUM_SHOWN + 2)
    for _ in range(NUM_SHOWN + 2):
        group = bench.open()
    bench.roll_out(group)
    bench.judge(group)
    bench.buffer.take()
    told = describe_pending(bench.buffer, bench.now_s)
    assert told.startswith("g000000 (rolling out: rollouts missing: 0, 1;")
    assert told.endswith("; 1 more")
    assert group.group_id not in told


# -- in any order ------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_any_order_of_ends_fills_every_batch_within_the_bound(batch: int, staleness: int, seed: int) -> None:
    """Groups end in any order, some are dropped; training takes the group that a search over all ready ones gives."""
    rng = random.Random(seed)
    bench = Bench(max_staleness=staleness, groups_per_batch=batch, group_size=1)
    buffer = bench.buffer
    ready: list[Group] = []
    taken: list[Group] = []
    while buffer.version < 12:
        while buffer.capacity > 0:
            bench.open()
        waiting = [group for group in buffer.groups.values() if group.is_open]
        if waiting and rng.random() < 0.7:
            group = rng.choice(waiting)
            if rng.random() < 0.1:
                buffer.drop(group, "failed")
            else:
                ready.append(group)
                bench.roll_out(group)
                bench.judge(group)
        if ready and rng.random() < 0.05:
            buffer.drop(gone := rng.choice(ready), "zero_advantage")
            ready.remove(gone)
        assert all(buffer.version - group.opened_at <= staleness for group in ready), "reserved: nothing grows stale"
        while len(taken) < batch:
            expected = most_urgent(bench, ready, taken)
            found = buffer.take()
            assert (found and found.group_id) == (expected and expected.group_id)
            if expected is None:
                break
            ready.remove(expected)
            taken.append(expected)
        for group in ready:
            assert len(taken) == batch or "places are for groups" in bench.why(group), "no place left idle"
        if len(taken) == batch:
            assert [group.group_id for group in buffer.end_step()] == [group.group_id for group in taken]
            taken = []
        buffer.counts()
    assert buffer.counts().trained == 12 * batch
    assert len({end.group_id for end in bench.journal.ends}) == len(bench.journal.ends)
    assert buffer.ledger.max_staleness_trained <= staleness


def most_urgent(bench: Bench, ready: Sequence[Group], taken: Sequence[Group]) -> Group | None:
    """The rule, evaluated group by group."""
    first = min(ready, key=lambda group: group.opened_at, default=None)
    if first is None:
        return None
    untaken = [group for group in bench.buffer.groups.values() if group not in taken and group is not first]
    waiting = Counter(group.opened_at + bench.max_staleness for group in untaken)
    for version in range(bench.buffer.version, first.opened_at + bench.max_staleness):
        places = (version - bench.buffer.version + 1) * bench.groups_per_batch - len(taken) - 1
        if sum(count for when, count in waiting.items() if when <= version) > places:
            return None
    return first


# -- a deterministic run ---------------------------------------------------------------------------------------------


def filled(bench: Bench, order: random.Random) -> list[str]:
    """Groups that a whole batch takes, while open groups become ready in a random order."""
    taken: list[str] = []
    ready: list[Group] = []
    while bench.buffer.places_left:
        while bench.buffer.capacity > 0:
            ready.append(bench.open())
        if (judged := bench.buffer.take()) is not None:
            taken.append(judged.group_id)
        else:
            group = ready.pop(order.randrange(len(ready)))
            bench.roll_out(group)
            alike = group.prompt_index % 3 == 0
            bench.judge(group, alike=alike)
    for group in ready:  # what is open at a push is finished before it
        assert not bench.buffer.is_done_with(*OPEN)
        bench.roll_out(group)
        bench.judge(group, alike=group.prompt_index % 3 == 0)
    assert bench.buffer.is_done_with(*OPEN)
    bench.buffer.end_step()
    return taken


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_batches_are_the_same_in_any_order_of_ends(max_staleness: int) -> None:
    """Zero-advantage groups too are dropped at their turn: at most two in a step, those of the first prompts."""
    runs = []
    for seed in range(20):
        bench = Bench(max_staleness=max_staleness, groups_per_batch=4, max_zero_advantage_groups=2, deterministic=True)
        order = random.Random(seed)
        runs.append([filled(bench, order) for _ in range(4)])
    assert all(run == runs[0] for run in runs)
    taken = [group_id for batch in runs[0] for group_id in batch]
    assert taken == sorted(taken)
    assert "g000000" not in taken
    assert "g000003" not in taken


def test_a_ready_group_waits_for_those_of_earlier_prompts() -> None:
    bench = Bench(deterministic=True)
    first, second = bench.open(), bench.open()
    bench.roll_out(second)
    bench.judge(second)
    assert bench.buffer.take() is None
    assert second.state is GroupState.READY
    bench.roll_out(first)
    bench.judge(first)
    assert [bench.buffer.take(), bench.buffer.take()] == [first.to_judged_group(), second.to_judged_group()]


def test_nothing_is_settled_while_a_group_may_still_be_opened() -> None:
    bench = Bench(deterministic=True)
    bench.make_ready()
    assert not bench.buffer.is_done_with(*OPEN)
    bench.buffer.no_more_prompts()
    assert bench.buffer.is_done_with(*OPEN)


def test_the_open_batch_is_measured_by_the_groups_that_are_nearest_to_fill_it() -> None:
    bench = Bench(max_staleness=1)
    first, second, third, _ = (bench.open() for _ in range(4))
    assert bench.buffer.add_rollout(first, rollout(first.group_id, 0))
    bench.roll_out(second)
    bench.roll_out(third)
    assert bench.buffer.add_report(third, 0, report(1.0))
    batch = measure_batch(bench.buffer, "policy")
    assert (batch.rollouts, batch.verdicts, batch.siblings, batch.learner) == (4, 1, 4, "policy")


def test_a_group_in_the_open_batch_counts_whole_and_the_next_batch_begins_with_nothing() -> None:
    bench = Bench(groups_per_batch=1)
    bench.make_ready()
    bench.buffer.take()
    done = measure_batch(bench.buffer, "work")
    assert (done.rollouts, done.verdicts, done.siblings) == (2, 2, 2)
    bench.buffer.end_step()
    assert measure_batch(bench.buffer, None).rollouts == 0
