"""Plan and simulation of every recipe for GPUs, written into docs/recipes*.md. Needs no GPU, no model and no network.

    python benchmarks/recipes.py            # all recipes: minutes
    python benchmarks/recipes.py qwen3_8b   # one of them
    python benchmarks/recipes.py --plans    # the plans alone

Prompts of 100 tokens, H100s of 80 GB, costs from data sheets: nothing in these figures was measured on a GPU.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":  # before the hub is imported: shapes are those of the configuration
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_CACHE"] = os.path.join(tempfile.gettempdir(), "no_such_cache")  # noqa: PTH118

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hydra import compose, initialize_config_dir  # noqa: E402

import grmpipe.cli  # noqa: E402, F401  registers the schema
from grmpipe.capacity.plan.plan_report import plan  # noqa: E402
from grmpipe.capacity.simulate.simulation import run_simulation  # noqa: E402
from grmpipe.config.io.yaml_io import build  # noqa: E402
from grmpipe.config.run_config import ConfigError, RunConfig  # noqa: E402

PAGES = {num: ROOT / f"docs/recipes{f'_{num}_gpus' if num > 1 else ''}.md" for num in (1, 8, 64)}
MARK = "<!-- below: python benchmarks/recipes.py -->"
EXPERIMENTS = ROOT / "conf/experiment"
PROMPT_CHARS, NUM_PROMPTS = 300, 4096
SHOWN = ("memory per slot", "a step", "time of a step", "warnings")  # blocks of a plan
STEPS = 12  # of a simulation: the 8 in the middle count at a staleness of 1


def recipes() -> list[str]:
    """The recipes for GPUs, by the number of GPUs."""
    names = [path.stem for path in EXPERIMENTS.glob("qwen3_*.yaml")]
    return sorted(names, key=lambda name: (num_gpus(composed(name)), name))


@functools.cache
def composed(name: str, *overrides: str) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(compose("config", [f"+experiment={name}", "data.path=prompts.jsonl", *overrides]))


def num_gpus(config: RunConfig) -> int:
    return sum(pool.slots for pool in config.placement.pools.values() if pool.resource == "gpu")


def comment_of(name: str) -> tuple[str, str]:
    """(for whom, the command) from the comment at the beginning of a recipe."""
    lines = (EXPERIMENTS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    said = [line.removeprefix("# ") for line in lines if line.startswith("# ") and not line.startswith("# @")]
    commands = [line for line in said if line.startswith("python launch.py") and "task=" not in line]
    return " ".join(line for line in said if not line.startswith("python launch.py")), commands[0]


def on_h100(name: str, prompts: Path, *more: str) -> RunConfig:
    pools = composed(name).placement.pools
    devices = [f"placement.pools.{pool}.device=h100" for pool in pools]
    return composed(name, *devices, f"data.path={prompts}", "plan.cores=64", *more)


def planned(name: str, prompts: Path) -> str:
    """The blocks of a plan that say whether it fits, and how fast it would be."""
    blocks = plan(on_h100(name, prompts)).text.split("\n\n")
    kept = [block for block in blocks if block.startswith(SHOWN)]
    return re.sub(r"\nthe run: .*", "", "\n\n".join(kept))


def simulated(name: str, prompts: Path, folder: Path) -> str:
    """The figures of a simulation, or why there are none."""
    config = on_h100(name, prompts, f"simulate.steps={STEPS}", f"run_dir={folder / name}")
    if not config.env.env_kind.is_single:
        return "not simulated: a simulation plays one turn and no environment"
    try:
        text, _ = run_simulation(config)
    except ConfigError as error:
        return f"not simulated: {error}"
    return text.split("\n\n")[1]


def section(name: str, prompts: Path, simulation: str) -> str:
    whom, command = comment_of(name)
    gpus = num_gpus(composed(name))
    parts = [
        f"## {name} ({gpus} {'GPU' if gpus == 1 else 'GPUs'})", whom, f"```bash\n{command}\n```",
        f"```\n{planned(name, prompts)}\n\n{simulation}\n```",
    ]  # fmt: skip
    return "\n\n".join(parts)


def simulation_in(section: str) -> str:
    """The figures of the simulation in a section of the page."""
    return section.removesuffix("\n```").rpartition("\n\n")[2]


def prompt_rows() -> str:
    """A file of prompts of 100 tokens. No two are equal, or an engine would compute them once."""
    text = "A word problem. " * (PROMPT_CHARS // 16)
    return "".join(json.dumps({"prompt": f"{number:04d}{text[4:]}"}) + "\n" for number in range(NUM_PROMPTS))


def sections_of(page: str) -> dict[str, str]:
    """Recipe -> its section on the page."""
    parts = re.split(r"^(?=## )", page.split(MARK)[1], flags=re.MULTILINE)[1:]
    return {part.removeprefix("## ").split()[0]: part.strip() for part in parts}


def main(names: list[str]) -> None:
    """Write the sections of these recipes, or of all, one after another. With --plans simulations stay as they are."""
    known, keeps = recipes(), "--plans" in names
    names = [name for name in names if name != "--plans"]
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text(prompt_rows(), encoding="utf-8")
        for name in names or known:
            file = PAGES[num_gpus(composed(name))]
            page = file.read_text(encoding="utf-8")
            found = sections_of(page)
            kept = simulation_in(found[name]) if keeps and name in found else None
            found[name] = section(name, prompts, kept or simulated(name, prompts, Path(folder)))
            text = "\n\n".join(found[one] for one in known if one in found)
            file.write_text(f"{page.split(MARK)[0]}{MARK}\n\n{text}\n", encoding="utf-8")
            print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
