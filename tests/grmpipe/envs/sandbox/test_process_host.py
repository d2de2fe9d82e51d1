"""Environments in processes: what a policy's program can't do, who is at fault, and that nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from grmpipe.config.env import EnvConfig
from grmpipe.config.isolation import IsolationConfig
from grmpipe.envs.env import Action, EnvFault, Episode, Observation, Opening, PolicyFault
from grmpipe.envs.limited_env import StageLimits
from grmpipe.envs.sandbox.crash_cleanup import FOLDER, clear, find_processes, record_host, sweep
from grmpipe.envs.sandbox.env_host import open_env_host
from grmpipe.envs.sandbox.hosted_env import HostedEnv
from grmpipe.envs.sandbox.isolation_report import isolation_report
from grmpipe.envs.sandbox.process_host import ProcessHost, fork, make_bounds
from grmpipe.models.types import Message, ToolCall
from grmpipe.types import Prompt

sys.path.append(str(Path(__file__).parent))  # the processes of environments import adversary.py by its name

from adversary import DAEMON

T = TypeVar("T")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are confined on Linux only")
LIMITS = StageLimits(boot_s=20, step_s=20, close_s=20, max_observation_chars=8000)
SHORT = StageLimits(boot_s=20, step_s=0.4, close_s=0.2, max_observation_chars=8000)
ISOLATION = IsolationConfig(kind="process", memory_mb=256, cpu_s=20, max_processes=8, file_mb=4)
NAMESPACES = (
    "bubblewrap",
    "user namespace",
    "process namespace",
    "IPC namespace",
    "network namespace",
    "mount namespace",
)


def config_of(isolation: IsolationConfig = ISOLATION, **options: object) -> EnvConfig:
    return EnvConfig(
        kind="custom",
        target="adversary.Adversary",
        options=options,
        isolation=isolation,
        policy_errors=["adversary.TooManyMoves"],
    )


def episode(sibling: int = 0) -> Episode:
    return Episode(prompt=Prompt(prompt_id="p", messages=()), group_id="g", sibling=sibling, attempt=3)


class Host:
    """A host of adversaries on a loop of its own, which lives through several tests."""

    def __init__(
        self,
        run_dir: Path,
        without: tuple[str, ...] = (),
        config: EnvConfig | None = None,
        limits: StageLimits = LIMITS,
    ) -> None:
        self.runner = asyncio.Runner()
        self.run_dir = run_dir
        self.left = record_host(run_dir)
        self.host = ProcessHost(config or config_of(), self.left, limits, without)
        self.run(self.host.start())
        self.idle = len(list(find_processes(self.left.token)))  # the fork server, and bubblewrap around it

    def run(self, work: Coroutine[object, object, T]) -> T:
        return self.runner.run(work)

    def stop(self) -> None:
        self.run(self.host.stop())
        self.runner.close()
        clear(self.run_dir, self.left)

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    async def working(self, limits: StageLimits | None = None) -> HostedEnv:
        kept, self.host.limits = self.host.limits, limits or self.host.limits
        env = self.host.env()
        self.host.limits = kept
        await env.open(episode())
        return env

    def step(
        self, text: str, limits: StageLimits | None = None, then: Callable[[], object] = lambda: None
    ) -> Observation:
        """The answer to one step, in a worker of its own. Meanwhile a neighbour works, and another is working."""

        async def both() -> Observation:
            env, neighbour = await self.working(limits), await self.working()
            try:
                works = asyncio.create_task(self._works(neighbour))
                try:
                    answer = await env.step(Action(text=text))
                finally:
                    await works
                then()
            finally:
                await env.close()
                await neighbour.close()
            return answer

        try:
            return self.run(both())
        finally:
            wait_until(lambda: len(list(find_processes(self.left.token))) == self.idle)

    async def _works(self, neighbour: HostedEnv) -> None:
        for turn in range(3):
            answer = await neighbour.step(Action(text=f"ping {turn}"))
            assert answer.messages[0].content == str(turn)
            await asyncio.sleep(0.03)
        await (await self.working()).close()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    host = Host(tmp_path_factory.mktemp("run"))
    yield host
    host.stop()


@pytest.fixture(scope="module")
def bare_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """As on a kernel without namespaces."""
    host = Host(tmp_path_factory.mktemp("bare"), NAMESPACES)
    yield host
    host.stop()


@pytest.fixture(scope="module")
def missing() -> set[str]:
    return {each.part for each in isolation_report(ISOLATION).missing}


@pytest.fixture
def needs(missing: set[str]) -> Callable[..., None]:
    def check(*parts: str) -> None:
        lacks = missing & {*parts, "process"}
        if lacks:
            pytest.skip(f"this kernel lacks: {', '.join(sorted(lacks))}")

    return check


def running(name: str) -> list[int]:
    """Processes of this machine that have a word in their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and name.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def wait_until(holds: Callable[[], bool], limit_s: float = 5.0) -> None:
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def text_of(observation: Observation) -> str:
    return observation.messages[0].content


@pytest.mark.parametrize("harm", ["fork_bomb", "endless", "be_deaf"])
def test_a_program_that_never_ends_is_the_policys_fault_and_ends_the_episode(host: Host, harm: str) -> None:
    answer = host.step(harm, SHORT)
    assert answer.done and answer.faults == ("limit",) and not answer.messages


def test_no_more_processes_than_are_allowed_are_started(host: Host, needs: Callable[..., None]) -> None:
    needs("process count")
    assert text_of(host.step("children 8")).startswith("refused")
    assert text_of(host.step("children 7")) == "started"


def test_too_much_memory_is_the_policys_fault_and_ends_the_episode(host: Host) -> None:
    assert host.step("hog").faults == ("limit",)


@pytest.mark.parametrize("kind", ["host", "bare_host"])
def test_forks_that_hold_too_much_memory_together_end_the_episode(
    request: pytest.FixtureRequest, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "grmpipe.envs.sandbox.hosted_env")
    answer = request.getfixturevalue(kind).step("hold_in_forks 6")
    assert answer.done and answer.faults == ("limit",)
    assert "256 MB of memory of all its processes (env.isolation.memory_mb)" in caplog.text


def test_memory_within_the_bound_and_memory_that_programs_share_end_no_episode(host: Host) -> None:
    assert text_of(host.step("share_in_programs 5")) == "held"
    assert text_of(host.step("hold_in_forks 2")) == "held"


def test_too_much_memory_in_the_opening_is_the_environments_fault(tmp_path: Path) -> None:
    with Host(tmp_path, config=config_of(boot="hold_in_forks 6")) as host, pytest.raises(EnvFault) as fault:
        host.run(host.working())
    assert fault.value.cause == "died" and "limit of 256 MB of memory of all its processes" in str(fault.value)


def test_too_much_cpu_time_is_the_policys_fault(tmp_path: Path) -> None:
    with Host(tmp_path, config=config_of(replace(ISOLATION, cpu_s=1)), limits=replace(LIMITS, step_s=60)) as host:
        begun_s = time.monotonic()
        assert host.step("endless").faults == ("limit",)
        assert time.monotonic() - begun_s < 30


@pytest.mark.parametrize(
    ("harm", "part"),
    [
        ("careless_fill", "folder of bounded size"),
        ("use_up_inodes", "folder of bounded size"),
        ("careless_children 64", "process count"),
        ("threads", "process count"),
    ],
)
def test_a_limit_that_the_environment_does_not_expect_is_the_policys_fault_too(
    host: Host, harm: str, part: str, needs: Callable[..., None]
) -> None:
    needs(part)
    answer = host.step(f"careless_{harm.removeprefix('careless_')}")
    assert answer.done and answer.faults == ("limit",)


@pytest.mark.parametrize("name", ["INT", "HUP"])
def test_a_signal_that_the_policys_program_sends_discards_no_episode(
    host: Host, bare_host: Host, name: str, needs: Callable[..., None]
) -> None:
    assert bare_host.step(f"signal_parent {name}").faults == ("limit",), "also if the run ignores the signal"
    needs("process namespace")
    assert text_of(host.step(f"signal_parent {name}")) == "sent", "the first process of a namespace doesn't get it"


def test_an_end_that_the_policys_program_asked_for_in_an_earlier_step_is_its_fault(host: Host) -> None:
    async def work() -> Observation:
        env = await host.working()
        await env.step(Action(text="signal_parent TERM"))
        try:
            return await env.step(Action(text="ping x"))
        finally:
            await env.close()

    assert host.run(work()).faults == ("limit",)


@pytest.mark.parametrize(
    ("doing", "kind"), [("take_too_many_turns", "MaxTurnsExceeded"), ("move_too_often", "TooManyMoves")]
)
def test_an_exception_that_is_the_policys_doing_ends_an_isolated_episode(host: Host, doing: str, kind: str) -> None:
    with pytest.raises(PolicyFault) as fault:
        host.step(doing)
    assert (fault.value.kind, fault.value.ends) == (kind, True)


def test_there_is_no_network_but_the_workers_own(host: Host, needs: Callable[..., None]) -> None:
    needs("network namespace")
    assert text_of(host.step("connect")).startswith("refused")
    assert text_of(host.step("serve_locally")) == "connected"


@pytest.mark.parametrize("kind", ["host", "bare_host"])
@pytest.mark.parametrize("harm", ["read", "write"])
def test_files_outside_the_list_can_not_be_read_or_written(
    request: pytest.FixtureRequest, kind: str, harm: str, tmp_path: Path, needs: Callable[..., None]
) -> None:
    needs("Landlock")
    (tmp_path / "secret").write_text("secret", encoding="ascii")
    tmp_path.chmod(0o777)
    (tmp_path / "secret").chmod(0o666)
    for path in (tmp_path / "secret", Path("/etc/shadow")):
        assert text_of(request.getfixturevalue(kind).step(f"{harm} {path}")).startswith("refused")
    assert (tmp_path / "secret").read_text(encoding="ascii") == "secret"


def test_read_only_mounts_forbid_the_changes_that_landlock_allows(tmp_path: Path, needs: Callable[..., None]) -> None:
    needs("read-only mounts")
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o666)
    with Host(tmp_path / "run", ("bubblewrap",)) as host:  # in which the file isn't even there
        assert "Read-only file system" in text_of(host.step(f"age {tmp_path / 'file'}"))


@pytest.mark.parametrize("harm", ["write big", "fill"])
def test_a_worker_writes_no_more_than_its_folder_holds(host: Host, harm: str, needs: Callable[..., None]) -> None:
    needs("folder of bounded size")
    assert text_of(host.step(harm)) == "written" if "big" in harm else text_of(host.step(harm)).startswith("refused")


def test_the_device_of_zeros_can_be_read(host: Host, needs: Callable[..., None]) -> None:
    needs("zeros that take no memory")
    assert text_of(host.step("program print(open('/dev/zero', 'rb').read(3))")) == repr(bytes(3))


def test_a_worker_gets_no_environment_variable_that_is_not_named(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hush-5b1e7f")  # no word that a folder on the path may have in its name
    environ = text_of(host.step("environ"))
    assert "hush-5b1e7f" not in environ and "WANDB_API_KEY" not in environ


def test_a_hundred_megabytes_of_output_leave_their_end_in_the_fault(host: Host) -> None:
    with pytest.raises(EnvFault, match="exit code 7") as fault:
        host.step("output")
    assert fault.value.cause == "died" and 1000 < len(str(fault.value)) < 10_000


def test_a_hundred_megabytes_of_observation_lose_their_middle(host: Host) -> None:
    text = text_of(host.step("speak"))
    assert len(text) < 300_000 and "99800000 characters left out" in text


def test_bytes_that_are_no_frame_are_a_fault_of_the_environment(host: Host) -> None:
    with pytest.raises(EnvFault) as fault:
        host.step("garbage")
    assert fault.value.cause == "protocol"


def test_a_program_can_signal_no_process_outside_of_its_worker(host: Host) -> None:
    host.step("kill_all")


@pytest.mark.parametrize("kind", ["host", "bare_host"])
def test_a_daemon_ends_with_its_worker(request: pytest.FixtureRequest, kind: str) -> None:
    def runs() -> None:
        wait_until(lambda: bool(running(DAEMON)))

    request.getfixturevalue(kind).step("daemon", then=runs)
    assert not running(DAEMON)


def test_faults_keep_their_kind_and_text(host: Host) -> None:
    with pytest.raises(PolicyFault, match="no such shop") as mistake:
        host.step("policy_fault")
    assert mistake.value.kind == "arguments"
    with pytest.raises(EnvFault, match="the shop is shut") as fault:
        host.step("env_fault")
    assert fault.value.cause == "unreachable"
    with pytest.raises(EnvFault, match="a bug of the environment") as bug:
        host.step("bug")
    with pytest.raises(EnvFault, match=r"Adversary\.step \(.*\) raised SystemExit: 3 \(.*adversary\.py:\d+\)"):
        host.step("leave")
    assert bug.value.cause == "broken" and "Traceback" in str(bug.value.__cause__)


def test_a_file_that_the_environment_may_not_read_is_a_fault_with_the_way_out(host: Host) -> None:
    with pytest.raises(EnvFault, match=r"No such file or directory: '/no/levels'.*type env\.isolation\.read="):
        host.step("careless_read /no/levels")


def test_workers_opened_are_closed_or_killed(host: Host) -> None:
    host.step("ping x")
    workers = host.host.counts
    assert workers.opened == workers.closed + workers.killed and workers.closed and workers.killed
    assert not list(Path(host.left.folder).iterdir())


def test_an_opening_that_takes_too_long_is_the_environments_fault(tmp_path: Path) -> None:
    with Host(tmp_path, config=config_of(boot="endless"), limits=replace(LIMITS, boot_s=0.3)) as host:
        with pytest.raises(EnvFault, match=r"open did not return in 0.3 s") as fault:
            host.run(host.working())
        assert fault.value.cause == "timeout" and host.host.counts.killed == 1


def test_a_process_that_ends_in_its_opening_is_the_environments_fault(tmp_path: Path) -> None:
    with Host(tmp_path, config=config_of(boot="output")) as host, pytest.raises(EnvFault, match="xxx") as fault:
        host.run(host.working())
    assert fault.value.cause == "died"


def test_a_host_that_dies_is_started_again_and_its_workers_are_faults(tmp_path: Path) -> None:
    with Host(tmp_path) as host:

        async def work() -> None:
            env = await host.working()
            for process in find_processes(host.left.token):
                os.kill(process, signal.SIGKILL)
            with pytest.raises(EnvFault) as fault:
                await env.step(Action(text="ping"))
            assert fault.value.cause == "died"
            wait_until(lambda: not list(find_processes(host.left.token)))
            again = await host.working()
            assert text_of(await again.step(Action(text="ping x"))) == "x"
            await again.close()

        host.run(work())
        assert (host.host.counts.closed, host.host.counts.killed) == (1, 1)


def test_a_busy_fork_server_is_waited_for() -> None:
    async def ask() -> int:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        theirs.setblocking(False)
        bounds = make_bounds(ISOLATION, Path("folder"), ())
        taken = 0
        with ours, theirs:
            asked = [asyncio.create_task(fork(ours, bounds, theirs)) for _ in range(300)]
            await asyncio.sleep(0.01)
            assert not all(each.done() for each in asked), "the kernel keeps as many as it likes"
            while taken < 300:
                try:
                    _, (descriptor,), _, _ = socket.recv_fds(theirs, 2**17, 1)
                    os.close(descriptor)
                    taken += 1
                except BlockingIOError:
                    await asyncio.sleep(0.001)
            await asyncio.gather(*asked)
        return taken

    assert asyncio.run(asyncio.wait_for(ask(), 10)) == 300


def test_a_kernel_without_namespaces_is_reported_and_still_counts_processes(bare_host: Host) -> None:
    missing = {each.part for each in bare_host.run(bare_host.host.find_missing())}
    assert {*missing, "bubblewrap"} >= set(NAMESPACES) and ("process count" in missing) == (os.getuid() != 0)


def test_a_worker_that_never_answers_fails_the_start_by_its_limit(
    bare_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = bare_host.host.take_worker

    async def take_silent() -> object:
        worker = await take()
        monkeypatch.setattr(worker, "reader", asyncio.StreamReader())
        return worker

    monkeypatch.setattr(bare_host.host, "take_worker", take_silent)
    monkeypatch.setattr(bare_host.host, "limits", replace(LIMITS, boot_s=0.2))
    with pytest.raises(EnvFault, match=r"wasn't confined within 0\.2 s; type env\.boot_s="):
        bare_host.run(asyncio.wait_for(bare_host.host.find_missing(), 10))


@pytest.mark.bubblewrap
def test_bubblewrap_takes_no_part_of_a_workers_isolation_away(host: Host, tmp_path: Path) -> None:
    with Host(tmp_path, ("bubblewrap",)) as own:
        lacking = {each.part for each in own.run(own.host.find_missing())} - {"bubblewrap"}
    assert {each.part for each in host.run(host.host.find_missing())} <= lacking


def test_workers_that_are_open_at_the_end_are_killed(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.run(host.working())
    host.stop()
    assert (host.host.counts.opened, host.host.counts.killed) == (1, 1)
    assert not list(find_processes(host.left.token)) and not Path(host.left.folder).exists()


def test_a_step_that_is_cancelled_leaves_a_worker_that_can_be_closed(host: Host) -> None:
    async def work() -> None:
        env = await host.working(SHORT)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.step(Action(text="endless")), 0.05)
        await env.close()

    before = host.host.counts.killed
    host.run(work())
    assert host.host.counts.killed == before + 1


def test_tools_from_functions_run_in_a_process_and_are_described_as_in_the_run_itself(tmp_path: Path) -> None:
    async def opened(isolation: IsolationConfig) -> tuple[Opening, Observation]:
        config = EnvConfig(kind="tools", functions="grmpipe.tiny.tools", isolation=isolation)
        async with open_env_host(config, run_dir=tmp_path) as host:
            env = host.env()
            prompt = Prompt(prompt_id="p", messages=(Message(role="user", content="2 + 2?"),))
            opening = await env.open(Episode(prompt=prompt))
            call = ToolCall(name=opening.tools[0].name, arguments={"wrong": [1, None, {"a": 0.5}]}, call_id="c")
            observation = await env.step(Action(text="", tool_calls=(call,)))
            await env.close()
            assert host.counts.opened == host.counts.closed == 1
        return replace(opening, messages=tuple(opening.messages), tools=tuple(opening.tools)), observation

    assert asyncio.run(opened(ISOLATION)) == asyncio.run(opened(IsolationConfig()))


def test_a_class_that_cannot_be_made_is_refused_at_the_start(tmp_path: Path) -> None:
    async def start() -> None:
        config = replace(config_of(), target="adversary.Missing")
        async with open_env_host(config, run_dir=tmp_path):
            pass

    with pytest.raises(ValueError, match=r"target: the module adversary has no Missing"):
        asyncio.run(start())
    assert not list((tmp_path / FOLDER).iterdir())


DRIVER = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = {path!r}
from dataclasses import replace
from test_process_host import config_of, episode, open_env_host
from grmpipe.envs.env import Action

async def main():
    config = replace(config_of(), step_s=60, close_s=60)
    async with open_env_host(config, run_dir=Path(sys.argv[1])) as host:
        envs = [host.env() for _ in range(3)]
        for env in envs:
            await env.open(episode())
        await envs[0].step(Action(text="daemon"))
        busy = [asyncio.create_task(env.step(Action(text=text))) for env, text in zip(envs, ("be_deaf", "endless"))]
        await asyncio.sleep(0.1)
        print("ready", flush=True)
        await asyncio.gather(*busy)

asyncio.run(main())
"""


def test_nothing_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    script = DRIVER.format(path=[str(Path(__file__).parent), *sys.path])
    driver = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None and driver.stdout.readline() == "ready\n"
    (token,) = (file.stem for file in (tmp_path / FOLDER).iterdir())
    assert len(list(find_processes(token))) > 6 and running(DAEMON)
    assert sweep(tmp_path) == 0, "a run that lives is left alone"
    driver.kill()
    wait_until(lambda: not list(find_processes(token)) and not running(DAEMON))
    wait_until(lambda: sweep(tmp_path) == 1)  # also before its parent has asked for its end
    driver.wait()
    driver.stdout.close()
    assert not list((tmp_path / FOLDER).iterdir())
    assert not list(Path(tempfile.gettempdir()).glob(f"grmpipe-{token}*"))
