"""The average of two models' files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grmpipe.models.lm.checkpoint import average_files


def write(folder: Path, **files: dict[str, torch.Tensor]) -> str:
    folder.mkdir()
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return str(folder)


def test_small_shares_of_16_bit_weights_are_kept_in_float32_however_the_files_are_cut(tmp_path: Path) -> None:
    one = write(tmp_path / "one", model={"a": torch.ones(2).bfloat16(), "b": torch.zeros(1)})
    other = write(tmp_path / "other", m1={"a": torch.full((2,), 3.0)}, m2={"b": torch.ones(1).half()})
    average_files(one, other, 0.001)
    mixed = load_file(tmp_path / "one" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in mixed.items()} == {"a": torch.float32, "b": torch.float32}
    torch.testing.assert_close(mixed["a"], torch.full((2,), 2.998))
    torch.testing.assert_close(mixed["b"], torch.tensor([0.999]))


@pytest.mark.parametrize("tensors", [{"b": torch.ones(2)}, {"a": torch.ones(3)}])
def test_another_model_is_refused(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    one = write(tmp_path / "one", model={"a": torch.ones(2)})
    with pytest.raises(ValueError, match="different models"):
        average_files(one, write(tmp_path / "other", model=tensors), 0.5)
