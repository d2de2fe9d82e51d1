"""From the settings of the reward to the judge of a run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.reward import RewardConfig, RewardTree
from grmpipe.config.run_judges import find_main
from grmpipe.judge.calibration import CalibratedJudge
from grmpipe.judge.composition.cascade import Audit, Cascade, Doubt
from grmpipe.judge.composition.combine_verdicts import MeasuredSkill, share_of_passes
from grmpipe.judge.composition.composed_session import ComposedJudge
from grmpipe.judge.composition.outcome import RewardPart
from grmpipe.judge.composition.reward_parts import (
    Gate,
    JudgePart,
    Jury,
    JuryVote,
    Mix,
    RouteBySource,
    vote_by_accuracy,
    vote_by_mean,
    vote_on_rewards,
)
from grmpipe.judge.composition.share_bound import ShareBounds
from grmpipe.judge.pointwise_adapter import PointwiseAdapter
from grmpipe.judge.votes import median
from grmpipe.types import Judge


def compose_judge(
    tree: RewardTree,
    judges: Mapping[str, Judge],
    configs: Mapping[str, JudgeConfig],
    seed: int,
    skill: MeasuredSkill | None = None,
) -> Judge:
    """The judge of a run: the only one itself, or several as the tree composes them.

    Takes settings that `check_rewards` has checked. judges: at least those of the tree. configs: also the first
    judge's, on whose scale the scores are shown.
    """
    build = Builder(rewards=tree.entries, configs=configs, seed=seed)
    root = build.part(tree.root)
    if isinstance(root, JudgePart):
        return judges[root.name]
    used = {name: judges[name] for name in tree.judges()}
    return ComposedJudge(
        root=root,
        judges=used,
        comparing=frozenset(name for name, judge in used.items() if compares(judge, configs[name])),
        scale=configs[find_main(used)].scale,
        waits=tree.waits_for_siblings(),
        skill=skill or MeasuredSkill(),
    )


def with_own_bounds(judge: Judge) -> Judge:
    """The same judge for rollouts that aren't trained: what a cascade escalates of them uses up nothing of its share of
    the trained ones.
    """
    return replace(judge, bounds=ShareBounds()) if isinstance(judge, ComposedJudge) else judge


def without_bounds(judge: Judge) -> Judge:
    """The same judge for what is judged again and again: all that a cascade is unsure of is escalated, because a bound
    would let the verdict depend on what was judged before.
    """
    return replace(judge, bounds=ShareBounds(limited=False)) if isinstance(judge, ComposedJudge) else judge


def get_bounds(judge: Judge) -> ShareBounds:
    """The bounds of a run's cascades; those of a single judge are used by none."""
    return judge.bounds if isinstance(judge, ComposedJudge) else ShareBounds()


def get_skill(judge: Judge) -> MeasuredSkill:
    """The measured skill of a run's judges; of a single one it is used by none."""
    return judge.skill if isinstance(judge, ComposedJudge) else MeasuredSkill()


def get_members(judge: Judge) -> Mapping[str, Judge]:
    """Each of several judges by its name; empty for a single one."""
    return judge.judges if isinstance(judge, ComposedJudge) else {}


def compares(judge: Judge, config: JudgeConfig) -> bool:
    """Whether the judge sees siblings next to each other, or waits for all of them; a judge of the user's own may,
    unless it takes single rollouts.
    """
    if isinstance(judge.judge if isinstance(judge, CalibratedJudge) else judge, PointwiseAdapter):
        return False
    return config.kind != "generative" or config.waits_for_siblings


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """Builds the parts of a composition; a name that is used twice is one part."""

    rewards: Mapping[str, RewardConfig]
    configs: Mapping[str, JudgeConfig]
    seed: int
    built: dict[str, RewardPart] = field(default_factory=dict)

    def part(self, name: str | None) -> RewardPart:
        assert name is not None, "check_rewards lets no name be missing"
        if name not in self.built:
            config = self.rewards.get(name)
            found = BUILD[config.kind](self, config) if config is not None else self._judge(name)
            self.built[name] = found
        return self.built[name]

    def _judge(self, name: str) -> RewardPart:
        return JudgePart(name=name, scale=self.configs[name].scale)

    # -- the kinds ---------------------------------------------------------------------------------------------------

    def single(self, config: RewardConfig) -> RewardPart:
        return self.part(config.names[0])

    def mix(self, config: RewardConfig) -> RewardPart:
        weights = {part: float(weight) for part, weight in config.mix.items()}
        parts = tuple(map(self.part, weights))
        by_group = config.normalise == "group_std"
        return Mix(name=config.name, parts=parts, weights=weights, by_group=by_group)

    def route(self, config: RewardConfig) -> RewardPart:
        by_source = {source: self.part(inner) for source, inner in config.route.items()}
        default = self.part(config.default) if config.default is not None else None
        return RouteBySource(name=config.name, by_source=by_source, default=default)

    def jury(self, config: RewardConfig) -> RewardPart:
        parts = tuple(map(self.part, config.names))
        quorum = config.quorum or len(parts)
        return Jury(name=config.name, parts=parts, quorum=quorum, vote=jury_vote(config), by_skill=config.uses_accuracy)

    def cascade(self, config: RewardConfig) -> RewardPart:
        band = None if config.unsure_band is None else (float(config.unsure_band[0]), float(config.unsure_band[1]))
        return Cascade(
            name=config.name,
            first=self.part(config.first),
            then=self.part(config.then),
            doubt=Doubt(above_std=config.unsure_above_std, band=band),
            share=config.share,
            audit=Audit(share=config.audit_share, seed=self.seed),
            together=config.escalate == "group",
            pass_at=config.pass_at,
        )

    def gate(self, config: RewardConfig) -> RewardPart:
        gate, inner = self.part(config.gate), self.part(config.inner)
        return Gate(name=config.name, gate=gate, inner=inner, min_reward=config.min_reward, floor=config.floor)


def jury_vote(config: RewardConfig) -> JuryVote:
    by_name: dict[str, JuryVote] = {
        "mean": vote_by_mean,
        "median": vote_on_rewards(median),
        # What one member sees through is worth nothing (worst-case optimization, arXiv 2310.02743).
        "min": vote_on_rewards(min),
        "majority": vote_on_rewards(partial(share_of_passes, pass_at=config.pass_at)),
        "accuracy": vote_by_accuracy,
    }
    return by_name[config.vote]


BUILD: dict[str, Callable[[Builder, RewardConfig], RewardPart]] = {
    "single": Builder.single,
    "mix": Builder.mix,
    "route": Builder.route,
    "jury": Builder.jury,
    "cascade": Builder.cascade,
    "gate": Builder.gate,
}
