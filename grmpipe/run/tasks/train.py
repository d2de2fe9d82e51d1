"""task=train: a policy learns from a judge. Start or resume, evaluate, run the flow, evaluate, export."""

from collections.abc import Sequence

from grmpipe.config.model_training import find_training
from grmpipe.data.trained_prompts import write_trained_prompts
from grmpipe.judge.grm import set_purpose
from grmpipe.observe.summary import Status, Summary
from grmpipe.run.build.compose_pipeline import make_components
from grmpipe.run.build.run_features import RunFeatures, make_cotrainings, make_features
from grmpipe.run.build.start import Running, start
from grmpipe.run.build.try_models import try_judge, try_teachers
from grmpipe.run.features.cotrain.self_judging import SelfJudging
from grmpipe.run.prepare import Prepared
from grmpipe.run.run_context import Run, RunContext
from grmpipe.run.signals import stop_by_signals
from grmpipe.run.tasks.stats import RunStats
from grmpipe.run.tasks.training_steps import TrainingSteps, restore_flow
from grmpipe.run_dir.checkpoints import CheckpointWriter
from grmpipe.scheduler.run_together import run_until
from grmpipe.trackers.tracker import SampleRow


class TrainingRun(Run[Prepared]):
    """A policy that learns from a judge."""

    def __init__(self, prepared: Prepared, context: RunContext) -> None:
        super().__init__(prepared, context)
        self._writer = CheckpointWriter(context.checkpoints)
        self._stats = RunStats(prepared.config, context.state, prepared.predicted_pause_s)
        self._running: Running | None = None
        self._features: RunFeatures | None = None
        self._steps: TrainingSteps | None = None

    async def run(self) -> Status:
        config, observers = self._config, self._observers
        observers.note(f"starting {', '.join(config.roles)} ({config.cluster.kind})")
        # A machine that was lost may come back, or another in its place.
        wait_s = config.slots.health.start_deadline_s if self._context.is_restart else 0.0
        self._running = running = await start(self._prepared, observers, self._run_dir, wait_s)
        if (resumed := self._context.resumed) is not None:
            with observers.progress.show_while(f"starting: loads {resumed.name}"):
                for model in running.trained:
                    await model.load(resumed)
        observers.note(f"ready after {self._context.since_start_s:.0f} s; files in {self._run_dir}")
        self._stats.watch(running)
        return await run_until(self._train(running), **running.background())

    async def _train(self, running: Running) -> Status:
        """Make all steps, between two held-out evaluations."""
        prepared, context, observers = self._prepared, self._context, self._observers
        self_judging = SelfJudging(prepared, running.policy) if prepared.config.self_judging_share else None
        prompts = prepared.prompts if self_judging is None else self_judging.prompts
        state, kept = restore_flow(context, prompts)
        rollouts = [(prompts.at(index), rollout) for index, work in kept.items() for rollout in work.rollouts]
        answers = [(prompt, rollout) for prompt, rollout in rollouts if not prompt.self_judging]
        cotrainings = make_cotrainings(prepared, running, context.state, answers, observers, self._run_dir)
        components = make_components(prepared, running, observers, cotrainings)
        if self_judging is not None:
            self_judging.keep(answers)
            components = self_judging.join(components)
        features = make_features(prepared, running, components, cotrainings, observers, self._run_dir)
        self._features, self._stats.cotrainings = features, cotrainings
        for feature in features.each:
            feature.restore(context.state.features.get(feature.name, {}))

        with set_purpose("preflight"), observers.progress.show_while("starting: the judge's first verdicts"):
            await try_judge(prepared, running.judge, is_new=context.resumed is None)
            await try_teachers(prepared, running.teachers)
        with observers.progress.show_while("starting: the engines get the learner's weights"):
            await components.push_weights(state.version)
            await cotrainings.push()
            await running.policy_updates.begin(state.version)

        self._steps = steps = TrainingSteps(
            prepared, context, running, components, features, cotrainings, self._stats, self._writer, state, kept
        )
        await steps.evaluate_first()
        with stop_by_signals(steps.stop):  # the checkpoint too: a signal must not end its writing
            is_complete = await steps.run_flow()
            await steps.checkpoint()
            await self._writer.settle()
        if not is_complete:
            steps.raise_if_stopped()
            return "interrupted"
        for feature in features.each:
            await feature.finish()
        for model in running.trained:
            await model.export(self._run_dir)
            tasks = self._prepared.judging_tasks.get(model.name) or self._prepared.prompts
            write_trained_prompts(self._run_dir / model.name, tasks.prompts)
            if model.entry.lora.learns:  # which may be used without the merged model
                prefix = find_training(self._prepared.config, model.name).prefix
                write_trained_prompts(self._run_dir / f"{prefix}adapter", tasks.prompts)
        observers.begun.end()
        return "completed"

    # -- ends --------------------------------------------------------------------------------------------------------

    @property
    def restartable_step(self) -> int | None:
        # What dies while the run starts would die again.
        return None if self._steps is None else self._steps.restartable_step

    async def after_failure(self, error: Exception) -> str:
        await self._writer.close(wait=True)
        if self._steps is None or not isinstance(error, ArithmeticError):
            return ""
        return self._steps.save_open_batch()

    async def close(self) -> None:
        await self._writer.close(wait=False)
        for feature in self._features.each if self._features is not None else ():
            await feature.close()
        if self._running is not None:
            await self._running.close()

    @property
    def rows(self) -> Sequence[SampleRow]:
        return self._features.periodic_eval.rows if self._features is not None else ()

    def results(self) -> Summary:
        states, final = self._context.state.features, {}
        if self._features is not None:
            states, final = self._features.states, self._features.periodic_eval.final
        pipeline, alarms = None, self._context.state.alarms
        if self._steps is not None:
            pipeline, alarms = self._steps.pipeline, tuple(self._steps.alarms)
        return self._stats.results(pipeline, states, final, alarms)
