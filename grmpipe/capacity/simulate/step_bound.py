"""A lower bound on a simulated run: the work of each role and the longest chain. Pure.

No overlap beats either bound. What a role's engines did in these steps can't be done faster than with all its slots
busy and full. And s + 1 consecutive steps that train tokens at most s versions old take at least the longest chain of
the last one: a rollout, its judgements, the updates, the push.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from grmpipe.capacity.cost import Costs
from grmpipe.capacity.lower_bound import CRITIC, DRIVER, LEARNER, POLICY, busiest_slot_s, is_learning, is_on_cpu
from grmpipe.capacity.passes import Passes
from grmpipe.types import GroupEnd, JudgeReport, Prompt, Rollout
from models.types import EngineSpeed
from scheduler.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNeeds:
    """The needs of a step. work_s: role -> work of all its processes together, of a learner's ranks of each: that of
    engines as far as it was done within the step, that of learners for the groups that the step trained.
    """

    work_s: Mapping[str, float]
    chain_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least seconds of a step, and why: `loads_s` of each process of a role; `chain_s`, of a step's chain, divided
    by all steps.
    """

    step_s: float
    loads_s: Mapping[str, float]
    busiest_slot_s: float
    chain_s: float


@dataclass(slots=True)
class _Needs:
    """The needs of a group in flight."""

    learner_s: float = 0.0
    critic_s: float = 0.0
    played_s: dict[int, float] = field(default_factory=dict)  # sibling -> seconds
    chain_s: float = 0.0


class Needs:
    """A journal that adds up needs.

    passes: of the policy's learner. prefix_sharing: it packs the prompt of a group once. critic_updates: per batch.
    """

    def __init__(self, costs: Costs, passes: Passes, *, prefix_sharing: bool, critic_updates: int = 1) -> None:
        self.steps: dict[int, StepNeeds] = {}
        self._costs = costs
        self._passes_s = costs.learner.token_s + passes.num_forward * costs.learner.forward_s  # of a packed token
        self._updates_s = passes.num_updates * costs.learner.step_s
        self._critic_updates = critic_updates
        self._prefix_sharing = prefix_sharing
        self._open: dict[str, _Needs] = {}
        self._step: list[_Needs] = []

    def rollout(self, prompt_index: int, prompt: Prompt, rollout: Rollout) -> None:
        needs = self._open.setdefault(rollout.group_id, _Needs())
        lengths = [len(prompt_ids) for prompt_ids in rollout.prompts()]
        turns = [turn.completion.num_tokens for turn in rollout.turns]
        needs.played_s[rollout.sibling] = sum(
            alone_s(self._costs.engines[POLICY], *asked) for asked in zip(lengths, turns, strict=True)
        )
        num_tokens = lengths[-1] + turns[-1]
        shared = lengths[0] if self._prefix_sharing and len(needs.played_s) > 1 else 0
        needs.learner_s += (num_tokens - shared) * self._passes_s
        if (critic := self._costs.critic) is not None:
            needs.critic_s += num_tokens * (critic.token_s + critic.forward_s)
        needs.chain_s = max(needs.chain_s, needs.played_s[rollout.sibling])

    def judged(self, rollout: Rollout, report: JudgeReport) -> None:
        if (needs := self._open.get(rollout.group_id)) is None:
            return
        asked = [(one.grm, len(one.prompt_ids), one.completion.num_tokens) for one in report.judgements]
        longest_s = max((alone_s(self._costs.engines[role], *sizes) for role, *sizes in asked), default=0.0)
        needs.chain_s = max(needs.chain_s, needs.played_s[rollout.sibling] + longest_s)

    def group_ended(self, end: GroupEnd) -> None:
        """End a group. A dropped group is no need of any step's learner."""
        needs = self._open.pop(end.group_id, None)
        if needs is not None and end.outcome == "trained":
            self._step.append(needs)

    def close_step(self, step: int, done_s: Mapping[str, float]) -> None:
        """End a step. done_s: role -> the least seconds of what its engines, or the driver, did within the step;
        for a critic, which values groups of the next step as well, all seconds that it worked.
        """
        trained, self._step = self._step, []
        work_s = {role: done_s[role] for role in self._costs.engines}
        work_s[LEARNER] = sum(needs.learner_s for needs in trained) + self._updates_s
        if (critic := self._costs.critic) is not None:
            needed_s = sum(needs.critic_s for needs in trained) + self._critic_updates * critic.step_s
            work_s[CRITIC] = min(needed_s, done_s[CRITIC])
        if DRIVER in done_s:
            work_s[DRIVER] = done_s[DRIVER]
        chain_s = max(needs.chain_s for needs in trained)
        self.steps[step] = StepNeeds(work_s=work_s, chain_s=chain_s + self._updates_s + self._costs.sync_s)


def bound_of(
    steps: Sequence[StepNeeds], placement: Placement, costs: Costs, max_staleness: int, num_overlapped: int = 0
) -> Bound:
    """The lower bound on the mean time of these steps. Synchronous steps are bounded one by one.

    num_overlapped: the first steps whose groups may have begun before all of these steps: their chains don't count.
    """
    loads = [loads_of(step, placement, costs) for step in steps]
    mean_loads_s = {role: fmean(load[role] for load in loads) for role in loads[0]}
    chains = [step.chain_s for step in steps]
    chain_s = sum(chains[num_overlapped:]) / len(chains)
    if max_staleness == 0:
        busiest = [busiest_slot_s(placement, load, costs.cores) for load in loads]
        busiest_s, step_s = fmean(busiest), fmean(map(max, zip(busiest, chains, strict=True)))
    else:
        # Work may be done in an earlier step than it is trained in, so only the means count.
        busiest_s = busiest_slot_s(placement, mean_loads_s, costs.cores)
        step_s = max(busiest_s, chain_s / (max_staleness + 1))
    return Bound(step_s=step_s, loads_s=mean_loads_s, busiest_slot_s=busiest_s, chain_s=chain_s)


def loads_of(step: StepNeeds, placement: Placement, costs: Costs) -> dict[str, float]:
    """Role -> seconds of work for each process. A push stops the learner and the policy's engines."""
    loads = {}
    for role, work_s in step.work_s.items():
        loads[role] = work_s if is_learning(role) or role == DRIVER else work_s / len(placement.seats[role])
    loads[LEARNER] += costs.sync_s
    paused, pushing = placement.seats[POLICY][0], placement.seats[LEARNER][0]
    on_cores = costs.cores and is_on_cpu(placement, paused)  # a paused process leaves its core to others
    if paused.pool != pushing.pool and not on_cores:  # on one slot a push counts once
        loads[POLICY] += costs.sync_s
    return loads


def alone_s(speed: EngineSpeed, prompt_tokens: int, num_tokens: int) -> float:
    """The time of a request alone on an engine."""
    read = num_tokens * prompt_tokens + num_tokens * (num_tokens - 1) // 2
    decode_s = num_tokens * (speed.step_s + speed.row_s) + read * speed.cached_token_s
    return speed.request_s + prompt_tokens * speed.prefill_token_s + decode_s
