"""A thinking budget that can't be kept is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import in_blocks

from grmpipe.config.io.yaml_io import build_config
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.run_config import ConfigError
from grmpipe.judge.context_limits import check_template
from grmpipe.judge.parse import Form
from grmpipe.run.prepare import Prepared, prepare

JUDGE_TEMPLATES = Path(__file__).parents[3] / "grmpipe" / "judge" / "templates"
SCORES = Form(line=lambda number, scale, num_scores: f"Scores?: {number}", num_scores=1)
ARROW = Form(line=lambda number, scale, num_scores: f"=> {number}", num_scores=1)
WITHOUT_GROUP = Form(line=lambda number, scale, num_scores: "Score: [0-9]", num_scores=1)

ROLES = {role: {"pool": "all"} for role in ("policy", "learner", "grm")}
PLACES = {"pools": {"all": {"slots": 1}}, "roles": ROLES}
TEMPLATES = Path(__file__).parents[2] / "models" / "chat" / "templates"


def prepared(grm: dict[str, object], **judge: object) -> Prepared:
    values = {"cluster": {"kind": "inprocess"}, "placement": PLACES, "data": {"num_prompts": 5, "num_eval_prompts": 2}}
    if "engine" in grm:
        values["placement"] = {
            "pools": PLACES["pools"],
            "roles": {"policy": {"pool": "all"}, "learner": {"pool": "all"}},
        }
    judge = {"thinking_tokens": 40, **judge}
    config = build_config({**values, "grm": {"path": "tiny://grm", **grm}, "judge": in_blocks(judge)})
    return prepare(config)


def test_a_model_without_markers_has_no_budget() -> None:
    with pytest.raises(
        ConfigError, match=r"^judge\.thinking\.budget_tokens: .* type judge\.thinking\.budget_tokens=null .*grm\.think"
    ):
        prepared({})


def test_declared_markers_or_a_template_of_a_reasoning_model_will_do() -> None:
    for grm in (
        {"thinking_markers": ["<think>", "</think>"]},
        {"chat_template": str(TEMPLATES / "qwen3.jinja")},
        {"chat_template": str(TEMPLATES / "deepseek_r1.jinja")},
    ):
        markers = prepared(grm).models["grm"].renderer.thinking
        assert markers is not None and markers.in_prompt == ("deepseek" in str(grm))


def test_note_tells_how_to_think_with_a_template_without_thoughts() -> None:
    silent = {"chat_template": str(TEMPLATES / "qwen3.jinja"), "chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(
        ConfigError, match=r"^judge\.thinking\.budget_tokens: .* type grm\.chat_template_kwargs\.enable_think"
    ):
        prepared(silent)


def test_a_model_that_thinks_has_a_budget_by_default(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "grmpipe.judge.context_limits")
    judge = prepared({"chat_template": str(TEMPLATES / "qwen3.jinja")}, thinking_tokens=None).config.main_judge
    assert f"judge: grm may think for {judge.max_new_tokens // 2} tokens before its verdict" in caplog.text
    budget = judge.make_thinking_budget(thinks=True)
    assert budget is not None and budget.num_tokens == judge.max_new_tokens // 2
    assert judge.make_thinking_budget(thinks=False) is None


def test_note_tells_of_a_budget_for_a_judge_that_thinks_without_one(caplog: pytest.LogCaptureFixture) -> None:
    prepared({"chat_template": str(TEMPLATES / "qwen3.jinja")}, thinking_tokens=0)
    assert "grm may think before its verdict" in caplog.text and "judge.thinking.budget_tokens ends" in caplog.text
    caplog.clear()
    prepared({}, thinking_tokens=None)
    assert "may think" not in caplog.text


def test_the_end_of_a_thought_must_leave_room_for_a_verdict() -> None:
    with pytest.raises(ConfigError, match=r"^judge\.max_new_tokens: 41 leave no tokens .* type judge\.max_new_tokens="):
        prepared({"thinking_markers": ["<think>", "</think>"]}, max_new_tokens=41)


def prepared_policy(rollout: dict[str, object], **policy: object) -> Prepared:
    values = {"cluster": {"kind": "inprocess"}, "placement": PLACES, "data": {"num_prompts": 5, "num_eval_prompts": 2}}
    budget = {"thinking_budget_tokens": 20, "max_new_tokens": 64, **rollout}
    return prepare(build_config({**values, "policy": policy, "rollout": budget}))


def test_a_policy_without_thoughts_has_no_budget() -> None:
    with pytest.raises(
        ConfigError, match=r"^rollout\.thinking_budget_tokens: .*; type rollout\.thinking_budget_tokens=0 .*policy\.th"
    ):
        prepared_policy({})


def test_the_end_of_a_thought_must_leave_room_for_an_answer() -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.max_new_tokens: 21 leave no tokens for an answer"):
        prepared_policy({"max_new_tokens": 21}, thinking_markers=["<think>", "</think>"])


def test_a_stop_text_and_a_thinking_budget_are_refused_together() -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.thinking_budget_tokens: .* type .*=0 or rollout\.stop=\[\]"):
        prepared_policy({"stop": ["</search>"]}, thinking_markers=["<think>", "</think>"])


def test_an_endpoint_has_its_own_budget() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^judge\.thinking\.budget_tokens: an endpoint .* type judge\.thinking\.budget_tokens=null .*ext",
    ):
        prepared({"engine": "openai", "path": "judge", "engine_options": {"api_key_env": ""}})


def test_a_form_whose_pattern_holds_no_score_is_refused_before_the_start(tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text((JUDGE_TEMPLATES / "tiny.jinja").read_text())
    judge = JudgeConfig(template=str(template), parser=f"{__name__}.WITHOUT_GROUP")
    with pytest.raises(ConfigError, match=r"^judge\.parser: the pattern of .*test_context_limits\.py.* has no group"):
        check_template(judge, [])


def test_a_pattern_or_parser_is_tried_on_the_verdict_that_the_template_asks_for(tmp_path: Path) -> None:
    for settings in (
        {"pattern": "Score: ([0-9]+)"},
        {"pattern": "(?i)score: ([0-9]+)"},
        {"parser": f"{__name__}.SCORES"},
    ):
        check_template(JudgeConfig(template="pointwise", **settings), ())
    for key, value in (
        ("pattern", "Verdict: ([0-9]+)"),
        ("pattern", "Score: ([0-9])"),
        ("parser", f"{__name__}.ARROW"),
    ):
        with pytest.raises(ConfigError, match=rf"^judge\.{key}: .* can't read 'Score: 10', as template pointwise asks"):
            check_template(JudgeConfig(template="pointwise", **{key: value}), ())
    own = tmp_path / "own.jinja"
    own.write_text("{{ question }}\n{{ response }}\nEnd with this line, N from 1 to 10:\nVerdict: N")
    check_template(JudgeConfig(template=str(own), pattern="Verdict: ([0-9]+)"), ())
    with pytest.raises(ConfigError, match=r"^judge\.parser: score_line can't read 'Verdict: 10'"):
        check_template(JudgeConfig(template=str(own)), ())
    check_template(JudgeConfig(pattern="Verdict: ([0-9]+)"), ())  # `tiny` shows no verdict


def test_a_prefill_needs_a_server_that_continues_it() -> None:
    endpoint = {"engine": "openai", "path": "judge"}
    judge = {"prefill": "Score:", "thinking_tokens": None}
    with pytest.raises(
        ConfigError, match=r"^judge\.prefill: an endpoint .*type judge\.prefill='', .*continue_final_me"
    ):
        prepared({**endpoint, "engine_options": {"api_key_env": ""}}, **judge)
    continues = {"continue_final_message": True, "add_generation_prompt": False}
    prepared({**endpoint, "engine_options": {"api_key_env": "", "extra_body": continues}}, **judge)
    prepared({}, **judge)


@pytest.mark.parametrize("key", ["prefill", "format.ask_verdict"])
def test_a_template_of_two_turns_asks_for_the_second_one_itself(key: str) -> None:
    pairs = {
        "protocol": "pairwise",
        "template": "br_rm",
        "parser": "which_box",
        "vote": "majority",
        "num_judgements": 2,
    }
    more = {"prefill": "So"} if key == "prefill" else {"ask_verdict": True}
    with pytest.raises(ConfigError, match=rf"^judge\.{key}: template br_rm has two turns .*type judge\.{key}="):
        prepared({}, thinking_tokens=None, max_new_tokens=100, timeout_s=60, **pairs, **more)


@pytest.mark.parametrize("key", ["top_k", "min_p"])
def test_an_endpoint_knows_no_top_k_and_min_p_unless_its_own_fields_say_so(key: str) -> None:
    endpoint = {"engine": "openai", "path": "judge", "engine_options": {"api_key_env": ""}}
    words = (
        rf"^judge\.{key}: isn't part of the OpenAI protocol; type judge\.{key}=0, .*engine_options\.extra_body\.{key}=1"
    )
    with pytest.raises(ConfigError, match=words):
        prepared(endpoint, thinking_tokens=None, **{key: 1})
    prepared(endpoint, thinking_tokens=None, top_p=0.9)
