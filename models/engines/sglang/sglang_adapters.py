"""Adapters alone (LoRA) at one SGLang server: which version a request names, and pushes of new ones.

begin:  drop what an unfinished push left
load:   keep the tensors
commit: a folder in peft's format -> /load_lora_adapter under a new name; requests name it from then on. The last
        version is unloaded with its last request

As of SGLang 0.5.23: managers/tokenizer_control_mixin.py (load, unload), managers/tokenizer_manager.py (the adapter of a
request), managers/schedule_batch.py (its part of the prefix cache), lora/lora_manager.py, lora/lora.py,
lora/mem_pool.py. Read there, and never run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import load_file, save_file
from torch import Tensor

from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.sglang.http_client import SglangHttp
from grmpipe.models.engines.typed_json import read_as
from grmpipe.models.lm.causal_lm import outline_causal_lm
from grmpipe.models.lm.lora import ADAPTER_FILE, find_targets, name_in_file, outline_adapter
from grmpipe.models.lm.moe.expert_routing import find_routers
from grmpipe.models.settings import LoraConfig
from grmpipe.models.types import EngineRefused, GroupLink, WeightBucket, WeightReceipt
from grmpipe.models.weights.checksums import tensor_checksums
from grmpipe.models.weights.receive_tensors import receive_tensors
from grmpipe.models.weights.weight_files import folders_of_shared_memory, hold_folder

# SGLang computes q, k and v as one layer, gate and up as another. It adds what an adapter lacks of these, but by the
# shapes of v and gate; without them it drops the others (lora.py, normalize_qkv_proj and normalize_gate_up_proj).
NEEDED = {"q_proj": "v_proj", "k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
TAKEN = frozenset({*NEEDED, "gate_proj", "o_proj", "down_proj", "qkv_proj", "gate_up_proj"})

Errand = Coroutine[Any, Any, Any]


@dataclass(slots=True, eq=False)
class AdapterVersion:
    """A version of an adapter. name: the server's, as requests have it; empty for the base alone, which is the same as
    a new adapter. num_users: requests that name it.
    """

    number: int
    name: str
    num_users: int = 0


class Loaded(msgspec.Struct):
    """The answer of /load_lora_adapter: the server's adapters, name -> folder."""

    loaded_adapters: dict[str, str] | None = None


class SglangAdapters:
    """The adapters of one server, by the name of their model.

    run_errand: runs what no caller waits for. A version is unloaded once no request names it: SGLang would wait for its
    requests itself, but load no other adapter meanwhile.
    """

    def __init__(self, http: SglangHttp, spec: EngineSpec, run_errand: Callable[[Errand], None]) -> None:
        self.loras = spec.adapters
        self._http, self._path, self._run_errand = http, spec.path, run_errand
        base = outline_causal_lm(spec.path) if spec.adapters else None
        self._outlines = {name: outline_adapter(base, lora) for name, lora in spec.adapters.items() if base is not None}
        self._current = {name: AdapterVersion(0, name_first(name, lora)) for name, lora in spec.adapters.items()}
        self._came: dict[str, dict[str, Tensor]] = {name: {} for name in spec.adapters}  # since `begin`, as sent
        self._pushes = itertools.count(1)

    def find(self, model: str) -> AdapterVersion:
        """The version that a new request names. A model without an adapter is the base."""
        return self._current.get(model) or AdapterVersion(0, "")

    @contextmanager
    def use(self, model: str) -> Iterator[AdapterVersion]:
        """Context of a request: its version is kept at the server. Raises EngineDied if the server lost it: it would
        answer no request of this model any more.
        """
        version = self.find(model)
        version.num_users += 1
        try:
            yield version
        except EngineRefused as error:
            if version.name and version.name in str(error):
                raise self._http.die(f"lost the adapter {version.name}: {error}") from None
            raise
        finally:
            version.num_users -= 1
            self._unload_unused(model, version)

    def begin(self, model: str, link: GroupLink | None) -> None:
        if model not in self.loras:
            raise ValueError("weights: an engine with adapters keeps its base weights; set lora.sync=merged")
        if link is not None:
            raise ValueError(f"sync.transport: {link.backend} carries no adapters to SGLang; set disk")
        self._came[model] = {}

    async def load(self, model: str, bucket: WeightBucket) -> None:
        """Raises ValueError that names a tensor that doesn't fit."""
        await asyncio.to_thread(self._receive, model, bucket, self._came[model])

    async def commit(self, model: str, version: int) -> WeightReceipt:
        """The receipt of what came since `begin`; its checksums are those of the file that the server loaded. Raises
        ValueError with the server's message if it refuses the adapter, and keeps the last one.
        """
        came, self._came[model] = self._came[model], {}
        named = {name_in_file(sent): tensor for sent, tensor in came.items()}
        if lacking := sorted(self._outlines[model].keys() - named.keys()):
            raise ValueError(f"weights: the adapter {model} came without {lacking[0]!r}; is it the same architecture?")
        name = f"{model}@{version}-{next(self._pushes)}"  # an earlier push of the same version may have been loaded
        with hold_folder(folders_of_shared_memory()[0], "sglang") as folder:
            checksums = await asyncio.to_thread(write_adapter, folder, self._path, self.loras[model], named)
            try:
                answer = await self._http.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
                with self._http.die_if_unreadable():
                    loaded = read_as(Loaded, answer).loaded_adapters or {}
                if loaded.get(name) != str(folder):
                    raise RuntimeError(f"weights: SGLang at {self._http.url} doesn't list {name}, which it has loaded")
            except EngineRefused as error:
                raise ValueError(f"weights: the adapter {name}: {error}") from None
            except BaseException:  # it may be loaded all the same
                self._unload(name)
                raise
        last, self._current[model] = self._current[model], AdapterVersion(version, name)
        self._unload_unused(model, last)
        return WeightReceipt(version=version, checksums={sent: checksums[name_in_file(sent)] for sent in came})

    def _receive(self, model: str, bucket: WeightBucket, came: dict[str, Tensor]) -> None:
        """came: of this push; a later one has a dict of its own."""
        outline = self._outlines[model]
        for tensor in bucket.tensors:
            shape = outline.get(name_in_file(tensor.name))
            if shape is None:
                raise ValueError(f"weights: {model} has no adapter for {tensor.name!r}; set lora.sync=merged")
            if shape != tensor.shape:
                raise ValueError(f"weights: {tensor.name!r} arrived as {tensor.shape}, the engine has {shape}")
        with receive_tensors(bucket) as tensors:
            came |= {sent.name: tensor.clone() for sent, tensor in tensors}

    def _unload_unused(self, model: str, version: AdapterVersion) -> None:
        if version.name and not version.num_users and version is not self._current[model]:
            self._unload(version.name)

    def _unload(self, name: str) -> None:
        self._run_errand(self._http.post("/unload_lora_adapter", {"lora_name": name}))


def name_first(model: str, lora: LoraConfig) -> str:
    """The server's name of an adapter's version 0; empty for a new one, which isn't loaded."""
    return f"{model}@0" if lora.path is not None else ""


def make_lora_flags(path: str, loras: Mapping[str, LoraConfig]) -> dict[str, object]:
    """The flags of a server that applies these adapters; none without them. Raises ValueError for adapters that SGLang
    would apply in part.
    """
    if not loras:
        return {}
    base = outline_causal_lm(path)
    if find_routers(base):
        raise ValueError(
            "lora.sync: SGLang may leave out adapters of a mixture of experts without a word; type lora.sync=merged"
        )
    targets = sorted({name for lora in loras.values() for name in check_targets(find_targets(base, lora))})
    return {
        "enable-lora": True,
        "max-lora-rank": max(lora.rank for lora in loras.values()),
        "lora-target-modules": targets,
        "lora-strict-loading": True,  # otherwise layers without a counterpart are skipped
        "lora-paths": [
            json.dumps({"lora_name": name_first(name, lora), "lora_path": lora.path})
            for name, lora in loras.items()
            if lora.path is not None
        ]
        or None,
    }


def check_targets(targets: Iterable[str]) -> list[str]:
    """The targets of one adapter. Raises ValueError for some that SGLang can't apply."""
    names = sorted(targets)
    for name in names:
        if name not in TAKEN:
            raise ValueError(
                f"lora.target_modules: SGLang applies no adapters to {name!r}; type some of "
                f"{', '.join(sorted(TAKEN))}, or lora.sync=merged"
            )
        if (needed := NEEDED.get(name)) is not None and needed not in names:
            raise ValueError(
                f"lora.target_modules: SGLang would drop the adapters of {name} without those of {needed}; add "
                f"{needed}, or type lora.sync=merged"
            )
    return names


def write_adapter(folder: Path, base: str, lora: LoraConfig, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Write an adapter in peft's format. Returns the checksums of the tensors in the file, by name."""
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.rank,
        "lora_alpha": lora.alpha, "target_modules": targets, "bias": "none", "lora_dropout": 0.0,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(dict(tensors), folder / ADAPTER_FILE)
    stored = load_file(folder / ADAPTER_FILE)
    return dict(zip(stored, tensor_checksums(list(stored.values())), strict=True))
