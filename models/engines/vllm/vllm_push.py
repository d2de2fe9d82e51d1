"""Pushes of weights to one AsyncLLM, by its weight-transfer calls; the workers' end is vllm_worker.py.

begin:  drop what an earlier push left open, join the group or leave it
load:   update_weights, one call per bucket
commit: finish, install adapters, collect the workers' reports
"""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict

from grmpipe.models.engines.vllm.process import VllmProcess
from grmpipe.models.engines.vllm.vllm_weights import as_plain, decode_errors, find_unapplied
from grmpipe.models.types import GroupLink, WeightBucket, WeightReceipt
from grmpipe.models.weights.weight_files import SharedArena


class VllmPushes:
    """The pushes to one engine. is_open: one has begun and isn't committed. has_adapters: it carries adapters alone."""

    def __init__(self, process: VllmProcess, has_adapters: bool) -> None:
        self.is_open = False
        self._process, self._has_adapters = process, has_adapters
        self._arena = SharedArena()  # for bytes that come within a bucket

    async def begin(self, link: GroupLink | None) -> None:
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
            request = WeightTransferUpdateRequest(update_info=as_plain(bucket, self._arena))
            await self._process.call(self._process.llm.update_weights(request))

    async def commit(self, version: int) -> WeightReceipt:
        process = self._process
        if not self.is_open:
            await process.call(process.llm.update_weight_version(str(version)))
            return WeightReceipt(version=version, checksums={})
        with self._worker_drops_what_fails():
            await process.call(process.llm.finish_weight_update(weight_version=str(version)))
            if self._has_adapters:
                await process.ask_workers("install_adapters")
        self.is_open = False
        reports = await process.ask_workers("take_report")
        checksums: dict[str, str] = reports[0][0]  # from tensor rank 0; all ranks get the same tensors
        missing = find_unapplied(checksums, (applied for _, applied in reports))
        return WeightReceipt(version=version, checksums=checksums, unapplied=missing)

    async def drop(self) -> None:
        """Drop a push that isn't committed."""
        await self._process.ask_workers("drop_update")
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
