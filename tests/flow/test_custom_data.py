"""A user's own prompts and own models, from files to a trained policy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from grmpipe.observe.recorder import load_rollouts
from grmpipe.tiny.problems import make_problems
from grmpipe.tiny.resolve import SHIPPED

ONE_STEP = ("train.num_steps=1", "data.num_eval_prompts=4")


def rows(count: int, first: int = 0, *, reference: bool = True) -> list[dict]:
    """Half of them have `messages`, half `prompt`; all have the same columns, as in Parquet."""
    problems = make_problems("train", first + count, seed=7)[first:]
    return [
        {
            "messages": [{"role": "user", "content": problem.question}] if index % 2 else None,
            "prompt": None if index % 2 else problem.question,
            **({"reference": str(problem.answer)} if reference else {}),
        }
        for index, problem in enumerate(problems)
    ]


def write_jsonl(path: Path, content: list[dict]) -> None:
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in content))


def texts_of(run_dir: Path) -> dict[tuple[str, int], str]:
    rollouts = [line.rollout for line in load_rollouts(run_dir / "rollouts.jsonl")]
    return {(rollout.group_id, rollout.sibling): rollout.text for rollout in rollouts}


def test_own_prompts_and_held_out_prompts_of_files_are_trained_and_measured(
    tmp_path: Path, small_run: Callable
) -> None:
    write_jsonl(tmp_path / "train.jsonl", rows(12))
    pq.write_table(pa.Table.from_pylist(rows(6, first=100)), tmp_path / "held_out.parquet")
    files = small_run(*ONE_STEP, "data.path=train.jsonl", "data.eval_path=held_out.parquet")
    assert files.summary["status"] == "completed"
    assert set(files.summary["eval"]["final"]) >= {"true_accuracy", "true_accuracy_greedy", "grm_score"}
    assert files.summary["objective"] == files.summary["eval"]["final"]["true_accuracy"]
    assert {line["prompt_id"].split(":")[0] for line in files.lines("groups")} == {"train.jsonl"}


def test_without_references_no_truth_is_claimed_and_without_held_out_prompts_no_objective(
    tmp_path: Path, small_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "bare.jsonl", rows(8, reference=False))
    files = small_run(*ONE_STEP, "data.path=bare.jsonl", "objective=eval.final.grm_score")
    assert (files.summary["status"], files.summary["objective"]) == ("completed", None)
    assert "true_accuracy" not in json.dumps(files.summary) + json.dumps(files.lines("metrics"))
    assert "no held-out prompts: nothing is evaluated, eval.final.grm_score stays null" in capsys.readouterr().err


def test_without_references_the_default_objective_is_the_judges_score(tmp_path: Path, small_run: Callable) -> None:
    write_jsonl(tmp_path / "bare.jsonl", rows(8, reference=False))
    write_jsonl(tmp_path / "held_out.jsonl", rows(4, first=50, reference=False))
    files = small_run(
        *ONE_STEP, "data.path=bare.jsonl", "data.eval_path=held_out.jsonl", "objective=eval.final.grm_score"
    )
    assert 1 <= files.summary["objective"] <= 10
    assert "true_accuracy" not in json.dumps(files.summary) + json.dumps(files.lines("metrics"))


def test_references_that_are_rubrics_train_and_claim_no_truth(tmp_path: Path, small_run: Callable) -> None:
    write_jsonl(tmp_path / "rubrics.jsonl", [row | {"reference": "It adds up."} for row in rows(8)])
    files = small_run(*ONE_STEP, "data.path=rubrics.jsonl")
    assert files.summary["status"] == "completed"
    assert not any("train/true_accuracy" in line for line in files.lines("metrics"))


def test_own_models_are_plain_directories_and_a_chat_template_of_its_own_file_is_exported_with_the_policy(
    tmp_path: Path, small_run: Callable
) -> None:
    for name in ("policy", "grm"):
        shutil.copytree(SHIPPED / name, tmp_path / name)
    settings = json.loads((tmp_path / "policy" / "tokenizer_config.json").read_text())
    (tmp_path / "chat.jinja").write_text("{# mine #}" + settings.pop("chat_template"))
    (tmp_path / "policy" / "tokenizer_config.json").write_text(json.dumps(settings))
    own = small_run(
        *ONE_STEP, "train.max_staleness=0", "policy.path=policy", "policy.chat_template=chat.jinja", "grm.path=grm",
        run_dir="own",
    )  # fmt: skip
    shipped = small_run(*ONE_STEP, "train.max_staleness=0", run_dir="shipped")
    assert texts_of(own.run_dir) == texts_of(shipped.run_dir)
    assert AutoModelForCausalLM.from_pretrained(own.run_dir / "policy").num_parameters() > 0
    assert AutoTokenizer.from_pretrained(own.run_dir / "policy").chat_template.startswith("{# mine #}")
