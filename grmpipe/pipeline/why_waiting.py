"""How far the open batch is, and why a group does not train, in words for a log. Reads the buffer, changes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from grmpipe.pipeline.group import Group, GroupState
from grmpipe.pipeline.group_buffer import UNTAKEN, GroupBuffer

NUM_SHOWN = 8  # groups named in a line of the log


def why_waiting(buffer: GroupBuffer, group_id: str, now_s: float) -> str:
    """Why a group does not train: its state and what it waits for. now_s: on the clock of group deadlines."""
    if (group := buffer.groups.get(group_id)) is None:
        return _why_gone(buffer, group_id)
    if group.is_open:
        why = _why_open(group, max(0.0, group.deadline_s - now_s))
    else:
        why = _why_ready(buffer, group) if group.state is GroupState.READY else _why_taken(buffer)
    return f"{group.state.value}: {why}"


def describe_pending(buffer: GroupBuffer, now_s: float) -> str:
    """The groups that are not in the open batch, those due first before the others, each with its reason."""
    waiting = [group for group in buffer.groups.values() if group.state is not GroupState.TAKEN]
    waiting.sort(key=lambda group: group.opened_at)
    shown = [f"{group.group_id} ({why_waiting(buffer, group.group_id, now_s)})" for group in waiting[:NUM_SHOWN]]
    more = [f"{len(waiting) - NUM_SHOWN} more"] if len(waiting) > NUM_SHOWN else []
    return "; ".join(shown + more) or "none"


def _why_gone(buffer: GroupBuffer, group_id: str) -> str:
    if any(kept.group_id == group_id for kept in buffer.ledger.recovered.values()):
        return "not opened again since the resume"
    for end in reversed(buffer.ledger.ends):
        if end.group_id == group_id:
            return f"dropped: {end.cause}" if end.outcome == "dropped" else f"trained: in step {end.step}"
    return "not in flight: not opened, or ended long ago (groups.jsonl has all ends)"


def _why_open(group: Group, left_s: float) -> str:
    """The reason for a group that lacks rollouts or verdicts, `left_s` seconds before its deadline."""
    if group.state is GroupState.ROLLING_OUT:
        doing = "the policy has begun" if group.started else "no token yet"
    else:
        doing = "the judge has begun" if group.judging_begun else "the judge has not begun"
    rollouts, verdicts = _listed(group.list_missing_rollouts()), _listed(group.list_missing_verdicts())
    return f"rollouts missing: {rollouts}; verdicts missing: {verdicts}; {doing}; {left_s:.0f} s to its deadline"


def _why_ready(buffer: GroupBuffer, group: Group) -> str:
    if buffer.is_stale(group):
        return f"too old for the open batch: version {group.version} of {buffer.version}; it will be dropped"
    if not buffer.places_left:
        return "the open batch is full"
    if buffer.may_take(group):
        return "it may be taken: the learner is busy"
    older = (other for other in buffer.groups.values() if other.opened_at < group.opened_at)
    due_before = [other.group_id for other in older if other.state in UNTAKEN]
    return f"the open batch's places are for groups that are due before it: {_listed(due_before)}"


def _why_taken(buffer: GroupBuffer) -> str:
    if not buffer.places_left:
        return "the open batch is full: its step ends it"
    return f"the open batch has {len(buffer.taken)} of {len(buffer.taken) + buffer.places_left} groups"


def _listed(names: Sequence[int | str]) -> str:
    """The first NUM_SHOWN names, and how many more there are."""
    shown = [str(name) for name in names[:NUM_SHOWN]]
    more = [f"{len(names) - NUM_SHOWN} more"] if len(names) > NUM_SHOWN else []
    return ", ".join(shown + more) or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgress:
    """The rollouts and verdicts that the open batch has, with those of the groups that are nearest to fill it.

    siblings: rollouts of the whole batch. learner: as `StallTracker.learner_state`.
    """

    rollouts: int
    verdicts: int
    siblings: int
    learner: str | None


def measure_batch(buffer: GroupBuffer, learner: str | None) -> BatchProgress:
    others = sorted((group.num_done for group in buffer.groups.values() if group.state in UNTAKEN), reverse=True)
    done = [*(group.num_done for group in buffer.taken), *others[: buffer.places_left]]
    return BatchProgress(
        rollouts=sum(rollouts for _, rollouts in done),
        verdicts=sum(verdicts for verdicts, _ in done),
        siblings=buffer.batch_siblings,
        learner=learner,
    )
