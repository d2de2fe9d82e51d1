"""Each trainer's own code, in packages of its own, gets from a service what the native wire gives, bit for bit.

Packages come from the index by pip: of the trainers that pin another torch, without what they depend on, beside ours.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from grmpipe.clients.judge_client import JudgeClient
from grmpipe.tiny.resolve import resolve_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
ALONE = "--no-deps"
PACKAGES = {
    "trl": (ALONE, "trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19",
            "pandas==3.1.1"),
    "verifiers": ("verifiers==0.4.0",),
    "verl": (ALONE, "verl==0.9.1", "cloudpickle==3.1.3", "codetiming==1.4.0", "orjson==3.13.0", "pyvers==0.2.3",
             "tensordict==0.15.3"),
    "areal": (ALONE, "areal==1.0.4", "aiofiles==25.1.0", "blinker==1.9.0", "colorlog==6.12.0", "einops==0.8.2",
              "flask==3.1.3", "itsdangerous==2.2.0", "lark==1.3.1", "llvmlite==0.50.0", "numba==0.68.1",
              "orjson==3.13.0", "tenacity==9.2.1", "torchdata==0.11.0", "uvloop==0.23.0"),
}  # fmt: skip
# What a failed judgement becomes there.
FAILED = {"trl": None, "verifiers": "TaskError", "verl": "NotJudgedError", "areal": "NotJudgedError"}
TEXTS = ["7 stamps.", "Answer: 1 + 2 = 3", "none"]
OWN = """
def reward(prompts, completions, **columns):
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [None if "none" in one else 1 / (1 + len(one)) for one in texts]
"""
MY_JUDGE = """
from grmpipe.clients.verifiers import GrmpipeJudge

__all__ = ["GrmpipeJudge"]
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("service")
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    command = [
        sys.executable, str(ROOT / "launch.py"), "task=serve", "serve.port=0", "judge=function",
        "judge.function=own.reward", "tracking=none", "run_dir=judge",
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        (found,) = re.findall(r"http://127\.0\.0\.1:\d+", service.stdout.readline())
        yield found
        service.terminate()


@pytest.mark.parametrize("trainer", PACKAGES)
def test_a_trainer_s_own_code_gets_the_rewards_of_the_native_wire(trainer: str, url: str, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages), *PACKAGES[trainer]]
    subprocess.run(install, check=True)
    (tmp_path / "my_judge.py").write_text(MY_JUDGE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(HERE / f"ask_by_{trainer}.py"), url, str(resolve_model("tiny://policy"))],
        input=json.dumps(TEXTS), cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(packages), str(ROOT), str(tmp_path)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    verdicts = asyncio.run(JudgeClient(url).ask([{"role": "user", "content": "How many?"}], TEXTS))
    expected = [one["reward"] for one in verdicts]
    assert expected[2] is None and expected[0] == 1 / 10
    if trainer in ("trl", "areal"):  # they keep rewards in float32
        expected = [None if one is None else float(np.float32(one)) for one in expected]
    assert json.loads(done.stdout.splitlines()[-1]) == [*expected[:2], FAILED[trainer]]
