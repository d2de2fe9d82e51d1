"""Configuration as a user meets it: every mistake is found before anything starts, and names its key."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from configs import judge_config, run_config
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from grmpipe.cli import main
from grmpipe.config.io.key_errors import ELSEWHERE, explain, list_keys, unknown_key
from grmpipe.config.io.resume_rules import find_changed_keys
from grmpipe.config.io.yaml_io import build, build_config, read_yaml, to_yaml
from grmpipe.config.run_config import ConfigError
from grmpipe.roles.role_placement import check_deadlines

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def conf() -> Iterator[None]:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield


def told(*overrides: str) -> str:
    """The message of launch.py for these overrides, without a separate process."""
    try:
        build(compose("config", list(overrides)))
    except ConfigError as error:
        return str(error)
    except HydraException as error:
        return explain(error)
    raise AssertionError(f"{overrides} is no mistake")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lrr=3", "unknown key 'train.lrr'; did you mean train.lr"),
        ("+experiment=quikstart", "quickstart"),
        ("train.lr=[", "no viable alternative"),
        ("grm=null", "grm: null chooses no file of conf/grm; leave it out, or type one of them"),
        ("rollout.group_deadline_s=1", "rollout.group_deadline_s: 1 s is less than"),
    ],
)
def test_a_mistake_exits_2_with_one_message_and_no_traceback(
    override: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["launch.py", override])
    assert main() == 2
    said = capsys.readouterr()
    assert message in said.err and said.out == ""
    assert "Traceback" not in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir()), "nothing may be written before the configuration is right"


def test_a_mistake_is_the_exit_code_of_the_process(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), "task=deploy"], cwd=tmp_path, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("grmpipe: task: unknown task 'deploy'; known: train, ")
    assert len(result.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["group_size=4"], "did you mean train.group_size or grm.train.group_size?"),
        (["+train.extra=1"], "unknown key 'train.extra'; train has num_steps, groups_per_batch, group_size, "),
        (["+judge_monitor.limits.x={above: 1}"],
         "judge_monitor.limits has no x; to add one type '+judge_monitor.limits={x: {above: 1}}'"),
        (["+models.s=tiny_weak"], "models.s: models has no s; to add one type +grm@models.s=tiny_weak"),
        (["+models={s: tiny_weak}"], "models: has no such entry; to add one type +grm@models.s=tiny_weak"),
        (["+models.s.path=x"], "models.s: models has no s; to add one type '+models={s: {path: x}}'"),
        (["judge.model=models.s"],
         "there is no model 'models.s'; type one of policy, grm, or add it by +grm@models.s=path"),
        (["+grm@grms.s=tiny_weak"], "unknown key 'grms'; type models"),
        (["grm@grms.s=tiny_weak"], "unknown key 'grm@grms.s'; type grm@models.s"),
        (["judge.examples.path=x"], "unknown key 'judge.examples.path': it was removed; write examples into"),
        (["grms.s.path=x"], "unknown key 'grms.s.path'; type models.s.path"),
        (["cotrain.enabled=true"], "unknown key 'cotrain.enabled'; type grm.train.enabled"),
        (["cotrains.s.lr=1"], "unknown key 'cotrains.s.lr'; type models.s.train.lr"),
        (["+cotrains={s: {lr: 1}}"], "unknown key 'cotrains'; type models.<name>.train"),
        (["tracking.wandb_mode=offline"], "unknown key 'tracking.wandb_mode'; did you mean tracking.wandb.mode?"),
        (["algorithm.icepop_low=0.4"], "unknown key 'algorithm.icepop_low'; did you mean algorithm.icepop.low?"),
        (["judge.timeout_s=9"], "unknown key 'judge.timeout_s'; did you mean judge.limits.timeout_s?"),
        (
            ["tracking.project=mine"],
            "unknown key 'tracking.project'; did you mean tracking.wandb.project or tracking.trackio.project or",
        ),
        (["tracking.wandb.mode=disabled"], "tracking.wandb.mode: unknown mode 'disabled'; known: auto, online"),
        (["tracking.trackers=[comet]"], "tracking.trackers: unknown value 'comet'; known: wandb, tensorboard, mlflow"),
        (["judge.model=x.grm"], "there is no model 'x.grm'; type one of policy, grm"),
        (["train.lr=fast"], "train.lr: Value 'fast' of type 'str' could not be converted to Float"),
        (["train.lr=-1"], "train.lr: must be above 0, got -1.0"),
        (["train.group_size=1"], "train.group_size: must be at least 2"),
        (["judge=strict"], "generative"),
        (["policy.engine=vllmm"], "policy.engine: unknown engine 'vllmm'; known: embedded"),
        (["task=trian"], "task: unknown task 'trian'"),
        (["placement.pools.train.slots=0"], "placement.pools.train.slots: must be at least 1"),
        (["~placement.roles.grm_learner", "placement.roles.grm_learner.pool=all"],
         "placement.roles.grm_learner: placement.roles has no grm_learner; "
         "to add one type '+placement.roles={grm_learner: {pool: all}}'"),
        (["~placement.roles.critic", "+placement.roles.critic={pool: train}"],
         "placement.roles has no critic; to add one type '+placement.roles={critic: {pool: train}}'"),
        (["placement.pools={rollout: {slots: 2}}"],
         "placement.pools: has no such entry; to add one type '+placement.pools={rollout: {slots: 2}}'"),
        (["placement.roles.critik.pool=train"], "did you mean placement.roles.critic?"),
        (["+placement.roles={critik: {pool: train}}"], "placement.roles.critik: there is no such role; known: policy"),
        (["placement.pools.train.slot=2"], "did you mean placement.pools.train.slots?"),
        (["placement.roles.grm=judging"], "type placement.roles.grm.pool=judging"),
        (["policy.engine_options.x=2"], "policy.engine_options doesn't have it; to add it type +policy."),
        (["engine.vllm.tensor_parallel_size=2"], "; engine.vllm has max_batch_rows, max_context_tokens, "),
        (["zyx=1"], "unknown key 'zyx'; see docs/configuration.md"),
        (["rollout.n=8"], "unknown key 'rollout.n'; did you mean train.group_size?"),
        (["max_completion_length=8"], "unknown key 'max_completion_length'; did you mean rollout.max_new_tokens?"),
        (["trian.lr=1"], "unknown key 'trian.lr'; did you mean train.lr or "),
        (["judge=pointwize"], "judge: there is no 'pointwize'; did you mean pointwise? There are arena_hard, "),
        (["algorithm=[dapo,tis]"], "algorithm: there is no 'tis'"),
        (["policy=Qwen/Qwen3-8B"], "for your own type policy=path policy.path=Qwen/Qwen3-8B"),
        (["+algorithm=gspo"], "algorithm: is already chosen; to choose another type algorithm=gspo, without +"),
        (["experiment=mine"], "to choose mine type +experiment=mine, to name the run experiment_name=mine"),
        (["+experiment=mine"], "walk; to name the run type experiment_name=mine"),
        (["quickstart"], "quickstart: is not of the form key=value, as +experiment=quickstart is"),
        (["data path=x"], "data path=x: is not of the form key=value, as +experiment=quickstart is"),
        (["evaluate.prompts={a: x=1}"], "evaluate.prompts: {a: x=1} can't be read (no viable alternative at input"),
        (["engine.openai.api_key=a=b"], "engine.openai.api_key: its value holds characters that Hydra reads as its "),
        (["train.lr=1e-4,3e-4"], "add --multirun"),
        (["data.path=${nope}"], "data.path: Interpolation key 'nope' not found"),
    ],
)  # fmt: skip
def test_mistake_is_reported_with_what_to_type_instead(conf: None, overrides: list[str], message: str) -> None:
    said = told(*overrides)
    assert message in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("path", ["a=b", "a#b", "a(1)", "a[1]", "a{1}", "it's", 'a"b', "Übung", "~/a", 'a\\"b=\\'])
def test_a_path_that_must_be_quoted_is_named_with_what_to_type(conf: None, path: str) -> None:
    said = told(f"data.path={path}")
    assert said.startswith(f"data.path: {path} holds characters that ")
    (typed,) = shlex.split(said.partition("the shell: ")[2])
    assert build(compose("config", [typed])).data.path == path


def test_no_key_has_the_name_of_a_group_which_would_take_what_is_typed_for_it() -> None:
    groups = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()}
    known = list_keys()
    single = {key for key in known if not any(other.startswith(f"{key}.") for other in known)}
    assert not groups & single


def test_a_run_of_a_recipe_can_have_a_name_of_its_own(conf: None) -> None:
    assert build(compose("config", ["+experiment=quickstart", "experiment_name=mine"])).experiment_name == "mine"


@pytest.mark.parametrize("pool", ["train", "nowhere"])
def test_the_advice_for_a_role_that_the_placement_lacks_can_be_typed(conf: None, pool: str) -> None:
    lacking = ("~placement.roles.grm_learner", "+experiment=cotrain", f"placement.roles.grm_learner.pool={pool}")
    (advice,) = re.findall(r"type '([^']+)'", told(*lacking))
    assert build(compose("config", [*lacking[:2], advice])).placement.roles["grm_learner"].pool == pool


def test_the_nearest_key_is_named_across_sections() -> None:
    assert "train.group_size" in unknown_key("rollout.group_size", list_keys())
    assert "did you mean" not in unknown_key("qqqqqqq", list_keys())
    assert "did you mean" not in unknown_key("batch_size", list_keys()), "nothing that merely looks alike"
    for typed, meant in {
        "algorithm.drop_zero_advantage": "algorithm.dynamic_sampling_batches",  # by what its sentence says
        "algorithm.clip_hihg": "algorithm.clip_high",
        "train.group_per_batch": "train.groups_per_batch",
        "rollout.max_tokens": "rollout.max_new_tokens",
    }.items():
        assert unknown_key(typed, list_keys()).startswith(f"unknown key {typed!r}; did you mean {meant}")


def test_an_error_of_a_section_gets_the_sections_key() -> None:
    with pytest.raises(ConfigError, match=r"^train\.schedule: unknown value 'step'"):
        build_config({"train": {"schedule": "step"}})
    with pytest.raises(ConfigError, match=r"^placement\.pools\.a\.slots: must be at least 1"):
        build_config({"placement": {"pools": {"a": {"slots": 0}}}})


def test_a_configuration_survives_its_file(tmp_path: Path) -> None:
    config = build_config(
        {
            "train": {"lr": 1e-5, "optimizer": {"betas": [0.8, 0.9]}},
            "placement": {"pools": {"a": {"slots": 2}}},
            "seed": 3,
        },
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_yaml(tmp_path / "config.yaml") == config


def test_a_judgement_of_every_shipped_judge_times_out_before_its_group() -> None:
    for path in sorted((ROOT / "conf" / "judge").glob("*.yaml")):
        judge = yaml.safe_load(path.read_text(encoding="utf-8"))
        config = build_config({"judge": {**judge, "function": "mine.reward"}})
        check_deadlines(config)
        assert config.main_judge.limits.timeout_s < config.rollout.group_deadline_s, path


def test_what_other_frameworks_call_a_key_leads_to_one_that_there_is() -> None:
    assert set(ELSEWHERE.values()) <= {*list_keys()}
    for typed, ours in {
        "custom_reward_function.path": "judge.function",
        "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coefficient",
        "actor_rollout_ref.model.path": "policy.path",
        "reward_model.model.path": "grm.path",
        "actor_rollout_ref.rollout.name": "engine.kind",
        "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
        "gconfig.n_samples": "train.group_size",
        "model.name": "policy.path",
    }.items():
        assert unknown_key(typed, list_keys(typed)) == f"unknown key {typed!r}; did you mean {ours}?"


def test_a_judge_that_outlasts_the_deadline_of_a_group_is_refused_with_both_keys() -> None:
    slow = {"judge": {"limits": {"timeout_s": 300.0}}, "rollout": {"group_deadline_s": 300.0}}
    with pytest.raises(
        ConfigError, match=r"^judge\.limits\.timeout_s: 300 s .* type rollout\.group_deadline_s=306\.4 or more"
    ):
        check_deadlines(build_config(slow))
    check_deadlines(build_config({**slow, "judge": {"limits": {"timeout_s": 300.0}, "kind": "rule"}}))


def test_judges_that_are_asked_one_after_the_other_must_end_together_before_the_deadline_of_a_group() -> None:
    def check(kind: dict[str, object], deadline_s: float) -> None:
        judges = {"cheap": {}, "exact": {"kind": "rule"}}
        nested = {"both": {"kind": "mix", "mix": {"cheap": 1, "exact": 1}}}
        parts = {"judges": judges, "rewards": nested, "reward": kind, "rollout": {"group_deadline_s": deadline_s}}
        check_deadlines(build_config(parts))

    cascade = {"kind": "cascade", "first": "both", "then": "judge", "unsure_band": [0.3, 0.7]}
    check(cascade, 241.0)
    with pytest.raises(
        ConfigError, match=r"^judges\.cheap\.limits\.timeout_s \+ judge\.limits\.timeout_s: 240 s isn't below"
    ):
        check(cascade, 240.0)
    with pytest.raises(ConfigError, match=r"type rollout\.group_deadline_s=246\.4 or more"):
        check({"kind": "gate", "gate": "judge", "inner": "both"}, 125.0)
    check({"kind": "jury", "members": ["judge", "both"]}, 125.0)  # at the same time


def test_only_a_judge_that_writes_has_a_timeout_by_its_tokens() -> None:
    scalar = {"kind": "scalar", "model": "grm"}
    assert judge_config(**scalar, timeout_s=5.0).limits.timeout_s == 5.0
    with pytest.raises(
        ConfigError, match=r"^limits\.timeout_s: 5 s is less than max_new_tokens / limits\.min_tokens_per_s = 16 s"
    ):
        judge_config(timeout_s=5.0)
    with pytest.raises(ConfigError, match=r"^limits\.timeout_s: must be a number above 0"):
        judge_config(**scalar, timeout_s=0.0)


def test_a_run_of_other_deadlines_is_resumed() -> None:
    """It was begun with the deadlines of another release, for example."""
    old = build_config({"judge": {"limits": {"timeout_s": 120.0}}, "rollout": {"group_deadline_s": 120.0}})
    assert find_changed_keys(old, run_config()) == []


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "a/b", "/tmp", "", "../up"])
def test_an_experiment_names_a_folder_under_runs_and_no_other(name: str) -> None:
    with pytest.raises(ValueError, match=r"^experiment_name: may hold letters"):
        run_config(experiment_name=name)
    assert run_config(experiment_name="v1.2-a_b").experiment_name == "v1.2-a_b"


def test_an_empty_run_dir_is_refused_and_not_the_current_directory() -> None:
    """As `run_dir=$DIR` is where the variable isn't set."""
    with pytest.raises(ValueError, match=r"^run_dir: is empty; give a directory, or type run_dir=null"):
        run_config(run_dir="")


def test_only_keys_that_change_the_training_forbid_a_resume() -> None:
    old = run_config()
    assert find_changed_keys(old, build_config({"resume": "auto", "cluster": {"kind": "inprocess"}})) == []
    assert find_changed_keys(old, build_config({"rollout": {"temperature": 0.5}})) == [
        "rollout.temperature: 1.0 -> 0.5"
    ]
