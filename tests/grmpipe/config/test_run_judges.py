"""Judges and models that judge, by name: how a user adds them, what is refused, and which places they take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.config.io.key_errors import explain
from grmpipe.config.io.resume_rules import changes_on_resume, find_changed_keys, free_on_resume
from grmpipe.config.io.yaml_io import build, build_config, read_yaml, to_yaml
from grmpipe.config.keys.entry_names import check_names
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.evaluation.held_out import EVAL_METRICS
from grmpipe.roles.roles import Roles, resolve_roles
from grmpipe.scheduler.placement import place

ROOT = Path(__file__).parents[3]
TWO_MODELS = ("+grm@models.weak=tiny_weak", "+judge@judges.second=generative", "judges.second.model=weak")
MIXED = ("reward=mix", "reward.mix={judge: 0.7, second: 0.3}")


@pytest.fixture(autouse=True, scope="module")
def conf() -> Iterator[None]:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield


def built(*overrides: str) -> RunConfig:
    return build(compose("config", list(overrides)))


def refused(*overrides: str) -> str:
    try:
        built(*overrides)
    except ConfigError as error:
        return str(error)
    except HydraException as error:
        return explain(error)
    raise AssertionError(f"{overrides} is accepted")


def roles_of(config: RunConfig) -> Roles:
    return resolve_roles(config, place(config.placement, config.roles, config.served, config.learners))


def test_a_run_with_one_judge_needs_no_names() -> None:
    config = built()
    assert (list(config.judging.judges), config.judging.roles, config.served) == (
        ["judge"],
        ("grm",),
        ("policy", "grm"),
    )


def test_a_second_judge_and_its_model_come_from_the_same_groups() -> None:
    config = built(*TWO_MODELS, *MIXED)
    assert list(config.judging.judges) == ["judge", "second"]
    assert config.served == ("policy", "grm", "weak")
    assert config.models["weak"].path == "tiny://weak_grm"
    assert list(config.judging.select_asking("weak")) == ["second"]


def test_a_model_that_judges_may_be_called_teacher() -> None:
    assert built("+grm@models.teacher=tiny_weak", "judge.model=teacher").judging.roles == ("teacher",)


def test_a_model_without_an_engine_of_its_own_has_that_of_all() -> None:
    config = built(*TWO_MODELS, *MIXED, "engine=vllm", "grm.engine=embedded")
    assert {role: model.engine for role, model in config.models.items()} == {
        "policy": "vllm", "grm": "embedded", "weak": "vllm",
    }  # fmt: skip


def test_a_model_without_a_place_shares_that_of_the_first_one() -> None:
    roles = roles_of(built(*TWO_MODELS, *MIXED))
    assert roles["weak"].pool == roles["grm"].pool == "judging"
    alone = roles_of(built(*TWO_MODELS, *MIXED, "+placement.roles={weak: {pool: train}}"))
    assert (alone["weak"].pool, alone["grm"].pool) == ("train", "judging")


def test_a_place_can_be_that_of_another_role_by_interpolation() -> None:
    config = built(*TWO_MODELS, *MIXED, "+placement.roles.weak=${placement.roles.policy}")
    assert config.placement.roles["weak"] == config.placement.roles["policy"]


def test_two_judges_on_one_model_share_its_engines() -> None:
    config = built("+judge@judges.second=generative", "judges.second.temperature=0.5", *MIXED)
    assert config.served == ("policy", "grm")
    assert list(config.judging.select_asking("grm")) == ["judge", "second"]


def test_a_reward_by_another_judge_leaves_the_first_model_without_a_place() -> None:
    config = built(*TWO_MODELS, "reward.judge=second")
    assert config.roles == ("policy", "learner", "weak")


def test_every_model_that_judges_may_learn_with_a_learner_of_its_own() -> None:
    config = built(*TWO_MODELS, *MIXED, "grm.train.enabled=true", "models.weak.train={enabled: true, lr: 1e-4}")
    assert config.learners == {"policy": "learner", "grm": "grm_learner", "weak": "weak_learner"}
    assert roles_of(config)["weak_learner"].pool == roles_of(config)["grm_learner"].pool
    assert config.trained_grms["weak"].lr == 1e-4


def test_a_written_configuration_reads_back_the_same(tmp_path: Path) -> None:
    config = built(*TWO_MODELS, *MIXED, "models.weak.train={enabled: true}")
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert read_yaml(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((*TWO_MODELS[:2], "judges.second.model=wek", *MIXED), "judges.second.model: there is no model 'wek'; type "),
        (TWO_MODELS, "judges.second: the reward doesn't use it; type reward=mix"),
        (("+grm@models.weak=tiny_weak",), "models.weak: no judge of this run asks it, and it teaches nothing; type "),
        (("+grm@models.learner=tiny",), "models.learner: the name is taken"),
        (("+grm@models.a_learner=tiny",), "models.a_learner: the name is taken"),
        (("+judge@judges.judge=rule",), "judges.judge: the first one has a section of its own; type judge.<key>="),
        (("judges.judge.vote=mean",), "judges.judge: the first one has a section of its own; type judge.vote=mean"),
        (("+grm@models.grm=tiny",), "models.grm: the first one has a section of its own; type grm.<key>=<value>"),
        (("+reward@rewards.reward=mix",), "rewards.reward: the first one has a section of its own; type reward.<key>"),
        (("+grm@models.weak=tiny_weak", "models.weak.train.rollout_share=0"), "type models.weak.train.rollout_share=1"),
        (("+judge@judges.true=rule", "reward.judge='true'"), "judges.true: the name is taken"),
        (("+grm@models.train=tiny",), "models.train: the name is taken"),
        ((*TWO_MODELS, *MIXED, "judges.second.parser=boxed"), "judges.second.parser: boxed can't read the format of"),
        ((*TWO_MODELS, *MIXED, "judges.second.parser=boxed"), "type judges.second.parser=score_line"),
        ((*TWO_MODELS, *MIXED, "models.weak.engine=openai"), "models.weak.path: tiny://weak_grm is a shipped tiny"),
        ((*TWO_MODELS, *MIXED, "models.weak.engin=vllm"),
         "unknown key 'models.weak.engin'; did you mean models.weak.engine"),
        ((*TWO_MODELS, *MIXED, "models.week.train={enabled: true}"), "models.week: models has no week; to add one"),
        (("reward.judge=second",), "reward: there is no judge or composition 'second'; known: judge"),
        (("+placement.roles={grmm: {pool: train}}",), "placement.roles.grmm: there is no such role; known: policy,"),
        ((*TWO_MODELS, *MIXED, "judge=label", "task=train_judge_rft"), "judge.kind: label is for a judge in"),
    ],
)  # fmt: skip
def test_a_mistake_names_the_key_of_the_member_and_the_way_out(overrides: tuple[str, ...], message: str) -> None:
    assert message in refused(*overrides)


def test_a_pool_that_does_not_exist_is_named_by_the_role() -> None:
    config = built(*TWO_MODELS, *MIXED, "+placement.roles={weak: {pool: nowhere}}")
    with pytest.raises(ValueError, match=r"^placement\.roles\.weak\.pool: unknown pool 'nowhere'"):
        roles_of(config)


def test_a_tensor_parallel_place_is_not_shared_without_being_asked() -> None:
    config = build_config(
        {
            "models": {"weak": {"path": "tiny://weak_grm"}},
            "judges": {"second": {"model": "weak"}},
            "reward": {"kind": "mix", "mix": {"judge": 1, "second": 1}},
            "placement": {
                "pools": {"train": {"slots": 1}, "judging": {"slots": 2}},
                "roles": {
                    "policy": {"pool": "train"}, "learner": {"pool": "train"},
                    "grm": {"pool": "judging", "slots_per_replica": 2},
                },
            },
        },
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^placement\.roles\.(grm|weak)\.slots_per_replica: .* can't share them"):
        roles_of(config)


def test_resume_may_change_the_same_keys_of_every_judge_and_model() -> None:
    assert free_on_resume("judges.second.limits.timeout_s") and not free_on_resume("judges.second.template")
    assert free_on_resume("models.weak.engine") and not free_on_resume("models.weak.path")
    assert free_on_resume("models.weak.train.lr") and not free_on_resume("models.weak.train.group_size")
    assert not free_on_resume("reward.mix.judge") and not free_on_resume("rewards.style.members")
    old, new = built(*TWO_MODELS, *MIXED), built(*TWO_MODELS, *MIXED, "judges.second.limits.timeout_s=100")
    assert find_changed_keys(old, new) == []
    assert [change.key for change in changes_on_resume(old, new)] == ["judges.second.limits.timeout_s"]


def test_a_jury_that_weighs_by_accuracy_needs_a_score_that_passes() -> None:
    """Without one no accuracy is measured, and the vote is a mean."""
    jury = ("+judge@judges.exact=rule", "reward=jury", "reward.members=[judge,exact]", "judge.scale.high=5")
    said = refused(*jury, "reward.vote=accuracy")
    assert "data.labels.pass_score: must be above judge.scale.low = 1 and at most judge.scale.high = 5, got 8" in said
    built(*jury, "reward.vote=accuracy", "data.labels.pass_score=4")
    built(*jury, "reward.vote=mean")
    nested = ("+judge@judges.exact=rule", "+judge@judges.short=rule", "+reward@rewards.style=jury", "judge=prometheus2",
              "rewards.style.members=[judge,exact]", "rewards.style.vote=accuracy", "reward=mix")  # fmt: skip
    assert "data.labels.pass_score" in refused(*nested, "reward.mix={style: 1, short: 1}")


def test_a_jury_cannot_weigh_by_an_accuracy_that_no_evaluation_measures() -> None:
    pair = ("+judge@judges.pair=pairwise", "reward=jury", "reward.members=[judge,pair]", "reward.vote=accuracy")
    assert "reward.vote: accuracy is measured on single held-out answers, and pair compares" in refused(*pair)
    built(*pair[:-1])


def test_no_judge_can_be_called_so_that_its_accuracy_is_another_metric() -> None:
    taken = {name.removesuffix("_accuracy") for name in EVAL_METRICS if name.endswith("_accuracy")}
    assert taken == {"true", "grm"}
    for name in taken:
        with pytest.raises(ValueError, match=rf"^judges\.{name}: the name is taken"):
            check_names("judges", [name])


def test_settings_of_all_judges_together_are_refused_for_one_of_them() -> None:
    assert "did you mean judge_monitor.anchors" in refused(*TWO_MODELS, *MIXED, "judges.second.anchors=3")


def test_a_model_may_be_asked_only_about_prompts_that_a_route_sends_to_its_judges() -> None:
    routed = built(*TWO_MODELS, "reward=route", "reward.route={chat: second}", "reward.default=judge")
    assert [routed.may_ask(role, source) for role in ("grm", "weak") for source in ("chat", "math")] == [
        False, True, True, False,
    ]  # fmt: skip
    mixed = built(*TWO_MODELS, *MIXED)
    assert mixed.may_ask("grm", "chat") and mixed.may_ask("weak", "chat")
    assert not mixed.may_ask("policy", "chat")


def test_a_composition_in_vain_is_refused_in_a_run_and_not_where_one_of_them_is_measured() -> None:
    unused = (*TWO_MODELS, *MIXED, "+reward@rewards.style=jury", "rewards.style.members=[judge]")
    assert refused(*unused).startswith("rewards.style: the reward doesn't use it")
    assert built(*unused, "task=evaluate").rewards.entries.keys() == {"reward", "style"}


@pytest.mark.parametrize(
    "key", ["models.weak.engine_options.base_url", "models.weak.chat_template_kwargs.enable_thinking"]
)
def test_a_key_of_a_member_that_is_there_needs_only_a_plus(key: str) -> None:
    section = key.rpartition(".")[0]
    assert refused(*TWO_MODELS, f"{key}=1") == f"{key}: {section} doesn't have it; to add it type +{key}=..."
    absent = key.replace("weak", "far")
    assert refused(*TWO_MODELS, f"{absent}=1").startswith(
        "models.far: models has no far; to add one type '+models={far: "
    )
