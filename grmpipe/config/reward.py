"""Settings of the reward: how the verdicts of several judges become one. Frozen, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grmpipe.config.keys.entry_names import JUDGE, REWARD, first_apart
from grmpipe.models.bounds import Bounded, one_of

NORMALISATIONS = ("none", "group_std")
JURY_VOTES = ("mean", "median", "min", "majority", "accuracy")
ESCALATIONS = ("group", "rollout")
MAX_STD = 0.5  # for rewards on [0, 1]: half of them 0, half of them 1


@dataclass(frozen=True)
class RewardConfig(Bounded):
    """How verdicts become one reward on [0, 1]. A name is that of a judge, or of another composition in `rewards`."""

    # One judge (single), a weighted mean (mix), a choice by the prompt's source (route), a vote (jury), a cheap judge
    # before a better one (cascade), a judge with a veto (gate), or no reward at all (none): only teachers teach.
    kind: str = "single"
    judge: str | None = None  # For single: name of the judge; null: the first one.
    # For mix: names and their weights, as in {judge: 0.7, safety: 0.3}; weights are normalised. A component of weight 0
    # is shown and doesn't count; if its verdict fails, so does that of the mix: type judge_monitor.watch instead.
    mix: Any = None
    # For mix: what is done to a component's rewards before they are weighted: nothing (none), or they lose their
    # group's mean and are divided by its standard deviation (group_std: GDPO, arXiv 2601.05242).
    normalise: str = one_of(NORMALISATIONS, "none")
    route: Any = None  # For route: sources of prompts and the name that judges them, as in {math: steps, chat: rubric}.
    default: str | None = None  # For route: name that judges prompts of all other sources; null: their verdict fails.
    members: Any = None  # For jury: names of those who vote, as in [a, b, c].
    # For jury: how the members' rewards become one: their mean or median, the lowest one (min: worst-case optimization
    # over an ensemble, arXiv 2310.02743), 1 or 0 as most of them pass (majority), or their mean, weighted by the
    # accuracy measured on held-out prompts (accuracy).
    vote: str = one_of(JURY_VOTES, "mean")
    quorum: int | None = None  # [members] For jury: fewest members with a verdict; null: all of them.
    pass_at: float = 0.5  # [reward] For jury and cascade: lowest reward that passes a response.
    first: str | None = None  # For cascade: name of the cheap judge, which is asked first.
    then: str | None = None  # For cascade: name of the better judge, which is asked where the first one is unsure.
    # [reward] For cascade: the first judge is unsure if the standard deviation of its votes is above this; null: the
    # votes aren't used.
    unsure_above_std: float | None = None
    # [reward] For cascade: the first judge is unsure if its reward is between these two, as in [0.3, 0.7]; null: the
    # reward isn't used.
    unsure_band: Any = None
    share: float = 0.25  # For cascade: largest share of the rollouts that is escalated.
    # For cascade: share of the groups (escalate=rollout: of the rollouts) that both judges see although the first one
    # is sure: it measures what the cascade costs.
    audit_share: float = 0.05
    # For cascade: what goes to the second judge: all siblings if the first judge is unsure of one (group), or only
    # those that it is unsure of (rollout).
    escalate: str = one_of(ESCALATIONS, "group")
    # [reward] For cascade: mean absolute error of sure verdicts above which an alarm is raised.
    max_error: float = 0.1
    gate: str | None = None  # For gate: name of the judge with the veto.
    min_reward: float = 0.5  # [reward] For gate: lowest reward by the gate with which `inner` is asked.
    floor: float = 0.0  # [reward] For gate: the reward of a response below min_reward.
    inner: str | None = None  # For gate: name that judges what passes the gate.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in REWARD_KINDS:
            raise ValueError(f"kind: unknown value {self.kind!r}; known: {', '.join(REWARD_KINDS)}")
        for key, reward in (("pass_at", self.pass_at), ("min_reward", self.min_reward), ("floor", self.floor)):
            if not 0 <= reward <= 1:
                raise ValueError(f"{key}: rewards are on [0, 1], got {reward}; type {REWARD}.{key}=0.5")
        for key, share in (("share", self.share), ("audit_share", self.audit_share)):
            if not 0 < share <= 1:
                raise ValueError(f"{key}: must be above 0 and at most 1, got {share}; type {REWARD}.{key}=0.1")
        if not 0 < self.max_error < math.inf:
            raise ValueError(f"max_error: must be above 0, got {self.max_error}; type {REWARD}.max_error=0.1")
        if self.unsure_above_std is not None and not 0 <= self.unsure_above_std < MAX_STD:
            raise ValueError(
                f"unsure_above_std: must be 0 or more and below {MAX_STD}, the largest standard deviation on [0, 1], "
                f"got {self.unsure_above_std}; type {REWARD}.unsure_above_std=0.1"
            )
        if self.floor == 1:
            raise ValueError(
                f"floor: 1 is as much as the best response that passes the gate can get; type {REWARD}.floor=0"
            )

    @property
    def name(self) -> str:
        """The name by which others name it."""
        return REWARD

    @property
    def key(self) -> str:
        """The section that a user types."""
        return REWARD

    @property
    def reward_kind(self) -> RewardKind:
        """What other modules must know of the kind."""
        return REWARD_KINDS[self.kind]

    @property
    def uses_accuracy(self) -> bool:
        """Whether its vote needs the members' accuracy on held-out prompts."""
        return self.kind == "jury" and self.vote == "accuracy"

    @property
    def names(self) -> tuple[str, ...]:
        """The judges and compositions that it names, each once, in the order in which they are typed."""
        return tuple(dict.fromkeys(self.reward_kind.names(self)))

    def names_for(self, source: str) -> tuple[str, ...]:
        """Those of them that may judge prompts of a source."""
        if self.route is None:
            return self.names
        name = self.route.get(source, self.default)
        return () if name is None else (name,)

    def find_shares(self, source: str) -> Mapping[str, float]:
        """Name -> the largest share of the rollouts on prompts of this source that it judges."""
        return self.reward_kind.asked(self, source)


@dataclass(frozen=True)
class RewardEntry(RewardConfig):
    """A composition of a run, with its name and the section that a user types."""

    name: str = REWARD
    key: str = REWARD

    @staticmethod
    def of(reward: RewardConfig, name: str, key: str) -> RewardEntry:
        route = reward.route
        if isinstance(route, Mapping):  # sources are texts, also where YAML reads a number
            route = {str(source): judge for source, judge in route.items()}
        return RewardEntry(**vars(reward) | {"route": route, "name": name, "key": key})


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardKind:
    """What other modules must know of a kind of composition.

    keys:   the keys of RewardConfig that it uses.
    names:  the judges and compositions that a checked one names.
    check:  (section) -> None; raises ValueError that begins with the key.
    passes: whether its reward is that of one of its parts, unchanged, so that the part need not be on [0, 1].
    waits:  whether a sibling's reward depends on its siblings' verdicts.
    later:  those of its names that judge a response only if another verdict on it says so.
    scaled: the key that needs the parts' rewards from 0 to 1; empty: none does.
    asked:  (section, source of prompts) -> name -> the largest share of these prompts' rollouts that it judges.
    """

    keys: tuple[str, ...]
    names: Callable[[RewardConfig], tuple[str, ...]]
    check: Callable[[RewardConfig], None]
    passes: bool = False
    waits: Callable[[RewardConfig], bool] = lambda reward: False
    later: Callable[[RewardConfig], tuple[str, ...]] = lambda reward: ()
    scaled: str = ""
    asked: Callable[[RewardConfig, str], Mapping[str, float]] = lambda reward, source: dict.fromkeys(reward.names, 1.0)


# -- compositions that name each other -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RewardTree:
    """The compositions of a run by name, and that of them which makes the reward. All methods but `in_use` take checked
    ones.
    """

    entries: Mapping[str, RewardConfig]
    root: str = REWARD

    @staticmethod
    def of(reward: RewardConfig, rewards: Mapping[str, RewardConfig] | None = None) -> RewardTree:
        """The composition that makes the reward, with the further ones by name."""
        if REWARD in (rewards or {}):
            raise ValueError(first_apart("rewards", REWARD))
        further = {name: RewardEntry.of(one, name, f"rewards.{name}") for name, one in (rewards or {}).items()}
        return RewardTree({REWARD: RewardEntry.of(reward, REWARD, REWARD), **further})

    @property
    def reward(self) -> RewardConfig:
        return self.entries[self.root]

    def judges(self, source: str | None = None) -> tuple[str, ...]:
        """The judges that the reward may ask, each once, in the order in which they are named.

        source: the prompt's; None: the judges of any source.
        """
        found: dict[str, None] = {}
        for name in self.reward.names if source is None else self.reward.names_for(source):
            found |= dict.fromkeys(self.list_judges(name, source))
        return tuple(found)

    def list_judges(self, name: str, source: str | None = None) -> tuple[str, ...]:
        """The same of a judge, which is itself, or of a composition."""
        return self.below(name).judges(source) if name in self.entries else (name,)

    def always_asked(self, source: str) -> frozenset[str]:
        """The judges that judge every response to a prompt of this source, whatever other verdicts say."""
        found: set[str] = set()
        for name in set(self.reward.names_for(source)).difference(self.reward.reward_kind.later(self.reward)):
            found |= self.below(name).always_asked(source) if name in self.entries else {name}
        return frozenset(found)

    def compute_asked_shares(self, sources: Mapping[str, float]) -> dict[str, float]:
        """Judge -> the largest share of the rollouts that it judges. sources: source of prompts -> their share.

        What verdicts decide isn't known: every response is assumed to pass a gate, and a cascade to escalate as much as
        it may, next to its audit.
        """
        asked = dict.fromkeys(self.judges(), 0.0)
        for source, share in sources.items():
            for judge, part in self.compute_source_shares(source).items():
                asked[judge] += share * part
        return asked

    def compute_source_shares(self, source: str) -> dict[str, float]:
        """The same for prompts of one source, without the judges that aren't asked. A judge that is named twice is
        asked once.
        """
        found: dict[str, float] = {}
        for name, share in self.reward.find_shares(source).items():
            inner = self.below(name).compute_source_shares(source) if name in self.entries else {name: 1.0}
            for judge, part in inner.items():
                found[judge] = min(1.0, found.get(judge, 0.0) + share * part)
        return found

    def longest_chain(self, seconds: Mapping[str, float]) -> tuple[str, ...]:
        """The judges that are asked about a rollout one after the other, of those that take longest together.

        seconds: judge -> the most that it takes.
        """
        names = self.reward.names
        chains = [self.below(name).longest_chain(seconds) if name in self.entries else (name,) for name in names]
        if self.reward.reward_kind.later(self.reward):
            return tuple(dict.fromkeys(name for chain in chains for name in chain))
        return max(chains, key=lambda chain: sum(seconds[name] for name in chain), default=())

    def idle_routes(self, sources: Collection[str]) -> Iterator[tuple[str, str]]:
        """The key of a route in use and the source of prompts that it names in vain: none of `sources`."""
        for one in self.in_use():
            if one.kind == "route":
                yield from ((f"{one.key}.route", source) for source in one.route if source not in sources)

    def waits_for_siblings(self) -> bool:
        """Whether the reward of a rollout depends on its siblings' verdicts."""
        return any(one.reward_kind.waits(one) for one in self.in_use())

    def find_weighed_members(self) -> dict[str, str]:
        """Member -> the path of the jury in use that weighs it by its accuracy on held-out prompts."""
        return {name: one.key for one in self.in_use() if one.uses_accuracy for name in one.names}

    def varies_by_group(self) -> bool:
        """Whether rewards depend on what their group has in common: siblings' verdicts, a decision of a cascade, the
        measured skill of judges. Rewards of two judgings of a group then don't compare.
        """
        return self.waits_for_siblings() or any(one.uses_accuracy for one in self.in_use())

    def max_errors(self) -> dict[str, float]:
        """Cascade -> the error of its sure verdicts above which an alarm is raised."""
        return {one.name: one.max_error for one in self.in_use() if one.kind == "cascade"}

    def in_use(self) -> list[RewardConfig]:
        """The compositions in use, each once."""
        found, waiting = {self.root: self.reward}, [self.reward]
        while waiting:
            for name in waiting.pop().names:
                if name in self.entries and name not in found:
                    found[name] = self.entries[name]
                    waiting.append(self.entries[name])
        return list(found.values())

    def weightless(self) -> list[str]:
        """The components of mixes in use that have weight 0."""
        return [name for one in self.in_use() if one.kind == "mix" for name, weight in one.mix.items() if not weight]

    def below(self, name: str) -> RewardTree:
        """The tree of one of its compositions."""
        return RewardTree(self.entries, name)


def arrival_orders(tree: RewardTree) -> Iterator[str]:
    """What makes rewards depend on the order in which verdicts arrive, in words that end with what to type."""
    for one in tree.in_use():
        if one.kind == "cascade" and one.share < 1:
            yield f"{one.key}.share={one.share:g} goes to the groups that are unsure first; type {one.key}.share=1"
        if one.uses_accuracy:
            yield f"{one.key}.vote=accuracy weighs by the last evaluation that has ended; type {one.key}.vote=mean"


# -- the kinds -------------------------------------------------------------------------------------------------------


def _single(reward: RewardConfig) -> None:
    if reward.judge == "":
        raise ValueError(f"{reward.key}.judge: names no judge; type {reward.key}.judge={JUDGE}")


def _mix(reward: RewardConfig) -> None:
    _mapping(f"{reward.key}.mix", reward.mix, f"'{reward.key}.mix={{{JUDGE}: 0.7, safety: 0.3}}'")
    for name, weight in reward.mix.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(
                f"{reward.key}.mix.{name}: a weight must be a number of 0 or more, got {weight!r}; type "
                f"{reward.key}.mix.{name}=1"
            )
    if not any(reward.mix.values()):
        raise ValueError(f"{reward.key}.mix: all weights are 0; type {reward.key}.mix.{next(iter(reward.mix))}=1")


def _route(reward: RewardConfig) -> None:
    _mapping(f"{reward.key}.route", reward.route, f"'{reward.key}.route={{math: {JUDGE}, chat: rubric}}'")
    for source, name in reward.route.items():
        if not isinstance(name, str):
            raise ValueError(
                f"{reward.key}.route.{source}: must be a name, got {name!r}; type {reward.key}.route.{source}={JUDGE}"
            )


def _jury(reward: RewardConfig) -> None:
    example = f"'{reward.key}.members=[{JUDGE}, safety]'"
    members = reward.members
    if not isinstance(members, list | tuple) or not members or not all(isinstance(name, str) for name in members):
        raise ValueError(f"{reward.key}.members: must be a list of names, got {format_typed(members)}; type {example}")
    if twice := [name for name in members if members.count(name) > 1]:
        raise ValueError(f"{reward.key}.members: {twice[0]} is a member twice, and votes once; type {example}")
    if reward.quorum is not None and not 1 <= reward.quorum <= len(members):
        raise ValueError(
            f"{reward.key}.quorum: must be at least 1 and at most the {len(members)} members, got {reward.quorum}; "
            f"type {reward.key}.quorum={len(members)}"
        )


def _cascade(reward: RewardConfig) -> None:
    _named(reward, first=reward.first, then=reward.then)
    if reward.first == reward.then:
        raise ValueError(f"{reward.key}.then: is {reward.then} like first; type {reward.key}.then=<a better judge>")
    band = reward.unsure_band
    if band is None and reward.unsure_above_std is None:
        raise ValueError(
            f"{reward.key}.unsure_band: nothing says where {reward.first} is unsure; type "
            f"'{reward.key}.unsure_band=[0.3, 0.7]', or {reward.key}.unsure_above_std=0.1"
        )
    if band is not None and not is_band(band):
        raise ValueError(
            f"{reward.key}.unsure_band: must be two rewards on [0, 1], the lower one first, got "
            f"{format_typed(band)}; type "
            f"'{reward.key}.unsure_band=[0.3, 0.7]'"
        )


def _routed(reward: RewardConfig, source: str) -> dict[str, float]:
    name = reward.route.get(source, reward.default)
    return {} if name is None else {name: 1.0}


def _escalated(reward: RewardConfig, source: str) -> dict[str, float]:
    first, then = reward.names
    return {first: 1.0, then: min(1.0, reward.share + reward.audit_share)}


def is_band(band: object) -> bool:
    """Whether it is a pair of rewards in ascending order."""
    if not isinstance(band, list | tuple) or len(band) != 2:
        return False
    numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in band)
    return numbers and 0 <= band[0] <= band[1] <= 1


def _gate(reward: RewardConfig) -> None:
    _named(reward, gate=reward.gate, inner=reward.inner)


def format_typed(value: object) -> str:
    """A value as a user types it."""
    return "null" if value is None else repr(value)


def _mapping(key: str, value: object, example: str) -> None:
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"{key}: names no judge, got {format_typed(value)}; type {example}")


def _named(reward: RewardConfig, **names: str | None) -> None:
    for key, name in names.items():
        if not name:
            raise ValueError(f"{reward.key}.{key}: names no judge; type {reward.key}.{key}={JUDGE}")


REWARD_KINDS: dict[str, RewardKind] = {
    "single": RewardKind(
        keys=("judge",),
        names=lambda reward: (reward.judge or JUDGE,),
        check=_single,
        passes=True,
    ),
    "mix": RewardKind(
        keys=("mix", "normalise"),
        names=lambda reward: tuple(reward.mix),
        check=_mix,
        waits=lambda reward: reward.normalise != "none",
        scaled="mix",
    ),
    "route": RewardKind(
        keys=("route", "default"),
        names=lambda reward: (*reward.route.values(), *([reward.default] if reward.default else [])),
        check=_route,
        asked=_routed,
        passes=True,
    ),
    "jury": RewardKind(
        keys=("members", "vote", "quorum", "pass_at"),
        names=lambda reward: tuple(reward.members),
        check=_jury,
        waits=lambda reward: reward.quorum is not None and reward.quorum < len(reward.members),
        scaled="pass_at",
    ),
    "cascade": RewardKind(
        keys=(
            "first", "then", "unsure_above_std", "unsure_band", "share", "audit_share", "escalate", "pass_at",
            "max_error",
        ),
        names=lambda reward: (reward.first or "", reward.then or ""),
        check=_cascade,
        waits=lambda reward: reward.escalate == "group",
        later=lambda reward: (reward.then or "",),
        scaled="unsure_band",
        asked=_escalated,
    ),
    "gate": RewardKind(
        keys=("gate", "min_reward", "floor", "inner"),
        names=lambda reward: (reward.gate or "", reward.inner or ""),
        check=_gate,
        later=lambda reward: (reward.inner or "",),
        scaled="min_reward",
    ),
    "none": RewardKind(keys=(), names=lambda reward: (), check=lambda reward: None),
}  # fmt: skip
