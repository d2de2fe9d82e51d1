"""AdamW with small moments: near torch's, learning, repeatable, saved and loaded; moments that wait on the host."""

from __future__ import annotations

import pickle
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import Forked
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from grmpipe.config.train import AlgorithmConfig, OptimizerConfig, TrainConfig
from grmpipe.train.batching.packer import pack
from grmpipe.train.batching.samples import count
from grmpipe.train.compact_adamw import CompactAdamW
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.train.learner.offload import OffloadingLearner
from grmpipe.train.optimizer import iterate_moments
from models.lm import causal_lm

SCRIPT = Path(__file__).parent / "learner" / "lora_rank_process.py"  # it runs any learner
SMALL = ("bfloat16", "int8")


def spec_of(path: str, **train: object) -> LearnerSpec:
    return LearnerSpec(
        model_path=path,
        train=TrainConfig(lr=3e-3, warmup_steps=0, **train),  # type: ignore[arg-type]
        algorithm=AlgorithmConfig(correction="none"),
        max_new_tokens=8,
        device="cpu",
    )


@pytest.fixture(scope="module")
def path(qwen_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose matrices are large enough for 8 bits, with rows of more than a block."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64, hidden_size=72, intermediate_size=264, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=False,
        )
    ).save_pretrained(directory)  # fmt: skip
    return str(directory)


def trained(learner: Learner, make_samples, steps: range) -> list[float]:  # type: ignore[no-untyped-def]
    norms = []
    for step in steps:
        samples = make_samples(12, seed=step)
        learner.accumulate(pack(samples))
        norms.append(learner.step(count(samples, step))["train/grad_norm"])
    return norms


def weights(learner: Learner) -> list[Tensor]:
    return [parameter.full_tensor().clone() for parameter in learner._model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("state_dtype", "bytes_each"), [("bfloat16", 2), ("int8", 1)])
def test_steps_are_near_those_of_torchs_adamw_with_fewer_bytes(state_dtype: str, bytes_each: int) -> None:
    torch.manual_seed(0)
    ours = nn.Linear(512, 64)
    theirs = nn.Linear(512, 64)
    theirs.load_state_dict(ours.state_dict())
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.01}
    small = CompactAdamW(ours.parameters(), state_dtype=state_dtype, **options)  # type: ignore[arg-type]
    whole = torch.optim.AdamW(theirs.parameters(), **options)  # type: ignore[arg-type]
    began = theirs.weight.detach().clone()
    for step in range(20):
        grads = torch.randn(64, 512, generator=torch.Generator().manual_seed(step)) * torch.logspace(-4, 0, 512)
        for model, optimizer in ((ours, small), (theirs, whole)):
            model.weight.grad, model.bias.grad = grads.clone(), grads[:, 0].clone()
            optimizer.step()
    moved, off = (theirs.weight - began).norm(), (ours.weight - theirs.weight).norm()
    assert 0 < off < 0.05 * moved
    state = small.state[ours.weight]
    assert state["exp_avg"].nbytes == state["exp_avg_sq"].nbytes == bytes_each * 64 * 512
    assert sum(state[name].nbytes for name in state if name.endswith("_scale")) == (state_dtype == "int8") * 64 * 2 * 8
    assert small.state[ours.bias]["exp_avg"].dtype == (torch.bfloat16 if state_dtype == "bfloat16" else torch.float32)
    if state_dtype == "int8":
        torch.testing.assert_close(ours.bias, theirs.bias)


@pytest.mark.parametrize(("row_length", "dtype"), [(1536, torch.uint8), (768, torch.float32)])
def test_experts_whose_rows_are_sharded_step_like_others(
    monkeypatch: pytest.MonkeyPatch, row_length: int, dtype: torch.dtype
) -> None:
    """In 8 bits where a shard of a row is one of whole blocks. This is one of two ranks; the other isn't there."""
    monkeypatch.setattr("grmpipe.train.compact_adamw._shard_of", lambda parameter: 0)  # no group to ask
    two_ranks = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=0)
    shape = torch.Size((2, 8, row_length))
    stride = torch.empty(shape, device="meta").stride()

    def sharded(values: Tensor) -> DTensor:
        return DTensor.from_local(values.clone(), two_ranks, [Shard(2)], run_check=False, shape=shape, stride=stride)

    torch.manual_seed(0)
    began, grad = torch.randn(2, 2, 8, row_length // 2)
    ours, theirs = nn.Parameter(sharded(began)), nn.Parameter(began.clone())
    small = CompactAdamW([ours], 1e-3, (0.9, 0.95), 0.0, "int8")
    whole = torch.optim.AdamW([theirs], 1e-3, (0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        ours.grad, theirs.grad = sharded(grad), grad.clone()
        small.step()
        whole.step()
    assert isinstance(ours, DTensor)
    assert (ours.to_local() - theirs).norm() < 0.05 * (theirs - began).norm()
    state = small.state[ours]
    assert state["exp_avg"].dtype == dtype
    assert ("exp_avg_scale" in state) == (dtype == torch.uint8)
    if dtype == torch.uint8:
        assert state["exp_avg_scale"].shape == (2, 8, 6) and state["exp_avg_scale"].to_local().shape == (2, 8, 3)


@pytest.mark.parametrize("state_dtype", SMALL)
def test_rows_at_a_time_change_nothing(state_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def after_two_steps() -> Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(300, 64, bias=False)
        optimizer = CompactAdamW(layer.parameters(), 1e-3, (0.9, 0.95), 0.0, state_dtype)
        for _ in range(2):
            layer.weight.grad = layer.weight.detach().sin()
            optimizer.step()
        return layer.weight.detach()

    whole = after_two_steps()
    monkeypatch.setattr("grmpipe.train.compact_adamw.VALUES_AT_ONCE", 3000)
    pieces = after_two_steps()
    if state_dtype == "int8":
        assert torch.equal(pieces, whole)
    else:  # the noise is drawn in another order
        torch.testing.assert_close(pieces, whole, atol=1e-4, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("state_dtype", SMALL)
def test_a_learner_learns_what_was_good(path: str, make_samples, state_dtype: str) -> None:  # type: ignore[no-untyped-def]
    samples = make_samples()
    batch, totals = pack(samples), count(samples, 0)
    learner = Learner(spec_of(path, optimizer=OptimizerConfig(state_dtype=state_dtype)))

    def objective() -> float:
        logprobs_E = learner.old_pass(batch).logprobs_T[batch.places_E]
        return float((logprobs_E * batch.advantages_E * batch.loss_mask_E).sum())

    before = objective()
    for _ in range(8):
        learner.accumulate(batch)
        learner.step(totals)
    assert objective() > before + 5


@pytest.mark.parametrize("state_dtype", ["bfloat16", pytest.param("int8", marks=pytest.mark.long)])
def test_the_same_run_twice_is_the_same_to_the_bit_also_through_a_checkpoint(
    path: str, make_samples, state_dtype: str, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    spec = spec_of(path, optimizer=OptimizerConfig(state_dtype=state_dtype))
    straight, resumed = Learner(spec), Learner(spec)
    trained(straight, make_samples, range(2))
    straight.save(str(tmp_path / "at2"))
    trained(straight, make_samples, range(2, 4))
    assert resumed.load(str(tmp_path / "at2")) == 2
    trained(resumed, make_samples, range(2, 4))
    for ours, theirs in zip(weights(straight), weights(resumed), strict=True):
        assert torch.equal(ours, theirs)
    again = Learner(spec)
    trained(again, make_samples, range(4))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights(straight), weights(again), strict=True))


@pytest.mark.parametrize(
    "state_dtype", [*(pytest.param(kind, marks=pytest.mark.long) for kind in ("float32", "bfloat16")), "int8"]
)
def test_moments_wait_on_the_host_and_change_no_step(path: str, make_samples, state_dtype: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    here = Learner(spec_of(path, optimizer=OptimizerConfig(state_dtype=state_dtype)))
    away = OffloadingLearner(spec_of(path, optimizer=OptimizerConfig(state_dtype=state_dtype, offload=True)))
    for learner in (here, away):
        trained(learner, make_samples, range(2))
    away.move_state("nothing")  # also on a device that engines share
    away.move_state("everything")
    held = [
        sum(_local(moment).untyped_storage().nbytes() for moment in iterate_moments(o._optimizer)) for o in (here, away)
    ]
    assert held[0] > 10_000 and held[1] == 0
    away.save(str(tmp_path / "away"))
    resumed = Learner(spec_of(path, optimizer=OptimizerConfig(state_dtype=state_dtype)))
    resumed.load(str(tmp_path / "away"))
    for learner in (here, away, resumed):
        trained(learner, make_samples, range(2, 3))
    for ours, theirs, others in zip(weights(here), weights(away), weights(resumed), strict=True):
        assert torch.equal(ours, theirs) and torch.equal(ours, others)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_two_ranks_with_every_memory_option_are_one_rank_with_none(
    path: str, make_samples, forked: type[Forked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    """Gradients of three steps, with checkpointed and offloaded activations, chunks of the head, moments of 8 bits that
    wait on the host; and their checkpoint goes on identically on one rank.
    """
    plain = spec_of(path, optimizer=OptimizerConfig(state_dtype="int8"))
    saving = spec_of(
        path, optimizer=OptimizerConfig(state_dtype="int8", offload=True), activation_checkpointing="selective",
        activation_offload=True, fp32_lm_head=True,
    )  # fmt: skip
    batches = [make_samples(13, seed) for seed in range(3)]
    (tmp_path / "job.pkl").write_bytes(pickle.dumps((saving, batches, 40)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    for process in [forked(SCRIPT, tmp_path, rank, 2, address) for rank in range(2)]:
        assert process.wait(120) == 0, process.output[-3000:]
    ranks = [pickle.loads((tmp_path / f"rank{rank}.pkl").read_bytes()) for rank in range(2)]
    learner = Learner(plain)
    for step, samples in enumerate(batches):
        learner.accumulate(pack(samples))
        totals = count(samples, step)
        for name, parameter in learner._model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            whole = (parameter.grad.full_tensor() / totals.num_loss_tokens).numpy()
            off = np.linalg.norm(ranks[1]["gradients"][step][name] - whole) / np.linalg.norm(whole)
            # After a step more: sums in another order round a few moments to the next value of 8 bits.
            assert off < (5e-4 if step else 1e-5), (step, name)
        assert of_run(ranks[0]["metrics"][step]) == pytest.approx(of_run(learner.step(totals)), rel=1e-3, abs=1e-5)
    resumed = Learner(saving)
    assert resumed.load(str(tmp_path / "checkpoint")) == 2
    monkeypatch.setattr(causal_lm, "CHUNK_LOGITS", 500)
    resumed.accumulate(pack(batches[2]))
    metrics = of_run(resumed.step(count(batches[2], 2)))
    assert metrics == pytest.approx(of_run(ranks[0]["metrics"][2]), rel=1e-4, abs=1e-5)


def of_run(metrics: dict[str, float]) -> dict[str, float]:
    """Those that all ranks together have: not a rank's speed and memory."""
    return {name: value for name, value in metrics.items() if not name.startswith("rank/")}


def test_a_state_that_is_no_choice_is_named() -> None:
    with pytest.raises(ValueError, match=r"^state_dtype: unknown value 'fp8'; known: float32, bfloat16, int8"):
        OptimizerConfig(state_dtype="fp8")
