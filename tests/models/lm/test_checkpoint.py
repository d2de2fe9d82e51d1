"""What is saved is loaded again; an export gives the same outputs."""

from __future__ import annotations

import errno
import json
import os
import pickle
from enum import Enum
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import metadata
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.lm.checkpoint import SHARD_SIZE, ShardedSave, export_hf, load_sharded

IDS = torch.tensor([[1, 2, 3, 4]])


def make_model(seed: int, tied: bool = True) -> PreTrainedModel:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def save_sharded(directory: str, model: PreTrainedModel, optimizer: torch.optim.Optimizer, version: int) -> None:
    save = ShardedSave()
    save.begin(directory, model, optimizer, version, in_background=False)
    assert save.files() is not None


def test_training_continues_where_it_was_saved(tmp_path: Path) -> None:
    model = make_model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer)
    save_sharded(str(tmp_path), model, optimizer, version=7)
    other = make_model(1)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    assert load_sharded(str(tmp_path), other, other_optimizer) == 7
    for _ in range(2):  # moments and step counts too: a second step would differ without them
        train(model, optimizer)
        train(other, other_optimizer)
    torch.testing.assert_close(other(IDS).logits, model(IDS).logits, atol=0, rtol=0)


def test_a_directory_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    model = make_model(0)
    with pytest.raises(ValueError, match="holds no checkpoint"):
        load_sharded(str(tmp_path), model, torch.optim.AdamW(model.parameters()))


def test_full_disk_is_reported_with_directory_rank_and_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = make_model(0)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"{tmp_path}/learner .*rank 0: .*No space left on device"):
        save_sharded(str(tmp_path / "learner"), model, torch.optim.AdamW(model.parameters()), version=0)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_cut_file_is_reported_with_directory_rank_and_cause(tmp_path: Path, name: str) -> None:
    model = make_model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    save_sharded(str(tmp_path), model, optimizer, version=0)
    os.truncate(tmp_path / name, 10)
    with pytest.raises(ValueError, match=rf"^resume: {tmp_path} .*rank 0: "):
        load_sharded(str(tmp_path), model, optimizer)


@pytest.mark.parametrize(
    ("call", "args", "words"),
    [(os.mkdir, ("caught",), "mkdir"), (getattr, (set, "__class__"), "'__class__' of <class 'set'>")],
)
def test_a_checkpoint_that_would_run_something_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: object, args: tuple[object, ...], words: str
) -> None:
    """Of `getattr` it gets members of enums only."""

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return call, args

    monkeypatch.chdir(tmp_path)
    model = make_model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    save_sharded(str(tmp_path), model, optimizer, version=0)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match=f"{words}, which no checkpoint needs"):
        load_sharded(str(tmp_path), model, optimizer)
    assert not (tmp_path / "caught").exists()


@pytest.mark.parametrize("written", ["pathlib", "pathlib._local"])
def test_a_checkpoint_of_another_python_is_loaded(tmp_path: Path, written: str) -> None:
    """Python 3.13 alone has its paths in pathlib._local."""
    model = make_model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    save_sharded(str(tmp_path), model, optimizer, version=3)
    held = pickle.dumps(pickle.loads((tmp_path / ".metadata").read_bytes()), protocol=2)  # names as lines of text
    here, there = (f"c{module}\nPosixPath".encode() for module in (type(tmp_path).__module__, written))
    assert here in held
    (tmp_path / ".metadata").write_bytes(held.replace(here, there))
    assert load_sharded(str(tmp_path), model, optimizer) == 3


def test_a_checkpoint_of_a_python_that_pickles_members_of_enums_by_name_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_name(member: Enum, _: object) -> tuple[object, ...]:  # as Python 3.11.2, Debian 12's
        return getattr, (type(member), member.name)

    monkeypatch.setattr(metadata._MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    model = make_model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    save_sharded(str(tmp_path), model, optimizer, version=0)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert load_sharded(str(tmp_path), model, optimizer) == 0


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_has_the_same_logits_and_the_tokenizer(tmp_path: Path, tied: bool) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_model(0, tied).save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    (source / "tokenizer_config.json").write_text("{}")
    (source / "chat_template.jinja").write_text("hello")
    model = load_causal_lm(str(source))
    with torch.no_grad():
        model.model.norm.weight.add_(0.5)
    export_hf(str(target), model, str(source))
    torch.testing.assert_close(load_causal_lm(str(target))(IDS).logits, model(IDS).logits, atol=0, rtol=0)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {f.name for f in target.iterdir()}
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32", "as in its source"
    assert list(target.glob("*.safetensors")) and not list(target.glob("*.bin"))


def export_of_bfloat16(tmp_path: Path, **options: object) -> Path:
    """An export of a model that trains in float32, from files in bfloat16."""
    source, target = tmp_path / "source", tmp_path / "target"
    make_model(0).to(torch.bfloat16).save_pretrained(source)
    export_hf(str(target), load_causal_lm(str(source)), str(source), **options)  # type: ignore[arg-type]
    return target


def dtypes_of(directory: Path) -> set[torch.dtype]:
    return {tensor.dtype for file in directory.glob("*.safetensors") for tensor in load_file(file).values()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_export_is_of_the_type_of_its_source_or_of_the_one_asked_for(tmp_path: Path, dtype: str) -> None:
    asked = None if dtype == "bfloat16" else dtype
    target = export_of_bfloat16(tmp_path, dtype=asked)
    assert dtypes_of(target) == {getattr(torch, dtype)}
    assert json.loads((target / "config.json").read_text())["dtype"] == dtype
    loaded = load_causal_lm(str(target))  # bfloat16 -> float32 -> bfloat16 loses nothing
    torch.testing.assert_close(loaded(IDS).logits, load_causal_lm(str(tmp_path / "source"))(IDS).logits, atol=0, rtol=0)


def test_an_export_is_cut_into_files_of_at_most_five_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SHARD_SIZE == "5GB"
    monkeypatch.setattr("grmpipe.models.lm.checkpoint.SHARD_SIZE", "2KB")  # as transformers counts them
    target = export_of_bfloat16(tmp_path)
    assert len(list(target.glob("*.safetensors"))) > 1
    torch.testing.assert_close(
        load_causal_lm(str(target))(IDS).logits, load_causal_lm(str(tmp_path / "source"))(IDS).logits, atol=0, rtol=0
    )
