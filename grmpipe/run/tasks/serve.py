"""task=serve: the judges of a configuration behind HTTP, for trainers elsewhere."""

import asyncio
import itertools
from dataclasses import replace

from aiohttp import web

from grmpipe.config.run_config import RunConfig
from grmpipe.observe.journal import read_what_can_be
from grmpipe.observe.recorder import JUDGEMENTS, ROLLOUTS, load_verdicts
from grmpipe.observe.summary import Status, Summary
from grmpipe.run.build.start import Running
from grmpipe.run.run_context import RunContext
from grmpipe.run.signals import stop_by_signals
from grmpipe.run.tasks.score import PreparedScoring, ScoringRun
from grmpipe.run_dir.identity import read_run_id
from grmpipe.scheduler.gc_tuning import infrequent_gc
from grmpipe.serve.call_log import CallLog
from grmpipe.serve.served_judges import ServedJudges
from grmpipe.serve.service import JudgeService

ENDS = "the service ends once what it judges is judged"


def find_served_judges(config: RunConfig) -> ServedJudges:
    """The judges that a service of this configuration answers by."""
    return ServedJudges(
        judges=config.asked.judges, rewards=config.rewards, max_failure_rate=config.main_judge.max_failure_rate
    )


class ServingRun(ScoringRun):
    """Starts the judges, and serves them until a signal comes."""

    def __init__(self, prepared: PreparedScoring, context: RunContext) -> None:
        super().__init__(prepared, context)
        run_id, guard = read_run_id(self._run_dir), self._observers.journal_guard
        self._call_log = CallLog(self._run_dir, run_id, guard, self._config.serve.cache_size)

    async def _work(self, running: Running) -> Status:
        self._go_on()
        serve, longest_s = self._config.serve, self._config.rollout.group_deadline_s
        service = JudgeService(
            serve,
            find_served_judges(self._config),
            lambda row, name, priority: self._judge_call(running, row, name, priority),
            self._call_log,
            longest_s,
            self._observers.budget.spending,
        )
        ended = asyncio.Event()
        runner = web.AppRunner(
            service.app(),
            access_log=None,
            handler_cancellation=True,  # of a client that goes away
            shutdown_timeout=longest_s,
        )
        with stop_by_signals(ended.set, ENDS), infrequent_gc():
            await runner.setup()
            try:
                await web.TCPSite(runner, serve.host, serve.port).start()
                host, port = runner.addresses[0][:2]
                print(f"grmpipe: http://{host}:{port}/v1/judge judges; Ctrl-C ends it", flush=True)
                await ended.wait()
            finally:
                await runner.cleanup()  # closes the door, then waits for what is being judged
        return "completed"

    def _go_on(self) -> None:
        """Count on from what earlier processes of the service have on file, whose names of groups are taken."""
        self._calls = itertools.count(
            max((one["prompt_index"] for one in read_what_can_be(self._run_dir / ROLLOUTS)), default=-1) + 1
        )
        for _, report in load_verdicts(self._run_dir / JUDGEMENTS):
            self._counters.report(report)
        self._call_log.read_answers()

    async def close(self) -> None:
        await super().close()
        self._call_log.close()

    def results(self) -> Summary:
        return replace(super().results(), serving=self._call_log.summarize())
