"""A scalar head reads the causal model's trunk, packed or not, sharded or not; a model without one is named."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from forks import Forked
from transformers import (
    AutoModelForTokenClassification,
    Olmo2Config,
    Olmo2ForSequenceClassification,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
)

from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.lm.checkpoint import export_hf
from grmpipe.models.lm.parallel.ranks import join_ranks
from grmpipe.models.lm.parallelize import SCALAR_HEAD, load_parallel
from grmpipe.models.lm.scalar_head import (
    compute_packed_scores,
    find_head,
    last_of_samples,
    load_scalar_head,
    scalar_config,
    start_scalar_head,
)
from grmpipe.models.settings import Activations

LENGTHS = [7, 1, 12, 4]
CPU = torch.device("cpu")


def config(**changes: object) -> Qwen3Config:
    return Qwen3Config(
        **{
            "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
            "tie_word_embeddings": True, **changes,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def causal_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("causal")
    torch.manual_seed(0)
    Qwen3ForCausalLM(config()).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def scalar_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As made by any library."""
    path = tmp_path_factory.mktemp("scalar")
    torch.manual_seed(1)
    Qwen3ForTokenClassification(config(num_labels=1)).save_pretrained(path)
    return str(path)


def packed(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(64, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    return ids, torch.cat([torch.arange(length) for length in lengths]), torch.tensor(lengths)


def one_by_one(path: str, ids: torch.Tensor) -> tuple[PreTrainedModel, torch.Tensor]:
    """The plain forward pass of transformers, one sample at a time."""
    plain = AutoModelForTokenClassification.from_pretrained(path).eval()
    return plain, torch.cat([plain(input_ids=sample[None]).logits[0, :, 0] for sample in ids.split(LENGTHS)])


def test_packed_equals_one_by_one(scalar_path: str) -> None:
    ids, positions, lengths = packed(LENGTHS)
    ours = compute_packed_scores(load_scalar_head(scalar_path), ids, positions, lengths)
    _, theirs = one_by_one(scalar_path, ids)
    assert theirs.std() > 0.05
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_gradients_of_packed_equal_one_by_one(scalar_path: str) -> None:
    ids, positions, lengths = packed(LENGTHS)
    model = load_scalar_head(scalar_path)
    last_of_samples(compute_packed_scores(model, ids, positions, lengths), lengths).square().sum().backward()
    plain, theirs = one_by_one(scalar_path, ids)
    last_of_samples(theirs, lengths).square().sum().backward()
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_the_last_value_of_each_sample_is_picked() -> None:
    values_T = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert last_of_samples(values_T, torch.tensor([3, 1, 2])).tolist() == [3.0, 4.0, 6.0]


def test_a_new_head_says_nought_and_its_trunk_is_the_causal_models(causal_path: str) -> None:
    model, causal = start_scalar_head(causal_path), load_causal_lm(causal_path)
    ids, positions, lengths = packed([9])
    assert compute_packed_scores(model, ids, positions, lengths).tolist() == [0.0] * 9
    with torch.no_grad():
        find_head(model).weight[0, 5] = 1.0  # reads one number of the hidden state
    hidden = causal(input_ids=ids[None], output_hidden_states=True, attention_mask=torch.ones(1, 9)).hidden_states[-1]
    torch.testing.assert_close(
        compute_packed_scores(model, ids, positions, lengths), hidden[0, :, 5], atol=1e-5, rtol=0
    )


def test_head_in_training_continues_from_its_own_directory(scalar_path: str) -> None:
    ids, positions, lengths = packed(LENGTHS)
    served, started = (load(scalar_path) for load in (load_scalar_head, start_scalar_head))
    assert torch.equal(
        compute_packed_scores(served, ids, positions, lengths), compute_packed_scores(started, ids, positions, lengths)
    )


def test_an_exported_scalar_model_scores_the_same_here_and_in_transformers(causal_path: str, tmp_path: Path) -> None:
    model = start_scalar_head(causal_path)
    with torch.no_grad():
        find_head(model).weight.normal_()
        find_head(model).bias.fill_(0.25)
    export_hf(str(tmp_path), model, causal_path)
    ids, positions, lengths = packed(LENGTHS)
    ours = compute_packed_scores(model, ids, positions, lengths)
    assert torch.equal(compute_packed_scores(load_scalar_head(str(tmp_path)), ids, positions, lengths), ours)
    torch.testing.assert_close(one_by_one(str(tmp_path), ids)[1], ours, atol=1e-5, rtol=0)


def test_a_sequence_classifier_of_one_label_is_a_scalar_head(tmp_path: Path) -> None:
    torch.manual_seed(2)
    Qwen3ForSequenceClassification(config(num_labels=1, pad_token_id=0)).save_pretrained(tmp_path)
    theirs = Qwen3ForSequenceClassification.from_pretrained(tmp_path).eval()
    ids, positions, lengths = packed(LENGTHS)
    ids = ids.clamp(min=1)  # it reads the last token that isn't padding
    ours = last_of_samples(compute_packed_scores(load_scalar_head(str(tmp_path)), ids, positions, lengths), lengths)
    expected = torch.cat([theirs(input_ids=sample[None]).logits[0] for sample in ids.split(LENGTHS)])
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_the_head_of_a_bfloat16_model_computes_in_float32(scalar_path: str) -> None:
    model = load_scalar_head(scalar_path, "bfloat16")
    assert find_head(model).weight.dtype == torch.float32 and model.model.norm.weight.dtype == torch.bfloat16
    assert compute_packed_scores(model, *packed(LENGTHS)).dtype == torch.float32


def test_a_causal_model_is_no_scalar_head(causal_path: str) -> None:
    with pytest.raises(ValueError, match="path: .*Qwen3ForCausalLM, which has no scalar head; give"):
        load_scalar_head(causal_path)


def test_a_head_of_two_numbers_is_refused_by_name(tmp_path: Path) -> None:
    Qwen3ForTokenClassification(config(num_labels=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has 2 outputs, and a scalar head has one .num_labels"):
        scalar_config(str(tmp_path))


def test_a_family_without_a_head_for_every_token_is_refused_by_name(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    Olmo2ForSequenceClassification(Olmo2Config(**sizes, num_attention_heads=4, num_labels=1)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="^path: transformers has no scalar head for 'olmo2' models .*; give one of"):
        scalar_config(str(tmp_path))


def test_two_ranks_give_the_scores_and_gradients_of_one(scalar_path: str, tmp_path: Path, forked: type[Forked]) -> None:
    """Two processes, sharded; each has half of the samples."""
    ranks = [forked(Path(__file__), scalar_path, tmp_path, rank) for rank in range(2)]
    for process in ranks:
        assert process.wait(120) == 0, process.output[-3000:]
    model = load_scalar_head(scalar_path)
    ids, positions, lengths = packed(LENGTHS * 2)
    scores = compute_packed_scores(model, ids, positions, lengths)
    scores.square().sum().backward()
    found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    torch.testing.assert_close(torch.cat([one["scores"] for one in found]), scores, atol=1e-5, rtol=0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-6, name
        for one in found:  # FSDP2 averages over ranks
            torch.testing.assert_close(one["gradients"][name] * 2, parameter.grad, atol=1e-4, rtol=1e-4, msg=name)


def one_rank(path: str, directory: str, rank: int) -> None:
    mesh = join_ranks(rank, 2, f"file://{directory}/meet", CPU)
    model = load_parallel(path, mesh, CPU, "float32", "float32", Activations(checkpointing="full"), SCALAR_HEAD)
    half = len(LENGTHS)
    ids, positions, lengths = (
        part.tensor_split([sum(LENGTHS)] if len(part) > 2 * half else [half])[rank] for part in packed(LENGTHS * 2)
    )
    scores = compute_packed_scores(model, ids, positions, lengths)
    scores.square().sum().backward()
    # type: ignore[union-attr, operator]
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    torch.save({"scores": scores.detach(), "gradients": gradients}, f"{directory}/rank{rank}.pt")
    torch.distributed.barrier()
    os._exit(0)  # like a killed actor: gloo's threads sometimes abort an orderly exit


if __name__ == "__main__":
    one_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
