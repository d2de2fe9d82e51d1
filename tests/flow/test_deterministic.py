"""train.deterministic: runs of one configuration are equal bit for bit, also after a resume and under another load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grmpipe.run_dir.recorded_run import open_recorded
from grmpipe.types import JudgedGroup

STEPS = 3
RUN = (
    "train.deterministic=true", "train.max_staleness=1", f"train.num_steps={STEPS}", "train.checkpoint_every=1",
    "train.keep_checkpoints=4", "algorithm.dynamic_sampling_batches=1", "train.lr=3e-3", "data.num_eval_prompts=2",
    "judge_monitor.anchors=2",
)  # fmt: skip
OTHER_LOAD = ("rollout.max_concurrency=5", "judge.limits.max_concurrency=3", "engine.embedded.max_batch_rows=9")


@pytest.fixture(scope="module")
def first_run(run_once: Callable[..., Any]) -> Path:
    return run_once(*RUN).run_dir


def trained(run_dir: Path) -> list[list[JudgedGroup]]:
    """The groups that each step trained, in its order: tokens, log-probs, versions and verdicts."""
    run = open_recorded(run_dir)
    batches = [run.batch(step) for step in range(1, len(run.steps) + 1)]
    return [[under_first_name(group) for group in batch] for batch in batches]


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of groups.jsonl."""
    return [json.loads(line) for line in (run_dir / "groups.jsonl").read_text().splitlines()]


def under_first_name(group: JudgedGroup) -> JudgedGroup:
    """A resume gives another id to a group that it samples again."""
    group_id = group.group_id.split("~")[0]
    rollouts = tuple(replace(rollout, group_id=group_id) for rollout in group.rollouts)
    return replace(group, group_id=group_id, rollouts=rollouts)


def check_equal(run_dir: Path, other: Path) -> None:
    assert trained(run_dir) == trained(other)
    weights, others = (load_file(one / "policy" / "model.safetensors") for one in (run_dir, other))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def test_two_runs_are_equal_bit_for_bit_though_the_second_has_other_rows_side_by_side(
    first_run: Path, run_once: Callable[..., Any]
) -> None:
    """Fewer concurrent rollouts, judgements and rows: other batches in the engines, and another order of arrival."""
    again = run_once(*RUN, *OTHER_LOAD, run_dir="again").run_dir
    check_equal(first_run, again)
    order = [end["prompt_index"] for end in lines_of(first_run) if end["outcome"] == "trained"]
    assert order == sorted(order)


@pytest.mark.long
def test_a_rule_that_watches_changes_no_bit_and_no_step(first_run: Path, run_once: Callable[..., Any]) -> None:
    watched = run_once(*RUN, "+judge@judges.gold=rule", "judge_monitor.watch={gold: 0.5}", run_dir="watched")
    check_equal(first_run, watched.run_dir)
    found, lines = watched.summary["watching"]["gold"], watched.lines("watched")
    assert found["groups"] >= 3 and found["groups"] + found["unfinished_groups"] < 4 * STEPS, "half of them"
    assert len(lines) == 4 * found["groups"] and {line["watcher"] for line in lines} == {"gold"}
    assert watched.summary["judging"]["by_judge"] == {} and found["failed"] == {}
    assert found["rank_correlation"] is not None
    later = [key for step in watched.steps() for key in step]
    assert "watch/gold/rank_correlation" in later and "watch/gold/reward" in later


def test_a_run_that_was_killed_ends_as_the_one_that_was_not(first_run: Path, run_once: Callable[..., Any]) -> None:
    """Killed between its last step and the end: the journals have samples of later versions, which are void."""
    killed = first_run.with_name("killed")
    shutil.copytree(first_run, killed)
    (killed / "summary.json").unlink()
    shutil.rmtree(killed / "policy")
    for later in (2, STEPS):
        shutil.rmtree(killed / "checkpoints" / f"step_{later}")
    (killed / "checkpoints" / "latest").write_text("step_1")
    resumed = run_once(*RUN, *OTHER_LOAD, "resume=auto", run_dir="killed")
    assert (resumed.summary["status"], resumed.summary["steps"]) == ("completed", STEPS)
    assert any("~" in end["group_id"] for end in lines_of(resumed.run_dir)), "a group was sampled again"
    check_equal(first_run, resumed.run_dir)


@pytest.mark.long
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_processes_and_the_number_of_engines_change_no_bit(
    run_once: Callable[..., Any], ray_here: None, max_staleness: int
) -> None:
    steps = (*RUN, f"train.max_staleness={max_staleness}")
    here = run_once(*steps, run_dir=f"here_{max_staleness}").run_dir
    two_engines = (
        "placement.pools.train.slots=2",
        "placement.roles.policy.replicas=2",
        "placement.roles.grm.pool=train",
    )
    there = run_once(*steps, *two_engines, "cluster=ray", run_dir=f"there_{max_staleness}").run_dir
    check_equal(here, there)


@pytest.mark.long
def test_two_runs_of_a_learner_with_two_ranks_are_equal(run_once: Callable[..., Any], ray_here: None) -> None:
    ranks = (*RUN, "placement=two_ranks", "cluster=ray")
    check_equal(*(run_once(*ranks, run_dir=f"ranks_{name}").run_dir for name in ("once", "again")))
