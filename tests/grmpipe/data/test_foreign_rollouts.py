"""Rollouts of other trainers: each form is recognised and read, a failure is never a reward, the rest is refused."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
import textwrap
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_files import (
    CHATML,
    NONE,
    QUESTION,
    STRIPPED,
    episode,
    sample,
    verl_rows,
    write_lines,
    write_trl,
)

from grmpipe.data.foreign_rollouts import ForeignRollout, Reading, list_files, read_foreign
from grmpipe.data.rows import Findings
from grmpipe.models.types import Message

USER = Message(role="user", content=QUESTION)
PLAIN = {"prompt": "6 x 7?", "response": "42", "reward": 1}


def read(path: Path, reward: str | None = None, reading: Reading | None = None) -> list[ForeignRollout]:
    reading = reading or Reading(findings=Findings(path), reward=reward)
    return [one for file in list_files(path)[0] for one in read_foreign(file, reading)]


def rewards(found: list[ForeignRollout]) -> list[float | str | None]:
    return [one.failure or one.reward for one in found]


def save_samples(path: Path, *samples: dict[str, Any]) -> Path:
    torch.save({"rollout_id": 5, "samples": list(samples)}, path)
    return path


def test_tables_of_trl_are_read_in_the_order_of_their_steps_and_repeated_ones_once(tmp_path: Path) -> None:
    for step in (10, 2, 3):
        scores = [1.0, NONE, 0.0] if step < 10 else [0.0, 0.5, 0.0]
        write_trl(tmp_path, step, QUESTION, ["42", "41", ""], judged=scores, advantage=[0.7, 0.0, -0.7])
    found = read(tmp_path, reading=(reading := Reading(findings=Findings(tmp_path))))
    assert [(one.step, one.reply) for one in found] == [(step, text) for step in (2, 10) for text in ("42", "41", "")]
    assert rewards(found) == [1.0, "judged: no reward on file", 0.0, 0.0, 0.5, 0.0]
    assert found[0].prompt.messages == (USER,)
    assert "1 tables are logged again" in str(reading.findings)


def test_rewards_of_several_functions_of_trl_are_summed_only_if_the_advantages_are_those_of_the_sum(
    tmp_path: Path,
) -> None:
    told: dict[str, list[object]] = {"judged": [1.0, 0.5, 0.0], "brief": [0.0, NONE, 0.3], "note": ["a", "b", "c"]}
    write_trl(tmp_path / "sum", 1, QUESTION, ["a", "b", "c"], **told, advantage=[1.0, -0.2, -0.8])
    found = read(tmp_path / "sum")
    assert rewards(found) == [1.0, "brief: no reward on file, which the sum counts as 0", 0.3]
    assert found[0].parts == {"judged": 1.0, "brief": 0.0}
    write_trl(
        tmp_path / "odd", 1, QUESTION, ["a", "b", "c"], **told, seconds=[0.0, 9.0, 0.0], advantage=[1.0, -0.2, -0.8]
    )
    with pytest.raises(ValueError, match=r"the sum of judged, brief, seconds .*type rejudge.reward="):
        read(tmp_path / "odd")
    assert rewards(read(tmp_path / "odd", "judged")) == [1.0, 0.5, 0.0]


def test_dumps_of_verl_lose_their_template_and_keep_their_groups(tmp_path: Path) -> None:
    write_lines(tmp_path / "2.jsonl", verl_rows(2, QUESTION, {"42": 1.0, "41": 0.0}, uid="ab_c_1_0"))
    found = read(tmp_path)
    assert [(one.prompt.messages, one.prompt.reference, one.group, one.step) for one in found] == [
        ((USER,), "42", "ab_c", 2), ((USER,), "42", "ab_c", 2),
    ]  # fmt: skip
    assert rewards(found) == [1.0, 0.0]


def test_an_ambiguous_prompt_of_verl_is_found_by_its_text_or_refused_with_the_way_out(tmp_path: Path) -> None:
    turns = "user\n6 x 7?\nassistant\n41\nuser\nNo.\nassistant\n"
    row = {"input": turns, "output": "42", "gts": None, "score": 1.0, "step": 1}
    path = write_lines(tmp_path / "1.jsonl", [row])
    with pytest.raises(ValueError, match=r"1.jsonl, line 1: prompt: .*'user' stands 2 times.*data.path=.*policy.path="):
        read(path)
    (found,) = read(path, reading=Reading(findings=Findings(path), find={turns: [USER]}.get))
    assert found.prompt.messages == (USER,)


def test_traces_of_verifiers_and_prime_rl_are_followed_to_their_last_leaf(tmp_path: Path) -> None:
    error = [{"type": "ProviderError", "message": "503"}]
    episodes = [
        episode(0, "42", {"correct": 1.0, "brief": 0.5}),
        episode(1, "41", {"correct": 0.0}, errors=error),  # of an attempt before the last
        episode(2, "43", {}, ok=False, errors=error),
        episode(3, "44", {}),
        episode(4, "", {"correct": 1.0}, agent={"name": "user", "trainable": False}),
    ]
    write_lines(tmp_path / "step_3" / "train" / "all" / "traces.jsonl", episodes)
    write_lines(tmp_path / "step_3" / "train" / "effective" / "traces.jsonl", episodes[:2])
    write_lines(tmp_path / "step_3" / "eval" / "all" / "traces.jsonl", episodes)
    found = read(tmp_path)
    assert rewards(found) == [1.1, 0.0, "error: ProviderError 503", "no reward on file"]
    assert [one.reward for one in found][2:] == [0, 0], "what the trainer counts for them"
    assert {(one.step, one.group, one.prompt.source, one.prompt.reference) for one in found} == {
        (3, "g7 solver", "arithmetic", "42")
    }
    assert found[0].prompt.messages == (Message(role="system", content="Be brief."), USER)
    assert found[0].reply == (
        Message(
            role="assistant",
            content="<think>\n6 x 7\n</think>\n\n"
            '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>',
        ),
        Message(role="tool", content="42"),
        Message(role="assistant", content="42"),
    )
    assert [len(files) for files in list_files(tmp_path)] == [1, 2]


def test_samples_of_slime_lose_their_end_tokens_and_failed_ones_their_reward(tmp_path: Path) -> None:
    samples = [
        sample("6 x 7</think>\n42<|im_end|>", 1.0),
        sample("4", 0.0, status="aborted"),
        sample("x", 0.0, status="truncated"),
    ]
    found = read(save_samples(tmp_path / "rollout_5.pt", *samples))
    assert [(one.reply, one.begun, one.step, one.is_truncated) for one in found] == [
        ("6 x 7</think>\n42", "<think>\n", 5, False), ("4", "<think>\n", 5, False), ("x", "<think>\n", 5, True),
    ]  # fmt: skip
    assert rewards(found) == [1.0, "status: aborted", 0.0]
    named = save_samples(tmp_path / "named.pt", sample("42", {"right": 1.0, "brief": 0.5}))
    assert rewards(read(named, "brief")) == [0.5]
    with pytest.raises(ValueError, match=r"named.pt, sample 0: reward: has right, brief; type rejudge.reward="):
        read(named)


class Harmful:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (os.environ["MADE_BY_PICKLE"],)


def test_a_pickle_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MADE_BY_PICKLE", str(made := tmp_path / "made"))
    path = save_samples(tmp_path / "1.pt", sample("42", 1.0, metadata={"mine": Harmful()}))
    with pytest.raises(ValueError, match=r"1.pt: can't be read without executing .*write its samples as JSON Lines"):
        read(path)
    assert not made.exists()


def test_plain_columns_may_have_a_group_in_a_row_and_a_reward_of_any_name(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [{"role": "user", "content": "6 x 7?"}],
            "responses": ["42", "41"],
            "rewards": [1, None],
            "global_step": 4.0,
        },
        {"prompt": CHATML.format("6 x 7?"), "responses": ["43"], "rewards": [0.5], "group_id": 9},
    ]
    found = read(write_lines(tmp_path / "lists.jsonl", rows))
    assert [(one.group, one.step, one.reply, one.failure or one.reward) for one in found] == [
        ("row 1", 4, "42", 1.0), ("row 1", 4, "41", "no reward on file"), ("9", None, "43", 0.5),
    ]  # fmt: skip
    assert {one.prompt.messages for one in found} == {(Message(role="user", content="6 x 7?"),)}
    named = write_lines(
        tmp_path / "named.jsonl", [{"prompt": "a", "response": "b", "my_score": math.nan, "reference": 3}]
    )
    assert [(one.failure, one.prompt.reference, dict(one.prompt.columns)) for one in read(named, "my_score")] == [
        ("no reward on file", "3", {})
    ]
    with pytest.raises(
        ValueError, match="has no column typo, which rejudge.reward names; it has prompt, response, reward"
    ):
        read(write_lines(tmp_path / "typo.jsonl", [PLAIN]), "typo")


def test_a_file_of_no_known_form_is_refused_with_the_two_nearest(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"input": "a", "output": "b", "gts": "c", "step": 1}])
    with pytest.raises(
        ValueError,
        match=r"no known form by its columns \(input, output, gts, step\); for verl's dump it lacks score and for",
    ):
        read(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward": "good"}, "line 2: reward: expected a number, or nothing for a failure, got 'good'"),
        ({"step": 1.5}, "line 2: step: expected a whole number from 0 on, got 1.5"),
        ({"prompt": 7}, "line 2: prompt: expected a text, or a list"),
        ({"prompt": "<|im_start|>user\nHi"}, r"line 2: prompt: a message of ChatML has no <\|im_end\|>: 'Hi'"),
        ({"response": [{"role": "user", "content": "x"}]}, "line 2: response: expected a message with role assistant"),
        ({"response": [{"role": "assistant", "content": [{"type": "image"}]}]}, r"response\[0\].content: .* images"),
        ({"response": "\ud83d"}, "line 2: response: text: half of a surrogate pair"),
    ],
)
def test_a_bad_row_is_refused_by_file_line_and_field(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(write_lines(tmp_path / "x.jsonl", [PLAIN, {**PLAIN, **change}]))
    with pytest.raises(ValueError, match="line 2: lacks response"):
        read(write_lines(tmp_path / "y.jsonl", [PLAIN, {"prompt": "a", "reward": 1}]))


# -- what the trainers' own code writes -------------------------------------------------------------------------------


def fetch_source(package: str, file: str, folder: Path) -> ast.Module:
    """A file of a package, by its own version."""
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), package], check=True)
    (wheel,) = folder.glob(f"{package.partition('=')[0]}-*.whl")
    return ast.parse(zipfile.ZipFile(wheel).read(file))


def find_function(module: ast.Module, owner: str, name: str) -> str:
    (found,) = (one for one in ast.walk(module) if isinstance(one, ast.ClassDef) and one.name == owner)
    (function,) = (one for one in found.body if isinstance(one, ast.FunctionDef) and one.name == name)
    return ast.unparse(function)


@pytest.mark.long
def test_what_verl_itself_writes_is_read(tmp_path: Path) -> None:
    source = fetch_source("verl==0.9.1", "verl/trainer/ppo/ray_trainer.py", tmp_path)
    space: dict[str, Any] = {"os": os, "json": json}
    exec(find_function(source, "RayPPOTrainer", "_write_generations"), space)
    asked, replies, scores = [STRIPPED.format(QUESTION)] * 2, ["42", "41"], [1.0, 0.0]
    space["_write_generations"](
        asked, replies, ["42"] * 2, scores, {"acc": [1, 0], "uid": ["a", "a"]}, str(tmp_path / "out"), 7
    )
    written = [json.loads(line) for line in (tmp_path / "out" / "7.jsonl").read_text().splitlines()]
    ours = verl_rows(7, QUESTION, {"42": 1.0, "41": 0.0}, uid="a")
    assert [{name: row[name] for name in ours[0]} for row in written] == ours
    assert [(one.prompt.messages, one.reward, one.step) for one in read(tmp_path / "out")] == [
        ((USER,), 1.0, 7),
        ((USER,), 0.0, 7),
    ]


@pytest.mark.long
def test_what_trl_itself_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fetch_source("trl==1.16.0", "trl/trainer/grpo_trainer.py", tmp_path)
    site = tmp_path / "site"
    needed = ["pandas", "python-dateutil", "six"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), *needed], check=True
    )
    monkeypatch.syspath_prepend(site)
    import pandas  # type: ignore[import-not-found, unused-ignore]

    class Logs:
        def log(self, logs: object, start_time: object) -> None: ...

    body = textwrap.indent(find_function(source, "GRPOTrainer", "log"), "    ")
    space = {
        "Logs": Logs, "math": math, "os": os, "pd": pandas, "is_rich_available": lambda: False,
        "strip_images_from_messages": lambda messages: messages,
    }  # fmt: skip
    exec(f"class Trainer(Logs):\n{body}", space)
    trainer: Any = space["Trainer"]()
    asked, said = (
        [[{"role": "user", "content": QUESTION}]] * 2,
        [[{"role": "assistant", "content": one}] for one in ("42", "41")],
    )
    (tmp_path / "completions").mkdir()
    vars(trainer).update(
        model=types.SimpleNamespace(training=True), _metrics={"train": {}}, log_completions=True,
        accelerator=types.SimpleNamespace(is_main_process=True), state=types.SimpleNamespace(global_step=3),
        args=types.SimpleNamespace(output_dir=str(tmp_path), report_to=[]),
        _logs={
            "prompt": asked, "completion": said, "rewards": {"judged": [0.5, math.nan]}, "images": [],
            "extra": {"judge_failed": ["", "timeout"]}, "advantages": [0.0, 0.0],
        },
    )  # fmt: skip
    trainer.log({})
    found = read(tmp_path / "completions")
    assert [(one.prompt.messages, one.reply, one.step) for one in found] == [((USER,), "42", 3), ((USER,), "41", 3)]
    assert rewards(found) == [0.5, "judge_failed: 'timeout'"]
