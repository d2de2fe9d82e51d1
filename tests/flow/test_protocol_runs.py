"""Whole runs in which the tiny GRM stops early, is held to a form, or can't be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from grmpipe.config import ConfigError


def test_a_relaxed_early_stop_saves_tokens_and_says_what_it_costs(small_run: Callable) -> None:
    """Two groups of the first batch tell how noisy the judge is; from then on it may stop."""
    files = small_run(
        "train.num_steps=2",
        "judge.num_judgements=6",
        "judge.early_stop.kind=relaxed",
        "judge.early_stop.audit_share=0.3",
    )
    judging = files.summary["judging"]
    assert judging["saved_by_early_stop"] > 0
    assert 0 <= judging["early_stop_error"] < 9
    assert judging["counted"] < 6 * 2 * 16
    assert sum(step.get("judge/saved_tokens", 0) for step in files.steps()) == judging["saved_by_early_stop"]


def test_judgements_held_to_their_form_are_never_unparseable(small_run: Callable) -> None:
    files = small_run("train.num_steps=1", "judge.structured=true", "judge.temperature=2.0", "judge.reasks=0")
    failed = files.summary["judging"]["failed"]
    assert files.summary["judging"]["counted"] > 0
    assert failed.get("unparseable", 0) == failed.get("refused", 0) == 0


def test_a_grm_whose_answers_cannot_be_read_ends_before_the_first_step(small_run: Callable, tmp_path: Path) -> None:
    template = tmp_path / "boxed.jinja"
    template.write_text("Q: {{ question }}\nA:\n{{ response }}")
    with pytest.raises(ConfigError, match=r"^judge\.parser: boxed could read none of \d+ dry judgements"):
        small_run(f"judge.template={template}", "judge.parser=boxed", "judge.max_new_tokens=64")
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not (tmp_path / "run" / "metrics.jsonl").read_text()
