"""Pushes of weights to one AsyncLLM, by its weight-transfer calls; the workers' end is vllm_worker.py.

begin:  drop what an earlier push left open, join the group or leave it
load:   update_weights, one call per bucket
commit: finish, or install an adapter, and collect the workers' reports
"""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import asdict

from grmpipe.models.engines.vllm.process import VllmProcess
from grmpipe.models.engines.vllm.vllm_weights import as_plain, decode_errors, find_unapplied
from grmpipe.models.types import GroupLink, WeightBucket, WeightReceipt
from grmpipe.models.weights.delta import DeltaReceiver
from grmpipe.models.weights.weight_files import SharedArena


class VllmPushes:
    """The pushes to one model of an engine. is_open: one has begun and isn't committed. adapter: the name of the
    adapter that they carry alone; empty: they carry weights.
    """

    def __init__(self, process: VllmProcess, adapter: str) -> None:
        self.is_open = False
        self._process, self._adapter = process, adapter
        self._arena = SharedArena()  # for bytes that come within a bucket
        self._deltas = DeltaReceiver()

    async def begin(self, link: GroupLink | None) -> None:
        if self._adapter:
            with decode_errors():
                await self._process.ask_workers("start_adapter", self._adapter, None if link is None else asdict(link))
        else:
            await self._join(link)
            await self._process.call(self._process.llm.start_weight_update())
        self.is_open = True

    async def load(self, bucket: WeightBucket) -> None:
        """Raises ValueError that names a tensor that doesn't fit: nothing of its bucket is loaded, and the push
        ends.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._process.refuse_the_dead()
        if not self.is_open:
            raise RuntimeError("begin_weights comes before load_bucket")
        with self._worker_drops_what_fails():
            plain = as_plain(await asyncio.to_thread(self._deltas.restore, bucket), self._arena)
            if self._adapter:
                await self._process.ask_workers("receive_adapter", self._adapter, plain)
                return
            await self._process.call(self._process.llm.update_weights(WeightTransferUpdateRequest(update_info=plain)))

    async def commit(self, version: int, name: str) -> WeightReceipt:
        """name: what vLLM is to call the weights of all models from now on."""
        process = self._process
        if not self.is_open:
            await process.call(process.llm.update_weight_version(name))
            return WeightReceipt(version=version, checksums={})
        with self._worker_drops_what_fails():
            if self._adapter:  # without vLLM's own end of a push, which forgets all adapters
                await process.ask_workers("install_adapter", self._adapter)
                await process.call(process.llm.update_weight_version(name))
            else:
                await process.call(process.llm.finish_weight_update(weight_version=name))
        self.is_open = False
        reports = await process.ask_workers("take_report", self._adapter)
        checksums: dict[str, str] = reports[0][0]  # from tensor rank 0; all ranks get the same tensors
        missing = find_unapplied(checksums, (applied for _, applied in reports))
        return WeightReceipt(version=version, checksums=checksums, unapplied=missing)

    async def drop(self) -> None:
        """Drop a push that isn't committed."""
        await self._process.ask_workers("drop_update", self._adapter)
        self.is_open = False

    def close(self) -> None:
        self._arena.close()

    async def _join(self, link: GroupLink | None) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        process = self._process
        if link is None:
            await process.call(process.llm.shutdown_weight_transfer_engine())
            return
        with decode_errors():
            await process.call(process.llm.init_weight_transfer_engine(WeightTransferInitRequest(asdict(link))))

    @contextlib.contextmanager
    def _worker_drops_what_fails(self) -> Iterator[None]:
        try:
            with decode_errors():
                yield
        except Exception:
            self.is_open = False
            raise
