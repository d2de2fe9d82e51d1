"""What a program of the policy tries in a worker fails: as the user at hand, as another one, and without namespaces."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
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
from attacks import ATTACKS, BY_FILTER, DATA, HUSH, is_refused, lay_out, list_attacks, programs

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
KINDS: dict[str, tuple[str, ...]] = {"bubblewrap": (), "own": ("bubblewrap",), "own, no namespaces": NAMESPACES}
MARKS = {"bubblewrap": [pytest.mark.bubblewrap], "own, no namespaces": [pytest.mark.long]}
# What works in a kind. The report names the part that is missing, and `require` refuses it.
OPEN = {"own, no namespaces": {("a full disk", "many files"), ("the network", "a packet")}}
DOCS = Path(__file__).parents[4] / "docs" / "isolation.md"


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


@pytest.fixture(scope="module")
def tmp_project() -> Iterator[Path]:
    """A folder that all users find the way to."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


async def attacked(
    project: Path, without: tuple[str, ...], target: str, codes: Mapping[str, str], *, holds: bool = True
) -> dict[str, str]:
    """The answers to all attacks in one worker, which must then still be able to work. holds: also too much memory."""
    levels, run_dir = project / "levels", project / "runs" / "now"
    config = EnvConfig(kind="custom", target=target, isolation=replace(ISOLATION, read=[str(levels)]))
    left = record_host(run_dir)
    host = ProcessHost(config, left, LIMITS, without, (str(levels / "held_out.jsonl"),))
    try:
        await host.start()
        env = host.env()
        await env.open(Episode(prompt=Prompt(prompt_id="p", messages=()), group_id="g", sibling=0, attempt=0))
        answers = {}
        for name, code in codes.items():
            answer = await env.step(Action(text=f"program {code}"))
            answers[name] = answer.messages[0].content
        works = "import asyncio; print(asyncio.run(asyncio.sleep(0, 'works')))"
        answers["works"] = (await env.step(Action(text=f"program {works}"))).messages[0].content
        answers["named"] = (await env.step(Action(text=f"read {levels / 'one.json'}"))).messages[0].content
        answers["late"] = (await env.step(Action(text="late"))).messages[0].content
        if holds:
            held = await env.step(Action(text="hold_in_programs 10"))
            answers["ten processes of 100 MB"] = held.messages[0].content if held.messages else str(held.faults)
        await env.close()
        return answers
    finally:
        await host.stop()
        clear(run_dir, left)


def main(project: str, without: str, target: str, codes: str, _: str) -> None:
    print(json.dumps(asyncio.run(attacked(Path(project), tuple(json.loads(without)), target, json.loads(codes)))))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((kind, user), id=f"{kind}, {user}", marks=MARKS.get(kind, []))
        for kind in KINDS
        for user in ("this user", "another user")
    ],
)
def said(request: pytest.FixtureRequest, tmp_project: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A kind of isolation, and what each attack said in it, in a run of this user or, started as root, of another."""
    kind, user = request.param
    yield kind, attack_as(user, kind, "task=new", tmp_project / f"{kind}, {user}")


def attack_as(user: str, kind: str, layout: str, project: Path) -> dict[str, str]:
    user_id = NOBODY if user == "another user" else os.geteuid()
    prefix: list[str] = []
    python: str | None = sys.executable
    path, target, planted = lay_out(project, layout)
    if user == "another user":
        if os.geteuid() != 0 or shutil.which("setpriv") is None:
            pytest.skip("another user needs root and setpriv")
        prefix = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
        for file in (project, *project.rglob("*")):
            os.chown(file, NOBODY, NOBODY)
        python = next((one for one in PYTHONS if starts([*prefix, "env", one])), None)
        if python is None:
            pytest.skip("another user may not read this installation")
    with programs(user_id, planted) as codes:
        done = subprocess.run(
            [*prefix, python, __file__, str(project), json.dumps(KINDS[kind]), target, json.dumps(codes), HUSH],
            capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((path, PATHS)), HUSH: "hush"},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize(("aim", "attack"), list_attacks())
def test_attacks_of_a_program_are_refused(said: tuple[str, dict[str, str]], aim: str, attack: str) -> None:
    kind, answers = said
    assert is_refused(answers[f"{aim}: {attack}"]) == ((aim, attack) not in OPEN.get(kind, ())), answers


def test_a_program_that_harms_nothing_works(said: tuple[str, dict[str, str]]) -> None:
    assert said[1]["works"] == "works"


def test_a_module_is_imported_in_the_middle_of_an_episode_and_a_file_that_is_named_is_read(
    said: tuple[str, dict[str, str]],
) -> None:
    assert (said[1]["late"], said[1]["named"]) == ("imported", "a level")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS.get(kind, [])) for kind in KINDS])
@pytest.mark.parametrize("layout", ["checkout", "installation"])
@pytest.mark.parametrize("user", ["this user", pytest.param("another user", marks=pytest.mark.long)])
def test_answers_are_out_of_reach_wherever_the_environment_lies(
    kind: str, layout: str, user: str, tmp_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_project / f"{kind}, {layout}, {user}"
    if user == "another user":
        said = attack_as(user, kind, layout, project)
    else:
        path, target, planted = lay_out(project, layout)
        monkeypatch.syspath_prepend(path)
        for name in [name for name in sys.modules if name.startswith("my_lab")]:
            monkeypatch.delitem(sys.modules, name)
        with programs(os.geteuid(), planted) as codes:
            tried = {name: code for name, code in codes.items() if name.startswith(DATA)}
            said = asyncio.run(attacked(project, KINDS[kind], target, tried, holds=False))
    assert (said["late"], said["named"], said["works"]) == ("imported", "a level", "works")
    assert [name for name in said if name.startswith(DATA) and not is_refused(said[name])] == []


def test_processes_that_hold_too_much_together_end_the_episode_as_the_policys_fault(
    said: tuple[str, dict[str, str]],
) -> None:
    assert said[1]["ten processes of 100 MB"] == "('limit',)"


def test_docs_say_what_each_kind_holds() -> None:
    """The rows of the table are the aims above; a cell is "held" if none of its attacks works."""
    table = DOCS.read_text(encoding="utf-8").partition("| A program of the policy tries to reach")[2].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == list(ATTACKS)
    held = {aim for aim, with_namespaces, *_ in rows if with_namespaces == "held"}
    assert held == set(ATTACKS)
    held = {aim for aim, _, without_them, _ in rows if without_them == "held"}
    assert held == set(ATTACKS) - {aim for aim, _ in OPEN["own, no namespaces"]}
    assert {aim for aim, _, _, container in rows if container == "held"} == set(BY_FILTER)


if __name__ == "__main__":
    main(*sys.argv[1:])
