"""Checks of compositions of judges that name each other."""

from collections.abc import Collection, Mapping
from dataclasses import fields

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.keys.entry_names import JUDGE
from grmpipe.config.reward import REWARD_KINDS, RewardConfig, RewardTree
from grmpipe.config.train import AlgorithmConfig


def check_rewards(tree: RewardTree, judges: Collection[str], *, group_baseline: bool) -> None:
    """Raises ValueError if a composition is incomplete, contradicts itself or names no judge.

    judges: names of all judges. group_baseline: whether advantages compare the siblings of a group.
    """
    if tree.root in judges:
        raise ValueError(f"{tree.root}: names the whole; type another name for the judge")
    further = [name for name in tree.entries if name != tree.root]
    for name in further:
        if name in judges:
            raise ValueError(f"rewards.{name}: there is a judge of this name; type rewards.{name}_reward=... instead")
    for one in tree.entries.values():
        _check_keys(one)
        one.reward_kind.check(one)
        for name in one.names:
            if name not in judges and name not in further:
                known = ", ".join((*judges, *further))
                raise ValueError(
                    f"{one.key}: there is no judge or composition {name!r}; known: {known}; for another judge type "
                    f"+judge@judges.{name}=pointwise"
                )
        _check_accuracy(one, judges)
        if one.kind == "cascade" and one.escalate == "rollout" and group_baseline:
            raise ValueError(
                f"{one.key}.escalate: rollout lets two judges share the baseline of a group, and advantages compare "
                f"its siblings; type {one.key}.escalate=group"
            )
    _check_cycles(tree)
    _check_named_once(tree)
    _check_normalised(tree)


def check_watchers(watch: Collection[str], tree: RewardTree, judges: Collection[str]) -> None:
    """Raises ValueError if a judge that is to watch doesn't exist, or makes the reward already."""
    for name in watch:
        if name not in judges and name not in tree.entries:
            known = ", ".join((*judges, *(one for one in tree.entries if one != tree.root)))
            raise ValueError(
                f"judge_monitor.watch.{name}: there is no judge or composition of this name; known: {known}; for "
                f"another judge type +judge@judges.{name}=pointwise"
            )
        if name in tree.judges() or name in {one.name for one in tree.in_use()}:
            raise ValueError(
                f"judge_monitor.watch.{name}: the reward uses it already, so its verdicts are in the metrics and in "
                "judgements.jsonl; leave it out"
            )


def check_rewards_used(tree: RewardTree, watch: Collection[str] = ()) -> None:
    """Raises ValueError if a further composition is named by none, and doesn't watch."""
    watching = [one for name in watch if name in tree.entries for one in tree.below(name).in_use()]
    used = {one.name for one in (*tree.in_use(), *watching)}
    for name, one in tree.entries.items():
        if name not in used:
            raise ValueError(
                f"{one.key}: the reward doesn't use it; type reward=mix 'reward.mix={{{name}: 1}}', or "
                f"reward.judge={name}"
            )


def check_sources(tree: RewardTree, sources: Collection[str]) -> None:
    """Raises ValueError if prompts have a source for which a route in use names no judge."""
    for one in tree.in_use():
        missing = sorted(source for source in sources if source not in one.route) if one.kind == "route" else []
        if missing and one.default is None:
            raise ValueError(
                f"{one.key}.route: no judge for prompts of the source {missing[0]!r}; add it, or type "
                f"{one.key}.default={JUDGE}"
            )


def check_normalised_units(tree: RewardTree, algorithm: AlgorithmConfig) -> None:
    """Raises ValueError if a penalty in units of rewards would be taken from rewards in standard deviations of their
    group, or if nothing compares siblings.
    """
    for one in tree.in_use():
        if one.normalise == "none":
            continue
        if not algorithm.estimator_kind.has_zero_groups:
            raise ValueError(
                f"{one.key}.normalise: {one.normalise} is for estimators that compare siblings, and "
                f"{algorithm.estimator} does not; type algorithm.estimator=reinforce_pp_baseline, or "
                f"{one.key}.normalise=none"
            )
        penalties = (("overlong_buffer.share", algorithm.overlong_buffer.share > 0, "0"),)
        for key, is_set, off in (*penalties, ("kl_in_reward", algorithm.kl_in_reward, "false")):
            if is_set:
                raise ValueError(
                    f"algorithm.{key}: is in units of rewards, and {one.key}.normalise={one.normalise} gives standard "
                    f"deviations of the group; type algorithm.{key}={off}, or {one.key}.normalise=none"
                )


def check_scales(tree: RewardTree, judges: Mapping[str, JudgeConfig]) -> None:
    """Raises ValueError if a composition in use needs rewards from 0 to 1 of a judge that gives them on no scale."""
    for one in tree.in_use():
        if not one.reward_kind.scaled or one.normalise != "none":
            continue
        for judge in (judges[judge] for name in one.names for judge in tree.list_judges(name)):
            if not judge.has_scale:
                raise ValueError(
                    f"{one.key}.{one.reward_kind.scaled}: needs rewards from 0 to 1, and {judge.name} gives them on no "
                    f"scale; type '{judge.key}.function_call.score_range=[0, 1]', with the lowest and the "
                    f"highest number of its "
                    "function"
                )


def check_doubts(tree: RewardTree, judges: Mapping[str, JudgeConfig]) -> None:
    """Raises ValueError if the first judge of a cascade in use can't be unsure as the cascade asks, or abstains beyond
    the share that may be escalated.
    """
    for one in tree.in_use():
        if one.kind != "cascade":
            continue
        for name in tree.list_judges(one.first or ""):
            judge, key = judges[name], judges[name].key
            if judge.votes.abstain_above_std is not None and one.share < 1:
                raise ValueError(
                    f"{key}.votes.abstain_above_std: beyond {one.key}.share={one.share:g} the rollouts on which {name} "
                    f"abstains would have no verdict; type {key}.votes.abstain_above_std=null and "
                    f"{one.key}.unsure_above_std="
                    f"{judge.votes.abstain_above_std / (judge.scale.high - judge.scale.low):.3g}, or {one.key}.share=1"
                )
            if one.unsure_above_std is not None and name == one.first and judge.gives_one_score:
                raise ValueError(
                    f"{one.key}.unsure_above_std: {name} gives one score, which has no standard deviation; type "
                    f"'{one.key}.unsure_band=[0.3, 0.7]' instead"
                    + (f", or {key}.num_judgements=4" if judge.kind == "generative" else "")
                )


def _check_keys(reward: RewardConfig) -> None:
    for spec in fields(RewardConfig):
        if spec.name == "kind" or spec.name in reward.reward_kind.keys:
            continue
        if (value := getattr(reward, spec.name)) != spec.default:
            kinds = " or ".join(kind for kind, one in REWARD_KINDS.items() if spec.name in one.keys)
            raise ValueError(
                f"{reward.key}.{spec.name}: is for kind={kinds}, not {reward.kind}; type {_choice(reward.key, kinds)}, "
                f"or leave out {value}"
            )


def _choice(key: str, kind: str) -> str:
    """What a user types to choose a kind of composition."""
    kind = kind.split()[0]
    return f"+reward@{key}={kind}" if "." in key else f"{key}={kind}"


def _check_accuracy(reward: RewardConfig, judges: Collection[str]) -> None:
    composed = [name for name in reward.names if name not in judges] if reward.uses_accuracy else []
    if composed:
        raise ValueError(
            f"{reward.key}.vote: accuracy is measured judge by judge, and {composed[0]} is a composition; "
            f"type {reward.key}.vote=mean"
        )


def _check_cycles(tree: RewardTree) -> None:
    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            circle = " -> ".join((*above[above.index(name) :], name))
            raise ValueError(f"rewards.{name}: names itself ({circle}); type a judge's name in one of them")
        for inner in tree.entries[name].names:
            if inner in tree.entries:
                visit(inner, (*above, name))

    for name in tree.entries:
        visit(name, ())


def _check_named_once(tree: RewardTree) -> None:
    """Check that a composition which waits for siblings stands in one place: in two of them each could wait for the
    other.
    """
    for name, inner in tree.entries.items():
        above = [one.key for one in tree.in_use() if name in one.names]
        if len(above) > 1 and tree.below(name).waits_for_siblings():
            raise ValueError(
                f"{inner.key}: {above[0]} and {above[1]} both name it, and its verdicts depend on siblings; "
                f"name a copy in one of them: +reward@{inner.key}_2={inner.kind}"
            )


def _check_normalised(tree: RewardTree) -> None:
    """Check that rewards normalised by their group, which aren't on [0, 1], enter no other composition."""

    def visit(one: RewardConfig, outer: str | None) -> None:
        for name in one.names:
            inner = tree.entries.get(name)
            if inner is None:
                continue
            above = outer or (None if one.reward_kind.passes else one.kind)
            if inner.normalise != "none" and above is not None:
                raise ValueError(
                    f"{inner.key}.normalise: {inner.normalise} gives no reward on [0, 1], which {above} needs; "
                    f"type {inner.key}.normalise=none"
                )
            visit(inner, above)

    visit(tree.reward, None)
