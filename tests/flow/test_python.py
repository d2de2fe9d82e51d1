"""Runs from Python: steps that are awaited; a run that blocks, in an event loop and beside one; files as rows and
tables; the public names and their page.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import logging
import os
import pydoc
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

import grmpipe
from grmpipe.run_dir.checkpoints import CheckpointWriter

ROOT = Path(__file__).parents[2]
SMALL = [
    "cluster=inprocess", "tracking=none", "tracking.console=false", "train.num_steps=3", "train.groups_per_batch=2",
    "train.group_size=2", "data.num_prompts=64", "data.num_eval_prompts=4", "judge_monitor.anchors=4",
    "judge_monitor.every=0",
]  # fmt: skip


def awaited(test: Callable[..., Coroutine[object, object, None]]) -> Callable[..., None]:
    return functools.wraps(test)(lambda **fixtures: asyncio.run(test(**fixtures)))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_logging: None) -> None:
    monkeypatch.chdir(tmp_path)


@awaited
async def test_between_steps_one_evaluates_and_checkpoints_and_stops_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    config = grmpipe.compose("quickstart", [*SMALL, "run_dir=run"])
    seen = []
    async with grmpipe.start(config) as run:
        with pytest.raises(RuntimeError, match="call this in the body"):
            await run.evaluate()
        async for step in run.steps():
            seen.append(step.step)
            await asyncio.sleep(0.3)
            last = list(run.files.metrics)[-1]
            assert last["step"] == step.step, "the run waits"
            assert step.metrics.items() <= last.items()
            if step.step == 1:
                evaluated = await run.evaluate()
                assert 0 <= evaluated["true_accuracy"] <= 1
                assert [*run.files.evaluations][-1] == {"step": 1} | evaluated
            if step.step == 2:
                assert await run.checkpoint() == (tmp_path / "run/checkpoints/step_2")
                await run.stop()
    assert seen == [1, 2]
    assert run.files.summary["status"] == "interrupted"
    again = grmpipe.compose("quickstart", [*SMALL, "run_dir=run", "resume=auto"])
    async with grmpipe.start(again) as run:
        assert [step.step async for step in run.steps()] == [3]
    assert run.files.summary["status"] == "completed"


@awaited
async def test_the_end_of_the_block_stops_a_run_and_an_error_of_the_user_stays_itself() -> None:
    config = grmpipe.compose("quickstart", [*SMALL, "run_dir=run"])
    with pytest.raises(KeyError, match="mine"):
        async with grmpipe.start(config) as run:
            async for _ in run.steps():
                raise KeyError("mine")
    assert run.files.summary["status"] == "interrupted"
    assert run.files.summary["steps"] == 1


@awaited
async def test_finish_runs_the_remaining_steps_and_raises_refusals() -> None:
    config = grmpipe.compose("quickstart", [*SMALL, "run_dir=run"])
    async with grmpipe.start(config) as run:
        files = await run.finish()
    assert files.summary["steps"] == 3
    with pytest.raises(grmpipe.ConfigError, match=r"^run_dir"):
        async with grmpipe.start(config):
            pass
    with pytest.raises(grmpipe.ConfigError, match="has steps to await"):
        async with grmpipe.start(grmpipe.compose("quickstart", ["task=plan"])):
            pass


@awaited
async def test_a_start_that_is_cancelled_has_ended_when_its_caller_goes_on(tmp_path: Path) -> None:
    config = grmpipe.compose("quickstart", [*SMALL, "run_dir=run", "train.num_steps=1000"])

    async def begin() -> None:
        async with grmpipe.start(config) as run:
            await run.finish()

    for delay_s in (0.0, 0.2):  # while it is checked; while it starts
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(begin(), delay_s)
        for thread in threading.enumerate():
            if thread.name == "grmpipe-run":  # its last lines
                thread.join(1)
                assert not thread.is_alive()
    async with grmpipe.start(grmpipe.compose("quickstart", [*SMALL, "run_dir=run", "resume=auto"])) as run:
        assert (await run.finish()).summary["status"] == "completed"


@awaited
async def test_a_cancelled_wait_for_the_end_ends_the_run() -> None:
    config = grmpipe.compose("quickstart", [*SMALL, "run_dir=run", "train.num_steps=1000"])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit, grmpipe.start(config) as run:
            async for _ in run.steps():
                break
            limit.reschedule(asyncio.get_running_loop().time() + 0.1)
            await run.finish()
    assert run.files.summary["status"] == "interrupted" and run.files.summary["steps"] >= 1


def test_a_run_whose_users_event_loop_is_closed_ends() -> None:
    config = grmpipe.compose("quickstart", [*SMALL, "run_dir=run"])
    loop = asyncio.new_event_loop()

    async def begin() -> grmpipe.StartedRun:
        context = grmpipe.start(config)
        run = await context.__aenter__()
        kept.append(context)  # a generator that nobody holds is closed
        async for _ in run.steps():
            break
        return run

    kept: list[object] = []
    run = loop.run_until_complete(begin())
    loop.close()
    end_s = time.monotonic() + 20
    while not run.files.summary:
        assert time.monotonic() < end_s
        time.sleep(0.05)
    assert run.files.summary["status"] == "interrupted" and run.files.summary["steps"] == 1


@awaited
async def test_checkpoints_and_evaluations_that_are_asked_for_at_once_come_one_after_the_other(tmp_path: Path) -> None:
    config = grmpipe.compose("quickstart", [*SMALL, "run_dir=run", "train.num_steps=2"])

    async def save() -> str:
        path = await run.checkpoint()
        return path.name if (path / "manifest.json").exists() else "a later one has replaced it"

    async with grmpipe.start(config) as run:
        async for step in run.steps():
            if step.step == 1:
                given_up = asyncio.ensure_future(run.checkpoint())
                await asyncio.sleep(0)
                given_up.cancel()
                asked = asyncio.gather(save(), run.evaluate(), save())
                await asyncio.sleep(0)  # the next step begins once all of it has ended
        first, evaluated, second = await asked
    assert 0 <= evaluated["true_accuracy"] <= 1
    assert [line["step"] for line in run.files.evaluations].count(1) == 1
    assert (first, second) == ("step_1.1", "step_1.2"), "that of the cancelled call was complete before"
    assert run.files.summary["status"] == "completed"


def test_a_signal_while_the_last_checkpoint_is_written_leaves_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = CheckpointWriter._publish

    async def interrupted(writer: CheckpointWriter, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        await publish(writer, *args)

    monkeypatch.setattr(CheckpointWriter, "_publish", interrupted)
    with pytest.raises(grmpipe.RunInterrupted):
        grmpipe.launch(grmpipe.compose("quickstart", [*SMALL, "run_dir=run", "train.num_steps=1"]))
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step_1"


def test_a_run_gives_its_users_process_back_as_it_was() -> None:
    mine = logging.StreamHandler()
    logging.getLogger().addHandler(mine)
    before = describe_process()
    with pytest.raises(grmpipe.ConfigError):
        grmpipe.launch(grmpipe.compose("quickstart", [*SMALL, "run_dir=run", "policy.path=nowhere"]))
    assert describe_process() == before
    short = [*SMALL, "run_dir=run", "train.num_steps=1", "train.deterministic=true"]
    asyncio.run(in_a_loop(grmpipe.compose("quickstart", short)))
    assert describe_process() == before
    logging.getLogger().removeHandler(mine)


def describe_process() -> dict[str, object]:
    loggers = [logging.getLogger(name) for name in ("", "grmpipe", "ray", "transformers", "httpx")]
    return {
        "signals": [
            signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        ],
        "logging": [(one.level, list(one.handlers), one.propagate) for one in loggers],
        "warnings": warnings.showwarning,
        "folder": Path.cwd(),
        "umask": os.umask(os.umask(0o022)),
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()),
        "loops": type(asyncio.get_event_loop_policy()),
        "garbage": gc.get_threshold(),
    }


async def in_a_loop(config: grmpipe.RunConfig) -> grmpipe.RunReader | None:
    return grmpipe.launch(config)


def test_launch_blocks_in_a_script_a_running_loop_and_a_thread(tmp_path: Path) -> None:
    overrides = [*SMALL, "train.num_steps=1"]
    script = grmpipe.launch(grmpipe.compose("quickstart", [*overrides, "run_dir=script"]))
    loop = asyncio.run(in_a_loop(grmpipe.compose("quickstart", [*overrides, "run_dir=loop"])))
    found = []
    config = grmpipe.compose("quickstart", [*overrides, "run_dir=thread"])
    thread = threading.Thread(target=lambda: found.append(grmpipe.launch(config)))
    thread.start()
    thread.join()
    for reader in (script, loop, *found):
        assert reader.summary["status"] == "completed"
    check_tables(script)


def check_tables(run: grmpipe.RunReader) -> None:
    rollouts, judgements = run.rollouts.to_arrow(), run.judgements.to_arrow()
    assert rollouts.num_rows == len(list(run.rollouts)) == judgements.num_rows == run.episodes.to_arrow().num_rows
    assert run.groups.to_arrow().column("outcome").to_pylist() == ["trained", "trained"]
    assert min(judgements.column("reward").to_pylist()) >= 0
    assert all(judgements.column("critiques").to_pylist())
    assert len(rollouts.column("answer")[0].as_py()) > 0
    (turn, *_) = run.episodes.to_arrow().to_pylist()
    assert len(turn["token_ids"]) == len(turn["logprobs"])
    assert run.metrics.to_arrow().column("step").to_pylist() == [0, 1]
    assert run.evaluations.to_arrow().column("true_accuracy").null_count == 0
    assert [batch.num_rows for batch in run.rollouts.batches(3)] == [3, rollouts.num_rows - 3]
    assert run.config.train.num_steps == 1
    trained = run.trained.to_arrow().to_pylist()
    assert sorted(map(ids_of, trained)) == sorted(map(ids_of, rollouts.to_pylist()))
    rewards = {ids_of(line): line["reward"] for line in judgements.to_pylist()}
    assert {ids_of(line): line["reward"] for line in trained} == rewards
    for known in ("step", "advantage", "right", "rollout_s", "judging_s"):
        assert all(line[known] is not None for line in trained), known
    answers, verdicts = run.eval_rollouts.to_arrow().to_pylist(), run.eval_judgements.to_arrow().to_pylist()
    assert {line["prompts"] for line in answers} == {"held_out"} and {line["step"] for line in answers} == {0, 1}
    sampled = sorted(ids_of(line) for line in answers if line["sample"] is not None)
    assert sampled == sorted(map(ids_of, verdicts)) and len(sampled) < len(answers) == len(set(map(ids_of, answers)))
    last = [line["right"] for line in answers if line["step"] == 1 and line["sample"] is not None]
    assert sum(last) / len(last) == pytest.approx(run.summary["eval"]["final"]["true_accuracy"])


def ids_of(line: dict) -> tuple[str, int]:
    return line["group_id"], line["sibling"]


def test_a_key_that_does_not_exist_and_a_missing_run_are_refused() -> None:
    with pytest.raises(grmpipe.ConfigError, match=r"unknown key 'train\.lrr'; did you mean train\.lr"):
        grmpipe.compose("quickstart", ["train.lrr=1"])
    with pytest.raises(grmpipe.ConfigError, match="policy: null chooses no file"):
        grmpipe.compose("quickstart", ["policy=null"])
    with pytest.raises(ValueError, match="there is no directory nowhere"):
        grmpipe.read_run("nowhere")


def test_the_public_names_are_few_no_subpackage_has_one_and_the_page_lists_them() -> None:
    modules = {path.stem for path in (ROOT / "grmpipe").iterdir()}
    assert len(grmpipe.__all__) <= 14
    assert not modules & set(grmpipe.__all__)
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)`", page.partition("## Rows and columns")[0], re.MULTILINE) == sorted(
        grmpipe.__all__, key=lambda name: (name[0].isupper(), name)
    )
    assert dir(grmpipe) == sorted([*grmpipe.__all__, "__version__"])
    shown = pydoc.render_doc(grmpipe, renderer=pydoc.plaintext)
    for name in grmpipe.__all__:
        assert re.search(rf"^    (class )?{name}\b", shown, re.MULTILINE), f"help(grmpipe) doesn't show {name}"
    assert "launch(config: 'RunConfig') -> 'RunReader | None'" in shown


def test_the_page_has_every_column(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    reader = grmpipe.read_run(tmp_path)
    for name in (
        "groups", "rollouts", "episodes", "judgements", "trained", "eval_rollouts", "eval_judgements", "figures",
        "judged_items",
    ):  # fmt: skip
        (row,) = re.findall(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
        assert re.findall(r"`(\w+)`", row.split("|")[3]) == getattr(reader, name).to_arrow().column_names


# -- a judge alone -----------------------------------------------------------------------------------------------------

QUESTION = "Ida has 5 coins. She finds 3 more. How many coins does Ida have?"
RIGHT, WRONG = "Steps: 5 + 3 = 8. Answer: 8", "Steps: 5 + 3 = 9. Answer: 9"


def reward_by_length(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    if "fail" in completions:
        raise RuntimeError("no")
    return [float(len(completion)) for completion in completions]


@awaited
async def test_a_judge_alone_answers_many_at_once_and_the_same_question_alike(tmp_path: Path) -> None:
    config = grmpipe.compose("quickstart", [*SMALL, "run_dir=judge"])
    async with grmpipe.start_judge(config) as judge:
        asked = (judge(QUESTION, [RIGHT, WRONG], prompt_id="one") for _ in range(3))
        first, *others = await asyncio.gather(*asked)
        assert [one.reward for one in first] == [1, 0] and [one.score for one in first] == [10, 1]
        assert first[0].critiques[0].endswith("Score: 10")
        assert others == [first, first], "by the same prompt_id, the same judgements"
        with pytest.raises(ValueError, match=r"judge: responses\[0\]: expected a text"):
            await judge(QUESTION, [3])
        cancelled = asyncio.create_task(judge(QUESTION, [RIGHT]))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    with pytest.raises(grmpipe.RunFailed, match="has ended"):
        await judge(QUESTION, [RIGHT])
    summary = grmpipe.read_run("judge").summary
    assert summary["status"] == "completed"
    assert summary["judging"]["asked"] <= 3, "equal questions at the same time are judged once"
    assert set(summary["judging"]["requests"]) == {"evaluation"}
    assert "policy" not in summary["versions"], "no policy is started"


def test_a_judge_alone_is_asked_from_threads_and_a_failure_is_no_score(tmp_path: Path) -> None:
    config = grmpipe.compose(
        overrides=[*SMALL, "judge=function", f"judge.function={__name__}.reward_by_length", "run_dir=judge"]
    )
    found: dict[int, float | None] = {}
    with grmpipe.start_judge(config) as judge:

        def ask(length: int) -> None:
            found[length] = judge.ask("any", ["x" * length])[0].reward

        threads = [threading.Thread(target=ask, args=(length,)) for length in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (failed,) = judge.ask("any", ["fail"])
    assert found == {length: length for length in range(1, 9)}
    assert failed.reward is None and failed.score is None and failed.failed and "RuntimeError: no" in failed.detail


def test_a_judge_by_a_function_imports_no_torch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport grmpipe\n"
        "def reward(prompts, completions, **columns):\n    return [1.0 for _ in completions]\n"
        "sys.modules['own'] = sys.modules['__main__']\n"
        "own = ['judge=function', 'judge.function=own.reward', 'tracking=none', 'run_dir=judge']\n"
        "config = grmpipe.compose(overrides=own)\n"
        "with grmpipe.start_judge(config) as judge:\n    assert judge.ask('q', ['a'])[0].reward == 1.0\n"
        "print({'torch', 'ray', 'transformers'} & sys.modules.keys())\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_judge_that_can_not_start_says_why(tmp_path: Path) -> None:
    config = grmpipe.compose(overrides=[*SMALL, "judge=function", "judge.function=nowhere.reward", "run_dir=judge"])
    with pytest.raises(grmpipe.ConfigError, match=r"judge\.function"), grmpipe.start_judge(config):
        pass


def test_a_file_of_responses_gets_verdicts(tmp_path: Path) -> None:
    rows = [
        {"prompt": QUESTION, "responses": [RIGHT, WRONG], "prompt_id": "one"},
        {"prompt": QUESTION, "response": [{"role": "assistant", "content": RIGHT}]},
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = ["task=score", "score.path=answers.jsonl", "run_dir=judge", "objective=eval.final.reward"]
    run = grmpipe.launch(grmpipe.compose("quickstart", [*SMALL, *task]))
    assert run is not None
    lines = [json.loads(line) for line in (run.run_dir / "verdicts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["prompt_id"] for line in lines] == ["one", "answers.jsonl:2"]
    assert [[one["score"] for one in line["verdicts"]] for line in lines] == [[10, 1], [10]]
    assert run.summary["objective"] == pytest.approx(2 / 3)
    assert run.summary["eval"]["final"] == {"responses": 3, "failed_share": 0, "reward": pytest.approx(2 / 3)}
    assert len(list(run.judgements)) == 3
    with pytest.raises(grmpipe.ConfigError, match=r"^score\.path: is null"):
        grmpipe.launch(grmpipe.compose("quickstart", [*SMALL, "task=score"]))
