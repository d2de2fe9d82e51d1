"""A run that a scalar reward model judges: its scorers are started, its scores train, its mistakes are refused."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from transformers import AutoConfig, Qwen3ForSequenceClassification

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.config.io.yaml_io import build
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.models.engines.openai.openai_engine import PoolingScorer
from grmpipe.observe.budget_gate import BudgetGate, PaidAnswers
from grmpipe.observe.guard import Guard
from grmpipe.observe.judge_requests import RequestJournal
from grmpipe.observe.spending import Spending
from grmpipe.roles.find_models import find_scalar_models
from grmpipe.run.build.start_models import list_models, start_scorers
from grmpipe.run.prepare import prepare
from grmpipe.scheduler.events import NoEvents
from grmpipe.scheduler.processes.actors import InProcessCluster
from grmpipe.tasks import run_task
from grmpipe.tiny.resolve import SHIPPED

ROOT = Path(__file__).parents[2]
QUICKSTART = ("+experiment=quickstart", "cluster=inprocess", "tracking=none")
SCALAR = ("judge=scalar", "grm=tiny_reward_model")
MIXED = (
    "+grm@models.rm=tiny_reward_model", "+judge@judges.rm=scalar", "judges.rm.model=rm", "reward=mix",
    "reward.mix={judge: 0.5, rm: 0.5}",
)  # fmt: skip
REMOTE = ("grm.engine=openai", "grm.path=org/rm", "engine.openai.api_key_env=''")


def composed(*overrides: str) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(compose("config", [*QUICKSTART, *overrides]))


def test_a_policy_trains_on_the_scores_of_a_reward_model(small_run: Callable[..., Any]) -> None:
    files = small_run(*SCALAR)
    files.check_complete(groups=12)
    assert files.summary["engines_replaced"]["grm"] == 0
    assert {"true_accuracy", "grm_score", "grm_accuracy"} <= set(files.summary["eval"]["final"])
    for line in files.lines("judgements"):
        verdict = line["verdict"]
        raw_score, reward = verdict["breakdown"]["raw_score"], verdict["breakdown"]["scalar"]
        assert reward == pytest.approx(1 / (1 + math.exp(-raw_score)))
        assert verdict["score"] == pytest.approx(1 + 9 * reward) and line["judgements"] == []
    assert all("reward/raw_score_std" in line and "reward/scalar_mean" in line for line in files.steps())
    timeline = json.loads((files.run_dir / "timeline.json").read_text())
    assert "grm-0" in {event["args"]["name"] for event in timeline if event["name"] == "thread_name"}


@pytest.mark.long
def test_a_grm_and_a_reward_model_judge_a_policy_together(small_run: Callable[..., Any]) -> None:
    files = small_run(*MIXED)
    files.check_complete(groups=12)
    assert files.summary["engines_replaced"] == {"policy": 0, "grm": 0, "rm": 0}
    for step in files.steps():
        reward = (step["reward/judge_mean"] + step["reward/rm_mean"]) / 2
        assert step["train/reward"] == pytest.approx(reward, abs=1e-6)


def test_a_reward_model_is_measured_against_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_logging: None
) -> None:
    monkeypatch.chdir(tmp_path)
    run_task(
        composed(*SCALAR, "task=evaluate", "evaluate.path=tiny://judgements", "evaluate.num_items=32", "run_dir=e")
    )
    subsets = json.loads((tmp_path / "e" / "evaluation.json").read_text())["subsets"]
    told = [subsets[f"ranked/{kind}"]["judged"] for kind in ("malformed", "padded", "sloppy")]
    assert all(one["failed_share"] == 0.0 and one["accuracy"] > 0.6 for one in told)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("judge=scalar", "grm=tiny"), r"^grm\.path: .*Qwen3ForCausalLM, which has no scalar head"),
        ((*SCALAR, "judge.model=policy"), r"^judge\.model: policy is a language model"),
        ((*SCALAR, "judge.num_judgements=2"), r"^judge\.num_judgements: a scalar reward model writes no judgements"),
        ((*SCALAR, "judge.scalar.map=raw"), r"^judge\.scalar\.map: unknown value 'raw'"),
        ((*SCALAR, "rollout.max_new_tokens=600"), r"^rollout\.max_new_tokens: 600 new tokens"),
        ((*SCALAR, "grm.train.enabled=true"), r"^grm\.train\.enabled: there is no local GRM to train"),
        ((*SCALAR, "train.deterministic=true"), r"^train\.deterministic: a reward model scores together what arrives"),
        ((*SCALAR, "task=simulate"), r"^judge\.kind: task=simulate asks no scalar reward model"),
        ((*SCALAR, *REMOTE), r"^grm\.engine_options\.tokenizer: no tokenizer of 'org/rm' is here"),
        ((*SCALAR, *REMOTE[:2]), r"^engine\.openai\.api_key_env: "),
    ],
)
def test_settings_that_a_reward_model_cant_work_with_are_refused(
    overrides: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if "grm.path=org/rm" in overrides and REMOTE[2] not in overrides:
        overrides = (*overrides, f"+grm.engine_options.tokenizer={SHIPPED / 'reward_model'}")
    with pytest.raises(ConfigError, match=words):
        config = composed(*overrides)
        prepare(config)


def test_a_reward_model_with_two_labels_or_without_a_template_is_refused(tmp_path: Path) -> None:
    two, mute = tmp_path / "two", tmp_path / "mute"
    for directory in (two, mute):
        shutil.copytree(SHIPPED / "reward_model", directory)
    Qwen3ForSequenceClassification(AutoConfig.from_pretrained(two, num_labels=2)).save_pretrained(two)
    tokenizer = json.loads((mute / "tokenizer_config.json").read_text())
    del tokenizer["chat_template"]
    (mute / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for directory, words in ((two, r"^grm\.path: the head of .* has 2 outputs"), (mute, r"^grm\.chat_template: ")):
        with pytest.raises(ConfigError, match=words):
            find_scalar_models(composed(*SCALAR, f"grm.path={directory}"))


def test_a_reward_model_behind_an_endpoint_takes_no_place_and_reads_by_a_tokenizer_here(tmp_path: Path) -> None:
    tokenizer = f"+grm.engine_options.tokenizer={SHIPPED / 'reward_model'}"
    prepared = prepare(composed(*SCALAR, *REMOTE, tokenizer, "engine.openai.max_context_tokens=100"))
    assert "grm" not in prepared.placement.seats
    found = prepared.models["grm"]
    assert found.path == "org/rm" and found.context_tokens == 100

    async def connect() -> None:
        models = list_models(prepared)
        cluster = InProcessCluster(prepared.placement)
        journal, guard = RequestJournal(tmp_path), Guard()
        spending = Spending(prepared.config.prices, prepared.config.budget, journal.totals)
        budget = BudgetGate(spending, journal, PaidAnswers(tmp_path, "", guard, is_kept=False))
        await start_scorers(cluster, prepared, models, NoEvents(), budget)
        assert isinstance(models["grm"].scorer, PoolingScorer) and models["grm"].scorer_pool is None
        await models["grm"].close()

    asyncio.run(connect())
