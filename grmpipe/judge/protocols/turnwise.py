"""The judge session of rollouts turn by turn: a turn is judged as soon as it has ended, while its rollout goes on."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from grmpipe.judge.protocols.group_session import JudgeContext
from grmpipe.judge.protocols.pointwise import PointwiseSession, ScoredParts
from grmpipe.judge.trajectory import Passage, Trajectory, show_opening, show_turn
from grmpipe.judge.verdict import COMPONENT, make_failure, mix_verdicts
from grmpipe.types import Failed, JudgeReport, JudgeTask, Prompt, RewardSpan, Rollout, Verdict

JudgedTurn = tuple[int, int, int]  # sibling, attempt, turn
FIRST = Passage(voice="note", text="[... nothing: this is the first turn ...]")


class TurnwiseSession(PointwiseSession):
    """A score per turn, rewarded on the turn's tokens. A judgement shows the turn, and all that came before it.

    The verdict is the mean of the turns; if a turn has no score, there is none. Judgements of an episode that failed
    and is played again don't count.
    """

    def __init__(self, context: JudgeContext, prompt: Prompt, group_id: str, size: int) -> None:
        super().__init__(context, prompt, group_id, size)
        self._so_far: dict[int, Rollout] = {}  # sibling -> what is known of its rollout
        self._queued: set[JudgedTurn] = set()
        self._begun: set[JudgedTurn] = set()
        self._by_turn: dict[JudgedTurn, JudgeReport] = {}
        self._reported: set[int] = set()

    def add_turn(self, so_far: Rollout) -> Sequence[JudgeTask]:
        """Add what is known of a rollout that goes on. Returns a task for each turn that has none."""
        self._so_far[so_far.sibling] = so_far
        lacking = [turn for turn in list_turns(so_far) if turn not in self._queued]
        self._queued |= set(lacking)
        return [JudgeTask(members=(so_far.sibling,), turn=turn) for _, _, turn in lacking]

    def add(self, rollout: Rollout) -> Sequence[JudgeTask]:
        """Add an ended rollout. Turns that still wait to be judged get another task, which may be served earlier: the
        first one does the work.
        """
        self._rollouts[rollout.sibling] = self._so_far[rollout.sibling] = rollout
        turns = list_turns(rollout)
        self._queued |= set(turns)
        if all(turn in self._by_turn for turn in turns):
            return (JudgeTask(members=(rollout.sibling,)),)
        return [JudgeTask(members=(rollout.sibling,), turn=turn[2]) for turn in turns if turn not in self._begun]

    async def _judge(
        self, judge_task: JudgeTask, principles: str | Failed | None, priority: int
    ) -> Mapping[int, JudgeReport]:
        (sibling,) = judge_task.members
        if judge_task.turn is not None:
            await self._judge_turn(self._so_far[sibling], judge_task.turn, principles, priority)
        return self._final(sibling)

    async def _judge_turn(self, rollout: Rollout, turn: int, principles: str | Failed | None, priority: int) -> None:
        key = (rollout.sibling, rollout.attempt, turn)
        if turn >= len(rollout.turns) or key in self._begun:  # the episode has started again
            return
        self._begun.add(key)
        mark = f"{f'/a{rollout.attempt}' if rollout.attempt else ''}/t{turn}"
        parts = self._parts_of(rollout, turn)
        self._by_turn[key] = await self._judged(rollout, parts, principles, priority, mark)

    def _parts_of(self, rollout: Rollout, turn: int) -> ScoredParts:
        """The turn, after what came before it."""
        thoughts = self._context.config.format.show_thoughts
        earlier = [one for before in range(turn) for one in show_turn(rollout, before, thoughts=thoughts)]
        history = (*show_opening(self._prompt, rollout), *earlier) or (FIRST,)
        num_tokens = len(rollout.turns[turn].completion.token_ids)
        return ScoredParts(
            shown=(
                Trajectory(passages=history),
                Trajectory(passages=tuple(show_turn(rollout, turn, thoughts=thoughts))),
            ),
            places=(RewardSpan(turn=turn, start=0, end=num_tokens, value=0.0, share=1.0),),
        )

    def _final(self, sibling: int) -> dict[int, JudgeReport]:
        """The report of a sibling once it has ended and all its turns are judged; given once."""
        rollout = self._rollouts.get(sibling)
        if rollout is None or sibling in self._reported:
            return {}
        turns = list_turns(rollout)
        if not all(turn in self._by_turn for turn in turns):
            return {}
        self._reported.add(sibling)
        return {sibling: self._principles.add_to(join_reports([self._by_turn[turn] for turn in turns]))}


def list_turns(rollout: Rollout) -> list[JudgedTurn]:
    return [(rollout.sibling, rollout.attempt, turn) for turn in range(len(rollout.turns))]


def join_reports(reports: Sequence[JudgeReport]) -> JudgeReport:
    """The report on a rollout, from those on its turns."""
    by_turn = list(enumerate(reports))
    return JudgeReport(
        verdict=average_turns(reports),
        judgements=tuple(replace(one, turn=turn) for turn, report in by_turn for one in report.judgements),
        failures=tuple(replace(one, turn=turn) for turn, report in by_turn for one in report.failures),
    )


def average_turns(reports: Sequence[JudgeReport]) -> Verdict | Failed:
    """The mean over the turns, or the failure of the first turn that has no score."""
    verdicts: dict[str, Verdict] = {}
    for turn, report in enumerate(reports):
        if isinstance(report.verdict, Failed):
            failure = report.verdict
            return make_failure(failure.cause, f"turn {turn}: {failure.detail}", failure.attempts)
        verdicts[str(turn)] = report.verdict
    mean = mix_verdicts(verdicts, dict.fromkeys(verdicts, 1.0))
    return replace(mean, breakdown={COMPONENT: mean.outcome})
