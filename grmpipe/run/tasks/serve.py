"""task=serve: the judges of a configuration behind HTTP, for trainers elsewhere."""

import asyncio

from aiohttp import web

from grmpipe.observe.summary import Status
from grmpipe.run.build.start import Running
from grmpipe.run.signals import stop_by_signals
from grmpipe.run.tasks.score import ScoringRun
from grmpipe.serve.service import JudgeService

ENDS = "the service ends once what it judges is judged"


class ServingRun(ScoringRun):
    """Starts the judges, and serves them until a signal comes."""

    async def _work(self, running: Running) -> Status:
        service = JudgeService(self._config, lambda row, name, priority: self._judge_call(running, row, name, priority))
        ended, serve = asyncio.Event(), self._config.serve
        runner = web.AppRunner(
            service.app(),
            access_log=None,
            handler_cancellation=True,  # of a client that goes away
            shutdown_timeout=self._config.rollout.group_deadline_s,
        )
        with stop_by_signals(ended.set, ENDS):
            await runner.setup()
            try:
                await web.TCPSite(runner, serve.host, serve.port).start()
                host, port = runner.addresses[0][:2]
                print(f"grmpipe: http://{host}:{port}/v1/judge judges; Ctrl-C ends it", flush=True)
                await ended.wait()
            finally:
                await runner.cleanup()  # closes the door, then waits for what is being judged
        return "completed"
