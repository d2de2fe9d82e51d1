"""Environments in containers. The docker here notes its arguments, and runs the command on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from grmpipe.config.env import EnvConfig
from grmpipe.config.isolation import IsolationConfig
from grmpipe.envs.env import Action, EnvFault, Episode
from grmpipe.envs.limited_env import StageLimits
from grmpipe.envs.sandbox import container_host
from grmpipe.envs.sandbox.container_host import ContainerHost, command
from grmpipe.envs.sandbox.crash_cleanup import FOLDER, CleanupRecord, clear, locate_record, record_host, sweep
from grmpipe.envs.sandbox.env_host import open_env_host
from grmpipe.types import Prompt

sys.path.append(str(Path(__file__).parent))
from adversary import PRELUDE
from attacks import BY_FILTER, is_refused, list_attacks, programs

EPISODE = Episode(prompt=Prompt(prompt_id="p", messages=()))
ISOLATION = IsolationConfig(kind="container", image="shop:1", memory_mb=300, max_processes=9, pass_env=["SHOP_KEY"])
CONFIG = EnvConfig(kind="custom", target="adversary.Adversary", isolation=ISOLATION, step_s=2, close_s=1)
LIMITS = StageLimits(boot_s=10, step_s=0.5, close_s=0.3, max_observation_chars=1000)
# `run` notes its arguments and becomes what comes after the image, without root's rights (--cap-drop=ALL); `ps` names
# what was noted; `rm` ends it.
FAKE = """#!{python}
import json, os, pathlib, signal, sys
home = pathlib.Path({home!r})
word, *rest = sys.argv[1:]
with (home / "calls").open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if word == "run":
    name = next(each[7:] for each in rest if each.startswith("--name="))
    (home / name).write_text(str(os.getpid()))
    os.environ["PYTHONPATH"] = {path!r}
    inside = [*{without_rights!r}, sys.executable, *rest[rest.index("shop:1") + 2 :]]
    os.execvp(inside[0], inside)
if word == "ps":
    print(*(each.name for each in home.glob("grmpipe-*")))
if word == "rm" and (home / "hangs").exists():
    signal.pause()
if word == "rm":
    for name in rest[1:]:
        os.kill(int((home / name).read_text()), signal.SIGKILL)
        (home / name).unlink()
"""


WITHOUT_RIGHTS = ("setpriv", "--inh-caps=-all", "--bounding-set=-all")
# Beside those on its environment; the first process of the container is `first`.
FIRST = f"{PRELUDE}first = int(open(f'/proc/{{env}}/stat').read().split()[3])\n"
ON_THE_FIRST_PROCESS = {
    "opens its descriptors": FIRST + "print(os.open(f'/proc/{first}/fd/1', os.O_WRONLY))",
    "debugs it": FIRST + "assert not libc.ptrace(16, first, 0, 0); print('attached')",
    "reads what the run asks": "import os; print(os.read(0, 1000).decode())",
}


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a fake docker notes what it is asked for."""
    folder = tmp_path / "bin"
    folder.mkdir()
    has_rights = os.geteuid() == 0 and shutil.which("setpriv") is not None
    script = FAKE.format(
        python=sys.executable,
        home=str(folder),
        path=os.pathsep.join(filter(None, sys.path)),
        without_rights=WITHOUT_RIGHTS if has_rights else (),
    )
    (folder / "docker").write_text(script, encoding="utf-8")
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def left(docker: Path) -> Iterator[CleanupRecord]:
    """What a host of containers notes."""
    left = record_host(docker.parent, "docker")
    yield left
    clear(docker.parent, left)


def calls(docker: Path, word: str) -> list[list[str]]:
    noted = [json.loads(line) for line in (docker / "calls").read_text(encoding="utf-8").splitlines()]
    return [call for call in noted if call[0] == word]


def test_an_episode_lives_in_a_container_of_its_own_with_its_limits_and_label(docker: Path, tmp_path: Path) -> None:
    async def play() -> str:
        async with open_env_host(CONFIG, run_dir=tmp_path / "run") as host:
            texts = []
            for _ in range(2):
                env = host.env()
                await env.open(EPISODE)
                observation = await env.step(Action(text="ping hello"))
                await env.close()
                texts.append(observation.messages[0].content)
            assert (host.counts.opened, host.counts.closed) == (2, 2)
        return " ".join(texts)

    assert asyncio.run(play()) == "hello hello"
    first, second = calls(docker, "run")
    for option in ("--network=none", "--memory=300m", "--pids-limit=9", "--read-only", "--rm", "--env=SHOP_KEY"):
        assert option in first
    (label,) = (each for each in first if each.startswith("--label=grmpipe.run="))
    names = {each for call in (first, second) for each in call if each.startswith("--name=")}
    assert len(names) == 2 and all(label.rpartition("=")[2] in name for name in names)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's calls")
def test_attacks_of_a_program_in_a_container_are_refused(docker: Path, tmp_path: Path) -> None:
    async def play() -> dict[str, str]:
        async with open_env_host(CONFIG, run_dir=tmp_path / "run") as host:
            env, said = host.env(), {}
            await env.open(EPISODE)
            for attack, code in {"works": "print('works')", **codes}.items():
                answer = await env.step(Action(text=f"program {code}"))
                said[attack] = answer.messages[0].content if answer.messages else str(answer.faults)
                if answer.done:
                    break
            await env.close()
            return said

    with programs(os.geteuid()) as all_codes:
        held = [f"{aim}: {attack}" for aim, attack in list_attacks(BY_FILTER)]
        codes = {attack: all_codes[attack] for attack in held} | ON_THE_FIRST_PROCESS
        said = asyncio.run(play())
    assert said.pop("works") == "works"
    assert {attack: said.get(attack, "") for attack in codes if not is_refused(said.get(attack, ""))} == {}


def test_a_container_beyond_its_step_limit_is_removed_by_name(docker: Path, left: CleanupRecord) -> None:
    async def play() -> None:
        host = ContainerHost(CONFIG, left, LIMITS)
        env = host.env()
        await env.open(EPISODE)
        assert (await env.step(Action(text="be_deaf"))).faults == ("limit",)
        await env.close()
        assert (host.counts.opened, host.counts.killed) == (1, 1)

    asyncio.run(play())
    (run,), (remove,) = calls(docker, "run"), calls(docker, "rm")
    assert remove[:2] == ["rm", "--force"] and f"--name={remove[2]}" in run


def test_a_runtime_that_never_removes_a_container_is_not_waited_for(
    docker: Path, left: CleanupRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container_host, "REMOVAL_S", 0.3)

    async def play() -> None:
        host = ContainerHost(CONFIG, left, LIMITS)
        worker = await host.take_worker()
        (docker / "hangs").touch()
        worker.kill()
        async with asyncio.timeout(10):
            await worker.wait_ended()
        worker.release()
        (docker / "hangs").unlink()

    asyncio.run(play())
    assert len(calls(docker, "rm")) == 1


def test_an_image_that_cannot_make_the_environment_is_the_environments_fault(left: CleanupRecord) -> None:
    async def play() -> None:
        config = replace(CONFIG, target="adversary.Missing")
        env = ContainerHost(config, left, LIMITS).env()
        try:
            await env.open(EPISODE)
        finally:
            await env.close()

    with pytest.raises(EnvFault, match="has no Missing") as fault:
        asyncio.run(play())
    assert fault.value.cause == "boot"


def test_containers_of_a_run_that_was_killed_are_found_by_their_label(docker: Path, left: CleanupRecord) -> None:
    run_dir = docker.parent
    started_before = msgspec.structs.replace(left, started="1")  # its process id belongs to another process now
    locate_record(run_dir, left).write_bytes(msgspec.json.encode(started_before))
    with subprocess.Popen(["sleep", "600"]) as container:
        (docker / f"grmpipe-{left.token}-1").write_text(str(container.pid), encoding="ascii")
        assert sweep(run_dir) == 1
        assert container.wait(5) == -9
    assert f"label=grmpipe.run={left.token}" in calls(docker, "ps")[0]
    assert not list((run_dir / FOLDER).iterdir()) and not Path(left.folder).exists()


@pytest.mark.parametrize("runtime", ["podman", "apptainer"])
def test_every_runtime_is_given_the_same_bounds(runtime: str) -> None:
    typed = command(replace(ISOLATION, runtime=runtime, read=["/usr/share"]), "token", "name")
    assert typed[0] == runtime and "--pids-limit=9" in typed and "--network=none" in typed
    assert any(each.endswith("/usr/share:/usr/share:ro") for each in typed)
    assert typed[typed.index("shop:1") + 1] == "python"
    assert "--network=none" not in command(replace(ISOLATION, runtime=runtime, network=True), "token", "name")


def test_a_runtime_that_does_not_answer_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start() -> None:
        async with open_env_host(CONFIG, run_dir=tmp_path):
            pass

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"isolation\.runtime: docker does not answer"):
        asyncio.run(start())
