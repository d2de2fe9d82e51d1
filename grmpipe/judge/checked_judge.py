"""The door of judges and judge sessions of the user's own: what they raise has an owner, what they return is checked
and made plain.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ParamSpec, get_args

from grmpipe.config.keys.user_code import (
    UserCodeError,
    call_guarded,
    describe_code,
    format_value,
    note_owner,
    to_number,
    to_scalar,
)
from grmpipe.judge.pointwise_adapter import RolloutJudge
from grmpipe.judge.verdict import make_failure, report_failures
from grmpipe.types import (
    DataCause,
    EnvCause,
    Failed,
    InfraCause,
    JudgeReport,
    JudgeSession,
    JudgeTask,
    Prompt,
    RewardSpan,
    Rollout,
    TurnwiseJudgeSession,
    Verdict,
)

log = logging.getLogger(__name__)

P = ParamSpec("P")
CAUSES = frozenset(cause for causes in (InfraCause, DataCause, EnvCause) for cause in get_args(causes))
A_REPORT = (
    "JudgeReport(verdict=voted('mine', rollout, [7], mean, Scale(low=1, high=10))) for the score 7 of 1 to 10 "
    "(JudgeReport is in grmpipe.types, voted and mean in grmpipe.judge.votes, Scale in grmpipe.config.judge)"
)


class CheckedRolloutJudge:
    """A judge of single rollouts. One that raises has failed on that rollout, with the cause `broken`. Raises
    ValueError for what is no report: every other report would be none either.

    key: where the configuration names its class.
    """

    def __init__(self, judge: RolloutJudge, key: str) -> None:
        self._judge = judge
        self._owner = f"{key}: {describe_code(judge.judge)}"
        self._has_broken = False

    async def judge(self, prompt: Prompt, rollout: Rollout, priority: int = 0) -> JudgeReport:
        try:
            with call_guarded(self._owner):
                report = await self._judge.judge(prompt, rollout, priority)
        except UserCodeError as error:
            # The first one is for the console, the others are for run.log.
            level = logging.INFO if self._has_broken else logging.WARNING
            log.log(level, "no verdict: %s", error, exc_info=error.__cause__ if self._has_broken else None)
            self._has_broken = True
            return report_failures(make_failure("broken", f"prompt {prompt.prompt_id}: {error}"))
        return check_report(report, self._owner, rollout)


class CheckedJudge:
    """A judge of groups: `open` of the user's object, or his class of a session. What it raises stays what it is, with
    a note of where it was raised: nobody knows which siblings it fails.

    owner: what `opens` calls. key: where the configuration names it.
    """

    def __init__(self, opens: Callable[[Prompt, str, int], JudgeSession], owner: object, key: str) -> None:
        self._opens = opens
        self._owner = f"{key}: {describe_code(owner)}"
        self._key = key

    def open(self, prompt: Prompt, group_id: str, size: int) -> JudgeSession:
        with note_owner(self._owner):
            session = self._opens(prompt, group_id, size)
        if not isinstance(session, JudgeSession):
            raise ValueError(
                f"{self._owner} returned {format_value(session)}; return a JudgeSession, with the methods begin, "
                f"add and "
                "judge (grmpipe/types.py)"
            )
        return CheckedSession(session, self._key)


class CheckedSession:
    """A session of the user's. Raises ValueError for what is no report."""

    def __init__(self, session: JudgeSession, key: str) -> None:
        self._session = session
        self._key = key
        self._rollouts: dict[int, Rollout] = {}

    def begin(self) -> Sequence[JudgeTask]:
        return self._tasks(self._session.begin)

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        self._rollouts[rollout.sibling] = rollout
        return self._tasks(self._session.add, rollout)

    def add_turn(self, so_far: Rollout) -> Sequence[JudgeTask]:
        """The tasks of a session that judges turns while the rollout goes on; none of any other."""
        session = self._session
        return self._tasks(session.add_turn, so_far) if isinstance(session, TurnwiseJudgeSession) else ()

    async def judge(self, judge_task: JudgeTask, priority: int = 0) -> Mapping[int, JudgeReport]:
        owner = f"{self._key}: {describe_code(self._session.judge)}"
        with note_owner(owner):
            reports = await self._session.judge(judge_task, priority)
        if not isinstance(reports, Mapping) or not reports.keys() <= self._rollouts.keys():
            raise ValueError(
                f"{owner} returned {format_value(reports)}; return a JudgeReport by the number of each sibling "
                f"that is judged "
                "now, as {rollout.sibling: report}, or {} for none"
            )
        return {sibling: check_report(one, owner, self._rollouts[sibling]) for sibling, one in reports.items()}

    def _tasks(self, ask: Callable[P, Sequence[JudgeTask]], *args: P.args, **kwargs: P.kwargs) -> Sequence[JudgeTask]:
        owner = f"{self._key}: {describe_code(ask)}"
        with note_owner(owner):
            found = ask(*args, **kwargs)
        tasks = tuple(found) if isinstance(found, Iterable) else (found,)
        if not all(isinstance(one, JudgeTask) for one in tasks):
            raise ValueError(f"{owner} returned {format_value(found)}; return a tuple of JudgeTask, or () for none")
        return tasks


def check_report(report: object, owner: str, rollout: Rollout) -> JudgeReport:
    """The report on a rollout in plain numbers. Raises ValueError."""
    if not isinstance(report, JudgeReport):
        raise ValueError(f"{owner} returned {format_value(report)}; return a JudgeReport, such as {A_REPORT}")
    return replace(report, verdict=check_verdict(report.verdict, owner, rollout))


def check_verdict(verdict: object, owner: str, rollout: Rollout) -> Verdict | Failed:
    if isinstance(verdict, Failed):
        if verdict.cause not in CAUSES:
            causes = ", ".join(sorted(CAUSES))
            raise ValueError(f"{owner} returned a Failed with the cause {format_value(verdict.cause)}; known: {causes}")
        return verdict
    if not isinstance(verdict, Verdict):
        wrong = f"{owner} returned a JudgeReport with the verdict {format_value(verdict)}"
        raise ValueError(f"{wrong}; return a Verdict or a Failed in it, such as {A_REPORT}")
    if not verdict.rewards:
        raise ValueError(f"{owner} returned a Verdict without rewards; return for example {A_REPORT}")
    return replace(
        verdict,
        rewards=tuple(check_span(span, owner, rollout) for span in verdict.rewards),
        normalised=tuple(check_span(span, owner, rollout) for span in verdict.normalised),
        score=plain_number(verdict.score, "score", owner),
        score_std=plain_number(verdict.score_std, "score_std", owner),
        num_judgements=int(plain_number(verdict.num_judgements, "num_judgements", owner)),
        breakdown={
            str(name): plain_number(value, f"breakdown[{name!r}]", owner) for name, value in verdict.breakdown.items()
        },
    )


def check_span(span: RewardSpan, owner: str, rollout: Rollout) -> RewardSpan:
    turns = rollout.turns
    if not (0 <= span.turn < len(turns) and 0 <= span.start <= span.end <= len(turns[span.turn].completion.token_ids)):
        raise ValueError(
            f"{owner} returned a reward for the tokens {span.start} to {span.end} of turn {span.turn}, which the "
            "rollout doesn't have; outcome(rollout, reward) of grmpipe.judge.verdict is a reward for all of it"
        )
    return replace(span, value=plain_number(span.value, "reward", owner))


def plain_number(value: object, what: str, owner: str) -> float:
    """A number as a plain float: one that isn't finite fails its verdict later. Raises ValueError."""
    plain = to_scalar(value)
    if isinstance(plain, float):
        return float(plain)
    if (number := to_number(plain)) is None:
        raise ValueError(f"{owner} returned the {what} {format_value(value)}, and it must be a number")
    return number
