"""Asks a GRM: single answers, re-asks, failures by cause. Knows no protocol and no vote; never invents a score."""

from __future__ import annotations

from dataclasses import dataclass

from grmpipe.config.judge import JudgeConfig
from grmpipe.judge.grm import Grm, GrmPrompt
from grmpipe.judge.parse import PARSERS, scores_of
from grmpipe.judge.pattern import PATTERNS
from grmpipe.types import Cause, Failed, FailedJudgement, Judgement
from models.engines.request_gates import PrioritySemaphore
from models.seeds import derive_seed
from models.types import Completion, EngineDied, EngineRefused, RequestContext, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GrmQuestion:
    """What the GRM is asked by one judgement. Its request ids are `<name>/j<index>.<attempt>`.

    siblings:   in the order shown.
    num_scores: that it must give: one a sibling, or several of one sibling.
    """

    group_id: str
    name: str
    siblings: tuple[int, ...]
    num_scores: int
    prompt: GrmPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GrmRequest:
    """One call. A repeated id repeats its draw."""

    request_id: str
    group_id: str
    priority: int
    prompt: GrmPrompt
    max_new_tokens: int
    pattern: str | None


class GrmClient:
    """At most `judge.max_concurrency` answers at once; the lowest priority number goes first, here and in the engine.

    seed: makes every answer repeatable by its request_id.
    """

    def __init__(self, grm: Grm, config: JudgeConfig, seed: int) -> None:
        self.grm = grm
        self._config = config
        self._seed = seed
        self._scale = config.scale
        self._parser = PARSERS[config.parser]
        self._places = PrioritySemaphore(config.max_concurrency)

    def room_for(self, new_tokens: int) -> int | None:
        """Tokens that a prompt may have; None where the window isn't known."""
        return self.grm.context_tokens - new_tokens if self.grm.context_tokens else None

    async def judgement(self, question: GrmQuestion, index: int, priority: int) -> list[Judgement | Failed]:
        """One judgement, asked again while what comes back is no use. A dead engine is the router's to retry."""
        pattern = PATTERNS[self._config.parser](self._scale, question.num_scores) if self._config.structured else None
        results: list[Judgement | Failed] = []
        for attempt in range(1 + self._config.max_retries):
            request = GrmRequest(
                request_id=f"{question.name}/j{index}.{attempt}",
                group_id=question.group_id,
                priority=priority,
                prompt=question.prompt,
                max_new_tokens=self._config.max_new_tokens,
                pattern=pattern,
            )
            answer = await self._answer(request, attempt)
            results.append(answer if isinstance(answer, Failed) else self._read(question, answer, attempt))
            if not isinstance(results[-1], FailedJudgement):
                break
        return results

    async def text(self, request_id: str, group_id: str, prompt: GrmPrompt, priority: int) -> Completion | Failed:
        """Free text that isn't cut: the principles of a group. Asked again like a judgement."""
        result: Completion | Failed
        for attempt in range(1 + self._config.max_retries):
            request = GrmRequest(
                request_id=f"{request_id}.{attempt}",
                group_id=group_id,
                priority=priority,
                prompt=prompt,
                max_new_tokens=self._config.principles_max_new_tokens,
                pattern=None,
            )
            answer = await self._answer(request, attempt)
            if isinstance(answer, Failed) or (answer.finish_reason != "length" and answer.text.strip()):
                return answer
            cause: Cause = "truncated" if answer.finish_reason == "length" else "unparseable"
            result = failed_judgement(cause, attempt, "the principles are truncated or empty", prompt, answer)
        return result

    async def _answer(self, request: GrmRequest, attempt: int) -> Completion | Failed:
        context = RequestContext(
            request_id=request.request_id, group_id=request.group_id, role="grm", priority=request.priority
        )
        params = SamplingParams(
            max_new_tokens=request.max_new_tokens,
            temperature=self._config.temperature,
            seed=derive_seed(self._seed, request.request_id),
            pattern=request.pattern,
        )
        try:
            async with self._places.enter(request.priority), self.grm.time_limit(self._config.timeout_s):
                completion = await self.grm.ask(request.prompt, params, context)
        except TimeoutError:
            return failed("timeout", attempt, f"no answer within {self._config.timeout_s:g} s")
        except EngineRefused as error:
            return failed("refused", attempt, str(error))
        except EngineDied as error:
            return failed("died", attempt, str(error))
        if completion.finish_reason == "abort":
            return failed("died", attempt, "the request was aborted")
        return completion

    def _read(self, question: GrmQuestion, completion: Completion, attempt: int) -> Judgement | Failed:
        scores = scores_of(completion, self._parser, question.num_scores, self._scale)
        if isinstance(scores, str):
            detail = f"it ends with {completion.text[-80:]!r}"
            return failed_judgement(scores, attempt, detail, question.prompt, completion)
        return Judgement(
            group_id=question.group_id,
            siblings=question.siblings,
            scores=tuple(float(score) for score in scores),
            prompt_ids=question.prompt.token_ids,
            completion=completion,
            grm=self.grm.name,
            version=completion.oldest_version,
        )


def failed(cause: Cause, attempt: int, detail: str) -> Failed:
    return Failed(stage="judge", cause=cause, attempts=attempt + 1, detail=detail)


def failed_judgement(
    cause: Cause, attempt: int, detail: str, prompt: GrmPrompt, completion: Completion
) -> FailedJudgement:
    return FailedJudgement(
        stage="judge",
        cause=cause,
        attempts=attempt + 1,
        detail=detail,
        prompt_ids=prompt.token_ids,
        completion=completion,
    )
