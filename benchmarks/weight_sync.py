"""The seconds of a push of weights, by transport and size: `OMP_NUM_THREADS=1 python benchmarks/weight_sync.py`.

A model of random float32 parameters is pushed, in buckets, from this process to one Ray actor, which copies them into
its own state dict, as the embedded engine does. As in a run, the next bucket is made while the last one is loaded, and
buckets are sent by Ray (with bytes for the object store). The time is from the request of the first bucket until the
last one is loaded.

- first: the first push, which touches new memory; then: the median of the next three.
- without hashing: neither end computes checksums.
- the ratio is to a plain copy of the same tensors into memory that was touched before, by one thread, in this process,
  taken right before each push: the machine may be busy.

Only for transports that need no GPU. Writes benchmarks/weight_sync.md.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import ray
import torch
from torch import Tensor, nn

from grmpipe.models.types import GroupLink, WeightBucket
from grmpipe.models.weights.transport_ends import WeightTransport, open_transport
from grmpipe.models.weights.weight_stream import WeightStream

OUTPUT = Path(__file__).with_suffix(".md")
SIZES = (1_000_000, 10_000_000, 100_000_000, 500_000_000)
WAYS = ("shared_memory", "object_store", "disk", "gloo")
BUCKET_BYTES = 64 << 20  # the learner's default
LAST_PUSHES = 3
CPU = torch.device("cpu")


class RandomModel(nn.Module):
    """An embedding with a tenth of the parameters, then square matrices and vectors, as in a decoder."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        width = min(4096, 64 * max(1, int(num_parameters**0.5 / 400)))
        rows = num_parameters // 10 // width
        left = num_parameters - rows * width
        shapes: list[tuple[int, ...]] = [(rows, width)]
        shapes += [shape for _ in range(left // (width * (width + 1))) for shape in ((width, width), (width,))]
        rest = num_parameters - sum(torch.Size(shape).numel() for shape in shapes)
        self.weights = nn.ParameterList(torch.randn(shape) for shape in [*shapes, (rest,)])


@ray.remote(num_cpus=0)
class Receiver:
    """The engine's end, with weights only."""

    def __init__(self, num_parameters: int, hashing: bool) -> None:
        from grmpipe.models.weights.receive_tensors import WeightInbox

        torch.set_num_threads(1)
        self._model = RandomModel(num_parameters)
        self._inbox = WeightInbox(self._model, CPU)
        self._hashes = (
            nullcontext() if hashing else patch("grmpipe.models.weights.receive_tensors.tensor_checksums", no_checksums)
        )

    @torch.no_grad()
    def begin(self, link: GroupLink | None) -> None:
        self._inbox.begin(link)

    @torch.no_grad()
    def load(self, bucket: WeightBucket) -> None:
        with self._hashes:
            self._inbox.load(bucket)

    def sums(self) -> list[float]:
        return [float(parameter.detach().double().sum()) for parameter in self._model.parameters()]


def no_checksums(tensors: list[Tensor]) -> list[str]:
    return [""] * len(tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A transport at a size; seconds, and ratios to the plain copy."""

    first_s: float
    then_s: float
    ratio: float


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="parameters")
    options.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    options.add_argument("--out", type=Path, default=OUTPUT)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    ray.init(
        address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
        object_store_memory=1 << 30,
    )  # fmt: skip
    load = os.getloadavg()[0]
    lines: list[str] = []
    for num_parameters in arguments.sizes:
        for line in rows_of(num_parameters, arguments.ways):
            print(line, flush=True)
            lines.append(line)
    ray.shutdown()
    arguments.out.write_text(report(lines, load), encoding="utf-8")


def rows_of(num_parameters: int, ways: list[str]) -> Iterator[str]:
    model = RandomModel(num_parameters)
    copy = Copy(model)
    plain_s = copy.seconds()
    size = f"{num_parameters // 1_000_000} M"
    yield f"| {size} | a plain copy | | {seconds(plain_s)} | 1 | | |"
    for way in ways:
        hashed, bare = (measured(way, model, copy, num_parameters, hashing) for hashing in (True, False))
        yield (
            f"| {size} | {way} | {seconds(hashed.first_s)} | {seconds(hashed.then_s)} | {hashed.ratio:.1f} | "
            f"{seconds(bare.then_s)} | {bare.ratio:.1f} |"
        )


class Copy:
    """The least time for the same bytes."""

    def __init__(self, model: RandomModel) -> None:
        self._sources = [parameter.detach() for parameter in model.parameters()]
        self._targets = [torch.zeros_like(source) for source in self._sources]

    def seconds(self) -> float:
        """The best of three."""
        return min(self._once() for _ in range(3))

    def _once(self) -> float:
        started_s = time.perf_counter()
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source)
        return time.perf_counter() - started_s


def measured(way: str, model: RandomModel, copy: Copy, num_parameters: int, hashing: bool) -> Row:
    receiver = Receiver.remote(num_parameters, hashing)
    stream = WeightStream(model, "float32", BUCKET_BYTES)
    hashes = (
        nullcontext() if hashing else patch("grmpipe.models.weights.receive_tensors.tensor_checksums", no_checksums)
    )
    with tempfile.TemporaryDirectory() as folder, hashes:
        sender = open_transport(way, "float32", CPU, folder)
        mine, engines = two_links() if way == "gloo" else (None, None)
        begun = receiver.begin.remote(engines)
        sender.connect(mine)
        ray.get(begun)
        pushes, ratios = [], []
        for _ in range(1 + LAST_PUSHES):
            plain_s = copy.seconds()
            pushes.append(push(stream, sender, receiver))
            ratios.append(pushes[-1] / plain_s)
        sender.close()
    expected = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
    assert ray.get(receiver.sums.remote()) == expected, f"{way}: other weights arrived"
    ray.kill(receiver)
    return Row(first_s=pushes[0], then_s=statistics.median(pushes[1:]), ratio=statistics.median(ratios[1:]))


def push(stream: WeightStream, sender: WeightTransport, receiver: ray.actor.ActorHandle) -> float:
    """Push as the pusher does: at most two buckets are alive."""
    started_s = time.perf_counter()
    bucket = sender.post(0, stream.unshard_bucket(0))
    for index in range(stream.num_buckets):
        loading = receiver.load.remote(bucket)
        sender.deliver(index)
        if index + 1 < stream.num_buckets:
            bucket = sender.post(index + 1, stream.unshard_bucket(index + 1))
        ray.get(loading)
    return time.perf_counter() - started_s


def two_links() -> tuple[GroupLink, GroupLink]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    link = GroupLink(
        name=f"weights-{port}", backend="gloo", address="127.0.0.1", port=port, rank=0, world_size=2, timeout_s=60.0
    )
    return link, replace(link, rank=1)


def seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 0.1 else f"{1000 * value:.1f} ms"


def report(lines: list[str], load: float) -> str:
    return "\n".join(
        [
            "# A weight push, by transport",
            "",
            "`OMP_NUM_THREADS=1 python benchmarks/weight_sync.py`: seconds from the request of the first bucket until "
            "the last one is loaded by another process, float32, buckets of 64 MB; medians of 3 later pushes.",
            f"{platform.machine()} CPU, {os.cpu_count()} cores, torch {torch.__version__}, ray {ray.__version__}.",
            f"At its start, {load:.1f} other threads used those cores: this affects hashing most, which uses two.",
            "The ratio is to a plain copy of the same bytes, by one thread, measured right before each push.",
            "",
            "| parameters | transport | first push | later | ratio | without hashing | ratio |",
            "|---|---|---|---|---|---|---|",
            *lines,
            "",
            "The transports between GPUs (nccl, cuda_ipc) were not measured: there was no GPU.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
