"""Judges by a reward function: whose signatures fit, what becomes of each result."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from configs import judge_config

from grmpipe.data.prompts import load_prompts
from grmpipe.judge.kinds.function_judge import FunctionJudge
from grmpipe.judge.kinds.reward_function import reward_function
from grmpipe.judge.pointwise_adapter import judge_together, rollout_of_messages, rollout_of_text
from grmpipe.models.types import Message
from grmpipe.types import Failed, Prompt, Verdict

HERE = "my_rewards"
PROMPT = Prompt(
    prompt_id="p1",
    messages=(Message(role="user", content="What is 6 x 7?"),),
    source="math",
    reference="42",
    info={"unit": "m"},
    columns={"level": 3, "solution": "6 x 7 = 42"},
)


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Verdict | Failed]]:
    """`judged(code, texts, **settings)`: the verdicts of `reward`, which the code defines, on siblings."""
    numbers = iter(range(1000))

    def verdicts(code: str, *texts: str, prompt: Prompt = PROMPT, **settings: object) -> list[Verdict | Failed]:
        module = f"{HERE}_{tmp_path.name}_{next(numbers)}".replace("-", "_")
        (tmp_path / f"{module}.py").write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path))
        judge = FunctionJudge(judge_config(kind="function", function=f"{module}.reward", **settings))
        return [report.verdict for report in asyncio.run(judge_together(judge, prompt, "g1", texts or ("42",)))]

    return verdicts


# Written as TRL's documentation of GRPO writes one for verifiable answers, and as verl's reward_score does for GSM8K.
OF_TRL = r"""
import re

def reward(completions, ground_truth, **kwargs):
    boxed = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    return [1.0 if found and found.group(1) == truth else 0.0 for found, truth in zip(boxed, ground_truth)]
"""
OF_VERL = r"""
import re

def answer_of(solution_str):
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str)
    return found[-1].replace(",", "") if found else None

def reward(data_source, solution_str, ground_truth, extra_info=None):
    answer = answer_of(solution_str)
    if answer is None:
        return 0
    return {"score": 1.0 if answer == ground_truth else 0.1, "acc": answer == ground_truth, "pred": answer}
"""


def rewards(verdicts: list[Verdict | Failed]) -> list[float | str]:
    return [one.outcome if isinstance(one, Verdict) else one.cause for one in verdicts]


def test_a_function_for_trl_runs_unchanged(judged: Callable[..., list]) -> None:
    assert rewards(judged(OF_TRL, r"so \boxed{42}", r"\boxed{41}", "42")) == [1.0, 0.0, 0.0]


def test_a_function_for_verl_runs_unchanged(judged: Callable[..., list]) -> None:
    right, wrong, none = judged(OF_VERL, "#### 42", "#### 4", "42")
    assert rewards([right, wrong, none]) == [1.0, 0.1, 0.0]
    assert right.breakdown == {"function": 1.0, "acc": 1.0}, "further numbers are metrics, texts are not"


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("def reward(prompt, response, **columns): return columns['level'] + len(prompt)", 17.0),
        ("def reward(response, reference): return response == reference", 1.0),
        ("def reward(response, *, solution, level=9): return level if solution.endswith('42') else 0", 3.0),
        ("async def reward(response, info): return len(info['unit'])", 1.0),
        ("def reward(prompts, responses): return [len(prompts) + len(responses)]", 2.0),
        ("def reward(completions, level): return level", 3.0),  # a column is a list as well
        ("def reward(completions, completion_ids, prompts, level): return [len(completion_ids[0]) + level[0]]", 3.0),
        ("def reward(completions, solution, **kwargs): return [sorted(kwargs)[0] == 'completion_ids']", 1.0),
        ("def reward(data_sources, solution_strs, ground_truths, extra_infos): return {'a': 1}", "broken"),
        ("def reward(solution_str, ground_truth, **kwargs): return {'score': kwargs['solution'] != ''}", 1.0),
        ("def reward(response, nothing=7, **columns): return nothing", 7.0),
        ("def reward(response): return {'reward': None, 'words': 1}", "abstained"),
        ("def reward(response): return None", "abstained"),
        ("def reward(response): return float('nan')", "broken"),
        ("def reward(response): return 'good'", "broken"),
        ("def reward(response): return {'words': 1}", "broken"),
        ("def reward(response): raise SystemExit(3)", "broken"),
        ("def reward(responses): return [1, 2]", "broken"),
        ("def reward(responses): return 'good'", "broken"),
        ("import numpy\ndef reward(responses): return numpy.array([0.5] * len(responses))", 0.5),
        ("import torch\ndef reward(response): return torch.tensor(0.5)", 0.5),
        ("import numpy\ndef reward(response): return {'reward': numpy.float32(0.5), 'words': 2}", 0.5),
    ],
)
def test_arguments_go_by_name_and_a_result_is_a_reward_or_a_cause(
    judged: Callable[..., list], code: str, reward: float | str
) -> None:
    assert rewards(judged(code)) == [reward]


def test_further_results_that_are_no_numbers_are_named_once(
    judged: Callable[..., list], caplog: pytest.LogCaptureFixture
) -> None:
    code = """def reward(response):
    extras = {'why': 'it is short', 'rate': float('nan'), 'parts': [1, 2], 'length': len(response), 'none': None}
    return {'reward': 1.0, **extras}"""
    verdicts = judged(code, "42", "43", "44")
    assert [one.breakdown for one in verdicts] == [{"function": 1.0, "length": 2.0}] * 3
    (said,) = (record.getMessage() for record in caplog.records if "no journal keeps" in record.getMessage())
    assert "returned why = 'it is short', rate = nan, parts = [1, 2], which no journal keeps" in said


def test_a_failure_names_function_file_and_line(judged: Callable[..., list]) -> None:
    (failed,) = judged("def reward(response):\n    return [][1]")
    assert re.search(r"judge\.function: my_rewards\S+\.reward \(/.*\.py:1\) raised IndexError: .*\.py:2", failed.detail)


@pytest.mark.parametrize(
    "limit",
    [
        "import signal; signal.signal(signal.SIGALRM, lambda *_: None); signal.alarm(1)",
        pytest.param("from math_verify import parse; parse('$42$')", marks=pytest.mark.long),
    ],
)
def test_a_function_that_limits_its_time_by_signals_fails_with_the_way_out(
    judged: Callable[..., list], limit: str
) -> None:
    (failed,) = judged(f"def reward(response):\n    {limit}\n    return 1")
    assert failed.cause == "broken"
    assert "turn the time limit of the library off" in failed.detail and "parsing_timeout=None" in failed.detail


def test_a_range_brings_rewards_to_the_scale_and_fails_what_is_outside(judged: Callable[..., list]) -> None:
    inside, outside = judged("def reward(response): return int(response)", "75", "101", score_range=[0, 100])
    assert (inside.outcome, inside.score, inside.breakdown["raw_reward"]) == (0.75, 7.75, 75.0)
    assert outside.cause == "out_of_range" and "[0, 100]" in outside.detail


def test_a_function_of_a_group_is_called_once_with_all_siblings(judged: Callable[..., list]) -> None:
    code = "def reward(responses): return [len(responses) * 10 + int(one) for one in responses]"
    assert rewards(judged(code, "1", "2", "3", function_batch="group")) == [31.0, 32.0, 33.0]
    assert rewards(judged(code, "1", "2", "3")) == [11.0, 12.0, 13.0]
    with pytest.raises(ValueError, match=r"^function_call\.batch: group hands over lists, and .* takes one response"):
        judged("def reward(response): return 1", function_batch="group")


def test_a_chat_is_handed_over_as_messages(judged: Callable[..., list]) -> None:
    chat = Prompt(prompt_id="c", messages=PROMPT.messages, is_chat=True)
    code = (
        "def reward(prompts, completions): return [len(prompts[0][0]['content']) + len(completions[0][0]['content'])]"
    )
    assert rewards(judged(code, "four", prompt=chat)) == [18.0]


@pytest.mark.parametrize("truth", ["12", 12, {"inputs": ["1"], "outputs": ["2"]}])
def test_a_function_of_verl_gets_the_ground_truth_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truth: object
) -> None:
    (tmp_path / "of_verl.py").write_text("def score(data_source, solution_str, ground_truth, extra_info): return 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    row = {
        "data_source": "gsm", "prompt": [{"role": "user", "content": "6 x 2?"}],
        "reward_model": {"ground_truth": truth}, "extra_info": {"index": 3},
    }  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (prompt,) = load_prompts(str(tmp_path / "rows.jsonl"))
    answer = rollout_of_messages("g", 0, [Message(role="assistant", content="12")])
    assert reward_function("of_verl.score", "judge.function").arguments(prompt, [answer]) == {
        "data_source": "gsm", "solution_str": "12", "ground_truth": truth, "extra_info": {"index": 3},
    }  # fmt: skip


def test_a_response_is_the_last_turn_with_its_thoughts_or_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asks_response.py").write_text("def reward(response): return 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = [Message(role="assistant", content="first"), Message(role="user", content="and?")]
    episode = rollout_of_messages("g", 0, [*said, Message(role="assistant", content="last")])
    for show_thoughts in (True, False):
        function = reward_function("asks_response.reward", "judge.function", show_thoughts=show_thoughts)
        assert function.arguments(PROMPT, [episode]) == {"response": "last"}


def test_hanging_function_times_out_and_delays_no_other(judged: Callable[..., list]) -> None:
    code = "import time\ndef reward(response):\n    time.sleep(30 if response == 'slow' else 0)\n    return 1"
    began = time.monotonic()
    settings = {"timeout_s": 1.0, "max_new_tokens": 1, "min_tokens_per_s": 100.0}
    slow, fast = judged(code, "slow", "fast", **settings)
    assert rewards([slow, fast]) == ["timeout", 1.0] and "more than judge.limits.timeout_s = 1 s" in slow.detail
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def reward(text): return 1", "one parameter must be the response"),
        ("def reward(response, completions): return 1", "one parameter must be the response"),
        ("def reward(response, /): return 1", "each must have a name"),
        ("reward = 7", "is no function"),
        ("class reward: pass", "is no function"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_by_its_key(
    judged: Callable[..., list], code: str, said: str
) -> None:
    with pytest.raises(ValueError, match=f"^function: .*{said}.*write `def reward"):
        judged(code)


def test_a_parameter_that_nothing_fills_is_refused_with_the_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asks_level.py").write_text("def reward(response, level, hint='x'): return 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    function = reward_function("asks_level.reward", "judges.mine.function")
    with pytest.raises(ValueError, match=r"^judges\.mine\.function: asks_level\.reward .*'level'.* has depth, "):
        function.check_columns(["depth"], "mine.jsonl")
    function.check_columns(["level"], "mine.jsonl")


def test_further_columns_of_a_row_are_kept(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "level": 3, "tags": ["x"], "none": null}\n')
    (prompt,) = load_prompts(str(tmp_path / "rows.jsonl"))
    assert dict(prompt.columns) == {"level": 3, "tags": ["x"]} and not prompt.is_chat


def test_a_function_of_groups_waits_for_all_siblings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "by_group.py").write_text("def reward(responses): return [1] * len(responses)")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = judge_config(kind="function", function="by_group.reward", function_batch="group")
    session = FunctionJudge(config).open(PROMPT, "g", 3)
    tasks = [task for sibling in (0, 2) for task in session.add(rollout_of_text("g", sibling, "x"))]
    assert not tasks
