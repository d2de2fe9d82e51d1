"""The GRM as a judge sees it, local or remote, and requests to it: single answers, retries, failures by cause. Knows no
protocol or vote; never invents a score.
"""

import asyncio
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeVar, get_args

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.keys.entry_names import JUDGE
from grmpipe.envs.env import EnvFault
from grmpipe.envs.thinking_budget import ReasoningEngine
from grmpipe.judge.expectation import TOP_LOGPROBS, Decode, TokenPlace, expect_scores, find_place
from grmpipe.judge.markup import Markup
from grmpipe.judge.parse import (
    Scores,
    Unparseable,
    answer_pattern,
    form_named,
    in_usual_markers,
    judgement_pattern,
    last_line,
    parse_scores,
    scores_in,
    short_verdict_pattern,
)
from grmpipe.judge.verdict import make_failure
from grmpipe.models.chat.thinking import KNOWN_MARKERS, ThinkingMarkers, thinks
from grmpipe.models.engines.endpoint_use import NoRequestLog
from grmpipe.models.request_gates import PrioritySemaphore
from grmpipe.models.seeds import derive_seed, first_name
from grmpipe.models.types import (
    AskedAnswer,
    ChatEngine,
    Completion,
    EngineDied,
    EngineRefused,
    Generates,
    Message,
    RequestContext,
    RequestLog,
    SamplingParams,
    ThinkingBudget,
    Usage,
    ignore_first_token,
)
from grmpipe.scheduler.clock import ActiveClock
from grmpipe.scheduler.events import EventSink
from grmpipe.scheduler.work_queue import BusyMeter
from grmpipe.types import OVER_BUDGET, Cause, Failed, FailedJudgement, Judgement

# monitoring: canaries and adversarial replies.  evaluation: labelled work of task=evaluate.
Purpose = Literal["training", "held_out", "preflight", "monitoring", "evaluation"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
_PURPOSE: ContextVar[Purpose] = ContextVar("purpose", default="training")


@contextmanager
def set_purpose(purpose: Purpose) -> Iterator[None]:
    """Within it, and in the tasks that are begun within it, requests have this purpose."""
    before = _PURPOSE.set(purpose)
    try:
        yield
    finally:
        _PURPOSE.reset(before)


def current_purpose() -> Purpose:
    return _PURPOSE.get()


# What an endpoint is asked for after a judgement without a verdict, whose prompt names the form.
ASK_VERDICT = "Give your verdict now, in exactly the form that you were asked for. Write nothing before or after it."
VERDICT = "verdict"  # suffix of that request's id
VERDICT_TOKENS, SCORE_TOKENS = 48, 8  # kept for it: for its line and what asks for it, and for each score
BY_TEXT = "judge.score_from=expectation needs them, judge.score_from=text doesn't"
NAMED = 8  # criteria in the words of a failed call
OWN_TURN = Message(role="assistant", content="")  # of a template: here the judge writes
SECOND_TURN = "second"  # suffix of its request's id
BYTES_PER_TOKEN = 4  # rough value for English prose, for a GRM without a tokenizer here


class PromptRenderer(Protocol):
    """What judging needs of a tokenizer with a chat template."""

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]: ...

    def encode_inserted(self, text: str) -> tuple[int, ...]: ...


def render_prompt(renderer: PromptRenderer, messages: Sequence[Message]) -> tuple[int, ...]:
    """The token ids of a judge's prompt. The judge goes on with a last message of the assistant (`judge.prefill`)."""
    *before, last = messages
    if last.role != "assistant":
        return renderer.render(messages)
    return renderer.render(before) + renderer.encode_inserted(last.content)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrmPrompt:
    """A prompt for the GRM. `token_ids` are empty if a remote endpoint tokenizes.

    num_tokens: with those of `second`.
    second: the message after the judge's first turn, which asks for its second one; None: it has one turn.
    state:  the final one of the rollout that it shows, for tools (judge.tools.state).
    """

    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    num_tokens: int
    second: Message | None = None
    state: bytes = field(default=b"", repr=False)

    @property
    def begun(self) -> str:
        """The text with which the answer begins."""
        return self.messages[-1].content if self.messages[-1].role == "assistant" else ""


def split_turns(messages: Sequence[Message]) -> tuple[tuple[Message, ...], Message | None]:
    """The messages before the judge's first turn, and the one after it: an empty message is a turn of its own."""
    if len(messages) > 2 and messages[-2] == OWN_TURN:
        return tuple(messages[:-2]), messages[-1]
    return tuple(messages), None


class Grm(Protocol):
    """A GRM to ask. `context_tokens`: its window; 0 if unknown. `thinking`: the markers of its thoughts, if any.
    `decode`: its tokens as text; None if it returns none.
    """

    name: str
    context_tokens: int
    thinking: ThinkingMarkers | None
    decode: Decode | None

    @property
    def thinks(self) -> bool:
        """Whether it may think before an answer, and its thoughts can be ended."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds with at least one request in flight."""
        ...

    def escape_text(self, text: str) -> str:
        """A text of the policy, escaped as this GRM's prompts need it."""
        ...

    def prompt(self, messages: Sequence[Message]) -> GrmPrompt: ...

    def time_limit(self, seconds: float) -> AbstractAsyncContextManager[object]:
        """Context around `ask`: raises TimeoutError after `seconds`, on the GRM's clock."""
        ...

    async def ask(self, prompt: GrmPrompt, params: SamplingParams, context: RequestContext) -> Completion:
        """Sample one judgement. Raises EngineRefused or EngineDied."""
        ...

    async def ask_verdict(
        self, prompt: GrmPrompt, judgement: Completion, params: SamplingParams, context: RequestContext
    ) -> Completion:
        """The judgement, continued by the verdict that it lacks, or after `prompt.second` by its second turn; raises
        what `ask` raises. params: `pattern` is the verdict's, for a GRM that can be held to one; `max_new_tokens` is
        the limit of both together.
        """
        ...


class MeteredGrm:
    """What both kinds of GRM have in common: the time in which they are asked."""

    decode: Decode | None = None

    def __init__(self, name: str, context_tokens: int) -> None:
        self.name = name
        self.context_tokens = context_tokens
        self._meter: BusyMeter | None = None

    @property
    def busy_s(self) -> float:
        return self._meter.busy_s if self._meter is not None else 0.0

    def _in_flight(self) -> BusyMeter:
        """Context around a request. The meter needs the event loop, and so begins with the first request."""
        if self._meter is None:
            self._meter = BusyMeter()
        return self._meter


class LocalGrm(MeteredGrm):
    """A GRM on an engine of this run, which may be a router of many. Token ids are made here.

    clock:    times its answers; stands still while all its engines are being replaced.
    thinking: the markers of thoughts, for a model whose engine marks them in its completions.
    requests: counts each request.
    decode:   its tokens as text, for scores by tokens.
    """

    def __init__(
        self,
        name: str,
        engine: Generates,
        renderer: PromptRenderer,
        context_tokens: int,
        clock: ActiveClock | None = None,
        thinking: ThinkingMarkers | None = None,
        requests: RequestLog | None = None,
        decode: Decode | None = None,
    ) -> None:
        super().__init__(name, context_tokens)
        self.decode = decode
        self._engine = engine
        self._requests = requests or NoRequestLog()
        self.thinking = thinking
        self._renderer = renderer
        self._clock = clock

    @property
    def thinks(self) -> bool:
        return thinks(self.thinking)

    def escape_text(self, text: str) -> str:
        return text  # our renderer never reads text as markup

    def prompt(self, messages: Sequence[Message]) -> GrmPrompt:
        before, second = split_turns(messages)
        token_ids = render_prompt(self._renderer, before)
        num_tokens = len(token_ids) if second is None else len(self._renderer.render(messages))
        return GrmPrompt(messages=before, token_ids=token_ids, num_tokens=num_tokens, second=second)

    def time_limit(self, seconds: float) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(seconds) if self._clock is None else self._clock.timeout(seconds)

    async def ask(self, prompt: GrmPrompt, params: SamplingParams, context: RequestContext) -> Completion:
        return await self.generate(prompt.token_ids, params, context)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        """One turn of a judgement."""
        number = self._requests.begin_request(retry=context.is_retry)
        with self._in_flight():
            completion = await self._engine.generate(prompt_ids, params, context, on_first_token)
        self._requests.end_request(number, Usage(prompt=len(prompt_ids), sampled=completion.num_tokens))
        return completion

    async def ask_verdict(
        self, prompt: GrmPrompt, judgement: Completion, params: SamplingParams, context: RequestContext
    ) -> Completion:
        assert isinstance(self._engine, ReasoningEngine), "it continues completions"
        number = self._requests.begin_request(retry=True)
        with self._in_flight():
            whole = await self._engine.ask_verdict(prompt.token_ids, judgement, params, context, prompt.second)
        asked_at = judgement.num_tokens if whole.asked is None else whole.asked.end
        self._requests.end_request(
            number, Usage(prompt=prompt.num_tokens + asked_at, sampled=whole.num_tokens - asked_at)
        )
        return whole


class RemoteGrm(MeteredGrm):
    """A GRM behind an endpoint. It takes messages, and returns a text and a count of tokens.

    context_tokens: 0 lets the endpoint refuse what doesn't fit; otherwise prompts are measured by their bytes.
    markup: what is broken in texts of the policy, because the endpoint's tokenizer could read it as its own.
    thinking_markers: around thoughts that the endpoint doesn't separate from the answer.
    clock:  times its answers; stands still while a budget holds requests back.
    """

    def __init__(
        self,
        name: str,
        engine: ChatEngine,
        context_tokens: int,
        events: EventSink,
        markup: Markup,
        thinking_markers: Sequence[str] | None = None,
        clock: ActiveClock | None = None,
    ) -> None:
        super().__init__(name, context_tokens)
        self.thinking = remote_markers(thinking_markers)
        self._clock = clock
        self._engine = engine
        self._events = events
        self._markup = markup
        self._own_markup = Markup([re.escape(marker) for marker in thinking_markers or ()])

    @property
    def thinks(self) -> bool:
        return False  # an endpoint takes messages, so a thought can't be ended here

    def escape_text(self, text: str) -> str:
        return self._own_markup.break_markup(self._markup.break_markup(text))

    def prompt(self, messages: Sequence[Message]) -> GrmPrompt:
        num_tokens = sum(estimate_tokens(message.content) for message in messages)
        before, second = split_turns(messages)
        return GrmPrompt(messages=before, token_ids=(), num_tokens=num_tokens, second=second)

    def time_limit(self, seconds: float) -> AbstractAsyncContextManager[object]:
        return asyncio.timeout(seconds) if self._clock is None else self._clock.timeout(seconds)

    async def ask(self, prompt: GrmPrompt, params: SamplingParams, context: RequestContext) -> Completion:
        clock = asyncio.get_running_loop().time
        start_s = clock()
        with self._in_flight():
            completion = await self._engine.chat(prompt.messages, params, context)
        num_tokens = completion.num_tokens
        self._events.span(self.name, context.role, start_s, clock(), request=context.request_id, num_tokens=num_tokens)
        return self._with_thought(completion)

    async def ask_verdict(
        self, prompt: GrmPrompt, judgement: Completion, params: SamplingParams, context: RequestContext
    ) -> Completion:
        """By a further turn. The judge's words may quote those of the policy, so they are escaped alike; a thought
        isn't repeated, and one in the new answer is no part of the verdict.
        """
        said, ask = self.escape_text(judgement.answer), prompt.second or Message(role="user", content=ASK_VERDICT)
        *before, last = prompt.messages
        if prompt.begun:
            *before, last = before
            said = prompt.begun + said
        if said.strip():
            messages = (*before, last, Message(role="assistant", content=said), ask)
        else:  # endpoints refuse an empty turn, and two of the same role
            messages = (*before, replace(last, content=f"{last.content}\n\n{ask.content}"))
        num_used = judgement.num_tokens or estimate_tokens(judgement.text)
        room = params.max_new_tokens - num_used - (estimate_tokens(ASK_VERDICT) if prompt.second is None else 0)
        if room < 1:
            return judgement
        params = replace(params, pattern=None, max_new_tokens=room, begun="")
        answer = await self.ask(self.prompt(messages), params, context)
        start, text = judgement.num_tokens, f"{judgement.text}\n\n" if judgement.text else ""
        return replace(
            judgement,
            text=text + answer.answer,
            finish_reason=answer.finish_reason,
            unseen_tokens=start + answer.num_tokens,
            top=answer.top,
            asked=AskedAnswer(start=start, end=start, text_start=len(text), is_turn=prompt.second is not None),
        )

    def _with_thought(self, completion: Completion) -> Completion:
        """The endpoint's template is unknown and may open the thought: the thought's end shows that there is one."""
        if self.thinking is None:
            return completion
        markers = replace(self.thinking, in_prompt=self.thinking.close in completion.text)
        return replace(completion, thought_chars=markers.split_thought(completion.text).num_chars)


def remote_markers(declared: Sequence[str] | None) -> ThinkingMarkers | None:
    """The markers of a model behind an endpoint: the declared ones, or the usual ones; None if there are none."""
    if declared is not None and not declared:
        return None
    opening, closing = declared or KNOWN_MARKERS[0]
    return ThinkingMarkers(open=opening, close=closing)


def estimate_tokens(text: str) -> int:
    return -(-len(text.encode("utf-8")) // BYTES_PER_TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedScores:
    """The scores of a judgement that count. criteria: whose they are; empty: as asked. unread: the criteria without
    one, and why. quotes: what the judge quotes for some.
    """

    scores: tuple[float, ...]
    criteria: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    quotes: Mapping[str, str] = field(default_factory=dict)


CheckScores = Callable[[Scores, Scores, str], CheckedScores]  # as written, as they count, the answer -> those to keep


@dataclass(frozen=True, slots=True, kw_only=True)
class GrmQuestion:
    """The question for one judgement. Its request ids are `<name>/j<index>.<attempt>`, with `@<judge>` at the end if
    another judge than the first one asks.

    siblings:   in the order shown.
    num_scores: scores that the judgement must give: one per sibling, or several of one sibling.
    criteria:   the names of those asked about; empty: all of the rubric, or there is none.
    check:      looks at the scores one by one; None: they count as they are.
    """

    group_id: str
    name: str
    siblings: tuple[int, ...]
    num_scores: int
    prompt: GrmPrompt
    criteria: tuple[str, ...] = ()
    check: CheckScores | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GrmRequest:
    """One question to a GRM. Its request ids are `<name>.<attempt>`, with the judge's mark; a repeated id samples the
    same answer.

    verdict: the pattern of a verdict that is asked for if the answer can't be read; None: none is.
    """

    name: str
    group_id: str
    priority: int
    prompt: GrmPrompt
    max_new_tokens: int
    pattern: str | None
    thinking: ThinkingBudget | None
    verdict: str | None = None
    top_logprobs: int = 0


T = TypeVar("T")
Read = Callable[[Completion, int], T | FailedJudgement]  # an answer, the attempt counted from 1 -> its result


class GrmClient:
    """Sends at most `judge.limits.max_concurrency` requests at once. The lowest priority number goes first, here and
    in the engine.

    seed: makes every answer repeatable by its request_id, without the suffix of a group that is sampled again.
    Judges that share a model ask it about the same siblings: the ids of requests name the judge, if it has a name.
    """

    def __init__(self, grm: Grm, config: JudgeConfig, seed: int) -> None:
        self.grm = grm
        self._config = config
        self._seed = seed
        self._mark = "" if config.name == JUDGE else f"@{config.name}"
        self._scale = config.scale
        self._form = form_named(config.parser, config.pattern)
        self._parser = functools.partial(scores_in, self._form)
        self._budget = config.make_thinking_budget(thinks=grm.thinks)  # of a thought
        self._places = PrioritySemaphore(config.limits.max_concurrency)

    @property
    def is_greedy(self) -> bool:
        """Whether a repeated request would get the same answer."""
        return self._config.temperature == 0

    @property
    def room(self) -> int | None:
        """The tokens that the prompt of a judgement may have. None if the context window is unknown."""
        return self.grm.context_tokens - self._config.max_new_tokens if self.grm.context_tokens else None

    @property
    def room_for_principles(self) -> int | None:
        """The tokens that a prompt for principles may have. None if the context window is unknown."""
        return self.grm.context_tokens - self._config.principles.max_new_tokens if self.grm.context_tokens else None

    async def judgement(self, question: GrmQuestion, index: int, priority: int) -> list[Judgement | Failed]:
        """One judgement, preceded by the failures of earlier attempts."""
        request = GrmRequest(
            name=f"{question.name}/j{index}",
            group_id=question.group_id,
            priority=priority,
            prompt=question.prompt,
            max_new_tokens=self._config.max_new_tokens - self._kept_for_verdict(question.num_scores),
            pattern=self._pattern(question.num_scores),
            thinking=self._budget_before(question.num_scores),
            verdict=self._pattern_of_verdict(question.num_scores),
            top_logprobs=TOP_LOGPROBS if self._config.score_from == "expectation" else 0,
        )
        results = await self._sample(request, lambda answer, attempts: self._read(question, answer, attempts))
        if not question.criteria:
            return results
        some, more = ", ".join(question.criteria[:NAMED]), len(question.criteria) - NAMED
        asked = f"criteria {some}{f' and {more} more' if more > 0 else ''}"
        return [replace(one, detail=f"{asked}: {one.detail}") if isinstance(one, Failed) else one for one in results]

    async def text(self, name: str, group_id: str, prompt: GrmPrompt, priority: int) -> Completion | Failed:
        """A free text that isn't truncated: the principles of a group."""
        request = GrmRequest(
            name=name,
            group_id=group_id,
            priority=priority,
            prompt=prompt,
            max_new_tokens=self._config.principles.max_new_tokens,
            pattern=None,
            thinking=self._budget_before(),
        )

        def read(answer: Completion, attempts: int) -> Completion | FailedJudgement:
            if answer.finish_reason != "length" and answer.answer.strip():
                return answer
            cause: Cause = "truncated" if answer.finish_reason == "length" else "unparseable"
            return make_failed_judgement(cause, attempts, "the principles are truncated or empty", prompt, answer)

        *_, last = await self._sample(request, read)
        return last

    async def _sample(self, request: GrmRequest, read: Read[T]) -> list[T | Failed]:
        """Ask with retries while the answer is unusable, unless it is greedy. The router retries a dead engine."""
        results: list[T | Failed] = []
        for attempt in range(1 if self.is_greedy else 1 + self._config.limits.max_retries):
            answer = await self._answer(request, attempt, read)
            results.append(answer if isinstance(answer, Failed) else read(answer, attempt + 1))
            if not isinstance(results[-1], FailedJudgement):
                break
        return results

    def _pattern(self, num_scores: int) -> str | None:
        """The pattern of a whole judgement. None if it is free."""
        if not self._config.format.structured:
            return None
        return judgement_pattern(self._form, self._scale, num_scores, self.grm.thinking)

    def _pattern_of_verdict(self, num_scores: int) -> str | None:
        if not self._config.format.ask_verdict:
            return None
        return short_verdict_pattern(self._form, self._scale, num_scores)

    def _kept_for_verdict(self, num_scores: int) -> int:
        """The tokens of `judge.max_new_tokens` that are kept for a verdict that has to be asked for."""
        if not self._config.format.ask_verdict:
            return 0
        return min(VERDICT_TOKENS + SCORE_TOKENS * num_scores, self._config.max_new_tokens // 2)

    def _budget_before(self, num_scores: int | None = None) -> ThinkingBudget | None:
        """The budget of a thought before a verdict of `num_scores`; None: before a free text."""
        config, budget = self._config, self._budget
        if budget is None:
            return None
        if num_scores is None:
            return replace(budget, answer_start="")
        if not config.format.structured:
            return budget
        return replace(budget, pattern=answer_pattern(self._form, self._scale, num_scores))

    async def _answer(self, request: GrmRequest, attempt: int, read: Read[T]) -> Completion | Failed:
        """An answer; where `read` finds no verdict in it, with the one that was asked for."""
        request_id = f"{request.name}.{attempt}{self._mark}"
        context = RequestContext(
            request_id=request_id,
            group_id=request.group_id,
            role=self.grm.name,
            priority=request.priority,
            is_retry=attempt > 0,
        )
        prompt, config = request.prompt, self._config
        params = SamplingParams(
            max_new_tokens=request.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            seed=derive_seed(self._seed, first_name(request_id)),
            pattern=request.pattern,
            thinking=request.thinking,
            begun=prompt.begun,
            top_logprobs=request.top_logprobs,
        )
        first = params  # of two turns the first has half of the tokens at most, and no verdict
        if prompt.second is not None:
            first = replace(params, max_new_tokens=params.max_new_tokens // 2, pattern=None, top_logprobs=0)
        try:
            async with self._places.enter(request.priority), self.grm.time_limit(config.limits.timeout_s):
                completion = await self.grm.ask(prompt, first, context)
                if prompt.second is not None and completion.finish_reason == "stop":
                    after = replace(params, seed=derive_seed(params.seed, SECOND_TURN), thinking=None)
                    second = replace(context, request_id=f"{request_id}/{SECOND_TURN}")
                    completion = await self.grm.ask_verdict(prompt, completion, after, second)
                    if completion.asked is None:  # without room for a second turn the first one is no judgement
                        completion = replace(completion, finish_reason="length")
                if (
                    request.verdict is not None
                    and completion.finish_reason != "abort"
                    and (completion.top is not None or not params.top_logprobs)
                    and isinstance(read(completion, attempt + 1), FailedJudgement)
                ):
                    params = replace(
                        params,
                        max_new_tokens=config.max_new_tokens,
                        seed=derive_seed(params.seed, VERDICT),
                        pattern=request.verdict,
                        thinking=None,
                    )
                    context = replace(context, request_id=f"{request_id}/{VERDICT}", is_retry=True)
                    completion = await self.grm.ask_verdict(prompt, completion, params, context)
        except TimeoutError:
            return make_failure("timeout", f"no answer within {config.limits.timeout_s:g} s", attempt + 1)
        except EnvFault as fault:  # of a judge with tools
            return make_failure("broken", str(fault), attempt + 1)
        except EngineRefused as error:
            hint = f"; {BY_TEXT}" if params.top_logprobs and "logprob" in str(error) else ""
            return make_failure("refused", f"{error}{hint}", attempt + 1)
        except EngineDied as error:
            return make_failure("died", str(error), attempt + 1)
        if completion.finish_reason == "abort":
            return make_failure("died", "the request was aborted", attempt + 1)
        if params.top_logprobs and completion.top is None and completion.finish_reason == "stop":
            return make_failure("refused", f"{self.grm.name} returned no log-probs; {BY_TEXT}", attempt + 1)
        return completion

    def _read(self, question: GrmQuestion, completion: Completion, attempts: int) -> Judgement | FailedJudgement:
        asked, sampled = question.num_scores, completion
        completion = replace(completion, top=None)
        begun = question.prompt.begun
        scores = parse_scores(completion, self._parser, asked, self._scale, begun)
        if isinstance(scores, str):
            what = "it ends with" if scores == "truncated" else "no clear verdict in its last line,"
            detail = f"{what} {last_line(completion)!r}"
            if completion.tool_results and OVER_BUDGET in completion.tool_results[-1].faults and not completion.answer:
                detail = "it called a tool when its verdict was asked for"
            return make_failed_judgement(scores, attempts, detail, question.prompt, completion)
        written = scores
        if self._config.score_from == "expectation":
            scores = self._expect(sampled, asked, begun)
            if isinstance(scores, str):
                detail = "the endpoint's log-probs aren't those of its text"
                return make_failed_judgement(scores, attempts, detail, question.prompt, completion)
        found = CheckedScores(scores=scores)
        if question.check is not None:
            found = question.check(written, scores, completion.answer)
        if not found.scores:
            detail = next(f"criterion {name}: {why}" for name, why in found.unread.items())
            return make_failed_judgement("unparseable", attempts, detail, question.prompt, completion)
        return Judgement(
            group_id=question.group_id,
            siblings=question.siblings,
            scores=tuple(float(score) for score in found.scores),
            criteria=found.criteria or question.criteria,
            unread=found.unread,
            quotes=found.quotes,
            prompt_ids=question.prompt.token_ids,
            completion=completion,
            grm=self.grm.name,
            version=completion.oldest_version,
        )

    def _expect(self, sampled: Completion, num_scores: int, begun: str) -> Scores | Unparseable:
        """The expected scores. The text that is parsed has a shorter thought, and what the prompt has of it."""
        text = in_usual_markers(sampled, begun)
        shift = len(text) - len(sampled.text)

        def find(at: int) -> TokenPlace | None:
            place = find_place(sampled, at - shift, self.grm.decode)
            return place and replace(place, start=place.start + shift, end=place.end + shift)

        def parse(text: str) -> Scores | Unparseable:
            return self._parser(text, num_scores, self._scale)

        return expect_scores(parse, text, self._config.temperature, find, since=max(0, shift))


def make_failed_judgement(
    cause: Cause, attempts: int, detail: str, prompt: GrmPrompt, completion: Completion
) -> FailedJudgement:
    return FailedJudgement(
        stage="judge",
        cause=cause,
        attempts=attempts,
        detail=detail,
        prompt_ids=prompt.token_ids,
        completion=completion,
    )
