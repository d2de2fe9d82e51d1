"""A run against the memory of its machine, which these tests choose."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.capacity.plan import machine
from grmpipe.capacity.plan.machine import MachineMemory, describe_run_memory, measure_machine
from grmpipe.capacity.plan.memory import PROCESS_BYTES, list_memory
from grmpipe.capacity.plan.memory_check import check_memory, collect_known
from grmpipe.capacity.plan.plan_report import plan
from grmpipe.capacity.plan.run_facts import collect_facts
from grmpipe.config.io.yaml_io import build
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.run.prepare import prepare
from grmpipe.tasks import run_task

ROOT = Path(__file__).parents[4]
CERTAIN_MB = 8.9  # of the quickstart: 6 times 370,368 float32 numbers; of it the learner has 5.93


def composed(*overrides: str) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return build(compose("config", ["+experiment=quickstart", *overrides]))


@pytest.fixture
def machine_with(monkeypatch: pytest.MonkeyPatch):
    def set_memory(num_bytes: float) -> None:
        monkeypatch.setattr(machine, "read_memory_bytes", lambda: int(num_bytes))

    return set_memory


def measured(*overrides: str) -> MachineMemory | None:
    facts = collect_facts(composed(*overrides))
    return measure_machine(facts, {role: list_memory(facts, role) for role in facts.placement.seats})


def test_a_run_whose_weights_do_not_fit_is_refused_before_it_starts_and_after_its_plan(machine_with, capsys) -> None:
    machine_with(0.95 * CERTAIN_MB * 1e6)
    words = (
        r"^this machine has 8\.4\d MB of memory, and the run holds 8\.89 MB in weights and optimizer alone "
        r"\(policy 1\.48 MB, learner 5\.93 MB, grm 1\.48 MB\); learner takes most: type policy\.lora\.rank=16 .*; "
        r"give a smaller policy\.path$"
    )
    with pytest.raises(ConfigError, match=words):
        check_memory(collect_known(prepare(composed())))
    with pytest.raises(ConfigError, match=words):
        run_task(composed("task=plan"))
    printed = capsys.readouterr().out
    assert re.search(r"\nthis machine: 2\.\d+ GB of 8\.4\d MB \(policy ", printed) and "time of a step" in printed
    assert re.match(words, describe_run_memory(composed()))


def test_an_evaluation_is_refused_too(machine_with, tmp_path: Path) -> None:
    machine_with(1e6)
    with pytest.raises(ConfigError, match=r"^this machine has 1 MB of memory, and the run holds \d\.\d+ MB in weights"):
        run_task(composed("task=evaluate", "evaluate.what=policy", f"run_dir={tmp_path / 'run'}"))


def test_a_run_that_may_not_fit_starts_with_a_warning(machine_with) -> None:
    machine_with(1.1 * CERTAIN_MB * 1e6)
    config = composed()
    (warning,) = check_memory(collect_known(prepare(config)))
    assert re.match(
        r"this machine has .* MB of memory, and the run may need 2\.\d+ GB \(policy .*, driver and Ray ", warning
    )
    planned = plan(config)
    assert warning in planned.text and not planned.refusal
    machine_with(4e9)
    assert check_memory(collect_known(prepare(config))) == []
    assert "may need" not in plan(config).text


def test_all_processes_on_cores_count_and_those_elsewhere_do_not() -> None:
    one, none = measured(), measured("cluster.address=10.0.0.1:6379")
    assert one is not None and none is None
    assert one.held == pytest.approx(sum(one.by_role.values()))
    assert one.certain == pytest.approx(CERTAIN_MB * 1e6, rel=0.01)
    in_process = measured("cluster=inprocess")
    assert in_process is not None
    assert one.held - in_process.held == pytest.approx(3 * PROCESS_BYTES + machine.RAY_BYTES + (256 << 20))
    assert measured("placement.pools.judging.slots=4096") is None, "another machine's placement"


def test_copies_of_the_last_push_count_and_a_machine_that_cannot_hold_them_refuses_them(machine_with) -> None:
    plain, delta = (measured("policy.dtype=bfloat16", f"sync.delta={key}") for key in ("false", "true"))
    assert plain is not None and delta is not None
    two = 2 * 2 * 370_368  # the learner's and the only engine's, in bfloat16
    assert delta.certain - plain.certain == delta.held - plain.held == delta.last_pushes == two
    config = composed("policy.dtype=bfloat16", "sync.delta=true")
    machine_with(plain.held + two / 2)
    planned = plan(config)
    assert "\nhost memory, copies of the last push for sync.delta: learner 741 KB, policy 741 KB\n" in planned.text
    assert re.search(r"may need .*copies of the last push 1\.48 MB.*; type sync\.delta=false$", planned.text)
    machine_with(plain.certain + two / 2)
    words = r"^this machine has .* in weights and optimizer and copies of the last push \(1\.48 MB\); type sync\.delta="
    with pytest.raises(ConfigError, match=words):
        check_memory(collect_known(prepare(config)))
