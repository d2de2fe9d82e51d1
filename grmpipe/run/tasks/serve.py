"""task=serve: the judges of a configuration behind HTTP, for trainers elsewhere."""

import asyncio
import itertools
import logging
import socket
import sys
from dataclasses import replace

from aiohttp import web

from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.task_settings import ServeConfig
from grmpipe.observe.journal import read_what_can_be
from grmpipe.observe.recorder import JUDGEMENTS, ROLLOUTS, JudgedSibling, load_verdicts
from grmpipe.observe.summary import Status, Summary
from grmpipe.run.build.start import refuse_denied
from grmpipe.run.run_context import RunContext
from grmpipe.run.signals import stop_by_signals
from grmpipe.run.tasks.score import PreparedScoring, Responses, ScoringRun, prepare_scoring
from grmpipe.run_dir.identity import read_run_id
from grmpipe.scheduler.gc_tuning import infrequent_gc
from grmpipe.scheduler.run_together import describe_failure, run_until
from grmpipe.serve.call_log import CallLog
from grmpipe.serve.held_groups import ServedJudges
from grmpipe.serve.judge_changes import JudgeChange, JudgeChanges
from grmpipe.serve.service import JudgeService

log = logging.getLogger(__name__)

ENDS = "the service ends once what it judges is judged"


def find_served_judges(config: RunConfig) -> ServedJudges:
    """The judges that a service of this configuration answers by."""
    return ServedJudges(
        judges=config.asked.judges, rewards=config.rewards, max_failure_rate=config.main_judge.max_failure_rate
    )


def bind(serve: ServeConfig) -> socket.socket:
    """The service's address, taken before models start; connections are refused until somebody listens. Raises
    ConfigError if it is taken.
    """
    try:
        family, kind, *_ = socket.getaddrinfo(serve.host, serve.port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((serve.host, serve.port))
        return listening
    except OSError as error:
        raise ConfigError(
            f"serve.port: {serve.host}:{serve.port} can't be taken ({error.strerror or error}); type serve.port=0 for "
            "any that is free, or end what listens there"
        ) from error


class ServingRun(ScoringRun):
    """Starts the judges, and serves them until a signal comes."""

    def __init__(self, prepared: PreparedScoring, context: RunContext) -> None:
        super().__init__(prepared, context)
        run_id, guard = read_run_id(self._run_dir), self._observers.journal_guard
        self._call_log = CallLog(self._run_dir, run_id, guard, self._config.serve.cache_size)
        self._changes = JudgeChanges(self._run_dir, run_id)

    async def run(self) -> Status:
        listening = bind(self._config.serve)
        starting = ", ".join(self._prepared.prepared.placement.seats)
        if starting and not self._config.tracking.json_logging:  # the address is the first line that scripts read
            print(f"grmpipe: starting {starting} ({self._config.cluster.kind})", file=sys.stderr, flush=True)
        try:
            self._running = await self._start()
        except BaseException:
            listening.close()
            raise
        self._go_on()
        longest_s = self._config.rollout.group_deadline_s
        service = JudgeService(
            self._config.serve,
            find_served_judges(self._config),
            self._judge_call,
            self._call_log,
            longest_s,
            self._observers.budget.spending,
            reload=self._reload,
            version=lambda: self._changes.version,
        )
        ended = asyncio.Event()
        runner = web.AppRunner(
            service.app(),
            access_log=None,
            handler_cancellation=True,  # of a client that goes away
            shutdown_timeout=longest_s,
        )
        try:
            with stop_by_signals(ended.set, ENDS), infrequent_gc():
                while (change := await self._serve(runner, listening, ended)) is not None:
                    await self._change(change)
        finally:
            await runner.cleanup()
        return "completed"

    async def _serve(self, runner: web.AppRunner, listening: socket.socket, ended: asyncio.Event) -> JudgeChange | None:
        """Serve until a signal comes (None), or until the judges are to change and nothing is being judged."""
        assert self._running is not None

        async def work() -> JudgeChange | None:
            await self._open_door(runner, listening)
            until = asyncio.create_task(ended.wait()), asyncio.create_task(self._changes.wait_for_change())
            try:
                await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
                if ended.is_set():
                    await self._changes.end("the service ends")
                    await runner.cleanup()  # closes the door, then waits for what is being judged
                    return None
                return until[1].result()
            finally:
                for one in until:
                    one.cancel()

        with refuse_denied():
            return await run_until(work(), **self._running.background())

    async def _open_door(self, runner: web.AppRunner, listening: socket.socket) -> None:
        if runner.addresses:
            return
        await runner.setup()
        await web.SockSite(runner, listening).start()
        host, port = runner.addresses[0][:2]
        ready = f"http://{host}:{port}/v1/judge judges; Ctrl-C ends it"
        if self._config.tracking.json_logging:
            self._observers.note(ready)
        else:
            print(f"grmpipe: {ready}", flush=True)

    async def _reload(self, judge: str, path: str) -> int:
        """The version of the judges once the model of one is that of another path. Raises ValueError, and Refused."""
        await asyncio.to_thread(self._prepare, judge, path)  # what can't start is refused while the old one judges
        return await self._changes.ask(judge, path)

    def _prepare(self, judge: str, path: str) -> PreparedScoring:
        """The judges with the model of one from another path. Raises ValueError."""
        config = self._config
        role = config.judges[judge].model if judge in config.judges else ""
        if role not in self._prepared.prepared.roles.served:
            raise ValueError(f"{judge} is no judge that asks a model: there is nothing to load")
        models = {**config.models, role: replace(config.models[role], path=path)}
        return prepare_scoring(replace(config, models=models, score=replace(config.score, path=None)))

    async def _change(self, change: JudgeChange) -> None:
        """End the models, and start them as they are to be; if that fails, as they were."""
        assert self._running is not None
        await self._running.close()
        problem, before = "", (self._prepared, self._config)
        try:
            # Again: another change may have been made since this one was asked for.
            self._prepared = await asyncio.to_thread(self._prepare, change.judge, change.path)
            self._config = self._prepared.config
            self._running = await self._start()
        except Exception as error:
            log.exception("%s can't be loaded from %s", change.judge, change.path)
            problem = f"{change.path} can't be loaded: {describe_failure(error)}; the judges are as they were"
            self._prepared, self._config = before
            self._running = await self._start()
        await self._changes.end(problem)

    async def _judge(self, name: str, group: Responses, number: int, priority: int) -> list[JudgedSibling]:
        async with self._changes.begin_group():
            return await super()._judge(name, group, number, priority)

    @property
    def _version(self) -> int:
        return self._changes.version

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
        self._changes.close()

    def results(self) -> Summary:
        return replace(super().results(), serving=self._call_log.summarize())
