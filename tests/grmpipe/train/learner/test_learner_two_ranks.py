"""Two ranks are one learner: same gradients, losses, weights, checkpoints as one rank. Processes are spawned once."""

from __future__ import annotations

import asyncio
import pickle
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import Forked
from rank_metrics import of_all_ranks
from transformers import AutoModelForCausalLM

from grmpipe.algorithm.distill import DistillConfig
from grmpipe.algorithm.parts import AGGREGATIONS, LOSSES
from grmpipe.algorithm.settings import SftConfig
from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.engines.vllm.vllm_weights import PlainBucket, as_plain
from grmpipe.models.stored_files import first_difference
from grmpipe.models.types import CudaHandle, InlineBytes, WeightBucket
from grmpipe.models.weights import cuda_ipc
from grmpipe.models.weights.receive_tensors import receive_tensors
from grmpipe.models.weights.weight_files import SharedArena
from grmpipe.train.batching.packer import Packer, pack
from grmpipe.train.batching.samples import count
from grmpipe.train.learner.learner import Learner
from grmpipe.train.learner.learner_ranks import LearnerRanks
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.types import TrainingSample

# r against the sampler differs from 1 when pi_old is the pass's own; plain policy gradients have no r.
ALGORITHMS = {
    f"{loss}/{aggregation}": AlgorithmConfig(
        loss=loss,
        aggregation=aggregation,
        proximal="recomputed" if loss == "policy_gradient" else "sampler",
        correction="sequence_tis" if loss == "policy_gradient" else "none",
        kl_coefficient=0.1,
        entropy_coefficient=0.01,
    )
    for loss in LOSSES
    for aggregation in AGGREGATIONS
} | {
    "taught": AlgorithmConfig(distill=DistillConfig(teachers={"default": "teacher"}, beta=0.5, top_k=3)),
    "imitating": AlgorithmConfig(sft=SftConfig(path="demonstrations.jsonl", coefficient=0.5)),
}
Mixture = tuple[LearnerSpec, list[TrainingSample]]
SCRIPT = Path(__file__).with_name("rank_process.py")
# Packed tokens per micro-batch, and whether siblings share their prompt.
WHOLE_BATCH, PIECES = (10_000, False), (66, True)


@dataclass(frozen=True)
class Run:
    directory: Path
    ranks: list[dict]


@dataclass(frozen=True)
class Posted:
    """The ranks of a learner that has posted all its buckets."""

    by_rank: list[list[WeightBucket]]

    async def call_all(self, method: str, index: int) -> list[object]:
        assert method == "sender.bucket"
        return [posted[index] for posted in self.by_rank]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def run(forked: type[Forked], directory: Path, job: tuple, world_size: int) -> Run:
    """Ranks have a second try if a signal ended one: a thread of gloo (torch 2.13) met a null pointer once, in a run of
    the whole suite. Whatever a rank raises is an error at once.
    """
    (directory / "job.pkl").write_bytes(pickle.dumps(job))
    codes, processes = run_ranks(forked, directory, world_size)
    if min(codes) < 0:
        codes, processes = run_ranks(forked, directory, world_size)
    for code, process in zip(codes, processes, strict=True):
        assert code == 0, process.output[-3000:]
    return Run(directory, [pickle.loads((directory / f"rank{rank}.pkl").read_bytes()) for rank in range(world_size)])


def run_ranks(forked: type[Forked], directory: Path, world_size: int) -> tuple[list[int], list[Forked]]:
    address = free_address()
    processes = [
        forked(SCRIPT, directory / "job.pkl", directory, rank, world_size, address) for rank in range(world_size)
    ]
    return [process.wait(120) for process in processes], processes


@pytest.fixture(scope="module")
def spec(gpt2_path: str) -> LearnerSpec:
    return LearnerSpec(
        model_path=gpt2_path,
        train=TrainConfig(lr=1e-3, warmup_steps=0),
        algorithm=AlgorithmConfig(kl_coefficient=0.1, entropy_coefficient=0.01),
        max_new_tokens=8,
        device="cpu",
        master_dtype="float64",
        sync_dtype="float64",
        bucket_bytes=20_000,
    )


@pytest.fixture(scope="module")
def batches(make_siblings) -> list:
    """The second batch is a single sample: work for one rank."""
    return [make_siblings(num_samples, seed) for seed, num_samples in enumerate((17, 1, 17))]


@pytest.fixture(scope="module")
def mixture(spec: LearnerSpec, mixture_path: str, make_samples) -> Mixture:
    """A learner with replay, and samples with random experts that no router would choose."""
    draw = np.random.default_rng(0)
    samples = []
    for sample in make_samples(9):
        experts_TLK = draw.permuted(np.tile(np.arange(4), (len(sample.token_ids), 2, 1)), axis=-1)[..., :2]
        samples.append(replace(sample, experts_TLK=experts_TLK.astype(np.int16)))
    algorithm = AlgorithmConfig(router_replay="rollout")
    return replace(spec, model_path=mixture_path, master_dtype="float32", algorithm=algorithm), samples


@pytest.fixture(scope="module")
def one(
    spec: LearnerSpec,
    batches: list,
    qwen_path: str,
    mixture: Mixture,
    forked: type[Forked],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """One rank, each batch in a single micro-batch, every sample with its own prompt; for every algorithm also in
    several, with shared prompts.
    """
    job = (spec, batches, (WHOLE_BATCH, PIECES), qwen_path, ALGORITHMS, mixture)
    return run(forked, tmp_path_factory.mktemp("one"), job, 1)


@pytest.fixture(scope="module")
def two(
    spec: LearnerSpec,
    batches: list,
    qwen_path: str,
    mixture: Mixture,
    forked: type[Forked],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """Two ranks, each batch in several rounds, one of them with an idle rank; siblings share their prompts."""
    return run(forked, tmp_path_factory.mktemp("two"), (spec, batches, (PIECES,), qwen_path, ALGORITHMS, mixture), 2)


def test_gradients_in_pieces_on_two_ranks_equal_the_whole_batch(one: Run, two: Run) -> None:
    assert one.ranks[0]["rounds"][0] == 1 and two.ranks[0]["rounds"][0] > 2
    for name, whole in one.ranks[0]["gradients"].items():
        np.testing.assert_allclose(two.ranks[0]["gradients"][name], whole, atol=1e-10, rtol=0, err_msg=name)
        assert np.abs(whole).max() > 1e-6, f"{name} has no gradient to compare"


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_gradients_of_two_ranks_match_for_every_loss_and_aggregation(
    one: Run, two: Run, name: str, num_ranks: int
) -> None:
    """With the policy after two steps: groups go into micro-batches as they come."""
    whole = one.ranks[0]["by_algorithm"][WHOLE_BATCH, name]
    pieces = (one if num_ranks == 1 else two).ranks[0]["by_algorithm"][PIECES, name]
    for parameter, gradient in whole.items():
        np.testing.assert_allclose(pieces[parameter], gradient, atol=1e-9, rtol=0, err_msg=parameter)
    assert max(np.abs(gradient).max() for gradient in whole.values()) > 1e-4


def test_every_rank_replays_the_experts_of_its_own_tokens(one: Run, two: Run, mixture: Mixture) -> None:
    spec, samples = mixture
    learner = Learner(replace(spec, algorithm=AlgorithmConfig()))
    learner.accumulate(pack(samples))
    own = {name: parameter.grad.full_tensor().numpy() for name, parameter in learner._model.named_parameters()}
    tokens = count(samples, 0).num_loss_tokens
    for name, whole in one.ranks[0]["mixture"].items():
        np.testing.assert_allclose(two.ranks[0]["mixture"][name], whole, atol=1e-6, rtol=1e-4, err_msg=name)
        assert np.abs(own[name] / tokens - whole).max() > 1e-3 * np.abs(whole).max() > 0, f"{name}: no replay to see"


def test_an_idle_rank_was_among_them(two: Run) -> None:
    assert any(sums["train/tokens_sum"] == 0 for rank in two.ranks for sums in rank["sums"])


def test_metrics_of_two_ranks_equal_those_of_one(one: Run, two: Run) -> None:
    for whole, *pieces in zip(one.ranks[0]["metrics"], *(rank["metrics"] for rank in two.ranks), strict=True):
        for metrics in pieces:
            assert metrics == pytest.approx(whole, rel=1e-6, abs=1e-9)


def test_ages_are_those_of_all_ranks(two: Run) -> None:
    """Half the tokens are of version 0, half of version 1, except a single sample's; an idle rank has none."""
    for step, ages in enumerate([{0}, {1}, {1, 2}]):
        found = {name: share for name, share in two.ranks[1]["metrics"][step].items() if name.endswith("/token_share")}
        assert set(found) == {f"mismatch/age_{age}/token_share" for age in ages}
        assert sum(found.values()) == pytest.approx(1.0)


def test_weights_of_two_ranks_equal_those_of_one(one: Run, two: Run) -> None:
    mine, theirs = one.ranks[0]["weights"], two.ranks[0]["weights"]
    assert mine.keys() == theirs.keys() and two.ranks[1]["weights"] == {}
    for name, data in mine.items():
        np.testing.assert_allclose(data.view(np.float64), theirs[name].view(np.float64), atol=1e-9, err_msg=name)


@pytest.mark.parametrize("gpu", ["gpu-0", "gpu-1"])
def test_an_engine_maps_the_bytes_of_the_rank_that_is_on_its_gpu(
    two: Run, qwen_path: str, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files take the place of memory: each rank's folder is a GPU, of which the engine sees one, as its first."""
    opened_paths = []

    def from_file(handle: CudaHandle, device: int) -> torch.Tensor:
        opened_paths.append(Path(handle.memory.decode()))
        return torch.load(opened_paths[-1])

    monkeypatch.setattr(cuda_ipc, "gpus_seen", lambda: range(1))
    monkeypatch.setattr(cuda_ipc, "gpu_id", lambda device: gpu)
    monkeypatch.setattr(cuda_ipc, "map_handle", from_file)
    group, came = LearnerRanks(Posted([rank["handed_over"] for rank in two.ranks])), {}
    for index in range(len(two.ranks[0]["handed_over"])):
        bucket = asyncio.run(group.bucket(index))
        with receive_tensors(PlainBucket(**as_plain(bucket, SharedArena())).restore_bucket()) as tensors:
            came |= {announced.name: tensor for announced, tensor in tensors}
    assert {path.parent for path in opened_paths} == {two.directory / gpu}
    expected = dict(AutoModelForCausalLM.from_pretrained(qwen_path, dtype=torch.float32).named_parameters())
    assert came.keys() == expected.keys()
    assert all(torch.equal(came[name], expected[name]) for name in came)


def test_engine_on_none_of_the_ranks_gpus_is_reported(two: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "gpus_seen", lambda: range(1))
    monkeypatch.setattr(cuda_ipc, "gpu_id", lambda device: "gpu-7")
    bucket = asyncio.run(LearnerRanks(Posted([rank["handed_over"] for rank in two.ranks])).bucket(0))
    with pytest.raises(ValueError, match=r"cuda_ipc is for .* GPUs \(gpu-0, gpu-1\)"), receive_tensors(bucket):
        pass


def test_score_is_the_same_on_every_rank(one: Run, two: Run) -> None:
    for rank in two.ranks:
        assert rank["score"] == pytest.approx(one.ranks[0]["score"], abs=1e-9)


def test_every_rank_got_the_rotary_frequencies(one: Run, two: Run, qwen_path: str) -> None:
    """No state dict has them: a rank that doesn't read the checkpoint must get them in another way."""
    for rank in (*one.ranks, *two.ranks):
        model = AutoModelForCausalLM.from_pretrained(qwen_path)
        ids = torch.tensor([[1, 2, 3, 4, 5]])
        plain = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        assert rank["rotary_score"] == pytest.approx(plain.tolist(), abs=1e-5)


def test_all_ranks_skip_an_update_without_trained_tokens(two: Run) -> None:
    assert [rank["skipped"] for rank in two.ranks] == [({}, 4), ({}, 4)]


def test_a_nan_on_one_rank_stops_all_and_changes_no_weight(two: Run) -> None:
    assert [rank["refused"] for rank in two.ranks] == [True, True]
    assert [rank["version"] for rank in two.ranks] == [3, 3]
    for name, data in two.ranks[0]["weights"].items():
        assert data.tobytes() == two.ranks[0]["weights_after_refusal"][name].tobytes()


def test_each_rank_tells_the_files_that_it_wrote(two: Run) -> None:
    told = [[file.name for file in rank["saved"]] for rank in two.ranks]
    assert told == [[".metadata", "__0_0.distcp"], ["__1_0.distcp"]]
    for rank in two.ranks:
        assert first_difference(two.directory / "checkpoint", rank["saved"]) is None


def test_one_rank_continues_identically_from_a_checkpoint_of_two(two: Run, spec: LearnerSpec, batches: list) -> None:
    learner = Learner(spec)
    assert learner.load(str(two.directory / "checkpoint")) == learner.version == 2
    packer = Packer(PIECES[0], 1)
    for round_ in packer.add(batches[2]) + packer.flush():
        learner.accumulate(round_.micro_batches[0])
    metrics = of_all_ranks(learner.step(count(batches[2], 2)))
    assert metrics == pytest.approx(two.ranks[0]["metrics"][2], rel=1e-6, abs=1e-9)
    for index in range(learner.sender.num_buckets()):
        bucket = learner.sender.bucket(index)
        assert bucket is not None and isinstance(bucket.payload, InlineBytes)
        for tensor, data in zip(bucket.tensors, bucket.payload.data, strict=True):
            theirs = two.ranks[0]["weights"][tensor.name].view(np.float64)
            np.testing.assert_allclose(data.view(np.float64), theirs, atol=1e-9)


def test_the_export_of_two_ranks_has_the_learners_logits(two: Run) -> None:
    exported = AutoModelForCausalLM.from_pretrained(two.directory / "export", dtype=torch.float64)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    log_softmax = exported(input_ids=ids).logits[0, :-1].log_softmax(-1)
    theirs = log_softmax.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    assert two.ranks[0]["score"] == pytest.approx(theirs, abs=1e-6)  # its files are in float32, like their source
    assert (two.directory / "export" / "tokenizer.json").is_file()
