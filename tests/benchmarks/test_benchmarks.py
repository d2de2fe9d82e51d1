"""The parts of benchmarks: what they read, reuse, run in sequence and report. Measures nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # a benchmark imports its neighbours like a script

import against_commit  # noqa: E402
import benchmark_page  # noqa: E402
import in_sequence  # noqa: E402
import quickstart  # noqa: E402

from grmpipe.envs.play import RolloutRequest  # noqa: E402
from grmpipe.judge.pointwise_adapter import PointwiseAdapter  # noqa: E402
from grmpipe.models.types import Completion, Message, VersionSpan  # noqa: E402
from grmpipe.pipeline.interfaces import FlowConfig, PipelineComponents, PipelineState, TrainedBatch  # noqa: E402
from grmpipe.scheduler.events import NoEvents  # noqa: E402
from grmpipe.scheduler.weights.weight_sync import SyncReport  # noqa: E402
from grmpipe.types import JudgeReport, Prompt, RewardSpan, Rollout, Turn, Verdict  # noqa: E402


def test_a_command_keeps_what_stands_on_its_page_by_hand(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    benchmark_page.write_page(page, "# Old\n")
    assert page.read_text() == "# Old\n"
    page.write_text(f"# Old\n\n{benchmark_page.BY_HAND}\n\n## Why\n")
    for _ in range(2):
        benchmark_page.write_page(page, "# New\n\n")
    assert page.read_text() == f"# New\n\n{benchmark_page.BY_HAND}\n\n## Why\n"


PROCESS = quickstart.Process(
    checked_s=4.0, ready_s=10.0, ended_s=100.0, busy_share=0.02, commit_date="2026-01-01 00:00",
    ready_cpu_s=dict.fromkeys(quickstart.PROCESSES.values(), 2.0),
)  # fmt: skip
FLOW = FlowConfig(
    num_steps=2, groups_per_batch=3, group_size=2, min_valid_siblings=2, max_staleness=0, group_deadline_s=9.0,
    rollout_concurrency=99, judge_concurrency=99, seed=0,
)  # fmt: skip


class RecordingParts:
    """Parts that take a moment, and remember the order of their calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.seats: list[RolloutRequest] = []
        self.trained: list[str] = []

    def parts(self) -> PipelineComponents:
        journal = SimpleNamespace(
            rollout=lambda *_: None, record_verdict=lambda *_: None, group_ended=lambda *_, **__: None
        )
        fit = SimpleNamespace(until_fit=lambda clock: asyncio.sleep(0), verdict=lambda report: None)
        return PipelineComponents(
            prompts=SimpleNamespace(at=prompt_at),
            too_long=lambda prompt: False,
            play=self.play,
            judge=PointwiseAdapter(self),
            judge_guard=fit,
            trainer=self,
            push_weights=self.push,
            journal=journal,
            events=NoEvents(),
        )

    async def lasting(self, what: str, seconds: float) -> None:
        self.log.append(f"{what} begins")
        await asyncio.sleep(seconds)
        self.log.append(f"{what} ends")

    # type: ignore[no-untyped-def]
    async def play(self, seat: RolloutRequest, prompt: Prompt, on_first_token) -> Rollout:
        self.seats.append(seat)
        on_first_token()
        await self.lasting("rollout", 0.001 * (len(self.seats) % 4))
        spans = (VersionSpan(model="policy", version=self.log.count("sync ends"), start=0, end=2),)
        completion = Completion(token_ids=(1, 2), logprobs=(0, 0), text="", finish_reason="stop", versions=spans)
        turn = Turn(new_ids=(1,), completion=completion)
        return Rollout(group_id=seat.group_id, sibling=seat.sibling, turns=(turn,), status="finished")

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        await self.lasting("judgement", 0.001)
        span = RewardSpan(turn=0, start=0, end=2, value=1.0)
        return JudgeReport(verdict=Verdict(rewards=(span,), score=5.0, breakdown={}, score_std=0.0, num_judgements=1))

    async def take(self, group) -> None:  # type: ignore[no-untyped-def]
        self.trained.append(group.group_id)
        await self.lasting("micro-batch", 0.001)

    async def while_waiting(self) -> bool:
        return False

    async def step(self, batch) -> TrainedBatch:  # type: ignore[no-untyped-def]
        await self.lasting("step", 0.001)
        return TrainedBatch()

    async def discard(self) -> None: ...

    async def push(self, version: int) -> SyncReport:
        await self.lasting("sync", 0.001)
        return SyncReport(version=version, seconds=0.0, pause_seconds=0.0, num_bytes=0, probe_error=0.0)


def prompt_at(draw: int) -> Prompt:
    return Prompt(prompt_id=f"p{draw}", messages=(Message(role="user", content="?"),))


def write_run(run_dir: Path) -> Path:
    """Two steps in three seconds, with an evaluation in between."""
    run_dir.mkdir(parents=True)
    step = {
        "time/step_s": 1.2, "stall/groups_s": 0.3, "stall/engines_idle_s": 0.0, "sync/push_s": 0.05,
        "sync/pause_s": 0.04,
    }  # fmt: skip
    records = [{"step": 0, "eval/true_accuracy": 0.2}, {"step": 1} | step, {"step": 2} | step]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    spans = [("g1/0/t0", 0.0, 9.0), ("step 1", 1.0, 2.0), ("version 1", 2.0, 2.2), ("step 2", 2.8, 3.8)]
    spans += [("version 2", 3.8, 4.0), ("look2-0", 4.0, 9.0)]
    events = [{"ph": "X", "name": name, "ts": 1e6 * start, "dur": 1e6 * (end - start)} for name, start, end in spans]
    (run_dir / "timeline.json").write_text(json.dumps([{"ph": "M", "name": "process_name"}, *events]))
    looks = {"true_accuracy": 0.2, "true_accuracy_greedy": 0.3, "grm_score": 4.0}
    summary = {"eval": {"initial": looks, "final": looks}, "busy_s": {"policy": 2.4, "grm": 1.5, "learner": 0.9}}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir


def steps(*seconds: float) -> list[in_sequence.Step]:
    stages = dict.fromkeys(in_sequence.STAGES, 0.25)
    return [in_sequence.Step(seconds=s, num_tokens=1000, stages_s=stages) for s in seconds]


def test_shares_leave_out_the_time_of_evaluations(tmp_path: Path) -> None:
    run = quickstart.read_run(write_run(tmp_path / "seed0"), PROCESS)
    assert run.steps_s == pytest.approx(3.0)
    rows = {label: format(value(run), form) for label, form, value in (*quickstart.STAGES, *quickstart.WALL)}
    assert rows["policy: a rollout in flight"] == "80%"
    assert rows["learner: in its calls"] == "30%"
    assert rows["learner waits for groups, share of the steps without evaluations"] == "25%"
    assert rows["held-out evaluations, between the steps"] == "20%"
    assert rows["one weight sync (median), ms"] == "50"
    assert rows["of it: processes started, models loaded, s"] == "6.0"


def test_cpu_seconds_are_told_by_process_of_the_whole_family() -> None:
    idle = "import sys, time; print(sys.argv[1], flush=True); time.sleep(60)"
    busy = "import subprocess, sys, time\nwhile time.process_time() < 0.5: pass\n"
    child = f"subprocess.run([sys.executable, '-c', {idle!r}, 'ray::EngineHost'])"
    with subprocess.Popen(
        [sys.executable, "-c", busy + child, "launch.py"], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = quickstart.cpu_by_process(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
    assert found["driver"] >= 0.4 > found["engines"] >= 0
    assert found["learner"] == found["Ray itself"] == 0


def test_a_finished_run_is_used_again_and_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "seed1")
    (tmp_path / "seed1.process.json").write_text(json.dumps(dataclasses.asdict(PROCESS)))
    monkeypatch.setattr(quickstart, "launch", lambda *_: pytest.fail("started a run"))
    run = quickstart.run_seed(tmp_path, 1)
    assert run.process == PROCESS
    assert [step["step"] for step in run.steps] == [1, 2]


def test_a_table_has_a_column_per_seed_and_their_median(tmp_path: Path) -> None:
    runs = [
        quickstart.read_run(write_run(tmp_path / f"seed{n}"), dataclasses.replace(PROCESS, ready_s=ready_s))
        for n, ready_s in enumerate((10.0, 30.0, 11.0))
    ]
    head, _, *rows = quickstart.table(quickstart.WALL, runs)
    assert head == "| | seed0 | seed1 | seed2 | median |"
    assert "| start-up: command to ready, s | 10.0 | 30.0 | 11.0 | 11.0 |" in rows


def test_in_sequence_no_stage_begins_before_the_one_before_it_ended() -> None:
    recorded = RecordingParts()
    counted, pipeline_state = asyncio.run(in_sequence.run_in_sequence(recorded.parts(), FLOW, PipelineState()))
    stages = ["rollout"] * 6 + ["judgement"] * 6 + ["micro-batch"] * 3 + ["step", "sync"]
    assert [line.removesuffix(" ends") for line in recorded.log if line.endswith("ends")] == stages * 2
    last_rollout = max(i for i, line in enumerate(recorded.log[:30]) if line == "rollout ends")
    assert recorded.log.index("judgement begins") > last_rollout
    assert recorded.log.index("micro-batch begins") > max(
        i for i, line in enumerate(recorded.log[:30]) if line == "judgement ends"
    )
    assert (pipeline_state.version, pipeline_state.next_prompt_index, len(counted)) == (2, 6, 2)
    assert counted[0].seconds == pytest.approx(sum(counted[0].stages_s.values()))


def test_pipeline_and_sequence_alternate_with_fresh_groups_and_the_same_seeds() -> None:
    async def by_turns(*ways: str) -> tuple[RecordingParts, PipelineState]:
        recorded, pipeline_state = RecordingParts(), PipelineState()
        parts = recorded.parts()
        for way in ways:
            counted, pipeline_state = await in_sequence.run_block(way, parts, FLOW, pipeline_state)
            assert len(counted) == in_sequence.STEPS_PER_BLOCK
        return recorded, pipeline_state

    baseline, *pipelines = in_sequence.WAYS
    mixed, pipeline_state = asyncio.run(by_turns(*reversed(pipelines), baseline))
    alone, _ = asyncio.run(by_turns(baseline, baseline, baseline))
    assert pipeline_state == PipelineState(version=24, next_prompt_index=72)
    assert sorted(mixed.trained) == sorted(alone.trained) == [f"g{draw:06d}" for draw in range(72)]
    by_name = [sorted((s.group_id, s.sibling, s.seed) for s in log.seats) for log in (mixed, alone)]
    assert by_name[0] == by_name[1]


def test_ratios_are_taken_within_rounds() -> None:
    base, other, third = in_sequence.WAYS
    quick = {base: steps(2.0, 2.0), other: steps(1.0, 1.0), third: steps(2.0, 2.0)}
    busy = {base: steps(8.0, 8.0), other: steps(4.0, 4.0), third: steps(2.0, 2.0)}
    _, _, *rows = in_sequence.table_of_ways([quick, busy])
    assert rows[1] == f"| {other} | 2.500 | 2.00 | 2.00, 2.00 | 1,000 |"
    assert rows[2] == f"| {third} | 2.000 | 2.50 | 1.00, 4.00 | 1,000 |"


def test_report_lists_each_stage_of_the_baseline() -> None:
    told = in_sequence.stages_in_sequence([{in_sequence.BASELINE: steps(1.0)}])
    assert told == "rollouts 0.250 s, judgements 0.250 s, micro-batches and step 0.250 s, weight sync 0.250 s"


def test_the_report_holds_every_table_and_names_no_path(tmp_path: Path) -> None:
    run = quickstart.read_run(write_run(tmp_path / "seed0"), PROCESS)
    rounds = [{way: steps(1.0) for way in in_sequence.WAYS}]
    text = "\n".join(quickstart.report([run], rounds, 0.5, ["| task=plan | 3.00 |"]))
    for label, _, _ in (*quickstart.LEARNING, *quickstart.WALL, *quickstart.STAGES):
        assert f"| {label} |" in text
    assert "../docs/learning_curve.png" in text
    assert "| task=plan | 3.00 |" in text
    assert str(tmp_path) not in text


def test_every_benchmark_is_listed_with_its_report() -> None:
    listed = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    for script in BENCHMARKS.glob("*.py"):
        assert script.name in listed
    for told in BENCHMARKS.glob("*.md"):
        assert told.name == "README.md" or f"({told.name})" in listed


def test_the_interval_leaves_out_as_many_extremes_as_95_percent_admit() -> None:
    low, high, confidence = against_commit.interval_of([1.5, 0.2, *[1.0 + 0.01 * i for i in range(8)]])
    assert (low, high) == (1.0, 1.07)
    assert confidence == pytest.approx(1 - 22 / 1024)
    assert against_commit.interval_of([1.5, 0.2, 1.0, 1.0, 1.0, 1.0]) == (0.2, 1.5, 1 - 2 / 64)


def test_a_commit_is_compared_pair_by_pair() -> None:
    def measured(step_s: float) -> against_commit.Measured:
        return against_commit.Measured(
            command_s=60.0, ready_s=8.0, ready_cpu_s=16.0, step_mean_s=step_s, step_median_s=step_s,
            step_spread=0.3, step_cpu_s=dict.fromkeys(against_commit.ROLES, 1.0), greedy=0.8, sampled=0.8,
            busy_share=0.02,
        )  # fmt: skip

    lines = against_commit.report(
        ["abc", "runs", "--steps", "24"], "abc", [(measured(0.5), measured(1.0)), (measured(3.0), measured(2.0))]
    )
    assert "| one step (mean), s | 1.750 | 1.500 | 1.000 | 0.500 to 1.500 |" in lines
