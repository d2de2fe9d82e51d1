"""A real Ray on this machine: groups, engines, deaths, pushes. Needs two cores.

Code for workers is defined inside functions, so that it is sent by value: workers can't import a test.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import ray
import torch
from ray._private.services import ProcessInfo
from ray.actor import ActorHandle

from grmpipe.envs.sandbox.supervisor import descendants
from grmpipe.models.checksum import checksum as checksum_of
from grmpipe.models.types import (
    Completion,
    Engine,
    EngineDied,
    GroupLink,
    InlineBytes,
    RequestContext,
    SamplingParams,
    WeightBucket,
    WeightTensor,
)
from grmpipe.models.weights.process_group import BroadcastLink
from grmpipe.scheduler.placement import ClusterConfig, Placement, PlacementConfig, PoolConfig, RoleConfig, place
from grmpipe.scheduler.processes.actors import ActorDied, EngineFactory, MemberFactory, free_port
from grmpipe.scheduler.processes.call_limits import CallLimits
from grmpipe.scheduler.processes.ray_actor import BucketStore, RayActor
from grmpipe.scheduler.processes.ray_cluster import RayCluster
from grmpipe.scheduler.processes.rpc import RpcServer
from grmpipe.scheduler.processes.wire_types import Dialect
from grmpipe.scheduler.routing.router import Router
from grmpipe.scheduler.routing.scorers import ScorerPool
from grmpipe.scheduler.slots.engine_replacement import check_liveness, push_to_living
from grmpipe.scheduler.weights.weight_push import EngineLost, SyncConfig
from grmpipe.scheduler.weights.weight_sync import WeightSync


def seats(**replicas: int) -> Placement:
    """All roles on one pool, as wide as the widest of them."""
    config = PlacementConfig(
        pools={"all": PoolConfig(slots=max(replicas.values()))},
        roles={role: RoleConfig(pool="all", replicas=number) for role, number in replicas.items()},
    )
    return place(config, tuple(replicas))


@pytest.fixture(scope="module", autouse=True)
def ray_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Ray for the module, which the tests' clusters join. The driver's path also has a user's module."""
    folder = tmp_path_factory.mktemp("users")
    (folder / "users_losses.py").write_text("def mine(scored, algorithm): ...")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        cluster = asyncio.run(RayCluster.start(ClusterConfig(), place(PlacementConfig(), ())))
    yield
    asyncio.run(cluster.shutdown())


def test_ray_leaves_a_signal_to_whoever_heard_it_before() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_signals_to_all_processes_of_a_run_end_none_of_them_but_programs_that_they_start() -> None:
    async def scene(cluster: RayCluster) -> None:
        ranks = await cluster.start_members("learner", members())
        servers = [server.process.pid for servers in ray_servers().values() for server in servers]
        processes = {*servers, *descendants(ray_servers()["raylet"][0].process.pid), *cluster.process_ids("learner")}
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
            for process in processes:
                os.kill(process, number)
            await asyncio.sleep(0.1)
        assert [process for process in processes if not is_alive(process)] == []
        assert await ranks.call(0, "add", 1) == 1
        assert await ranks.call(0, "run_program") == -signal.SIGTERM

    on_cluster(seats(learner=1), scene)


def is_alive(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"


def ray_servers() -> dict[str, list[ProcessInfo]]:
    return cast("dict[str, list[ProcessInfo]]", ray._private.worker._global_node.all_processes)


def members() -> MemberFactory:
    class Member:
        def __init__(self, rank: int, world_size: int, init_method: str | None) -> None:
            self.identity = (rank, world_size, init_method)
            self.rank = rank
            self.total = 0
            self.thread = threading.get_ident()

        def was_made_here(self) -> bool:
            return self.thread == threading.get_ident()

        def who(self) -> tuple[int, int, str | None]:
            return self.identity

        def threads(self) -> str:
            return os.environ["OMP_NUM_THREADS"]

        def add(self, amount: int) -> int:
            self.total += amount
            return self.total

        def scores(self, sequences: list[list[int]]) -> list[float]:
            return [float(sum(sequence)) for sequence in sequences]

        def refuse(self) -> None:
            raise ValueError("train.lr: no")

        def run_program(self) -> int:
            return subprocess.run(["sh", "-c", "kill -TERM $$; sleep 3"], check=False).returncode

        def finds(self, path: str) -> str:
            from grmpipe.config.keys.dotted_path import find_at

            return str(find_at(path, "algorithm.loss"))

        def process_id(self) -> int:
            return os.getpid()

        def fail_as_a_peer_of_the_dead(self) -> None:
            """Rank 1 is killed; rank 0 notices its lost connection before the death is noticed."""
            if self.rank == 0:
                raise RuntimeError("connection closed by peer")
            print("rank 1 says its last word", file=os.sys.stderr, flush=True)  # type: ignore[attr-defined]
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)

        def meet(self) -> float:
            import torch
            import torch.distributed as dist

            rank, world_size, init_method = self.identity
            dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
            total = torch.tensor([rank + 1.0])
            dist.all_reduce(total)
            dist.destroy_process_group()
            return total.item()

    return Member


def engines(tokens_per_s: float = 1e6) -> EngineFactory:
    """Answers depend on ids and seed; the text has the process that wrote it."""

    def make(rank: int) -> Engine:
        from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine

        def author(ids: Sequence[int], params: SamplingParams, context: RequestContext) -> Script:
            return Script(token_ids=(*ids, params.seed), text=str(os.getpid()))

        return SimulatedEngine("policy", author, tokens_per_s=tokens_per_s)

    return make


def ask(engine: Engine, number: int) -> asyncio.Task[Completion]:
    context = RequestContext(request_id=f"r{number}", group_id=f"g{number}", role="policy")
    return asyncio.create_task(
        engine.generate((1, 2), SamplingParams(max_new_tokens=8, seed=number), context)  # type: ignore[arg-type]
    )


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def on_cluster(placement: Placement, scene) -> None:  # type: ignore[no-untyped-def]
    """Run a scene on its own cluster, and clean up."""

    async def main() -> None:
        cluster = await RayCluster.start(ClusterConfig(start_timeout_s=120), placement)
        try:
            await scene(cluster)
        finally:
            await cluster.shutdown()

    asyncio.run(main())


def test_a_group_has_a_process_per_rank_and_a_meeting_place() -> None:
    async def scene(cluster: RayCluster) -> None:
        group = await cluster.start_members("learner", members())
        (first, second) = cast("list[tuple[int, int, str]]", await group.call_all("who"))
        assert (first[:2], second[:2]) == ((0, 2), (1, 2))
        assert first[2] == second[2]
        assert first[2].startswith("tcp://127.0.0.1:")
        assert len(set(await group.call_all("process_id"))) == 2
        assert await group.call_all("threads") == ["1", "1"]
        assert len(cluster.process_ids("learner")) == 2
        assert cluster.process_ids("policy") == [], "nobody started it"
        assert await group.call_each("add", [(1,), (10,)]) == [1, 10]
        assert await group.call(1, "add", 5) == 15
        assert await group.call_all("meet") == [3.0, 3.0]
        with pytest.raises(ValueError, match=r"^train\.lr: no$") as caught:
            await group.call(1, "refuse")
        assert "in learner-1" in str(caught.value.__cause__)

    on_cluster(seats(learner=2), scene)


def test_async_calls_of_a_member_overlap_and_members_that_do_not_meet_get_no_meeting_place() -> None:
    def waiting() -> MemberFactory:
        class Waiting:
            def __init__(self, rank: int, world_size: int, init_method: str | None) -> None:
                self.place = str(init_method)
                self.waiting = 0

            async def wait_for(self, others: int) -> str:
                self.waiting += 1
                while self.waiting < others:
                    await asyncio.sleep(0.01)
                return self.place

        return Waiting

    async def scene(cluster: RayCluster) -> None:
        group = await cluster.start_members("env", waiting(), meet=False)
        async with asyncio.timeout(20):
            assert await asyncio.gather(*(group.call(1, "wait_for", 3) for _ in range(3))) == ["None"] * 3

    on_cluster(seats(env=2), scene)


def test_a_rank_imports_what_lies_on_the_drivers_pythonpath() -> None:
    async def scene(cluster: RayCluster) -> None:
        group = await cluster.start_members("learner", members())
        (found,) = await group.call_all("finds", "users_losses.mine")
        assert str(found).startswith("<function mine")
        with pytest.raises(ValueError, match=r"^algorithm\.loss: nowhere can't be imported .*on PYTHONPATH"):
            await group.call(0, "finds", "nowhere.mine")

    on_cluster(seats(learner=1), scene)


def test_a_member_is_called_by_a_socket_where_its_types_are_plain_data_else_by_ray() -> None:
    class Plain:
        def __init__(self, rank: int, world_size: int, init_method: str | None) -> None:
            self.rank = rank

        def twice(self, number: int) -> int:
            return 2 * number

    class Odd(Plain):
        def same(self, what: object) -> object:
            return what

    async def scene(cluster: RayCluster) -> None:
        plain, odd = await cluster.start_members("learner", Plain), await cluster.start_members("critic", Odd)
        by_socket = [group._actors[0]._line is not None for group in (plain, odd)]  # type: ignore[attr-defined]
        assert by_socket == [True, False]
        assert await plain.call_all("twice", 4) == await odd.call_all("twice", 4) == [8]
        assert await odd.call(0, "same", {1, 2}) == {1, 2}
        with pytest.raises(AttributeError, match="no_such_thing"):
            await plain.call(0, "no_such_thing")

    on_cluster(seats(learner=1, critic=1), scene)


def test_the_death_of_a_rank_is_the_first_cause_with_its_last_lines() -> None:
    async def scene(cluster: RayCluster) -> None:
        group = await cluster.start_members("learner", members())
        with pytest.raises(ActorDied, match=r"^learner-1 died: process .* is gone") as caught:
            await group.call_all("fail_as_a_peer_of_the_dead")
        assert "rank 1 says its last word" in str(caught.value)

    on_cluster(seats(learner=2), scene)


def test_requests_of_a_killed_engine_are_drawn_elsewhere_with_the_same_seed_and_once() -> None:
    async def scene(cluster: RayCluster) -> None:
        router = Router("policy", await cluster.start_engines("policy", engines(tokens_per_s=2)))
        probe = await asyncio.gather(*(ask(router, number) for number in range(2)))
        by_engine = {int(completion.text) for completion in probe}
        assert len(by_engine) == 2
        answers = [ask(router, number) for number in range(10, 18)]
        await asyncio.sleep(0.3)  # they are being decoded: three tokens take 1.5 s
        os.kill(by_engine.pop(), signal.SIGKILL)
        done = await asyncio.gather(*answers)
        assert [completion.token_ids for completion in done] == [(1, 2, number) for number in range(10, 18)]
        assert {int(completion.text) for completion in done} == by_engine
        assert len(router.members.alive) == 1
        os.kill(by_engine.pop(), signal.SIGKILL)
        with pytest.raises(EngineDied, match=r"all engines of role policy died; the first: policy-.: process"):
            await ask(router, 99)

    on_cluster(seats(policy=2), scene)


class Source:
    """Two buckets of random bytes. Kills a process, if requested, when the second is called for."""

    def __init__(self, victim: int | None = None) -> None:
        self._victim = victim

    @asynccontextmanager
    async def held(self) -> AsyncIterator[int]:
        yield 0

    async def connect(self, link: GroupLink | None) -> None:
        assert link is None

    async def num_buckets(self) -> int:
        return 2

    async def num_fixed_buckets(self) -> int:
        return 0

    async def bucket(self, index: int) -> WeightBucket:
        if index == 1 and self._victim is not None:
            os.kill(self._victim, signal.SIGKILL)
            self._victim = None
        data = np.random.default_rng(index).integers(0, 256, 4 << 20, dtype=np.uint8)
        checksum = checksum_of(data)
        tensor = WeightTensor(name="ab"[index], dtype="float32", shape=(1 << 20,), checksum=checksum)
        return WeightBucket(tensors=(tensor,), payload=InlineBytes(data=(data,)))

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        return (-1.0,) * (len(token_ids) - 1)


def test_a_killed_scorer_is_replaced_and_every_sequence_gets_its_number() -> None:
    async def scene(cluster: RayCluster) -> None:
        group = await cluster.start_members("meta_rm", members())
        pool = ScorerPool("meta_rm", group, functools.partial(cluster.restart_member, "meta_rm"), 2, max_batch_tokens=2)
        first, second = cast("list[int]", await group.call_all("process_id"))
        os.kill(second, signal.SIGKILL)
        asked = [(number, 1) for number in range(8)]
        assert await asyncio.gather(*map(pool.score, asked)) == [float(number + 1) for number, _ in asked]
        while not pool.num_replaced:
            await asyncio.sleep(0.05)
        now = cast("list[int]", await group.call_all("process_id"))
        assert cluster.process_ids("meta_rm") == now, "with the one that came in its place"
        assert now[0] == first and now[1] != second and not is_running(second)

    on_cluster(seats(meta_rm=2), scene)


def test_weights_reach_every_engine_as_they_were_sent() -> None:
    async def scene(cluster: RayCluster) -> None:
        both = await cluster.start_engines("policy", engines())
        report = await WeightSync(Source(), (1, 2, 3), SyncConfig(deadline_s=20)).push(lambda: both, 4)
        assert report.num_bytes == 8 << 20
        answers = await asyncio.gather(*(ask(engine, 1) for engine in both.values()))
        assert [answer.versions[0].version for answer in answers] == [4, 4]

    on_cluster(seats(policy=2), scene)


def test_an_engine_killed_in_mid_push_ends_it_by_name_and_the_rest_take_the_next_one() -> None:
    async def scene(cluster: RayCluster) -> None:
        both = await cluster.start_engines("policy", engines())
        victim = int((await ask(both["policy-0"], 1)).text)
        sync = WeightSync(Source(victim), (1, 2, 3), SyncConfig(deadline_s=20))
        began_s = time.monotonic()
        with pytest.raises(EngineLost, match=r"policy-0 died while it was asked to .* bucket . \((a|b)\)") as caught:
            await sync.push(lambda: both, 4)
        assert caught.value.name == "policy-0"
        assert time.monotonic() - began_s < 20
        report = await sync.push(lambda: {"policy-1": both["policy-1"]}, 4)
        assert report.version == 4
        newcomer = await cluster.restart_engine("policy", "policy-0")
        assert int((await ask(newcomer, 2)).text) not in (victim, int((await ask(both["policy-1"], 2)).text))
        await sync.catch_up("policy-0", newcomer, lambda: None)
        assert (await ask(newcomer, 3)).versions[0].version == 4

    on_cluster(seats(policy=2), scene)


def receivers() -> EngineFactory:
    """Engines that really join the group."""

    def make(rank: int) -> Engine:
        import torch

        from grmpipe.models.checksum import checksum
        from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine
        from grmpipe.models.types import WeightReceipt
        from grmpipe.models.weights.process_group import BroadcastLink

        class Receiver(SimulatedEngine):
            def __init__(self) -> None:
                super().__init__("policy", lambda ids, params, context: Script(token_ids=(1,), text=str(os.getpid())))
                self.group = BroadcastLink()
                self.echo: dict[str, str] = {}

            async def begin_weights(self, link: GroupLink | None = None) -> None:
                await asyncio.to_thread(self.group.join, link)
                self.echo = {}

            async def load_bucket(self, bucket: WeightBucket) -> None:
                (tensor,) = bucket.tensors
                got = await asyncio.to_thread(self.group.receive, [tensor.name], [torch.float32], [tensor.shape])
                self.echo[tensor.name] = checksum(got[0].numpy())

            async def commit_weights(self, version: int) -> WeightReceipt:
                await super().commit_weights(version)
                return WeightReceipt(version=version, checksums=self.echo)

        return Receiver()

    return make


class Broadcaster(Source):
    """Rank 0 of a real group, in this process. Kills its victim just before it sends the second bucket."""

    def __init__(self, victim: int | None = None) -> None:
        super().__init__(victim)
        self.group = BroadcastLink()

    async def connect(self, link: GroupLink | None) -> None:
        await asyncio.to_thread(self.group.join, link)

    async def list_tensors(self) -> tuple[tuple[WeightTensor, ...], ...]:
        return tuple(
            (WeightTensor(name=f"layers.{index}.weight", dtype="float32", shape=(1 << 22,), checksum=""),)
            for index in range(2)
        )

    async def broadcast(self, first: int, version: int) -> dict[str, str]:
        sums: dict[str, str] = {}
        for index in range(first, 2):
            if index == 1 and self._victim is not None:
                os.kill(self._victim, signal.SIGKILL)
                self._victim = None
            data = np.random.default_rng(index).standard_normal(1 << 22, dtype=np.float32)
            sums[name := f"layers.{index}.weight"] = checksum_of(data)
            await asyncio.to_thread(self.group.send, [name], torch.from_numpy(data.view(np.uint8)))
        return sums


def test_an_engine_killed_in_mid_broadcast_is_buried_and_the_rest_get_the_weights_in_a_new_group() -> None:
    async def scene(cluster: RayCluster) -> None:
        router = Router("policy", await cluster.start_engines("policy", receivers()))
        victim = int((await ask(router.members.alive["policy-0"], 1)).text)

        async def address() -> tuple[str, int]:
            return "127.0.0.1", free_port("127.0.0.1")

        source = Broadcaster(victim)
        sync = WeightSync(
            source, (1, 2, 3), SyncConfig(deadline_s=30), transport="gloo", group="gloo", new_address=address
        )
        assert (await push_to_living(sync, router, 3)).version == 3
        first = source.group.name
        assert set(router.members.alive) == {"policy-1"}
        newcomer = await cluster.restart_engine("policy", "policy-0")
        await sync.catch_up("policy-0", newcomer, lambda: router.members.admit("policy-0", newcomer))
        assert (await push_to_living(sync, router, 4)).version == 4
        assert source.group.name != first
        answers = [await ask(engine, 1) for engine in router.members.alive.values()]
        assert [answer.versions[0].version for answer in answers] == [4, 4]

    on_cluster(seats(policy=2), scene)


def test_members_are_asked_in_order_and_all_on_one_thread() -> None:
    async def scene(cluster: RayCluster) -> None:
        group = await cluster.start_members("learner", members())
        assert await asyncio.gather(*(group.call(0, "add", 1) for _ in range(50))) == [*range(1, 51)]
        assert await group.call(0, "was_made_here") is True

    on_cluster(seats(learner=1), scene)


def test_without_a_socket_calls_of_a_process_begin_in_the_order_of_asking() -> None:
    """By Ray, then. An engine generates meanwhile, and its control calls don't wait for that."""

    def counting(rank: int) -> Engine:
        from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine

        class Counting(SimulatedEngine):
            num_scored = 0

            async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
                self.num_scored += 1
                return (float(self.num_scored),)

        return Counting("policy", lambda ids, params, context: Script(token_ids=(1,) * 8, text="x"), tokens_per_s=0.01)

    async def scene(cluster: RayCluster) -> None:
        group = await cluster.start_members("learner", members())
        assert group._actors[0]._line is None  # type: ignore[attr-defined]
        assert await asyncio.gather(*(group.call(0, "add", 1) for _ in range(50))) == [*range(1, 51)]
        engine = (await cluster.start_engines("policy", counting))["policy-0"]
        generating = ask(engine, 1)
        scored = await asyncio.gather(*(engine.score([1, 2]) for _ in range(50)))
        assert scored == [(float(number),) for number in range(1, 51)]
        assert not generating.done()
        generating.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grmpipe.scheduler.processes.rpc.asyncio.open_unix_connection", refused)
        on_cluster(seats(learner=1, policy=1), scene)


@pytest.mark.parametrize("encrypted", [False, True])
def test_processes_of_another_machine_are_called_over_the_network_unless_ray_encrypts(encrypted: bool) -> None:
    async def scene(cluster: RayCluster) -> None:
        group = await cluster.start_members("learner", members())
        line = group._actors[0]._line  # type: ignore[attr-defined]
        assert (line is None) == encrypted
        assert line is None or line._writer.get_extra_info("peername")[1] > 0, "a port"
        assert await asyncio.gather(*(group.call(0, "add", 1) for _ in range(50))) == [*range(1, 51)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayCluster, "_node_of", lambda cluster, seat: "another")
        patch.setattr("grmpipe.scheduler.processes.ray_actor.encrypts", lambda: encrypted)
        on_cluster(seats(learner=1), scene)


async def refused(path: str) -> None:
    raise OSError("no socket for you")


def test_a_start_that_is_given_up_between_socket_and_connection_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another process dies during the start: this one is killed before anyone has connected to it."""
    listening, there = asyncio.Event(), list[Path]()

    class Target:
        async def add(self, a: int) -> int: ...

    async def ask(method: str, *args: object) -> object: ...

    def list_lines() -> list[Path]:
        return list(tmp_path.glob("*/line"))

    async def listens(actor: RayActor, method: str, path: str) -> Dialect:
        await RpcServer(ask, Dialect.of(Target)).listen(path)
        listening.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> None:
        limits = CallLimits(call_timeout_s=1)
        actor = RayActor(seats(policy=1).seats["policy"][0], cast("ActorHandle", None), BucketStore(), limits)
        opening = asyncio.create_task(actor.open_rpc(same_machine=True))
        await listening.wait()
        there.extend(list_lines())
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(RayActor, "_call_by_ray", listens)
    asyncio.run(main())
    assert len(there) == 1 and not [*tmp_path.iterdir()]


def test_waiting_calls_fail_at_the_end_of_a_cluster_without_asking_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calling Ray after its end would start it again or join another run's, and wait there."""
    killed: list[object] = []
    kill = ray.kill
    monkeypatch.setattr(ray, "kill", lambda handle, **how: (killed.append(handle), kill(handle, **how)))

    async def main() -> None:
        cluster = await RayCluster.start(ClusterConfig(start_timeout_s=120), seats(policy=2))
        slow = (await cluster.start_engines("policy", engines(tokens_per_s=0.01)))["policy-0"]
        waiting = [ask(slow, number) for number in range(3)]
        await asyncio.sleep(0.2)
        await cluster.shutdown()
        told = await asyncio.gather(*waiting, slow.pause(), return_exceptions=True)
        assert [type(error) for error in told] == [EngineDied] * 4
        assert "the run ended its process" in str(told[0])
        assert len(killed) == 2, "once each"

    asyncio.run(main())


def test_processes_that_an_engine_started_end_with_it_however_it_ends() -> None:
    """Killed, replaced or shut down: a server or a core process of an engine must not outlive it."""

    def make(rank: int) -> Engine:
        from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine

        class Parent(SimulatedEngine):
            def __init__(self) -> None:
                self.child = subprocess.Popen(["sleep", "1000"])
                text = f"{os.getpid()} {self.child.pid}"
                super().__init__("policy", lambda ids, params, context: Script(token_ids=(1,), text=text))

        return Parent()

    async def until_gone(process_id: int) -> None:
        async with asyncio.timeout(15):
            while is_running(process_id):
                await asyncio.sleep(0.1)

    async def scene(cluster: RayCluster) -> None:
        engine = (await cluster.start_engines("policy", make))["policy-0"]
        own, child = map(int, (await ask(engine, 1)).text.split())
        assert not (await check_liveness({"policy-0": engine})).dead
        os.kill(own, signal.SIGKILL)
        assert set((await check_liveness({"policy-0": engine})).dead) == {"policy-0"}, "nobody asked it for anything"
        await until_gone(child)
        engine = await cluster.restart_engine("policy", "policy-0")
        _, child = map(int, (await ask(engine, 1)).text.split())
        engine = await cluster.restart_engine("policy", "policy-0")  # one that is alive
        await until_gone(child)
        left.append(int((await ask(engine, 1)).text.split()[1]))
        assert is_running(left[0])

    left: list[int] = []
    on_cluster(seats(policy=1), scene)
    asyncio.run(until_gone(left[0]))


def test_an_engine_is_closed_before_its_process_ends(tmp_path: Path) -> None:
    def make(rank: int) -> Engine:
        from grmpipe.models.engines.simulated.simulated_engine import Script, SimulatedEngine

        class Held(SimulatedEngine):
            def close(self) -> None:
                (tmp_path / "closed").touch()

        return Held("policy", lambda ids, params, context: Script(token_ids=(1,), text="x"))

    async def scene(cluster: RayCluster) -> None:
        await cluster.start_engines("policy", make)

    on_cluster(seats(policy=1), scene)
    assert (tmp_path / "closed").exists()


def test_a_free_address_is_on_the_machine_of_the_first_process() -> None:
    async def scene(cluster: RayCluster) -> None:
        await cluster.start_members("learner", members())
        host, port = await cluster.free_address("learner")
        assert host == "127.0.0.1", "one machine: nobody outside needs to reach it"
        assert 0 < port < 65536
        assert len(cluster.machines("learner")) == 1

    on_cluster(seats(learner=1), scene)


def test_a_placement_that_cannot_be_had_fails_at_once_and_says_what_to_type() -> None:
    placement = seats(learner=4096)
    started_s = time.monotonic()
    with pytest.raises(ValueError, match=r"needs 4096 cpu slots .* set placement\.pools\.all\.slots="):
        asyncio.run(RayCluster.start(ClusterConfig(), placement))
    assert time.monotonic() - started_s < 10


def test_slots_that_another_job_holds_are_named_after_the_timeout() -> None:
    async def scene(cluster: RayCluster) -> None:
        with pytest.raises(ValueError, match=r"placement\.pools\.all: its 2 cpu slots did not become free within 1 s"):
            await RayCluster.start(ClusterConfig(start_timeout_s=1), seats(learner=2))

    on_cluster(seats(policy=2), scene)
