"""task=simulate: from a configuration to a simulation and its files. Starts no engine, needs no GPU."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from grmpipe.capacity.cost import Costs
from grmpipe.capacity.lower_bound import POLICY
from grmpipe.capacity.plan.costs import costs_of
from grmpipe.capacity.plan.plan_report import Predicted
from grmpipe.capacity.plan.survey import Survey, survey_run
from grmpipe.capacity.plan.work import SAMPLED_PROMPTS, judge_lengths, judge_questions, policy_lengths, prompts_judged
from grmpipe.capacity.simulate.scripts import Lengths, lengths_in, lognormal, measured
from grmpipe.capacity.simulate.simulated_cluster import simulate
from grmpipe.capacity.simulate.simulation_report import describe, record_of
from grmpipe.capacity.simulate.stages import Workload
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.data.stream import PromptStream
from grmpipe.judge.grm import BYTES_PER_TOKEN
from grmpipe.observe.plain_json import plain
from grmpipe.observe.timeline import Timeline
from grmpipe.pipeline.service_health import Unfit
from grmpipe.run_dir.directory import HOME, holds_run, new_run_dir
from grmpipe.validate.models import Progress
from models.types import Message
from scheduler.placement import Placement

STEPS_IN_A_PLAN = 4  # the first one starts with empty engines


def run_simulation(config: RunConfig, progress: Progress) -> tuple[str, float]:
    """Simulate as placed, write simulation.json and timeline.json. Returns what to print, and the seconds of a step.
    Raises ConfigError.
    """
    survey = survey_run(config, progress)
    workload, costs = workload_of(survey), costs_of(survey)
    directory = open_directory(config)
    timeline = Timeline(directory / "timeline.json")
    with stopped_for_a_user():
        run = simulate(workload, survey.placement, costs, config.simulate.steps, timeline)
    timeline.close()
    record = json.dumps(plain(record_of(run)), indent=2, ensure_ascii=False)
    (directory / "simulation.json").write_text(record + "\n", encoding="utf-8")
    text = f"{describe(run, workload, survey.placement)}\n\nfiles in {directory}: simulation.json, timeline.json"
    return text, run.step_s


def simulator(survey: Survey) -> Callable[[Placement, Costs], Predicted] | None:
    """A function that simulates a placement of the same run, for a plan. None for a run that can't be simulated."""
    if not is_simulated(survey.config):
        return None
    workload = workload_of(survey)

    def predict(placement: Placement, costs: Costs) -> Predicted:
        with stopped_for_a_user():
            run = simulate(workload, placement, costs, STEPS_IN_A_PLAN)
        return Predicted(step_s=run.step_s, busy=run.busy)

    return predict


@contextlib.contextmanager
def stopped_for_a_user() -> Iterator[None]:
    """A run that stops because too much fails in it is a ConfigError: so would the real one, from its first steps."""
    try:
        yield
    except Unfit as error:
        unreadable = "simulate.unparseable_share"
        raise ConfigError(
            f"reward: the simulated run stops, as a real one would: {error}; type judges that decide more of its "
            f"rollouts, another composition of them, or a lower {unreadable} if you set that"
        ) from error


def is_simulated(config: RunConfig) -> bool:
    """Whether a simulation knows all that takes time: no judge of the user's, behind an endpoint, with steps or a
    rubric; no meta-RM; no GRM that learns.
    """
    known = all(judge.is_simulated for judge in config.judging.judges.values())
    return known and not (
        config.judging.remote_roles or config.trained_grms or config.uses_meta_rm or config.env.is_custom
    )


def workload_of(survey: Survey) -> Workload:
    """The workload of a run. Raises ConfigError for a remote judge, whose speed is unknown."""
    config = survey.config
    for role in config.judging.remote_roles:
        key = config.models[role].key
        raise ConfigError(f"{key}.engine: a judge behind an endpoint can't be simulated; type {key}.engine=vllm")
    data = config.data
    return Workload(
        config=config,
        prompts=PromptStream(survey.data.train, seed=config.seed, shuffle=data.shuffle),
        chars_per_token={role: chars_per_token(role, survey) for role in config.served},
        lengths={
            POLICY: rollout_lengths(survey),
            **{name: judgement_lengths(name, survey) for name in config.judging.generative},
        },
    )


def chars_per_token(role: str, survey: Survey) -> float:
    """Characters per token of the run's prompts under its tokenizer, if that is here."""
    model = survey.models[role].model
    if model is None:
        return BYTES_PER_TOKEN
    asked = list(sample_conversations(role, survey))
    num_tokens = sum(len(model.renderer.render(messages)) for messages in asked)
    return max(1, sum(len(message.content) for messages in asked for message in messages)) / num_tokens


def sample_conversations(role: str, survey: Survey) -> list[tuple[Message, ...]]:
    if role == POLICY:
        return [prompt.messages for prompt in survey.data.train[:SAMPLED_PROMPTS]]
    judges = survey.config.judging.asking(role)
    return [asked for name, judge in judges.items() for asked in judge_questions(judge, prompts_judged(name, survey))]


def rollout_lengths(survey: Survey) -> Lengths:
    """Lengths of an earlier run, otherwise lognormal with the mean of task=plan."""
    settings = survey.config.simulate
    if settings.lengths is not None:
        return measured(lengths_measured(POLICY, "rollouts", settings.lengths))
    mean = policy_lengths(survey).new_tokens
    return lognormal_about(mean, settings.rollout_sigma)


def judgement_lengths(name: str, survey: Survey) -> Lengths:
    """The same of a judge's judgements."""
    settings = survey.config.simulate
    if settings.lengths is not None:
        return measured(lengths_measured(name, f"judgements of {name}", settings.lengths))
    mean = judge_lengths(name, survey).new_tokens
    return lognormal_about(mean, settings.judgement_sigma)


def lognormal_about(mean: float, sigma: float) -> Lengths:
    """Lognormal lengths with this mean."""
    return lognormal(mean / math.exp(sigma**2 / 2), sigma)


def lengths_measured(whose: str, what: str, run_dir: str) -> list[int]:
    try:
        found = lengths_in(Path(run_dir)).get(whose, [])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"simulate.lengths: the journals of {run_dir} can't be read ({error})") from error
    if not found:
        raise ConfigError(f"simulate.lengths: {run_dir} holds no {what}; give another run, or simulate.lengths=null")
    return found


def open_directory(config: RunConfig) -> Path:
    """The directory of a simulation, which never writes into a run's files; an earlier simulation there is replaced."""
    if config.run_dir is not None and holds_run(Path(config.run_dir)):
        raise ConfigError(f"run_dir: {config.run_dir} holds a run; type another run_dir for its simulation")
    directory = Path(config.run_dir) if config.run_dir else new_run_dir(HOME / config.experiment_name / "simulations")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("timeline.json", "simulation.json"):
            (directory / name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir: {directory} can't be written to ({error}); type another") from error
    return directory
