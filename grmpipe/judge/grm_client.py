"""Requests to a GRM: single answers, retries, failures by cause. Knows no protocol or vote; never invents a score."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.keys.entry_names import JUDGE
from grmpipe.judge.grm import Grm, GrmPrompt
from grmpipe.judge.parse import answer_pattern, form_named, judgement_pattern, parse_scores, scores_in
from grmpipe.judge.verdict import make_failure
from grmpipe.models.request_gates import PrioritySemaphore
from grmpipe.models.seeds import derive_seed, first_name
from grmpipe.models.types import Completion, EngineDied, EngineRefused, RequestContext, SamplingParams, ThinkingBudget
from grmpipe.types import Cause, Failed, FailedJudgement, Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class GrmQuestion:
    """The question for one judgement. Its request ids are `<name>/j<index>.<attempt>`, with `@<judge>` at the end if
    another judge than the first one asks.

    siblings:   in the order shown.
    num_scores: scores that the judgement must give: one per sibling, or several of one sibling.
    """

    group_id: str
    name: str
    siblings: tuple[int, ...]
    num_scores: int
    prompt: GrmPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GrmRequest:
    """One question to a GRM. Its request ids are `<name>.<attempt>`, with the judge's mark; a repeated id samples the
    same answer.
    """

    name: str
    group_id: str
    priority: int
    prompt: GrmPrompt
    max_new_tokens: int
    pattern: str | None
    thinking: ThinkingBudget | None


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
        self._form = form_named(config.parser)
        self._parser = functools.partial(scores_in, self._form)
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
        """One judgement, after the failures before it."""
        request = GrmRequest(
            name=f"{question.name}/j{index}",
            group_id=question.group_id,
            priority=priority,
            prompt=question.prompt,
            max_new_tokens=self._config.max_new_tokens,
            pattern=self._pattern(question.num_scores),
            thinking=self._budget(question.num_scores),
        )
        return await self._sample(request, lambda answer, attempts: self._read(question, answer, attempts))

    async def text(self, name: str, group_id: str, prompt: GrmPrompt, priority: int) -> Completion | Failed:
        """A free text that isn't truncated: the principles of a group."""
        request = GrmRequest(
            name=name,
            group_id=group_id,
            priority=priority,
            prompt=prompt,
            max_new_tokens=self._config.principles.max_new_tokens,
            pattern=None,
            thinking=self._budget(),
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
            answer = await self._answer(request, attempt)
            results.append(answer if isinstance(answer, Failed) else read(answer, attempt + 1))
            if not isinstance(results[-1], FailedJudgement):
                break
        return results

    def _pattern(self, num_scores: int) -> str | None:
        """The pattern of a whole judgement. None if it is free."""
        if not self._config.format.structured:
            return None
        return judgement_pattern(self._form, self._scale, num_scores, self.grm.thinking)

    def _budget(self, num_scores: int | None = None) -> ThinkingBudget | None:
        """The budget of a thought before a verdict of `num_scores`; None: before a free text."""
        config, budget = self._config, self._config.make_thinking_budget(thinks=self.grm.thinks)
        if budget is None:
            return None
        if num_scores is None:
            return replace(budget, answer_start="")
        if not config.format.structured:
            return budget
        return replace(budget, pattern=answer_pattern(self._form, self._scale, num_scores))

    async def _answer(self, request: GrmRequest, attempt: int) -> Completion | Failed:
        request_id = f"{request.name}.{attempt}{self._mark}"
        context = RequestContext(
            request_id=request_id,
            group_id=request.group_id,
            role=self.grm.name,
            priority=request.priority,
            is_retry=attempt > 0,
        )
        params = SamplingParams(
            max_new_tokens=request.max_new_tokens,
            temperature=self._config.temperature,
            seed=derive_seed(self._seed, first_name(request_id)),
            pattern=request.pattern,
            thinking=request.thinking,
        )
        try:
            async with self._places.enter(request.priority), self.grm.time_limit(self._config.limits.timeout_s):
                completion = await self.grm.ask(request.prompt, params, context)
        except TimeoutError:
            return make_failure("timeout", f"no answer within {self._config.limits.timeout_s:g} s", attempt + 1)
        except EngineRefused as error:
            return make_failure("refused", str(error), attempt + 1)
        except EngineDied as error:
            return make_failure("died", str(error), attempt + 1)
        if completion.finish_reason == "abort":
            return make_failure("died", "the request was aborted", attempt + 1)
        return completion

    def _read(self, question: GrmQuestion, completion: Completion, attempts: int) -> Judgement | FailedJudgement:
        scores = parse_scores(completion, self._parser, question.num_scores, self._scale)
        if isinstance(scores, str):
            detail = f"it ends with {completion.text[-80:]!r}"
            return make_failed_judgement(scores, attempts, detail, question.prompt, completion)
        return Judgement(
            group_id=question.group_id,
            siblings=question.siblings,
            scores=tuple(float(score) for score in scores),
            prompt_ids=question.prompt.token_ids,
            completion=completion,
            grm=self.grm.name,
            version=completion.oldest_version,
        )


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
