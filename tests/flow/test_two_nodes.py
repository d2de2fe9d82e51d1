"""A Ray of two nodes on this machine: a run over both, its resume, and task=doctor with faults planted on the second.

The second node has another working directory, a clock 40 s ahead, and another version of a package.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from two_nodes import ROOT, SECOND, TwoNodes, two_nodes

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
STEPS = 100  # enough to lose a node meanwhile
SKEWED = "import time\nreal = time.time\ntime.time = lambda: real() + 40\n"
RUN = (
    "+experiment=quickstart", "tracking=none", "train.groups_per_batch=4", "train.group_size=2",
    "data.num_eval_prompts=4", "data.num_prompts=32", "judge_monitor.anchors=2", "judge_monitor.every=0",
    # A rank and an engine of the policy on each node.
    "placement.pools.train.slots=2", "placement.pools.train.strategy=STRICT_SPREAD",
    "placement.roles.learner.replicas=2",
    "+placement.pools={rollout: {slots: 2, strategy: STRICT_SPREAD}}", "placement.roles.policy.pool=rollout",
    "placement.roles.policy.replicas=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "sitecustomize.py").write_text(SKEWED)
    other = folder / "Jinja2-3.0.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: Jinja2\nVersion: 3.0.0\n")
    with two_nodes(folder, cores=3, second={"PYTHONPATH": f"{folder}:{ROOT}"}) as running:
        yield running


def problems(printed: str) -> list[tuple[str, str, str]]:
    """(address of the node, check, text) of each problem."""
    lines = [line.strip() for line in printed.splitlines() if "  PROBLEM  " in line]
    found = []
    for line in lines:
        node, rest = line.split(")", 1)
        check, text = rest.split("PROBLEM")
        found.append((node.split("(")[1], check.strip(), text.strip()))
    return found


def test_a_run_over_two_nodes_has_all_its_files_and_resumes(nodes: TwoNodes, tmp_path: Path) -> None:
    first = nodes.launch(tmp_path, *RUN, "run_dir=run", "train.num_steps=2")
    assert first.returncode == 0, first.stderr[-3000:]
    run = tmp_path / "run"
    saved = run / "checkpoints/step_2/learner"
    assert {file.name for file in saved.iterdir()} >= {".metadata", "__0_0.distcp", "__1_0.distcp"}, "of both ranks"
    assert (run / "policy/tokenizer.json").is_file() and list((run / "policy").glob("*.safetensors"))
    second = nodes.launch(tmp_path, *RUN, "run_dir=run", "train.num_steps=4", "resume=auto")
    assert second.returncode == 0, second.stderr[-3000:]
    assert "resumed at step 2" in (run / "run.log").read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 4)
    assert set(summary["engines_replaced"].values()) == {0}
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "time/step_s" in step]
    assert all(step["sync/probe_error_nats"] < 1e-3 and step["sync/bytes"] > 0 for step in steps)
    assert all(step["perf/model_flops"] > 0 and step["learner/tokens_per_s"] > 0 for step in steps)
    assert steps[-1]["train/rank_imbalance"] >= 1, "two ranks"


def test_the_engine_of_the_second_node_samples_with_every_version(nodes: TwoNodes, tmp_path: Path) -> None:
    done = nodes.launch(tmp_path, *RUN, "run_dir=run", "train.num_steps=3", "train.max_staleness=0")
    assert done.returncode == 0, done.stderr[-3000:]
    events = json.loads((tmp_path / "run/timeline.json").read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    lanes = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    spans = [(lanes.get(event["tid"], ""), event) for event in events if event.get("ph") == "X"]
    busy = {lane.split()[0] for lane, _ in spans if lane.startswith("policy-")}
    assert busy == {"policy-0", "policy-1"}, sorted(set(lanes.values()))
    rollouts = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == 3 * 4 * 2


def test_a_run_whose_node_is_lost_begins_again_once_another_has_joined(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with two_nodes(tmp_path, cores=3) as nodes:
        overrides = (*RUN, "run_dir=run", f"train.num_steps={STEPS}", "train.checkpoint_every=1")
        with ThreadPoolExecutor() as threads:
            launched = threads.submit(nodes.launch, tmp_path, *overrides)
            while not (run / "checkpoints/step_2").exists():
                assert not launched.done(), launched.result().stderr[-3000:]
                time.sleep(0.1)
            nodes.lose_second()
            while "the run failed" not in (run / "run.log").read_text():
                assert not launched.done(), launched.result().stderr[-3000:]
                time.sleep(0.1)
            time.sleep(10)  # the run waits for room
            nodes.add("third")
            done = launched.result()
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    (cause,) = summary["restarts"]
    assert "learner-" in cause and "died" in cause
    trained = [(line["group_id"], line["sibling"]) for line in map(json.loads, (run / "trained.jsonl").open())]
    assert len(trained) == len(set(trained)) == STEPS * 4 * 2


def test_the_doctor_names_what_is_wrong_on_which_node(nodes: TwoNodes, tmp_path: Path) -> None:
    good = nodes.launch(tmp_path, "task=doctor", f"run_dir={tmp_path}/run")
    found = {(node, check): text for node, check, text in problems(good.stdout)}
    assert found.keys() == {(SECOND, "versions")}, good.stdout[-3000:] + good.stderr[-3000:]
    assert found[SECOND, "versions"].startswith("jinja2 3.0.0 (driver: ")
    assert good.returncode == 1
    for check in ("ports", "run_dir", "gloo", "policy's files", "/dev/shm"):
        lines = [line for line in good.stdout.splitlines() if f"  {check} " in line]
        assert len(lines) == 2 and all("  ok  " in line for line in lines), check
    assert not list(tmp_path.glob(".doctor-*")), "its files are removed"


def test_the_doctor_finds_a_folder_that_is_not_shared_and_missing_files(nodes: TwoNodes, tmp_path: Path) -> None:
    bad = nodes.launch(tmp_path, "task=doctor", "run_dir=/proc/self/cwd/run", f"policy.path={tmp_path}/none")
    found = {(node == SECOND, check): text for node, check, text in problems(bad.stdout)}
    for second in (True, False):
        assert "doesn't see what" in found[second, "run_dir"] and "the driver" in found[second, "run_dir"]
        assert found[second, "policy's files"].startswith(f"no directory '{tmp_path}/none'")
    assert bad.returncode == 1
