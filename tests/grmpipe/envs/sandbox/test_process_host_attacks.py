"""What a program of the policy tries in a worker fails: as the user at hand, as another one, and without namespaces."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from grmpipe.config.env import EnvConfig
from grmpipe.config.isolation import IsolationConfig
from grmpipe.envs.env import Action, Episode
from grmpipe.envs.sandbox.crash_cleanup import clear, record_host
from grmpipe.envs.sandbox.isolation_report import LIMITS
from grmpipe.envs.sandbox.process_host import ProcessHost
from grmpipe.types import Prompt

sys.path.append(str(Path(__file__).parent))  # the processes of environments import adversary.py by its name
from adversary import PRELUDE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are confined on Linux only")
ISOLATION = IsolationConfig(kind="process", memory_mb=256, cpu_s=20, max_processes=16, file_mb=4)
NAMESPACES = (
    "bubblewrap",
    "user namespace",
    "process namespace",
    "IPC namespace",
    "network namespace",
    "mount namespace",
)
NOBODY = 65534
# What a program prints only if the attack works. PATH and NAME: sockets on which this test listens.
ATTACKS = {
    "takes descriptors of the environment": "print('took', call(438, os.pidfd_open(env), 3, 0))",
    "opens descriptors of the environment": "print(os.open(f'/proc/{env}/fd/1', os.O_RDONLY))",
    "writes memory of the environment": "print(open(f'/proc/{env}/mem', 'r+b'))",
    "reads memory of the environment": """
        there = ctypes.create_string_buffer(16)
        print('read', call(310, env, there, 1, there, 1, 0))""",
    "debugs the environment": "assert not libc.ptrace(16, env, 0, 0); print('attached')",
    "overwrites memory of the environment": """
        there = ctypes.create_string_buffer(16)
        print('wrote', call(311, env, there, 1, there, 1, 0))""",
    "keeps files where none are counted": """
        for folder in ('/dev/shm', '/tmp', '/run', '/var/tmp', '/dev', '/dev/mqueue'):
            try:
                print(open(folder + '/kept', 'w'))
            except OSError:
                pass""",
    "connects to a socket by its path": "socket.socket(socket.AF_UNIX).connect(PATH); print('connected')",
    "connects to a socket by its name": "socket.socket(socket.AF_UNIX).connect(NAME); print('connected')",
    "reaches the host of a virtual machine": "print(socket.socket(socket.AF_VSOCK))",
    "keeps memory in a file without a name": "print(os.write(os.memfd_create(''), bytes(2**20)))",
    "shares memory": "print(call(29, 0, ctypes.c_size_t(2**29), 0o1600))",
    "queues messages": "print(call(68, 0, 0o1600))",
    "takes semaphores": "print(call(64, 0, 32000, 0o1600))",
    "keeps pages that it unmaps": "import mmap; print(mmap.mmap(-1, 2**20))",
    "keeps pages of the device of zeros": "import mmap; print(mmap.mmap(os.open('/dev/zero', 2), 2**20))",
    "keeps pages in a pipe": "print(call(278, os.pipe()[1], None, 0, 0))",
    "mounts memory": """
        assert not libc.unshare(0x10020000)
        assert not libc.mount(b'tmpfs', os.getcwd().encode(), b'tmpfs', 0, None)
        print('mounted')""",
    "asks the kernel by a ring": "print(call(425, 8, ctypes.create_string_buffer(256)))",
    "lists folders of the machine": "print(os.listdir('/var'))",
    "reads keys": "print(call(250, 0, -3, 0))",
}


# Another user may have no way to this environment's Python, but to the system's, with the same packages.
PYTHONS = (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}")
PATHS = os.pathsep.join(filter(None, sys.path))


def starts(python: list[str]) -> bool:
    done = subprocess.run(
        [*python, "-c", "import msgspec, grmpipe"],
        env={**os.environ, "PYTHONPATH": PATHS},
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


def is_refused(text: str) -> bool:
    return text.startswith("refused")


async def attacked(run_dir: Path, without: tuple[str, ...], programs: Mapping[str, str]) -> dict[str, str]:
    """The answers to all attacks in one worker, which must then still be able to work."""
    config = EnvConfig(kind="custom", target="adversary.Adversary", isolation=ISOLATION)
    left = record_host(run_dir)
    host = ProcessHost(config, left, LIMITS, without)
    try:
        await host.start()
        env = host.env()
        await env.open(Episode(prompt=Prompt(prompt_id="p", messages=()), group_id="g", sibling=0, attempt=0))
        answers = {}
        for name, code in programs.items():
            answer = await env.step(Action(text=f"program {PRELUDE}{code}"))
            answers[name] = answer.messages[0].content
        works = "import asyncio; print(asyncio.run(asyncio.sleep(0, 'works')))"
        answers["works"] = (await env.step(Action(text=f"program {works}"))).messages[0].content
        held = await env.step(Action(text="hold_in_programs 10"))
        answers["ten processes of 100 MB"] = held.messages[0].content if held.messages else str(held.faults)
        await env.close()
        return answers
    finally:
        await host.stop()
        clear(run_dir, left)


def main(run_dir: str, without: str, programs: str) -> None:
    print(json.dumps(asyncio.run(attacked(Path(run_dir), tuple(json.loads(without)), json.loads(programs)))))


@pytest.fixture(scope="module")
def listening() -> Iterator[tuple[str, str]]:
    """The path and the name of sockets to which every user may connect."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as by_path, socket.socket(socket.AF_UNIX) as by_name:
        path, name = str(folder / "daemon.sock"), f"\0{folder.name}"
        by_path.bind(path)
        Path(path).chmod(0o777)
        by_name.bind(name)
        by_path.listen()
        by_name.listen()
        yield path, name
    shutil.rmtree(folder)


KINDS: dict[str, tuple[str, ...]] = {"bubblewrap": (), "own": ("bubblewrap",), "own, no namespaces": NAMESPACES}
MARKS = {"bubblewrap": [pytest.mark.bubblewrap], "own, no namespaces": [pytest.mark.long]}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((kind, user), id=f"{kind}, {user}", marks=MARKS.get(kind, []))
        for kind in KINDS
        for user in ("this user", "another user")
    ],
)
def answers(request: pytest.FixtureRequest, listening: tuple[str, str]) -> Iterator[dict[str, str]]:
    """What each attack said in a kind of isolation, in a run of this user or, started as root, of another one."""
    kind, user = request.param
    prefix: list[str] = []
    python: str | None = sys.executable
    run_dir = Path(tempfile.mkdtemp())
    if user == "another user":
        if os.geteuid() != 0 or shutil.which("setpriv") is None:
            pytest.skip("another user needs root and setpriv")
        prefix = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
        os.chown(run_dir, NOBODY, NOBODY)
        python = next((one for one in PYTHONS if starts([*prefix, "env", one])), None)
        if python is None:
            pytest.skip("another user may not read this installation")
    path, name = listening
    programs = {
        attack: f"PATH, NAME = {path!r}, {name!r}\n{code.replace(chr(10) + '        ', chr(10))}"
        for attack, code in ATTACKS.items()
    }
    done = subprocess.run(
        [*prefix, python, __file__, str(run_dir), json.dumps(KINDS[kind]), json.dumps(programs)],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": PATHS},
    )  # fmt: skip
    shutil.rmtree(run_dir, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    yield json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_of_a_program_are_refused(answers: dict[str, str], attack: str) -> None:
    assert is_refused(answers[attack]), answers[attack]


def test_a_program_that_harms_nothing_works(answers: dict[str, str]) -> None:
    assert answers["works"] == "works"


def test_processes_that_hold_too_much_together_end_the_episode_as_the_policys_fault(answers: dict[str, str]) -> None:
    assert answers["ten processes of 100 MB"] == "('limit',)"


if __name__ == "__main__":
    main(*sys.argv[1:])
