"""The wires, by the name of their trainer: how each asks a reward model at a URL. A further one is a row, with a reader
and a writer.
"""

import json
from collections.abc import Mapping, Sequence

from grmpipe.config.keys.user_code import format_value
from grmpipe.data.rows import Row, require_object
from grmpipe.serve.wire import Asked, Reward, Wire, cut_response, make_asked, read_label, read_prompt, require_string

# -- slime, miles, Relax -----------------------------------------------------------------------------------------------
# --rm-type remote_rm of slime, miles and Relax: {prompt, response, label} of one sample -> a bare JSON number.
#
# Read from THUDM/slime 624b824a, slime/rollout/rm_hub/__init__.py; radixark/miles 31f1ca96, miles/rollout/rm_hub/
# __init__.py; redai-studio/Relax 39ae3399, relax/engine/rewards/__init__.py: all in a function remote_rm. A prompt is
# text, templated with --apply-chat-template, or messages; a response may keep its special tokens.


def read_sample(body: Row) -> list[Asked]:
    prompt = read_prompt(body.get("prompt"), "prompt")
    response = require_string(body.get("response"), "response")
    return [make_asked(prompt.row, prompt.complete(response), read_label(body.get("label"), "label"))]


def write_number(body: Row, rewards: Sequence[Reward]) -> object:
    return rewards[0].value


def make_wire(path: str, timeout_s: float, tries: int, gap_s: float) -> Wire:
    return Wire(
        path=path, fields="prompt, response and label", read=read_sample, write=write_number, timeout_s=timeout_s,
        tries=tries, gap_s=gap_s,
    )  # fmt: skip


# Pauses double up to 30 s and a random second; the next try may spend all its time waiting for one of 64 connections.
SLIME = make_wire("/slime/{judge}", timeout_s=120, tries=10, gap_s=160)
RELAX = make_wire("/relax/{judge}", timeout_s=120, tries=10, gap_s=160)
MILES = make_wire("/miles/{judge}", timeout_s=300, tries=1, gap_s=0)  # aiohttp's own timeout


# -- OpenRLHF ----------------------------------------------------------------------------------------------------------
# OpenRLHF's remote reward model (--reward.remote_url), read from openrlhf 0.11.2, openrlhf/utils/agent.py,
# SingleTurnAgentExecutor._fetch_rewards_via_http, and openrlhf/cli/serve_rm.py.
#
# {query: [..], prompts: [..], labels: [..]} -> {rewards: [..], scores: [..], extra_logs: {name: [..]}}, today lists of
# one. A query is prompt and response, decoded with special tokens; a prompt is as its data set made it, mostly
# templated.


FIELDS = ("query", "prompts", "labels")


def read_batch(body: Row) -> list[Asked]:
    queries, prompts, labels = (require_list(body.get(field), field) for field in FIELDS)
    if not len(queries) == len(prompts) == len(labels):
        raise ValueError(
            f"query, prompts and labels: expected as many of each, got {len(queries)}, {len(prompts)} and {len(labels)}"
        )
    asked: list[Asked] = []
    for place, (query, prompt, label) in enumerate(zip(queries, prompts, labels, strict=True)):
        sent = read_prompt(require_string(prompt, f"prompts[{place}]"), f"prompts[{place}]")
        where = f"query[{place}]"
        response = cut_response(require_string(query, where), sent, where)
        asked.append(make_asked(sent.row, sent.complete(response), read_label(label, f"labels[{place}]")))
    return asked


def write_rewards(body: Row, rewards: Sequence[Reward]) -> object:
    """The keys are those of every answer: the trainer joins its logs over a batch."""
    values = [one.value for one in rewards]
    return {
        "rewards": values, "scores": values, "extra_logs": {"imputed": [float(bool(one.imputed)) for one in rewards]}
    }  # fmt: skip


def require_list(value: object, field: str) -> list[object]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{field}: expected a list that isn't empty, got {format_value(value)}")
    return value


# A second apart, whatever Retry-After says; the rest of gap_s is for a loop that is late.
OPENRLHF = Wire(
    path="/openrlhf/{judge}", fields=", ".join(FIELDS), read=read_batch, write=write_rewards, timeout_s=180, tries=5,
    gap_s=10,
)  # fmt: skip


# -- NeMo-Gym ----------------------------------------------------------------------------------------------------------
# NeMo-Gym's /verify: {responses_create_params, response, ..} -> the same with `reward`, read from NVIDIA-NeMo/Gym
# 07d6b0d0, nemo_gym/base_resources_server.py (BaseVerifyRequest, BaseVerifyResponse) and
# responses_api_agents/simple_agent/app.py.
#
# Inputs and outputs are items of OpenAI's Responses API. The other fields are those of the data's row. The client sets
# no limit of time.


KINDS = ("message", "function_call", "function_call_output", "reasoning")  # of items
TEXTS = ("input_text", "output_text", "text")  # parts of a message
OWN = ("responses_create_params", "response", "reward")


def read_verification(body: Row) -> list[Asked]:
    params, response = (require_object(body.get(field), field) for field in OWN[:2])
    given = params.get("input")
    system = params.get("instructions")
    messages: list[object] = [{"role": "system", "content": system}] if system else []
    where = "responses_create_params.input"
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        messages += read_items(require_list(given, where), where)
    # The agent's own fields begin with an underscore; its data's prompt is in the input.
    left_out = {*OWN, "prompt", "messages"}
    row = {name: one for name, one in body.items() if name not in left_out and name[:1] != "_" and one is not None}
    if (answer := row.get("expected_answer")) is not None:
        row.setdefault("reference", answer)
    output = read_items(require_list(response.get("output"), "response.output"), "response.output")
    return [make_asked({"messages": messages}, output, row)]


def read_items(items: list[object], where: str) -> list[object]:
    """Messages; calls of tools and what answers them, as texts; thoughts are left out."""
    messages: list[object] = []
    for place, item in enumerate(items):
        here = f"{where}[{place}]"
        one = require_object(item, here)
        kind = one.get("type", "message")
        if kind == "message":
            role = "system" if one.get("role") == "developer" else one.get("role")
            messages.append({"role": role, "content": read_content(one.get("content"), f"{here}.content")})
        elif kind == "function_call":
            call = {"name": one.get("name"), "arguments": one.get("arguments")}
            messages.append({"role": "assistant", "content": json.dumps(call, ensure_ascii=False)})
        elif kind == "function_call_output":
            output = one.get("output")
            text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
            messages.append({"role": "tool", "content": text})
        elif kind not in KINDS:
            raise ValueError(f"{here}.type: expected {', '.join(KINDS)}, got {format_value(kind)}")
    return messages


def read_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for place, part in enumerate(require_list(content, where)):
        one = require_object(part, f"{where}[{place}]")
        text = one.get("refusal") if one.get("type") == "refusal" else one.get("text")
        if one.get("type") not in (*TEXTS, "refusal") or not isinstance(text, str):
            raise ValueError(f"{where}[{place}]: expected a part with text, got {format_value(part)}")
        texts.append(text)
    return "".join(texts)


def write_verified(body: Row, rewards: Sequence[Reward]) -> object:
    return body | {"reward": rewards[0].value, "imputed": rewards[0].imputed}


NEMO_GYM = Wire(
    path="/nemo_gym/{judge}/verify", fields="responses_create_params and response", read=read_verification,
    write=write_verified, timeout_s=None,
)  # fmt: skip


WIRES: Mapping[str, Wire] = {"openrlhf": OPENRLHF, "slime": SLIME, "miles": MILES, "relax": RELAX, "nemo_gym": NEMO_GYM}
