"""Makes the judge of a run. The table of judges: a new kind is a file, a row here, a YAML and a test."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.reward import RewardTree
from grmpipe.config.run_config import RunConfig
from grmpipe.judge.composition.composed_judge import compose_judge
from grmpipe.judge.grm import Grm, PromptRenderer
from grmpipe.judge.kinds.custom_judge import load_custom_judge
from grmpipe.judge.kinds.env_rewards import EnvRewardJudge
from grmpipe.judge.kinds.function_judge import FunctionJudge
from grmpipe.judge.kinds.labels import LabelReward, find_rule
from grmpipe.judge.kinds.rule import RuleJudge
from grmpipe.judge.kinds.scalar import ScalarJudge, ScalarModel
from grmpipe.judge.meta_rm import MetaRm
from grmpipe.judge.pointwise_adapter import PointwiseAdapter
from grmpipe.judge.protocols.generative import GenerativeJudge
from grmpipe.judge.teacher_context import TeacherContext
from grmpipe.judge.teaching import NoReward, Teacher
from grmpipe.models.types import Generates
from grmpipe.types import Judge
from grmpipe.validate.prepare import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeResources:
    """What judges are made of.

    grms: role -> the model that generative judges ask. meta_rm: for their votes.
    scalars: role -> the reward model that scalar judges ask.
    """

    prepared: Prepared
    grms: Mapping[str, Grm]
    meta_rm: MetaRm | None = None
    scalars: Mapping[str, ScalarModel] = field(default_factory=dict)


def make_judge(resources: JudgeResources) -> Judge:
    """The judge of a run: its only one, the composition of all whose verdicts make the reward, or none."""
    config = resources.prepared.config
    if not config.judging.judges:
        return NoReward()
    return compose(config, config.rewards, make_judges(resources, config.judging.judges))


def make_teachers(config: RunConfig, routers: Mapping[str, Generates], renderer: PromptRenderer) -> dict[str, Teacher]:
    """The models that teach the policy, by name. routers: of their engines, by role. renderer: of the policy."""
    distill = config.algorithm.distill
    context = None if distill.context is None else TeacherContext(distill, renderer)
    return {
        name: Teacher(name=name, engine=routers[name], top_k=distill.top_k, context=context) for name in config.teachers
    }


def make_watchers(resources: JudgeResources) -> dict[str, Judge]:
    """The judges and compositions that only watch, by name."""
    config, found = resources.prepared.config, dict[str, Judge]()
    for name in config.watchers:
        judges = make_judges(resources, {one: config.judges[one] for one in config.rewards.list_judges(name)})
        found[name] = (
            compose(config, config.rewards.below(name), judges) if name in config.rewards.entries else judges[name]
        )
    return found


def make_judges(resources: JudgeResources, judges: Mapping[str, JudgeConfig]) -> dict[str, Judge]:
    return {name: JUDGES[judge.kind](resources, judge) for name, judge in judges.items()}


def compose(config: RunConfig, rewards: RewardTree, judges: Mapping[str, Judge]) -> Judge:
    return compose_judge(rewards, judges, config.judges, config.seed)


def generative_judge(resources: JudgeResources, judge: JudgeConfig) -> Judge:
    prepared = resources.prepared
    return GenerativeJudge(
        resources.grms[judge.model], judge, prepared.config.seed, resources.meta_rm, prepared.policy.renderer.decode
    )


JUDGES: dict[str, Callable[[JudgeResources, JudgeConfig], Judge]] = {
    "generative": generative_judge,
    "scalar": lambda resources, judge: PointwiseAdapter(ScalarJudge(resources.scalars[judge.model], judge)),
    "rule": lambda resources, judge: PointwiseAdapter(RuleJudge(judge.rule, judge.scale, judge.key)),
    "function": lambda resources, judge: FunctionJudge(judge),
    "env": lambda resources, judge: PointwiseAdapter(EnvRewardJudge(judge.env_reward)),
    "label": lambda resources, judge: PointwiseAdapter(LabelReward(find_rule(judge))),
    "custom": lambda resources, judge: load_custom_judge(judge),
}
