"""Why a group does not train, in words for a log. Pure: it reads the group and the open batch and changes neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grmpipe.pipeline.group import Group, GroupState
from grmpipe.types import GroupEnd

NUM_SHOWN = 8  # groups named in a line of the log


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBatch:
    """The open batch, with respect to one group.

    version:    version of the policy.
    is_stale:   whether the group is too old for the batch.
    may_take:   whether the batch may take the group.
    due_before: ids of groups that are due before this one and that no batch has taken.
    """

    version: int
    num_taken: int
    groups_per_batch: int
    is_stale: bool
    may_take: bool
    due_before: Sequence[str]

    @property
    def is_full(self) -> bool:
        return self.num_taken == self.groups_per_batch


def why_open(group: Group, left_s: float) -> str:
    """The reason for a group that lacks rollouts or verdicts, `left_s` seconds before its deadline."""
    if group.state is GroupState.ROLLING_OUT:
        doing = "the policy has begun" if group.started else "no token yet"
    else:
        doing = "the judge has begun" if group.judging_begun else "the judge has not begun"
    rollouts, verdicts = listed(group.missing_rollouts()), listed(group.missing_verdicts())
    return f"rollouts missing: {rollouts}; verdicts missing: {verdicts}; {doing}; {left_s:.0f} s to its deadline"


def why_ready(group: Group, batch: OpenBatch) -> str:
    """The reason for a ready group."""
    if batch.is_stale:
        return f"too old for the open batch: version {group.version} of {batch.version}; it will be dropped"
    if batch.is_full:
        return "the open batch is full"
    if batch.may_take:
        return "it may be taken: the learner is busy"
    return f"the open batch's places are for groups that are due before it: {listed(batch.due_before)}"


def why_taken(batch: OpenBatch) -> str:
    """The reason for a group of the open batch."""
    if batch.is_full:
        return "the open batch is full: its step ends it"
    return f"the open batch has {batch.num_taken} of {batch.groups_per_batch} groups"


def why_ended(end: GroupEnd) -> str:
    return f"dropped: {end.cause}" if end.outcome == "dropped" else f"trained: in step {end.step}"


def listed(names: Sequence[int | str]) -> str:
    """The first NUM_SHOWN names, and how many more there are."""
    shown = [str(name) for name in names[:NUM_SHOWN]]
    more = [f"{len(names) - NUM_SHOWN} more"] if len(names) > NUM_SHOWN else []
    return ", ".join(shown + more) or "none"
