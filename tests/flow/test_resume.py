"""kill -9 and Ctrl-C within a step, then the same command with resume=auto: nothing is lost, nothing is there twice."""

from __future__ import annotations

import functools
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from forks import Forked

from grmpipe.observe.recorder import load_rollouts
from grmpipe.run.errors import RunFailed

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from faults.ledger import Ledger  # noqa: E402

STEPS = 6
RUN = (
    "+experiment=quickstart", "cluster=inprocess", "run_dir=run", f"train.num_steps={STEPS}",
    "train.groups_per_batch=4", "train.group_size=4", "train.checkpoint_every=2", "data.num_prompts=40",
    "data.num_eval_prompts=4", "judge_monitor.anchors=8", "evaluate.every=3", "tracking.wandb.mode=offline",
)  # fmt: skip
Start = Callable[..., Forked]


def lines(path: Path) -> list[dict]:
    if not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole]


def wait_for(process: Forked, state: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not state():
        assert process.is_running, process.output
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_for_step(process: Forked, run: Path, step: int) -> None:
    wait_for(process, lambda: any(line["step"] >= step for line in lines(run / "metrics.jsonl")))


def kill(process: Forked) -> None:
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def check_lineage(run: Path) -> None:
    """Checks of a run that was stopped and resumed, from its files alone."""
    assert Ledger(run).find_losses() == []
    check_totals(run, json.loads((run / "summary.json").read_text()))
    check_answers_on_file(run)


def check_answers_on_file(run: Path) -> None:
    """All rollouts of a group that was trained, and each answer of the evaluations that stand, are on file once."""
    trained = {end["group_id"] for end in lines(run / "groups.jsonl") if end["outcome"] == "trained"}
    expected = {(group_id, sibling): 1 for group_id in trained for sibling in range(4)}
    assert Counter(map(ids_of, lines(run / "trained.jsonl"))) == expected
    answers, judged = lines(run / "eval_rollouts.jsonl"), lines(run / "eval_judgements.jsonl")
    assert Counter((line["step"], line["sample"]) for line in answers) == {
        (step, sample): 4 for step in (0, 3, STEPS) for sample in (0, None)
    }
    assert max(Counter(map(ids_of, answers)).values()) == 1
    sampled = [ids_of(line) for line in answers if line["sample"] == 0]
    assert Counter(map(ids_of, judged)) == dict.fromkeys(sampled, 1)


def ids_of(line: dict) -> tuple[str, int]:
    return line["group_id"], line["sibling"]


def check_totals(run: Path, summary: dict) -> None:
    """The totals have the work of every trained group once, kept work included, and the steps add up to them."""
    steps, judging = lines(run / "metrics.jsonl")[1:], summary["judging"]
    trained = {end["group_id"] for end in lines(run / "groups.jsonl") if end["outcome"] == "trained"}
    judged = [line for line in lines(run / "judgements.jsonl") if line["group_id"] in trained]
    assert summary["groups"]["dropped"] == {}, "then only trained groups count"
    assert sum(step["rollout/finished"] for step in steps) == 4 * len(trained)
    assert judging["counted"] == sum(len(line["judgements"]) for line in judged)
    assert judging["asked"] == judging["counted"] + sum(len(line["failures"]) for line in judged)
    for name in ("asked", "counted", "tokens"):
        assert sum(step[f"judge/{name}"] for step in steps) == judging[name], name


def kill_and_resume(launched: Start, run: Path, step: int, *overrides: str, changed: Sequence[str] = ()) -> None:
    """Kill a run within the step after `step`, resume it with changed keys, and check what is left of both."""
    process = launched(*RUN, *overrides)
    wait_for_step(process, run, step)
    finished = len(lines(run / "rollouts.jsonl"))
    wait_for(process, lambda: len(lines(run / "rollouts.jsonl")) > finished + 2)  # somewhere within the next step
    kill(process)
    assert not (run / "summary.json").exists()
    before = {(line.rollout.group_id, line.rollout.sibling) for line in load_rollouts(run / "rollouts.jsonl")}
    resumed = launched(*RUN, *overrides, *changed, "resume=auto")
    assert resumed.wait() == 0, resumed.output
    assert "rollouts kept" in resumed.output
    check_lineage(run)
    after = {(line.rollout.group_id, line.rollout.sibling) for line in load_rollouts(run / "rollouts.jsonl")}
    assert before <= after, "the journal is append-only"
    ids = {path.name.rsplit("-", 1)[-1] for path in (run / "wandb").glob("offline-run-*")}
    if step > 2:  # the id is in the checkpoint
        assert len(ids) == 1, "W&B goes on as one run"


@pytest.mark.long  # the next test kills a run in the gate
@pytest.mark.parametrize("step", [0, 2, 3])
def test_killed_run_resumes_and_trains_each_prompt_once(tmp_path: Path, launched: Start, step: int) -> None:
    kill_and_resume(launched, tmp_path / "run", step)


@pytest.mark.long  # tests/grmpipe/observe/test_packed_numbers.py has what a resume reads
def test_a_killed_run_with_packed_journals_goes_on_with_plain_ones(tmp_path: Path, launched: Start) -> None:
    run = tmp_path / "run"
    kill_and_resume(launched, run, 3, "journals.compact=true", changed=("journals.compact=false",))
    forms = ["packed" in line for line in lines(run / "rollouts.jsonl")]
    assert forms[0] and not forms[-1] and forms == sorted(forms, reverse=True)


@pytest.mark.long  # tests/grmpipe/run_dir/test_thinning.py has what a resume reads
@pytest.mark.parametrize("step", [2, 3])
def test_a_killed_run_whose_journals_are_thinned_at_each_step_goes_on(
    tmp_path: Path, forked: type[Forked], step: int
) -> None:
    script = tmp_path / "thin_often.py"
    script.write_text(
        "import runpy\nfrom grmpipe.run.features import journal_size\njournal_size.LEAST_BYTES = 1\n"
        "after_step = journal_size.JournalSize.after_step\n"
        "async def thin_now(self, end):\n    await after_step(self, end)\n    await self.finish()\n    return {}\n"
        "journal_size.JournalSize.after_step = thin_now\n"
        f"runpy.run_path({str(ROOT / 'launch.py')!r}, run_name='__main__')\n"
    )
    start = functools.partial(forked, script, cwd=tmp_path)
    run = tmp_path / "run"
    kill_and_resume(start, run, step, "journals.keep=text", "train.checkpoint_every=1")
    forms = ["thinned" in line for line in lines(run / "rollouts.jsonl")]
    assert sum(forms) >= 16 and forms == sorted(forms, reverse=True)
    assert (run / "run.log").read_text().count("journals.keep: thinned") >= 3
    check_totals(run, json.loads((run / "summary.json").read_text()))


def test_killed_run_with_a_critic_resumes_both_learners_and_trains_each_prompt_once(
    tmp_path: Path, launched: Start
) -> None:
    run = tmp_path / "run"
    kill_and_resume(launched, run, 3, "algorithm=ppo", "critic=policy", "critic.lr_warmup_steps=3")
    latest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text()
    assert {path.name for path in latest.iterdir()} == {"critic", "learner", "manifest.json", "run_state.json"}
    rates = [line["critic/lr"] for line in lines(run / "metrics.jsonl") if "critic/lr" in line]
    assert rates == pytest.approx([1e-3 * (step + 1) / 4 for step in range(3)] + [1e-3] * 3)  # no step twice
    assert json.loads((run / "summary.json").read_text())["versions"]["critic"] == STEPS


@pytest.mark.long
def test_longer_run_resumes_under_its_new_schedule_and_says_so(small_run: Callable) -> None:
    small = (
        "train.num_steps=2", "train.warmup_steps=0", "train.schedule=linear", "train.groups_per_batch=2",
        "train.group_size=2", "data.num_eval_prompts=4",
    )  # fmt: skip
    files = small_run(*small)
    small_run(*small, "resume=auto", "train.num_steps=4", "train.lr=1e-4", "judge.limits.timeout_s=90")
    assert [step["train/lr"] for step in files.steps()] == pytest.approx([3e-4, 1.5e-4, 0.5e-4, 0.25e-4])
    assert (files.summary["status"], files.summary["steps"]) == ("completed", 4)
    told = [
        "after step 2: judge.limits.timeout_s: 120.0 -> 90.0",
        "after step 2: train.lr: 0.0003 -> 0.0001",
        "after step 2: train.num_steps: 2 -> 4",
    ]
    assert files.summary["changes"] == told
    written, page = ((files.run_dir / name).read_text() for name in ("run.log", "report.html"))
    assert all(f"changed {change}" in written for change in told)
    assert "after step 2: train.lr: 0.0003 -&gt; 0.0001" in page


@pytest.mark.long
def test_a_run_whose_journals_grow_too_large_stops_with_a_checkpoint_and_goes_on_with_more_room(
    small_run: Callable, tmp_path: Path
) -> None:
    small = ("train.num_steps=3", "train.groups_per_batch=2", "train.group_size=2", "data.num_eval_prompts=4")
    with pytest.raises(
        RunFailed, match=r"take [\d.e-]+ GB, more than journals\.max_gb=1e-06; the run stopped after step 1,"
    ):
        small_run(*small, "journals.max_gb=1e-6")
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 1) and "resume=auto" in summary["failure"]
    assert (run / "checkpoints" / "latest").read_text() == "step_1"
    files = small_run(*small, "resume=auto", "journals.max_gb=1", "journals.keep=text")
    files.check_complete(groups=6)
    assert "thinned" in (run / "rollouts.jsonl").read_text(), "up to the checkpoint of step 1"
    assert not list(run.glob("*.thin"))
    assert [line["step"] for line in files.lines("trained")] == [1] * 4 + [2] * 4 + [3] * 4


def test_sigterm_in_the_start_is_an_interruption(tmp_path: Path, launched: Start) -> None:
    process = launched(*RUN)
    wait_for(process, (tmp_path / "run" / "run.log").exists)
    process.signal(signal.SIGTERM)
    assert process.wait(60) == 130, process.output
    assert "resume=auto" in process.output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"


def test_ctrl_c_saves_a_checkpoint_that_the_run_resumes_from(tmp_path: Path, launched: Start) -> None:
    run = tmp_path / "run"
    process = launched(*RUN)
    wait_for_step(process, run, 3)
    process.signal(signal.SIGINT)
    assert process.wait(60) == 130, process.output
    assert "resume=auto" in process.output
    assert "Traceback" not in process.output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    latest = (run / "checkpoints" / "latest").read_text()
    assert latest.removesuffix(".1") == f"step_{summary['steps']}", "the second of this step, if it came right then"
    resumed = launched(*RUN, "resume=auto")
    assert resumed.wait() == 0, resumed.output
    check_lineage(run)
