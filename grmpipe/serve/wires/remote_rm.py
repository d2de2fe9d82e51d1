"""--rm-type remote_rm of slime, miles and Relax: {prompt, response, label} of one sample -> a bare JSON number.

Read from THUDM/slime 624b824a, slime/rollout/rm_hub/__init__.py; radixark/miles 31f1ca96, miles/rollout/rm_hub/
__init__.py; redai-studio/Relax 39ae3399, relax/engine/rewards/__init__.py: all in a function remote_rm. A prompt is
text, templated with --apply-chat-template, or messages; a response may keep its special tokens.
"""

from collections.abc import Sequence

from grmpipe.data.rows import Row
from grmpipe.serve.wires.trainer_texts import make_asked, read_label, read_prompt, require_string
from grmpipe.serve.wires.wire import Asked, Reward, Wire


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
