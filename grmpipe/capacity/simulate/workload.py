"""The workload of a simulation and its stages: the real play and the real judge, with a driver that takes time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from grmpipe.capacity.lower_bound import POLICY
from grmpipe.capacity.plan.work import ToolUse
from grmpipe.capacity.simulate.simulated_answers import CountingRenderer, Lengths, ModelWriter, Writer
from grmpipe.capacity.simulate.simulated_learner import AttendedGrm, CallingGrm, SimulatedDriver
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.run_config import RunConfig
from grmpipe.data.stream import PromptStream
from grmpipe.envs.play import Play, RolloutRequest, play_single_turn
from grmpipe.judge.composition.composed_judge import compose_judge
from grmpipe.judge.kinds.labels import LabelReward
from grmpipe.judge.kinds.rule import RuleJudge
from grmpipe.judge.pointwise_adapter import PointwiseAdapter
from grmpipe.judge.prompt import find_template
from grmpipe.judge.protocols.generative import GenerativeJudge
from grmpipe.judge.teaching import NoReward
from grmpipe.models.types import Generates, SamplingParams
from grmpipe.pipeline.interfaces import FlowConfig
from grmpipe.scheduler.routing.router import Router
from grmpipe.types import Judge, Prompt, Rollout

WRITTEN = ("score_line", "boxed")  # parsers that read what a simulation writes
NO_WAIT_S = 1e6  # too long to be worth a warning


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The workload, independent of the placement.

    chars_per_token: by the model's role. lengths: the policy's turns', and each judge's judgements'.
    sibling_correlation: how far lengths of siblings' turns correlate. unparseable_share: the share of judgements.
    tools: of the judges that call some.
    """

    config: RunConfig
    prompts: PromptStream
    chars_per_token: Mapping[str, float]
    lengths: Mapping[str, Lengths]
    sibling_correlation: float = 0.0
    unparseable_share: float = 0.0
    tools: Mapping[str, ToolUse] = field(default_factory=dict)


def make_flow(config: RunConfig, num_steps: int) -> FlowConfig:
    """The settings of the flow. No group is dropped for zero advantages, because scripted scores mean nothing."""
    flow = FlowConfig.of(
        config.train, config.rollout, config.algorithm, config.judging.tasks_at_once, config.seed, config.env
    )
    return replace(flow, num_steps=num_steps, max_zero_advantage_groups=0, report_wait_s=NO_WAIT_S)


def make_writer(workload: Workload, role: str) -> ModelWriter:
    """What writes the answers of a model."""
    config, lengths = workload.config, workload.lengths
    return ModelWriter(
        turns=Writer(lengths=lengths[POLICY], seed=config.seed, sibling_correlation=workload.sibling_correlation)
        if config.models[role].plays
        else None,
        judges={
            name: Writer(
                lengths=lengths[name],
                seed=config.seed,
                scale=judge.scale,
                boxed=with_writable_form(judge).parser == "boxed",
                num_scores=judge.responses_shown(config.train.group_size),
                unparseable_share=workload.unparseable_share,
            )
            for name, judge in config.judging.select_asking(role).items()
        },
    )


def make_play(workload: Workload, policy: Generates, driver: SimulatedDriver) -> Play:
    """The real play, with a tokenizer that counts."""
    limits = workload.config.rollout
    renderer = CountingRenderer(workload.chars_per_token[POLICY])
    params = SamplingParams(max_new_tokens=limits.max_new_tokens, temperature=limits.temperature)

    async def played(request: RolloutRequest, prompt: Prompt, on_first_token: Callable[[], None]) -> Rollout:
        await driver.attend()
        rollout = await play_single_turn(request, prompt, policy, renderer, params, on_first_token)
        await driver.attend()
        return rollout

    return played


def make_judge(workload: Workload, grms: Mapping[str, Router], driver: SimulatedDriver) -> Judge:
    """The real judges, as the reward composes them, with GRMs whose critiques are scripted and really parsed. grms: by
    role.
    """
    config = workload.config
    if not config.judging.judges:
        return NoReward()
    judges = {
        name: make_generative_judge(workload, judge, grms, driver) for name, judge in config.judging.judges.items()
    }
    return compose_judge(config.rewards, judges, config.judges, config.seed)


def make_generative_judge(
    workload: Workload, judge: JudgeConfig, grms: Mapping[str, Router], driver: SimulatedDriver
) -> Judge:
    if judge.kind == "rule":
        return PointwiseAdapter(RuleJudge(judge.rule, judge.scale))
    if judge.kind == "label":
        return PointwiseAdapter(LabelReward(judge))
    assert judge.model in grms, "an external GRM can't be simulated"
    renderer, engines = CountingRenderer(workload.chars_per_token[judge.model]), grms[judge.model]
    here = AttendedGrm(judge.model, engines, renderer, driver)
    if (use := workload.tools.get(judge.name)) is not None:
        turn_tokens = max(1, round(workload.lengths[judge.name](0.5) / (use.turns + 1)))
        here = CallingGrm(judge.model, engines, renderer, driver, use, turn_tokens)
    return GenerativeJudge(here, with_writable_form(judge), workload.config.seed)


def with_writable_form(judge: JudgeConfig) -> JudgeConfig:
    r"""The judge with a form of verdicts that a simulation writes: its own, or `\boxed{..}`. Its prompts stay the
    same.
    """
    judge = replace(judge, score_from="text")  # a script has no log-probs
    if judge.parser in WRITTEN and not judge.pattern:
        return judge
    return replace(judge, template=str(find_template("template", judge.template)), parser="boxed", pattern="")
