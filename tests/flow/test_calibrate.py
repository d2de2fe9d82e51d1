"""task=calibrate from the configuration to its file, and runs that use it; and what both refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from grmpipe.config.run_config import ConfigError

RULE = ("judge=rule", "evaluate.num_items=160")
NOTHING = ("task=calibrate", "evaluate.num_items=8")


@pytest.fixture
def labels(tmp_path: Path) -> str:
    """Right and wrong; one of four that the rule passes is wrong."""
    rows = [
        {
            "prompt": f"What is 6 x {number}?", "reference": str(6 * number), "response": f"{6 * number + number % 2}",
            "right": number % 2 == 0 and number % 8 != 0,
        }
        for number in range(96)
    ]  # fmt: skip
    path = tmp_path / "labels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return f"evaluate.path={path}"


def test_a_judge_is_calibrated_and_its_file_used(
    small_run: Callable, labels: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = small_run("task=calibrate", *RULE, labels, run_dir="calibrated")
    final, file = files.summary["eval"]["final"], files.run_dir / "calibration.json"
    written = json.loads(file.read_text())
    assert written["judge"]["kind"] == "rule" and written["target"] == "right"
    assert written["measured"]["after"]["error"]["mean"] == pytest.approx(final["calibration_error"])
    assert final["calibration_error"] < final["calibration_error_before"] / 2
    assert files.lines("metrics")[-1]["eval/calibration_error"] == final["calibration_error"]
    shown = capsys.readouterr().out
    assert "reliability, calibrated" in shown and f"judge.calibration={file}" in shown
    assert "threshold: none; more than 5.0% of wrong responses get the highest reward" in shown

    used = small_run("task=evaluate", *RULE, labels, f"judge.calibration={file}", run_dir="used")
    wrong, right = written["rewards"][0], written["rewards"][-1]
    scores = {round(line["scores"]["0"], 6) for line in used.lines("judged")}
    assert scores == {round(1 + 9 * reward, 6) for reward in (wrong, right)}

    responses = tmp_path / "responses.jsonl"
    responses.write_text(json.dumps({"prompt": "6 x 7?", "reference": "42", "responses": ["42", "41"]}) + "\n")
    scoring = small_run(
        "task=score", "judge=rule", f"score.path={responses}", f"judge.calibration={file}", run_dir="scored"
    )
    verdicts = json.loads((scoring.run_dir / "verdicts.jsonl").read_text())["verdicts"]
    assert [(one["score"], one["reward"]) for one in verdicts] == [(10, right), (1, wrong)]
    first = scoring.lines("judgements")[0]["verdict"]
    assert (first["score"], first["breakdown"]) == (10, {"rule": 1.0, "calibrated": right, "uncalibrated": 1.0})

    with pytest.raises(
        ConfigError,
        match=r"judge\.calibration: .*of another judge: scale: .*here it is 0 to 10",
    ):
        small_run("task=evaluate", *RULE, labels, f"judge.calibration={file}", "judge.scale.low=0", run_dir="refused")
    with pytest.raises(ConfigError, match=r"judge\.calibration: .*of another judge: .*kind: rule was calibrated"):
        small_run(f"judge.calibration={file}", run_dir="refused")
    with pytest.raises(ConfigError, match=r"judge\.calibration: task=calibrate makes a new one"):
        small_run("task=calibrate", *RULE, labels, f"judge.calibration={file}", run_dir="refused")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("evaluate.what=policy",), "evaluate.what: task=calibrate measures a judge"),
        (("judge=turns",), "judge.calibration: turns gives a reward for each part of a response"),
        (("judge=pairwise", "calibrate.length=true"), "calibrate.length: is for rewards of single responses"),
        (
            ("+judge@judges.b=rule", "reward=mix", "reward.mix={judge: 1, b: 1}"),
            "reward.kind: task=calibrate calibrates one judge, and this reward asks judge, b",
        ),
        (("judge.calibration=",), "judge.calibration: is empty"),
        (("calibrate.false_positive_rate=2",), "calibrate.false_positive_rate: must be between 0 and 1"),
    ],
)
def test_what_cant_be_calibrated_is_refused_by_its_key(
    small_run: Callable, overrides: tuple[str, ...], told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        small_run(*NOTHING, *overrides)
    assert told in str(raised.value)
