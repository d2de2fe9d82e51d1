"""No call to another process waits forever. On a virtual clock, with a process that doesn't answer."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
import ray

from grmpipe.capacity.simulate.virtual_loop import run_virtually
from grmpipe.models.types import EngineDied, RequestContext, SamplingParams, SharedMemory, WeightBucket
from grmpipe.scheduler.placement import LEAST_CALL_TIMEOUT_S, Seat
from grmpipe.scheduler.processes.actors import ActorDied
from grmpipe.scheduler.processes.call_limits import CONTROL, LOAD, CallLimits
from grmpipe.scheduler.processes.engine_host import COLLECT_S, EngineHost
from grmpipe.scheduler.processes.ray_actor import BucketStore, MemberHost, RayActor
from grmpipe.scheduler.processes.ray_cluster import RayRanks
from grmpipe.scheduler.processes.remote_engine import RemoteEngine
from grmpipe.train.critic.critic_learner import CriticLearner
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.offload import OffloadingLearner

LIMITS = CallLimits(call_timeout_s=100.0)
HOUR_S = 3600.0
ARGS: dict[str, tuple[object, ...]] = {
    "generate": ((1, 2), SamplingParams(max_new_tokens=1), RequestContext(request_id="r", group_id="g", role="policy")),
    "abort": ("r",),
    "load_bucket": (WeightBucket(tensors=(), payload=SharedMemory(path="")),),
    "commit_weights": (1,),
    "receive_weights": (None,),
    "score": ((1, 2),),
}


class Stopped:
    """A Ray handle whose process was stopped."""

    def __getattr__(self, method: str) -> Any:
        return self

    def remote(self, *args: object) -> asyncio.Future[object]:
        return asyncio.get_running_loop().create_future()


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The handles that Ray was asked to kill."""
    handles: list[object] = []
    monkeypatch.setattr(ray, "kill", lambda handle, no_restart: handles.append(handle))
    return handles


def actor() -> RayActor:
    seat = Seat(role="policy", rank=0, pool="all", slots=(0,), share=1)
    return RayActor(seat, Stopped(), BucketStore(), LIMITS)  # type: ignore[arg-type]


def methods_of(cls: type) -> list[str]:
    return [name for name, _ in inspect.getmembers(cls, callable) if not name.startswith("_")]


AWAITED = [name for name in methods_of(RemoteEngine) if inspect.iscoroutinefunction(getattr(RemoteEngine, name))]


@pytest.mark.parametrize("method", AWAITED)
def test_every_call_of_an_engine_ends_by_its_limit_and_the_process_counts_as_dead(
    method: str, killed: list[object]
) -> None:
    async def go() -> float:
        process = actor()
        with pytest.raises(EngineDied, match=r"did not answer '\w+' within \d+ s \(cluster\.call_timeout_s=100\)"):
            await getattr(RemoteEngine(process), method)(*ARGS.get(method, ()))
        assert len(killed) == 1
        return asyncio.get_running_loop().time()

    assert 100 <= run_virtually(go) <= (4800 if method == "receive_weights" else 600)


@pytest.mark.parametrize("cls", [Learner, OffloadingLearner, CriticLearner, MemberHost, EngineHost])
def test_every_call_of_a_rank_and_of_a_host_ends_by_its_limit(cls: type, killed: list[object]) -> None:
    async def go() -> float:
        for method in methods_of(cls):
            by_host = cls in (MemberHost, EngineHost)
            with pytest.raises(ActorDied, match=f"did not answer '{method}'"):
                await (actor().call(method) if by_host else RayRanks([actor()]).call_all(method))
        assert len(killed) == len(methods_of(cls))
        return asyncio.get_running_loop().time() / len(methods_of(cls))

    assert run_virtually(go) <= LIMITS.of("start", ())


def test_calls_that_load_or_save_have_hours_and_other_calls_minutes() -> None:
    limits = CallLimits(call_timeout_s=300.0)
    assert all(limits.of("ask", (method,)) == limits.of(method, ()) == HOUR_S for method in LOAD)
    assert all(limits.of(method, ()) == 300.0 for method in CONTROL)
    assert limits.of("ask", ("accumulate", None)) == limits.of("anything", ()) == HOUR_S / 2


def test_an_engine_that_has_no_news_says_so_long_before_its_limit() -> None:
    async def go() -> float:
        assert await EngineHost().collect() == []
        return asyncio.get_running_loop().time()

    assert run_virtually(go) == pytest.approx(COLLECT_S)
    assert COLLECT_S < LEAST_CALL_TIMEOUT_S / 2
