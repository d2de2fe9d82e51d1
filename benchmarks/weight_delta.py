"""What a push of bfloat16 weights costs as the changes since the last one (sync.delta), on a real model.

    OMP_NUM_THREADS=1 python benchmarks/weight_delta.py runs/weight_delta .smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

Trains float32 masters with the learner's AdamW on this repository's pages, and keeps what would be pushed, in bfloat16,
around the steps that are measured; an interrupted benchmark goes on from these files. A second training starts from
masters rounded to bfloat16, as a checkpoint in bfloat16 has them. Writes benchmarks/weight_delta.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from grmpipe.models.hub import convert_gguf
from grmpipe.models.types import WeightBucket
from grmpipe.models.weights.delta import DeltaReceiver, DeltaSender, apply_changes, pack_changes
from grmpipe.models.weights.receive_tensors import compute_checksums, receive_tensors
from grmpipe.models.weights.transport_ends import UnshardedBucket, WeightTransport, open_transport
from grmpipe.models.weights.weight_stream import WeightStream

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
OUTPUT = Path(__file__).with_suffix(".md")
LR, BETAS, CLIP = 1e-6, (0.9, 0.95), 1.0  # the learner's defaults, but for the rate
STEPS = (1, 10, 50)
KEPT = sorted({0} | {kept for step in STEPS for kept in (step - 1, step)})
WINDOW = 256  # tokens of a step
STARTS = {"float16": "float16, as read", "bfloat16": "rounded to bfloat16"}
PUSHES = [*((step - 1, step) for step in STEPS), *((0, step) for step in STEPS[1:])]
RATES = (1e-7, 1e-6, 1e-5, 1e-4)
REPEATS = 3
BLOCK, EVERY = 1 << 16, 8  # values


# -- training: what would be pushed ------------------------------------------------------------------------------------


def train(model: str, start: str, folder: Path) -> None:
    """Train, and keep what would be pushed after the steps of KEPT."""
    torch.manual_seed(0)
    learner = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if start == "bfloat16":
        learner.bfloat16().float()
    windows = read_windows(model)
    adam = torch.optim.AdamW(learner.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)
    for step in range(max(STEPS) + 1):
        if step in KEPT:
            torch.save(list_pushed(learner), folder / f"{start}_{step}.pt")
        tokens_1T = next(windows)
        learner(input_ids=tokens_1T, labels=tokens_1T).loss.backward()
        torch.nn.utils.clip_grad_norm_(learner.parameters(), CLIP)
        adam.step()
        adam.zero_grad()
        print(start, step, flush=True)


def read_windows(model: str) -> Iterator[Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    tokens_T = torch.tensor(tokenizer(text)["input_ids"])
    windows = tokens_T[: len(tokens_T) // WINDOW * WINDOW].view(-1, 1, WINDOW)
    return iter(windows[torch.randperm(len(windows))])


@torch.no_grad()
def list_pushed(learner: torch.nn.Module) -> Tensor:
    """All values of a push in order, bfloat16."""
    stream = WeightStream(learner, "bfloat16", 0)
    tensors = (tensor for index in range(stream.num_buckets) for tensor in stream.unshard_bucket(index).tensors)
    return torch.cat([tensor.to(torch.bfloat16).reshape(-1) for tensor in tensors])


# -- ways to send it ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """pack(old, new): bytes, which restore(old, these) makes into new; all uint8."""

    pack: Callable[[np.ndarray, np.ndarray], bytes]
    restore: Callable[[np.ndarray, bytes], np.ndarray]


def pack_xor(old_B: np.ndarray, new_B: np.ndarray) -> bytes:
    return bytes(pa.compress(old_B ^ new_B, codec="zstd", asbytes=True))


def restore_xor(old_B: np.ndarray, data: bytes) -> np.ndarray:
    return old_B ^ np.frombuffer(pa.decompress(data, len(old_B), codec="zstd"), np.uint8)


def pack_xor_planes(old_B: np.ndarray, new_B: np.ndarray) -> bytes:
    return bytes(pa.compress((old_B ^ new_B).reshape(-1, 2).T.tobytes(), codec="zstd", asbytes=True))


def restore_xor_planes(old_B: np.ndarray, data: bytes) -> np.ndarray:
    planes_B = np.frombuffer(pa.decompress(data, len(old_B), codec="zstd"), np.uint8)
    return old_B ^ planes_B.reshape(2, -1).T.reshape(-1)


def pack_mask(old_B: np.ndarray, new_B: np.ndarray) -> bytes:
    changed_V = old_B.view(np.int16) != new_B.view(np.int16)
    data = np.packbits(changed_V).tobytes() + new_B.view(np.int16)[changed_V].tobytes()
    return len(data).to_bytes(8, "little") + bytes(pa.compress(data, codec="zstd", asbytes=True))


def restore_mask(old_B: np.ndarray, data: bytes) -> np.ndarray:
    raw_B = np.frombuffer(pa.decompress(data[8:], int.from_bytes(data[:8], "little"), codec="zstd"), np.uint8)
    new_V = old_B.view(np.int16).copy()
    mask_bytes = -(-len(new_V) // 8)
    new_V[np.unpackbits(raw_B[:mask_bytes], count=len(new_V)).view(bool)] = raw_B[mask_bytes:].view(np.int16)
    return new_V.view(np.uint8)


def pack_places(old_B: np.ndarray, new_B: np.ndarray) -> bytes:
    """As TRL and prime-rl tried it: indices of 32 bits and new values, not compressed."""
    place_N = np.flatnonzero(old_B.view(np.int16) != new_B.view(np.int16)).astype(np.int32)
    return place_N.tobytes() + new_B.view(np.int16)[place_N].tobytes()


def restore_places(old_B: np.ndarray, data: bytes) -> np.ndarray:
    count, new_V = len(data) // 6, old_B.view(np.int16).copy()
    new_V[np.frombuffer(data, np.int32, count)] = np.frombuffer(data, np.int16, count, 4 * count)
    return new_V.view(np.uint8)


def pack_ours(old_B: np.ndarray, new_B: np.ndarray) -> bytes:
    packed_B = pack_changes(torch.from_numpy(old_B), torch.from_numpy(new_B))
    assert packed_B is not None, "most values changed"
    return bytes(packed_B.numpy().tobytes())


def restore_ours(old_B: np.ndarray, data: bytes) -> np.ndarray:
    new_B = torch.from_numpy(old_B.copy())
    apply_changes(new_B, torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return new_B.numpy()


def pack_ours_by_zlib(old_B: np.ndarray, new_B: np.ndarray) -> bytes:
    packed = pack_ours(old_B, new_B)
    planes = pa.decompress(packed[8:], 6 * int.from_bytes(packed[:8], "little"), codec="zstd", asbytes=True)
    return packed[:8] + zlib.compress(planes, 1)


def restore_ours_by_zlib(old_B: np.ndarray, data: bytes) -> np.ndarray:
    planes = zlib.decompress(data[8:])
    return restore_ours(old_B, data[:8] + bytes(pa.compress(planes, codec="zstd", asbytes=True)))


OURS = "gaps and steps, zstd"
WAYS = {
    "xor, zstd": Way(pack_xor, restore_xor),
    "xor in two byte planes, zstd": Way(pack_xor_planes, restore_xor_planes),
    "bit mask and values, zstd": Way(pack_mask, restore_mask),
    "indices and values": Way(pack_places, restore_places),
    "gaps and steps, zlib": Way(pack_ours_by_zlib, restore_ours_by_zlib),
    OURS: Way(pack_ours, restore_ours),
}


# -- what is measured --------------------------------------------------------------------------------------------------


def spend(work: Callable[[], T]) -> tuple[T, float]:
    """The CPU seconds of a call, the least of a few."""
    spent = []
    for _ in range(REPEATS):
        started_s = time.process_time()
        result = work()
        spent.append(time.process_time() - started_s)
    return result, min(spent)


def make_rows(folder: Path) -> Iterator[str]:
    """The bytes of each push by each way."""
    for start, words in STARTS.items():
        for before, after in PUSHES:
            old_B, new_B = (read(folder, start, step).view(torch.uint8).numpy() for step in (before, after))
            step_V = new_B.view(np.int16) - old_B.view(np.int16)
            changed = np.count_nonzero(step_V)
            shares = [len(way.pack(old_B, new_B)) / len(old_B) for way in WAYS.values()]
            yield (
                f"| {words} | {before} to {after} | {percent(changed / len(step_V))} | "
                f"{percent(np.count_nonzero(np.abs(step_V) == 1) / changed)} | {' | '.join(map(percent, shares))} |"
            )


def make_cost_rows(folder: Path) -> Iterator[str]:
    """CPU seconds by way, for a push after few changes and one after many."""
    for name, way in WAYS.items():
        cells = []
        for before, after in ((STEPS[-1] - 1, STEPS[-1]), (0, 1)):
            old_B, new_B = (read(folder, "float16", step).view(torch.uint8).numpy() for step in (before, after))
            data, packing_s = spend(lambda way=way, old_B=old_B, new_B=new_B: way.pack(old_B, new_B))  # type: ignore[misc]
            came_B, restoring_s = spend(lambda way=way, old_B=old_B, data=data: way.restore(old_B, data))  # type: ignore[misc]
            assert np.array_equal(came_B, new_B), name
            cells += [packing_s, restoring_s]
        gigabytes = len(old_B) / 1e9
        yield f"| {name} | {' | '.join(f'{cell / gigabytes:.2f}' for cell in cells)} |"


def make_push_rows(folder: Path) -> Iterator[str]:
    """CPU seconds of whole pushes and of changes, both ends with their checksums."""
    old, new = (read(folder, "float16", step) for step in (STEPS[-1] - 1, STEPS[-1]))
    gigabytes = new.nbytes / 1e9
    for transport in ("object_store", "disk"):
        with tempfile.TemporaryDirectory() as place:
            plain = open_transport(transport, "bfloat16", folder=place)
            _, whole_s = spend(lambda: load(plain.post(0, as_bucket(new))))  # noqa: B023
            plain.close()
            spent = []
            for _ in range(REPEATS):
                sender, receiver = DeltaSender(transport, "bfloat16", place), DeltaReceiver()
                load(receiver.restore(sender.post(0, as_bucket(old))))
                sender.is_whole = False
                spent.append(push_changes(sender, receiver, new))
                sender.close()
        packing_s, restoring_s = (min(one) for one in zip(*spent, strict=True))
        extra_s = packing_s + restoring_s - whole_s
        yield (
            f"| {transport} | {whole_s / gigabytes:.2f} | {packing_s / gigabytes:.2f} | "
            f"{restoring_s / gigabytes:.2f} | " + (f"{gigabytes / extra_s:.2f} GB/s |" if extra_s > 0 else "any |")
        )


def push_changes(sender: WeightTransport, receiver: DeltaReceiver, new: Tensor) -> tuple[float, float]:
    started_s = time.process_time()
    bucket = sender.post(0, as_bucket(new))
    packed_s = time.process_time()
    sums = load(receiver.restore(bucket))
    assert sums == {tensor.name: tensor.checksum for tensor in bucket.tensors}
    return packed_s - started_s, time.process_time() - packed_s


def as_bucket(values: Tensor) -> UnshardedBucket:
    return UnshardedBucket(names=("all",), shapes=(tuple(values.shape),), tensors=iter([values]))


def load(bucket: WeightBucket) -> dict[str, str]:
    with receive_tensors(bucket) as tensors:
        return compute_checksums(tensors)


def make_bound_rows(folder: Path) -> Iterator[str]:
    """The share of values that change if each moves by the whole rate, from anywhere between its neighbours' halves."""
    values = read(folder, "float16", 0).float().abs().clamp_min(torch.finfo(torch.bfloat16).smallest_normal)
    spacing = torch.exp2(torch.floor(torch.log2(values)) - 7)
    for rate in RATES:
        yield f"| {rate:g} | {percent((rate / spacing).clamp_max(1).mean().item())} |"


def read(folder: Path, start: str, step: int) -> Tensor:
    """Every EVERY-th block of what would be pushed."""
    values = torch.load(folder / f"{start}_{step}.pt", mmap=True)
    return torch.cat(values.split(BLOCK)[::EVERY])


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def write_report(folder: Path) -> str:
    values = read(folder, "float16", 0)
    return "\n".join(
        [
            "# A push as what changed in it",
            "",
            "`OMP_NUM_THREADS=1 python benchmarks/weight_delta.py runs/weight_delta "
            ".smollm2/SmolLM2-135M-Instruct.Q4_1.gguf`: bytes of a push of SmolLM2-135M in bfloat16 as what changed "
            f"since an earlier one (`sync.delta`), and CPU seconds of one thread; of every {EVERY}th block of {BLOCK} "
            f"values, {values.numel() / 1e6:.0f} M in all. "
            f"{platform.machine()} CPU, {os.cpu_count()} cores, torch {torch.__version__}, pyarrow {pa.__version__}.",
            "",
            f"The masters are float32; AdamW with betas {BETAS}, a rate of {LR:g} and a gradient norm of {CLIP:g} at "
            f"most trains on {WINDOW} tokens of this repository's pages per step. Masters start rounded to bfloat16, "
            "as in a checkpoint of that type: then most must first move by half the distance to the next value. Or "
            "they start as read, in float16: then one in eight is exactly between two values of bfloat16, and half of "
            "these change in step 1, however small it is. No training is as unfavourable.",
            "",
            "How many values changed, how many of these to the next value of bfloat16, and the share of all bytes by "
            "each way to send them; *gaps and steps, zstd* is `sync.delta`.",
            "",
            f"| masters | steps | values changed | to the next value | {' | '.join(WAYS)} |",
            "|---|---|---|---|" + "---|" * len(WAYS),
            *make_rows(folder),
            "",
            "AdamW's first update is the rate times the gradient's sign, for every value; later ones are a fraction of "
            "the rate. The distance to the next value of bfloat16 is 1/256 to 1/128 of a weight, so what a step of the "
            "whole rate changes depends on the sizes of the weights. For this model, with masters that lie anywhere "
            "between two values, as after a long training:",
            "",
            "| learning rate | values that one step of the whole rate changes |",
            "|---|---|",
            *make_bound_rows(folder),
            "",
            f"CPU seconds per GB of weights; after step {STEPS[-1]}, and after step 1, where many changed:",
            "",
            "| way | pack | restore | pack, step 1 | restore, step 1 |",
            "|---|---|---|---|---|",
            *make_cost_rows(folder),
            "",
            f"A push through its transport in one process, with checksums at both ends, after step {STEPS[-1]}; CPU "
            "seconds per GB of weights. The last column is the speed of a network or folder below which changes are "
            "faster for one engine, if nothing overlaps and both ends have one thread; every further engine that reads "
            "the same bytes moves it up.",
            "",
            "| transport | all bytes | changes: learner | changes: engine | faster below |",
            "|---|---|---|---|---|",
            *make_push_rows(folder),
            "",
        ]
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("model")
    options.add_argument("--out", type=Path, default=OUTPUT)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    model = convert_gguf(arguments.model) if arguments.model.endswith(".gguf") else arguments.model
    for start in STARTS:
        if not (arguments.folder / f"{start}_{max(STEPS)}.pt").exists():
            train(model, start, arguments.folder)
    arguments.out.write_text(write_report(arguments.folder), encoding="utf-8")


if __name__ == "__main__":
    main()
