"""Makes the judge of a run. The table of judges: a new kind is a file, a row here, a YAML and a test."""

from collections.abc import Callable, Mapping

from grmpipe.config.judge import JudgeConfig
from grmpipe.config.keys.entry_names import POLICY, REWARD
from grmpipe.config.reward import RewardTree
from grmpipe.config.run_config import RunConfig
from grmpipe.judge.calibration import CalibratedJudge, CalibrationInUse, read_for
from grmpipe.judge.composition.composed_judge import compose_judge
from grmpipe.judge.evolving_rubric import EvolvingRubric, Version
from grmpipe.judge.grm import LocalGrm, PromptRenderer
from grmpipe.judge.kinds.function_judge import FunctionJudge, load_custom_judge
from grmpipe.judge.kinds.labels import LabelReward
from grmpipe.judge.kinds.rule import RuleJudge
from grmpipe.judge.kinds.scalar import EnvRewardJudge, ScalarJudge, ScalarModel
from grmpipe.judge.meta_rm import MetaRm
from grmpipe.judge.pointwise_adapter import PointwiseAdapter
from grmpipe.judge.prompt import load_rubric
from grmpipe.judge.protocols.generative import GenerativeJudge
from grmpipe.judge.teaching import NoReward, Teacher, TeacherContext
from grmpipe.judge.tool_grm import ToolGrm
from grmpipe.models.types import Generates
from grmpipe.roles.find_models import META_RM
from grmpipe.run.prepare import Prepared
from grmpipe.run.run_model import RunModel
from grmpipe.types import Judge

Models = Mapping[str, RunModel]  # the run's, by role


def make_judge(prepared: Prepared, models: Models) -> Judge:
    """The judge of a run: its only one, the composition of all whose verdicts make the reward, or none."""
    return make_named(prepared, models, REWARD) if prepared.config.judging.judges else NoReward()


def make_named(prepared: Prepared, models: Models, name: str) -> Judge:
    """A judge or a composition of the configuration."""
    config = prepared.config
    judges = make_judges(prepared, models, {one: config.judges[one] for one in config.rewards.list_judges(name)})
    return compose(config, config.rewards.below(name), judges) if name in config.rewards.entries else judges[name]


def make_teachers(config: RunConfig, engines: Mapping[str, Generates], renderer: PromptRenderer) -> dict[str, Teacher]:
    """The models that teach the policy, by name. engines: those that score its tokens. renderer: the policy's."""
    distill = config.algorithm.distill
    context = None if distill.context is None else TeacherContext(distill, renderer)
    return {
        name: Teacher(name=name, engine=engines[name], top_k=distill.top_k, context=context) for name in config.teachers
    }


def make_judges(prepared: Prepared, models: Models, judges: Mapping[str, JudgeConfig]) -> dict[str, Judge]:
    return {
        name: calibrate(prepared, judge, JUDGES[judge.kind](prepared, models, judge)) for name, judge in judges.items()
    }


def calibrate(prepared: Prepared, config: JudgeConfig, judge: Judge) -> Judge:
    """The judge, with calibrated rewards if it has a calibration. One of pairs applies it to each pair."""
    calibration = read_for(config)
    if calibration is None or config.compares_pairs:
        return judge
    in_use = prepared.calibrations.setdefault(config.name, CalibrationInUse(calibration))
    return CalibratedJudge(judge, in_use, config.format.show_thoughts)


def make_meta_rm(models: Models) -> MetaRm | None:
    """The meta-RM for votes, if the run has one."""
    model = models.get(META_RM)
    if model is None or model.scorer is None:
        return None
    return MetaRm(scorer=model.scorer, context_tokens=model.files.context_tokens)


def compose(config: RunConfig, rewards: RewardTree, judges: Mapping[str, Judge]) -> Judge:
    return compose_judge(rewards, judges, config.judges, config.seed)


def make_generative(prepared: Prepared, models: Models, judge: JudgeConfig) -> Judge:
    grm = models[judge.model].grm
    assert grm is not None, f"no judge was to ask {judge.model}"
    if judge.tools.is_set:
        assert isinstance(grm, LocalGrm), f"{judge.model} is behind an endpoint"
        asked = models[judge.model]
        grm = ToolGrm(grm, judge, asked.tools[judge.name], asked.files.renderer, asked.router)
    policy = prepared.models.get(POLICY)  # without one there are no tokens to decode
    decode = None if policy is None else policy.renderer.decode
    evolving = find_evolving(prepared, judge)
    return GenerativeJudge(grm, judge, prepared.config.seed, make_meta_rm(models), decode, evolving)


def find_evolving(prepared: Prepared, judge: JudgeConfig) -> EvolvingRubric | None:
    """The rubric of a judge, if it changes in the run: one for all that judge under its name."""
    if judge.rubric.evolve.writer is None:
        return None
    first = Version(load_rubric(judge))
    return prepared.rubrics.setdefault(judge.name, EvolvingRubric([first]))


def make_scalar(prepared: Prepared, models: Models, judge: JudgeConfig) -> Judge:
    asked, files = models[judge.model], models[judge.model].files
    assert asked.scorer is not None, f"{judge.model} gives no scores"
    model = ScalarModel(
        scorer=asked.scorer,
        renderer=files.renderer,
        context_tokens=files.context_tokens,
        clock=asked.scorer_clock,
    )
    return PointwiseAdapter(ScalarJudge(model, judge))


JUDGES: dict[str, Callable[[Prepared, Models, JudgeConfig], Judge]] = {
    "generative": make_generative,
    "scalar": make_scalar,
    "rule": lambda prepared, models, judge: PointwiseAdapter(RuleJudge(judge.rule, judge.scale, judge.key)),
    "function": lambda prepared, models, judge: FunctionJudge(judge),
    "env": lambda prepared, models, judge: PointwiseAdapter(EnvRewardJudge(judge.env_reward)),
    "label": lambda prepared, models, judge: PointwiseAdapter(LabelReward(judge)),
    "custom": lambda prepared, models, judge: load_custom_judge(judge),
}
