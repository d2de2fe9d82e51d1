"""NeMo-Gym's /verify: {responses_create_params, response, ..} -> the same with `reward`, read from NVIDIA-NeMo/Gym
07d6b0d0, nemo_gym/base_resources_server.py (BaseVerifyRequest, BaseVerifyResponse) and
responses_api_agents/simple_agent/app.py.

Inputs and outputs are items of OpenAI's Responses API. The other fields are those of the data's row. The client sets no
limit of time.
"""

import json
from collections.abc import Sequence

from grmpipe.config.keys.user_code import format_value
from grmpipe.data.rows import Row, require_object
from grmpipe.serve.wires.openrlhf import require_list
from grmpipe.serve.wires.trainer_texts import make_asked
from grmpipe.serve.wires.wire import Asked, Reward, Wire

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


WIRE = Wire(
    path="/nemo_gym/{judge}/verify", fields="responses_create_params and response", read=read_verification,
    write=write_verified, timeout_s=None,
)  # fmt: skip
