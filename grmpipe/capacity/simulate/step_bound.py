"""A lower bound on a simulated run: the work of each role and the longest chain, group by group. Pure.

No overlap beats either bound. A role's slots can't do its work faster than with all of them busy and full. And s + 1
consecutive steps that train tokens at most s versions old take at least the longest chain of a step: a rollout, its
judgements, the last micro-batch, the update, the push.
"""

from __future__ import annotations

from collections import defaultdict
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
    """The needs of a step: of the groups that it trained, and of its updates. work_s: role -> work of all its processes
    together; of a learner's ranks, of each.
    """

    work_s: Mapping[str, float]
    chain_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least seconds of a step, and why: `loads_s` of each process of a role, `chain_s`."""

    step_s: float
    loads_s: Mapping[str, float]
    busiest_slot_s: float
    chain_s: float


@dataclass(slots=True)
class _Needs:
    """The needs of a group in flight."""

    work_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    played_s: dict[int, float] = field(default_factory=dict)  # sibling -> seconds
    chain_s: float = 0.0


class Needs:
    """A journal that adds up needs.

    rows:    role -> the most rows that can be in an engine's batch.
    sharers: role -> the most judgements with the same prompt.
    passes:  of the policy's learner. prefix_sharing: it packs the prompt of a group once. critic_updates: per batch.
    """

    def __init__(
        self,
        costs: Costs,
        rows: Mapping[str, int],
        group_size: int,
        sharers: Mapping[str, int],
        passes: Passes,
        *,
        prefix_sharing: bool,
        critic_updates: int = 1,
    ) -> None:
        self.steps: dict[int, StepNeeds] = {}
        self._costs = costs
        self._passes_s = costs.learner.token_s + passes.num_forward * costs.learner.forward_s  # of a packed token
        self._updates_s = passes.num_updates * costs.learner.step_s
        self._critic_updates = critic_updates
        self._prefix_sharing = prefix_sharing
        self._rows = rows
        self._group_size = group_size
        self._sharers = sharers
        self._open: dict[str, _Needs] = {}
        self._step: list[_Needs] = []

    def rollout(self, prompt_index: int, prompt: Prompt, rollout: Rollout) -> None:
        needs = self._open.setdefault(rollout.group_id, _Needs())
        played_s = 0.0
        lengths = [len(prompt_ids) for prompt_ids in rollout.prompts()]
        for length, turn in zip(lengths, rollout.turns, strict=True):
            speed, asked = self._costs.engines[POLICY], (length, turn.completion.num_tokens)
            played_s += alone_s(speed, *asked)
            needs.work_s[DRIVER] += self._costs.driver_request_s
            needs.work_s[POLICY] += least_s(speed, *asked, rows=self._rows[POLICY], sharers=self._group_size)
        needs.played_s[rollout.sibling] = played_s
        num_tokens = lengths[-1] + rollout.turns[-1].completion.num_tokens
        shared = lengths[0] if self._prefix_sharing and len(needs.played_s) > 1 else 0
        needs.work_s[LEARNER] += (num_tokens - shared) * self._passes_s
        if (critic := self._costs.critic) is not None:
            needs.work_s[CRITIC] += num_tokens * (critic.token_s + critic.forward_s)
        needs.chain_s = max(needs.chain_s, played_s)

    def judged(self, rollout: Rollout, report: JudgeReport) -> None:
        if (needs := self._open.get(rollout.group_id)) is None:
            return
        longest_s = 0.0
        for judgement in report.judgements:
            role, asked = judgement.grm, (len(judgement.prompt_ids), judgement.completion.num_tokens)
            speed = self._costs.engines[role]
            needs.work_s[role] += least_s(speed, *asked, rows=self._rows[role], sharers=self._sharers[role])
            longest_s = max(longest_s, alone_s(speed, *asked))
            needs.work_s[DRIVER] += self._costs.driver_request_s
        needs.chain_s = max(needs.chain_s, needs.played_s[rollout.sibling] + longest_s)

    def group_ended(self, end: GroupEnd) -> None:
        """End a group. A dropped group is no need of any step."""
        needs = self._open.pop(end.group_id, None)
        if needs is not None and end.outcome == "trained":
            self._step.append(needs)

    def close_step(self, step: int) -> None:
        trained, self._step = self._step, []
        learning = (LEARNER, CRITIC) if self._costs.critic is not None else (LEARNER,)
        roles = (*self._costs.engines, *learning, *([DRIVER] if self._costs.driver_request_s else []))
        work_s = {role: sum(needs.work_s[role] for needs in trained) for role in roles}
        work_s[LEARNER] += self._updates_s
        if self._costs.critic is not None:
            work_s[CRITIC] += self._critic_updates * self._costs.critic.step_s
        chain_s = max(needs.chain_s for needs in trained)
        self.steps[step] = StepNeeds(work_s=work_s, chain_s=chain_s + self._updates_s + self._costs.sync_s)


def bound_of(steps: Sequence[StepNeeds], placement: Placement, costs: Costs, max_staleness: int) -> Bound:
    """The lower bound on the mean time of these steps. Synchronous steps are bounded one by one."""
    loads = [loads_of(step, placement, costs) for step in steps]
    busiest = [busiest_slot_s(placement, load, costs.cores) for load in loads]
    chains = [step.chain_s for step in steps]
    if max_staleness == 0:
        step_s = fmean(map(max, zip(busiest, chains, strict=True)))
    else:
        step_s = max(fmean(busiest), fmean(chains) / (max_staleness + 1))
    return Bound(
        step_s=step_s,
        loads_s={role: fmean(load[role] for load in loads) for role in loads[0]},
        busiest_slot_s=fmean(busiest),
        chain_s=fmean(chains),
    )


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
    joining_s = speed.request_s + prompt_tokens * speed.prefill_token_s
    return joining_s + decode_s(speed, prompt_tokens, num_tokens, rows=1)


def least_s(speed: EngineSpeed, prompt_tokens: int, num_tokens: int, *, rows: int, sharers: int) -> float:
    """A request's share of full batches; the prefill of a prompt is shared by its requests."""
    joining_s = speed.request_s + prompt_tokens * speed.prefill_token_s / sharers
    return joining_s + decode_s(speed, prompt_tokens, num_tokens, rows=rows)


def decode_s(speed: EngineSpeed, prompt_tokens: int, num_tokens: int, *, rows: int) -> float:
    read = num_tokens * prompt_tokens + num_tokens * (num_tokens - 1) // 2
    return num_tokens * (speed.step_s / rows + speed.row_s) + read * speed.cached_token_s
