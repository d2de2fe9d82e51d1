"""Fixtures of all tests: a process that is left as it was found."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

# Before torch is imported. The tests' processes share few cores: their threads would wait for each other, and spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Bits that don't depend on a batch need it from the first product on. Faster than what a run takes (COMPATIBLE).
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from grmpipe.envs.sandbox.bubblewrap import bubblewrap_missing
from grmpipe.models.engines.installed import vllm_missing
from grmpipe.observe.logs import NOISY, OURS, replace_handlers
from grmpipe.scheduler import gc_tuning

sys.path.append(str(Path(__file__).parent))  # a fork imports forks.py by its name

import forks

# The same examples on every machine, every time, however busy it is; `--hypothesis-profile=explore` tries new ones.
# Hypothesis also tries the texts that stand in the modules imported so far: which these are depends on the tests that
# a worker ran before, so none is.
providers._get_local_constants = lambda: providers.Constants()
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("repeatable"), derandomize=False)
settings.load_profile("repeatable")


# Files whose tests run in one worker: what they share is started once, vLLM with its engines or the process that forks.
ONE_WORKER = {
    "vllm": ("tests/flow/test_vllm_run.py", "tests/models/engines/contract/", "tests/models/engines/vllm/"),
    "forks": (
        "tests/flow/test_bad_input.py", "tests/flow/test_nothing_hangs.py", "tests/flow/test_resume.py",
        "tests/grmpipe/test_tasks.py", "tests/grmpipe/train/", "tests/models/lm/test_scalar_head.py",
        "tests/models/test_rendezvous.py",
    ),
}  # fmt: skip


# marker -> what is wrong with what its tests need, or None. They are skipped then; with `--require` they fail.
NEEDS = {"vllm": vllm_missing, "bubblewrap": bubblewrap_missing}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require", action="append", choices=sorted(NEEDS), default=[], help="fail, don't skip, the tests that need it"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays until the end: garbage collections pass it by."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


@pytest.fixture(scope="session", autouse=True)
def frozen_is_known() -> Iterator[None]:
    """Each run asks, and counting what is frozen here takes a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc_tuning, "is_frozen", lambda: True)
        yield


@pytest.hookimpl(tryfirst=True)  # before fixtures start what is missing
def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, find_missing in NEEDS.items():
        if item.get_closest_marker(name) is not None and (missing := find_missing()) is not None:
            (pytest.fail if name in item.config.getoption("--require") else pytest.skip)(missing)


def worker_scope(nodeid: str) -> str:
    """The file of a test, or the name of the files that share something."""
    file = nodeid.split("::")[0]
    return next((name for name, files in ONE_WORKER.items() if file.startswith(files)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """`--dist loadfile`, but for those files."""
    from xdist.scheduler import LoadFileScheduling

    class LoadShared(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return worker_scope(nodeid)

    return LoadShared(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report in one line how many tests were skipped, and why."""
    reasons = Counter(str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", []))
    if reasons:
        told = "; ".join(f"{count} x {reason.removeprefix('Skipped: ')}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped: {told}")


@contextmanager
def kept_logging() -> Iterator[None]:
    names = ["", *NOISY, *OURS, "wandb"]
    kept = {name: (list(logging.getLogger(name).handlers), logging.getLogger(name).propagate) for name in names}
    level = logging.getLogger().level
    for name in names:
        logging.getLogger(name).handlers = []
    try:
        yield
    finally:
        logging.captureWarnings(False)
        logging.getLogger().setLevel(level)
        for name, (handlers, propagate) in kept.items():
            replace_handlers(logging.getLogger(name), *handlers)
            logging.getLogger(name).propagate = propagate


@pytest.fixture
def restored_logging() -> Iterator[None]:
    with kept_logging():
        yield


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a hub nor its cache: the shapes of models are those of the configuration."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no_cache"))


@pytest.fixture(scope="session")
def keep_logging() -> Callable[[], AbstractContextManager[None]]:
    """The same for fixtures that outlive a test."""
    return kept_logging


@pytest.fixture(scope="session")
def forked() -> type[forks.Forked]:
    """`forked(script, *arguments, cwd=..)`: a process that has made its imports, with one thread and no hub."""
    root = str(Path(__file__).parents[1])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": root}.items():
            patch.setenv(name, value)
        forks.serve()
    return forks.Forked
