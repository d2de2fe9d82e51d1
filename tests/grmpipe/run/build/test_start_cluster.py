"""Which runs import their libraries once, for all their processes."""

from __future__ import annotations

import pytest

from grmpipe.config.io.yaml_io import build_config
from grmpipe.run.build.start_cluster import list_nccl_variables, preload
from grmpipe.scheduler.processes.fork_server import worker_command

CORES = {
    "pools": {"all": {"slots": 2, "resource": "cpu"}},
    "roles": {role: {"pool": "all"} for role in ("policy", "learner", "grm")},
}


@pytest.mark.parametrize(
    ("sections", "forks"),
    [
        pytest.param({"placement": CORES}, True, id="the quickstart's"),
        pytest.param({"placement": CORES, "cluster": {"kind": "inprocess"}}, False, id="one process"),
        pytest.param({"placement": CORES, "cluster": {"address": "127.0.0.1:6379"}}, False, id="machines of others"),
        pytest.param({"placement": {**CORES, "pools": {"all": {"slots": 2, "resource": "gpu"}}}}, False, id="GPUs"),
        pytest.param(
            {"placement": CORES, "policy": {"engine": "vllm"}}, False, id="an engine with libraries of its own"
        ),
    ],
)
def test_processes_on_cores_of_this_machine_are_forked(
    sections: dict[str, object], forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with preload(build_config(sections)):
        assert (worker_command() is not None) == forks


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}),
        ({"enable-nccl-nvls": True}, {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"}),
        ({"enable-symm-mem": True}, {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}),
    ],
)
def test_a_learner_gets_the_variables_that_sglang_sets_for_nccl(
    options: dict[str, object], wanted: dict[str, str]
) -> None:
    sections = {"placement": CORES, "policy": {"engine": "sglang"}, "engine": {"sglang": {"options": options}}}
    assert list_nccl_variables(build_config(sections)) == wanted
    assert list_nccl_variables(build_config(sections | {"task": "evaluate"})) == {}, "nothing learns"
    assert list_nccl_variables(build_config({"placement": CORES, "policy": {"engine": "vllm"}})) == {}
