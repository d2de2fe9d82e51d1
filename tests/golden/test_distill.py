"""Teachers: which are accepted, where they sit, and what is refused with its key and the way out."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.config.io.unused_overrides import check_typed_judges
from grmpipe.config.io.yaml_io import build
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.data.catalogs import resolve_model
from grmpipe.run.prepare import prepare

CONTEXT = r"^algorithm\.distill\.context: "
KEY = r"^algorithm\.distill\.teachers: "
ROOT = Path(__file__).parents[2]
TEACHER = ("+policy@models.teacher=tiny", "algorithm.distill.teachers={default: teacher}")


def told(text: str) -> str:
    return f"'algorithm.distill.context=\"{text}\"'".strip("'")


@pytest.fixture(autouse=True, scope="module")
def conf() -> Iterator[None]:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield


def built(*overrides: str) -> RunConfig:
    return build(compose("config", list(overrides)))


def test_a_teacher_is_served_beside_the_judge_and_sits_in_its_pool() -> None:
    config = built(*TEACHER)
    assert (config.teachers, config.served) == (("teacher",), ("policy", "grm", "teacher"))
    assert config.placement.roles["teacher"] == config.placement.roles["grm"]


def test_without_a_reward_no_judge_is_asked_and_no_model_that_judges_is_served() -> None:
    config = built(*TEACHER, "reward=none")
    assert config.served == ("policy", "teacher") and not config.judging.judges


@pytest.mark.parametrize("key", ["judge", "judge.num_judgements", "judge.limits.max_calls", "grm", "grm.train.lr"])
def test_without_a_reward_what_is_typed_for_the_judge_or_its_model_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: with reward=none .* type reward=single"):
        check_typed_judges(built(*TEACHER, "reward=none"), ["reward", key], frozenset())
    check_typed_judges(built(*TEACHER), [key], frozenset())


def test_without_a_reward_what_something_reads_may_be_typed() -> None:
    alone = built(*TEACHER, "reward=none")
    check_typed_judges(alone, ["judge.rule", "policy.path", "models.teacher.path"], frozenset())
    check_typed_judges(alone, ["grm.path"], frozenset({"grm.path"}))
    check_typed_judges(built("algorithm.distill.teachers={default: grm}", "reward=none"), ["grm.path"], frozenset())
    watched = built(*TEACHER, "reward=none", "+judge_monitor.watch={judge: 0.5}")
    check_typed_judges(watched, ["judge.num_judgements", "grm.path"], frozenset())


def test_a_model_that_judges_may_teach_too() -> None:
    assert built("algorithm.distill.teachers={default: grm}").served == ("policy", "grm")


def test_the_policy_teaches_itself_as_it_is_or_as_it_began() -> None:
    config = built("algorithm.distill.teachers={default: policy}", told("{critique}"))
    assert (config.teachers, config.served) == (("policy",), ("policy", "grm"))
    config = built("+experiment=self_distill")
    assert (config.teachers, config.served) == (("teacher",), ("policy", "grm", "teacher"))
    assert config.models["teacher"].path == config.policy.path


def test_the_source_of_a_prompt_chooses_its_teacher() -> None:
    distill = built(TEACHER[0], "algorithm.distill.teachers={math: teacher}").algorithm.distill
    assert (distill.find_teacher("math"), distill.find_teacher("chat")) == ("teacher", None)
    distill = built("algorithm.distill.teachers={math: grm, default: grm}").algorithm.distill
    assert distill.find_teacher("chat") == "grm"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("algorithm.distill.teachers={default: nobody}",), KEY + "there is no model 'nobody'; add it"),
        (("algorithm.distill.teachers={default: policy}",), KEY + "the policy itself teaches only what it reads"),
        ((*TEACHER, told("{critic}")), CONTEXT + r"unknown field \{critic\}; known are \{critique\}, \{reference\}"),
        ((*TEACHER, told("{critique")), CONTEXT + r".*expected '\}'.*; braces of the text itself are written double"),
        ((*TEACHER, told("{critique}"), "judge=listwise"), CONTEXT + r"\{critique\} is what .* about one response"),
        ((*TEACHER, told("{critique}"), "judge=turns"), CONTEXT + r"\{critique\} is what .* about one response"),
        ((*TEACHER, told("{critique}"), "reward=none"), CONTEXT + r"\{critique\} is what a generative judge writes"),
        ((*TEACHER, told("{better_answer}"), "reward=none"), CONTEXT + r"\{better_answer\} needs rewards of siblings"),
        (("algorithm.distill.teachers=teacher",), KEY + "must be sources of prompts"),
        (TEACHER[:1], r"^models\.teacher: no judge of this run asks it, and it teaches nothing; .*distill\.teachers"),
        (("reward=none",), r"^reward\.kind: none gives no rewards, and no teacher"),
        ((*TEACHER, "rollout.temperature=0.7"), r"^rollout\.temperature: teachers score at temperature 1"),
        ((*TEACHER, "algorithm=dapo"), r"^algorithm\.dynamic_sampling_batches: "),
        ((*TEACHER, "reward=none", "algorithm=reinforce_pp"), r"^algorithm\.estimator: reinforce_pp estimates from"),
        ((*TEACHER, "algorithm.distill.beta=0.5"), r"^algorithm\.distill\.top_k: .* type algorithm\.distill\.top_k=16"),
        ((*TEACHER, "algorithm.distill.form=advantage", "algorithm.distill.top_k=4"), r"^algorithm\.distill\.form: "),
        (
            (*TEACHER, "models.teacher.engine=openai"),
            r"^models\.teacher\.path: .* is a shipped tiny model; .* type the model's name at the endpoint",
        ),
        (("train.max_skipped_steps=1", "algorithm.updates_per_batch=2"), r"^train\.max_skipped_steps: an earlier"),
        (("train.max_skipped_steps=1", "algorithm=ppo", "critic=policy"), r"^train\.max_skipped_steps: a critic"),
    ],
)  # fmt: skip
def test_what_cannot_teach_or_be_skipped_is_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        built(*overrides)


def test_a_teacher_with_another_tokenizer_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "other"
    shutil.copytree(resolve_model("tiny://policy"), path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"^models\.teacher\.path: .*has a different tokenizer than the policy"):
        prepare(built(*TEACHER, f"models.teacher.path={path}"))
