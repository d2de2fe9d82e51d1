"""OpenRLHF's remote reward model (--reward.remote_url), read from openrlhf 0.11.2, openrlhf/utils/agent.py,
SingleTurnAgentExecutor._fetch_rewards_via_http, and openrlhf/cli/serve_rm.py.

{query: [..], prompts: [..], labels: [..]} -> {rewards: [..], scores: [..], extra_logs: {name: [..]}}, today lists of
one. A query is prompt and response, decoded with special tokens; a prompt is as its data set made it, mostly templated.
"""

from collections.abc import Sequence

from grmpipe.config.keys.user_code import format_value
from grmpipe.data.rows import Row
from grmpipe.serve.wires.trainer_texts import cut_response, make_asked, read_label, read_prompt, require_string
from grmpipe.serve.wires.wire import Asked, Reward, Wire

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
WIRE = Wire(
    path="/openrlhf/{judge}", fields=", ".join(FIELDS), read=read_batch, write=write_rewards, timeout_s=180, tries=5,
    gap_s=10,
)  # fmt: skip
