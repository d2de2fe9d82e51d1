"""Whole runs on elastic slots: slots move in both directions, every sample is complete, the files report the moves."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from grmpipe.observe.recorder import load_rollouts

ELASTIC = ("placement=elastic", "train.num_steps=4")


@pytest.fixture(autouse=True)
def quick_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied here, and four steps are too few to measure that first."""
    monkeypatch.setattr("grmpipe.scheduler.slots.elastic.ASSUMED_SWITCH_S", 0.05)


def check_moves(run: Any, steps: int, roles: tuple[str, ...] = ("policy", "grm")) -> None:
    """Moves between all roles, counted, drawn and logged; and the slots add up."""
    moves = run.summary["moves"]
    assert {role for move in moves for role in move.split("->")} == set(roles)
    assert {"policy->grm", "grm->policy"} <= set(moves)
    lines = run.steps()
    assert len(lines) == steps
    assert all(sum(line[f"slots/{role}"] for role in roles) == 2 for line in lines)
    assert 0 < lines[-1]["moves/total"] <= sum(moves.values())
    spans = [event for event in json.loads((run.run_dir / "timeline.json").read_text()) if event["ph"] == "X"]
    drawn = Counter(span["name"].removeprefix("switch ") for span in spans if span["name"].startswith("switch "))
    assert drawn == moves
    log = (run.run_dir / "run.log").read_text()
    assert "engines 0: policy -> grm" in log or "engines 1: policy -> grm" in log


def first_rollouts(run: Any) -> dict[tuple[str, int], tuple[int, ...]]:
    """The rollouts of the policy as sampled first."""
    rollouts = [line.rollout for line in load_rollouts(run.run_dir / "rollouts.jsonl")]
    return {
        (rollout.group_id, rollout.sibling): rollout.turns[0].completion.token_ids
        for rollout in rollouts
        if rollout.oldest_version == 0
    }


@pytest.mark.long
def test_slots_move_between_policy_judge_and_teacher_and_every_sample_is_whole_and_taught(small_run: Callable) -> None:
    run = small_run(*ELASTIC, experiment="distill")
    check_moves(run, 4, ("policy", "grm", "teacher"))
    run.check_complete(16)
    assert run.summary["teaching"]["failed"] == {}
    assert all(line["train/taught_share"] == 1 for line in run.steps())


def test_the_same_rollouts_come_from_elastic_slots_and_from_fixed_ones(small_run: Callable) -> None:
    """The embedded engine's random numbers depend on the position: which engine samples, and how often a request moves,
    changes nothing.
    """
    elastic = small_run(*ELASTIC, "train.max_staleness=0", run_dir="elastic")
    check_moves(elastic, 4)
    elastic.check_complete(16)
    assert all(line["mismatch/max_nats"] < 1e-3 for line in elastic.steps()), "log-probs that are not the model's"
    fixed = small_run("train.max_staleness=0", "train.num_steps=1", run_dir="fixed")
    assert first_rollouts(elastic) == first_rollouts(fixed) != {}
