"""kill -9 of engines within whole runs on Ray: the run continues, and no sample is changed, lost or duplicated."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grmpipe.run.errors import RunFailed

pytestmark = [pytest.mark.timeout(500), pytest.mark.usefixtures("ray_here")]
STEPS = 4
# Synchronous, so that each step's log-probs can be compared with the learner's.
ON_RAY = ("cluster=ray", f"train.num_steps={STEPS}", "train.max_staleness=0")
BOTH = ((1, "policy-0"), (2, "grm-0"))  # (after which step, which engine)
SECOND_JUDGE_AND_TEACHER = (
    "+policy@models.teacher=tiny", "algorithm.distill.teachers={default: teacher}",
    "+grm@models.weak=tiny_weak", "+judge@judges.second=generative", "judges.second.model=weak",
    "reward=mix", "reward.mix={judge: 1, second: 1}",
)  # fmt: skip
TWO_POLICY_ENGINES = (
    "placement.pools.train.slots=2", "placement.roles.policy.replicas=2", "placement.roles.grm.pool=train",
)  # fmt: skip


def lines(path: Path) -> list[dict]:
    if not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole]


def process_of(engine: str, run: Path) -> int:
    """The process that the log named last."""
    return int(re.findall(rf"{engine} runs in process (\d+)", (run / "run.log").read_text())[-1])


def kill(run: Path, victims: Sequence[tuple[int, str]], how: signal.Signals, over: threading.Event) -> None:
    """Kill each victim once its step is done, if the run gets that far."""
    for step, engine in victims:
        while not any(line["step"] >= step for line in lines(run / "metrics.jsonl")):
            if over.wait(0.005):
                return
        os.kill(process_of(engine, run), how)


@pytest.fixture
def run_and_kill(small_run: Callable, tmp_path: Path) -> Callable[..., Any]:
    """A run in which processes are killed, or stopped, once a step is done; returns its files."""

    def run(
        *overrides: str, victims: Sequence[tuple[int, str]], how: signal.Signals = signal.SIGKILL, **where: str
    ) -> Any:
        over = threading.Event()
        killer = threading.Thread(target=kill, args=(tmp_path / "run", victims, how, over))
        killer.start()
        try:
            return small_run(*ON_RAY, *overrides, **where)
        finally:
            over.set()
            killer.join()

    return run


def check_samples(run: Any) -> None:
    """Checks of the samples, from the files alone."""
    run.check_complete(4 * STEPS)
    assert [line["step"] for line in run.steps()] == list(range(1, STEPS + 1))
    assert all(line["mismatch/max_nats"] < 1e-3 for line in run.steps()), "log-probs that are not the model's"


@pytest.mark.parametrize(
    ("victims", "overrides"),
    [
        pytest.param(
            (*BOTH, (2, "teacher-0"), (3, "weak-0")),
            SECOND_JUDGE_AND_TEACHER,
            id="the only engines of policy, two judges and a teacher",
        ),
        pytest.param(((1, "policy-1"),), TWO_POLICY_ENGINES, id="one of two policy engines", marks=pytest.mark.long),
    ],
)
def test_a_killed_engine_is_replaced_and_no_sample_is_altered_or_doubled(
    run_and_kill: Callable, victims: tuple[tuple[int, str], ...], overrides: tuple[str, ...]
) -> None:
    run = run_and_kill(*overrides, victims=victims)
    check_samples(run)
    replaced = run.summary["engines_replaced"]
    if overrides == TWO_POLICY_ENGINES:  # the run may end before the other engine is ready again
        assert replaced in ({"policy": 1, "grm": 0}, {"policy": 0, "grm": 0})
        return
    assert replaced == dict.fromkeys(run.summary["versions"], 1)
    log = (run.run_dir / "run.log").read_text()
    for _, engine in victims:
        assert run.steps()[-1][f"engines/replaced_{engine.partition('-')[0]}"] == 1
        for told in ("dead -> starting", "starting -> stale", "stale -> healthy"):
            assert f"{engine}: {told}" in log
    spans = {event["name"] for event in json.loads((run.run_dir / "timeline.json").read_text())}
    assert spans >= {"died", "starting", "stale"}


def test_when_replacements_are_used_up_the_run_ends_with_the_first_cause(
    run_and_kill: Callable, tmp_path: Path
) -> None:
    with pytest.raises(RunFailed, match="all engines of role policy died; the first: policy-0: process") as failed:
        run_and_kill("slots.health.max_replacements=0", victims=((1, "policy-0"),))
    assert "Traceback" not in str(failed.value)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["engines_replaced"] == {"policy": 0, "grm": 0}


@pytest.mark.long
@pytest.mark.parametrize("engine", ["policy-0", "grm-0"])
def test_a_stopped_engine_is_replaced_and_no_sample_is_altered_or_doubled(run_and_kill: Callable, engine: str) -> None:
    quick = ("slots.health.hung_after_s=15", "slots.health.check_every_s=1", "sync.deadline_s=15")
    run = run_and_kill(*quick, victims=((1, engine),), how=signal.SIGSTOP)
    check_samples(run)
    assert run.summary["engines_replaced"][engine.partition("-")[0]] == 1
    assert f"{engine} died: it hangs" in (run.run_dir / "run.log").read_text()


@pytest.mark.parametrize(
    ("victims", "experiment"),
    [
        pytest.param(((1, "learner-0"),), "quickstart", id="a learner"),
        pytest.param(((1, "learner-0"), (3, "critic-0")), "ppo", id="a learner and a critic", marks=pytest.mark.long),
    ],
)
def test_when_a_learner_or_a_critic_dies_the_run_begins_again_at_its_last_checkpoint(
    run_and_kill: Callable, victims: tuple[tuple[int, str], ...], experiment: str
) -> None:
    run = run_and_kill("train.checkpoint_every=1", victims=victims, experiment=experiment)
    assert run.summary["status"] == "completed"
    assert len(run.summary["restarts"]) == len(victims)
    for (step, died), cause in zip(victims, run.summary["restarts"], strict=True):
        assert re.match(rf"step [{step}{step + 1}]: {died} died: process \d+ is gone", cause)
    assert run.summary["groups"] == {"submitted": 4 * STEPS, "trained": 4 * STEPS, "dropped": {}, "in_flight": 0}
    assert [line["step"] for line in run.steps()] == list(range(1, STEPS + 1))
    assert all(line["mismatch/max_nats"] < 1e-3 for line in run.steps())
    trained = Counter((line["group_id"], line["sibling"]) for line in run.lines("trained"))
    assert (len(trained), set(trained.values())) == (16 * STEPS, {1}), "each sibling once"


@pytest.mark.long
def test_a_deterministic_run_that_begins_again_ends_as_the_one_that_did_not(
    run_and_kill: Callable, small_run: Callable
) -> None:
    deterministic = ("train.deterministic=true", "train.checkpoint_every=1", "train.lr=3e-3")
    undisturbed = small_run(*ON_RAY, *deterministic, run_dir="undisturbed")
    run = run_and_kill(*deterministic, victims=((2, "learner-0"),))
    assert len(run.summary["restarts"]) == 1 and undisturbed.summary["restarts"] == []
    weights, others = (load_file(one.run_dir / "policy" / "model.safetensors") for one in (undisturbed, run))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


@pytest.mark.long
def test_without_restarts_a_dead_learner_ends_the_run_with_words_and_it_is_resumed(
    run_and_kill: Callable, small_run: Callable, tmp_path: Path
) -> None:
    with pytest.raises(RunFailed, match="learner-0 died: process") as failed:
        run_and_kill("train.checkpoint_every=1", "slots.health.max_replacements=0", victims=((2, "learner-0"),))
    assert "Traceback" not in str(failed.value)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and "learner-0 died" in summary["failure"]
    resumed = small_run(*ON_RAY, "train.checkpoint_every=1", "resume=auto")  # the journals also have void rollouts
    assert (resumed.summary["status"], resumed.summary["steps"]) == ("completed", STEPS)
    groups = {"submitted": 4 * STEPS, "trained": 4 * STEPS, "dropped": {}, "in_flight": 0}
    assert resumed.summary["groups"] == groups
