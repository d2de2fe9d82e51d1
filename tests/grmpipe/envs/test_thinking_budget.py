"""A thinking budget ends thoughts, and every sampled token stays as it was sampled."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from grmpipe.config.judge import Scale
from grmpipe.envs.env import Action, Episode, Observation, Opening
from grmpipe.envs.play import EpisodeLimits, RolloutRequest, play
from grmpipe.envs.thinking_budget import ReasoningEngine
from grmpipe.judge.parse import form_named, short_verdict_pattern
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.settings import EmbeddedConfig
from grmpipe.models.types import (
    Completion,
    EngineDied,
    Message,
    RequestContext,
    SamplingParams,
    ThinkingBudget,
    VersionSpan,
    ignore_first_token,
)
from grmpipe.tiny.resolve import SHIPPED
from grmpipe.tiny.tokenizer import build_tokenizer
from grmpipe.train.batching.samples import split_rollout
from grmpipe.types import Prompt

TEMPLATES = Path(__file__).parents[2] / "models" / "chat" / "templates"


def renderer_of(template: str) -> Renderer:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return Renderer(tokenizer, context_tokens=512, vocab_size=600, stop_token_ids=(2,))


QWEN3, R1 = renderer_of("qwen3"), renderer_of("deepseek_r1")
CONTEXT = RequestContext(request_id="g/0/j0.0", group_id="g", role="grm", priority=4)
END = QWEN3.encode_markup("\n</think>\n\n")


@dataclass
class Script:
    """An engine that writes given texts, cut at max_new_tokens. The n-th request is sampled by version n."""

    renderer: Renderer
    texts: Sequence[str]
    asked: list[tuple[tuple[int, ...], SamplingParams, RequestContext]] = field(default_factory=list)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        number = len(self.asked)
        self.asked.append((tuple(prompt_ids), params, context))
        whole = self.renderer.encode_markup(self.texts[number])
        ids = whole[: params.max_new_tokens]
        on_first_token()
        return Completion(
            token_ids=ids,
            logprobs=tuple(-1.0 - number - place / 100 for place in range(len(ids))),
            text=self.renderer.decode(ids),
            finish_reason="stop" if len(whole) <= params.max_new_tokens else "length",
            versions=(VersionSpan(model="grm", version=number, start=0, end=len(ids)),),
        )


def sample(
    script: Script, budget: int, most: int = 100, answer_start: str = "", pattern: str | None = None
) -> Completion:
    thinking = ThinkingBudget(num_tokens=budget, answer_start=answer_start, pattern=pattern and f"rest {pattern}")
    params = SamplingParams(max_new_tokens=most, seed=7, thinking=thinking, pattern=pattern)
    return asyncio.run(ReasoningEngine(script, script.renderer).generate((1, 2), params, CONTEXT))


def test_a_thought_within_its_budget_is_one_request() -> None:
    script = Script(QWEN3, ["<think>\nhm\n</think>\n\nScore: 7"])
    completion = sample(script, budget=50)
    ((prompt_ids, params, context),) = script.asked
    assert (prompt_ids, params.max_new_tokens, params.thinking, context) == ((1, 2), 50, None, CONTEXT)
    assert (completion.answer, completion.inserted) == ("Score: 7", None)


def test_thought_beyond_its_budget_is_ended_and_the_answer_requested() -> None:
    script = Script(QWEN3, ["<think>\nhm and hm and hm and hm", " 7"])
    completion = sample(script, budget=4, most=30, answer_start="Score:")
    thought, between = script.renderer.encode_markup(script.texts[0])[:4], (*END, *QWEN3.encode_markup("Score:"))
    rest = QWEN3.encode_markup(" 7")
    assert completion.token_ids == (*thought, *between, *rest)
    assert completion.inserted == (4, 4 + len(between))
    assert completion.answer == "Score: 7"
    second_prompt, params, context = script.asked[1]
    assert second_prompt == (1, 2, *thought, *between)
    assert params.max_new_tokens == 30 - 4 - len(between)
    assert params.seed != 7  # an engine whose random numbers start again would repeat them
    assert context == replace(CONTEXT, request_id="g/0/j0.0/answer")


def test_log_probs_and_versions_are_those_of_the_sampled_tokens() -> None:
    completion = sample(Script(R1, ["hm and hm and hm", "Score: 7"]), budget=3)
    start, end = completion.inserted or (0, 0)
    assert completion.logprobs[:start] == (-1.0, -1.01, -1.02)
    assert set(completion.logprobs[start:end]) == {0.0}
    assert completion.logprobs[end:] == tuple(-2.0 - place / 100 for place in range(len(completion.token_ids) - end))
    assert completion.versions == (
        VersionSpan(model="grm", version=0, start=0, end=start),
        VersionSpan(model="grm", version=1, start=start, end=len(completion.token_ids)),
    )


@pytest.mark.parametrize("text", ["<think>a</think>\nb and c and d and e", "a and b and c and d"])
def test_answer_cut_by_the_budget_continues_without_an_insertion(text: str) -> None:
    budget = 6 if "think" in text else 2
    rest = QWEN3.decode(QWEN3.encode_markup(text)[budget:])
    script = Script(QWEN3, [text, rest])
    completion = sample(script, budget, pattern="whole")
    assert (completion.text, completion.inserted) == (text, None)
    assert [params.pattern for _, params, _ in script.asked] == ["whole", r"[^\n]*\nrest whole"]


def test_the_verdict_after_an_ended_thought_has_its_own_pattern() -> None:
    script = Script(QWEN3, ["<think>\nhm and hm and hm", "Score: 7"])
    sample(script, budget=3, pattern="whole")
    assert [params.pattern for _, params, _ in script.asked] == ["whole", "rest whole"]


def test_a_thought_that_leaves_no_room_for_an_answer_is_truncated() -> None:
    for budget, most in ((4, 4 + len(END)), (9, 9), (20, 9)):
        script = Script(QWEN3, ["<think>\nhm and hm and hm and hm and hm and hm"])
        completion = sample(script, budget, most)
        assert (len(script.asked), completion.finish_reason, completion.answer) == (1, "length", "")


def test_a_death_during_the_answer_is_the_requests() -> None:
    class Dying(Script):
        async def generate(self, *args: object, **kwargs: object) -> Completion:
            if self.asked:
                raise EngineDied("gone")
            return await Script.generate(self, *args, **kwargs)  # type: ignore[arg-type]

    with pytest.raises(EngineDied):
        sample(Dying(QWEN3, ["<think>\nhm and hm and hm"]), budget=3)


VERDICT_CONTEXT = replace(CONTEXT, request_id="g/0/j0.0/verdict", is_retry=True)


def ask_verdict(script: Script, judgement: Completion, most: int = 100) -> Completion:
    params = SamplingParams(max_new_tokens=most, seed=8, pattern="Score: (?:3|7)")
    sampler = ReasoningEngine(script, script.renderer)
    return asyncio.run(sampler.ask_verdict((1, 2), judgement, params, VERDICT_CONTEXT))


def test_a_verdict_that_is_asked_for_continues_the_judgement_without_its_end_of_turn() -> None:
    script = Script(QWEN3, ["It is right.<|im_end|>", "Score: 7<|im_end|>"])
    judgement = sample(script, budget=50)
    whole = ask_verdict(script, judgement)
    said, between = QWEN3.encode_markup("It is right."), QWEN3.encode_markup("\n\n")
    assert judgement.token_ids[:-1] == said and judgement.token_ids[-1] in QWEN3.stop_token_ids
    assert whole.token_ids == (*said, *between, *QWEN3.encode_markup(script.texts[1]))
    assert (whole.text, whole.finish_reason, whole.inserted) == ("It is right.\n\nScore: 7", "stop", None)
    assert whole.asked is not None and whole.text[whole.asked.text_start :] == "Score: 7"
    assert whole.unsampled == ((start := len(said), end := len(said) + len(between)),)
    assert whole.logprobs[:start] == judgement.logprobs[:-1] and set(whole.logprobs[start:end]) == {0.0}
    assert whole.logprobs[end:] == tuple(-2.0 - place / 100 for place in range(len(whole.token_ids) - end))
    assert whole.versions == (
        VersionSpan(model="grm", version=0, start=0, end=start),
        VersionSpan(model="grm", version=1, start=start, end=len(whole.token_ids)),
    )
    asked_ids, params, context = script.asked[1]
    assert (asked_ids, context) == ((1, 2, *said, *between), VERDICT_CONTEXT)
    assert (params.pattern, params.seed, params.max_new_tokens) == ("Score: (?:3|7)", 8, 100 - end)


@pytest.mark.parametrize("renderer", [QWEN3, R1], ids=["qwen3", "deepseek_r1"])
def test_a_thought_ends_before_its_verdict_is_asked_for(renderer: Renderer) -> None:
    opening = "<think>" if renderer is QWEN3 else ""
    script = Script(renderer, [f"{opening}hm, Score: 1\nScore: 2", "Score: 7"])
    judgement = sample(script, budget=9, most=9)
    whole = ask_verdict(script, judgement)
    thought, end = judgement.token_ids, renderer.encode_markup("\n</think>\n\n")
    assert judgement.finish_reason == "length" and script.asked[1][0] == (1, 2, *thought, *end)
    assert (whole.answer, whole.finish_reason) == ("Score: 7", "stop")
    assert whole.thought_tokens == len(thought) + end.index(renderer.tokenizer.convert_tokens_to_ids("</think>")) + 1


def test_tokens_of_a_budget_and_of_an_asked_verdict_are_both_known_as_unsampled() -> None:
    script = Script(QWEN3, ["<think>hm and hm and hm", "I don't know.", "Score: 7"])
    judgement = sample(script, budget=4)
    whole = ask_verdict(script, judgement)
    assert whole.inserted == judgement.inserted and whole.asked is not None
    assert whole.unsampled == (judgement.inserted, (whole.asked.start, whole.asked.end))
    assert whole.answer == "I don't know.\n\nScore: 7"


def test_without_room_for_a_verdict_none_is_asked_for() -> None:
    script = Script(QWEN3, ["It is right."])
    judgement = sample(script, budget=50)
    assert ask_verdict(script, judgement, most=len(judgement.token_ids)) is judgement


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "hm", "\n", "> ", "12", " é"]), max_size=12).map("".join)


@given(
    first=PIECES, rest=PIECES, budget=st.integers(1, 12), room=st.integers(1, 20), renderer=st.sampled_from([QWEN3, R1])
)
def test_the_ids_around_an_insertion_are_the_sampled_ones(
    first: str, rest: str, budget: int, room: int, renderer: Renderer
) -> None:
    script = Script(renderer, [first, rest])
    completion = sample(script, budget, budget + room)
    sampled = renderer.encode_markup(first)[:budget]
    start, end = completion.inserted or (len(sampled), len(sampled))
    assert completion.token_ids[:start] == sampled
    assert len(completion.token_ids) == len(completion.logprobs) <= budget + room
    if len(script.asked) == 2:
        asked_ids, params, _ = script.asked[1]
        assert asked_ids == (1, 2, *completion.token_ids[:end])
        assert completion.token_ids[end:] == renderer.encode_markup(rest)[: params.max_new_tokens]
    if completion.inserted is not None:
        assert completion.token_ids[start:end] == END
        assert completion.thought_tokens == start + END.index(renderer.tokenizer.convert_tokens_to_ids("</think>")) + 1


def test_a_real_engine_samples_the_answer_after_the_inserted_tokens() -> None:
    """The engine's own log-probs of the whole sequence are those of the completion, except where it was inserted."""
    path = str(SHIPPED / "grm")
    renderer = Renderer.load(path, str(TEMPLATES / "deepseek_r1.jinja"))
    engine = EmbeddedEngine(EngineSpec(path=path, role="grm"), EmbeddedConfig())

    async def asked() -> tuple[Completion, tuple[float, ...], int]:
        prompt_ids = renderer.render([Message(role="user", content="What is 6 x 2?")])
        params = SamplingParams(max_new_tokens=40, seed=3, thinking=ThinkingBudget(num_tokens=5, answer_start="Score:"))
        completion = await ReasoningEngine(engine, renderer).generate(prompt_ids, params, CONTEXT)
        return completion, await engine.score((*prompt_ids, *completion.token_ids)), len(prompt_ids)

    try:
        completion, scores, num_prompt = asyncio.run(asked())
    finally:
        engine.close()
    start, end = completion.inserted or (0, 0)
    own = scores[num_prompt - 1 :]
    assert (start, completion.answer[:6]) == (5, "Score:") and end < len(completion.token_ids)
    assert completion.logprobs[:start] == pytest.approx(own[:start], abs=1e-4)
    assert completion.logprobs[end:] == pytest.approx(own[end:], abs=1e-4)


def test_a_real_engine_samples_the_verdict_by_its_pattern_after_what_was_said() -> None:
    path = str(SHIPPED / "grm")
    renderer = Renderer.load(path)
    engine = EmbeddedEngine(EngineSpec(path=path, role="grm"), EmbeddedConfig())
    pattern = short_verdict_pattern(form_named("boxed"), Scale(), 2)

    async def ask() -> tuple[Completion, Completion, tuple[float, ...]]:
        prompt_ids, sampler = renderer.render([Message(role="user", content="?")]), ReasoningEngine(engine, renderer)
        params = SamplingParams(max_new_tokens=9, seed=3)
        judgement = await sampler.generate(prompt_ids, params, CONTEXT)
        params = replace(params, max_new_tokens=200, pattern=pattern)
        whole = await sampler.ask_verdict(prompt_ids, judgement, params, VERDICT_CONTEXT)
        assert whole == await sampler.ask_verdict(prompt_ids, judgement, params, VERDICT_CONTEXT)
        return judgement, whole, (await engine.score((*prompt_ids, *whole.token_ids)))[len(prompt_ids) - 1 :]

    try:
        judgement, whole, scores = asyncio.run(ask())
    finally:
        engine.close()
    assert judgement.finish_reason == "length" and whole.finish_reason == "stop" and whole.asked is not None
    assert whole.text.startswith(judgement.text)
    assert re.fullmatch(pattern, whole.text[whole.asked.text_start :])
    said, verdict = slice(whole.asked.start), slice(whole.asked.end, None)
    assert whole.logprobs[said] == pytest.approx(scores[said], abs=1e-4)
    assert all(held >= free - 1e-4 for held, free in zip(whole.logprobs[verdict], scores[verdict], strict=True))


class Asks:
    """An environment that asks once more, and remembers what it read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    async def open(self, episode: Episode) -> Opening:
        return Opening(messages=episode.prompt.messages)

    async def step(self, action: Action) -> Observation:
        self.read.append(action.text)
        if len(self.read) == 2:
            return Observation(done=True)
        return Observation(messages=(Message(role="user", content="Sure?"),))

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("renderer", [QWEN3, R1], ids=["qwen3", "deepseek_r1"])
def test_the_env_reads_the_answers_and_the_tokens_of_all_turns_are_the_sampled_ones(renderer: Renderer) -> None:
    opening = "<think>" if renderer is QWEN3 else ""
    script, env = (
        Script(renderer, [f"{opening}hm</think>\n\n12<|im_end|>", f"{opening}yes</think>\n12<|im_end|>"]),
        Asks(),
    )
    request = RolloutRequest(group_id="g", sibling=0, seed=1)
    sampler = ReasoningEngine(script, renderer)
    prompt = Prompt(prompt_id="p", messages=(Message(role="user", content="6 x 2?"),))
    params, limits = SamplingParams(max_new_tokens=50), EpisodeLimits(max_turns=3)
    rollout = asyncio.run(play(request, prompt, env, sampler, renderer, params, limits))
    assert env.read == ["12", "12"]
    assert (rollout.answer, rollout.show_text(thoughts=False)) == ("12", "12\n12")
    assert "hm" in rollout.text and rollout.text == rollout.show_text(thoughts=True)
    for turn, text in zip(rollout.turns, script.texts, strict=True):
        assert turn.completion.token_ids == renderer.encode_markup(text)
    (sample_of_all,) = split_rollout(rollout, np.ones(rollout.num_sampled_tokens))
    assert sum(sample_of_all.loss_mask) == rollout.num_sampled_tokens


def test_a_thought_that_the_prefill_opened_ends_with_its_budget() -> None:
    script = Script(QWEN3, ["\nhm and hm and hm and hm", "Score: 7"])
    thinking = ThinkingBudget(num_tokens=4)
    params = SamplingParams(max_new_tokens=100, seed=7, thinking=thinking, begun="<think>")
    completion = asyncio.run(ReasoningEngine(script, QWEN3).generate((1, 2), params, CONTEXT))
    assert completion.inserted is not None and completion.answer == "Score: 7"
    assert all(not asked.begun for _, asked, _ in script.asked)
    script = Script(QWEN3, ["hm</think>\n\nScore: 7"])
    for begun, answer in (("<think>", "Score: 7"), ("<think>\n\n</think>\n\n", "hm</think>\n\nScore: 7")):
        script.asked.clear()
        params = SamplingParams(max_new_tokens=100, begun=begun)
        assert asyncio.run(ReasoningEngine(script, QWEN3).generate((1, 2), params, CONTEXT)).answer == answer


@pytest.mark.parametrize(("begun", "answer"), [("Hm, ", "Score: 7"), ("fine</think>\n\n", "7</think>\n\nScore: 7")])
def test_a_prefill_goes_on_with_a_thought_that_the_template_opened(begun: str, answer: str) -> None:
    params = SamplingParams(max_new_tokens=100, begun=begun)
    sampler = ReasoningEngine(Script(R1, ["7</think>\n\nScore: 7"]), R1)
    assert asyncio.run(sampler.generate((1, 2), params, CONTEXT)).answer == answer


@pytest.mark.parametrize("end", ["<|im_end|>", ""])
def test_a_second_turn_follows_as_the_chat_template_writes_it(end: str) -> None:
    """The ids are those of the whole conversation, whether the first turn's end was sampled or not."""
    script = Script(QWEN3, [f"It is right.{end}", "Score: 7<|im_end|>"])
    first = sample(script, budget=50)
    params, message = SamplingParams(max_new_tokens=40, seed=8), Message(role="user", content="So?")
    sampler = ReasoningEngine(script, QWEN3)
    whole = asyncio.run(sampler.ask_verdict((1, 2), first, params, VERDICT_CONTEXT, message))
    (asked_ids, asked, _) = script.asked[1]
    assert (
        QWEN3.decode_special(asked_ids[2:])
        == "It is right.<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert asked.max_new_tokens == 40 - len(first.token_ids)
    assert whole.asked is not None and whole.asked.is_turn and whole.text[whole.asked.text_start :] == "Score: 7"
    assert whole.unsampled == ((len(first.token_ids), len(asked_ids) - 2),)
