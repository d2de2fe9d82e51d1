"""Rollouts that other trainers have written, each in its own form: TRL's completions, verl's dumps, the traces
of verifiers and prime-rl, slime's debug files, or plain columns. The form is recognised by the columns.

JSON Lines come one row at a time; a .parquet, .json or .pt file is in memory while it is read.
"""

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grmpipe.config.keys.user_code import format_value
from grmpipe.data.prompts import FIELDS, parse_prompt, refuse_half_characters
from grmpipe.data.rows import Findings, Place, Row, read_rows, require_object
from grmpipe.data.templated import ENDS, Conversation, remove_end_tokens, split_stripped, split_templated
from grmpipe.models.types import Message
from grmpipe.types import Prompt

SUFFIXES = (".jsonl", ".parquet", ".pt")  # in a folder: a .json beside them is a configuration
REPLY_ROLES = ("assistant", "user", "tool")
LISTS = ("responses", "completions")
RESPONSES = ("response", "completion", "output", *LISTS)
REWARDS = ("reward", "rewards", "score", "scores")
GROUPS = ("group_id", "group", "uid")
STEPS = ("step", "global_step")
# Columns that say why a row has no reward, if they hold something; judge_failed is that of grmpipe.clients in TRL.
FAILURES = ("failed", "failure", "error", "judge_failed")
# Fields of verifiers' TaskData that say nothing of the question.
TASK_DATA = (
    "system_prompt", "idx", "id", "name", "description", "image", "workdir", "agent_user", "skills", "network_allow",
    "network_block", "artifacts", "artifact_max_bytes", "timeout", "resources",
)  # fmt: skip
NO_REWARD = "no reward on file"
MAX_FAILURE = 200  # characters
SIGNED = 1e-3  # advantages closer to 0 have no sign: TRL logs them in float32

Reply = str | tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRollout:
    """A rollout of another trainer.

    where:   its place in words.
    prompt:  its prompt; its id means nothing.
    reply:   what the policy wrote: a text, or the messages of an episode.
    begun:   the thought that the prompt's template began.
    step:    the trainer's; None: the file has none.
    group:   the trainer's name of its group; empty: equal prompts of a step are one.
    reward:  the trainer's number, also where it stands for a failure; None: there is none.
    failure: why it isn't a reward; empty: it is one.
    parts:   rewards by name, where there are several.
    """

    where: str
    prompt: Prompt
    reply: Reply
    begun: str = ""
    step: int | None = None
    group: str = ""
    reward: float | None = None
    failure: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    is_truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How files are read, and what was found in them.

    reward: the column of the reward; None: as the form has it.
    find:   the messages that a template makes this text of; None: they aren't known.
    seen:   hashes of TRL's tables.
    """

    findings: Findings
    reward: str | None = None
    find: Callable[[str], Sequence[Message] | None] = lambda text: None
    seen: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form of files.

    needs:     columns that each row has, `a|b` for either of two.
    is_nested: whether a field has several rewards by name.
    """

    needs: tuple[str, ...]
    read: Callable[[Iterator[Place], Reading], Iterator[ForeignRollout]]
    is_nested: bool = False

    def find_lacking(self, row: Row, reward: str | None) -> list[str]:
        """The needs that a row doesn't meet. reward: a column that is read in place of the form's own."""
        own = () if reward not in row else REWARDS
        return [need for need in self.needs if not any(name in row or name in own for name in need.split("|"))]


def list_files(path: Path) -> tuple[list[Path], list[Path]]:
    """The files of rollouts at a path, by the numbers in their names, and those left out: of evaluations beside
    training, and parts of another file. Raises ValueError if there are none.
    """
    if not path.is_dir():
        return [path], []  # the reader says what is wrong with it
    found = sorted(
        (file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file()),
        key=lambda file: [part.zfill(20) for part in re.split(r"(\d+)", str(file.relative_to(path)))],
    )
    evaluations = [file for file in found if "eval" in re.split(r"[/_.]", str(file.relative_to(path)))]
    # prime-rl writes what a step trained a second time: rollouts/step_<n>/train/effective/traces.jsonl.
    twice = [file for file in found if file.parent.name == "effective" and file.parents[1] / "all" / file.name in found]
    left_out = {*twice, *(evaluations if len(evaluations) < len(found) else [])}
    if not found:
        raise ValueError(f"{path}: has no file {' or '.join(SUFFIXES)}")
    return [file for file in found if file not in left_out], sorted(left_out)


def read_foreign(file: Path, reading: Reading) -> Iterator[ForeignRollout]:
    """The rollouts of a file. Raises ValueError that names file, line and field, also for a file of no known form."""
    rows = slime_rows(file) if file.suffix == ".pt" else read_rows(file, FIELDS, reading.findings, arrays=True)
    first = next(rows, None)
    if first is None:
        reading.findings.add("files are empty", str(file))
        return
    form = recognize(file, first[2], reading.reward)
    yield from form.read(check_rows(itertools.chain([first], rows), form, reading.reward), reading)


def recognize(file: Path, row: Row, reward: str | None) -> Form:
    """The first form that a row fits. Raises ValueError with the two nearest forms and what they lack."""
    lacking = {name: form.find_lacking(row, reward) for name, form in FORMS.items()}
    fitting = next((form for name, form in FORMS.items() if not lacking[name]), None)
    if fitting is None:
        nearest = sorted(FORMS, key=lambda name: len(lacking[name]) / len(FORMS[name].needs))[:2]
        words = " and ".join(f"for {name} it lacks {', '.join(lacking[name]).replace('|', ' or ')}" for name in nearest)
        raise ValueError(f"{file}: is of no known form by its columns ({', '.join(row)}); {words}")
    if reward is not None and reward not in row and not fitting.is_nested:
        raise ValueError(f"{file}: has no column {reward}, which rejudge.reward names; it has {', '.join(row)}")
    return fitting


def check_rows(rows: Iterable[Place], form: Form, reward: str | None) -> Iterator[Place]:
    for number, where, row in rows:
        if lacking := form.find_lacking(row, reward):
            raise ValueError(f"{where}: lacks {', '.join(lacking)}, which the first row has")
        yield number, where, row


# -- each form ---------------------------------------------------------------------------------------------------------


def read_trl(rows: Iterator[Place], reading: Reading) -> Iterator[ForeignRollout]:
    """completions/completions_<step>.parquet of TRL's log_completions: prompt and completion, a column per reward
    function, columns of log_extra, the advantage (trl 1.16.0, trl/trainer/grpo_trainer.py, GRPOTrainer.log).

    A function's None is NaN there, and Parquet's null; in the sum of several functions TRL counts it as 0.
    """
    known, functions = list(rows), [reading.reward] if reading.reward is not None else []
    table = hash(json.dumps([without(row, "step") for _, _, row in known]))
    if table in reading.seen:
        words = "tables are logged again, as TRL does while it trains on the same rollouts, and are left out"
        reading.findings.add(words, known[0][1])
        return
    reading.seen.add(table)
    if not functions:
        others = [name for name in known[0][2] if name not in ("step", "prompt", "completion", "advantage")]
        functions = [
            name for name in others if all(isinstance(row.get(name), int | float | None) for _, _, row in known)
        ]
        if len(functions) != 1:
            check_sum(known, functions)
            reading.findings.add(f"tables have the sum of {', '.join(functions)} as reward", known[0][1])
    for _, where, row in known:
        rewards = {name: to_reward(row.get(name), f"{where}: {name}") for name in functions}
        parts = {name: value for name, value in rewards.items() if value is not None}
        missing = ", ".join(name for name in functions if name not in parts)
        words = f"{missing}: {NO_REWARD}" + ", which the sum counts as 0" * (len(functions) > 1)
        yield make_rollout(
            {"prompt": row["prompt"]}, row["completion"], where, reading,
            step=row["step"],
            reward=sum(parts.values()) if parts else None,
            failure=(find_failure(row) or words) if missing else "",
            parts=parts,
        )  # fmt: skip


def check_sum(known: Sequence[Place], functions: Sequence[str]) -> None:
    """Raise ValueError unless the sum of these columns has the signs of the advantages in each group."""
    groups: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for _, where, row in known:
        total = sum(to_reward(row.get(name), where) or 0.0 for name in functions)
        groups[json.dumps(row["prompt"])].append((total, to_reward(row["advantage"], f"{where}: advantage") or 0.0))
    centered = [
        (total - sum(one for one, _ in group) / len(group), advantage)
        for group in groups.values()
        for total, advantage in group
    ]
    turned = any(min(abs(one), abs(other)) > SIGNED and one * other < 0 for one, other in centered)
    if turned or not functions:
        raise ValueError(
            f"{known[0][1].rpartition(',')[0]}: the reward can't be told: the advantages aren't those of the sum of "
            f"{', '.join(functions) or 'any columns'} (functions with weights, or columns of log_extra); type "
            "rejudge.reward=<the column to compare with>"
        )


def read_verl(rows: Iterator[Place], reading: Reading) -> Iterator[ForeignRollout]:
    """<step>.jsonl of verl's trainer.rollout_data_dir and validation_data_dir (verl 0.9.1,
    verl/trainer/ppo/ray_trainer.py, _write_generations): input and output are decoded without special tokens.

    The uid of its v1 trainer is that of the prompt, the rollout and the output, joined by `_`.
    """
    name = reading.reward or "score"
    for _, where, row in rows:
        uid = str(row.get("uid") or "")
        yield make_rollout(
            {
                "prompt": row["input"],
                "reward_model": None if row.get("gts") is None else {"ground_truth": row["gts"]},
                "data_source": row.get("data_source"),
                "extra_info": row.get("extra_info"),
            },
            row["output"], where, reading,
            step=row["step"],
            group=uid.rsplit("_", 2)[0] if uid.count("_") >= 2 else uid,
            reward=to_reward(row.get(name), f"{where}: {name}"),
            failure=find_failure(row),
            is_stripped=True,
        )  # fmt: skip


def read_traces(rows: Iterator[Place], reading: Reading) -> Iterator[ForeignRollout]:
    """traces.jsonl of verifiers and prime-rl: a line per episode, with a graph of messages for each agent (verifiers
    0.4.0, verifiers/v1/utils/trace_store.py, episode.py, trace.py; prime-rl 559b447, src/prime_rl/monitors/file.py).

    A trace that isn't ok, or has no reward, counts as 0 there; here its reward failed.
    """
    for _, where, row in rows:
        for place, trace in enumerate(require_list(row["traces"], f"{where}: traces")):
            at = f"{where}: traces[{place}]"
            yield from read_trace(row, require_object(trace, at), at, reading)


def read_trace(row: Row, trace: Row, where: str, reading: Reading) -> Iterator[ForeignRollout]:
    agent, task = get_object(trace, "agent"), get_object(trace, "task") or get_object(row, "task")
    if agent.get("trainable") is False:
        reading.findings.add("traces of agents that don't learn are left out", where)
        return
    found = enumerate(require_list(trace.get("nodes", []), f"{where}.nodes"))
    nodes = follow_branch([require_object(node, f"{where}.nodes[{place}]") for place, node in found], f"{where}.nodes")
    begin = next((place for place, node in enumerate(nodes) if node.get("sampled")), None)
    if begin is None:
        reading.findings.add("traces have no answer of the policy, and are left out", where)
        return
    given = get_object(trace, "rewards")
    names = list(given) if reading.reward is None else [reading.reward]
    scores = {name: to_reward(get_object(given, name).get("score"), f"{where}.rewards.{name}") for name in names}
    weights = {name: to_reward(get_object(given, name).get("weight", 1.0), where) or 0.0 for name in names}
    parts = {name: score for name, score in scores.items() if score is not None}
    failure = "" if len(parts) == len(names) > 0 else NO_REWARD
    data, messages = get_object(task, "data"), [node.get("message") for node in nodes]
    group = str(get_object(row, "group").get("id") or task.get("key") or task.get("hash") or "")
    yield make_rollout(
        {
            "prompt": messages[:begin],
            "reference": to_reference(data.get("answer")),
            "source": get_object(row, "env").get("id") or None,
            **without(data, *TASK_DATA, *FIELDS),
        },
        messages[begin:], where, reading,
        step=get_object(get_object(row, "run"), "work").get("step"),
        group=f"{group} {agent.get('name', '')}".strip(),
        reward=sum(score * (1.0 if reading.reward else weights[name]) for name, score in parts.items()),
        failure=describe_error(trace) if trace.get("ok") is False else failure,
        parts=parts,
        is_truncated=str(trace.get("stop_condition")).startswith("max_"),
    )  # fmt: skip


def follow_branch(nodes: Sequence[Row], where: str) -> list[Row]:
    """The nodes from a root of a graph to its last leaf."""
    parents = {node.get("parent") for node in nodes}
    at: object = next((place for place in reversed(range(len(nodes))) if place not in parents), None)
    path: list[int] = []
    while at is not None:
        if not isinstance(at, int) or not 0 <= at < len(nodes) or at in path:
            raise ValueError(f"{where}: expected the place of an earlier node as parent, got {format_value(at)}")
        path.append(at)
        at = nodes[at].get("parent")
    return [nodes[place] for place in reversed(path)]


def describe_error(trace: Row) -> str:
    """What ended a trace that isn't ok. Its errors are those of all attempts."""
    errors = require_list(trace.get("errors", []), "errors")
    last = errors[-1] if errors and isinstance(errors[-1], dict) else {}
    return f"error: {last.get('type', '')} {last.get('message', '')}"[:MAX_FAILURE].rstrip()


def read_slime(rows: Iterator[Place], reading: Reading) -> Iterator[ForeignRollout]:
    """What slime's --save-debug-rollout-data writes (slime 624b824, slime/observability/rollout_data_utils.py, and
    Sample in slime/utils/types.py): prompt and response have their special tokens.
    """
    for _, where, row in rows:
        reward, status = row["reward"], str(row["status"])
        if isinstance(reward, Mapping):
            if reading.reward not in reward:
                raise ValueError(
                    f"{where}: reward: has {', '.join(map(str, reward))}; type rejudge.reward=<one of them>, which was "
                    "slime's --reward-key"
                )
            reward = reward[reading.reward]
        yield make_rollout(
            {
                "prompt": row["prompt"],
                "reference": to_reference(row.get("label")),
                "metadata": row.get("metadata") or None,
            },
            row["response"], where, reading,
            step=row.get("step"),
            group="" if row.get("group_index") is None else str(row["group_index"]),
            reward=to_reward(reward, f"{where}: reward"),
            failure=f"status: {status}" if status in ("aborted", "failed") else "",
            is_truncated=status == "truncated",
        )  # fmt: skip


def slime_rows(file: Path) -> Iterator[Place]:
    """The samples of a .pt file, by a reader that executes nothing of it. Raises ValueError."""
    import torch

    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ValueError(f"{file}: no such file; a relative path starts at {Path.cwd()}") from error
    except Exception as error:  # torch documents no type
        raise ValueError(
            f"{file}: can't be read without executing what it holds, which is never done "
            f"({str(error).splitlines()[0]}); where you trust it, write its samples as JSON Lines with prompt, "
            "response, reward, label and step"
        ) from error
    samples = stored.get("samples") if isinstance(stored, dict) else None
    if not isinstance(samples, list):
        raise ValueError(f"{file}: expected what slime's --save-debug-rollout-data writes, an object with samples")
    for number, sample in enumerate(samples):
        where = f"{file}, sample {number}"
        yield number, where, {**require_object(sample, where), "step": stored.get("rollout_id")}


def read_plain(rows: Iterator[Place], reading: Reading) -> Iterator[ForeignRollout]:
    """Columns of any other trainer: prompt or messages, a response or a list of them, and their rewards."""
    for number, where, row in rows:
        response = next(name for name in RESPONSES if name in row)
        reward = reading.reward or next(name for name in REWARDS if name in row)
        group = str(next((row[name] for name in GROUPS if row.get(name) is not None), ""))
        replies, rewards = [row[response]], [row.get(reward)]
        if response in LISTS:
            replies, group = require_list(row[response], f"{where}: {response}"), group or f"row {number}"
            rewards = require_list(row.get(reward), f"{where}: {reward}")
            if len(replies) != len(rewards):
                raise ValueError(f"{where}: {response} has {len(replies)} entries, {reward} has {len(rewards)}")
        for place, (reply, one) in enumerate(zip(replies, rewards, strict=True)):
            yield make_rollout(
                without(row, *RESPONSES, *REWARDS, *GROUPS, *STEPS, *FAILURES, reward), reply, where, reading,
                step=next((row[name] for name in STEPS if row.get(name) is not None), None),
                group=group,
                reward=to_reward(one, f"{where}: {reward}" + f"[{place}]" * (response in LISTS)),
                failure=find_failure(row),
            )  # fmt: skip


FORMS: Mapping[str, Form] = {
    "TRL's completions": Form(needs=("step", "prompt", "completion", "advantage"), read=read_trl),
    "verl's dump": Form(needs=("input", "output", "score", "step"), read=read_verl),
    "traces of verifiers and prime-rl": Form(needs=("task", "traces", "ok"), read=read_traces, is_nested=True),
    "slime's samples": Form(
        needs=("prompt", "response", "reward", "status", "response_length"), read=read_slime, is_nested=True
    ),
    "plain columns": Form(needs=("prompt|messages", "|".join(RESPONSES), "|".join(REWARDS)), read=read_plain),
}


# -- fields ------------------------------------------------------------------------------------------------------------


def make_rollout(
    columns: Row, reply: object, where: str, reading: Reading, *,
    step: object = None, group: str = "", reward: float | None, failure: str = "",
    parts: Mapping[str, float] | None = None, is_truncated: bool = False, is_stripped: bool = False,
) -> ForeignRollout:  # fmt: skip
    """A rollout from what its row has. is_stripped: whether its prompt was decoded without its special tokens."""
    name = "messages" if "messages" in columns else "prompt"
    prompt, found = columns.get(name), None
    if isinstance(prompt, str):
        found = split_prompt(prompt, f"{where}: {name}", reading, is_stripped=is_stripped)
        if found is not None:
            prompt = [{"role": one.role, "content": one.content} for one in found.messages]
    elif isinstance(prompt, Sequence):
        prompt = [plain_message(one, f"{where}: {name}[{place}]") for place, one in enumerate(prompt)]
    row = {"prompt": prompt, **{key: value for key, value in without(columns, name).items() if value is not None}}
    return ForeignRollout(
        where=where,
        prompt=parse_prompt(row, where, "foreign", reading.findings),
        reply=parse_reply(reply, f"{where}: response", found.ends if found else ENDS),
        begun=(found.begun if found else None) or "",
        step=to_step(step, where),
        group=group,
        reward=reward,
        failure=failure or (NO_REWARD if reward is None else ""),
        parts=parts or {},
        is_truncated=is_truncated,
    )


def split_prompt(text: str, where: str, reading: Reading, *, is_stripped: bool) -> Conversation | None:
    """The messages of a templated prompt; None for a text that isn't one. Raises ValueError for an ambiguous one."""
    try:
        found = split_templated(text) or (split_stripped(text) if is_stripped else None)
    except ValueError as error:
        if (messages := reading.find(text)) is None:
            raise ValueError(
                f"{where}: {error}; to find it among the prompts of its run, type data.path=<their file> policy=path "
                "policy.path=<the model, for its chat template>"
            ) from error
        return Conversation(messages=tuple(messages), begun="")
    if found is None and is_stripped:
        if (messages := reading.find(text)) is not None:
            return Conversation(messages=tuple(messages), begun="")
        reading.findings.add("prompts have no known template, and are read as a user's text", where)
    return found


def parse_reply(reply: object, where: str, ends: Sequence[str]) -> Reply:
    """A text without its end tokens, or messages. A list of one message is its text."""
    if isinstance(reply, str):
        refuse_half_characters([("text", reply)], where)
        return remove_end_tokens(reply, ends)
    if not isinstance(reply, Sequence) or not reply:
        raise ValueError(f"{where}: expected a text, or a list of messages, got {format_value(reply)}")
    messages = []
    for place, one in enumerate(reply):
        plain = plain_message(one, f"{where}[{place}]")
        if (role := plain["role"]) not in REPLY_ROLES:
            raise ValueError(
                f"{where}[{place}].role: expected one of {', '.join(REPLY_ROLES)}, got {format_value(role)}"
            )
        refuse_half_characters([("content", plain["content"])], f"{where}[{place}]")
        messages.append(Message(role=role, content=plain["content"]))
    if not any(message.role == "assistant" for message in messages):
        raise ValueError(f"{where}: expected a message with role assistant, which is judged; none of them has it")
    return messages[0].content if len(messages) == 1 else tuple(messages)


def plain_message(message: object, where: str) -> dict[str, str]:
    """Role and content, as text: parts of text joined, the reasoning before it, calls of tools behind it."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where}: expected an object with role and content, got {format_value(message)}")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f"{where}.content: expected text; images and other media aren't judged")
        content = "\n".join(map(str, parts))
    if content is not None and not isinstance(content, str):
        raise ValueError(f"{where}.content: expected a text, got {format_value(content)}")
    thought = message.get("reasoning_content")
    calls = [show_call(call) for call in message.get("tool_calls") or [] if isinstance(call, Mapping)]
    texts = [f"<think>\n{thought}\n</think>\n" if isinstance(thought, str) and thought else "", content or "", *calls]
    return {"role": message["role"], "content": "\n".join(text for text in texts if text)}


def show_call(call: Mapping[str, object]) -> str:
    """A call of a tool, as Hermes writes it."""
    function = call.get("function")
    named = function if isinstance(function, Mapping) else call
    arguments = named.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(named.get("name"))}, "arguments": {text}}}\n</tool_call>'


def to_reward(value: object, where: str) -> float | None:
    """A finite number; None for nothing, NaN and infinity, which trainers write for none."""
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise ValueError(f"{where}: expected a number, or nothing for a failure, got {format_value(value)}")
    return float(value) if math.isfinite(value) else None


def to_step(value: object, where: str) -> int | None:
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value < math.inf
        or value != int(value)
    ):
        raise ValueError(f"{where}: step: expected a whole number from 0 on, got {format_value(value)}")
    return int(value)


def find_failure(row: Row) -> str:
    """What a row says of a failure: a text, an object or true; empty if nothing."""
    name = next((name for name in FAILURES if row.get(name)), None)
    return "" if name is None else f"{name}: {format_value(row[name])}"[:MAX_FAILURE]


def to_reference(value: object) -> object:
    """The value, if it can be a reference; else None."""
    is_one = isinstance(value, str | int | float) and not isinstance(value, bool) and value == value
    return value if is_one else None


def require_list(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: expected a list, got {format_value(value)}")
    return value


def get_object(row: Mapping[str, object], name: str) -> Row:
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def without(row: Row, *names: str) -> Row:
    return {name: value for name, value in row.items() if name not in names}
