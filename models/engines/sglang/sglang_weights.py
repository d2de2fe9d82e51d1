"""A push of weights to one SGLang server by its API: broadcasts and files. Never pickled tensors.

begin:  close what an earlier push left open; join the group, open a session (broadcasts only)
load:   /update_weights_from_distributed or /update_weights_from_disk, one call per bucket
commit: close the session, set the version, read it back

What arrived is told by the server's checksums of its parameters. It merges some tensors of a checkpoint into one and
doesn't report which: the names tell. Nothing is said about a tensor whose parameter isn't found.
"""

import asyncio
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import save_file

from grmpipe.models.engines.sglang.http_client import SglangHttp, within
from grmpipe.models.engines.taken_tensors import Taken
from grmpipe.models.engines.typed_json import read_as
from grmpipe.models.lm.causal_lm import outline_causal_lm
from grmpipe.models.lm.checkpoint_names import CheckpointNames
from grmpipe.models.types import Broadcast, EngineRefused, GroupLink, SafetensorsFile, WeightBucket, WeightReceipt
from grmpipe.models.weights.broadcast import read_checksums
from grmpipe.models.weights.delta import DeltaReceiver
from grmpipe.models.weights.receive_tensors import compute_checksums, receive_tensors
from grmpipe.models.weights.transport_ends import num_bytes
from grmpipe.models.weights.weight_files import folders_of_shared_memory, hold_folder

log = logging.getLogger(__name__)
GRACE_S = 5.0  # the server's own timeout comes first, and says more


class SglangWeights:
    """The pushes to one server. Knows which tensors the server takes, by their names in checkpoints: the server drops
    tensors with other names silently.

    same_machine: the server can open local files.
    tells_parameters: it can compute checksums of its own parameters, on a GPU only.
    """

    def __init__(self, http: SglangHttp, model_path: str, same_machine: bool, tells_parameters: bool = False) -> None:
        self._http = http
        self._tells_parameters = tells_parameters
        self._before: dict[str, tuple[str, ...]] = {}  # checksums of the server's parameters
        self._sent: dict[str, str] = {}  # since `begin`
        self._last_sent: dict[str, str] = {}
        self._same_machine = same_machine
        self._taken = Taken(*CheckpointNames(outline_causal_lm(model_path)).list_engine_tensors())
        self._link: GroupLink | None = None
        self._open = self._stuck = False
        self._checksums: dict[str, str] = {}
        self._deltas = DeltaReceiver()

    async def begin(self, link: GroupLink | None) -> None:
        """Raises ConnectionError if the group doesn't form, EngineDied if an old group still blocks the server: its
        only timeout is torch's, of half an hour.
        """
        self._checksums = {}
        await self._refuse_the_stuck()
        await self._end_update()
        if self._sent:  # an interrupted push left some of its tensors
            self._sent, self._last_sent, self._before = {}, {}, {}
        self._before = self._before or await self._parameters()
        if link != self._link:
            await self._leave()
        if link is not None:
            await self._join(link)
            await self._begin_update()

    async def load(self, bucket: WeightBucket) -> None:
        """Raises ValueError that names a tensor that doesn't fit, ConnectionError if a broadcast broke off."""
        try:
            self._sent |= {tensor.name: tensor.checksum for tensor in bucket.tensors}
            held = {tensor.name: self._taken.own_name(tensor) for tensor in bucket.tensors}
            if isinstance(bucket.payload, Broadcast):
                await self._receive(bucket, held)
            else:
                await self._load_file(bucket, held)
        except BaseException:
            await self._leave()  # otherwise the sender waits for us until its timeout
            raise

    async def commit(self, version: int) -> WeightReceipt:
        """The receipt of what came since `begin`. Raises RuntimeError if the server reports another version."""
        await self._end_update()
        name = str(version)
        await self._http.post("/update_weight_version", {"new_version": name, "abort_all_requests": False})
        reported = str((await self._http.get("/model_info")).get("weight_version"))
        if reported != name:
            raise RuntimeError(
                f"weights: version {name} was sent to SGLang at {self._http.url}, but it reports {reported}"
            )
        collected, self._checksums = self._checksums, {}
        if self._link is not None and self._tells_parameters and not all(self._sent.values()):
            sums = await asyncio.to_thread(read_checksums, self._link, version)
            self._sent = {name: sums.get(name, "") for name in self._sent}
        after = await self._parameters()
        missing = find_unapplied(self._sent, self._last_sent, self._before, after)
        self._before, self._last_sent, self._sent = after, {**self._last_sent, **self._sent}, {}
        return WeightReceipt(version=version, checksums=collected, unapplied=missing)

    async def _parameters(self) -> dict[str, tuple[str, ...]]:
        """Checksums of the server's parameters; empty if it has none."""
        if not self._tells_parameters:
            return {}
        try:
            answer = await self._http.post("/weights_checker", {"action": "checksum"})
            with self._http.die_if_unreadable():
                return read_digests(answer)
        except EngineRefused as error:
            log.warning(
                "SGLang at %s can't report its weights, so only the probe checks pushes: %s", self._http.url, error
            )
            self._tells_parameters = False
            return {}

    async def _join(self, link: GroupLink) -> None:
        if self._link == link:
            return
        body = {
            "master_address": link.address,
            "master_port": link.port,
            "rank_offset": link.rank,
            "world_size": link.world_size,
            "group_name": link.name,
            "backend": link.backend,
        }
        try:
            await within(link.meeting_timeout_s + GRACE_S, lambda: self._http.post("/init_weights_update_group", body))
        except EngineRefused as error:
            raise ConnectionError(f"weights: {error}") from None
        self._link = link

    async def _leave(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            body = {"group_name": link.name}
            try:
                await within(GRACE_S, lambda: self._http.post("/destroy_weights_update_group", body))
            except ConnectionError:
                self._stuck = True
            except EngineRefused:
                pass  # the server never joined

    async def _refuse_the_stuck(self) -> None:
        if self._stuck:
            try:
                await within(GRACE_S, lambda: self._http.get("/server_info"))
            except ConnectionError:
                raise self._http.die("hangs in a broadcast without data from the sender") from None
            self._stuck = False

    async def _begin_update(self) -> None:
        try:
            await self._http.post("/begin_weight_update", {})
        except EngineRefused:  # one is open, from a run that ended during a push
            await self._http.post("/end_weight_update", {})
            await self._http.post("/begin_weight_update", {})
        self._open = True

    async def _end_update(self) -> None:
        if self._open:
            self._open = False
            await self._http.post("/end_weight_update", {})

    async def _receive(self, bucket: WeightBucket, held: Mapping[str, str]) -> None:
        link = self._link
        if link is None:
            raise ConnectionError(
                "weights: a bucket comes by broadcast, but no process group was joined since the last one failed"
            )
        body = {
            "names": list(held.values()),
            "dtypes": [tensor.dtype for tensor in bucket.tensors],
            "shapes": [list(tensor.shape) for tensor in bucket.tensors],
            "group_name": link.name,
            "flush_cache": False,
            "load_format": "flattened_bucket",  # one broadcast: weight_updater.py of SGLang 0.5.23
        }
        first = f"weights: {bucket.tensors[0].name!r} and the following"
        allowed_s = link.timeout_s + link.time_for_bytes_s(sum(map(num_bytes, bucket.tensors))) + GRACE_S
        try:
            await within(allowed_s, lambda: self._http.post("/update_weights_from_distributed", body))
        except ConnectionError as error:
            raise ConnectionError(f"{first}: {error}") from None
        except EngineRefused as error:
            raise (ConnectionError if "Failed to receive" in str(error) else ValueError)(f"{first}: {error}") from None
        self._checksums |= {tensor.name: "" for tensor in bucket.tensors}

    async def _load_file(self, bucket: WeightBucket, held: Mapping[str, str]) -> None:
        """Load a file; held: sent name -> the server's. SGLang loads all files of a folder: it gets one with only these
        tensors.
        """
        in_file = isinstance(bucket.payload, SafetensorsFile)
        if not (in_file or self._same_machine):
            raise ValueError(
                f"sync.transport: an SGLang server on another machine takes no {type(bucket.payload).__name__}; "
                "set disk, gloo or nccl"
            )
        with hold_folder(_place_for(bucket), "sglang") as folder:
            checksums = await asyncio.to_thread(lambda: _fill(folder, self._deltas.restore(bucket), held))
            body = {"model_path": str(folder), "load_format": "safetensors", "flush_cache": False}
            try:
                await self._http.post("/update_weights_from_disk", body)
            except EngineRefused as error:
                raise ValueError(f"weights: {bucket.tensors[0].name!r} and the following: {error}") from None
        self._checksums |= checksums


def _place_for(bucket: WeightBucket) -> Path:
    """A folder for the bucket; next to a file that exists already, because the server can open that folder too."""
    if isinstance(bucket.payload, SafetensorsFile):
        return Path(bucket.payload.path).absolute().parent
    return folders_of_shared_memory()[0]


def _fill(folder: Path, bucket: WeightBucket, held_under: Mapping[str, str]) -> dict[str, str]:
    """Write one file of the bucket's tensors, a tied tensor under its first name. Returns their checksums."""
    file = bucket.payload.path if isinstance(bucket.payload, SafetensorsFile) else None
    with receive_tensors(bucket) as tensors:
        checksums = compute_checksums(tensors)
        copied = file is None or any(held_under[tensor.name] != tensor.name for tensor, _ in tensors)
        inside = folder / "model.safetensors"
        if copied:
            held = {held_under[tensor.name]: value.contiguous() for tensor, value in tensors}
            save_file(held, inside)
        else:
            assert file is not None
            folder.chmod(0o755)  # the server may belong to another user
            inside.symlink_to(Path(file).absolute())
    return checksums


# (the end of a checkpoint's name, the end of SGLang's).
MERGED = (
    (r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight$", ".experts.w13_weight"),
    (r"\.experts\.\d+\.(down_proj|w2)\.weight$", ".experts.w2_weight"),
    (r"\.(q|k|v)_proj\.(weight|bias)$", r".qkv_proj.\2"),
    (r"\.(gate|up)_proj\.weight$", ".gate_up_proj.weight"),
)


class Rank(msgspec.Struct):
    checksums: dict[str, str | int]


class CheckedWeights(msgspec.Struct):
    ranks: list[Rank] | None = None


def read_digests(reply: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Parameter -> its checksum on every rank, from an answer of /weights_checker. Raises NoAnswer."""
    ranks = [rank.checksums for rank in read_as(CheckedWeights, reply).ranks or ()]
    return {name: tuple(str(rank[name]) for rank in ranks if name in rank) for name in (ranks[0] if ranks else ())}


def find_unapplied(
    sent: Mapping[str, str],
    last_sent: Mapping[str, str],
    before: Mapping[str, tuple[str, ...]],
    after: Mapping[str, tuple[str, ...]],
) -> tuple[str, ...]:
    """Tensors (name -> checksum) that changed since the last push while their parameter changed on no rank."""
    changed = [name for name, checksum in sent.items() if checksum and last_sent.get(name, checksum) != checksum]
    return tuple(
        sorted(
            name
            for name in changed
            if (held := _parameter(name, after)) and held in before and before[held] == after[held]
        )
    )


def _parameter(name: str, known: Mapping[str, tuple[str, ...]]) -> str | None:
    if name in known:
        return name
    merged = (re.sub(end, own, name) for end, own in MERGED if re.search(end, name))
    return next((parameter for parameter in merged if parameter in known), None)
