"""A judge that the user wrote: a class by its dotted path, made with `judge.custom.options`."""

import inspect

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.keys.dotted_path import find_at
from grmpipe.judge.checked_judge import CheckedJudge, CheckedRolloutJudge
from grmpipe.judge.pointwise_adapter import PointwiseAdapter, RolloutJudge
from grmpipe.types import Judge


def load_custom_judge(config: JudgeConfig) -> Judge:
    """An instance of `judge.custom.target` behind its door: a Judge, which has `open`, or a RolloutJudge, which has
    `judge`.

    Raises ValueError if the class can't be imported, can't be constructed, or is neither.
    """
    made = find_at(config.custom.target, "custom.target")
    if not inspect.isclass(made):
        raise ValueError(f"custom.target: {config.custom.target} is not a class")
    try:
        judge = made(**config.custom.options)
    except (Exception, SystemExit) as error:  # importing or constructing the user's class may raise anything
        raise ValueError(
            f"custom.options: {config.custom.target} can't be constructed with {config.custom.options}: "
            f"{type(error).__name__}: {error}"
        ) from error
    key = f"{config.key}.custom.target"
    if isinstance(judge, PointwiseAdapter):
        return PointwiseAdapter(CheckedRolloutJudge(judge.judge, key))
    if isinstance(judge, Judge):
        return CheckedJudge(judge.open, judge.open, key)
    if isinstance(judge, RolloutJudge):
        return PointwiseAdapter(CheckedRolloutJudge(judge, key))
    raise ValueError(
        f"custom.target: {config.custom.target} is not a judge: it needs `async def judge(self, prompt, "
        f"rollout, priority=0)` that "
        "returns a JudgeReport, or `open(self, prompt, group_id, size)` that returns a JudgeSession"
    )
