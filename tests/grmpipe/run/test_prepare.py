"""Checks before anything starts: models, windows, data. Tests of refusals are in tests/flow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from grmpipe.capacity.plan.run_facts import collect_facts
from grmpipe.config.io.key_errors import section
from grmpipe.config.io.yaml_io import build_config
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.judge.context_limits import longest_response
from grmpipe.roles.find_models import find_model
from grmpipe.roles.roles import resolve_roles
from grmpipe.run.prepare import check_objective, prepare
from grmpipe.run.run_prompts import load_stored_tasks, read_data
from grmpipe.scheduler.placement import Placement
from grmpipe.tiny.resolve import SHIPPED

PLACES = {
    "pools": {"all": {"slots": 1}},
    "roles": {"policy": {"pool": "all"}, "learner": {"pool": "all"}, "grm": {"pool": "all"}},
}
WITH_GRM_LEARNER = {**PLACES, "roles": {**PLACES["roles"], "grm_learner": {"pool": "all"}}}


def config(**sections: object) -> RunConfig:
    return build_config({"cluster": {"kind": "inprocess"}, "placement": PLACES, **sections})


def test_the_defaults_are_a_run_that_may_start() -> None:
    prepared = prepare(config(data={"num_prompts": 20, "num_eval_prompts": 5}))
    assert (len(prepared.prompts), len(prepared.held_out)) == (20, 5)
    assert list(prepared.models) == ["policy", "grm"]
    assert prepared.policy.path == str(SHIPPED / "policy")
    assert prepared.policy.context_tokens == prepared.policy.renderer.context_tokens == 512


def test_a_run_judged_by_a_rule_has_no_grm() -> None:
    prepared = prepare(config(judge={"kind": "rule"}, data={"num_prompts": 20}))
    assert list(prepared.models) == ["policy"]
    assert set(prepared.placement.seats) == {"policy", "learner"}


@pytest.mark.parametrize("from_step", [0, 3])
def test_prompts_know_their_step_where_a_criterion_begins_at_one(tmp_path: Path, from_step: int) -> None:
    row = {"reference": "7", "rubric": ["It is short.", {"text": "It is kind.", "from_step": from_step}]}
    rows = [{"prompt": f"What is {number} x 7?", **row} for number in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(tmp_path / "prompts.jsonl"), "eval_path": None}
    prepared = prepare(config(judge={"kind": "rule"}, data=data, train={"groups_per_batch": 2}))
    assert [prepared.prompts.at(index).step for index in (0, 1, 2, 9)] == ([1, 1, 2, 5] if from_step else [None] * 4)


PAIRS = {"protocol": "pairwise", "vote": "majority", "num_judgements": 2, "max_new_tokens": 60}
RANKING = {"template": "nemotron_genrm_json", "parser": "ranking_field", "scale": {"high": 6}}


def test_a_judge_whose_format_has_no_system_message_is_refused_for_prompts_with_one(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    rows = [
        {"messages": [*talk, {"role": "user", "content": f"What is {number} x 7?"}], "reference": str(number * 7)}
        for number in range(4)
    ]
    rows[2]["messages"].insert(0, {"role": "system", "content": "Be kind."})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(tmp_path / "prompts.jsonl")}
    train = {"groups_per_batch": 1}
    with pytest.raises(ConfigError, match=r"^judge\.template .*nemotron_genrm_json.*prompts.*role system.*leave such"):
        prepare(config(judge={**PAIRS, **RANKING}, data=data, train=train))


def test_demonstrations_whose_roles_the_policys_template_does_not_take_are_refused(tmp_path: Path) -> None:
    template = tmp_path / "users_only.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{{ m.content }}</s>{% endfor %}"
    )
    rows = [[{"role": role, "content": role} for role in roles] for roles in (("user",), ("system", "user"))]
    shown = tmp_path / "shown.jsonl"
    shown.write_text("".join(json.dumps({"prompt": row, "completion": "4"}) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"^algorithm\.sft\.path: .*no system message"):
        prepare(config(policy={"chat_template": str(template)}, algorithm={"sft": {"path": str(shown)}}))


def test_the_engines_window_counts_where_it_is_smaller_than_the_models() -> None:
    prepared = prepare(config(engine={"embedded": {"max_context_tokens": 400}}))
    assert [model.context_tokens for model in prepared.generating] == [400, 400]


TOOLS = {"kind": "tools", "functions": "grmpipe.tiny.tools"}


def test_a_judges_window_must_hold_an_episode_with_its_observations_unless_it_is_cut() -> None:
    tools = {"rollout": {"max_turns": 4, "max_new_tokens": 16}, "data": {"num_prompts": 20}}
    said = r"^judge\.max_new_tokens: .*env\.max_observation_chars.* exceed the 512 .*judge\.format\.truncation=middle$"
    with pytest.raises(ConfigError, match=said):
        prepare(config(env=TOOLS, **tools))
    prepare(config(env=TOOLS | {"max_observation_chars": 40}, **tools))
    prepare(config(env=TOOLS, judge={"format": {"truncation": "middle"}}, **tools))
    long = {"format": {"truncation": "middle"}, "max_new_tokens": 1000, "limits": {"min_tokens_per_s": 100.0}}
    with pytest.raises(ConfigError, match=r"without any of the response, .*; type judge\.max_new_tokens=\d+ or less$"):
        prepare(config(env=TOOLS, judge=long, **tools))


def test_a_reward_models_window_must_hold_an_episode_with_its_observations() -> None:
    scalar = {
        "grm": {"path": "tiny://reward_model"},
        "judge": {"kind": "scalar"},
        "rollout": {"max_turns": 4, "max_new_tokens": 16},
        "data": {"num_prompts": 20},
    }
    said = r"^rollout\.max_new_tokens: .* exceed the 512 tokens of grm; .*env\.max_observation_chars"
    with pytest.raises(ConfigError, match=said):
        prepare(config(env=TOOLS, **scalar))
    prepare(config(env=TOOLS | {"max_observation_chars": 40}, **scalar))


def test_the_longest_response_is_an_answer_or_an_episode_within_the_policys_window() -> None:
    rollout = {"max_turns": 4, "max_new_tokens": 16}
    single, episodes = config(rollout=rollout), config(rollout=rollout, env=TOOLS | {"max_observation_chars": 41})
    assert longest_response(single.rollout, single.env, 512) == 16
    for policy_tokens, longest in ((512, 4 * 16 + 3 * 11), (0, 4 * 16 + 3 * 11), (90, 90)):
        assert longest_response(episodes.rollout, episodes.env, policy_tokens) == longest


def test_machines_of_a_joined_cluster_go_by_the_hub_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their caches are not ours; only this machine loads what it found."""
    monkeypatch.setattr("grmpipe.roles.find_models.find_files", lambda path, weights: str(SHIPPED / "policy"))
    for cluster, path in (({"address": "10.0.0.1:6379"}, "Some/Model"), ({}, str(SHIPPED / "policy"))):
        run = config(policy={"path": "Some/Model"}, cluster=cluster)
        found = find_model(resolve_roles(run, Placement(pools={}, seats={})).served["policy"], run.cluster)
        assert found.path == path


NO_CHAT = "{{ raise_exception('this model has no chat') }}"
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages[-1].content }}"
)


@pytest.mark.parametrize("role", ["policy", "grm"])
@pytest.mark.parametrize(
    ("template", "said"), [(NO_CHAT, "this model has no chat"), ("{{ 1 / 0 }}", "division by zero")]
)
def test_a_chat_template_that_raises_is_refused_by_its_key(tmp_path: Path, role: str, template: str, said: str) -> None:
    (tmp_path / "raises.jinja").write_text(template)
    run = config(**{role: {"chat_template": str(tmp_path / "raises.jinja")}})
    served = resolve_roles(run, Placement(pools={}, seats={})).served[role]
    with pytest.raises(ConfigError, match=rf"^{role}\.chat_template: it can't render a conversation of .*: {said}$"):
        find_model(served, run.cluster)


def test_a_chat_template_without_a_system_role_is_refused_only_for_prompts_with_one(tmp_path: Path) -> None:
    (tmp_path / "user.jinja").write_text(NO_SYSTEM)
    policy = {"chat_template": str(tmp_path / "user.jinja")}
    talk = [{"role": "user", "content": "6 x 7?"}]
    for name, messages in (("user", talk), ("system", [{"role": "system", "content": "Be brief."}, *talk])):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": messages, "reference": 42}) + "\n")
    for name in ("user", "system"):
        data = {"path": str(tmp_path / f"{name}.jsonl"), "eval_path": None}
        run = config(policy=policy, judge={"kind": "rule"}, data=data, train={"groups_per_batch": 1})
        if name == "user":
            prepare(run)
            continue
        with pytest.raises(ConfigError, match=r"^policy\.chat_template: .* of system, user: no system role$"):
            prepare(run)


def test_held_out_prompts_are_not_trained(tmp_path: Path) -> None:
    for name, numbers in (("train", range(20)), ("held_out", range(15, 40))):
        rows = [{"prompt": f"{number} + 1?", "reference": number + 1} for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = {"path": str(tmp_path / "train.jsonl"), "eval_path": str(tmp_path / "held_out.jsonl")}
    data = read_data(config(data={**paths, "num_eval_prompts": 10}))
    assert (len(data.train), len(data.held_out)) == (15, 10)
    assert not {prompt.messages for prompt in data.train} & {prompt.messages for prompt in data.held_out}


def test_references_that_the_rule_of_the_truth_cannot_read_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"{number}?", "reference": "Rome" if number % 2 else number} for number in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(tmp_path / "train.jsonl"), "eval_path": None}
    read_data(config(data=data))
    (told,) = [one for one in caplog.messages if one.startswith("true accuracy: ")]
    assert "the rule exact_answer can't read the references of 10 of 20 prompts" in told
    assert "train.jsonl, line 2: reference 'Rome' isn't one number" in told and "judge.rule=contains_reference" in told
    caplog.clear()
    read_data(config(data=data, judge={"rule": "contains_reference"}))
    assert not [one for one in caplog.messages if "true accuracy" in one]


def test_a_held_out_prompt_in_another_case_or_spacing_is_not_trained(tmp_path: Path) -> None:
    questions = {"train": ("WHAT is 6 x 7?\n", "What  is\t6 x 7?", "What is 6 x 8?"), "held_out": ("What is 6 x 7?",)}
    for name, asked in questions.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    paths = {"path": str(tmp_path / "train.jsonl"), "eval_path": str(tmp_path / "held_out.jsonl")}
    data = read_data(config(data={**paths}, train={"groups_per_batch": 1}))
    assert [prompt.messages[0].content for prompt in data.train] == ["What is 6 x 8?"]


def test_the_accuracy_of_each_of_several_judges_may_be_the_objective() -> None:
    two = {"judges": {"exact": {"kind": "rule"}}, "reward": {"kind": "jury", "members": ["judge", "exact"]}}
    check_objective(config(objective="eval.final.exact_accuracy", **two))
    with pytest.raises(ConfigError, match=r"^objective: .* did you mean eval\.final\.exact_accuracy\?"):
        check_objective(config(objective="eval.final.exakt_accuracy", **two))
    alone = {"judges": {"exact": {"kind": "rule"}}, "reward": {"judge": "exact"}}
    with pytest.raises(ConfigError, match=r"^objective: "):
        check_objective(config(objective="eval.final.exact_accuracy", **alone))


def test_a_route_for_a_source_that_no_prompt_has_is_refused() -> None:
    route = {"kind": "route", "route": {"arithmetc": "judge"}, "default": "judge"}
    with pytest.raises(
        ConfigError, match=r"^reward\.route\.arithmetc: no prompt of .* has this source; known: tiny://"
    ):
        read_data(config(reward=route))


def test_stored_judging_tasks_about_held_out_prompts_are_not_learnt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held_out = ["What is 6 x 7?"]
    rows = [{"prompt": text, "response": "42", "score": 8} for text in ("what is 6 x 7? ", "What is 6 x 8?")]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in held_out))
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    learning = config(
        data={"eval_path": str(tmp_path / "held_out.jsonl"), "num_prompts": 20},
        grm={"train": {"enabled": True, "data_path": str(tmp_path / "labels.jsonl")}},
    )
    judging_tasks = load_stored_tasks(learning, "grm", read_data(learning))
    assert judging_tasks is not None and len(judging_tasks) == 1
    assert "1 judging tasks of" in caplog.text
    (tmp_path / "labels.jsonl").write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(ConfigError, match=r"^grm\.train\.data_path: every prompt of .* is also in data\.eval_path"):
        load_stored_tasks(learning, "grm", read_data(learning))


@pytest.mark.parametrize("column", [{}, {"prompt_id": "mine"}])
def test_a_reference_that_the_rule_cannot_read_is_refused_by_file_and_line(
    tmp_path: Path, column: dict[str, str]
) -> None:
    rows = [{"prompt": "1?", "reference": 1}, {"prompt": "2?", "reference": "(3, 9)", **column}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    for key, data in (("path", {"path": str(path)}), ("eval_path", {"eval_path": str(path), "num_prompts": 20})):
        with pytest.raises(
            ConfigError, match=rf"^data\.{key}: .*prompts\.jsonl, line 3: reference '\(3, 9\)' isn't one"
        ):
            read_data(config(judge={"kind": "rule"}, data=data))


def test_a_rule_without_its_library_is_refused_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grmpipe.judge.kinds.math_rule.is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r'^judge\.rule: math_verify needs .*; type pip install "grmpipe\[math\]"'):
        prepare(config(judge={"kind": "rule", "rule": "math_verify"}))


def test_own_prompts_are_not_evaluated_on_tiny_problems(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "What is 6 x 7?"}\n')
    assert read_data(config(data={"path": str(tmp_path / "train.jsonl")})).held_out == ()


def test_a_section_puts_its_key_in_front_once() -> None:
    for said, told in (("path: no", "data.path: no"), ("data.path: no", "data.path: no")):
        with pytest.raises(ConfigError, match=f"^{told}$"), section("data."):
            raise ValueError(said)


def hybrid(directory: Path) -> str:
    """The shipped policy's tokenizer next to the config of a model whose first layer is a convolution."""
    shutil.copytree(SHIPPED / "policy", directory)
    told = json.loads((directory / "config.json").read_text())
    layers = ["conv", *["full_attention"] * (told["num_hidden_layers"] - 1)]
    (directory / "config.json").write_text(json.dumps(told | {"model_type": "lfm2", "layer_types": layers}))
    return str(directory)


@pytest.mark.parametrize("check", [prepare, collect_facts], ids=["train", "plan and simulate"])
def test_a_model_that_packed_samples_leak_through_is_refused_where_it_learns(
    tmp_path: Path, check: Callable[[RunConfig], object]
) -> None:
    path = hybrid(tmp_path / "hybrid")
    data = {"num_prompts": 20, "num_eval_prompts": 5}
    with pytest.raises(ConfigError, match=r"^policy\.path: .*conv.*can be trained"):
        check(config(data=data, policy={"path": path}, judge={"kind": "rule"}))
    check(config(data=data, grm={"path": path}))  # it judges, and doesn't learn
    learns = {"enabled": True, "data_path": "tiny://judgements"}
    with pytest.raises(ConfigError, match=r"^grm\.path: .*conv.*can be trained"):
        check(config(data=data, grm={"path": path, "train": learns}, placement=WITH_GRM_LEARNER))


def routed(tmp_path: Path, **reward: object) -> RunConfig:
    """Two kinds of prompts; those of mathematics have references for a rule."""
    rows = [{"prompt": f"What is {n} + 1?", "reference": n + 1, "source": "math"} for n in range(9)]
    rows += [{"prompt": f"Name {n} trees.", "source": "chat"} for n in range(9)]
    path = tmp_path / "both.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    judges = {"exact": {"kind": "rule"}}
    return config(data={"path": str(path), "eval_path": None}, judges=judges, reward={"kind": "route", **reward})


def test_a_rule_needs_references_only_of_the_prompts_that_a_route_sends_to_it(tmp_path: Path) -> None:
    assert len(read_data(routed(tmp_path, route={"math": "exact"}, default="judge")).train) == 18
    with pytest.raises(ConfigError, match=r"^data\.path: .*line 10: the prompt has no reference"):
        read_data(routed(tmp_path, route={"math": "judge"}, default="exact"))


def test_a_source_that_no_route_judges_is_refused_before_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^reward\.route: no judge for .* 'chat'; .*reward\.default=judge"):
        read_data(routed(tmp_path, route={"math": "exact", "poems": "judge"}))
