"""One rank of a learner against the formulas, computed naively over unpacked samples."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Lfm2Config, Lfm2ForCausalLM

from grmpipe.algorithm.distill import DistillConfig
from grmpipe.algorithm.distillation import divergence
from grmpipe.algorithm.settings import Cap, SftConfig, Truncation
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.lm import parallelize
from grmpipe.models.lm.causal_lm import compute_packed_logprobs
from grmpipe.models.lm.footprint import read_footprint
from grmpipe.models.lm.parallelize import ATTENTION
from grmpipe.models.lm.score import ScoredText, score_sequences
from grmpipe.models.settings import LoraConfig
from grmpipe.models.stored_files import first_difference
from grmpipe.models.types import InlineBytes, PromptScoring, TokenScores
from grmpipe.train.batching.packer import Packer, pack
from grmpipe.train.batching.samples import count
from grmpipe.train.learner.batch_metrics import measure_sizes
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.train.non_finite_gradients import NonFiniteGradients
from grmpipe.types import TrainingSample

MAX_NEW_TOKENS = 8


def make_learner(path: str, algorithm: AlgorithmConfig | None = None, master: str = "float64", **train) -> Learner:
    return Learner(
        LearnerSpec(
            model_path=path,
            train=TrainConfig(lr=1e-2, warmup_steps=0, **train),
            algorithm=algorithm or AlgorithmConfig(),
            max_new_tokens=MAX_NEW_TOKENS,
            device="cpu",
            master_dtype=master,
        )
    )


def gradients(learner: Learner) -> dict[str, Tensor]:
    found = {}
    for name, parameter in learner._model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        found[name] = parameter.grad.full_tensor().clone()
    return found


def weights(learner: Learner) -> bytes:
    bucket = learner.sender.bucket(0)
    assert bucket is not None and isinstance(bucket.payload, InlineBytes)
    return b"".join(data.tobytes() for data in bucket.payload.data)


def naive_loss(model, samples: list[TrainingSample], algorithm: AlgorithmConfig) -> Tensor:
    """The loss of a whole on-policy batch (reference = the model itself, before any step), sample by sample."""
    per_sample = []
    for sample in samples:
        ids, mask = torch.tensor(sample.token_ids), torch.tensor(sample.loss_mask, dtype=torch.bool)
        log_softmax = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        logprobs = log_softmax.gather(-1, ids[1:, None])[:, 0][mask[1:]]
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)[mask[1:]]
        old = logprobs.detach()
        sampler = torch.tensor(sample.sampler_logprobs, dtype=torch.float32)[mask].double()
        advantages = torch.tensor(sample.advantages, dtype=torch.float32)[mask].double()
        weight = (old - sampler).exp().clamp(max=algorithm.tis.cap) if algorithm.correction == "tis" else 1.0
        loss = -weight * (logprobs - old).exp() * advantages - algorithm.entropy_coefficient * entropy
        per_sample.append(loss)
    if algorithm.aggregation == "sequence_mean":
        return torch.stack([loss.mean() for loss in per_sample]).mean()
    total = torch.cat(per_sample).sum()
    if algorithm.aggregation == "constant":
        return total / (len(samples) * MAX_NEW_TOKENS)
    return total / sum(len(loss) for loss in per_sample)


def logprobs_of(model, sample: TrainingSample) -> np.ndarray:
    """log pi of the trained tokens."""
    ids, mask = torch.tensor(sample.token_ids), torch.tensor(sample.loss_mask[1:], dtype=torch.bool)
    with torch.no_grad():
        log_softmax = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    return log_softmax.gather(-1, ids[1:, None])[:, 0][mask].numpy()


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(),
        AlgorithmConfig(correction="none", entropy_coefficient=0.05),
        AlgorithmConfig(aggregation="sequence_mean", tis=Truncation(cap=1.1)),
        AlgorithmConfig(estimator="dr_grpo", aggregation="constant"),
    ],
)
def test_gradients_in_pieces_equal_the_naive_loss(gpt2_path: str, make_samples, algorithm: AlgorithmConfig) -> None:
    samples = make_samples()
    learner = make_learner(gpt2_path, algorithm)
    packer = Packer(max_tokens=30, world_size=1)
    rounds = packer.add(samples[:7]) + packer.add(samples[7:]) + packer.flush()
    assert len(rounds) > 2
    for round_ in rounds:
        learner.accumulate(round_.micro_batches[0])
    model = AutoModelForCausalLM.from_pretrained(gpt2_path, dtype=torch.float64).eval()
    loss = naive_loss(model, samples, algorithm)
    loss.backward()
    totals = count(samples, 0)
    denominator = {
        "token_mean": totals.num_loss_tokens,
        "sequence_mean": len(samples),
        "constant": len(samples) * MAX_NEW_TOKENS,
    }[algorithm.aggregation]
    ours = gradients(learner)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name] / denominator, parameter.grad, atol=1e-10, rtol=0)
    metrics = learner.step(totals)
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-9)
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), abs=1e-9)


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(sft=SftConfig(coefficient=0.3)),
        AlgorithmConfig(sft=SftConfig(coefficient=2.0), estimator="dr_grpo", aggregation="constant"),
    ],
)
def test_demonstrations_add_their_mean_negative_log_likelihood_to_the_loss(
    gpt2_path: str, make_samples, algorithm: AlgorithmConfig
) -> None:
    samples, shown = make_samples()[:7], make_samples()[7:]
    totals, num_shown = count(samples, 0), sum(sum(sample.loss_mask[1:]) for sample in shown)
    learner = make_learner(gpt2_path, algorithm)
    learner.accumulate(pack(samples))
    for some in (shown[:2], shown[2:]):
        weighed = [replace(one, advantages=tuple(trained / num_shown for trained in one.loss_mask)) for one in some]
        learner.imitate(pack(weighed), totals)
    model = AutoModelForCausalLM.from_pretrained(gpt2_path, dtype=torch.float64).eval()
    imitated = AlgorithmConfig(correction="none")
    as_shown = [replace(one, advantages=tuple(map(float, one.loss_mask))) for one in shown]
    naive_loss(model, as_shown, imitated).backward()  # -A r at r = 1 has the gradient of -A log pi
    mine = {name: algorithm.sft.coefficient * parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    naive_loss(model, samples, algorithm).backward()
    denominator = totals.num_loss_tokens if algorithm.aggregation == "token_mean" else len(samples) * MAX_NEW_TOKENS
    ours = gradients(learner)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name] / denominator, parameter.grad + mine[name], atol=1e-7, rtol=0)
    nll = -np.concatenate([logprobs_of(model, one) for one in shown]).mean()
    metrics = learner.step(totals)
    assert metrics["train/sft_nll_nats"] == pytest.approx(nll)
    assert metrics["train/loss"] == pytest.approx(
        naive_loss(model, samples, algorithm).item() + algorithm.sft.coefficient * nll
    )


@pytest.mark.parametrize(("coefficient", "passes"), [(0.0, 3), (0.5, 4)])
def test_a_step_reports_the_operations_of_its_passes(
    coefficient: float, passes: int, gpt2_path: str, make_samples
) -> None:
    """A reference is one more forward pass, which counts a third of forward and backward."""
    batch, totals = pack(make_samples()), count(make_samples(), 0)
    learner = make_learner(gpt2_path, AlgorithmConfig(kl_coefficient=coefficient))
    forward = read_footprint(gpt2_path).flops(LoraConfig()).forward(measure_sizes(batch))
    for _ in range(2):
        learner.accumulate(batch)
        assert learner.step(totals)["rank/model_flops"] == passes * forward, "of this batch, not of earlier ones"


def test_kl_pulls_towards_the_reference(gpt2_path: str, make_samples) -> None:
    """After a step away from it, the k3 of a naive pass, and a gradient that isn't the policy's."""
    batch, totals = pack(make_samples()), count(make_samples(), 0)
    learner = make_learner(gpt2_path, AlgorithmConfig(kl_coefficient=0.5))
    learner.accumulate(batch)
    assert learner.step(totals)["train/kl_nats"] == 0.0
    current = learner.old_pass(batch).logprobs_T.astype(np.float64)
    reference = make_learner(gpt2_path).old_pass(batch).logprobs_T.astype(np.float64)
    silent = replace(batch, advantages_E=np.zeros_like(batch.advantages_E))
    learner.accumulate(silent)
    metrics = learner.step(totals)
    x = (reference - current)[batch.loss_mask_E > 0]
    assert metrics["train/kl_nats"] == pytest.approx((np.exp(x) - x - 1).mean(), abs=1e-6)
    assert metrics["train/loss"] == pytest.approx(0.5 * metrics["train/kl_nats"])
    assert metrics["train/grad_norm"] > 0


def test_a_kl_in_the_reward_is_not_in_the_loss_and_its_reference_stays(gpt2_path: str, make_samples) -> None:
    batch, totals = pack(make_samples()), count(make_samples(), 0)
    learner = make_learner(gpt2_path, AlgorithmConfig(kl_coefficient=0.5, kl_in_reward=True))
    before = learner.reference_logprobs(batch)
    np.testing.assert_array_equal(before, learner.old_pass(batch).logprobs_T)
    learner.accumulate(batch)
    assert "train/kl_nats" not in learner.step(totals)
    np.testing.assert_array_equal(learner.reference_logprobs(batch), before)
    assert np.abs(learner.old_pass(batch).logprobs_T - before).max() > 1e-3


def test_a_learner_knows_the_age_of_its_tokens(gpt2_path: str, make_samples) -> None:
    """Decoupled with an interpolated pi_prox: at ages 0 and 1 it is the sampler and w is 1; at age 2 it is halfway."""
    samples = make_samples()
    batch, totals = pack(samples), count(samples, 0)
    algorithm = AlgorithmConfig(proximal="interpolated", correction="decoupled", decoupled=Cap(cap=1e9))
    learner = make_learner(gpt2_path, algorithm)
    for version in range(3):
        trained_T = batch.loss_mask_E > 0
        log_ratios = (learner.old_pass(batch).logprobs_T - batch.sampler_logprobs_E)[trained_T]
        half_way = np.where(version - batch.versions_E[trained_T] == 2, np.exp(log_ratios / 2), 1.0)
        learner.accumulate(batch)
        assert learner.step(totals)["train/correction_mean"] == pytest.approx(half_way.mean(), rel=1e-5)
    assert half_way.max() != 1.0


def test_a_second_update_measures_the_ratio_against_the_first_pass(gpt2_path: str, make_samples) -> None:
    samples = make_samples()
    batch, totals = pack(samples), count(samples, 0)
    learner = make_learner(gpt2_path, AlgorithmConfig(correction="none", clip_low=0.01, clip_high=0.01))
    old = learner.old_pass(batch)
    for clipped in (False, True):
        learner.accumulate(batch, old)
        assert (learner.step(totals)["train/clip_share"] > 0) is clipped


def test_the_samplers_temperature_is_the_learners(gpt2_path: str, make_samples) -> None:
    """An engine that samples from the learner's own weights at T = 0.5 doesn't count as a mismatch."""
    batch = pack(make_samples())
    learner = Learner(replace(make_learner(gpt2_path)._spec, temperature=0.5))
    exact = replace(batch, sampler_logprobs_E=learner.old_pass(batch).logprobs_T)
    learner.accumulate(exact)
    assert learner.step(count(make_samples(), 0))["mismatch/max_nats"] < 1e-5
    assert np.abs(learner.old_pass(batch).logprobs_T - make_learner(gpt2_path).old_pass(batch).logprobs_T).max() > 0.01


@pytest.mark.parametrize("updates", [1, 3])
def test_age_is_counted_in_batches_however_many_updates_each_has(gpt2_path: str, make_samples, updates: int) -> None:
    """Half the tokens are of version 0, half of version 1."""
    samples = make_samples()
    batch, totals = pack(samples), count(samples, 0)
    trained_T, versions_T = batch.loss_mask_E > 0, batch.versions_E
    learner = make_learner(gpt2_path, AlgorithmConfig(updates_per_batch=updates))
    for batches in range(3):
        for _ in range(updates):
            learner.accumulate(batch)
            metrics = learner.step(totals)
        ages, sizes = np.unique(np.maximum(0, batches - versions_T[trained_T]), return_counts=True)
        shares = {name: share for name, share in metrics.items() if name.endswith("/token_share")}
        assert shares == pytest.approx(
            {f"mismatch/age_{age}/token_share": n / trained_T.sum() for age, n in zip(ages, sizes, strict=True)}
        )


def test_a_discarded_batch_leaves_no_trace(gpt2_path: str, make_samples) -> None:
    kept, dropped = pack(make_samples(seed=1)), pack(make_samples(seed=2))
    totals = count(make_samples(seed=1), 0)
    plain, disturbed = make_learner(gpt2_path), make_learner(gpt2_path)
    disturbed.accumulate(dropped)
    disturbed.discard()
    results = []
    for learner in (plain, disturbed):
        learner.accumulate(kept)
        results.append((learner.step(totals), weights(learner), learner.version))
    assert results[0] == results[1]


def test_a_nan_raises_with_its_norm_and_leaves_the_learner_usable(gpt2_path: str, make_samples) -> None:
    batch, totals = pack(make_samples()), count(make_samples(), 0)
    learner = make_learner(gpt2_path)
    before = weights(learner)
    learner.accumulate(replace(batch, advantages_E=batch.advantages_E * np.float32("nan")))
    with pytest.raises(NonFiniteGradients, match="nan"):
        learner.step(totals)
    assert (weights(learner), learner.version) == (before, 0)
    learner.accumulate(batch)
    assert np.isfinite(learner.step(totals)["train/loss"])


def test_an_update_without_trained_tokens_moves_the_version_and_nothing_else(gpt2_path: str, make_samples) -> None:
    """Weights, moments and the update after it are those of a learner that never had it."""
    batch, totals = pack(make_samples()), count(make_samples(), 0)
    results = []
    for skips in (0, 2):
        learner = make_learner(gpt2_path)
        for _ in range(2):
            before, version = weights(learner), learner.version
            for _ in range(skips):
                assert learner.step(count([], 0)) == {}
            assert (weights(learner), learner.version) == (before, version + skips)
            learner.accumulate(batch)
            metrics = learner.step(totals)
        results.append((metrics["train/grad_norm"], weights(learner)))
    assert results[0] == results[1]


def test_an_aggregation_that_divides_by_nothing_is_refused(
    gpt2_path: str, make_samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Learner, "_denominator", lambda learner, totals: 0.0)
    with pytest.raises(ValueError, match=r"^algorithm\.aggregation: the denominator must be above 0, got 0\.0"):
        make_learner(gpt2_path).step(count(make_samples(), 0))


def test_totals_that_do_not_fit_what_was_accumulated_are_caught(gpt2_path: str, make_samples) -> None:
    learner = make_learner(gpt2_path)
    learner.accumulate(pack(make_samples()))
    with pytest.raises(AssertionError, match="in the batch"):
        learner.step(count(make_samples(4), 0))


@pytest.mark.parametrize(("checkpointing", "offload"), [("full", False), ("full", True), ("selective", True)])
@pytest.mark.parametrize("path", ["qwen_path", "gpt2_path"])
def test_activation_checkpointing_and_offload_change_no_gradient(
    path: str, checkpointing: str, offload: bool, make_samples, request
) -> None:
    batch = pack(make_samples())
    plain = make_learner(request.getfixturevalue(path), master="float32")
    options = {"activation_checkpointing": checkpointing, "activation_offload": offload}
    saving = make_learner(request.getfixturevalue(path), master="float32", **options)
    for learner in (plain, saving):
        learner.accumulate(batch)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(saving)[name], gradient)


class Attentions(TorchDispatchMode):
    """Counts the forward passes of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func in ATTENTION
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("checkpointing", "passes", "attentions"), [("none", 1, 1), ("selective", 2, 1), ("full", 2, 2)]
)
def test_checkpointing_recomputes_layers_and_selectively_not_their_attention(
    qwen_path: str, make_samples, checkpointing: str, passes: int, attentions: int
) -> None:
    calls: list[int] = []
    learner = make_learner(qwen_path, master="float32", activation_checkpointing=checkpointing)
    learner._model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: calls.append(0))
    ids_T = torch.arange(5, 30)  # one sample, without a mask: a fused kernel
    with Attentions() as counted:
        compute_packed_logprobs(learner._model, ids_T, torch.arange(25), torch.tensor([25])).logprobs_T.sum().backward()
    assert (len(calls), counted.calls) == (passes, 2 * attentions)


@pytest.mark.parametrize(("offload", "num_copies"), [(False, 0), (True, 2)])
def test_offload_takes_the_inputs_of_layers_and_nothing_else(
    qwen_path: str, make_samples, offload: bool, num_copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[torch.Size] = []

    class Recorded(save_on_cpu):
        def __init__(self, **options) -> None:
            super().__init__(**options)
            pack_hook = self.pack_hook
            self.pack_hook = lambda tensor: (copied.append(tensor.shape), pack_hook(tensor))[1]

    monkeypatch.setattr(parallelize, "save_on_cpu", Recorded)
    learner = make_learner(qwen_path, master="float32", activation_checkpointing="full", activation_offload=offload)
    learner.accumulate(batch := pack(make_samples()))
    assert copied == [(1, len(batch.token_ids_T), 32)] * num_copies


def test_an_offload_without_checkpointing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^activation_offload: .* activation_checkpointing=full"):
        TrainConfig(activation_checkpointing="none", activation_offload=True)


def test_bfloat16_computes_near_float32_and_keeps_float32_masters(qwen_path: str, make_samples) -> None:
    batch, totals = pack(make_samples()), count(make_samples(), 0)
    exact = make_learner(qwen_path, master="float32")
    fast = make_learner(qwen_path, master="float32", dtype="bfloat16")
    assert fast.old_pass(batch).logprobs_T == pytest.approx(exact.old_pass(batch).logprobs_T, abs=0.05)
    assert (fast.old_pass(batch).logprobs_T != exact.old_pass(batch).logprobs_T).any()
    fast.accumulate(batch)
    fast.step(totals)
    assert {parameter.dtype for parameter in fast._model.parameters()} == {torch.float32}


def test_learning_raises_the_log_probs_of_what_was_good(qwen_path: str, make_samples) -> None:
    samples = make_samples()
    batch, totals = pack(samples), count(samples, 0)
    learner = make_learner(qwen_path, AlgorithmConfig(correction="none"), master="float32")
    before = (learner.old_pass(batch).logprobs_T * batch.advantages_E).sum()
    for _ in range(5):
        learner.accumulate(batch)
        learner.step(totals)
    assert (learner.old_pass(batch).logprobs_T * batch.advantages_E).sum() > before + 1.0


def test_looking_at_an_open_batch_changes_nothing(qwen_path: str, make_samples) -> None:
    """A pass without backward leaves the root gathered, which must not outlive the step."""
    samples = make_samples()
    batch, totals = pack(samples), count(samples, 0)
    undisturbed, watched = make_learner(qwen_path, master="float32"), make_learner(qwen_path, master="float32")
    for _ in range(2):
        undisturbed.accumulate(batch)
        undisturbed.step(totals)
        watched.accumulate(batch)
        watched.score((1, 2, 3))
        watched.old_pass(batch)
        watched.step(totals)
        assert watched.score((1, 2, 3)) == undisturbed.score((1, 2, 3))
    assert weights(watched) == weights(undisturbed)


def test_saving_before_the_first_step_changes_no_step(qwen_path: str, make_samples, tmp_path) -> None:
    """The optimizer has no state yet; creating one for the file must not count as a step."""
    samples = make_samples()
    learners = [make_learner(qwen_path, master="float32") for _ in range(3)]
    learners[1].save(str(tmp_path / "closed"))
    assert learners[2].load(str(tmp_path / "closed")) == 0
    learners[0].accumulate(pack(samples))
    learners[0].save(str(tmp_path / "open"))
    learners[0].discard()
    assert make_learner(qwen_path, master="float32").load(str(tmp_path / "open")) == 0
    for learner in learners:
        learner.accumulate(pack(samples))
        learner.step(count(samples, 0))
    assert weights(learners[0]) == weights(learners[1]) == weights(learners[2])


def test_saving_with_an_open_batch_keeps_it_open(qwen_path: str, make_samples, tmp_path) -> None:
    samples = make_samples()
    plain, saving = make_learner(qwen_path, master="float32"), make_learner(qwen_path, master="float32")
    for learner in (plain, saving):
        for _ in range(3):
            learner.accumulate(pack(samples))
            if learner is saving:
                learner.save(str(tmp_path / str(learner.version)))
            learner.step(count(samples, 0))
    assert weights(plain) == weights(saving)


def test_training_continues_while_a_checkpoint_is_written(
    qwen_path: str, make_samples, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is trained meanwhile gets into it."""
    samples, disk, fsync = make_samples(), threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        assert disk.wait(30)
        fsync(descriptor)

    learner, written = make_learner(qwen_path, master="float32"), tmp_path / "checkpoint"
    monkeypatch.setattr(os, "fsync", slow)
    for step in range(2):
        learner.accumulate(pack(samples))
        learner.step(count(samples, step))
    before = weights(learner)
    learner.begin_save(str(written))
    learner.accumulate(pack(samples))
    learner.step(count(samples, 2))
    assert learner.saved() is None
    disk.set()
    while (files := learner.saved()) is None:
        time.sleep(0.01)
    assert first_difference(written, files) is None
    assert weights(learner) != before
    other = make_learner(qwen_path, master="float32")
    assert other.load(str(written)) == 2
    assert weights(other) == before
    other.accumulate(pack(samples))
    other.step(count(samples, 2))
    assert weights(other) == weights(learner), "the optimizer's state is of then, too"


def test_failed_write_during_training_is_reported(qwen_path: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    learner = make_learner(qwen_path, master="float32")
    monkeypatch.setattr(os, "fsync", full)
    learner.begin_save(str(tmp_path / "checkpoint"))
    with pytest.raises(OSError, match=r"checkpoint can't be written: rank 0: .*No space left on device"):
        while learner.saved() is None:
            time.sleep(0.01)


def test_score_is_what_transformers_says(qwen_path: str) -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    log_softmax = AutoModelForCausalLM.from_pretrained(qwen_path)(ids).logits[0, :-1].log_softmax(-1)
    plain = log_softmax.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    assert make_learner(qwen_path, master="float32").score((1, 2, 3, 4, 5)) == pytest.approx(plain, abs=1e-5)


def test_an_export_of_a_model_from_the_hub_has_its_tokenizer(
    qwen_path: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a joined cluster load by the hub's name: each machine has its own cache."""
    snapshot = tmp_path / "hub/models--Some--Model/snapshots/abc"
    shutil.copytree(qwen_path, snapshot)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (snapshot / name).write_text("{}")
    (tmp_path / "hub/models--Some--Model/refs").mkdir()
    (tmp_path / "hub/models--Some--Model/refs/main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    make_learner("Some/Model", master="float32").export(str(tmp_path / "policy"))
    names = {path.name for path in (tmp_path / "policy").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names


def test_loading_goes_back_to_what_was_saved(qwen_path: str, make_samples, tmp_path) -> None:
    """Whatever the learner did before, after a load it equals a new learner after the same load, also at version 0."""
    samples = make_samples()
    learner = make_learner(qwen_path, master="float32")
    expected = []
    for version in range(3):
        learner.save(str(tmp_path / str(version)))
        learner.accumulate(pack(samples))
        learner.step(count(samples, 0))
        expected.append(weights(learner))
    for version in (2, 0, 1):
        learner.accumulate(pack(samples))
        assert learner.load(str(tmp_path / str(version))) == version
        learner.accumulate(pack(samples))
        learner.step(count(samples, 0))
        assert weights(learner) == expected[version]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_decays_over_the_run_however_many_updates_a_batch_has(
    qwen_path: str, make_samples, schedule: str
) -> None:
    """Each batch begins at the rate that it has with one update, and no step is made at a rate of 0."""
    rates = {}
    for updates in (1, 2, 4):
        algorithm = AlgorithmConfig(updates_per_batch=updates)
        learner = make_learner(qwen_path, algorithm, num_steps=4, schedule=schedule)
        rates[updates] = []
        for _ in range(4 * updates):
            samples = make_samples(2)
            learner.accumulate(pack(samples))
            rates[updates].append(learner.step(count(samples, 0))["train/lr"])
        assert rates[updates][::updates] == pytest.approx(rates[1])
        assert rates[updates] == sorted(rates[updates], reverse=True) and rates[updates][-1] > 0


def test_a_run_that_learns_its_length_late_decays_over_that(qwen_path: str, make_samples) -> None:
    learner = make_learner(qwen_path, num_steps=80, schedule="linear")
    learner.expect(2)
    told = []
    for _ in range(2):
        learner.accumulate(pack(make_samples(2)))
        told.append(learner.step(count(make_samples(2), 0))["train/lr"])
    assert told == pytest.approx([1e-2, 0.5e-2])


def test_a_model_that_packed_samples_leak_through_fails_as_it_is_loaded(tmp_path: Path) -> None:
    """Also if no check before the run has seen its files."""
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, layer_types=["conv", "full_attention"],
        initializer_range=0.3,
    )  # fmt: skip
    Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^path: .*differently than alone"):
        make_learner(str(tmp_path))


def with_teacher(samples: list[TrainingSample], path: str, top_k: int) -> list[TrainingSample]:
    """The samples, of which all but the last are scored by the model in a directory."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    taught = []
    for sample in samples[:-1]:
        with torch.no_grad():
            (found,) = score_sequences(model, [ScoredText(sample.token_ids, PromptScoring(start=1, top_k=top_k))])
        first = ((1, 0), (0, 0))
        scores = TokenScores(
            logprobs_N=np.pad(found.logprobs_N, (1, 0)),
            top_ids_NK=None if found.top_ids_NK is None else np.pad(found.top_ids_NK, first),
            top_logprobs_NK=None if found.top_logprobs_NK is None else np.pad(found.top_logprobs_NK, first),
        )
        taught.append(replace(sample, teacher=scores))
    return [*taught, samples[-1]]


def naive_distillation(model, samples: list[TrainingSample], distill: DistillConfig) -> Tensor:
    """The divergence of a whole on-policy batch from the teacher, sample by sample, over trained tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples[:-1]:
        ids, mask = torch.tensor(sample.token_ids), torch.tensor(sample.loss_mask[1:], dtype=torch.bool)
        log_p = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        scores = sample.teacher
        if distill.top_k:
            top_ids = torch.from_numpy(scores.top_ids_NK[1:]).long()
            top = torch.from_numpy(scores.top_logprobs_NK[1:]).double()
            loss = divergence(log_p.gather(-1, top_ids), top, distill.beta)
        else:
            own = log_p.gather(-1, ids[1:, None])[:, 0]
            sampler = torch.tensor(sample.sampler_logprobs[1:], dtype=torch.float32).double()
            weight = (own.detach() - sampler).exp().clamp(max=AlgorithmConfig().tis.cap)
            loss = weight * (own - torch.from_numpy(scores.logprobs_N[1:]).double()) ** 2 / 2
        total = total + loss[mask].sum()
    return total


@pytest.mark.parametrize(("top_k", "beta"), [(0, 1.0), (4, 1.0), (4, 0.0), (4, 0.5)])
def test_the_gradient_towards_a_teacher_is_that_of_the_naive_divergence(
    gpt2_path: str, make_samples, top_k: int, beta: float
) -> None:
    """Packed with shared prefixes, in pieces; one sample has no teacher, and no term."""
    distill = DistillConfig(teachers={"default": "t"}, top_k=top_k, beta=beta, coefficient=0.7)
    # Other weights of the same tokens: those after a step.
    samples, before = make_samples(), make_learner(gpt2_path)
    before.accumulate(pack(samples))
    before.step(count(samples, 0))
    silent = [replace(one, advantages=(0.0,) * len(one.advantages)) for one in samples]
    taught = with_teacher(silent, gpt2_path, top_k)
    learner = make_learner(gpt2_path, AlgorithmConfig(distill=distill))
    learner._model.load_state_dict(before._model.state_dict())
    packer = Packer(max_tokens=30, world_size=1)
    for round_ in (*packer.add(taught), *packer.flush()):
        learner.accumulate(round_.micro_batches[0])
    model = AutoModelForCausalLM.from_pretrained(gpt2_path, dtype=torch.float64).eval()
    model.load_state_dict({name: value.full_tensor() for name, value in before._model.state_dict().items()})
    (0.7 * naive_distillation(model, taught, distill)).backward()
    ours = gradients(learner)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=1e-6, rtol=1e-5)
    totals = count(taught, 0)
    trained = sum(sum(one.loss_mask) for one in taught[:-1])
    assert learner.step(totals)["train/taught_share"] == pytest.approx(trained / totals.num_loss_tokens)
