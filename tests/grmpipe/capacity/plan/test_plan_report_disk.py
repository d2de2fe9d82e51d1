"""The forecast of the journals' disk is near what the recorder writes for the same lengths."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.capacity.plan.plan_report import LINE_BYTES, PACKED, PLAIN, arithmetic, judgement_bytes, rollout_bytes
from grmpipe.capacity.plan.run_facts import RunFacts, collect_facts
from grmpipe.capacity.plan.work import Lengths
from grmpipe.config.io.yaml_io import build
from grmpipe.models.types import Completion, Message, VersionSpan
from grmpipe.observe.recorder import JUDGEMENTS, ROLLOUTS, Recorder
from grmpipe.types import Judgement, JudgeReport, Prompt, RewardSpan, Rollout, Turn, Verdict

ROOT = Path(__file__).parents[4]
PLAYED, ASKED = Lengths(prompt_tokens=200, new_tokens=1000), Lengths(prompt_tokens=1500, new_tokens=400)
NUM_JUDGEMENTS = 4


def ids(rng: np.random.Generator, number: float) -> tuple[int, ...]:
    """Like a text's: frequent tokens have small ids."""
    return tuple((150_000 * rng.random(int(number)) ** 3).astype(int).tolist())


def completion(rng: np.random.Generator, number: float) -> Completion:
    return Completion(
        token_ids=ids(rng, number), logprobs=tuple((-rng.exponential(0.5, int(number))).astype(np.float32).tolist()),
        text="four" * int(number), finish_reason="stop",
        versions=(VersionSpan(model="policy", version=0, start=0, end=int(number)),),
    )  # fmt: skip


@pytest.mark.parametrize("compact", [False, True])
def test_the_forecast_of_a_line_is_near_its_size(tmp_path: Path, compact: bool) -> None:
    rng = np.random.default_rng(0)
    turn = Turn(new_ids=ids(rng, PLAYED.prompt_tokens), completion=completion(rng, PLAYED.new_tokens))
    rollout = Rollout(group_id="g000000", sibling=0, turns=(turn,), status="finished")
    prompt = Prompt(prompt_id="p", messages=(Message(role="user", content="four" * 200),), reference="2")
    asked_ids = ids(rng, ASKED.prompt_tokens)
    judgements = tuple(
        Judgement(
            group_id="g000000", siblings=(0,), scores=(5.0,), prompt_ids=asked_ids,
            completion=completion(rng, ASKED.new_tokens), grm="grm", version=0,
        )
        for _ in range(NUM_JUDGEMENTS)
    )  # fmt: skip
    span = RewardSpan(turn=0, start=0, end=1000, value=0.5)
    verdict = Verdict(rewards=(span,), score=5.0, breakdown={}, score_std=0.0, num_judgements=NUM_JUDGEMENTS)
    recorder = Recorder(tmp_path, "c1448a5682ce4b21", compact=compact)
    recorder.rollout(0, prompt, rollout)
    recorder.record_verdict(rollout, JudgeReport(verdict=verdict, judgements=judgements))
    per_token, shared_by = (PACKED, NUM_JUDGEMENTS) if compact else (PLAIN, 1)
    judged = LINE_BYTES + NUM_JUDGEMENTS * judgement_bytes(ASKED, per_token, shared_by)
    assert (tmp_path / ROLLOUTS).stat().st_size == pytest.approx(rollout_bytes(PLAYED, per_token), rel=0.15)
    assert (tmp_path / JUDGEMENTS).stat().st_size == pytest.approx(judged, rel=0.15)


def surveyed(*overrides: str) -> RunFacts:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return collect_facts(build(compose("config", ["+experiment=quickstart", "task=plan", *overrides])))


def forecast(facts: RunFacts) -> str:
    (line,) = [line for line in arithmetic(facts).splitlines() if "journals:" in line]
    return line


def test_a_plan_has_one_line_on_the_disk_of_the_run() -> None:
    facts = surveyed("train.num_steps=1000")
    line = forecast(facts)
    plain, packed = (float(word) for word in line.split() if word.replace(".", "").isdigit())
    longer = forecast(facts.under(replace(facts.config, train=replace(facts.config.train, num_steps=2000))))
    assert line.endswith("GB with journals.compact=true") and 0 < packed < plain
    assert math.isclose(float(longer.split()[2]), 2 * plain, rel_tol=0.1)
    assert forecast(surveyed("train.num_steps=1000", "journals.max_gb=0.1")).endswith(
        "; journals.max_gb=0.1 stops the run"
    )
    text, share = (forecast(surveyed("train.num_steps=1000", f"journals.keep={keep}")) for keep in ("text", "0.25"))
    left = [float(line.partition("leaves ")[2].split()[0]) for line in (share, text)]
    assert 0.25 * plain < left[0] and 0 < left[1] < 0.6 * plain and "journals.keep=0.25 leaves" in share
    assert forecast(surveyed("train.num_steps=1000", "journals.compact=true")).endswith("with journals.compact=false")
