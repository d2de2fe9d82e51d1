"""Every transport of weights, from a sender here to receivers in separate processes: what arrives, and what fails."""

from __future__ import annotations

import fcntl
import itertools
import os
import pickle
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grmpipe.models.types import Broadcast, GroupLink, SafetensorsFile, SharedMemory, WeightBucket, WeightTensor
from grmpipe.models.weights import weight_files
from grmpipe.models.weights.broadcast import GlooBroadcasts
from grmpipe.models.weights.process_group import BroadcastLink
from grmpipe.models.weights.receive_tensors import compute_checksums, receive_tensors
from grmpipe.models.weights.safetensors_files import SafetensorsFiles
from grmpipe.models.weights.shared_memory import SharedMemoryFiles
from grmpipe.models.weights.transport_ends import WeightTransport, open_transport
from grmpipe.models.weights.weight_files import SharedArena, WeightFile, folders_of_shared_memory, hold_folder, sweep
from grmpipe.models.weights.weight_stream import WeightStream

RECEIVER = Path(__file__).with_name("receiver_process.py")
SENDER = Path(__file__).with_name("sharded_sender_process.py")
CPU = torch.device("cpu")
ON_CPU = ("object_store", "shared_memory", "disk", "gloo")
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


class Receiver:
    """A receiver in a separate process, and its commands."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(RECEIVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV
        )

    def tell(self, *command: object) -> None:
        assert self.process.stdin is not None
        pickle.dump(command, self.process.stdin)
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return pickle.load(self.process.stdout)

    def ask(self, *command: object) -> Any:
        self.tell(*command)
        return self.answer()


@pytest.fixture(scope="module")
def start_receiver() -> Iterator[Callable[[], Receiver]]:
    started: list[Receiver] = []

    def start() -> Receiver:
        started.append(Receiver())
        assert started[-1].ask("join", None) is None  # its imports are done
        return started[-1]

    yield start
    for receiver in started:
        receiver.process.kill()
        receiver.process.communicate()


@pytest.fixture(scope="module")
def receivers(start_receiver: Callable[[], Receiver]) -> list[Receiver]:
    """Two receivers, for tests that don't harm them."""
    return [start_receiver() for _ in range(2)]


class Oddities(nn.Module):
    """Difficult shapes: alignment, emptiness and ties; a saved buffer, and one that isn't."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 5)
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.embed.weight
        self.odd = nn.Parameter(torch.randn(3, 7, 1))
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.crossed = nn.Parameter(torch.randn(4, 6).T)  # not contiguous
        self.register_buffer("steps", torch.tensor([3.0]))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


NAMES = {"embed.weight", "odd", "scalar", "empty", "crossed", "steps"}
links = itertools.count()


def new_links(members: int, timeout_s: float = 20.0) -> list[GroupLink]:
    """Links for the sender and each receiver."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port, name = probe.getsockname()[1], f"weights-{next(links)}"
    link = GroupLink(
        name=name, backend="gloo", address="127.0.0.1", port=port, rank=0, world_size=members, timeout_s=timeout_s
    )
    return [replace(link, rank=rank) for rank in range(members)]


def connect(sender: WeightTransport, receivers: list[Receiver], timeout_s: float = 20.0, command: str = "join") -> None:
    first, *others = new_links(1 + len(receivers), timeout_s)
    for receiver, link in zip(receivers, others, strict=True):
        receiver.tell(command, link)
    sender.connect(first)
    assert [receiver.answer() for receiver in receivers] == [None] * len(receivers)


def push(sender: WeightTransport, stream: WeightStream, receivers: list[Receiver]) -> list[dict[str, Tensor]]:
    """Push all buckets to all receivers; returns what each then holds. Asserts that the checksums are those
    announced.
    """
    held: list[dict[str, Tensor]] = [{} for _ in receivers]
    for index in range(stream.num_buckets):
        bucket = sender.post(index, stream.unshard_bucket(index))
        for receiver in receivers:
            receiver.tell("load", bucket)
        sender.deliver(index)
        for mine, receiver in zip(held, receivers, strict=True):
            checksums, tensors = receiver.answer()
            assert checksums == {tensor.name: tensor.checksum for tensor in bucket.tensors}
            assert all(re.fullmatch("[0-9a-f]{16}", checksum) for checksum in checksums.values())
            mine |= tensors
    return held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [100, 1 << 20])
@pytest.mark.parametrize("transport", ON_CPU)
def test_every_tensor_arrives_as_it_was_cast(
    transport: str, dtype: str, bucket_bytes: int, receivers: list[Receiver], tmp_path: Path
) -> None:
    model = Oddities()
    sender = open_transport(transport, dtype, CPU, str(tmp_path))
    stream = WeightStream(model, dtype, bucket_bytes)
    if transport == "gloo":
        connect(sender, receivers)
    try:
        for change in (0.0, 1.0):  # the second push reuses the memory of the first
            with torch.no_grad():
                model.odd.add_(change)
            expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in model.state_dict().items()}
            for held in push(sender, stream, receivers):
                assert held.keys() == NAMES
                for name, tensor in held.items():
                    assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
    finally:
        sender.close()


def test_a_bucket_can_be_posted_while_the_one_before_is_loaded(receivers: list[Receiver], tmp_path: Path) -> None:
    model = Oddities()
    stream = WeightStream(model, "float32", 100)
    for transport in ON_CPU:
        sender = open_transport(transport, "float32", CPU, str(tmp_path))
        if transport == "gloo":
            connect(sender, receivers[:1])
        first, second = (sender.post(index, stream.unshard_bucket(index)) for index in range(2))
        for index, bucket in enumerate((first, second)):
            receivers[0].tell("load", bucket)
            sender.deliver(index)
            checksums, _ = receivers[0].answer()
            assert checksums == {tensor.name: tensor.checksum for tensor in bucket.tensors}, transport
        sender.close()


@pytest.mark.parametrize("transport", ["shared_memory", "disk"])
def test_files_are_private_and_gone_after_close_and_at_exit(transport: str, tmp_path: Path) -> None:
    def files() -> list[Path]:
        folders = [tmp_path] if transport == "disk" else folders_of_shared_memory()
        found = (path for folder in folders for path in folder.glob(f"grmpipe-weights-*-{os.getpid()}-*"))
        return [path for path in found if path not in others]

    others: list[Path] = []  # of engines in this process that other tests opened
    others = files()
    stream = WeightStream(Oddities(), "float32", 100)
    sender = open_transport(transport, "float32", CPU, str(tmp_path))
    for index in range(stream.num_buckets):
        sender.post(index, stream.unshard_bucket(index))
    assert len(files()) == 2
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files())
    sender.close()
    assert not files()
    program = (
        "import torch\nfrom pathlib import Path\n"
        "from grmpipe.models.weights.weight_files import SharedArena, WeightFile\n"
        f"file, arena = WeightFile(Path({str(tmp_path)!r})), SharedArena()\n"
        "arena.reserve(1000)[3] = 1\nprint(file.path, arena.path)"
    )
    left = subprocess.run([sys.executable, "-c", program], env=ENV, capture_output=True, text=True, check=True)
    assert len(left.stdout.split()) == 2 and not any(Path(path).exists() for path in left.stdout.split())


def test_only_what_dead_processes_left_is_swept(tmp_path: Path) -> None:
    mine = WeightFile(tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = socket.gethostname()
    left = tmp_path / f"grmpipe-weights-{host}-{dead.pid}-0"
    left_on_disk = tmp_path / f"grmpipe-weights-{host}-{dead.pid}-1.safetensors"
    locked = tmp_path / f"grmpipe-weights-{host}-{dead.pid}-2"  # its process has another id where it runs
    elsewhere = tmp_path / f"grmpipe-weights-other.{host}-{dead.pid}-3"
    foreign = tmp_path / "model.safetensors"
    for path in (left, left_on_disk, locked, elsewhere, foreign):
        path.write_bytes(b"x")
    with locked.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep(tmp_path)
    assert set(tmp_path.iterdir()) == {mine.path, locked, elsewhere, foreign}
    mine.close()


def test_unlocked_memory_is_swept_even_if_its_process_id_is_in_use_again(tmp_path: Path) -> None:
    left = tmp_path / f"grmpipe-weights-{socket.gethostname()}-{os.getpid()}-77"
    left.write_bytes(b"x")
    folder = tmp_path / f"grmpipe-sglang-{socket.gethostname()}-{os.getpid()}-abc"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x")
    with hold_folder(tmp_path, "sglang") as held:
        sweep(tmp_path)
        assert list(tmp_path.iterdir()) == [held]
    assert not list(tmp_path.iterdir())


def test_full_shared_memory_names_the_key_and_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(weight_files, "folders_of_shared_memory", lambda: [tmp_path])
    with pytest.raises(ValueError, match=r"sync\.transport: shared_memory needs \d+ MB .*set sync\.transport=disk"):
        SharedArena().reserve(1 << 50)
    assert not list(tmp_path.iterdir())


def test_shared_memory_lies_where_there_is_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(weight_files, "SHARED_MEMORY", tmp_path / "missing")
    monkeypatch.setattr(weight_files.tempfile, "gettempdir", lambda: str(tmp_path))
    arena = SharedArena()
    arena.reserve(1000)
    assert Path(arena.path).parent == tmp_path
    arena.close()


def test_a_flipped_byte_in_shared_memory_shows_in_the_sum_of_its_tensor(receivers: list[Receiver]) -> None:
    stream = WeightStream(Oddities(), "float32", 1 << 20)
    sender = SharedMemoryFiles("float32")
    bucket = sender.post(0, stream.unshard_bucket(0))
    assert isinstance(bucket.payload, SharedMemory)
    with Path(bucket.payload.path).open("r+b") as file:
        (byte,) = file.read(1)
        file.seek(0)
        file.write(bytes([byte ^ 1]))
    checksums, _ = receivers[0].ask("load", bucket)
    assert [t.name for t in bucket.tensors if checksums[t.name] != t.checksum] == [bucket.tensors[0].name]
    sender.close()


def test_a_receiver_cannot_write_into_the_senders_memory() -> None:
    stream = WeightStream(Oddities(), "float32", 1 << 20)
    sender = SharedMemoryFiles("float32")
    bucket = sender.post(0, stream.unshard_bucket(0))
    with receive_tensors(bucket) as tensors:
        for _, tensor in tensors:
            tensor.fill_(7)
    with receive_tensors(bucket) as tensors:
        assert compute_checksums(tensors) == {tensor.name: tensor.checksum for tensor in bucket.tensors}
    sender.close()


def test_a_tensor_that_differs_from_its_announcement_is_named(receivers: list[Receiver], tmp_path: Path) -> None:
    stream = WeightStream(Oddities(), "float32", 1 << 20)
    disk, memory = SafetensorsFiles("float32", CPU, str(tmp_path)), SharedMemoryFiles("float32")
    wrong = WeightTensor(name="odd", dtype="float32", shape=(3, 8, 1), checksum="")
    missing = WeightTensor(name="missing", dtype="float32", shape=(3,), checksum="")
    long = WeightTensor(name="long", dtype="float32", shape=(1 << 20,), checksum="")
    payload = disk.post(0, stream.unshard_bucket(0)).payload
    for tensor in (wrong, missing):
        error = receivers[0].ask("load", WeightBucket(tensors=(tensor,), payload=payload))
        assert isinstance(error, ValueError) and repr(tensor.name) in str(error)
    payload = memory.post(0, stream.unshard_bucket(0)).payload
    error = receivers[0].ask("load", WeightBucket(tensors=(long,), payload=payload))
    assert isinstance(error, ValueError) and "'long'" in str(error)
    gone = SafetensorsFile(path=str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError), receive_tensors(WeightBucket(tensors=(wrong,), payload=gone)):
        pass
    disk.close()
    memory.close()


class Large(nn.Module):
    """Twelve tensors of 4 MB: a bucket of six is more than sockets buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.randn(1 << 20) for _ in range(12))


class Huge(nn.Module):
    """One tensor of 32 MB: it never fits into the sockets' buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Parameter(torch.randn(1 << 23))


@pytest.mark.parametrize(("end", "timeout_s"), [("die", 12.0), ("hang", 4.0)])
def test_receiver_lost_in_a_broadcast_fails_the_sender_in_time_and_restarts_no_other(
    end: str, timeout_s: float, receivers: list[Receiver], start_receiver: Callable[[], Receiver]
) -> None:
    (survivor, replacement), lost = receivers, start_receiver()
    stream = WeightStream(Large(), "float32", 24 << 20)
    sender = GlooBroadcasts("float32", CPU)
    connect(sender, [survivor, lost], timeout_s)
    first, second = (sender.post(index, stream.unshard_bucket(index)) for index in range(2))
    survivor.tell("load", first)
    lost.tell("receive_then", first, end)
    sender.deliver(0)
    assert isinstance(survivor.answer(), tuple)
    survivor.tell("load", second)
    in_time_s = 10.0  # of 12, which the sender need not wait for after a death
    started_s = time.monotonic()
    with pytest.raises(ConnectionError, match=r"sending 'layers\.6' .. 'layers\.11' in the group .* of 3 failed: \w+"):
        sender.deliver(1)
    assert time.monotonic() - started_s < in_time_s
    # It may have received all already. If not, it fails when the sender leaves or, in the middle of a bucket, in time.
    assert isinstance(survivor.answer(), ConnectionError | tuple)
    assert time.monotonic() - started_s < timeout_s + in_time_s
    with pytest.raises(ConnectionError, match="no process group was joined"):
        sender.deliver(1)
    connect(sender, [survivor, replacement])
    push(sender, stream, [survivor, replacement])
    sender.close()


def test_receiver_left_in_the_middle_of_a_bucket_fails_at_its_timeout_and_joins_again(
    receivers: list[Receiver], start_receiver: Callable[[], Receiver]
) -> None:
    """Gloo doesn't tell it that the connection closed."""
    survivor, lost = receivers[0], start_receiver()
    sender = GlooBroadcasts("float32", CPU)
    bucket = sender.post(0, WeightStream(Huge(), "float32", 1 << 30).unshard_bucket(0))
    connect(sender, [survivor, lost], timeout_s=4.0)
    survivor.tell("load", bucket)
    time.sleep(0.5)  # it waits for the tensor
    os.kill(survivor.process.pid, signal.SIGSTOP)
    try:
        lost.process.kill()
        with pytest.raises(ConnectionError, match="sending"):
            sender.deliver(0)
    finally:
        os.kill(survivor.process.pid, signal.SIGCONT)
    started_s = time.monotonic()
    error = survivor.answer()
    assert isinstance(error, ConnectionError) and time.monotonic() - started_s < 20, error
    connect(sender, [survivor])
    push(sender, WeightStream(Oddities(), "float32", 1 << 20), [survivor])
    sender.close()


def test_missing_peer_is_awaited_until_the_timeout() -> None:
    sender = GlooBroadcasts("float32", CPU)
    started_s = time.monotonic()
    with pytest.raises(ConnectionError, match=r"rank 0 of 3 could not join .* within 1 s"):
        sender.connect(new_links(3, timeout_s=1.0)[0])
    assert time.monotonic() - started_s < 10


def test_leaving_ends_the_wait_of_the_others(receivers: list[Receiver]) -> None:
    sender = GlooBroadcasts("float32", CPU)
    bucket = sender.post(0, WeightStream(Oddities(), "float32", 1 << 20).unshard_bucket(0))
    connect(sender, receivers[:1], timeout_s=60.0)
    receivers[0].tell("load", bucket)
    time.sleep(0.2)
    started_s = time.monotonic()
    sender.connect(None)
    assert isinstance(receivers[0].answer(), ConnectionError)
    assert time.monotonic() - started_s < 20


def test_a_broadcast_without_a_group_says_what_is_missing() -> None:
    bucket = WeightBucket(tensors=(), payload=Broadcast())
    with pytest.raises(ConnectionError, match="no process group"), receive_tensors(bucket):
        pass


def test_the_senders_group_meets_torchs_own_as_sglang_makes_it(
    receivers: list[Receiver], start_receiver: Callable[[], Receiver]
) -> None:
    """Group, stores and broadcasts by torch's functions, next to a receiver of ours."""
    sglang, ours = start_receiver(), receivers[0]
    model = Oddities()
    stream = WeightStream(model, "bfloat16", 1 << 20)
    sender = GlooBroadcasts("bfloat16", CPU)
    first, second, third = new_links(3)
    sglang.tell("join_as_sglang", second)
    ours.tell("join", third)
    sender.connect(first)
    assert sglang.answer() is ours.answer() is None
    bucket = sender.post(0, stream.unshard_bucket(0))
    sglang.tell("load_as_sglang", bucket)
    ours.tell("load", bucket)
    sender.deliver(0)
    for came in (sglang.answer(), ours.answer()[1]):
        assert came.keys() == NAMES
        assert all(torch.equal(came[name], model.state_dict()[name].bfloat16()) for name in NAMES)
    sender.close()


def test_two_ranks_send_one_model_without_either_holding_another_whole_one(receivers: list[Receiver]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    first, second = (
        subprocess.Popen(
            [sys.executable, str(SENDER), str(rank), "2", address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV,
        )
        for rank in range(2)
    )  # fmt: skip
    assert first.stdin is not None and first.stdout is not None
    whole: dict[str, Tensor] = pickle.load(first.stdout)
    num_buckets, held = pickle.load(first.stdout), {}
    assert num_buckets == 5
    for _ in range(num_buckets):
        bucket: WeightBucket = pickle.load(first.stdout)
        checksums, tensors = receivers[0].ask("load", bucket)
        assert checksums == {tensor.name: tensor.checksum for tensor in bucket.tensors}
        held |= tensors
        first.stdin.write(b"\n")
        first.stdin.flush()
    assert held.keys() == whole.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, whole[name].bfloat16()) for name, tensor in held.items())
    for process in (first, second):
        assert process.communicate(timeout=60)[0] == b"" and process.returncode == 0
    assert isinstance(bucket.payload, SharedMemory) and not Path(bucket.payload.path).exists()


@pytest.mark.parametrize(("transport", "instead"), [("nccl", "gloo"), ("cuda_ipc", "shared_memory")])
def test_ways_between_gpus_are_refused_without_one(transport: str, instead: str) -> None:
    with pytest.raises(ValueError, match=rf"sync\.transport: {transport} .* set {instead}"):
        open_transport(transport, "float32", CPU, "")


def test_disk_needs_a_folder() -> None:
    with pytest.raises(ValueError, match=r"sync\.transport: disk needs a folder"):
        open_transport("disk", "float32", CPU, "")


def test_an_engines_worker_needs_no_transformers_to_receive() -> None:
    program = (
        "import sys\nimport grmpipe.models.weights.receive_tensors\n"
        "parts = [name.split('.') for name in sys.modules]\n"
        "print(sorted({'.'.join(one[:2]) for one in parts if one[0] in {'transformers', 'grmpipe', 'ray'}}))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], env=ENV, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "['grmpipe', 'grmpipe.models']"


def test_only_the_first_broadcast_of_a_group_has_the_time_that_meeting_takes() -> None:
    asked_s: list[float] = []

    class Backend:
        def broadcast(self, tensor: torch.Tensor, root: int, timeout: timedelta) -> Backend:
            asked_s.append(timeout.total_seconds())
            return self

        def wait(self, timeout: timedelta) -> None:
            pass

    group = BroadcastLink()
    group._backend = Backend()  # type: ignore[assignment]
    group._link = GroupLink(
        name="g", backend="gloo", address="", port=0, rank=0, world_size=2, timeout_s=20.0, join_timeout_s=120.0
    )
    for num_bytes in (0, 1, 1, 10**9):
        group.send(["a", "b"], torch.empty(num_bytes, dtype=torch.uint8, device="meta"))
    assert asked_s == [pytest.approx(120), pytest.approx(20), 30], "no call for nothing; time for many bytes"
