r"""Samples completions whose thoughts are marked, within a thinking budget, and the verdicts that they lack.

prompt -> thought .. (budget used up) | "\n</think>\n\n" | -> answer
          sampled                       inserted             sampled, by a second request that continues the first

prompt -> judgement without a verdict | "\n\n"   | -> verdict
          sampled                       inserted   sampled, by a further request, within the verdict's pattern

prompt -> first turn | the user's second message | -> second turn
          sampled      inserted                       sampled, by a further request
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from grmpipe.models.chat.thinking import KNOWN_MARKERS, ThinkingMarkers, with_thought
from grmpipe.models.seeds import derive_seed
from grmpipe.models.types import (
    AskedAnswer,
    Completion,
    Generates,
    Message,
    RequestContext,
    SamplingParams,
    ThinkingBudget,
    VersionSpan,
    ignore_first_token,
    join_spans,
)
from grmpipe.scheduler.routing.router import Continuation

if TYPE_CHECKING:
    from grmpipe.models.chat.renderer import Renderer

SECOND = "answer"  # suffix of the second request's id
# Of thoughts that a prompt asks for in words, from a model whose tokenizer and template have no markers.
OF_PROMPTS = ThinkingMarkers(open=KNOWN_MARKERS[0][0], close=KNOWN_MARKERS[0][1])


class ReasoningEngine:
    """An engine whose completions say where the thought ends. For `params.thinking` it asks twice, if it must.

    The first request ends with the budget. If the thought goes on there, the closing marker is inserted and a second
    request, `<id>/answer`, continues; if it had ended, the second one continues without. All sampled tokens keep their
    ids, log-probs and versions; the inserted ones are in `Completion.inserted`.
    """

    def __init__(self, engine: Generates, renderer: Renderer) -> None:
        self._engine = engine
        self._renderer = renderer
        self._continuation = Continuation(decode=renderer.decode, seed_after=lambda seed, num_sampled: seed)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        budget, markers = params.thinking, self._markers_after(params.begun)
        params = replace(params, thinking=None, begun="")
        if budget is None or budget.num_tokens >= params.max_new_tokens:
            completion = await self._engine.generate(prompt_ids, params, context, on_first_token)
            return self._with_thought(completion, markers)
        assert not params.stop, "a stop string may cross the border of two requests"
        first = await self._engine.generate(
            prompt_ids, replace(params, max_new_tokens=budget.num_tokens), context, on_first_token
        )
        if first.finish_reason == "length":
            first = await self._continued(tuple(prompt_ids), first, budget, markers, params, context)
        return self._with_thought(first, markers)

    def _markers_after(self, begun: str) -> ThinkingMarkers | None:
        """The markers of a completion that the prompt begins with this text, which may open its thought."""
        markers = self._renderer.thinking
        if markers is None or not begun:
            return markers
        return replace(markers, in_prompt=markers.split_thought(begun).is_open)

    def _with_thought(self, completion: Completion, markers: ThinkingMarkers | None) -> Completion:
        if markers is None:
            return completion
        return with_thought(completion, markers, self._renderer.decode, self._renderer.decode_special)

    async def ask_verdict(
        self,
        prompt_ids: Sequence[int],
        judgement: Completion,
        params: SamplingParams,
        context: RequestContext,
        message: Message | None = None,
    ) -> Completion:
        """The judgement, continued by the verdict that it lacks: `params.pattern`. Its thought is ended first, if it
        goes on. An end-of-turn token that was sampled is taken back: a model never goes on after one.

        params: `max_new_tokens` is the limit of the judgement with its verdict.
        message: the user's next one, which asks for a second turn; the first one's end of turn stays. Its tokens are
            the prompt's, and don't count.
        """
        markers = self._markers_after(params.begun)
        params, begun = replace(params, begun=""), self._without_end_of_turn(judgement)
        if message is None:
            asking = markers or OF_PROMPTS
            is_open = asking.tokens_of_thought(begun.token_ids, self._renderer.decode_special) is None
            between = self._renderer.encode_inserted(asking.end_of_thought() if is_open else "\n\n")
        else:
            between = self._renderer.extend((message,), ended=begun is not judgement)
            begun = judgement
        start, end = len(begun.token_ids), len(begun.token_ids) + len(between)
        if (room := params.max_new_tokens - (end if message is None else start)) < 1:
            return judgement
        ids = (*prompt_ids, *begun.token_ids, *between)
        rest = await self._engine.generate(ids, replace(params, max_new_tokens=room), context)
        whole = self._continuation.join((begun, prepend_tokens(rest, between)))
        text_start = len(self._renderer.decode(whole.token_ids[:end]))
        asked = AskedAnswer(start=start, end=end, text_start=text_start, is_turn=message is not None)
        return replace(
            self._with_thought(whole, markers),
            inserted=judgement.inserted,
            asked=asked,
            tool_results=judgement.tool_results,
        )

    def _without_end_of_turn(self, completion: Completion) -> Completion:
        if completion.token_ids[-1:] not in [(token,) for token in self._renderer.stop_token_ids]:
            return completion
        num_kept, last = len(completion.token_ids) - 1, completion.versions[-1]
        stretches = ((span.version, span.start, min(span.end, num_kept)) for span in completion.versions)
        return replace(
            completion,
            token_ids=completion.token_ids[:num_kept],
            logprobs=completion.logprobs[:num_kept],
            versions=join_spans(last.model, stretches, last.version),
        )

    async def _continued(
        self,
        prompt_ids: tuple[int, ...],
        first: Completion,
        budget: ThinkingBudget,
        markers: ThinkingMarkers | None,
        params: SamplingParams,
        context: RequestContext,
    ) -> Completion:
        """The whole completion, with what comes after the budget."""
        between = self._end_of_thought(first, budget, markers)
        start = len(first.token_ids)
        room = params.max_new_tokens - start - len(between)
        if room < 1:
            return first
        pattern = budget.pattern
        if pattern is not None and not between:
            pattern = rf"[^\n]*\n{pattern}"  # the line that was cut ends first
        request_id = f"{context.request_id}/{SECOND}"
        rest = await self._engine.generate(
            (*prompt_ids, *first.token_ids, *between),
            replace(params, max_new_tokens=room, seed=derive_seed(params.seed, SECOND), pattern=pattern),
            replace(context, request_id=request_id),
        )
        whole = self._continuation.join((first, prepend_tokens(rest, between)))
        return replace(whole, inserted=(start, start + len(between))) if between else whole

    def _end_of_thought(
        self, first: Completion, budget: ThinkingBudget, markers: ThinkingMarkers | None
    ) -> tuple[int, ...]:
        """The tokens that end a thought. None if it has ended, or never began."""
        if markers is None or markers.tokens_of_thought(first.token_ids, self._renderer.decode_special) is not None:
            return ()
        return self._renderer.encode_inserted(markers.end_of_thought(budget.answer_start))


def prepend_tokens(rest: Completion, token_ids: tuple[int, ...]) -> Completion:
    """A completion after some inserted tokens, which count as of its first version."""
    count = len(token_ids)
    spans = [
        VersionSpan(
            model=span.model, version=span.version, start=span.start + count * (index > 0), end=span.end + count
        )
        for index, span in enumerate(rest.versions)
    ]
    return replace(
        rest, token_ids=token_ids + rest.token_ids, logprobs=(0.0,) * count + rest.logprobs, versions=tuple(spans)
    )
