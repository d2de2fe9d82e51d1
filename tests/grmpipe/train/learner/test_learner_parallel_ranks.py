"""Four ranks in any meshes are one learner: copies of the model (HSDP), shared samples (Ulysses), and both.

Most are in float64. Each set of processes is spawned once, and runs one learner after another.
"""

from __future__ import annotations

import pickle
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import Forked
from rank_metrics import of_all_ranks
from transformers import AutoModelForCausalLM, Starcoder2Config, Starcoder2ForCausalLM

from grmpipe.algorithm.parts import AGGREGATIONS, LOSSES
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.settings import LoraConfig, ParallelConfig
from grmpipe.models.types import InlineBytes
from grmpipe.train.batching.packer import pack_rounds
from grmpipe.train.batching.samples import count
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.types import Metrics, MicroBatch, TrainingSample

SCRIPT = Path(__file__).with_name("parallel_rank_process.py")
RANKS = 4
PIECES = 66  # packed tokens of a micro-batch; hardly any is a multiple of the ranks that share it
MESHES = {
    "copies": ParallelConfig(dp_replicate=2),
    "shared": ParallelConfig(cp=4),
    "shared_and_sharded": ParallelConfig(cp=2),
    "all": ParallelConfig(dp_replicate=2, cp=2),
}
# Where the experts that a mixture replays come from, and its meshes.
MIXTURES = {
    "of_rollouts": ("rollout", MESHES["all"]),
    "of_old_pass": ("old_logprobs", MESHES["all"]),
    "of_old_pass_padded": (
        "old_logprobs",
        MESHES["shared"],
    ),  # the last slice is longer than what is left of the tokens
    "divided": ("rollout", ParallelConfig(cp=2, ep=2)),
    "divided_in_copies": ("old_logprobs", ParallelConfig(dp_replicate=2, cp=2, ep=2)),
}
IN_GATE = ("shared", "all")
FLASH = ("shared", "all")  # with the attention of GPUs
EACH = [pytest.param(name, marks=() if name in IN_GATE else pytest.mark.long) for name in MESHES]
LOSSES_AND_MEANS = {
    f"{loss}_{aggregation}": AlgorithmConfig(
        loss=loss,
        aggregation=aggregation,
        proximal="recomputed" if loss == "policy_gradient" else "sampler",
        correction="sequence_tis" if loss == "policy_gradient" else "none",
        kl_coefficient=0.1,
        entropy_coefficient=0.01,
    )
    for loss in LOSSES
    for aggregation in AGGREGATIONS
}
Batches = list[list[TrainingSample]]
Case = tuple[LearnerSpec, Batches, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Run:
    """The results of all cases."""

    directory: Path

    def ranks(self, case: str) -> list[dict]:
        return [pickle.loads((self.directory / f"{case}-{rank}.pkl").read_bytes()) for rank in range(RANKS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What one rank makes of the batches, each in one micro-batch with a copy of the prompt for each sample."""

    gradients: list[dict[str, np.ndarray]]
    metrics: list[Metrics]
    learner: Learner

    @staticmethod
    def of(spec: LearnerSpec, batches: Batches) -> Alone:
        learner = Learner(spec)
        gradients, metrics = [], []
        for step, samples in enumerate(batches):
            totals = count(samples, step)
            learner.accumulate(together(samples))
            gradients.append(
                {
                    name: (parameter.grad.full_tensor() / totals.num_loss_tokens).numpy()
                    for name, parameter in learner._model.named_parameters()
                    if parameter.requires_grad
                }
            )
            metrics.append(of_all_ranks(learner.step(totals)))
        return Alone(gradients=gradients, metrics=metrics, learner=learner)


def together(samples: list[TrainingSample]) -> MicroBatch:
    (round_,) = pack_rounds(samples, 10_000, 1, shared=False)
    return round_.micro_batches[0]


def pushed(learner: Learner) -> dict[str, np.ndarray]:
    found = {}
    for index in range(learner.sender.num_buckets()):
        bucket = learner.sender.bucket(index)
        assert bucket is not None and isinstance(bucket.payload, InlineBytes)
        found |= {tensor.name: data for tensor, data in zip(bucket.tensors, bucket.payload.data, strict=True)}
    return found


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def run(forked: type[Forked], directory: Path, cases: dict[str, Case]) -> Run:
    """A second try if a signal ended a rank: see test_learner_two_ranks.py."""
    (directory / "job.pkl").write_bytes(pickle.dumps((cases, PIECES)))
    for _ in range(2):
        address = free_address()
        processes = [forked(SCRIPT, directory, rank, RANKS, address) for rank in range(RANKS)]
        codes = [process.wait(600) for process in processes]
        if min(codes) >= 0:
            break
    for code, process in zip(codes, processes, strict=True):
        assert code == 0, process.output[-3000:]
    return Run(directory)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> LearnerSpec:
    """A family that computes in float64 throughout, with fewer key heads than ranks and a window."""
    path = tmp_path_factory.mktemp("starcoder")
    torch.manual_seed(0)
    Starcoder2ForCausalLM(
        Starcoder2Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, sliding_window=7, residual_dropout=0.0,
            embedding_dropout=0.0, initializer_range=0.2,
        )
    ).save_pretrained(path)  # fmt: skip
    return LearnerSpec(
        model_path=str(path),
        train=TrainConfig(lr=1e-3, warmup_steps=0, activation_checkpointing="full"),
        algorithm=AlgorithmConfig(entropy_coefficient=0.01, correction="sequence_tis"),
        max_new_tokens=8,
        device="cpu",
        master_dtype="float64",
        sync_dtype="float64",
        bucket_bytes=20_000,
    )


@pytest.fixture(scope="module")
def batches(make_siblings) -> Batches:
    """The second batch is a single sample: work for one rank, or for those that share it."""
    return [make_siblings(num_samples, seed) for seed, num_samples in enumerate((17, 1))]


def in_meshes(spec: LearnerSpec, parallel: ParallelConfig, **changes: object) -> LearnerSpec:
    return replace(spec, train=replace(spec.train, parallel=parallel), **changes)


@pytest.fixture(scope="module")
def one(spec: LearnerSpec, batches: Batches) -> Alone:
    return Alone.of(spec, batches)


@pytest.fixture(scope="module")
def in_gate(spec: LearnerSpec, batches: Batches, forked: type[Forked], tmp_path_factory) -> Run:
    specs = {"shared": spec, "all": replace(spec, train=replace(spec.train, activation_checkpointing="selective"))}
    cases = {name: (in_meshes(specs[name], MESHES[name]), batches, {"varlen": name in FLASH}) for name in IN_GATE}
    return run(forked, tmp_path_factory.mktemp("in_gate"), cases)


@pytest.fixture(scope="module")
def beside(spec: LearnerSpec, batches: Batches, forked: type[Forked], tmp_path_factory) -> Run:
    cases = {name: (in_meshes(spec, MESHES[name]), batches, {}) for name in MESHES.keys() - IN_GATE}
    return run(forked, tmp_path_factory.mktemp("beside"), cases)


@pytest.fixture
def four(case: str, request: pytest.FixtureRequest) -> Run:
    return request.getfixturevalue("in_gate" if case in IN_GATE else "beside")


@pytest.mark.parametrize("case", EACH)
def test_gradients_and_metrics_are_those_of_one_rank(one: Alone, four: Run, case: str) -> None:
    for rank in four.ranks(case):
        assert max(rank["rounds"]) > 1
        for step, expected in enumerate(one.gradients):
            check_gradients(rank["gradients"][step], expected, 1e-10)
            assert rank["metrics"][step] == pytest.approx(one.metrics[step], rel=1e-6, abs=1e-9)


def check_gradients(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, whole in expected.items():
        np.testing.assert_allclose(found[name], whole, atol=tolerance, rtol=0, err_msg=name)
        assert np.abs(whole).max() > 1e-6, f"{name} has no gradient to compare"


@pytest.mark.parametrize("case", EACH)
def test_pushed_weights_and_scores_are_those_of_one_rank(one: Alone, four: Run, case: str) -> None:
    (first, *others), expected = four.ranks(case), pushed(one.learner)
    assert first["weights"].keys() == expected.keys() and not any(rank["weights"] for rank in others)
    for name, data in expected.items():
        theirs = first["weights"][name].view(np.float64)
        np.testing.assert_allclose(theirs, data.view(np.float64), atol=1e-9, err_msg=name)
    score = one.learner.score((1, 2, 3, 4, 5))
    for rank in (first, *others):
        assert rank["score"] == pytest.approx(score, abs=1e-9)


@pytest.mark.parametrize("case", [case for case in EACH if MESHES[str(case.values[0])].cp > 1])
def test_ranks_that_share_samples_give_the_same_sums_to_the_last_bit(four: Run, case: str) -> None:
    ranks, cp = four.ranks(case), MESHES[case].cp
    for rank, own in enumerate(ranks):
        assert own["sums"] == ranks[rank // cp * cp]["sums"]
    trained = [sum(sums["train/tokens_sum"] for sums in rank["sums"]) for rank in ranks]
    assert cp == RANKS or trained[0] != trained[cp], "these groups have the same samples"


@pytest.mark.parametrize("case", EACH)
def test_a_checkpoint_of_any_meshes_is_loaded_by_one_rank(four: Run, spec: LearnerSpec, one: Alone, case: str) -> None:
    """Its moments too: a further step gives what it gives the one rank that made all steps."""
    learner = Learner(spec)
    assert learner.load(str(four.directory / case)) == 2
    expected = pushed(one.learner)
    for name, data in pushed(learner).items():
        np.testing.assert_allclose(data.view(np.float64), expected[name].view(np.float64), atol=1e-9, err_msg=name)
    moments, theirs = (
        torch.cat([state["exp_avg_sq"].full_tensor().flatten() for state in each._optimizer.state.values()])
        for each in (learner, one.learner)
    )
    assert theirs.max() > 0
    torch.testing.assert_close(moments, theirs, atol=1e-10, rtol=0)


# -- takes minutes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lora(spec: LearnerSpec, tmp_path_factory: pytest.TempPathFactory) -> LearnerSpec:
    adapters = {"lora": LoraConfig(rank=3, alpha=6.0), "adapter_dir": str(tmp_path_factory.mktemp("adapter"))}
    return replace(spec, algorithm=AlgorithmConfig(kl_coefficient=0.1), **adapters)


@pytest.fixture(scope="module")
def mixtures(spec: LearnerSpec, mixture_path: str) -> dict[str, LearnerSpec]:
    return {
        name: replace(
            spec, model_path=mixture_path, master_dtype="float32", algorithm=AlgorithmConfig(router_replay=replay)
        )
        for name, (replay, _) in MIXTURES.items()
    }


@pytest.fixture(scope="module")
def routed(make_samples) -> list[TrainingSample]:
    """Samples with random experts that no router would choose."""
    draw, samples = np.random.default_rng(0), []
    for sample in make_samples(9):
        experts_TLK = draw.permuted(np.tile(np.arange(4), (len(sample.token_ids), 2, 1)), axis=-1)[..., :2]
        samples.append(replace(sample, experts_TLK=experts_TLK.astype(np.int16)))
    return samples


@pytest.fixture(scope="module")
def more(
    spec: LearnerSpec,
    batches: Batches,
    one: Alone,
    lora: LearnerSpec,
    mixtures: dict[str, LearnerSpec],
    routed: list[TrainingSample],
    forked: type[Forked],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    directory, shared, both = tmp_path_factory.mktemp("more"), MESHES["shared_and_sharded"], MESHES["all"]
    one.learner.save(str(directory / "of_one"))
    cases: dict[str, Case] = {
        name: (in_meshes(spec, shared, algorithm=algorithm), batches[:1], {})
        for name, algorithm in LOSSES_AND_MEANS.items()
    }
    cases |= {name: (in_meshes(mixture, MIXTURES[name][1]), [routed], {}) for name, mixture in mixtures.items()}
    cases["in_bfloat16"] = (in_bfloat16(in_meshes(spec, both)), batches[:1], {})
    cases["lora"] = (in_meshes(lora, both), batches, {})
    cases["resumed"] = (in_meshes(spec, both), batches, {"checkpoint": str(directory / "of_one")})
    return run(forked, directory, cases)


@pytest.mark.long
@pytest.mark.parametrize("name", LOSSES_AND_MEANS)
def test_every_loss_sees_whole_rollouts_though_ranks_hold_slices(
    spec: LearnerSpec, batches: Batches, more: Run, name: str
) -> None:
    expected = Alone.of(replace(spec, algorithm=LOSSES_AND_MEANS[name]), batches[:1])
    for rank in more.ranks(name):
        check_gradients(rank["gradients"][0], expected.gradients[0], 1e-10)
        assert rank["metrics"][0] == pytest.approx(expected.metrics[0], rel=1e-6, abs=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in LOSSES_AND_MEANS if name.startswith("gspo")])
def test_the_reference_of_shared_samples_is_that_of_one_rank(
    spec: LearnerSpec, batches: Batches, more: Run, name: str
) -> None:
    learner = Learner(replace(spec, algorithm=LOSSES_AND_MEANS[name]))
    for rank in more.ranks(name):
        for batch, reference_T in rank["reference"][0]:
            np.testing.assert_allclose(reference_T, learner.reference_logprobs(batch), atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", MIXTURES)
def test_shared_samples_keep_the_experts_of_each_token(
    mixtures: dict[str, LearnerSpec], routed: list[TrainingSample], more: Run, name: str
) -> None:
    learner, replay = Learner(mixtures[name]), MIXTURES[name][0]
    batch = together(routed)
    old = learner.old_pass(batch) if replay == "old_logprobs" else None
    sums = learner.accumulate(batch, old)
    tokens = count(routed, 0).num_loss_tokens
    for rank in more.ranks(name):
        for key, parameter in learner._model.named_parameters():
            whole = (parameter.grad.full_tensor() / tokens).numpy()
            np.testing.assert_allclose(rank["gradients"][0][key], whole, atol=1e-6, rtol=1e-4, err_msg=key)
        assert rank["metrics"][0]["train/rerouted_share"] == pytest.approx(sums["train/rerouted_share_sum"] / tokens)
        for own, old_pass in rank["old"][0] if replay == "old_logprobs" else ():
            alone = learner.old_pass(own)
            np.testing.assert_array_equal(old_pass.experts_TLK, alone.experts_TLK)
            np.testing.assert_allclose(old_pass.logprobs_T, alone.logprobs_T, atol=1e-5)
    assert sums["train/rerouted_share_sum"] > 0


def in_bfloat16(spec: LearnerSpec) -> LearnerSpec:
    return replace(spec, train=replace(spec.train, dtype="bfloat16"), master_dtype="float32")


@pytest.mark.long
def test_in_bfloat16_shared_samples_differ_by_rounding(spec: LearnerSpec, batches: Batches, more: Run) -> None:
    exact, rounded = (Alone.of(each, batches[:1]).gradients[0] for each in (spec, in_bfloat16(spec)))
    whole, by_one = (np.concatenate([of[name].ravel() for name in exact]) for of in (exact, rounded))
    for rank in more.ranks("in_bfloat16"):
        by_four = np.concatenate([rank["gradients"][0][name].ravel() for name in exact])
        assert np.linalg.norm(by_four - whole) < 1.2 * np.linalg.norm(by_one - whole) < 0.1 * np.linalg.norm(whole)


@pytest.mark.long
def test_adapters_of_shared_samples_and_copies_are_those_of_one_rank(
    lora: LearnerSpec, batches: Batches, more: Run
) -> None:
    expected = Alone.of(lora, batches)
    first, *_ = ranks = more.ranks("lora")
    for rank in ranks:
        for step, gradients in enumerate(expected.gradients):
            for name, whole in gradients.items():
                np.testing.assert_allclose(rank["gradients"][step][name], whole, atol=1e-10, rtol=0, err_msg=name)
            assert rank["metrics"][step] == pytest.approx(expected.metrics[step], rel=1e-6, abs=1e-9)
    plain = dict(AutoModelForCausalLM.from_pretrained(lora.model_path).named_parameters())
    for name, data in pushed(expected.learner).items():
        assert name in plain
        np.testing.assert_allclose(first["weights"][name].view(np.float64), data.view(np.float64), atol=1e-9)


@pytest.mark.long
def test_meshes_load_a_checkpoint_of_one_rank(one: Alone, more: Run, batches: Batches, spec: LearnerSpec) -> None:
    learner = Learner(spec)
    assert learner.load(str(more.directory / "of_one")) == 2
    for step, samples in enumerate(batches):
        learner.accumulate(together(samples))
        metrics = of_all_ranks(learner.step(count(samples, step)))
        for rank in more.ranks("resumed"):
            assert rank["version"] == 2
            assert rank["metrics"][step] == pytest.approx(metrics, rel=1e-6, abs=1e-9)
