"""The expected score of a judgement: the mean over what its score's token might have been, by the model's own odds."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from configs import judge_config
from transformers import AutoModelForCausalLM

from grmpipe.config.judge import Scale
from grmpipe.envs.thinking_budget import ReasoningEngine
from grmpipe.judge.expectation import TokenPlace, check_expectation, expect_scores, find_place
from grmpipe.judge.grm import GrmClient, GrmQuestion, LocalGrm, RemoteGrm
from grmpipe.judge.markup import Markup
from grmpipe.judge.parse import (
    ANSWER_LETTER,
    BOXED,
    LETTER_OR_TIE,
    RESULT,
    SCORE_LINE,
    YES_NO,
    Form,
    form_named,
    scores_in,
)
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.openai.openai_engine import OpenAIEngine
from grmpipe.models.settings import EmbeddedConfig, OpenAIConfig
from grmpipe.models.types import Completion, Message, TopLogprobs, VersionSpan
from grmpipe.scheduler.events import NoEvents
from grmpipe.tiny.resolve import resolve_model
from grmpipe.types import Failed, FailedJudgement, Judgement

TEN = set(map(str, range(1, 11)))
NINE = Scale(low=1, high=9)


def expected(form: Form, text: str, token: str, num_scores: int = 1, temperature: float = 1.0, **odds: float) -> Any:
    """The expected scores where the last `token` of a text was sampled, and these tokens were likely in its place."""
    start = text.rindex(token)
    likely = tuple((name, math.log(share)) for name, share in odds.items())
    place = TokenPlace(start=start, end=start + len(token), likely=likely)
    return expect_scores(parser_of(form, num_scores), text, temperature, finder_of(place, text))


def parser_of(form: Form, num_scores: int = 1) -> Any:
    return lambda text: scores_in(form, text, num_scores, NINE)


def finder_of(place: TokenPlace, text: str) -> Any:
    """Every other character is a token of its own, and sure."""

    def find(at: int) -> TokenPlace:
        return place if place.start <= at < place.end else TokenPlace(start=at, end=at + 1, likely=((text[at], 0.0),))

    return find


def test_the_mean_is_over_the_candidates_alone_in_any_spelling() -> None:
    odds = {"7": 0.4, " 8": 0.2, "9": 0.2, "x": 0.1, "**": 0.05, "0": 0.05}
    assert expected(SCORE_LINE, "Fine.\nScore: 7/9", "7", **odds) == pytest.approx(((7 * 2 + 8 + 9) / 4,))
    assert expected(SCORE_LINE, "Score:\n\n 2 ", "2", **{"2": 0.5, "4": 0.25, "": 0.25}) == pytest.approx((8 / 3,))


def test_the_odds_are_the_models_own_at_temperature_one() -> None:
    """What a colder sample makes of odds of 2 to 1 is undone; a greedy one is at temperature 1 already."""
    own = {"6": 2 / 3, "3": 1 / 3}
    for temperature in (0.5, 1.0, 2.0):
        powers = {token: share ** (1 / temperature) for token, share in own.items()}
        sampled = {token: power / sum(powers.values()) for token, power in powers.items()}
        assert expected(SCORE_LINE, "Score: 6", "6", temperature=temperature, **sampled) == pytest.approx((5,))
    assert expected(SCORE_LINE, "Score: 6", "6", temperature=0.0, **own) == pytest.approx((5,))


@pytest.mark.parametrize(
    ("form", "text", "token", "odds", "num_scores", "scores"),
    [
        (YES_NO, "Yes", "Yes", {"Yes": 0.5, "yes": 0.1, "No": 0.2, "The": 0.2}, 1, (7,)),
        (LETTER_OR_TIE, "So: [[A]]", "A", {"A": 0.5, "B": 0.25, "C": 0.25}, 2, (5, 3)),
        (LETTER_OR_TIE, "So: [[A]]", "[A", {"[A": 0.75, "[B": 0.25}, 2, (7, 3)),
        (ANSWER_LETTER, "<answer>[[B]]</answer>", "B]]", {"B]]": 0.5, "A": 0.5}, 2, (5, 5)),
        (RESULT, "Good [RESULT] (4)", "4", {"4": 0.5, "2": 0.5}, 1, (3,)),
    ],
)
def test_every_form_of_a_verdict_has_a_mean_between_its_ends(
    form: Form, text: str, token: str, odds: dict[str, float], num_scores: int, scores: Any
) -> None:
    assert expected(form, text, token, num_scores, **odds) == pytest.approx(scores)


def test_each_score_of_a_list_has_a_place_of_its_own() -> None:
    text = "Good: 3\n\\boxed{4, 8}"
    places = {
        text.index("4"): (("4", math.log(0.5)), ("6", math.log(0.5))),
        text.index("8"): (("8", math.log(0.25)), ("4", math.log(0.75))),
        text.index("3"): (("3", math.log(0.5)), ("9", math.log(0.5))),
    }

    def find(at: int) -> TokenPlace:
        return TokenPlace(start=at, end=at + 1, likely=places.get(at, ((text[at], 0.0),)))

    assert expect_scores(parser_of(BOXED, 2), text, 1.0, find) == pytest.approx((5, 5))


def test_a_token_that_leaves_another_line_as_the_verdict_is_no_candidate() -> None:
    assert expected(YES_NO, "No\nYes", "Yes", **{"Yes": 0.5, "\n": 0.25, " ": 0.25}) == (9,)


def test_a_place_without_log_probs_is_no_score() -> None:
    assert expect_scores(parser_of(SCORE_LINE), "Score: 7", 1.0, lambda at: None) == "unparseable"


# -- an embedded engine ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unsure_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny GRM with smaller logits: it is never sure of a score."""
    path, shipped = tmp_path_factory.mktemp("unsure"), resolve_model("tiny://grm")
    shutil.copytree(shipped, path, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(shipped, dtype=torch.float32)
    model.model.norm.weight.data *= 0.55
    model.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("temperature", "settings"),
    [(0.5, {}), (0.0, {}), (1.0, {"structured": True}), (0.5, {"ask_verdict": True, "max_new_tokens": 36})],
)
def test_an_expectation_is_that_of_a_forward_pass_over_all_scores(
    unsure_path: str, temperature: float, settings: dict[str, Any]
) -> None:
    path = unsure_path
    renderer, model = Renderer.load(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    engine = EmbeddedEngine(EngineSpec(path=path, role="grm"), EmbeddedConfig(max_context_tokens=256))
    grm = LocalGrm("grm", ReasoningEngine(engine, renderer), renderer, 256, decode=renderer.decode)
    judge = judge_config(**{"score_from": "expectation", "max_new_tokens": 60, "temperature": temperature, **settings})
    client = GrmClient(grm, judge, seed=3)

    async def ask_all() -> list[list[Judgement | Failed]]:
        questions = [f"Q: What is {n} x 2?\nA:\n> {n} x 2 = {2 * n - n % 3}." for n in range(3, 11)]
        return await asyncio.gather(*(client.judgement(question_to(grm, text), 0, 0) for text in questions))

    try:
        judgements = [answers[-1] for answers in asyncio.run(ask_all())]
    finally:
        engine.close()
    parsed = [one for one in judgements if isinstance(one, Judgement)]
    assert len(parsed) > 3, judgements
    for one in parsed:
        assert one.completion.top is None  # journals keep the score
        assert (one.completion.asked is not None) == judge.format.ask_verdict
        assert one.scores == pytest.approx((mean_by_forward_pass(model, renderer, one),), abs=1e-4)
    assert any(score % 1 > 0.001 for one in parsed for score in one.scores)


def mean_by_forward_pass(model: Any, renderer: Renderer, judgement: Judgement) -> float:
    """The mean score by the logits in the score's place, over the scores among the 20 likeliest tokens there: of all
    tokens, or of those of a verdict's grammar.
    """
    ids = judgement.completion.token_ids
    place = max(i for i, token_id in enumerate(ids) if renderer.decode([token_id]).strip().isdigit())
    with torch.no_grad():
        logits_V = model(torch.tensor([[*judgement.prompt_ids, *ids[:place]]])).logits[0, -1]
    scores = {i: int(text) for i in range(len(logits_V)) if (text := renderer.decode([i]).strip()) in TEN}
    most = len(logits_V) if judgement.completion.asked else 20
    likely = [token_id for token_id in logits_V.topk(most).indices.tolist() if token_id in scores]
    probs = logits_V[likely].softmax(-1)
    return math.fsum(p * scores[token_id] for p, token_id in zip(probs.tolist(), likely, strict=True))


def question_to(grm: LocalGrm | RemoteGrm, text: str) -> GrmQuestion:
    prompt = grm.prompt([Message(role="user", content=text)])
    return GrmQuestion(group_id="g", name=f"g/{text}", siblings=(0,), num_scores=1, prompt=prompt)


# -- endpoints ---------------------------------------------------------------------------------------------------------


def sampled_token(text: str, **likely: float) -> dict[str, Any]:
    top = [{"token": name, "logprob": math.log(share), "bytes": None} for name, share in likely.items()]
    return {"token": text, "logprob": -0.1, "bytes": [*text.encode()], "top_logprobs": top}


DIGITS = {"7": 0.5, "5": 0.3, "Seven": 0.2}
TOKENS = [
    sampled_token("Größe: gut.\nScore", Score=0.9),
    sampled_token(":"),
    sampled_token(" "),
    sampled_token("7", **DIGITS),
]


def judged_at_an_endpoint(
    *logprobs: Any, status: int = 200, texts: Sequence[str] = ("Größe: gut.\nScore: 7",)
) -> tuple[Judgement | Failed, dict[str, Any]]:
    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        message = {"role": "assistant", "content": texts[len(asked)]}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": logprobs[len(asked)]}
        asked.append(json.loads(request.content))
        return httpx.Response(status, json={"choices": [choice], "error": {"message": "no logprobs for this model"}})

    async def go() -> Judgement | Failed:
        engine = OpenAIEngine("judge", "grm", OpenAIConfig(api_key_env=""), httpx.MockTransport(answer))
        grm = RemoteGrm("grm", engine, 0, NoEvents(), Markup(()))
        settings = {"score_max": 9, "max_retries": 0, "ask_verdict": len(texts) > 1}
        client = GrmClient(grm, judge_config(score_from="expectation", **settings), seed=1)
        last = (await client.judgement(question_to(grm, "Q"), 0, 0))[-1]
        await engine.close()
        return last

    return asyncio.run(go()), asked[0]


def test_an_endpoint_is_asked_for_likely_tokens_which_make_the_score() -> None:
    judgement, asked = judged_at_an_endpoint({"content": TOKENS})
    assert (asked["logprobs"], asked["top_logprobs"]) == (True, 20)
    assert isinstance(judgement, Judgement) and judgement.completion.top is None
    # "7" was sampled at -0.1 by its own entry, and the likely tokens have it again.
    assert judgement.scores == pytest.approx(((7 * 0.5 + 5 * 0.3) / 0.8,))
    thought = [sampled_token("<think>Score: 7</think>"), *TOKENS, sampled_token("")]
    assert judged_at_an_endpoint({"content": thought})[0].scores == pytest.approx(judgement.scores)  # type: ignore[union-attr]


def test_a_verdict_that_an_endpoint_was_asked_for_has_its_own_log_probs() -> None:
    first, texts = {"content": [sampled_token("Good", Good=0.9), sampled_token(".")]}, ("Good.", "Score: 7")
    second = {"content": [sampled_token("Score"), *TOKENS[1:]]}
    judgement, _ = judged_at_an_endpoint(first, second, texts=texts)
    assert isinstance(judgement, Judgement) and judgement.completion.text == "Good.\n\nScore: 7"
    assert judgement.scores == pytest.approx(((7 * 0.5 + 5 * 0.3) / 0.8,))
    failed, _ = judged_at_an_endpoint(None, texts=texts)  # nothing is asked of an endpoint that returns none
    assert isinstance(failed, Failed) and failed.cause == "refused"


@pytest.mark.parametrize("logprobs", [None, {"content": None}, {"content": [{"token": 3}]}, [1], {"tokens": ["7"]}])
def test_an_endpoint_without_log_probs_gives_no_score_and_says_what_to_type(logprobs: Any) -> None:
    failed, _ = judged_at_an_endpoint(logprobs)
    assert isinstance(failed, Failed) and failed.cause == "refused"
    assert failed.detail == (
        "grm returned no log-probs; judge.score_from=expectation needs them, judge.score_from=text doesn't"
    )
    refused, _ = judged_at_an_endpoint(None, status=400)
    assert isinstance(refused, Failed) and refused.detail.endswith("judge.score_from=text doesn't")


def test_log_probs_of_another_text_are_a_failed_judgement() -> None:
    failed, _ = judged_at_an_endpoint({"content": [sampled_token("Good"), *TOKENS[1:]]})
    assert isinstance(failed, FailedJudgement) and failed.cause == "unparseable"
    assert failed.detail == "the endpoint's log-probs aren't those of its text"


def test_a_place_of_a_part_of_the_tokens_is_found_from_the_end() -> None:
    """Where a thinking budget ended a thought, likely tokens are known of what came after it."""
    text = "thought Score: 7"
    top = TopLogprobs(
        ids_TK=np.array([[ord("7"), ord("8")]], np.int32), logprobs_TK=np.log(np.array([[0.5, 0.5]], np.float32))
    )
    completion = Completion(
        token_ids=tuple(map(ord, text)), logprobs=(-1.0,) * len(text), text=text, finish_reason="stop", top=top,
        versions=(VersionSpan(model="grm", version=0, start=0, end=len(text)),),
    )  # fmt: skip

    def decode(token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    place = find_place(completion, len(text) - 1, decode)
    assert place is not None and (place.start, place.end) == (len(text) - 1, len(text))
    assert dict(place.likely) == pytest.approx({"7": math.log(0.5), "8": math.log(0.5)})
    assert find_place(completion, 3, decode) is None


# -- what is refused at the start --------------------------------------------------------------------------------------


def by_digit(verdict: str) -> list[str]:
    return [" ", *(verdict if verdict[-1].isdigit() else [verdict])]


@pytest.mark.parametrize(
    ("settings", "split", "said"),
    [
        ({}, by_digit, r"^score_from: 10 is several tokens of grm; type judge\.scale\.low=1 judge\.scale\.high=9, or"),
        ({}, None, r"^score_from: an endpoint's tokenizer isn't known, and 10 may be several tokens; type"),
        ({"template": "mt_bench", "parser": "rating", "score_max": 9}, by_digit, r"^score_from: rating reads decimals"),
        ({"score_min": -1, "score_max": 3}, by_digit, r"^score_from: -1 is several tokens"),
        ({"score_max": 9}, by_digit, None),
        ({}, lambda verdict: ["Score", ":", f" {verdict}"], None),
        ({"template": "yes_no", "parser": "yes_no"}, list, r"^score_from: Yes is several tokens of grm; take a model"),
        ({"template": "yes_no", "parser": "yes_no"}, by_digit, None),
        ({"score_from": "text"}, by_digit, None),
    ],
)
def test_a_scale_whose_scores_are_no_single_tokens_is_refused(settings: Any, split: Any, said: str | None) -> None:
    judge = judge_config(**{"score_from": "expectation", **settings})
    with nullcontext() if said is None else pytest.raises(ValueError, match=said):
        check_expectation(judge, form_named(judge.parser), split)


def test_what_the_prompt_already_had_of_a_judgement_was_written_by_no_token() -> None:
    """Also where the tokens after it allow one score only, so that the search goes on to the beginning."""
    text, since = "Score: 7", len("Score: ")

    def find(at: int) -> TokenPlace:
        assert at >= since
        return TokenPlace(start=at, end=at + 1, likely=(("7", math.log(0.9)),))

    assert expect_scores(parser_of(SCORE_LINE), text, 1.0, find, since) == (7,)


def test_a_form_of_several_tokens_is_refused_for_an_endpoint_too() -> None:
    judge = judge_config(
        protocol="pairwise", template="arena_hard", parser="margin", vote="mean", num_judgements=2,
        score_from="expectation",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^score_from: A>>B is several tokens of grm; .*score_from=text"):
        check_expectation(judge, form_named("margin"), None)
