"""task=evaluate: a judge against labelled work, a policy on prompts, or both."""

from grmpipe.config.keys.entry_names import POLICY
from grmpipe.evaluation.evaluation_files import JUDGE_RESULTS
from grmpipe.evaluation.judge_accuracy import JudgeEvaluation
from grmpipe.evaluation.judged_items import JudgedItem
from grmpipe.evaluation.policy_evaluation import RESULTS as POLICY_RESULTS
from grmpipe.evaluation.policy_evaluation import PolicyEvaluation
from grmpipe.observe.recorder import EVAL_JUDGEMENTS, EVAL_ROLLOUTS
from grmpipe.observe.run_files import FIGURES, JUDGED
from grmpipe.observe.summary import EvalSummary, Status, Summary
from grmpipe.pipeline.counters import Counters
from grmpipe.run.build.start import Running, refuse_denied, start
from grmpipe.run.run_context import Run, RunContext
from grmpipe.run.tasks.evaluate_judge import evaluate_judge, name_metrics
from grmpipe.run.tasks.evaluate_policy import evaluate_policy
from grmpipe.run.tasks.prepare_evaluation import PreparedEvaluation
from grmpipe.run.tasks.stats import env_summary, summarize_judging
from grmpipe.scheduler.run_together import run_until
from grmpipe.trackers.tracker import SampleRow
from grmpipe.types import Metrics


class EvaluationRun(Run[PreparedEvaluation]):
    """A judge's accuracy on labelled work, and a policy's figures on prompts."""

    is_policy_run = False

    def __init__(self, prepared: PreparedEvaluation, context: RunContext) -> None:
        super().__init__(prepared, context)
        self._running: Running | None = None
        self._judge: JudgeEvaluation | None = None
        self._policies: dict[str, PolicyEvaluation] = {}
        self._rows: list[SampleRow] = []
        self._counters = Counters()

    @property
    def rows(self) -> list[SampleRow]:
        return self._rows

    async def run(self) -> Status:
        """Evaluate all that is asked for; write evaluation.json, print the tables."""
        self._running = running = await start(
            self._prepared.prepared, self._observers, self._run_dir, plays=bool(self._prepared.prompt_sets)
        )
        with refuse_denied():
            return await run_until(self._evaluate(running), **running.background())

    async def _evaluate(self, running: Running) -> Status:
        ready = self._prepared
        # Of an evaluation here before: what it paid for is in paid_answers.jsonl.
        for name in (FIGURES, JUDGED, JUDGE_RESULTS, POLICY_RESULTS, EVAL_ROLLOUTS, EVAL_JUDGEMENTS):
            (self._run_dir / name).unlink(missing_ok=True)
        if ready.items:
            giver = self._config.main_judge.in_words.shown
            further = "".join(f", then {name}" for name in self._config.watchers)
            self._observers.note(f"{giver} judges {len(ready.items)} labelled items{further}")
            await self._measure_judge(running)
        if ready.prompt_sets:
            await evaluate_policy(ready, running, self._context, self._counters, self._policies, self._rows)
        metrics = {f"eval/{name}": value for name, value in self._judge_metrics.items()}
        for prompts, one in self._policies.items():
            metrics |= {f"eval/{prompts}/{name}": value for name, value in one.metrics().items()}
        self._observers.trackers.log(0, metrics)
        return "completed"

    async def _measure_judge(self, running: Running) -> list[JudgedItem]:
        """What was judged, after its figures are written and printed."""
        observers = self._observers
        self._judge, judged = await evaluate_judge(
            self._prepared, running, self._run_dir, self._counters, observers.progress, observers.budget.spending
        )
        return judged

    async def close(self) -> None:
        if self._running is not None:
            await self._running.close()

    @property
    def _judge_metrics(self) -> Metrics:
        return {} if self._judge is None else name_metrics(self._judge, self._config.judging.main)

    def results(self) -> Summary:
        evaluated = self._judge is not None or bool(self._policies)
        roles = (*((POLICY,) if self._policies else ()), *self._config.judging.roles)
        return Summary(
            steps=0,
            versions=dict.fromkeys(roles, 0) if evaluated else {},
            eval=EvalSummary(
                final=self._judge_metrics, by_prompts={name: one.metrics() for name, one in self._policies.items()}
            ),
            judging=summarize_judging(self._counters),
            engines_replaced=self._running.maintenance.count_replaced() if self._running is not None else {},
            envs=env_summary(self._counters.envs),
        )
