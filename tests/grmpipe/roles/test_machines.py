"""Impossible placements are reported before the slow imports; a run_dir that not all machines see, by its name."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.config.io.yaml_io import build
from grmpipe.config.run_config import ConfigError
from grmpipe.roles.machines import check_seats, check_shared
from grmpipe.run.doctor.doctor import torch_build
from grmpipe.scheduler.placement import PlacementConfig, place
from grmpipe.scheduler.processes.actors import InProcessCluster

ROOT = Path(__file__).parents[3]
PLACEMENTS = sorted(path.stem for path in (ROOT / "conf" / "placement").glob("*.yaml"))


def checked(*overrides: str) -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        check_seats(build(compose("config", ["+experiment=quickstart", *overrides])))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["placement.pools.train.slots=4096"],
         r"^placement\.pools\.train: needs 4096 cpu slots .* for policy, learner; this machine has \d+ cores.*; set"),
        (["placement.roles.grm.pool=nowhere"], r"^placement\.roles\.grm\.pool: unknown pool 'nowhere'; set"),
        (["placement.roles.grm.replicas=5"], r"^placement\.roles\.grm: 5 replicas .* pool judging has 1; set"),
        (["placement=two_ranks", "placement.roles.policy.slots_per_replica=2"],
         r"^placement\.roles\.policy\.slots_per_replica: .* can't share them \(with learner\)"),
        (["placement.pools.train.slots=2", "placement.pools.train.strategy=STRICT_SPREAD", "task=train"],
         r"^placement\.pools\.train: needs 2 cpu slots \(STRICT_SPREAD\) .* no arrangement of them fits"),
        (["~placement.roles.grm"], r"^placement\.roles\.grm: has no pool; type '\+placement\.roles=\{grm: \{pool: tr"),
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_had_names_slot_resource_and_role(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(*overrides)


def test_a_plan_accepts_more_slots_than_this_machine_has() -> None:
    checked("placement.pools.train.slots=4096", "task=plan")
    checked("placement.pools.train.slots=4096", "cluster.address=10.0.0.1:6379")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_seats_a_run_with_every_role(placement: str) -> None:
    """Except for a learner that isn't the policy's in a time-shared pool."""
    typed = ("+experiment=quickstart", "task=plan", "algorithm=ppo", "critic=policy")
    run = () if "time_shared" in placement else typed
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = build(compose("config", [f"placement={placement}", *run]))
    assert set(config.placement.roles) == {"policy", "learner", "grm", "grm_learner", "critic", "meta_rm"}
    if run:
        check_seats(config)


def test_places_are_checked_before_torch_is_loaded(tmp_path: Path) -> None:
    """On a busy machine the import alone takes most of the time allowed for a refusal."""
    script = (
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "sys.argv = ['launch.py', '+experiment=quickstart', 'placement.roles.grm.pool=nowhere']\n"
        "from grmpipe.cli import main\n"
        "assert main() == 2\n"
        "slow = {'torch', 'transformers', 'ray', 'wandb', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not slow, f'slow imports came first: {slow}'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "unknown pool 'nowhere'" in done.stderr


def test_a_run_is_checked_without_torch_and_without_transformers_models(tmp_path: Path) -> None:
    """The driver holds no tensor: the import of either takes longer than all its checks."""
    script = (
        "import sys\n"
        "from hydra import compose, initialize_config_dir\n"
        "from grmpipe.cli import build\n"
        f"with initialize_config_dir({str(ROOT / 'conf')!r}, version_base='1.3'):\n"
        "    config = build(compose('config', ['+experiment=quickstart']))\n"
        "from grmpipe import tasks\n"
        "import grmpipe.run.tasks.train\n"
        "tasks.prepare_training(config)\n"
        "print(sorted({'torch', 'transformers.modeling_utils'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_plan_and_doctor_need_neither_torch_nor_transformers_models(tmp_path: Path) -> None:
    """But torch's build for GPUs, which alone can say which there are."""
    script = (
        "import sys\n"
        "from grmpipe.cli import compose, run_task\n"
        "run_task(compose('quickstart', ['task=plan']))\n"
        "run_task(compose(overrides=['task=doctor']))\n"
        "slow = {'torch', 'transformers.modeling_utils', 'ray', 'wandb'}\n"
        "print(sorted(slow & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    needed = [] if torch_build().cuda is None else ["torch"]
    assert done.stderr.endswith(f"{needed}\n"), done.stderr
    assert all(word in done.stdout for word in ("judging 0", "GPUs"))


class TwoMachines(InProcessCluster):
    async def strangers_to(self, folder: Path) -> list[str]:
        return ["on node-2 it doesn't exist"] if "local" in folder.parts else []


def test_a_folder_that_is_not_shared_is_refused_with_the_way_out() -> None:
    cluster = TwoMachines(place(PlacementConfig(), ()))
    asyncio.run(check_shared(cluster, Path("/shared/run")))
    with pytest.raises(
        ConfigError, match=r"^run_dir: .* don't share /local/run \(on node-2 it doesn't exist\).*type run_d"
    ):
        asyncio.run(check_shared(cluster, Path("/local/run")))
