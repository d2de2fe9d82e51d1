"""A push of weights to one SGLang server, by its own calls: broadcasts and files. Never its pickled tensors.

begin:  leave what an earlier push left open; join the group, open a session (broadcasts only)
load:   /update_weights_from_distributed or /update_weights_from_disk, a bucket each
commit: close the session, name the version, ask for it
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from models.engines.sglang_http import SglangHttp, within
from models.types import Broadcast, EngineRefused, GroupLink, SafetensorsFile, WeightBucket
from models.weight_transport import checksums_of, received

GRACE_S = 5.0  # the server's own timeout comes first, and says more


class SglangWeights:
    """Knows what the server holds from the model's config: it drops tensors that it doesn't know without a word."""

    def __init__(self, http: SglangHttp, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._http = http
        self._shapes = shapes
        self._link: GroupLink | None = None
        self._open = False
        self._checksums: dict[str, str] = {}

    async def begin(self, link: GroupLink | None) -> None:
        """Raises ConnectionError where the group doesn't come together."""
        self._checksums = {}
        await self._close_session()
        if link != self._link:
            await self._leave()
        if link is not None:
            await self._join(link)
            await self._open_session()

    async def load(self, bucket: WeightBucket) -> None:
        """Raises ValueError naming a tensor that doesn't fit, ConnectionError where a broadcast broke off."""
        try:
            for tensor in bucket.tensors:
                self._refuse_what_does_not_fit(tensor.name, tensor.shape)
            if isinstance(bucket.payload, SafetensorsFile):
                await self._load_file(bucket, bucket.payload.path)
            elif isinstance(bucket.payload, Broadcast):
                await self._receive(bucket)
            else:
                raise ValueError(
                    f"sync.transport: SGLang takes no {type(bucket.payload).__name__}; set disk, gloo or nccl"
                )
        except BaseException:
            await self._leave()  # the sender would wait for us until its timeout
            raise

    async def commit(self, version: int) -> dict[str, str]:
        """The checksums of what came since `begin`. Raises RuntimeError where the server says another version."""
        await self._close_session()
        name = str(version)
        await self._http.post("/update_weight_version", {"new_version": name, "abort_all_requests": False})
        told = str((await self._http.get("/model_info")).get("weight_version"))
        if told != name:
            raise RuntimeError(f"weights: version {name} was sent to SGLang at {self._http.url}, and it says {told}")
        collected, self._checksums = self._checksums, {}
        return collected

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
            await within(link.timeout_s + GRACE_S, lambda: self._http.post("/init_weights_update_group", body))
        except EngineRefused as error:
            raise ConnectionError(f"weights: {error}") from None
        self._link = link

    async def _leave(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            with contextlib.suppress(EngineRefused, ConnectionError):
                body = {"group_name": link.name}
                await within(GRACE_S, lambda: self._http.post("/destroy_weights_update_group", body))

    async def _open_session(self) -> None:
        try:
            await self._http.post("/begin_weight_update", {})
        except EngineRefused:  # one is open: of a run that ended in the midst of a push
            await self._http.post("/end_weight_update", {})
            await self._http.post("/begin_weight_update", {})
        self._open = True

    async def _close_session(self) -> None:
        if self._open:
            self._open = False
            await self._http.post("/end_weight_update", {})

    async def _receive(self, bucket: WeightBucket) -> None:
        link = self._link
        if link is None:
            raise ConnectionError("weights: a bucket comes by broadcast, and no group was joined since it last broke")
        body = {
            "names": [tensor.name for tensor in bucket.tensors],
            "dtypes": [tensor.dtype for tensor in bucket.tensors],
            "shapes": [list(tensor.shape) for tensor in bucket.tensors],
            "group_name": link.name,
            "flush_cache": False,
        }
        try:
            await within(link.timeout_s + GRACE_S, lambda: self._http.post("/update_weights_from_distributed", body))
        except EngineRefused as error:
            if "Failed to receive" in str(error):
                raise ConnectionError(f"weights: {bucket.tensors[0].name!r} and what follows: {error}") from None
            raise ValueError(f"weights: {bucket.tensors[0].name!r} and what follows: {error}") from None
        self._checksums |= {tensor.name: "" for tensor in bucket.tensors}

    async def _load_file(self, bucket: WeightBucket, file: str) -> None:
        checksums = await asyncio.to_thread(_checksums, bucket)
        folder = await asyncio.to_thread(_folder_with, file)
        try:
            body = {"model_path": folder, "load_format": "safetensors", "flush_cache": False}
            await self._http.post("/update_weights_from_disk", body)
        except EngineRefused as error:
            raise ValueError(f"weights: {bucket.tensors[0].name!r} and what follows in {file}: {error}") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._checksums |= checksums

    def _refuse_what_does_not_fit(self, name: str, shape: tuple[int, ...]) -> None:
        held = self._shapes.get(name)
        if held is None:
            raise ValueError(f"weights: the engine's model has no tensor {name!r}; is it the same architecture?")
        if held != shape:
            raise ValueError(f"weights: {name!r} came as {shape}, the engine holds {held}")


def _checksums(bucket: WeightBucket) -> dict[str, str]:
    with received(bucket) as tensors:
        return checksums_of(tensors)


def _folder_with(file: str) -> str:
    """SGLang loads whatever lies in a folder: one with this file alone, next to it, where the server can look too."""
    place = Path(file).absolute()
    folder = Path(tempfile.mkdtemp(prefix=f"{place.stem}-", dir=place.parent))
    folder.chmod(0o755)  # the server may be another user's
    (folder / "model.safetensors").symlink_to(place)
    return str(folder)
