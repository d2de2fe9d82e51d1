"""The wires over HTTP: each form gets the reward of the native wire, and a bad request is told its field."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from trainer_service import ask_natively, post, serving

FUNCTION = ("judge=function", "judge.function=own.reward")
CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n6 x 7?<|im_end|>\n<|im_start|>assistant\n"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 x 7?"}]
SAMPLE = {"prompt": CHATML, "response": "42<|im_end|>", "label": "42"}
LABEL = {"messages": MESSAGES, "reference": "42"}
BATCH = {"query": [CHATML + "42<|im_end|>"], "prompts": [CHATML], "labels": ["42"]}
# NeMo-Gym: nemo_gym/openai_utils.py, the items of the Responses API.
VERIFICATION = {
    "responses_create_params": {
        "instructions": "Be brief.", "input": [{"role": "user", "content": [{"type": "input_text", "text": "6 x 7?"}]}]
    },
    "response": {
        "id": "r",
        "output": [
            {"type": "reasoning", "id": "t", "summary": []},
            {
                "type": "message", "id": "m", "role": "assistant", "status": "completed",
                "content": [{"type": "output_text", "text": "42", "annotations": []}],
            },
        ],
    },
    "expected_answer": "42", "agent_ref": {"name": "a"}, "_ng_task_index": 3,
}  # fmt: skip


def find_reward(trainer: str, answer: Any) -> object:
    """As the trainer's code takes it from the answer."""
    if trainer == "openrlhf":
        return answer["rewards"][0]
    return answer["reward"] if trainer == "nemo_gym" else answer


@pytest.mark.parametrize(
    ("trainer", "path", "body"),
    [
        ("openrlhf", "/openrlhf/reward?group_size=8", BATCH),
        ("slime", "/slime/reward", SAMPLE),
        ("slime", "/slime/judge", SAMPLE | {"prompt": MESSAGES, "response": "42"}),
        ("miles", "/miles/reward", SAMPLE | {"label": json.dumps({"reference": "42", "group_id": 7})}),
        ("relax", "/relax/reward?timeout_s=60", SAMPLE | {"prompt": "?", "label": LABEL}),
        ("nemo_gym", "/nemo_gym/reward/verify", VERIFICATION),
    ],
)  # fmt: skip
def test_each_trainer_s_form_gets_the_reward_of_the_native_wire(trainer: str, path: str, body: Any) -> None:
    async def check() -> None:
        async with serving(*FUNCTION) as session:
            native = await ask_natively(session, messages=MESSAGES, response="42", reference="42")
            if trainer == "nemo_gym":
                said = [{"role": "assistant", "content": "42"}]
                native = await ask_natively(session, messages=MESSAGES, response=said, reference="42")
            status, answer = await post(session, path, body)
            assert status == 200, answer
            reward = find_reward(trainer, answer)
            assert isinstance(reward, float) and reward == native
            if trainer == "openrlhf":
                assert answer["scores"] == [native] and answer["extra_logs"] == {"imputed": [0.0]}
            if trainer == "nemo_gym":
                assert answer.items() >= body.items(), "Gym reads its own fields again"

    asyncio.run(check())


def test_a_batch_is_answered_in_its_order() -> None:
    async def check() -> None:
        async with serving(*FUNCTION) as session:
            body = {"query": [CHATML + "41", "7 x 8?56"], "prompts": [CHATML, "7 x 8?"], "labels": ["42", ""]}
            status, answer = await post(session, "/openrlhf/reward", body)
            assert status == 200 and answer["rewards"] == [
                await ask_natively(session, messages=MESSAGES, response="41", reference="42"),
                await ask_natively(session, prompt="7 x 8?", response="56"),
            ]

    asyncio.run(check())


def test_a_lost_sibling_gets_the_mean_and_is_marked() -> None:
    async def check() -> None:
        async with serving(*FUNCTION, "serve.on_failure=mean_of_group") as session:
            bodies = [BATCH | {"query": [CHATML + text]} for text in ("42", "lost", "42")]
            answers = await asyncio.gather(*(post(session, "/openrlhf/reward?group_size=3", one) for one in bodies))
            first, lost, second = (answer for _, answer in answers)
            assert first["rewards"] == lost["rewards"] == second["rewards"]
            assert [one["extra_logs"]["imputed"] for one in (first, lost, second)] == [[0.0], [1.0], [0.0]]
            async with session.get("/metrics") as metrics:
                lines = (await metrics.text()).splitlines()
            assert 'grmpipe_responses_imputed_total{cause="unparseable"} 1' in lines
            assert "grmpipe_requests_held 0" in lines

    asyncio.run(check())


def test_a_failure_is_503_with_its_cause_before_the_client_s_timeout() -> None:
    async def check() -> None:
        async with serving(*FUNCTION) as session:
            status, answer = await post(session, "/miles/reward?timeout_s=1", SAMPLE | {"response": "lost"})
            assert status == 503 and "unparseable (it ends with 'hm')" in answer["error"]

    asyncio.run(check())


BAD: list[tuple[str, object, int, str]] = [
    ("/slime/reward", b"{", 400, "judge: not JSON"),
    ("/slime/reward", b'{"prompt": "6 x 7?", "resp', 400, "judge: not JSON"),
    ("/slime/reward", b"\xff", 400, "judge: not JSON in UTF-8"),
    ("/slime/reward", [], 400, "judge: expected a JSON object with prompt, response and label"),
    ("/slime/reward", b"[" * 200_000, 400, "judge: "),
    ("/slime/reward", SAMPLE | {"prompt": 7}, 400, "prompt: expected a text, or messages .*, got 7"),
    ("/slime/reward", SAMPLE | {"prompt": " "}, 400, "prompt: expected a text that isn't empty"),
    ("/slime/reward", SAMPLE | {"prompt": [{"role": "user"}]}, 400, r"messages\[0\]: expected an object with role"),
    ("/slime/reward", SAMPLE | {"response": None}, 400, "response: expected a text, got None"),
    ("/slime/reward", SAMPLE | {"response": "\ud83d"}, 400, "half of a surrogate pair"),
    ("/slime/reward", SAMPLE | {"prompt": "\ud83d"}, 400, "half of a surrogate pair"),
    ("/slime/reward", SAMPLE | {"response": "x" * 1_100_000}, 413, "Too Large"),
    ("/slime/reward", SAMPLE | {"label": [1]}, 400, r"label: expected a text, a number or an object, got \[1\]"),
    ("/slime/reward", b'{"prompt": "a", "response": "b", "label": NaN}', 400, "reference: .* finite number, got nan"),
    ("/slime/reward", SAMPLE | {"label": {"reference": "1", "response": "x"}}, 400, "label: has the field response"),
    ("/slime/reward", SAMPLE | {"label": {"reference": "1", "group_id": [1]}}, 400, "label.group_id: expected a text"),
    ("/slime/reward", SAMPLE | {"label": {"group_size": "8"}}, 400, "label.group_size: expected a whole number"),
    ("/slime/reward", SAMPLE | {"prompt": CHATML[:-10]}, 400, "prompt: can.t be taken apart .*<.im_end.>"),
    ("/slime/reward", SAMPLE | {"prompt": CHATML + "41<|im_end|>"}, 400, "prompt: ends with a complete message"),
    ("/slime/nobody", SAMPLE, 404, "there is no judge 'nobody'; known: judge, reward"),
    ("/slime/reward?group_size=0", SAMPLE, 400, "group_size: expected a whole number from 1 on, got '0'"),
    ("/slime/reward?group_size=8x", SAMPLE, 400, "group_size: expected a whole number"),
    ("/slime/reward?timeout_s=nan", SAMPLE, 400, "timeout_s: expected seconds above 0"),
    ("/slime/reward?groupsize=8", SAMPLE, 400, "groupsize: unknown in this URL; known: group_size, timeout_s"),
    ("/openrlhf/reward", BATCH | {"query": "x"}, 400, "query: expected a list that isn't empty, got 'x'"),
    ("/openrlhf/reward", BATCH | {"labels": []}, 400, "labels: expected a list that isn't empty"),
    ("/openrlhf/reward", BATCH | {"labels": ["", ""]}, 400, "expected as many of each, got 1, 1 and 2"),
    ("/openrlhf/reward", BATCH | {"query": ["8 x 8?64"]}, 400, r"query\[0\]: expected the prompt at its beginning"),
    ("/nemo_gym/reward/verify", {"response": {}}, 400, "responses_create_params: expected an object, got None"),
    ("/nemo_gym/reward/verify", VERIFICATION | {"response": {"output": [{"type": "x"}]}}, 400, r"output\[0\].type: "),
]  # fmt: skip


def test_a_bad_request_is_told_its_field_and_nothing_ends_the_service() -> None:
    async def check() -> None:
        async with serving(*FUNCTION, "serve.max_body_mb=1") as session:
            for path, body, status, words in BAD:
                found, answer = await post(session, path, body)
                assert found == status, (path, answer)
                assert re.search(words, answer["error"]), (path, answer)
            assert (await post(session, "/slime/reward", SAMPLE))[0] == 200

    asyncio.run(check())


def test_a_trainer_that_knows_only_a_url_says_its_key_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-0123456789")

    async def check() -> None:
        async with serving(*FUNCTION, "serve.key_env=JUDGE_KEY") as session:
            host = str(session._base_url).removeprefix("http://").rstrip("/")
            assert (await post(session, f"http://run1:secret-0123456789@{host}/slime/reward", SAMPLE))[0] == 200
            assert (await post(session, f"http://run1:wrong@{host}/slime/reward", SAMPLE))[0] == 401

    asyncio.run(check())
