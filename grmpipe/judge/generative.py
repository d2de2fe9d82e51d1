"""Asks a GRM about a rollout: k judgements at once, their failures by cause, their vote. Never invents a score."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from grmpipe.judge.grm import Grm, GrmPrompt
from grmpipe.judge.parse import PARSERS, scores_of
from grmpipe.judge.pattern import PATTERNS
from grmpipe.judge.prompt import JudgePrompt
from grmpipe.judge.scale import Scale
from grmpipe.judge.settings import JudgeConfig
from grmpipe.judge.verdict import voted
from grmpipe.judge.vote import VOTES
from grmpipe.types import Cause, Failed, FailedJudgement, Judgement, JudgeReport, Prompt, Rollout
from models.engines.in_flight import Gate
from models.seeds import derive_seed
from models.types import Completion, EngineDied, EngineRefused, RequestContext, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the GRM is asked, k times, about one rollout."""

    rollout: Rollout
    prompt: GrmPrompt
    priority: int


class GenerativeJudge:
    """A pointwise judge: each rollout by itself. The lowest priority number goes first, here and in the engine.

    seed: makes every judgement repeatable by its request_id.
    """

    def __init__(self, grm: Grm, config: JudgeConfig, seed: int) -> None:
        self._grm = grm
        self._config = config
        self._seed = seed
        self._scale = Scale(low=config.score_min, high=config.score_max)
        self._prompt = JudgePrompt.load(config.template, self._scale)
        self._parser = PARSERS[config.parser]
        self._pattern = PATTERNS[config.parser](self._scale) if config.structured else None
        self._vote = VOTES[config.vote]
        self._places = Gate(config.width)

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        """The vote over the judgements that parsed; with none, Failed by the last cause."""
        try:
            text = self._prompt.render(prompt, rollout.text)
        except ValueError as error:
            return unasked("refused", str(error))
        asked_for = self._grm.prompt(text)
        window, needed_tokens = self._grm.context_tokens, asked_for.num_tokens + self._config.max_new_tokens
        if window and needed_tokens > window:
            return unasked("too_long", f"{needed_tokens} tokens; the window of {self._grm.name} has {window}")
        question = Question(rollout=rollout, prompt=asked_for, priority=priority)
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._ask(question, index)) for index in range(self._config.num_judgements)]
        return self._report(rollout, [result for task in asked for result in task.result()])

    async def _ask(self, question: Question, index: int) -> list[Judgement | Failed]:
        """One judgement, asked again while what comes back is no use. A dead engine is the router's to retry."""
        results: list[Judgement | Failed] = []
        for attempt in range(1 + self._config.reasks):
            results.append(await self._attempt(question, index, attempt))
            if not isinstance(results[-1], FailedJudgement):
                break
        return results

    async def _attempt(self, question: Question, index: int, attempt: int) -> Judgement | Failed:
        group_id, sibling = question.rollout.group_id, question.rollout.sibling
        context = RequestContext(
            request_id=f"{group_id}/{sibling}/j{index}.{attempt}",
            group_id=group_id,
            role="grm",
            priority=question.priority,
        )
        params = SamplingParams(
            max_new_tokens=self._config.max_new_tokens,
            temperature=self._config.temperature,
            seed=derive_seed(self._seed, context.request_id),
            pattern=self._pattern,
        )
        try:
            async with self._places.enter(question.priority), self._grm.time_limit(self._config.timeout_s):
                completion = await self._grm.ask(question.prompt, params, context)
        except TimeoutError:
            return failed("timeout", attempt, f"no answer within {self._config.timeout_s:g} s")
        except EngineRefused as error:
            return failed("refused", attempt, str(error))
        except EngineDied as error:
            return failed("died", attempt, str(error))
        return self._read(question, completion, attempt)

    def _read(self, question: Question, completion: Completion, attempt: int) -> Judgement | Failed:
        if completion.finish_reason == "abort":
            return failed("died", attempt, "the request was aborted")
        scores = scores_of(completion, self._parser, 1, self._scale)
        if isinstance(scores, str):
            return FailedJudgement(
                stage="judge",
                cause=scores,
                attempts=attempt + 1,
                detail=f"it ends with {completion.text[-80:]!r}",
                prompt_ids=question.prompt.token_ids,
                completion=completion,
            )
        return Judgement(
            group_id=question.rollout.group_id,
            siblings=(question.rollout.sibling,),
            scores=tuple(float(score) for score in scores),
            prompt_ids=question.prompt.token_ids,
            completion=completion,
            grm=self._grm.name,
            version=completion.oldest_version,
        )

    def _report(self, rollout: Rollout, results: Sequence[Judgement | Failed]) -> JudgeReport:
        judgements = tuple(result for result in results if isinstance(result, Judgement))
        failures = tuple(result for result in results if isinstance(result, Failed))
        if not judgements:
            last = failures[-1]
            verdict = Failed(stage="judge", cause=last.cause, attempts=len(failures), detail=last.detail)
            return JudgeReport(verdict=verdict, failures=failures)
        scores = [judgement.scores[0] for judgement in judgements]
        return JudgeReport(
            verdict=voted("generative", rollout, scores, self._vote, self._scale),
            judgements=judgements,
            failures=failures,
        )


def failed(cause: Cause, attempt: int, detail: str) -> Failed:
    return Failed(stage="judge", cause=cause, attempts=attempt + 1, detail=detail)


def unasked(cause: Cause, detail: str) -> JudgeReport:
    """Nothing was sent: 0 attempts."""
    failure = Failed(stage="judge", cause=cause, attempts=0, detail=detail)
    return JudgeReport(verdict=failure, failures=(failure,))
