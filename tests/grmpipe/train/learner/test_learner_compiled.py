"""A learner whose layers are compiled, beside one whose aren't: what it compiles, and the same numbers."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.lm import parallelize
from grmpipe.models.lm.parallelize import compile_layers
from grmpipe.models.settings import LoraConfig
from grmpipe.train import training_rank
from grmpipe.train.batching.packer import pack
from grmpipe.train.batching.samples import count
from grmpipe.train.learner import learner as learner_file
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_spec import LearnerSpec

CPU = torch.device("cpu")


def make_learner(path: str, lora: LoraConfig, **train) -> Learner:
    spec = LearnerSpec(
        model_path=path,
        train=TrainConfig(lr=1e-2, warmup_steps=0, **train),
        algorithm=AlgorithmConfig(kl_coefficient=0.1),
        lora=lora,
        max_new_tokens=8,
        device="cpu",
        master_dtype="float32",
    )
    return Learner(spec)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of the modules that are compiled; nothing is."""
    found: list[str] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: found.append(type(module).__name__))
    monkeypatch.setattr(parallelize, "_refuse_to_compile", lambda device, backend: "")
    return found


def test_norms_attention_and_mlp_of_each_layer_are_compiled(qwen_path: str, compiled: list[str]) -> None:
    learner = make_learner(qwen_path, LoraConfig(), compile="layers")
    of_a_layer = ["Qwen3Attention", "Qwen3MLP", "Qwen3RMSNorm", "Qwen3RMSNorm"]
    assert compiled == of_a_layer * 4  # two layers, of the policy and of its reference
    assert learner.list_uncompiled() == ""


def test_experts_stay_as_they_are_and_that_is_said(mixture_path: str, compiled: list[str]) -> None:
    learner = make_learner(mixture_path, LoraConfig(), compile="layers")
    assert set(compiled) == {"Qwen3MoeAttention", "Qwen3MoeRMSNorm"}
    assert learner.list_uncompiled().startswith("the experts of 2 layers aren't compiled: ")


def test_nothing_is_compiled_unless_it_is_asked_for(qwen_path: str, compiled: list[str]) -> None:
    assert (make_learner(qwen_path, LoraConfig()).list_uncompiled(), compiled) == ("", [])


def test_without_a_compiler_layers_stay_as_they_are_and_the_reason_is_said(
    qwen_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_, **options):
        raise RuntimeError("No working C++ compiler found\nand much advice")

    monkeypatch.setattr(torch, "compile", fail)
    learner = make_learner(qwen_path, LoraConfig(), compile="layers")
    assert learner.list_uncompiled() == "nothing is compiled: No working C++ compiler found"
    assert all(module._compiled_call_impl is None for module in learner._model.modules())


def test_runs_that_must_be_equal_bit_for_bit_refuse_it() -> None:
    with pytest.raises(ValueError, match=r"^compile: .* type train\.compile=none"):
        TrainConfig(compile="layers", deterministic=True)


@pytest.mark.long
@pytest.mark.timeout(900)  # the compiler alone takes a minute of an idle core
@pytest.mark.parametrize(
    ("path", "checkpointing", "rank", "backend"),
    [
        ("qwen_path", "full", 0, "inductor"),
        ("qwen_path", "selective", 4, "aot_eager"),
        ("mixture_path", "full", 0, "aot_eager"),
    ],
)
def test_compiled_layers_give_the_same_numbers_under_the_same_names(
    path: str, checkpointing: str, rank: int, backend: str, make_samples, request, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_by = functools.partial(compile_layers, backend=backend)
    monkeypatch.setattr(training_rank, "compile_layers", compile_by)
    monkeypatch.setattr(learner_file, "compile_layers", compile_by)
    torch._dynamo.reset()
    plain, compiled = (
        make_learner(
            request.getfixturevalue(path), LoraConfig(rank=rank), activation_checkpointing=checkpointing, compile=how
        )
        for how in ("none", "layers")
    )
    for samples in (make_samples(), make_samples(7, seed=1)):  # of other lengths
        metrics = []
        for learner in (plain, compiled):
            learner.accumulate(pack(samples))
            metrics.append(learner.step(count(samples, 0)))
        assert metrics[1] == pytest.approx(metrics[0], rel=1e-5, abs=1e-5)
        there, here = (learner.old_pass(pack(samples)).logprobs_T for learner in (compiled, plain))
        assert there == pytest.approx(here, abs=1e-5)
    assert sum(module._compiled_call_impl is not None for module in compiled._model.modules()) >= 6
    states = [learner._model.state_dict() for learner in (plain, compiled)]
    assert list(states[0]) == list(states[1])
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name].full_tensor(), tensor.full_tensor(), atol=1e-4, rtol=0)
