"""xtuner's reward_handler where it is a URL: {response, label, extra_info} -> {score}, read from InternLM/xtuner
b934f462, xtuner/v1/rl/judger/native.py, NativeJudger.judge_payload.

It sends no prompt: the label (reward_model.ground_truth of the data) has to hold it, as an object or its JSON text with
prompt or messages. extra_info is the same for all samples.
"""

from collections.abc import Sequence

from grmpipe.data.rows import Row
from grmpipe.data.templated import remove_end_tokens
from grmpipe.serve.wires.trainer_texts import make_asked, read_label, require_string
from grmpipe.serve.wires.wire import Asked, Reward, Wire


def read_payload(body: Row) -> list[Asked]:
    response = require_string(body.get("response"), "response")
    label = read_label(body.get("label"), "label")
    if not {"prompt", "messages"} & label.keys():
        raise ValueError(
            "label: xtuner sends no prompt, so the label has to hold it: write reward_model.ground_truth as "
            '{"prompt": .., "reference": ..}, an object or its JSON text'
        )
    return [make_asked({}, remove_end_tokens(response), label)]


def write_score(body: Row, rewards: Sequence[Reward]) -> object:
    return {"score": rewards[0].value, "imputed": float(bool(rewards[0].imputed))}


# JudgerConfig.request_timeout; it asks once.
WIRE = Wire(path="/xtuner/{judge}", fields="response and label", read=read_payload, write=write_score, timeout_s=30)
