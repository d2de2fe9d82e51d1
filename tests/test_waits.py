"""Every wait has an end: what waits without a limit of its own is listed here, with who ends it.

Leaves only: events, queues, locks, threads, processes, sockets and pipes. A task ends when what it awaits does. A wait
with arguments of its own (`wait(5)`), in `asyncio.timeout` or in `asyncio.wait_for` has its limit.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WITHOUT_ARGUMENTS = {"wait", "get", "accept", "acquire"}
WITH_ANY = {"to_thread", "run_in_executor", "recv", "recv_fds", "recv_bytes", "recvmsg", "readexactly", "readline"}
NO_WAITS = (
    "HydraConfig.get",
    "_PURPOSE.get",
    "_command.get",
    "_request.get",
    "file.readline",
    "old.readline",
    "self._file.readline",
)

CALL = "its caller's: the limit of a call to this process (scheduler/processes/call_limits.py)"
STAGE = "its caller's: the limit of the stage of an episode (env.boot_s, env.step_s, env.close_s)"
IDLE = "it waits for work, and is cancelled with the run"
DISK = "work on this machine's disk or cores, which ends"
LIMITED = "this machine's start of a run: cluster.start_timeout_s, and Ctrl-C"
DEADLINE = "the deadline of its group, or the limit of the judgement; the health of its engines"
# place -> who ends it
WAITS = {
    "grmpipe/envs/episode_slots.py::EpisodeSlots.book": "episodes give slots back by their own limits",
    "grmpipe/envs/process_group.py::wait_exited": "callers kill the process first, or wait with a limit",
    "grmpipe/envs/process_supervisor.py::wait_for": "SIGTERM: of the run, or of the kernel when the run has ended",
    "grmpipe/envs/sandbox/container_host.py::ContainerWorker.wait_ended": STAGE,
    "grmpipe/envs/sandbox/container_worker.py::wait_for": "the host kills the container",
    "grmpipe/envs/sandbox/env_host.py::open_env_host": DISK,
    "grmpipe/envs/sandbox/fork_server.py::main": "the end of the control socket, which the run holds",
    "grmpipe/envs/sandbox/fork_server.py::ForkServer._fork": "the end of the control socket, which the run holds",
    "grmpipe/envs/sandbox/isolation_report.py::try_isolation": DISK,
    "grmpipe/envs/sandbox/messages.py::body_of_next": STAGE,
    "grmpipe/envs/sandbox/process_host.py::ProcessHost.stop": "a limit, then SIGKILL",
    "grmpipe/envs/sandbox/process_host.py::remove_soon": "nothing waits for it",
    "grmpipe/envs/sandbox/remote_host.py::RemoteHost.process": STAGE,
    "grmpipe/envs/sandbox/supervisor.py::ask_to_map": "the host answers within MAPPING_S, or closes",
    "grmpipe/envs/sandbox/supervisor.py::map_users_when_asked": "settimeout(MAPPING_S)",
    "grmpipe/envs/sandbox/supervisor.py::_Supervisor._obey": "it is polled first",
    "grmpipe/envs/tools/mcp_tools.py::Connection._run": "close() sets it",
    "grmpipe/launching.py::StartedJudge.__aenter__": "the judge serves, or its start fails",
    "grmpipe/launching.py::StartedJudge.__aexit__": "the judge ends, as it was asked to",
    "grmpipe/launching.py::StartedJudge.serve": "its user leaves the block",
    "grmpipe/launching.py::StartedRun.steps": "the end of the run puts None",
    "grmpipe/launching.py::StartedRun._until_open": "the run opens its directory, or ends",
    "grmpipe/launching.py::StartedRun.stop": "the run ends, as it was asked to",
    "grmpipe/observe/budget_gate.py::BudgetGate.until_affordable": "requests in flight end by ANSWER_TIMEOUT_S",
    "grmpipe/run/build/start_envs.py::start_hosts": DISK,
    "grmpipe/run/features/cotrain/cotraining.py::CoTraining.run_alongside.judge_for_the_policy": "its flow",
    "grmpipe/run/features/cotrain/cotraining.py::StepPacer._until_moved": "either learner's next step, or its end",
    "grmpipe/run/features/watching_judges.py::WatchingJudges._watch": IDLE,
    "grmpipe/run/tasks/serve.py::ServingRun._change": DISK,
    "grmpipe/run/tasks/serve.py::ServingRun._reload": DISK,
    "grmpipe/run/tasks/serve.py::ServingRun._serve.work": "a signal ends the service",
    "grmpipe/run_dir/checkpoints.py::CheckpointWriter._publish": DISK,
    "grmpipe/train/critic/values.py::ValueCache.run": IDLE,
    "grmpipe/train/learner/batch_trainer.py::BatchTrainer._end_update": DISK,
    "grmpipe/train/learner/learner_ranks.py::LearnerRanks.still": "running calls of ranks end by their limits",
    "grmpipe/train/learner/learner_ranks.py::LearnerRanks._takes_memory": "the switch of slots, by its calls' limits",
    "grmpipe/viewer/server.py::serve": "Ctrl-C: it is a server",
    "grmpipe/viewer/server.py::Viewer._annotate": DISK,
    "grmpipe/viewer/server.py::Viewer._next": DISK,
    "grmpipe/viewer/server.py::Viewer._run_page": DISK,
    "grmpipe/viewer/server.py::Viewer._runs_page": DISK,
    "grmpipe/viewer/server.py::Viewer._compare_page": DISK,
    "grmpipe/workflows/worker_pool.py::Worker.answer": "the limit of the episode; it kills the worker",
    "models/chat/chat_template.py::off_loop_if_long": DISK,
    "models/engines/embedded/embedded_engine.py::EmbeddedEngine._die": "the queue isn't empty",
    "models/engines/sglang/server.py::SglangServer.__init__": "the thread that it starts sets it",
    "models/engines/sglang/server.py::_kill": "SIGKILL came before",
    "models/engines/sglang/sglang_engine.py::SglangGeneration._answer": DEADLINE,
    "models/engines/sglang/sglang_engine.py::SglangGeneration._way_clear": DEADLINE,
    "models/engines/sglang/sglang_engine.py::SglangGeneration._sample": DEADLINE,
    "models/engines/sglang/sglang_adapters.py::SglangAdapters.load": DISK,
    "models/engines/sglang/sglang_adapters.py::SglangAdapters.commit": DISK,
    "models/engines/sglang/sglang_weights.py::SglangWeights._load_file": DISK,
    "models/engines/sglang/sglang_weights.py::SglangWeights.commit": "the timeout of its link, for the sender's store",
    "models/engines/vllm/process.py::VllmProcess.ready": CALL,
    "models/engines/vllm/vllm_push.py::VllmPushes.load": DISK,
    "models/engines/vllm/vllm_generation.py::VllmGeneration._answer": "the commit of a push, or an abort; the caller's",
    "scheduler/clock.py::ActiveClock.sleep_until": "the pause that holds the clock, each by its own limit",
    "scheduler/clock.py::PauseGate.wait_until_free": "the holder of the gate, each by its own limit",
    "scheduler/processes/actors.py::ask_member": CALL,
    "scheduler/processes/actors.py::InProcessMember.start": LIMITED,
    "scheduler/processes/fork_client.py::is_forked": LIMITED,
    "scheduler/processes/fork_server.py::_end": "SIGKILL came before",
    "scheduler/processes/fork_server.py::ForkServer._answer": "our own client, which writes at once or is dead",
    "scheduler/processes/ray_actor.py::MemberHost._on_thread": CALL,
    "scheduler/processes/ray_cluster.py::RayCluster.start": LIMITED,
    "scheduler/processes/rpc.py::_read_frame": CALL,
    "scheduler/routing/members.py::RoleMembers.until_served": DEADLINE,
    "scheduler/routing/router.py::Router.until_idle": DEADLINE,
    "scheduler/slots/elastic.py::ElasticPool._until_settled": "the switch of the slot, by its calls' limits",
    "scheduler/slots/engine_replacement.py::RoleHealth.run": IDLE,
    "scheduler/slots/time_share.py::TimeShare.bring_current": "the learner's phase, by its calls' limits",
    "scheduler/weights/weight_sync.py::WeightSync.until_arrival": "the next push, or the replacement's own limit",
    "scheduler/work_queue.py::Stage._serve": IDLE,
}


def find_waits(tree: ast.AST) -> Iterator[str]:
    """The functions with a wait that has no limit in it."""

    def walk(node: ast.AST, place: tuple[str, ...], *, limited: bool) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            place, limited = (*place, node.name), False
        if isinstance(node, ast.With | ast.AsyncWith):
            limited |= any("timeout" in ast.unparse(item.context_expr) for item in node.items)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            limited |= called == "asyncio.wait_for"
            name, is_bare = called.rpartition(".")[2], not (node.args or node.keywords)
            waits = "." in called and (name in WITH_ANY or (is_bare and name in WITHOUT_ARGUMENTS))
            if waits and not limited and called not in NO_WAITS:
                yield ".".join(place)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, place, limited=limited)

    return walk(tree, (), limited=False)


def test_every_wait_without_a_limit_says_who_ends_it() -> None:
    found = {
        f"{path.relative_to(ROOT).as_posix()}::{place}"
        for package in ("grmpipe", "models", "scheduler")
        for path in (ROOT / package).rglob("*.py")
        for place in find_waits(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == WAITS.keys()


def test_waits_are_found_unless_they_have_a_limit() -> None:
    source = """
class Owner:
    async def waits(self):
        await self.event.wait()

    async def reads(self):
        return [await pipe.readexactly(size) for size in sizes]

    async def has_a_limit(self):
        async with asyncio.timeout(5):
            await self.event.wait()
        await asyncio.wait_for(self.queue.get(), 5)
        self.process.wait(5)
"""
    assert list(find_waits(ast.parse(source))) == ["Owner.waits", "Owner.reads"]
