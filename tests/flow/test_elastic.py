"""Whole runs on elastic slots: they move both ways, every sample is whole, the files tell of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from grmpipe.observe.recorder import load_rollouts

ELASTIC = ("placement=elastic", "train.num_steps=4", "balance.switch_s=0.05")


def check_moves(run: Any, steps: int) -> None:
    """Both ways, counted, drawn and logged; and the slots add up."""
    moves = run.summary["moves"]
    assert set(moves) == {"policy->grm", "grm->policy"}
    lines = run.steps()
    assert len(lines) == steps
    assert all(line["slots/policy"] + line["slots/grm"] == 2 for line in lines)
    assert 0 < lines[-1]["moves/total"] <= sum(moves.values())
    spans = [event for event in json.loads((run.run_dir / "timeline.json").read_text()) if event["ph"] == "X"]
    drawn = Counter(span["name"].removeprefix("switch ") for span in spans if span["name"].startswith("switch "))
    assert drawn == moves
    log = (run.run_dir / "run.log").read_text()
    assert "engines 0: policy -> grm" in log or "engines 1: policy -> grm" in log


def check_samples(run: Any, groups: int) -> None:
    """Every rollout once, judged once, its spans without gaps, its log-probs the model's."""
    assert run.summary["status"] == "completed"
    assert run.summary["groups"] == {"submitted": groups, "trained": groups, "dropped": {}, "in_flight": 0}
    assert run.summary["judging"]["failed"] == {}
    rollouts = [line.rollout for line in load_rollouts(run.run_dir / "rollouts.jsonl")]
    keys = Counter((rollout.group_id, rollout.sibling) for rollout in rollouts)
    assert set(keys.values()) == {1}
    assert Counter((line["group_id"], line["sibling"]) for line in run.lines("judgements")) == keys
    for rollout in rollouts:
        completion = rollout.turns[0].completion
        assert len(completion.token_ids) == len(completion.logprobs)
        ends = [0, *(span.end for span in completion.versions)]
        assert [span.start for span in completion.versions] == ends[:-1]
        assert ends[-1] == len(completion.token_ids)
    assert all(line["sync/probe_error_nats"] < 1e-3 for line in run.steps())


@pytest.mark.parametrize("staleness", [0, 1])
def test_slots_move_both_ways_and_every_sample_is_whole(small_run: Callable, staleness: int) -> None:
    run = small_run(*ELASTIC, f"train.max_staleness={staleness}")
    check_moves(run, 4)
    check_samples(run, 16)
    if staleness == 0:
        assert all(line["mismatch/max_nats"] < 1e-3 for line in run.steps()), "log-probs that are not the model's"


def test_the_same_rollouts_come_from_elastic_slots_and_from_fixed_ones(small_run: Callable) -> None:
    """The embedded engine draws by position: who samples, and how often a request moves, changes nothing."""
    same = ("train.max_staleness=0", "train.num_steps=2")
    runs = [small_run(*same, run_dir="fixed"), small_run(*ELASTIC, *same, run_dir="elastic")]
    first = [
        {
            (line.rollout.group_id, line.rollout.sibling): line.rollout.turns[0].completion.token_ids
            for line in load_rollouts(run.run_dir / "rollouts.jsonl")
            if line.rollout.oldest_version == 0
        }
        for run in runs
    ]
    assert first[0] == first[1]


@pytest.mark.timeout(300)
def test_slots_move_between_processes_of_their_own(small_run: Callable) -> None:
    run = small_run(*ELASTIC, "cluster=ray")
    check_moves(run, 4)
    check_samples(run, 16)
