"""A calibrated judge gives other rewards and says the same; its file is refused for any other judge."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from configs import judge_config

from grmpipe.config.judge import JudgeEntry
from grmpipe.judge.calibration import (
    CALIBRATED,
    UNCALIBRATED,
    CalibratedJudge,
    Calibration,
    CalibrationInUse,
    compute_log_length,
    describe_judge,
    find_difference,
    read_calibration,
)
from grmpipe.judge.composition.composed_judge import compares
from grmpipe.judge.kinds.rule import RuleJudge
from grmpipe.judge.pointwise_adapter import PointwiseAdapter, judge_group, rollout_of_text
from grmpipe.judge.prompt import find_template
from grmpipe.judge.verdict import make_failure, outcome_place
from grmpipe.types import Failed, JudgeReport, Prompt, Rollout, Verdict

HALVES = Calibration(judge={}, target="right", said=(0.0, 0.5, 1.0), rewards=(0.1, 0.3, 0.7))


class Scripted:
    """A judge whose reports are known."""

    def __init__(self, *reports: JudgeReport) -> None:
        self.reports = reports

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        return self.reports[rollout.sibling]


def verdict(rollout: Rollout, *rewards: float, score: float = 5.5) -> Verdict:
    place = outcome_place(rollout)
    spans = tuple(replace(place, value=reward) for reward in rewards)
    return Verdict(rewards=spans, score=score, breakdown={"generative": 0.5}, score_std=1.5, num_judgements=4)


def judge_texts(
    bench: Any, calibration: Calibration, texts: list[str], make: Callable[[Rollout], Verdict | Failed]
) -> list[Verdict | Failed]:
    rollouts = [rollout_of_text("g", sibling, text) for sibling, text in enumerate(texts)]
    judge = PointwiseAdapter(Scripted(*(JudgeReport(verdict=make(one)) for one in rollouts)))
    calibrated = CalibratedJudge(judge, CalibrationInUse(calibration), thoughts=False)
    return [one.verdict for one in asyncio.run(judge_group(calibrated, bench.prompt(), rollouts))]


def test_a_calibrated_judge_changes_rewards_and_keeps_what_it_said(bench: Any) -> None:
    (found,) = judge_texts(bench, HALVES, ["42"], lambda rollout: verdict(rollout, 0.75))
    assert isinstance(found, Verdict)
    assert found.outcome == pytest.approx(0.5)
    assert (found.score, found.score_std, found.num_judgements) == (5.5, 1.5, 4)
    assert found.breakdown == {
        "generative": 0.5,
        CALIBRATED: pytest.approx(0.5),
        UNCALIBRATED: 0.75,
    }


def test_beyond_its_knots_the_map_is_constant() -> None:
    assert [HALVES.to_reward(said, 0.0) for said in (-3, 0.25, 7)] == pytest.approx([0.1, 0.2, 0.7])


def test_a_failed_verdict_stays_failed(bench: Any) -> None:
    failure = make_failure("unparseable", "hm", 2)
    assert judge_texts(bench, HALVES, ["42"], lambda rollout: failure) == [failure]


def test_rewards_of_several_parts_are_no_calibrated_reward(bench: Any) -> None:
    (found,) = judge_texts(bench, HALVES, ["42"], lambda rollout: verdict(rollout, 0.25, 0.5))
    assert isinstance(found, Failed) and found.cause == "broken"
    assert "can't calibrate the 2 of this verdict" in found.detail


def test_longer_responses_lose_what_the_length_term_says(bench: Any) -> None:
    by_length = msgspec.structs.replace(HALVES, length_slope=0.2, length_mean=compute_log_length("x" * 20))
    short, usual, long = judge_texts(
        bench, by_length, ["x", "x" * 20, "x" * 200], lambda rollout: verdict(rollout, 0.75)
    )
    rewards = [one.outcome for one in (short, usual, long) if isinstance(one, Verdict)]
    assert rewards[0] > rewards[1] == pytest.approx(0.5) and rewards[1] > rewards[2]


def test_a_calibrated_judge_of_single_responses_compares_nothing() -> None:
    rule = judge_config(kind="rule")
    judge = PointwiseAdapter(RuleJudge("exact_answer", rule.scale, "judge"))
    assert not compares(CalibratedJudge(judge, CalibrationInUse(HALVES), thoughts=False), rule)


def test_each_pair_is_calibrated_by_its_share_of_the_votes(bench: Any, tmp_path: Path) -> None:
    """3 of 4 votes are for the first response: its reward is their probability, and its score stays what was won."""
    path = tmp_path / "calibration.json"
    shares = Calibration(judge={}, target="better", said=(0.0, 0.25, 0.75, 1.0), rewards=(0.1, 0.4, 0.6, 0.9))
    path.write_bytes(msgspec.json.encode(shares))

    def author(asked: str, context: Any) -> Any:
        votes_for_first = {"j0": "7, 3", "j1": "3, 7", "j2": "3, 7", "j3": "3, 7"}
        name = context.request_id.rpartition("/")[2].partition(".")[0]
        return bench.answer("So.\n\\boxed{" + votes_for_first[name] + "}")

    pairwise: Mapping[str, Any] = {
        "protocol": "pairwise", "template": "pairwise", "parser": "boxed", "vote": "majority", "num_judgements": 4,
    }  # fmt: skip
    rollouts = [bench.rollout("a", 0), bench.rollout("b", 1)]
    judge, _ = bench.generative(author, **pairwise, calibration=str(path))
    reports = bench.run(judge_group(judge, bench.prompt(), rollouts))
    assert [one.verdict.outcome for one in reports] == pytest.approx([0.6, 0.4])
    assert [one.verdict.score for one in reports] == [10, 1]
    plain, _ = bench.generative(author, **pairwise)
    assert [one.verdict.outcome for one in bench.run(judge_group(plain, bench.prompt(), rollouts))] == [1.0, 0.0]


# -- whose calibration it is -----------------------------------------------------------------------------------------


def describe(tmp_path: Path, **settings: Any) -> dict[str, str]:
    return describe_judge(judge_config(**settings), "org/judge", str(tmp_path / "model"), None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"w" * 1000)
    return folder


def test_another_judge_is_told_by_what_differs(model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    shutil.copy(find_template("template", "pointwise"), own)
    before = describe(tmp_path, template=str(own), num_judgements=4)
    calibration = replace_judge(before)
    assert not find_difference(calibration, describe(tmp_path, template=str(own), num_judgements=4))

    votes = find_difference(calibration, describe(tmp_path, template=str(own), num_judgements=2))
    assert votes == "num_judgements: 4 was calibrated, and here it is 2"
    greedy = find_difference(calibration, describe(tmp_path, template=str(own), temperature=0.5, num_judgements=4))
    assert greedy == "temperature: the default was calibrated, and here it is 0.5"
    scale = find_difference(calibration, describe(tmp_path, template=str(own), num_judgements=4, score_max=5))
    assert "scale: 1 to 10 was calibrated, and here it is 1 to 5" in scale

    own.write_text(own.read_text().replace("question", "question", 1) + "\nBe strict.\n")
    changed = find_difference(calibration, describe(tmp_path, template=str(own), num_judgements=4))
    assert changed.startswith("template: own.jinja (xxh3 of a prompt ") and changed.count(";") == 0


def test_other_weights_of_the_same_size_are_another_judge(model: Path, tmp_path: Path) -> None:
    calibration = replace_judge(describe(tmp_path))
    (model / "model.safetensors").write_bytes(b"w" * 999 + b"v")
    assert find_difference(calibration, describe(tmp_path)).startswith("model: judge (xxh3 of its files ")


def test_what_changes_no_score_is_the_same_judge(model: Path, tmp_path: Path) -> None:
    calibration = replace_judge(describe(tmp_path, temperature=1))
    named = JudgeEntry.of(judge_config(max_retries=3, timeout_s=99.0, temperature=1.0), "second")
    assert not find_difference(calibration, describe_judge(named, "org/judge", str(model), None))


def test_options_of_a_users_judge_are_hashed() -> None:
    custom = judge_config(kind="custom", target="mylab.Judge", options={"key": "hunter2-hunter2"})
    described = describe_judge(custom, None, None, None)
    assert "hunter2" not in str(described)
    other = judge_config(kind="custom", target="mylab.Judge", options={"key": "other"})
    assert "custom.options" in find_difference(replace_judge(described), describe_judge(other, None, None, None))


def replace_judge(described: dict[str, str]) -> Calibration:
    return msgspec.structs.replace(HALVES, judge=described)


def test_a_file_that_is_no_calibration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: .*; give calibration\.json of a run of task=calibrate"):
        read_calibration(str(tmp_path / "none.json"))
    path = tmp_path / "torn.json"
    path.write_text(json.dumps({"judge": {}, "target": "right", "said": [0.0]}))
    with pytest.raises(ValueError, match=r"torn\.json: Object missing required field `rewards`"):
        read_calibration(str(path))
