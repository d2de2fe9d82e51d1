"""The preflight judgement: whether the real judge answers, and its parser reads that, tried before the first step."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from grmpipe.config.io.key_errors import under_key
from grmpipe.config.judge import JudgeConfig
from grmpipe.judge.pointwise_adapter import judge_together
from grmpipe.types import Failed, FailedJudgement, Judge, JudgeReport, Prompt, Verdict

NUM_PROMPTS = 4  # with k judgements and a retry each: few enough to be quick, enough to exclude bad luck
NUM_SIBLINGS = 2  # the fewest that can be compared


async def preflight_judgements(
    judge: Judge, members: Mapping[str, Judge], configs: Mapping[str, JudgeConfig], prompts: Sequence[Prompt]
) -> str | None:
    """Why one of the judges can't work, in words that begin with its own key. None if all work.

    members: the judges by name; empty for a single one, which is `judge`. Each is tried on its own, because a cascade
    or a gate may ask it late. configs: those of the judges to try, by name.
    """
    for name, config in configs.items():
        if problem := await preflight_judgement(members.get(name, judge), config, prompts):
            return under_key(f"{config.key}.", problem)
    return None


async def preflight_judgement(judge: Judge, config: JudgeConfig, prompts: Sequence[Prompt]) -> str | None:
    """Why judging can't work, in words that begin with the key: all judgements failed for one cause. None if one
    worked, or if several causes leave open what is wrong: the run's failure gate handles that.

    Raises ValueError if no answer came at all, which may be no fault of the configuration. The judged texts are the
    prompts' references, or a plain admission of not knowing if there is none.
    """
    groups = await asyncio.gather(*(try_prompt(judge, prompt) for prompt in prompts[:NUM_PROMPTS]))
    reports = [report for group in groups for report in group]
    failures = [failure for report in reports for failure in report.failures]
    causes = Counter(failure.cause for failure in failures)
    if not failures or any(report.judgements or isinstance(report.verdict, Verdict) for report in reports):
        return None
    if all(isinstance(failure, FailedJudgement) for failure in failures):
        return explain_useless(config, failures)
    if len(causes) > 1 or "too_long" in causes:  # other prompts may be shorter
        return None
    return explain_unanswered(config, failures)


async def try_prompt(judge: Judge, prompt: Prompt) -> tuple[JudgeReport, ...]:
    texts = [prompt.reference or "I don't know."] * NUM_SIBLINGS
    return await judge_together(judge, prompt, f"dry-{prompt.prompt_id}", texts)


def explain_useless(config: JudgeConfig, failures: Sequence[Failed]) -> str:
    cause, count = Counter(failure.cause for failure in failures).most_common(1)[0]
    last = [failure for failure in failures if failure.cause == cause][-1]
    if cause == "truncated":
        return (
            f"max_new_tokens: {count} of {len(failures)} preflight judgements were truncated at "
            f"{config.max_new_tokens} "
            "tokens, and none ended; type a larger judge.max_new_tokens, a template for shorter judgements, or "
            "judge.format.ask_verdict=true"
        )
    reads = f"pattern: {config.pattern!r}" if config.pattern else f"parser: {config.parser}"
    return (
        f"{reads} could read none of {len(failures)} preflight judgements with template {config.template}; "
        f"{last.detail}; type a judge.template (and its judge.parser) that this GRM can follow, "
        "judge.format.ask_verdict=true, or judge.format.structured=true if its engine has a grammar"
    )


def explain_unanswered(config: JudgeConfig, failures: Sequence[Failed]) -> str:
    """Why no judgement was generated. Raises ValueError if nothing answered."""
    cause, found = failures[-1].cause, f"all {len(failures)} preflight judgements failed"
    if cause == "died":
        raise ValueError(f"{config.key}: {found}, and nothing was judged; the last one: {failures[-1].detail}")
    if cause == "timeout":
        return (
            f"limits.timeout_s: {found}: {failures[-1].detail}; type a longer judge.limits.timeout_s, or find out why "
            f"{config.model} is slow"
        )
    return (
        f"model: {found} as {cause}; the last one: {failures[-1].detail}; type judge.model=<another model>, or change "
        f"what {config.model} is asked"
    )
