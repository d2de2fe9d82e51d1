"""What is installed, what is missing, what to type. Changes nothing."""

from __future__ import annotations

import importlib.metadata
import os

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


def doctor() -> str:
    """A line for each part."""
    import torch

    lines = [line_of(package) for package in NEEDED]
    cores, gpus = os.cpu_count() or 1, torch.cuda.device_count()
    lines.append(f"cores           {cores}")
    lines.append(f"GPUs            {gpus}" + ("" if gpus else "; placements with resource=gpu are refused"))
    wandb_mode = "online" if os.environ.get("WANDB_API_KEY") else "offline; set WANDB_API_KEY to go online"
    lines.append(f"W&B             {wandb_mode}")
    return "\n".join(lines)


def line_of(package: str) -> str:
    try:
        return f"{package:<15} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package:<15} missing; type: pip install -e ."
