"""A meta-RM is trained from labelled judgements, and weights the votes of a run. Unusable ones are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from transformers import Qwen3ForTokenClassification

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.config.io.yaml_io import build
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.models.lm.checkpoint import export_hf
from grmpipe.models.lm.scalar_head import find_head, start_scalar_head
from grmpipe.tasks import run_task
from grmpipe.tiny.resolve import resolve_model

ROOT = Path(__file__).parents[2]
SMALL_TRAINING = (
    "+experiment=train_meta_rm", "cluster=inprocess", "tracking=none", "tracking.console=false", "run_dir=trained",
    "data.num_prompts=32", "data.num_eval_prompts=32", "judge.num_judgements=2", "train.num_steps=3",
)  # fmt: skip
GUIDED = ("judge.num_judgements=4", "judge.vote=best", "judge.votes.k_meta=2", "train.num_steps=2")


def composed(*overrides: str) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(compose("config", list(overrides)))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def summary_in(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def meta_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny GRM's trunk with a new head."""
    directory, grm = tmp_path_factory.mktemp("meta"), resolve_model("tiny://grm")
    model = start_scalar_head(grm)
    find_head(model).weight.data.normal_()
    export_hf(str(directory), model, grm)
    return directory


def test_a_meta_rm_is_trained_measured_and_exported_and_its_judgements_serve_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_logging: None
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_task(composed(*SMALL_TRAINING)) is not None
    run_dir = tmp_path / "trained"
    summary, rows = summary_in(run_dir), lines(run_dir / "judgements.jsonl")
    assert summary["status"] == "completed" and summary["steps"] == summary["versions"]["meta_rm"] == 3
    assert summary["judging"]["counted"] == len(rows) > 32
    for look in ("initial", "final"):
        assert {"auc", "accuracy", "brier", "calibration_error", "vote_mean", "vote_best"} <= set(summary["eval"][look])
    assert summary["eval"]["initial"]["brier"] == 0.25  # a new head gives one half
    assert summary["objective"] == summary["eval"]["final"]["auc"]
    assert {row["split"] for row in rows} == {"train", "held_out"}
    exported = json.loads((run_dir / "meta_rm" / "config.json").read_text())
    assert exported["architectures"] == ["Qwen3ForTokenClassification"]
    again = ("run_dir=again", "meta_rm.judgements=trained/judgements.jsonl", "meta_rm.start_path=trained/meta_rm")
    run_task(composed(*SMALL_TRAINING, *again))
    looks = summary_in(tmp_path / "again")["eval"]
    assert looks["initial"]["brier"] == pytest.approx(summary["eval"]["final"]["brier"], abs=1e-6)


@pytest.mark.long
def test_a_meta_rm_guides_the_vote_of_a_run(small_run: Callable[..., Any], meta_path: Path) -> None:
    files = small_run(*GUIDED, f"meta_rm.path={meta_path}")
    assert files.summary["status"] == "completed" and files.summary["engines_replaced"]["meta_rm"] == 0
    voted = [line for line in files.lines("judgements") if "verdict" in line]
    assert {line["verdict"]["num_judgements"] for line in voted} <= {1, 2}  # the best two of four judgements
    assert max(len(line["judgements"]) for line in voted) == 4
    events = json.loads((files.run_dir / "timeline.json").read_text())
    assert "meta_rm-0" in {event["args"]["name"] for event in events if event["name"] == "thread_name"}


@pytest.mark.parametrize("vote", ["best", "weighted"])
def test_a_vote_without_its_meta_rm_is_refused(vote: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^meta_rm\.path: judge\.vote={vote} needs a meta-RM, and there is none; train"
    ):
        composed("+experiment=quickstart", f"judge.vote={vote}", "judge.num_judgements=4")


def test_a_judge_outside_shows_a_meta_rm_nothing() -> None:
    outside = ("judge.vote=best", "grm.engine=openai", "grm.path=gpt", "meta_rm.path=somewhere")
    with pytest.raises(ConfigError, match=r"^judge\.vote: best needs a meta-RM, which reads the judge's tokens"):
        composed("+experiment=quickstart", *outside)


def test_a_model_without_a_scalar_head_is_refused_by_name(tmp_path: Path, meta_path: Path) -> None:
    guided = ("+experiment=quickstart", "cluster=inprocess", "run_dir=/nowhere", *GUIDED)
    with pytest.raises(ConfigError, match=r"^meta_rm\.path: .*Qwen3ForCausalLM, which has no scalar head; give"):
        run_task(composed(*guided, "meta_rm.path=tiny://grm"))
    for_two = Qwen3ForTokenClassification.from_pretrained(meta_path).config
    for_two.num_labels = 2
    shutil.copytree(meta_path, tmp_path / "two")
    Qwen3ForTokenClassification(for_two).save_pretrained(tmp_path / "two")
    with pytest.raises(ConfigError, match=r"^meta_rm\.path: the head of .* has 2 outputs, and a scalar head has one"):
        run_task(composed(*guided, f"meta_rm.path={tmp_path / 'two'}"))


def test_another_tokenizer_than_the_grms_is_refused(tmp_path: Path, meta_path: Path) -> None:
    shutil.copytree(meta_path, tmp_path / "other")
    tokenizer = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"^meta_rm\.path: .* has a different tokenizer than grm \(tiny://grm\)"):
        run_task(composed("+experiment=quickstart", "cluster=inprocess", *GUIDED, f"meta_rm.path={tmp_path / 'other'}"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("judge=rule", r"^judge\.kind: task=train_meta_rm samples a local GRM"),
        ("resume=auto", r"^resume: task=train_meta_rm can't be resumed"),
        ("data.eval_path=null", r"^data\.eval_path: held-out labelled responses"),
        ("meta_rm.judgements=nowhere.jsonl", r"^meta_rm\.judgements: nowhere\.jsonl can't be read"),
        ("meta_rm.start_path=/nowhere", r"^meta_rm\.start_path: no directory"),
    ],
)
def test_a_meta_rm_that_cant_be_trained_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_task(composed(*SMALL_TRAINING, override))
