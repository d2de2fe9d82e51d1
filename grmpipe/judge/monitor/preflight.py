"""The preflight judgement: whether the real GRM writes anything that its parser reads, tried before the first step."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from grmpipe.config.io.key_errors import under_key
from grmpipe.config.judge import JudgeConfig
from grmpipe.judge.pointwise_adapter import judge_together
from grmpipe.types import Failed, FailedJudgement, Judge, JudgeReport, Prompt

NUM_PROMPTS = 4  # with k judgements and a retry each: few enough to be quick, enough to exclude bad luck
NUM_SIBLINGS = 2  # the fewest that can be compared


async def preflight_judgements(
    judge: Judge, members: Mapping[str, Judge], configs: Mapping[str, JudgeConfig], prompts: Sequence[Prompt]
) -> str | None:
    """Why one of the generative judges can't work, in words that begin with its own key. None if all work.

    members: each of several judges; empty for a single one, which is `judge`. Each is tried on its own, because a
    cascade or a gate may ask it late. configs: of the generative judges, by name.
    """
    for name, config in configs.items():
        if problem := await preflight_judgement(members.get(name, judge), config, prompts):
            return under_key(f"{config.key}.", problem)
    return None


async def preflight_judgement(judge: Judge, config: JudgeConfig, prompts: Sequence[Prompt]) -> str | None:
    """Why judging can't work, in words that begin with the key. None if it works, or if that can't be seen.

    A judge that gives no answer shows nothing about its parser: the run's failure gate handles that. The judged texts
    are the prompts' references, or a plain admission of not knowing if there is none.
    """
    groups = await asyncio.gather(*(try_prompt(judge, prompt) for prompt in prompts[:NUM_PROMPTS]))
    reports = [report for group in groups for report in group]
    failures = [failure for report in reports for failure in report.failures]
    useless = [failure for failure in failures if isinstance(failure, FailedJudgement)]
    if not useless or len(useless) < len(failures) or any(report.judgements for report in reports):
        return None
    return explain_failures(config, useless)


async def try_prompt(judge: Judge, prompt: Prompt) -> tuple[JudgeReport, ...]:
    texts = [prompt.reference or "I don't know."] * NUM_SIBLINGS
    return await judge_together(judge, prompt, f"dry-{prompt.prompt_id}", texts)


def explain_failures(config: JudgeConfig, failures: Sequence[Failed]) -> str:
    cause, count = Counter(failure.cause for failure in failures).most_common(1)[0]
    last = [failure for failure in failures if failure.cause == cause][-1]
    if cause == "truncated":
        return (
            f"max_new_tokens: {count} of {len(failures)} preflight judgements were truncated at "
            f"{config.max_new_tokens} "
            "tokens, and none ended; type a larger judge.max_new_tokens, or a template for shorter judgements"
        )
    return (
        f"parser: {config.parser} could read none of {len(failures)} preflight judgements with template "
        f"{config.template}; "
        f"{last.detail}; type a judge.template (and its judge.parser) that this GRM can follow, or "
        "judge.format.structured=true if its engine has a grammar"
    )
