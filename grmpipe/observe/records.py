"""Rollouts and judgements as plain JSON objects, and back. Pure; the recorder writes the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np

from grmpipe.config.redact import environment_secrets, mask
from grmpipe.types import (
    CascadeEvent,
    Criterion,
    Failed,
    FailedJudgement,
    Judgement,
    JudgeReport,
    Prompt,
    RewardSpan,
    Rollout,
    StopAudit,
    Turn,
    Verdict,
)
from models.types import Completion, Message, ToolCall, VersionSpan

DIGITS, MAX_EXPONENT = 9, 308
POWERS_OF_TEN = np.array([float(f"1e{exponent}") for exponent in range(MAX_EXPONENT + 1)])
# Left out where they are empty.
RARE_IN_TURN = ("rewritten", "state_key", "faults", "env_s")
RARE_IN_ROLLOUT = ("reason", "attempt", "boot_s", "took_s")
RARE_FIELDS = ("unseen_tokens", "thought_tokens", "thought_chars", "inserted", "stop_text")  # of a completion; as above
Record = dict[str, Any]  # one line of a journal; used in this file and the recorder only


def encode_logprobs(logprobs: Sequence[float]) -> list[float]:
    """Log-probs with nine digits, which give each float32 of the sampler back exactly, in two thirds of the bytes."""
    values_N = np.array(logprobs, dtype=np.float64)
    with np.errstate(all="ignore"):
        exponents_N = np.floor(np.log10(np.abs(values_N)))
        places_N = np.fmax(np.fmin(DIGITS - 1 - exponents_N, MAX_EXPONENT), 0)
        scales_N = POWERS_OF_TEN[places_N.astype(np.intp)]
        rounded_N = np.rint(values_N * scales_N) / scales_N
    # Zeros, infinities and NaN are kept.
    return cast("list[float]", np.where(np.isfinite(rounded_N), rounded_N, values_N).tolist())


def decode_logprobs(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(np.asarray(values, dtype=np.float32).tolist())


def encode_calls(calls: Sequence[ToolCall]) -> list[Record]:
    return [{"name": call.name, "arguments": dict(call.arguments), "call_id": call.call_id} for call in calls]


def encode_message(message: Message) -> Record:
    record: Record = {"role": message.role, "content": message.content}
    if message.tool_calls:
        record["tool_calls"] = encode_calls(message.tool_calls)
    return record | {key: value for key in ("name", "tool_call_id") if (value := getattr(message, key))}


def encode_messages(messages: Sequence[Message]) -> list[Record]:
    return [encode_message(message) for message in messages]


def decode_messages(records: Sequence[Record]) -> tuple[Message, ...]:
    return msgspec.convert(records, tuple[Message, ...])


def encode_completion(completion: Completion) -> Record:
    rare = {name: value for name in RARE_FIELDS if (value := getattr(completion, name))}
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "token_ids": completion.token_ids,
        "logprobs": encode_logprobs(completion.logprobs),
        "versions": [encode_flat(span) for span in completion.versions],
        **rare,
    }


def with_logprobs(record: Record) -> Record:
    """The record of a completion, with log-probs as the sampler gave them."""
    return {**record, "logprobs": decode_logprobs(record["logprobs"])}


def decode_completion(record: Record) -> Completion:
    return msgspec.convert(with_logprobs(record), Completion)


def encode_prompt(prompt: Prompt) -> Record:
    flat = encode_flat(prompt)
    del flat["rubric"], flat["info"]
    rubric = {"rubric": [encode_flat(criterion) for criterion in prompt.rubric]} if prompt.rubric else {}
    info = {"info": dict(prompt.info)} if prompt.info else {}
    return {**flat, "messages": encode_messages(prompt.messages), **rubric, **info}


def decode_prompt(record: Record) -> Prompt:
    return msgspec.convert(record, Prompt)


def encode_turn(turn: Turn) -> Record:
    """The record of a turn: what is new in it, so that a long episode takes no more room than its tokens."""
    rare: Record = {name: value for name in RARE_IN_TURN if (value := getattr(turn, name))}
    if turn.tool_calls:
        rare["tool_calls"] = encode_calls(turn.tool_calls)
    if turn.rewards:
        rare["rewards"] = dict(turn.rewards)
    replies = encode_messages(turn.replies)
    return {**encode_completion(turn.completion), "new_ids": turn.new_ids, "replies": replies, **rare}


def encode_rollout(rollout: Rollout) -> Record:
    rare: Record = {name: value for name in RARE_IN_ROLLOUT if (value := getattr(rollout, name))}
    if rollout.opening:
        rare["opening"] = encode_messages(rollout.opening)
    if rollout.env_failures:
        rare["env_failures"] = [encode_failed(failed) for failed in rollout.env_failures]
    return {
        "group_id": rollout.group_id,
        "sibling": rollout.sibling,
        "status": rollout.status,
        **rare,
        "turns": [encode_turn(turn) for turn in rollout.turns],
    }


def decode_rollout(record: Record) -> Rollout:
    turns = [{**turn, "completion": with_logprobs(turn)} for turn in record["turns"]]
    return msgspec.convert({**record, "turns": turns}, Rollout)


def encode_judgement(judgement: Judgement) -> Record:
    return {**encode_about(judgement), "completion": encode_completion(judgement.completion)}


def decode_judgement(record: Record) -> Judgement:
    return msgspec.convert({**record, "completion": with_logprobs(record["completion"])}, Judgement)


def encode_failed(failed: Failed) -> Record:
    if isinstance(failed, FailedJudgement):
        return {**encode_about(failed), "completion": encode_completion(failed.completion)}
    return encode_about(failed)


def encode_about(value: Judgement | Failed) -> Record:
    """The fields; the turn only if it is about one. What a server or a program said of a failure may hold a secret."""
    flat = encode_flat(value)
    if "detail" in flat:
        flat["detail"] = mask(flat["detail"], environment_secrets())
    if value.turn is None:
        del flat["turn"]
    return flat


def decode_failed(record: Record) -> Failed:
    if "completion" not in record:
        return msgspec.convert(record, Failed)
    return msgspec.convert({**record, "completion": with_logprobs(record["completion"])}, FailedJudgement)


def encode_verdict(verdict: Verdict) -> Record:
    flat = encode_flat(verdict)
    if not verdict.absent:
        del flat["absent"]
    spans = {"rewards": verdict.rewards, "normalised": verdict.normalised}
    if not verdict.normalised:
        del flat["normalised"], spans["normalised"]
    encoded = {name: [encode_flat(span) for span in some] for name, some in spans.items()}
    return {**flat, **encoded, "breakdown": dict(verdict.breakdown)}


def decode_verdict(record: Record) -> Verdict:
    return msgspec.convert(record, Verdict)


def encode_report(report: JudgeReport) -> Record:
    """The record of a report, under `verdict` or, if the judge failed, under `failed`, so that no reader confuses
    them.

    With several judges every judgement and failure says whose it is, and is written once: `by_judge` has the rest of
    each judge's report.
    """
    named = report.own_reports.items()
    record = {
        **encode_own(report),
        "judgements": [{**encode_judgement(one), **of_judge(name)} for name, own in named for one in own.judgements],
        "failures": [{**encode_failed(one), **of_judge(name)} for name, own in named for one in own.failures],
    }
    if report.by_judge:
        record["by_judge"] = {name: encode_own(own) for name, own in report.by_judge.items()}
    if report.cascades:
        record["cascades"] = [encode_flat(event) for event in report.cascades]
    return record


def of_judge(name: str) -> Record:
    return {"judge": name} if name else {}


def encode_own(report: JudgeReport) -> Record:
    """A report without its judgements and failures."""
    verdict = report.verdict
    ended = {"failed": encode_failed(verdict)} if isinstance(verdict, Failed) else {"verdict": encode_verdict(verdict)}
    return {
        **ended,
        **({} if report.principles is None else {"principles": encode_completion(report.principles)}),
        **({"saved_tokens": report.saved_tokens} if report.saved_tokens else {}),
        **({} if report.audit is None else {"audit": encode_flat(report.audit)}),
    }


def decode_report(record: Record) -> JudgeReport:
    judgements = [(one.get("judge", ""), decode_judgement(one)) for one in record["judgements"]]
    failures = [(one.get("judge", ""), decode_failed(one)) for one in record["failures"]]

    def decode_own(own: Record, name: str | None) -> JudgeReport:
        """name: of the judge whose evidence it gets; None: that of all."""
        return JudgeReport(
            verdict=decode_failed(own["failed"]) if "failed" in own else decode_verdict(own["verdict"]),
            judgements=tuple(one for judge, one in judgements if name in (None, judge)),
            failures=tuple(one for judge, one in failures if name in (None, judge)),
            principles=decode_completion(own["principles"]) if "principles" in own else None,
            saved_tokens=own.get("saved_tokens", 0),
            audit=msgspec.convert(own["audit"], StopAudit) if "audit" in own else None,
        )

    return replace(
        decode_own(record, None),
        by_judge={name: decode_own(own, name) for name, own in record.get("by_judge", {}).items()},
        cascades=msgspec.convert(record.get("cascades", ()), tuple[CascadeEvent, ...]),
    )


Flat = VersionSpan | RewardSpan | Criterion | Prompt | Rollout | Judgement | Failed | Verdict | StopAudit | CascadeEvent


def encode_flat(value: Flat) -> Record:
    """The fields of a flat dataclass: many times faster than dataclasses.asdict, which copies every token id."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
