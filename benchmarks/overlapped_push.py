"""A push by broadcast: bucket after bucket compared with a delivery beside the next gather; one sender with several.

    OMP_NUM_THREADS=1 python benchmarks/overlapped_push.py

Pushes: real FSDP2 ranks on gloo, real embedded engines and the run's own push, all in separate processes under Ray.
Both ways take turns on the same processes, so that other load of the machine affects both. A cost is an artificial wait
per byte, in the gather and in the broadcast, as slower links would have it; without one both compete for the cores.

Senders: threads that each broadcast their part of the same bytes to every receiver, a gloo group each. The cost of a
link is paid by one sender for all that it sends, or one receiver for all that it receives.

Only on CPUs. Writes benchmarks/overlapped_push.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.train.learner.learner_group import LearnerGroup
from grmpipe.train.learner.learner_spec import LearnerSpec
from models.engines.embedded.embedded_engine import EmbeddedEngine
from models.settings import EmbeddedConfig
from models.tiny.resolve import resolve_model
from models.types import Engine, GroupLink
from models.weights.process_group import BroadcastGroup
from scheduler.placement import ClusterConfig, PlacementConfig, PoolConfig, RoleConfig, place
from scheduler.processes.actors import EngineFactory, MemberFactory, free_port
from scheduler.processes.ray_cluster import RayCluster
from scheduler.weights.weight_push import SyncConfig, SyncReport
from scheduler.weights.weight_sync import WeightSync

OUTPUT = Path(__file__).with_suffix(".md")
BUCKET_BYTES = 4 << 20
NUM_ENGINES = 2
TENSOR_BYTES = 1 << 20
COSTS = (0.0, 2e-8, 4e-8)  # seconds per byte
SENDERS = (1, 2, 4)
ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds of a push, without the first one, which touches new memory."""

    ranks: int
    cost_s_per_byte: float
    num_bytes: int
    serial_s: float
    overlapped_s: float


def save_model(folder: str, hidden_size: int, num_layers: int) -> None:
    """A random model, with the tokenizer of the tiny policy."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny://policy"))
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2, head_dim=hidden_size // 4,
        max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ranks_of(spec: LearnerSpec) -> MemberFactory:
    """Learners whose gathers and broadcasts cost time per byte. In a function, so that Ray sends the class by value."""
    from grmpipe.train.learner.learner import Learner

    class CostlyLearner(Learner):
        def set_way(self, overlapped, cost_s_per_byte):  # type: ignore[no-untyped-def]
            """Overlapped: as in a run. Otherwise a delivery ends before the next bucket is gathered."""
            self._overlapped, self._cost_s_per_byte = overlapped, cost_s_per_byte

        def bucket(self, index):  # type: ignore[no-untyped-def]
            bucket = super().bucket(index)
            shapes = self._stream.unsharded(index).shapes
            time.sleep(self._cost_s_per_byte * sum(4 * torch.Size(shape).numel() for shape in shapes))
            return bucket

        def deliver(self, index):  # type: ignore[no-untyped-def]
            transport = self._transport
            shapes = self._stream.unsharded(index).shapes
            wait_s = self._cost_s_per_byte * sum(4 * torch.Size(shape).numel() for shape in shapes)

            def send() -> None:
                time.sleep(wait_s)
                transport.deliver(index)

            self._delivery.begin(send)
            if not self._overlapped:
                self.delivered()

    return lambda rank, world_size, init_method: CostlyLearner(spec, rank, world_size, init_method)


def engine_of(path: str) -> EngineFactory:
    def make(rank: int) -> Engine:
        return EmbeddedEngine(path, "policy", EmbeddedConfig(max_batch_rows=2))

    return make


async def measured_pushes(num_ranks: int, path: str, costs: Sequence[float], rounds: int) -> list[Row]:
    config = PlacementConfig(
        pools={"all": PoolConfig(slots=max(num_ranks, NUM_ENGINES))},
        roles={
            "learner": RoleConfig(pool="all", replicas=num_ranks),
            "policy": RoleConfig(pool="all", replicas=NUM_ENGINES),
        },
    )
    spec = LearnerSpec(
        model_path=path, train=TrainConfig(), algorithm=AlgorithmConfig(), max_new_tokens=8, device="cpu",
        bucket_bytes=BUCKET_BYTES, transport="gloo",
    )  # fmt: skip
    cluster = await RayCluster.start(ClusterConfig(), place(config, ("learner", "policy")))
    try:
        actors, engines = await asyncio.gather(
            cluster.start_group("learner", ranks_of(spec)), cluster.start_engines("policy", engine_of(path))
        )
        group = LearnerGroup(actors)
        sync = WeightSync(
            group, range(3, 20), SyncConfig(), transport="gloo", group="gloo",
            new_address=partial(cluster.free_address, "learner"),
        )  # fmt: skip
        versions = itertools.count()

        async def push(overlapped: bool, cost: float) -> SyncReport:
            await actors.call_all("set_way", overlapped, cost)
            return await sync.push(lambda: engines, next(versions))

        await push(True, 0.0)
        rows = []
        for cost in costs:
            found: dict[bool, list[SyncReport]] = {False: [], True: []}
            for _, overlapped in itertools.product(range(rounds), (False, True)):
                found[overlapped].append(await push(overlapped, cost))
            serial, together = (statistics.median(report.seconds for report in found[way]) for way in (False, True))
            rows.append(
                Row(
                    ranks=num_ranks, cost_s_per_byte=cost, num_bytes=found[True][0].num_bytes, serial_s=serial,
                    overlapped_s=together,
                )
            )  # fmt: skip
        return rows
    finally:
        await cluster.shutdown()


# -- senders -------------------------------------------------------------------------------------------------------


class Link:
    """A machine's network card: what it carries at the same time shares it."""

    def __init__(self, s_per_byte: float) -> None:
        self._s_per_byte, self._free = s_per_byte, threading.Lock()

    def carry(self, num_bytes: int) -> None:
        if self._s_per_byte:
            with self._free:
                time.sleep(self._s_per_byte * num_bytes)


class Ends:
    """Senders and receivers, threads of this process, with the groups of one number of senders."""

    def __init__(self, num_senders: int) -> None:
        self._pairs = [
            [(end, BroadcastGroup()) for end in (sender, *range(-NUM_ENGINES, 0))] for sender in range(num_senders)
        ]
        for sender, pairs in enumerate(self._pairs):
            link = GroupLink(
                name=f"{num_senders}-{sender}", backend="gloo", address="127.0.0.1", port=free_port("127.0.0.1"),
                rank=0, world_size=len(pairs), timeout_s=60.0,
            )  # fmt: skip
            together([partial(group.join, replace(link, rank=rank)) for rank, (_, group) in enumerate(pairs)])

    def seconds(self, num_tensors: int, sender_cost: float, receiver_cost: float) -> float:
        """Until every receiver has all bytes, dealt evenly over the senders."""
        cards = {end: Link(receiver_cost if end < 0 else sender_cost) for pairs in self._pairs for end, _ in pairs}
        each, shape = num_tensors // len(self._pairs), (TENSOR_BYTES // 4,)

        def take_part(end: int, group: BroadcastGroup) -> None:
            for _ in range(each):
                cards[end].carry(TENSOR_BYTES)
                if end < 0:
                    group.receive(["w"], [torch.float32], [shape])
                else:
                    group.send(["w"], [torch.ones(shape)])

        began_s = time.perf_counter()
        together([partial(take_part, end, group) for pairs in self._pairs for end, group in pairs])
        return time.perf_counter() - began_s


def together(calls: Sequence[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(len(calls)) as threads:
        for done in [threads.submit(call) for call in calls]:
            done.result()


def sender_rows(num_tensors: int, cost: float, rounds: int) -> list[str]:
    costs = {
        "none: loopback of one machine": (0.0, 0.0),
        "at each sender": (cost, 0.0),
        "at each receiver": (0.0, cost),
        "at both": (cost, cost),
    }
    ends = {number: Ends(number) for number in SENDERS}
    for own in ends.values():
        own.seconds(num_tensors, 0.0, 0.0)  # touches new memory
    lines = []
    for name, cost_of in costs.items():
        found: dict[int, list[float]] = {number: [] for number in SENDERS}
        for _, number in itertools.product(range(3 * rounds), SENDERS):
            found[number].append(ends[number].seconds(num_tensors, *cost_of))
        one, two, four = (min(times) for times in found.values())  # other load of the machine only adds
        lines.append(f"| {name} | {one:.2f} s | {two:.2f} s | {four:.2f} s | {one / four:.2f} |")
        print(lines[-1], flush=True)
    return lines


# -- report --------------------------------------------------------------------------------------------------------


def push_row(row: Row) -> str:
    cost = f"{1e9 * row.cost_s_per_byte:.0f} ns/byte" if row.cost_s_per_byte else "none"
    return (
        f"| {row.ranks} | {row.num_bytes / 1e6:.0f} MB | {cost} | {row.serial_s:.2f} s | {row.overlapped_s:.2f} s | "
        f"{row.serial_s / row.overlapped_s:.2f} |"
    )


def report(pushes: Sequence[str], senders: Sequence[str], load: float, num_bytes: int, rounds: int) -> str:
    return "\n".join(
        [
            "# Pushes by broadcast: overlap, and several senders",
            "",
            "`OMP_NUM_THREADS=1 python benchmarks/overlapped_push.py`. "
            f"{platform.machine()} CPU, {os.cpu_count()} cores, torch {torch.__version__}; at its start, {load:.1f} "
            "other threads used those cores.",
            "",
            "## A delivery beside the next gather",
            "",
            f"FSDP2 ranks on gloo push float32 weights to {NUM_ENGINES} embedded engines, in buckets of "
            f"{BUCKET_BYTES >> 20} MB. The cost is an artificial wait per byte in the gather of a bucket, and the same "
            f"in its broadcast. Both ways take turns on the same processes; medians of {rounds}.",
            "",
            "| ranks | weights | cost | one after the other | overlapped | ratio |",
            "|---|---|---|---|---|---|",
            *pushes,
            "",
            "## Several senders",
            "",
            f"{num_bytes / 1e6:.0f} MB to {NUM_ENGINES} receivers, dealt over 1, 2 or 4 senders, a gloo group each, "
            f"all in one process; best of {3 * rounds}; an artificial cost per byte at each end's link.",
            "",
            "| cost | 1 sender | 2 senders | 4 senders | ratio 1 to 4 |",
            "|---|---|---|---|---|",
            *senders,
            "",
            "Every receiver needs every byte, so its own link is the bound: several senders help only where a sender's "
            "link is slower than a receiver's. Pushes have one sender. Without a cost the times are those of waking "
            "threads on a busy machine, a tensor at a time, and vary from run to run.",
            "",
        ]
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=int, nargs="*", default=[2])
    options.add_argument("--hidden-size", type=int, default=512)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--tensors", type=int, default=64, help="of 1 MB, for the senders")
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--out", type=Path, default=OUTPUT)
    arguments = options.parse_args()
    load = os.getloadavg()[0]
    pushes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, arguments.hidden_size, arguments.layers)
        for num_ranks in arguments.ranks:
            for row in asyncio.run(measured_pushes(num_ranks, folder, COSTS, arguments.rounds)):
                pushes.append(push_row(row))
                print(pushes[-1], flush=True)
    senders = sender_rows(arguments.tensors, 2e-8, arguments.rounds)
    arguments.out.write_text(
        report(pushes, senders, load, arguments.tensors * TENSOR_BYTES, arguments.rounds), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
