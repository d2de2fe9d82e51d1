"""A router: many engines of one role as one. Least load, siblings together, a trajectory's turns where its cache is,
retries elsewhere, and what waits at one engine goes to another that has room.

It outlives its engines: requests wait while a replacement starts. A completion may migrate from one engine to another:
the sampled tokens become the end of the next prompt, so the model continues where it was, at the cost of a prefill.
Every token keeps its log-prob and the version that sampled it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from grmpipe.models.types import (
    Completion,
    Engine,
    EngineDied,
    EngineRefused,
    KeepsTrajectories,
    RequestContext,
    SamplingParams,
    ignore_first_token,
    join_spans,
)
from grmpipe.scheduler.events import EventSink, NoEvents
from grmpipe.scheduler.routing.load import LoadEstimate, RoleLoad
from grmpipe.scheduler.routing.members import Death, RequestMoved, RoleMembers, TrackedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What a migration needs of a role's model.

    decode:     token ids to text, as its engines do it.
    seed_after: (seed, tokens sampled so far) -> the seed of the rest. An engine whose random numbers depend on the
                position keeps the seed, and samples what it would have sampled unmoved; any other would repeat its
                first random numbers.
    """

    decode: Callable[[Sequence[int]], str]
    seed_after: Callable[[int, int], int]

    def rest(self, params: SamplingParams, num_sampled: int) -> SamplingParams:
        """The parameters for the rest of the tokens."""
        seed = self.seed_after(params.seed, num_sampled)
        return replace(params, max_new_tokens=params.max_new_tokens - num_sampled, seed=seed)

    def join(self, pieces: Sequence[Completion]) -> Completion:
        """The pieces as one completion; it ends as the last piece did."""
        last = pieces[-1].versions[-1]
        token_ids = tuple(token for piece in pieces for token in piece.token_ids)
        return Completion(
            token_ids=token_ids,
            logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
            text=self.decode(token_ids),
            finish_reason=pieces[-1].finish_reason,
            versions=join_spans(last.model, _stretches(pieces), last.version),
            experts_TLK=_joined_experts(pieces),
            top=pieces[-1].top,
            cached_tokens=pieces[0].cached_tokens,
            drafted_tokens=sum(piece.drafted_tokens for piece in pieces),
            accepted_tokens=sum(piece.accepted_tokens for piece in pieces),
        )


class PartialRequest:
    """A request and the tokens sampled so far: the request to the next engine."""

    def __init__(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> None:
        self.prompt_ids = prompt_ids
        self.params = params
        self.num_sampled = 0
        self.moved = False
        self._whole_params = params
        self._pieces: list[Completion] = []

    def go_on(self, piece: Completion, continuation: Continuation) -> None:
        """Add a piece that an engine sampled."""
        self.moved = True
        if not piece.token_ids:
            return
        self._pieces.append(piece)
        self.prompt_ids += piece.token_ids
        self.num_sampled += len(piece.token_ids)
        self.params = continuation.rest(self._whole_params, self.num_sampled)

    def whole(self, last: Completion, continuation: Continuation | None) -> Completion:
        """The whole completion, with the last piece."""
        if not self._pieces:
            return last
        assert continuation is not None
        return continuation.join((*self._pieces, last))


def can_be_continued(params: SamplingParams) -> bool:
    """Whether a request can be split. Not with a stop string, which may cross the border, nor with a grammar, which
    would restart, nor if it scores its prompt, in a single pass, nor if it asks for likely tokens, of which only the
    last piece has any.
    """
    return not (params.stop or params.pattern is not None or params.scoring or params.top_logprobs)


def _stretches(pieces: Sequence[Completion]) -> Iterator[tuple[int, int, int]]:
    """(version, start, end) of the spans of all pieces, in the whole completion."""
    offset = 0
    for piece in pieces:
        for span in piece.versions:
            yield span.version, span.start + offset, span.end + offset
        offset += len(piece.token_ids)


def _joined_experts(pieces: Sequence[Completion]) -> np.ndarray | None:
    """The joined experts. Each piece begins with the tokens of those before it: each token keeps its first experts."""
    joined: np.ndarray | None = None
    for piece in pieces:
        if piece.experts_TLK is None:
            return None
        joined = piece.experts_TLK if joined is None else np.concatenate([joined, piece.experts_TLK[len(joined) :]])
    return joined


NO_REQUEST = "health look"  # no request has this id: aborting it tests an engine and changes nothing


class RequestKillsEngines(EngineRefused):
    """Several engines died, one after another, while they served the same request."""


class Router:
    """Sends each request to one engine. A dead engine gets no more requests; its requests are sampled again elsewhere,
    with the same request_id and seed. A request during which too many engines died is refused: it may kill engines.

    members: the engines. Their `on_change` is also called when a request waits for one, or one has no request left.
    continuation: how requests migrate with their tokens; without it they don't migrate.
    on_kills: called with the engine's name, once for each death for which a request is refused.
    """

    on_kills: Callable[[str], None] | None = None
    max_deaths_per_request = 2

    def __init__(
        self,
        role: str,
        engines: Mapping[str, Engine],
        events: EventSink | None = None,
        continuation: Continuation | None = None,
    ) -> None:
        self._events = events or NoEvents()
        self.members = RoleMembers(role, engines, self._events)
        self.load = RoleLoad(role)
        self._estimate = LoadEstimate(self.members)
        self._continuation = continuation
        self._emptied = asyncio.Event()  # set when an engine has no request left

    @property
    def in_use(self) -> Mapping[str, Engine]:
        """Engines that serve, and inactive ones whose last requests are ending: they need new weights."""
        serving = self.members.serving
        return {name: engine for name, engine in self.members.alive.items() if name in serving or self.load[name]}

    async def until_served(self) -> None:
        """Return once an engine serves. Raises EngineDied if none serves, none is inactive, and none will come."""
        if self.members.serving:
            return
        self.load.num_waiting += 1
        self.members.on_change()
        try:
            await self.members.until_served()
        finally:
            self.load.num_waiting -= 1

    async def until_idle(self, name: str) -> None:
        """Return once an engine has no request in flight."""
        while self.load[name]:
            self._emptied.clear()
            await self._emptied.wait()

    async def migrate(self, name: str, count: int | None = None) -> int:
        """Migrate requests of an engine to the others, the latest first; all, or at most `count`.

        Returns how many were asked to migrate: 0 if no other engine serves. They are still on their way.
        """
        if self._continuation is None or not (self.members.serving.keys() - {name}):
            return 0
        return await self.preempt(name, count)

    async def preempt(self, name: str, count: int | None = None) -> int:
        """End requests of an engine, the latest first, each with its tokens so far: they continue where they are sent
        next, and wait while no engine serves. Requests that can't be split end where they are. Returns their number.
        """
        if (engine := self.members.alive.get(name)) is None:
            return 0
        movable = [ask for ask in self.load.requests(name) if ask.movable and not ask.moving]
        # Those without a token first, then the youngest: they have the least to prefill again.
        movable.sort(key=lambda ask: ask.begun_s if ask.begun_s is not None else math.inf, reverse=True)
        for ask in (going := movable[:count]):
            ask.moving = True
        try:
            await asyncio.gather(*(engine.abort(ask.request_id) for ask in going))
        except EngineDied as death:
            self.members.mark_dead(name, engine, death)
        return len(going)

    async def rebalance(self) -> None:
        """Even out the number of requests on all engines that serve, for a new one."""
        if not (serving := self.members.serving):
            return
        fair = -(-sum(self.load[name] for name in serving) // len(serving))
        over = {name: self.load[name] - fair for name in serving}
        await asyncio.gather(*(self.migrate(name, surplus) for name, surplus in over.items() if surplus > 0))

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        on_first_token: Callable[[], None] = ignore_first_token,
    ) -> Completion:
        """Sample one completion, on one engine after another if need be. Raises EngineDied only if no engine is left
        and none will come, RequestKillsEngines if `max_deaths_per_request` engines died with this request.
        """
        once, partial = _Once(on_first_token), PartialRequest(tuple(prompt_ids), params)
        deaths: list[Death] = []
        while True:
            await self.until_served()
            name, expected = self._place(partial, context)
            engine, served = self.members.serving[name], False
            try:
                if deaths:
                    await engine.abort(NO_REQUEST)  # an engine that is dead already isn't killed by this request
                served = True
                part, moving = await self._generate_on(name, engine, partial, context, once)
            except RequestMoved:
                partial.moved = True
                continue
            except EngineDied as death:
                noted = self.members.mark_dead(name, engine, death)
                if served:
                    deaths.append(noted)
                if len(deaths) >= self.max_deaths_per_request and self.members.have_a_future:
                    raise self._refusal(context.request_id, deaths) from death
                continue
            finally:
                self._estimate.add(name, -expected)
            if moving and part.finish_reason == "abort" and self._continuation is not None:
                partial.go_on(part, self._continuation)
                continue
            whole = partial.whole(part, self._continuation)
            # What was aborted, or only scored, says nothing of how long answers are.
            if whole.finish_reason != "abort" and params.scoring is None:
                num_tokens = whole.num_tokens
                self.load.rates.record_end(num_tokens)
                self._estimate.record_end(num_tokens)
                if context.trajectory_id:
                    self._estimate.keeps(name, context.trajectory_id, len(prompt_ids) + len(whole.token_ids))
            return whole

    def end_trajectory(self, trajectory_id: str) -> None:
        """No further turn of this trajectory comes: the engine that has its last one may free it."""
        engine = self.members.alive.get(self._estimate.forget_trajectory(trajectory_id))
        if isinstance(engine, KeepsTrajectories):
            engine.end_trajectory(trajectory_id)

    def _fill(self, name: str) -> None:
        """Send an engine that has a free row the most urgent request that waits for one at another, if that has far
        more to do. It has no tokens yet, and keeps its seed.
        """
        serving = self.members.serving
        if name not in serving or self.load.num_queued(name):
            return
        other = max((one for one in self.load.with_queue if one in serving), key=self.load.num_queued, default=None)
        if other is None or (ask := self.load.first_queued(other)) is None:
            return
        # Without it a judge at half of the others' speed made a synchronous run 1.3 times as long
        # (benchmarks/scheduling.md).
        if self._estimate.is_worth_moving(ask.num_prompt_tokens, other, name):
            assert ask.tracked is not None
            ask.moving = True
            ask.tracked.take_off()

    def _refusal(self, request_id: str, deaths: Sequence[Death]) -> RequestKillsEngines:
        """The refusal of a request that is blamed for these deaths; other requests may be blamed for the same ones."""
        for death in deaths:
            if not death.blamed and self.on_kills is not None:
                self.on_kills(death.name)
            death.blamed = True
        names = ", ".join(death.name for death in deaths)
        return RequestKillsEngines(f"{request_id} killed {len(deaths)} engines: {names}; the last one: {deaths[-1]}")

    def _place(self, partial: PartialRequest, context: RequestContext) -> tuple[str, float]:
        """The engine for a request, and the tokens that it is expected to cost there."""
        if partial.moved:
            return self._estimate.place_anywhere(partial.prompt_ids, partial.params)
        return self._estimate.place(context.group_id, partial.prompt_ids, partial.params, context.trajectory_id)

    async def _generate_on(
        self, name: str, engine: Engine, partial: PartialRequest, context: RequestContext, once: _Once
    ) -> tuple[Completion, bool]:
        """What the engine sampled, and whether the rest continues elsewhere."""
        ask = self.load.take(
            name, context, can_be_continued(partial.params), len(partial.prompt_ids), partial.num_sampled
        )
        num_tokens: int | None = None
        member, now_s = self.members[name], asyncio.get_running_loop().time
        start_s = now_s()

        def on_first_token() -> None:
            self.load.began(name, ask)
            member.heard_s = now_s()
            once()

        engine_context = replace(context, num_sampled=partial.num_sampled) if partial.num_sampled else context
        try:
            async with TrackedRequest(member) as tracked:
                if partial.params.scoring is None and not context.trajectory_id:
                    ask.tracked = tracked
                part = await engine.generate(partial.prompt_ids, partial.params, engine_context, on_first_token)
            num_tokens = part.num_tokens
            member.heard_s = now_s()
        finally:
            self.load.record_end(name, ask, num_tokens)
            self._fill(name)
            if not self.load[name]:
                self._emptied.set()
                self.members.on_change()
        seen: dict[str, str | int | float] = {"request": context.request_id, "num_tokens": num_tokens}
        if ask.begun_s is not None:
            seen["first_token_s"] = round(ask.begun_s - start_s, 6)  # seconds after the start
        self._events.span(name, context.role, start_s, now_s(), **seen)
        return part, ask.moving


class _Once:
    """A callback that runs once: a retried request has two first tokens."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._called = False

    def __call__(self) -> None:
        if not self._called:
            self._called = True
            self._callback()
