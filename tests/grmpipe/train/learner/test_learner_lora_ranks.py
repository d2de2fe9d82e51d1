"""Two ranks train adapters as one does: the same gradients, sent weights, checkpoints. In float64."""

from __future__ import annotations

import pickle
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import Forked
from rank_metrics import of_all_ranks
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Starcoder2Config, Starcoder2ForCausalLM

from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.settings import LoraConfig
from grmpipe.train.batching.packer import pack
from grmpipe.train.batching.samples import count
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_spec import LearnerSpec

SCRIPT = Path(__file__).with_name("lora_rank_process.py")
PIECES = 30  # packed tokens per micro-batch


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> LearnerSpec:
    """A family with linear layers that computes in float64 throughout; three rows of A for two ranks."""
    path = tmp_path_factory.mktemp("starcoder")
    torch.manual_seed(0)
    Starcoder2ForCausalLM(
        Starcoder2Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, sliding_window=None, residual_dropout=0.0,
            embedding_dropout=0.0, initializer_range=0.2,
        )
    ).save_pretrained(path)  # fmt: skip
    return LearnerSpec(
        model_path=str(path),
        train=TrainConfig(lr=1e-2, warmup_steps=0),
        algorithm=AlgorithmConfig(kl_coefficient=0.1),
        max_new_tokens=8,
        device="cpu",
        master_dtype="float64",
        sync_dtype="float64",
        bucket_bytes=20_000,
        lora=LoraConfig(rank=3, alpha=6.0),
        adapter_dir=str(tmp_path_factory.mktemp("adapter")),
    )


@pytest.fixture(scope="module")
def batches(make_samples) -> list:
    return [make_samples(13, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def two(
    spec: LearnerSpec, batches: list, forked: type[Forked], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict]]:
    """Two ranks, each batch in several rounds: their directory, and their results."""
    directory = tmp_path_factory.mktemp("two")
    (directory / "job.pkl").write_bytes(pickle.dumps((spec, batches, PIECES)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    for process in [forked(SCRIPT, directory, rank, 2, address) for rank in range(2)]:
        assert process.wait(120) == 0, process.output[-3000:]
    return directory, [pickle.loads((directory / f"rank{rank}.pkl").read_bytes()) for rank in range(2)]


def test_adapters_of_two_ranks_are_trained_as_those_of_one(spec: LearnerSpec, batches: list, two) -> None:
    learner, (_, ranks) = Learner(spec), two
    for step, samples in enumerate(batches):
        learner.accumulate(pack(samples))
        totals = count(samples, step)
        for name, parameter in learner._model.named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None and name not in ranks[1]["gradients"][step]
                continue
            assert isinstance(parameter.grad, DTensor)
            whole = (parameter.grad.full_tensor() / totals.num_loss_tokens).numpy()
            np.testing.assert_allclose(ranks[1]["gradients"][step][name], whole, atol=1e-10, rtol=0, err_msg=name)
            # A has no gradient before B has moved.
            assert (np.abs(whole).max() > 1e-6) == ("lora_B" in name or step > 0), name
        metrics = of_all_ranks(learner.step(totals))
        for rank in ranks:
            assert rank["metrics"][step] == pytest.approx(metrics, rel=1e-6, abs=1e-9)


def test_two_ranks_send_merged_weights_under_the_names_of_the_plain_model(spec: LearnerSpec, two) -> None:
    directory, ranks = two
    plain = dict(AutoModelForCausalLM.from_pretrained(spec.model_path, dtype=torch.float64).named_parameters())
    exported = dict(AutoModelForCausalLM.from_pretrained(directory / "policy", dtype=torch.float64).named_parameters())
    sent = ranks[0]["weights"]
    assert sent.keys() == plain.keys() == exported.keys() and ranks[1]["weights"] == {}
    linear = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "c_fc.weight", "c_proj.weight")
    for name, parameter in plain.items():
        came = sent[name].view(np.float64).reshape(parameter.shape)
        np.testing.assert_allclose(came, exported[name].detach().numpy(), atol=1e-12, err_msg=name)
        assert np.array_equal(came, parameter.detach().numpy()) != name.endswith(linear), name


def test_one_rank_continues_identically_from_a_checkpoint_of_two(
    spec: LearnerSpec, batches: list, two, tmp_path: Path
) -> None:
    """The checkpoint has none of the frozen weights."""
    directory, ranks = two
    kept = set(FileSystemReader(directory / "checkpoint").read_metadata().state_dict_metadata) - {"version"}
    assert kept and all("lora_" in name or "param_groups" in name for name in kept), sorted(kept)
    learner = Learner(replace(spec, adapter_dir=str(tmp_path)))
    assert learner.load(str(directory / "checkpoint")) == 2
    learner.accumulate(pack(batches[2]))
    metrics = of_all_ranks(learner.step(count(batches[2], 2)))
    assert metrics == pytest.approx(ranks[0]["metrics"][2], rel=1e-6, abs=1e-9)
