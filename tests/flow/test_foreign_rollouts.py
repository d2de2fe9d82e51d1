"""Rollouts of another trainer are judged by a judge of grmpipe, and compared with their old rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from foreign_files import NONE, QUESTION, sample, verl_rows, write_lines, write_trl

from grmpipe.cli import compose
from grmpipe.config.run_config import ConfigError
from grmpipe.data.catalogs import resolve_model
from grmpipe.models.hub import find_files
from grmpipe.models.settings import ModelConfig
from grmpipe.models.types import Message
from grmpipe.roles.find_models import load_renderer
from grmpipe.run_dir.recorded_run import open_recorded
from grmpipe.tasks import run_task

HARD = "What is 6 x 8?"
QUIET = ("cluster=inprocess", "tracking=none")


@pytest.fixture
def completions(tmp_path: Path) -> Path:
    """Two steps of TRL, by a judge that is fooled by words, and their prompts with references."""
    folder = tmp_path / "completions"
    write_trl(folder, 1, QUESTION, ["42", "It is surely 41.", "41"], judged=[0.2, 0.9, 0.0], advantage=[-0.4, 1, -0.6])
    write_trl(folder, 2, HARD, ["48", "It is surely 47.", "47"], judged=[0.2, 0.9, NONE], advantage=[-0.7, 0.7, 0.0])
    rows = [{"prompt": QUESTION.upper(), "reference": 42}, {"prompt": HARD, "reference": 48}, {"prompt": "Why?"}]
    write_lines(tmp_path / "prompts.jsonl", rows)
    return folder


def rejudge(run_dir: Path, *typed: str) -> dict[str, Any]:
    """Judge; the comparison."""
    run_task(compose(None, ["task=rejudge", f"run_dir={run_dir}", *QUIET, *typed]))
    name = next((one.partition("=")[2] for one in typed if one.startswith("rejudge.name=")), "again")
    found: dict[str, Any] = json.loads((run_dir / "rejudged" / name / "comparison.json").read_text())
    return found


def test_a_trainer_s_rewards_are_compared_with_a_rule_by_joined_references(
    completions: Path, tmp_path: Path, restored_logging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, data = tmp_path / "judged", f"data.path={tmp_path / 'prompts.jsonl'}"
    found = rejudge(run_dir, f"rejudge.path={completions}", "judge=rule", data)
    said = capsys.readouterr()
    assert (found["num_rollouts"], found["num_compared"]) == (6, 5)
    assert [one["step"] for one in found["steps"]] == [1, 2]
    assert [one["new_reward"] for one in found["steps"]] == [pytest.approx(1 / 3)] * 2
    assert [one["old_reward"] for one in found["steps"]] == pytest.approx([1.1 / 3, 0.55])
    # Step 1: the right answer is below one wrong one, above the other; step 2: below the only other one with a reward.
    assert found["overall"]["flips"]["mean"] == pytest.approx(2 / 3)
    assert [found["overall"][f"{who}_accuracy"]["mean"] for who in ("old", "new")] == pytest.approx([1 / 3, 1.0])
    assert [one["agreement"]["sign_changes"]["mean"] for one in found["steps"]] == pytest.approx([2 / 3, 1.0])
    assert "1 old rewards are failures by the file (1 judged)" in said.err
    assert "6 rollouts have one now, 0 have none there" in said.err
    assert "1 old rewards are failures" in (run_dir / "rejudged" / "again" / "figures.txt").read_text()
    old = [json.loads(line) for line in (run_dir / "judgements.jsonl").read_text().splitlines()]
    assert [line.get("failed", {}).get("detail") for line in old] == [None] * 5 + ["judged: no reward on file"]


def test_the_imported_run_is_judged_again_like_a_run_s_own_and_never_trained_on(
    completions: Path, tmp_path: Path, restored_logging: None
) -> None:
    run_dir, data = tmp_path / "judged", f"data.path={tmp_path / 'prompts.jsonl'}"
    rejudge(run_dir, f"rejudge.path={completions}", "judge=rule", data)
    journals = [(run_dir / f"{name}.jsonl").read_bytes() for name in ("rollouts", "judgements", "groups")]
    again = rejudge(run_dir, "judge=function", "judge.function=foreign_files.count_words", "rejudge.name=words")
    assert again["overall"]["rank_correlation"]["mean"] > 0.8
    second = rejudge(
        run_dir, f"rejudge.path={completions}", "judge=rule", data, "rejudge.name=2", "rejudge.steps=[2,2]"
    )
    assert [one["step"] for one in second["steps"]] == [2]
    assert journals == [(run_dir / f"{name}.jsonl").read_bytes() for name in ("rollouts", "judgements", "groups")]
    with pytest.raises(ConfigError, match="run_dir: .* holds other rollouts, or other references; type another"):
        rejudge(run_dir, f"rejudge.path={completions}", "rejudge.name=3")
    with pytest.raises(ValueError, match="without which nothing can be trained"):
        open_recorded(run_dir)


def test_what_can_not_be_compared_is_said_or_refused(
    completions: Path, tmp_path: Path, restored_logging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    new, path = tmp_path / "new", f"rejudge.path={completions}"
    with pytest.raises(ConfigError, match=r"rejudge.path: 2 of 2 prompts have no reference .*6 x 7.*type data.path="):
        rejudge(new, path, "judge=rule")
    with pytest.raises(ConfigError, match="rejudge.path: .*no such file"):
        rejudge(tmp_path / "x", "rejudge.path=nowhere.jsonl", "judge=rule")
    assert not (tmp_path / "x").exists()
    with pytest.raises(ConfigError, match="run_dir: task=rejudge .*rejudge.path=<file or folder> run_dir="):
        compose(None, ["task=rejudge", path])
    with pytest.raises(ConfigError, match="rejudge.path: give a file or folder"):
        compose(None, ["task=rejudge", f"run_dir={new}", "rejudge.reward=score"])
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.yaml").write_text((new / "config.yaml").read_text().replace(f"path: {completions}", "path: null"))
    with pytest.raises(ConfigError, match="run_dir: .*own holds a run; rejudge.path needs a run_dir of its own"):
        rejudge(own, path, "judge=rule")
    with pytest.raises(ConfigError, match="judge.kind: env judges no text"):
        rejudge(new, path, "judge=env")


def test_groups_are_the_trainer_s_own_where_it_names_them_and_failed_empty_rollouts_are_left_out(
    tmp_path: Path, restored_logging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        *verl_rows(1, QUESTION, {"42": 1.0, "41": 0.0}, uid="a"),
        *verl_rows(1, QUESTION, {"43": 0.0, "It is 42.": 1.0}, uid="b"),
        *verl_rows(2, QUESTION, {"44": 0.0}, uid="a", error="timeout"),
        *verl_rows(2, QUESTION, {"": 0.0}, uid="a", error="aborted"),
    ]
    found = rejudge(tmp_path / "run", f"rejudge.path={write_lines(tmp_path / '1.jsonl', rows)}", "judge=rule")
    said = capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert [(line["group_id"], line["sibling"]) for line in lines] == [
        ("g000000", 0), ("g000000", 1), ("g000001", 0), ("g000001", 1), ("g000002", 0),
    ]  # fmt: skip
    assert (found["num_rollouts"], found["num_compared"], found["overall"]["flips"]["mean"]) == (5, 4, 0.0)
    assert "1 old rewards are failures by the file (1 error), 1 of them stand there as 0" in said
    assert "1 rollouts failed without a response, and are left out" in said


def test_a_generative_judge_reads_the_answer_behind_the_thought(tmp_path: Path, restored_logging: None) -> None:
    rows = [
        sample("6 x 7 is 41</think>Answer: 42<|im_end|>", 1.0, step=1),
        sample("</think>Answer: 41<|im_end|>", 0.0, step=1),
    ]
    found = rejudge(tmp_path / "run", f"rejudge.path={write_lines(tmp_path / 'x.jsonl', rows)}", "judge=function",
                    "judge.function=foreign_files.count_words")  # fmt: skip
    assert found["num_compared"] == 2
    again = (tmp_path / "run" / "rejudged" / "again" / "judgements.jsonl").read_text().splitlines()
    assert [json.loads(line)["verdict"]["score"] for line in again] == [2, 2], "the words of the answers"


def test_a_prompt_that_the_policy_s_template_explains_is_found_by_its_text(
    tmp_path: Path, restored_logging: None
) -> None:
    said = (("user", "6 x 7?"), ("assistant", "41"), ("user", "No."))
    turns = [{"role": role, "content": content} for role, content in said]
    data = write_lines(tmp_path / "prompts.jsonl", [{"prompt": turns, "reference": "42"}])
    renderer = load_renderer(
        find_files(resolve_model("tiny://policy"), weights=False), ModelConfig(path="tiny://policy")
    )
    ids = renderer.render([Message(**turn) for turn in turns])
    row = {"output": "42", "gts": None, "score": 1.0, "step": 1}
    rows = [{"input": renderer.decode(ids), **row}, {"input": renderer.decode_special(ids), **row}]
    path = write_lines(tmp_path / "1.jsonl", rows)
    with pytest.raises(ConfigError, match="'user' stands 2 times .* type data.path=<their file> policy=path"):
        rejudge(tmp_path / "run", f"rejudge.path={path}", "judge=rule")
    rejudge(tmp_path / "run", f"rejudge.path={path}", "judge=rule", f"data.path={data}")
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert [line["group_id"] for line in lines] == ["g000000"] * 2
    assert [(one["role"], one["content"]) for one in lines[0]["prompt"]["messages"]] == [*said]
