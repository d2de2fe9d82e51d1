"""SGLang's events become completions: whole or new tokens, the version of every token, unexpected ends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hostile_json import hostile_answers

from grmpipe.models.engines.sglang.sglang_requests import (
    SglangRequest,
    SglangSample,
    Stretch,
    make_body,
    make_completion,
    make_scoring_body,
    make_spans,
    read_finish_reason,
    read_prompt_scores,
)
from grmpipe.models.engines.typed_json import NoAnswer, read_object
from grmpipe.models.types import EngineDied, EngineRefused, PromptScoring, SamplingParams, VersionSpan


def ticket_of(**params: Any) -> SglangRequest:
    return SglangRequest((1, 2, 3), SamplingParams(**{"max_new_tokens": 8, **params}), priority=4)


def event(ids: list[int], total: int, version: str = "0", finish: dict[str, Any] | None = None, **meta: Any) -> Any:
    logprobs = [[-0.5 - token_id, token_id, None] for token_id in ids]
    told = {"completion_tokens": total, "prompt_tokens": 3, "cached_tokens": 1, "weight_version": version}
    return {
        "output_ids": ids,
        "meta_info": {**told, "finish_reason": finish, "output_token_logprobs": logprobs, **meta},
    }


def body(**params: Any) -> Any:
    ticket = ticket_of(**params)
    return make_body(
        ticket, seed=0, stop=ticket.params.stop, stop_token_ids=(9,), vocab_size=272, namespace="n", whole=False
    )


@pytest.mark.parametrize("whole", [False, True])
def test_events_may_hold_the_new_tokens_or_all_so_far(whole: bool) -> None:
    sampled = SglangSample()
    for start, end in ((0, 1), (1, 4), (4, 6)):
        sampled.add(event(list(range(0 if whole else start, end)), total=end))
    assert sampled.token_ids == list(range(6))
    assert sampled.logprobs == [-0.5 - token_id for token_id in range(6)]
    assert sampled.num_prefilled == 2


def test_first_token_is_reported_once_and_not_by_an_event_without_tokens() -> None:
    told: list[int] = []
    ticket = ticket_of()
    ticket.listeners.append(lambda: told.append(1))
    ticket.add(event([], total=0))
    assert not told
    ticket.add(event([5], total=1))
    ticket.add(event([6], total=2))
    assert told == [1]


def test_where_top_p_restricts_tokens_the_log_probs_are_of_what_is_left() -> None:
    assert "return_sampling_mask" not in body() and "top_k" not in body()["sampling_params"]
    restricted = body(top_p=0.9)
    assert restricted["return_sampling_mask"] and restricted["sampling_params"]["top_k"] == 272
    assert body(top_k=20)["sampling_params"]["top_k"] == 20 and body(top_k=20)["return_sampling_mask"]
    assert body(min_p=0.1)["sampling_params"]["min_p"] == 0.1 and "min_p" not in restricted["sampling_params"]
    assert "return_sampling_mask" not in body(top_p=0.9, temperature=0.0)  # greedy samples from nothing
    sampled = SglangSample()
    sampled.add(event([5], total=1, output_token_sampling_logprobs=[-0.1]))
    assert sampled.logprobs == [-0.1]


def test_likely_tokens_follow_the_sampled_one_and_those_that_a_grammar_excludes_have_no_probability() -> None:
    assert body(top_logprobs=2)["top_logprobs_num"] == 2 and "top_logprobs_num" not in body()
    ticket = ticket_of(top_logprobs=2)
    ticket.add(event([5], total=1, output_top_logprobs=[[[-0.1, 5, None], [-2.5, 7, None]]]))
    ticket.add(event([6], total=2, output_top_logprobs=[[[0.0, 6, None], [None, 1, None]]], finish={"type": "stop"}))
    top = make_completion(ticket, "", "grm", {"0": 0}).top
    assert top is not None and top.ids_TK is not None
    assert top.ids_TK.tolist() == [[5, 5, 7], [6, 6, 1]]
    assert top.logprobs_TK.tolist() == [pytest.approx([-5.5, -0.1, -2.5]), [-6.5, 0.0, -float("inf")]]
    ticket.sampled.top.pop()
    with pytest.raises(NoAnswer, match="not 2 likely tokens for each of 2"):
        make_completion(ticket, "", "grm", {"0": 0})


def test_each_try_has_an_id_of_its_own_that_is_no_beginning_of_another() -> None:
    ids = []
    for ticket in (ticket_of(), ticket_of()):
        for _ in range(3):
            ticket.renew(lambda: None)
            ids.append(ticket.rid)
    assert len(set(ids)) == 6 and len({len(rid) for rid in ids}) == 1


def test_spans_are_the_servers_and_cover_all_tokens() -> None:
    spans = [Stretch(version="0", start=0, end=0), Stretch(version="3", start=0, end=2)]
    spans += [Stretch(version="4", start=2, end=5)]
    sampled = SglangSample(token_ids=[1] * 5, logprobs=[0.0] * 5, spans=spans)
    assert make_spans(sampled, "policy", {"0": 0, "3": 3, "4": 4}) == (
        VersionSpan(model="policy", version=3, start=0, end=2),
        VersionSpan(model="policy", version=4, start=2, end=5),
    )


def test_an_answer_that_was_cut_off_never_claims_a_newer_version_than_its_tokens_have() -> None:
    sampled = SglangSample()
    sampled.add(event([1], total=1, version="7"))
    sampled.add(event([2, 3], total=3, version="7"))
    sampled.add(event([4, 5], total=5, version="8"))  # some of them may be from before the push
    sampled.add(event([6], total=6, version="8"))
    assert [(span.version, span.start, span.end) for span in make_spans(sampled, "policy", {"7": 7, "8": 8})] == [
        (7, 0, 5),
        (8, 5, 6),
    ]


def test_nothing_sampled_is_an_empty_span_of_the_newest_version() -> None:
    spans = make_spans(SglangSample(), "policy", {"default": 0, "2": 2})
    assert spans == (VersionSpan(model="policy", version=2, start=0, end=0),)


def test_a_version_that_this_run_never_sent_is_an_error() -> None:
    ticket = ticket_of()
    ticket.add(event([1], total=1, version="12", finish={"type": "stop"}))
    with pytest.raises(RuntimeError, match=r"version '12'.*engine\.sglang\.urls"):
        make_completion(ticket, "", "policy", {"0": 0})


@pytest.mark.parametrize(("status", "error"), [(400, EngineRefused), (503, EngineDied), (None, EngineDied)])
def test_a_request_that_the_server_ended_by_itself_is_no_completion(status: int | None, error: type) -> None:
    ticket = ticket_of()
    ticket.add(event([1], total=1, finish={"type": "abort", "message": "out of memory", "status_code": status}))
    with pytest.raises(error, match="out of memory"):
        read_finish_reason(ticket)
    ticket.aborted = True
    assert read_finish_reason(ticket) == "abort"


def test_scores_of_a_prompt_are_read_from_the_first_wanted_token_on() -> None:
    body = make_scoring_body((5, 6, 7), top_k=2)
    assert body["top_logprobs_num"] == 2 and "top_logprobs_num" not in make_scoring_body((5, 6, 7))
    meta = {
        "input_token_logprobs": [(None, 5, None), (-1.0, 6, None), (-2.0, 7, None)],
        "input_top_logprobs": [None, [(-0.5, 8, None), (-1.0, 6, None)], [(-0.25, 9, None), (-2.0, 7, None)]],
    }
    scores = read_prompt_scores({"meta_info": meta}, 3, PromptScoring(start=2, top_k=2))
    assert scores.logprobs_N.tolist() == [-2.0]
    assert scores.top_ids_NK is not None and scores.top_ids_NK.tolist() == [[9, 7]]
    assert scores.top_logprobs_NK is not None and scores.top_logprobs_NK.tolist() == [[-0.25, -2.0]]
    assert read_prompt_scores({"meta_info": meta}, 3, PromptScoring(start=1)).logprobs_N.tolist() == [-1.0, -2.0]


def test_hostile_events_are_tokens_with_their_log_probs_and_versions_or_no_answer() -> None:
    """5,000 streams of two events, one of them changed."""
    done = {"finish_reason": {"type": "stop"}, "weight_versions": [{"version": "0", "start": 0, "end": 3}]}
    valid = [event([1], total=1), event([2, 3], total=3, **done), event([2, 3], total=3, finish=done["finish_reason"])]
    outcomes = Counter[str]()
    for number, body in enumerate(hostile_answers(valid, 5_000, seed=1)):
        ticket = ticket_of()
        try:
            for each in (read_object(body), valid[1]) if number % 3 == 0 else (valid[0], read_object(body)):
                ticket.add(each)
            completion = make_completion(ticket, "", "policy", {"0": 0})
        except (NoAnswer, EngineRefused, EngineDied) as error:
            outcomes[type(error).__name__] += 1
            continue
        except RuntimeError as error:
            assert "which this run never sent" in str(error)
            continue
        outcomes["read"] += 1
        assert len(completion.token_ids) == len(completion.logprobs) == completion.versions[-1].end
        assert all(type(one) is int and 0 <= one < 2**31 for one in completion.token_ids)
    assert min(outcomes["read"], outcomes["NoAnswer"]) > 500, outcomes


def test_hostile_scores_of_a_prompt_are_scores_of_each_token_or_no_answer() -> None:
    likely = [[-0.5, 8, None], [-1.0, 6, "x"]]
    meta = {"input_token_logprobs": [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]],
            "input_top_logprobs": [None, likely, likely]}  # fmt: skip
    outcomes = Counter[str]()
    for body in hostile_answers([{"text": "", "meta_info": meta}], 2_000, seed=2):
        try:
            scores = read_prompt_scores(read_object(body), 3, PromptScoring(start=1, top_k=2))
        except NoAnswer:
            outcomes["NoAnswer"] += 1
            continue
        outcomes["read"] += 1
        assert scores.top_ids_NK is not None and scores.top_logprobs_NK is not None
        assert scores.logprobs_N.shape == (2,) and scores.top_ids_NK.shape == scores.top_logprobs_NK.shape == (2, 2)
    assert min(outcomes["read"], outcomes["NoAnswer"]) > 200, outcomes
