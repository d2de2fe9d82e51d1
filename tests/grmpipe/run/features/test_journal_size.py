"""The size of the journals: thinning in a process of its own while the run goes on, and the limit that stops a run."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grmpipe.config.journals import JournalsConfig
from grmpipe.models.types import Completion, VersionSpan
from grmpipe.observe.recorder import ROLLOUTS, Recorder, load_rollouts
from grmpipe.pipeline.interfaces import PipelineState
from grmpipe.run.features import journal_size
from grmpipe.run.features.journal_size import JournalSize
from grmpipe.run_dir.checkpoints import Checkpoints
from grmpipe.run_dir.run_state import RunState
from grmpipe.types import GroupEnd, Prompt, Rollout, Turn


class Flow:
    interrupted = False

    def interrupt(self) -> None:
        self.interrupted = True


def write(recorder: Recorder, *indices: int) -> None:
    spans = (VersionSpan(model="policy", version=0, start=0, end=100),)
    completion = Completion(
        token_ids=(7,) * 100, logprobs=(-0.5,) * 100, text="x", finish_reason="stop", versions=spans
    )
    turn = Turn(new_ids=(1, 2), completion=completion)
    for index in indices:
        name = f"g{index:06}"
        recorder.rollout(
            index,
            Prompt(prompt_id="p", messages=()),
            Rollout(group_id=name, sibling=0, turns=(turn,), status="finished"),
        )
        recorder.group_ended(GroupEnd(group_id=name, prompt_index=index, prompt_id="p", outcome="trained", step=1))


def checkpointed(run_dir: Path) -> Recorder:
    recorder = Recorder(run_dir)
    write(recorder, *range(20))
    state = RunState(pipeline_state=PipelineState(version=1), journal_marks=recorder.marks())
    checkpoints = Checkpoints(directory=run_dir / "checkpoints", keep=1)
    checkpoints.publish(checkpoints.draft(1), state, [])
    return recorder


def step(flow: Flow) -> Any:
    return SimpleNamespace(step=1, is_last=False, pipeline=flow)


def thinned(run_dir: Path) -> int:
    return sum(bool(line.thinned) for line in load_rollouts(run_dir / ROLLOUTS))


def test_a_step_goes_on_while_journals_are_thinned_and_what_is_written_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_size, "LEAST_BYTES", 1)
    recorder = checkpointed(tmp_path)
    (tmp_path / "rollouts.jsonl.thin").write_text("of a killed process")

    async def run() -> None:
        feature = JournalSize(tmp_path, JournalsConfig(keep="text"), 0, recorder)
        await feature.after_step(step(Flow()))
        assert thinned(tmp_path) == 0, "the step doesn't wait"
        write(recorder, 20, 21)
        await feature.finish()
        write(recorder, 22)
        await feature.close()

    asyncio.run(run())
    assert thinned(tmp_path) == 19 and len(list(load_rollouts(tmp_path / ROLLOUTS))) == 23
    assert not list(tmp_path.glob("*.thin"))


def test_a_process_that_fails_leaves_the_journals_whole_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = checkpointed(tmp_path)
    path = tmp_path / ROLLOUTS
    path.write_bytes(path.read_bytes().replace(b"g000000", b"g99"))  # its first line is damaged
    before = path.read_bytes()

    async def run() -> None:
        feature = JournalSize(tmp_path, JournalsConfig(keep="text"), 0, recorder)
        await feature.finish()
        monkeypatch.setattr(sys, "executable", "none")
        await feature.finish()  # not tried again

    asyncio.run(run())
    assert path.read_bytes() == before
    assert [record.message[:60] for record in caplog.records] == [
        "journals.keep: the journals stay whole from now on: they can'"[:60]
    ]


def test_a_run_stops_within_a_step_once_its_journals_are_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_size, "LOOK_EVERY_S", 0.01)
    recorder, flow = checkpointed(tmp_path), Flow()
    limit = journal_size.measure_gb(tmp_path) * 1.5

    async def run() -> str:
        feature = JournalSize(tmp_path, JournalsConfig(max_gb=limit), 0, recorder)
        await feature.after_step(step(flow))
        assert not feature.stopped
        write(recorder, *range(20, 60))
        async with asyncio.timeout(20):
            while not flow.interrupted:
                await asyncio.sleep(0.01)
        await feature.close()
        return feature.stopped

    assert "the run stopped within step 2, with a checkpoint" in asyncio.run(run())


def test_a_run_above_its_limit_goes_on_if_thinning_makes_enough_room(tmp_path: Path) -> None:
    recorder, flow = checkpointed(tmp_path), Flow()
    limit = journal_size.measure_gb(tmp_path) * 0.8

    async def run() -> None:
        feature = JournalSize(tmp_path, JournalsConfig(max_gb=limit, keep="text"), 0, recorder)
        await feature.after_step(step(flow))
        await feature.close()

    asyncio.run(run())
    assert not flow.interrupted and thinned(tmp_path) == 19


def test_the_journals_of_a_cotrained_judge_count(tmp_path: Path) -> None:
    write(Recorder(tmp_path / "cotrain" / "grm"), 0)
    assert journal_size.measure_gb(tmp_path) * 1e9 > 1000
