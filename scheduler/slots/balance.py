"""The balancer: backlog -> the next move of an elastic slot from one role to another, with its reason. Pure.

A decoding step of B rows takes step_s + B * row_s, so n slots finish requests of `tokens` tokens in all, the longest of
`longest`, after

    finish_s(n) = step_s * max(longest, tokens / (n * max_rows)) + row_s * tokens / n

A thin tail of long rollouts takes the same time on one slot as on eight: then slots go to the judge. The objective is
the cubic norm of the roles' times. It lies between their sum (the latency of a synchronous step) and their maximum (the
throughput of overlapping steps, which thin batches on many slots waste).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grmpipe.scheduler.routing.load import RoleBacklog

NORM = 3  # the norm of the roles' times: 1 is the sum, infinity the maximum
HYSTERESIS = 1.0  # a move must gain this many times its cost, in addition to its cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A slot. `able`: the roles that it could serve now; if its own isn't among them, it serves none."""

    name: str
    role: str
    able: frozenset[str]
    idle_s: float = 0.0  # seconds for which it has had no request


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The change of one slot's role. Gain (after cost) and cost are in seconds of the model."""

    slot: str
    source: str
    target: str
    gain_s: float
    cost_s: float
    reason: str


Cost = Callable[[str, str], float]  # (source, target) -> seconds that a change takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A pool, as the rules see it. `roles`: in the order of the flow."""

    roles: Mapping[str, RoleBacklog]
    slots: Sequence[Slot]
    cost_s: Cost
    hysteresis: float = HYSTERESIS

    def num_serving(self, role: str) -> int:
        return sum(slot.role == role and role in slot.able for slot in self.slots)

    def others_s(self, source: str, target: str) -> list[float]:
        """Times of the roles that a move doesn't change. One without a slot has none: any move leaves it waiting."""
        return [
            backlog.finish_s(num_slots)
            for role, backlog in self.roles.items()
            if role not in (source, target) and (num_slots := self.num_serving(role))
        ]

    def move(self, slot: Slot, target: str, reason: str) -> Move:
        """A move with its gain: the norm of all roles' times until their work is done, before minus after.

        The norm of the two roles alone has the same sign, but not the same size: next to a role that takes much longer,
        a second between two short ones is worth little.
        """
        source, goal, cost_s = self.roles[slot.role], self.roles[target], self.cost_s(slot.role, target)
        n_source, n_target = self.num_serving(slot.role), self.num_serving(target)
        n_left = n_source - (slot.role in slot.able)
        # While the slot changes, the others continue: the loss is its own share of the work, and the cost of migrating
        # requests from it and to it.
        leaves = slot.role in slot.able and n_left and not slot.idle_s
        leaving = source.requests / n_source if leaves else 0.0
        left_s = leaving * source.takeover_s / max(n_left, 1)
        coming = goal.requests / (n_target + 1) if n_target else 0.0
        lost_s = (cost_s + coming * goal.takeover_s) / (n_target + 1) if goal.requests else 0.0
        others_s = self.others_s(slot.role, target)
        before_s = together_s(source.finish_s(n_source), goal.finish_s(n_target), *others_s)
        after_s = together_s(source.finish_s(n_left) + left_s, goal.finish_s(n_target + 1) + lost_s, *others_s)
        return Move(
            slot=slot.name,
            source=slot.role,
            target=target,
            gain_s=before_s - after_s,
            cost_s=cost_s,
            reason=reason,
        )

    def can_go(self, slot: Slot) -> bool:
        """Whether a slot may leave its role: a role with work keeps its last slot."""
        return not (self.roles[slot.role].requests and slot.role in slot.able and self.num_serving(slot.role) == 1)


def together_s(*times_s: float) -> float:
    """The norm of the roles' times: at least the longest one, at most their sum."""
    longest_s = max(max(times_s), 1e-12)
    norm: float = sum((time_s / longest_s) ** NORM for time_s in times_s) ** (1 / NORM)
    return longest_s * norm


def decide(pool: Pool) -> Move | None:
    """The best next move, or None.

    In this order: a role with work and no slot gets one; then the move with the largest gain; then a slot that has
    idled for as long as a change takes goes to a role with work (waiting for as long as the change costs is at most
    twice as expensive as knowing the future); then, with no work anywhere, slots go to the first role of the flow.
    """
    for rule in (_rescue, _gain, _idle, _home):
        moves = [
            move
            for slot in pool.slots
            if pool.can_go(slot)
            for target in sorted(slot.able - {slot.role})
            if (move := rule(pool, slot, target)) is not None
        ]
        if moves:
            return max(moves, key=lambda move: (move.gain_s, -move.cost_s))
    return None


def _rescue(pool: Pool, slot: Slot, target: str) -> Move | None:
    if pool.roles[target].requests == 0 or pool.num_serving(target):
        return None
    return pool.move(slot, target, f"no slot serves {target}, which has {_work(pool, target)}")


def _gain(pool: Pool, slot: Slot, target: str) -> Move | None:
    move = pool.move(slot, target, f"{slot.role} has {_work(pool, slot.role)}, {target} {_work(pool, target)}")
    return move if move.gain_s > pool.hysteresis * move.cost_s else None


def _idle(pool: Pool, slot: Slot, target: str) -> Move | None:
    goal, num_slots = pool.roles[target], pool.num_serving(target)
    if pool.roles[slot.role].requests >= pool.num_serving(slot.role) or goal.requests <= num_slots:
        return None  # its own role has work for it, or it would idle there too
    move = pool.move(slot, target, f"idle for {slot.idle_s:.2g} s, {target} has {_work(pool, target)}")
    return move if slot.idle_s >= move.cost_s and goal.finish_s(num_slots) > 2 * move.cost_s else None


def _home(pool: Pool, slot: Slot, target: str) -> Move | None:
    first, cost_s = next(iter(pool.roles)), pool.cost_s(slot.role, target)
    at_rest = all(role.requests == 0 and role.idle_s >= cost_s for role in pool.roles.values())
    return pool.move(slot, target, f"no work; slots start with {first}") if at_rest and target == first else None


def _work(pool: Pool, role: str) -> str:
    backlog = pool.roles[role]
    return f"{backlog.requests} requests ({backlog.tokens:.0f} tokens) on {pool.num_serving(role)} slots"
