"""Rollouts and judgements as plain JSON objects, and back. Pure; the recorder writes the files.

In a compact journal the token ids and log-probs of a line are packed into one field of it:

    {..., "turns": [{"token_ids": 17, "logprobs": 17, ...}], ..., "packed": "eJxjYGBgY..."}

Where a list stood stands its length. `packed` is base64 of zlib of all ids of the line (int32), then all its log-probs
(float32), little-endian, in the order in which they stand. So the line's checksum and its torn tail mean what they do
without it, and judgements that share a prompt share its bytes. A thinned line has the lengths, and nothing packed.
"""

import base64
import functools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import islice
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from grmpipe.config.keys.secrets import environment_secrets, mask
from grmpipe.models.types import UNKNOWN_ID, Completion, Message, TokenScores, ToolResults
from grmpipe.types import (
    CascadeEvent,
    Criterion,
    Failed,
    FailedJudgement,
    JudgedCriterion,
    Judgement,
    JudgeReport,
    Prompt,
    Rollout,
    StopAudit,
    TeacherScores,
    Turn,
    Verdict,
)

Record = dict[str, Any]  # one line of a journal
PACKED, THINNED, TEACHER = "packed", "thinned", "teacher"
NUMBERS, TEXT = "numbers", "text"  # what was dropped of a thinned line
MAX_NUMBERS = 1 << 26  # in a line: more than any has, and less than the memory
UNKNOWN_LOGPROB = math.nan  # what a thinned line is read as: nothing can be trained on it
IDS, LOGPROBS = ("token_ids", "new_ids", "prompt_ids"), "logprobs"
NESTED = ("turns", "judgements", "failures", "completion", "failed", "principles")  # none of them is a user's
BY_NAME = "by_judge"


def pack_numbers(record: Record) -> Record:
    """Pack a record in place. Log-probs come back as the float32 that the sampler gave."""
    ids: list[int] = []
    logprobs: list[float] = []
    for holder, key in _places(record):
        (logprobs if key == LOGPROBS else ids).extend(holder[key])
        holder[key] = len(holder[key])
    plain = np.array(ids, "<i4").tobytes() + np.array(logprobs, "<f4").tobytes()
    record[PACKED] = base64.b64encode(zlib.compress(plain)).decode("ascii")
    return record


def drop_numbers(record: Record) -> Record:
    """Drop the ids and log-probs of a record in place, packed or not; their lengths stay. A teacher's leave none."""
    record.pop(TEACHER, None)
    if record.pop(PACKED, None) is None:
        for holder, key in _places(record):
            holder[key] = len(holder[key])
    return record


def unpack_numbers(record: Record) -> Record:
    """Undo `pack_numbers` in place; a record that isn't packed stays as it is. Numbers that were dropped are unknown
    ones, as many. Raises ValueError if its numbers don't fit.
    """
    if PACKED not in record and THINNED not in record:
        return record
    packed = record.pop(PACKED, None)
    places = list(_places(record))
    lengths = [holder[key] for holder, key in places]
    if not all(type(length) is int and length >= 0 for length in lengths) or sum(lengths) > MAX_NUMBERS:
        raise ValueError("its packed numbers have no lengths that a line can have")
    if packed is None:
        for holder, key in places:
            holder[key] = [UNKNOWN_LOGPROB if key == LOGPROBS else UNKNOWN_ID] * holder[key]
        return record
    num_logprobs = sum(length for length, (_, key) in zip(lengths, places, strict=True) if key == LOGPROBS)
    num_ids = sum(lengths) - num_logprobs
    try:
        plain = zlib.decompressobj().decompress(base64.b64decode(packed, validate=True), 4 * sum(lengths) + 1)
    except zlib.error as error:
        raise ValueError(f"its packed numbers can't be read ({error})") from error
    if len(plain) != 4 * (num_ids + num_logprobs):
        raise ValueError(f"its packed numbers are {len(plain) // 4}, not {num_ids} ids and {num_logprobs} log-probs")
    ids = iter(np.frombuffer(plain, "<i4", num_ids).tolist())
    logprobs = iter(np.frombuffer(plain, "<f4", offset=4 * num_ids).tolist())
    for holder, key in places:
        holder[key] = list(islice(logprobs if key == LOGPROBS else ids, holder[key]))
    return record


def _places(record: Record) -> Iterator[tuple[Record, str]]:
    """Every list of ids or log-probs, by the object that holds it and its key, in the order of the line."""
    for key, value in list(record.items()):
        if key in IDS or key == LOGPROBS:
            yield record, key
        elif key in NESTED or key == BY_NAME:
            nested = value.values() if key == BY_NAME else value if isinstance(value, list | tuple) else [value]
            for one in nested:
                yield from _places(one)


DIGITS, MAX_EXPONENT = 9, 308
# Binary exponent of a number, from np.frexp -> the power of ten by which it has DIGITS digits, or one more, before the
# point. Negative exponents count from the end, as numpy's indices do.
SCALES = np.array(
    [
        float(f"1e{min(max(DIGITS - 1 - math.floor((exponent - 1) * math.log10(2)), 0), MAX_EXPONENT)}")
        for exponent in (*range(1025), *range(-1074, 0))
    ]
)
# Left out where they are empty: of a turn, of a rollout, of a completion, and of anything else.
RARE_IN_TURN = ("rewritten", "state_key", "faults", "env_s", "tool_calls", "rewards")
RARE_IN_ROLLOUT = ("reason", "attempt", "boot_s", "took_s", "opening", "env_failures", "state")
RARE_IN_COMPLETION = (
    "unseen_tokens",
    "thought_tokens",
    "thought_chars",
    "inserted",
    "asked",
    "tool_results",
    "stop_text",
)
RARE: Mapping[type, tuple[str, ...]] = {
    ToolResults: ("faults", "took_s"),
    Message: ("tool_calls", "name", "tool_call_id"),
    Prompt: ("rubric", "info", "step", "self_judging"),
    Judgement: ("criteria", "unread", "quotes"),
    JudgedCriterion: ("tags", "shared", "left_out", "fault", "caps"),
    Criterion: ("essential", "tags", "name", "levels", "evidence", "from_step"),
    Verdict: ("absent", "normalised", "teacher"),
}
PLAIN = frozenset({str, int, float, bool, type(None)})  # written as they are
T = TypeVar("T")


def encode_logprobs(logprobs: Sequence[float]) -> list[float]:
    """Log-probs with nine or ten digits, which give each float32 of the sampler back exactly, in two thirds of the
    bytes. Zeros, infinities and NaN are kept.
    """
    values_N = np.array(logprobs, dtype=np.float64)
    scales_N = SCALES[np.frexp(values_N)[1]]
    return cast("list[float]", (np.rint(values_N * scales_N) / scales_N).tolist())


def decode_logprobs(values: Sequence[float]) -> tuple[float, ...]:
    with np.errstate(over="raise"):  # a number that no float32 is
        return tuple(np.asarray(values, dtype=np.float32).tolist())


def encode(value: object) -> Any:
    """A value of the flow as plain JSON: many times faster than dataclasses.asdict, which copies every token id. What a
    server or a program said of a failure may hold a secret.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, tuple):
        return [encode(one) for one in value] if value and is_dataclass(value[0]) else value
    if isinstance(value, Completion):
        return encode_completion(value)
    if isinstance(value, Failed):
        value = replace(value, detail=mask(value.detail, environment_secrets()))
    if not is_dataclass(kind):
        return dict(value) if isinstance(value, Mapping) else value
    usual, rare = name_fields(kind)
    record = {name: own if type(own := getattr(value, name)) in PLAIN else encode(own) for name in usual}
    if record.get("turn", 0) is None:
        del record["turn"]
    return record | encode_some(value, rare)


@functools.cache
def name_fields(kind: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields of a dataclass that a record always has, and the rare ones."""
    rare = RARE.get(kind, ())
    return tuple(field.name for field in fields(kind) if field.name not in rare), rare


def encode_some(value: object, names: Sequence[str]) -> Record:
    """These fields, as far as they aren't empty."""
    return {name: encode(own) for name in names if (own := getattr(value, name))}


def encode_completion(completion: Completion) -> Record:
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "token_ids": completion.token_ids,
        "logprobs": encode_logprobs(completion.logprobs),
        "versions": encode(completion.versions),
        **encode_some(completion, RARE_IN_COMPLETION),
    }


def with_logprobs(record: Record) -> Record:
    """The record of a completion, with log-probs as the sampler gave them."""
    return {**record, "logprobs": decode_logprobs(record["logprobs"])}


def decode(record: Record, kind: type[T]) -> T:
    """A value as `encode` wrote it. Raises ValidationError."""
    if "completion" in record:
        record = {**record, "completion": with_logprobs(record["completion"])}
    return msgspec.convert(with_logprobs(record) if kind is Completion else record, kind)


def encode_turn(turn: Turn) -> Record:
    """The record of a turn: what is new in it, so that a long episode takes no more room than its tokens."""
    new = {"new_ids": turn.new_ids, "replies": encode(turn.replies)}
    return {**encode_completion(turn.completion), **new, **encode_some(turn, RARE_IN_TURN)}


def encode_rollout(rollout: Rollout) -> Record:
    return {
        "group_id": rollout.group_id,
        "sibling": rollout.sibling,
        "status": rollout.status,
        **encode_some(rollout, RARE_IN_ROLLOUT),
        "turns": [encode_turn(turn) for turn in rollout.turns],
    }


def decode_rollout(record: Record) -> Rollout:
    """A rollout, packed or not."""
    record = unpack_numbers(record)
    turns = [{**turn, "completion": with_logprobs(turn)} for turn in record["turns"]]
    rollout = msgspec.convert({**record, "turns": turns}, Rollout)
    if not rollout.turns:
        raise ValueError("a rollout without turns")
    for turn in rollout.turns:
        if len(turn.completion.logprobs) != len(turn.completion.token_ids):
            raise ValueError(f"{len(turn.completion.logprobs)} log-probs of {len(turn.completion.token_ids)} tokens")
    return rollout


def decode_sampled(record: Record) -> Rollout:
    """Like `decode_rollout`, for a rollout of a policy in training: each turn says which versions sampled it."""
    rollout = decode_rollout(record)
    if not all(turn.completion.versions for turn in rollout.turns):
        raise ValueError("a turn without the versions that sampled it")
    return rollout


def decode_right(record: Record) -> float | None:
    """How right an answer is. Runs of earlier versions wrote true and false where a judge was trained on labels."""
    right = msgspec.convert(record.get("right"), float | bool | None)
    return None if right is None else float(right)


def decode_failed(record: Record) -> Failed:
    return decode(record, FailedJudgement if "completion" in record else Failed)


def encode_report(report: JudgeReport) -> Record:
    """The record of a report, under `verdict` or, if the judge failed, under `failed`, so that no reader confuses
    them.

    With several judges every judgement and failure says whose it is, and is written once: `by_judge` has the rest of
    each judge's report.
    """
    named = report.own_reports.items()
    record = {
        **encode_own(report),
        "judgements": [{**encode(one), **of_judge(name)} for name, own in named for one in own.judgements],
        "failures": [{**encode(one), **of_judge(name)} for name, own in named for one in own.failures],
    }
    if report.by_judge:
        record["by_judge"] = {name: encode_own(own) for name, own in report.by_judge.items()}
    if report.cascades:
        record["cascades"] = encode(report.cascades)
    if isinstance(report.verdict, Verdict) and report.verdict.teacher is not None:
        record[TEACHER] = encode_teacher(report.verdict.teacher)
    return record


def encode_teacher(scores: TeacherScores) -> Record:
    """The scores of a teacher, packed: of each turn base64 of the log-probs of its tokens (float32), then, if there are
    any, of those of the likely tokens, and their ids (int32), little-endian.
    """
    turns = []
    for one in scores.by_turn:
        num_top = 0 if one.top_ids_NK is None else one.top_ids_NK.shape[1]
        plain = np.asarray(one.logprobs_N, "<f4").tobytes()
        if one.top_ids_NK is not None and one.top_logprobs_NK is not None:
            plain += np.asarray(one.top_logprobs_NK, "<f4").tobytes() + np.asarray(one.top_ids_NK, "<i4").tobytes()
        turns.append({"top_k": num_top, "scores": base64.b64encode(plain).decode("ascii")})
    return {"model": scores.teacher, "turns": turns}


def decode_teacher(record: Record) -> TeacherScores:
    return TeacherScores(
        teacher=msgspec.convert(record["model"], str), by_turn=tuple(decode_scores(turn) for turn in record["turns"])
    )


def decode_scores(turn: Record) -> TokenScores:
    plain, num_top = base64.b64decode(turn["scores"], validate=True), msgspec.convert(turn["top_k"], int)
    num_tokens = len(plain) // (4 * (1 + 2 * num_top))
    numbers = np.frombuffer(plain, "<f4")
    if not num_top:
        return TokenScores(logprobs_N=numbers)
    shape, top = (num_tokens, num_top), num_tokens * (1 + num_top)
    return TokenScores(
        logprobs_N=numbers[:num_tokens],
        top_ids_NK=np.frombuffer(plain, "<i4")[top:].reshape(shape),
        top_logprobs_NK=numbers[num_tokens:top].reshape(shape),
    )


def of_judge(name: str) -> Record:
    return {"judge": name} if name else {}


def encode_own(report: JudgeReport) -> Record:
    """A report without its judgements and failures."""
    verdict = report.verdict
    if isinstance(verdict, Failed):
        ended = {"failed": encode(verdict)}
    else:  # the scores of its teacher stand once in a line
        ended = {"verdict": encode(verdict if verdict.teacher is None else replace(verdict, teacher=None))}
    return {
        **ended,
        **({} if report.principles is None else {"principles": encode(report.principles)}),
        **({"saved_tokens": report.saved_tokens} if report.saved_tokens else {}),
        **({} if report.audit is None else {"audit": encode(report.audit)}),
        **({"criteria": encode(report.criteria)} if report.criteria else {}),
        **({} if report.rubric_version is None else {"rubric_version": report.rubric_version}),
    }


def decode_report(record: Record) -> JudgeReport:
    """A report, packed or not."""
    record = unpack_numbers(record)
    judgements = [(one.get("judge", ""), decode(one, Judgement)) for one in record["judgements"]]
    failures = [(one.get("judge", ""), decode_failed(one)) for one in record["failures"]]

    def decode_own(own: Record, name: str | None) -> JudgeReport:
        """name: of the judge whose evidence it gets; None: that of all."""
        return JudgeReport(
            verdict=decode_failed(own["failed"]) if "failed" in own else decode(own["verdict"], Verdict),
            judgements=tuple(one for judge, one in judgements if name in (None, judge)),
            failures=tuple(one for judge, one in failures if name in (None, judge)),
            principles=decode(own["principles"], Completion) if "principles" in own else None,
            saved_tokens=msgspec.convert(own.get("saved_tokens", 0), int),
            audit=decode(own["audit"], StopAudit) if "audit" in own else None,
            criteria=msgspec.convert(own.get("criteria", ()), tuple[JudgedCriterion, ...]),
            rubric_version=msgspec.convert(own.get("rubric_version"), int | None),
        )

    whole = decode_own(record, None)
    if TEACHER in record and isinstance(whole.verdict, Verdict):
        scores = decode_teacher(record[TEACHER])
        whole = replace(whole, verdict=replace(whole.verdict, teacher=scores), taught=scores)
    return replace(
        whole,
        by_judge={name: decode_own(own, name) for name, own in record.get("by_judge", {}).items()},
        cascades=msgspec.convert(record.get("cascades", ()), tuple[CascadeEvent, ...]),
    )
