"""Experts that are divided over ranks: the same gradients, norms, weights, checkpoints and pushes as one rank."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from expert_rank_process import Case, Result, divided, run_case
from forks import Forked
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from grmpipe.config.train import AlgorithmConfig, TrainConfig
from grmpipe.models.settings import LoraConfig
from grmpipe.train.learner.learner_spec import LearnerSpec
from grmpipe.train.ranks import OF_RANK
from grmpipe.types import Metrics, TrainingSample

SCRIPT = Path(__file__).with_name("expert_rank_process.py")
WAYS = {
    "ep 4": {"ep": 4},
    "ep 2 x fsdp 2": {"ep": 2},
    "ep 2 x 2 copies": {"ep": 2, "dp_replicate": 2},
}
SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "initializer_range": 0.2, "num_experts_per_tok": 2, "max_position_embeddings": 128,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen 2": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    ),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SHAPE, num_experts=4, intermediate_size=16, pad_token_id=None)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, intermediate_size=16)),
}
Results = dict[str, Result]
ROUNDED = "bfloat16, ep 2 x fsdp 2"


def with_experts(samples: list[TrainingSample]) -> list[TrainingSample]:
    """Experts that no router would choose: two of four in each of two layers; siblings agree on their prompt's."""
    chosen = []
    for sample in samples:
        places = np.arange(len(sample.token_ids)) + np.array(sample.token_ids)
        first_TL = (places[:, None] + np.arange(2)) % 4
        second_TL = (first_TL + 1 + places[:, None] % 3) % 4
        chosen.append(replace(sample, experts_TLK=np.stack([first_TL, second_TL], axis=-1).astype(np.int16)))
    return chosen


@pytest.fixture(scope="module")
def plain(mixture_path: str, make_siblings) -> Case:
    """Two batches; siblings share their prompts. The second batch is a single sample: the other ranks are idle."""
    spec = LearnerSpec(
        model_path=mixture_path,
        train=TrainConfig(lr=1e-2, warmup_steps=0, max_grad_norm=0.3),
        algorithm=AlgorithmConfig(),
        max_new_tokens=8,
        device="cpu",
    )
    return Case(spec=spec, batches=tuple(make_siblings(num_samples, seed) for seed, num_samples in enumerate((17, 1))))


@pytest.fixture(scope="module")
def unshared(plain: Case) -> Case:
    return replace(plain, shared=False)


@pytest.fixture(scope="module")
def replayed(plain: Case) -> Case:
    """One batch with recorded experts, recomputed activations, and pushes under the names of checkpoints."""
    spec = replace(
        plain.spec,
        algorithm=AlgorithmConfig(router_replay="rollout"),
        train=replace(plain.spec.train, activation_checkpointing="full"),
        checkpoint_names=True,
        bucket_bytes=1 << 13,  # two experts' gate_proj and up_proj, of four
    )
    return replace(plain, spec=spec, batches=(with_experts(plain.batches[0]),))


@pytest.fixture(scope="module")
def all_at_once(plain: Case) -> Case:
    """A reference, and activations partly recomputed without replay. Both batches use all experts."""
    algorithm = AlgorithmConfig(kl_coefficient=0.1, entropy_coefficient=0.01)
    train = replace(plain.spec.train, activation_checkpointing="selective")
    spec = replace(plain.spec, algorithm=algorithm, train=train)
    return replace(plain, spec=spec, batches=(plain.batches[0], plain.batches[0]))


def run_ranks(forked: type[Forked], directory: Path, cases: dict[str, Case], num_ranks: int) -> list[Results]:
    """Each rank's results. A second try if a signal ended a rank: see test_learner_two_ranks.py."""
    (directory / "job.pkl").write_bytes(pickle.dumps(cases))
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        processes = [forked(SCRIPT, directory / "job.pkl", directory, r, num_ranks, address) for r in range(num_ranks)]
        codes = [process.wait(240) for process in processes]
        if min(codes) >= 0:
            break
    for code, process in zip(codes, processes, strict=True):
        assert code == 0, process.output[-3000:]
    return [pickle.loads((directory / f"rank{rank}.pkl").read_bytes()) for rank in range(num_ranks)]


def on_one_rank(case: Case) -> Result:
    return run_case(case, 0, 1, None)


@pytest.fixture(scope="module")
def gate(
    unshared: Case, replayed: Case, forked: type[Forked], tmp_path_factory: pytest.TempPathFactory
) -> list[Results]:
    """Four ranks, with every kind of mesh."""
    directory = tmp_path_factory.mktemp("four")
    cases = {
        "ep 2 x 2 copies": replace(divided(unshared, ep=2, dp_replicate=2), save=str(directory / "checkpoint")),
        "ep 2 x fsdp 2, replayed": divided(replayed, ep=2),
    }
    return run_ranks(forked, directory, cases, 4)


@pytest.fixture(scope="module")
def one(unshared: Case) -> Result:
    return on_one_rank(unshared)


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        scale = np.abs(values).max()
        assert scale > 0 or "lora_A" in name, f"{name} has nothing to compare"  # B is 0 at first
        np.testing.assert_allclose(found[name], values, atol=tolerance * scale, rtol=0, err_msg=name)


def assert_same_steps(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Weights after Adam's steps, on average: it makes steps of 0.01 also of single gradients that are rounding."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.abs(found[name] - values).mean() < 1e-5, name


def assert_same_metrics(found: Metrics, expected: Metrics, shared: bool = True) -> None:
    """Ranks with siblings of one prompt compute it once each, so that its tokens count more often as load."""
    apart = (OF_RANK, "experts/") if shared else (OF_RANK,)
    same = {name: value for name, value in expected.items() if not name.startswith(apart)}
    assert {name: found[name] for name in same} == pytest.approx(same, rel=1e-4, abs=1e-6)
    assert found.keys() == expected.keys()


def assert_equal_results(found: Result, expected: Result, shared: bool = True) -> None:
    assert_same(found.gradients, expected.gradients, 1e-5)
    for mine, theirs in zip(found.metrics, expected.metrics, strict=True):
        assert_same_metrics(mine, theirs, shared)
    assert_same_steps(found.weights, expected.weights)
    assert found.score == pytest.approx(expected.score, abs=1e-4)


def test_copies_of_divided_experts_learn_what_one_rank_learns(gate: list[Results], one: Result) -> None:
    """Gradients, the clipped norm, two steps, the push, the score; also with idle ranks and the balance of experts."""
    assert one.metrics[0]["train/grad_norm"] > 0.3, "nothing is clipped"
    assert one.metrics[0]["experts/max_violation"] > 0
    assert_equal_results(gate[0]["ep 2 x 2 copies"], one, shared=False)
    work = [rank["ep 2 x 2 copies"].metrics[0][f"{OF_RANK}model_flops"] for rank in gate]
    assert sum(work) == pytest.approx(one.metrics[0][f"{OF_RANK}model_flops"])


def test_sharded_experts_with_replay_and_recomputation_learn_it_too(
    gate: list[Results], replayed: Case, one: Result
) -> None:
    expected = on_one_rank(replayed)
    own = one.gradients["model.layers.0.mlp.experts.down_proj"]
    theirs = expected.gradients["model.layers.0.mlp.experts.down_proj"]
    assert np.abs(theirs - own).max() > 0.1 * np.abs(own).max(), "no replay to see"
    assert_equal_results(gate[0]["ep 2 x fsdp 2, replayed"], expected)


def test_a_rank_holds_its_part_of_the_experts_only(gate: list[Results], one: Result) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = one.shard_elements[name]
    for rank in gate:
        assert rank["ep 2 x 2 copies"].shard_elements[name] == whole // 2
        assert rank["ep 2 x fsdp 2, replayed"].shard_elements[name] == whole // 4


def test_a_push_gathers_a_few_experts_at_a_time(gate: list[Results], replayed: Case) -> None:
    found = gate[0]["ep 2 x fsdp 2, replayed"]
    assert found.largest_bucket == replayed.spec.bucket_bytes, "all four experts' gate_proj and up_proj have 16 KiB"
    assert found.weights["model.layers.1.mlp.experts.3.up_proj.weight"].shape == (16, 32)
    assert not any(name.endswith("gate_up_proj") for name in found.weights)


def test_one_rank_loads_a_checkpoint_of_divided_experts(gate: list[Results], unshared: Case) -> None:
    """It was saved after the first step."""
    theirs = gate[0]["ep 2 x 2 copies"]
    rest = on_one_rank(replace(unshared, load=theirs.saved, batches=unshared.batches[1:]))
    assert_same_metrics(rest.metrics[0], theirs.metrics[1], shared=False)
    assert_same_steps(rest.weights, theirs.weights)


# -- every other way -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rest(
    plain: Case,
    replayed: Case,
    all_at_once: Case,
    forked: type[Forked],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[Results], dict[str, Case], Path]:
    directory = tmp_path_factory.mktemp("rest")
    lora = replace(plain, spec=replace(plain.spec, lora=LoraConfig(rank=4), adapter_dir=str(directory / "adapter")))
    cases = {
        **{f"plain, {name}": divided(plain, **way) for name, way in WAYS.items()},
        **{f"replayed, {name}": divided(replayed, **way) for name, way in WAYS.items()},
        "plain, ep 2 x cp 2": divided(plain, ep=2, cp=2),
        **{f"all at once, {name}": divided(all_at_once, **way) for name, way in WAYS.items()},
        "lora, ep 2 x fsdp 2": divided(lora, ep=2),
    }
    rounded = replace(replayed.spec.train, dtype="bfloat16", fp32_modules=["router"])
    cases[ROUNDED] = divided(replace(replayed, spec=replace(replayed.spec, train=rounded)), ep=2)
    cases["plain, ep 4"] = replace(cases["plain, ep 4"], export=str(directory / "export"))
    for family, make in FAMILIES.items():
        torch.manual_seed(0)
        make().save_pretrained(directory / family)
        spec = replace(plain.spec, model_path=str(directory / family))
        cases[f"{family}, ep 2 x fsdp 2"] = divided(replace(plain, spec=spec), ep=2)
    return run_ranks(forked, directory, cases, 4), cases, directory


@pytest.mark.long
def test_every_way_learns_what_one_rank_learns(rest) -> None:
    found, cases, _ = rest
    assert len(cases) == 15
    for kind in dict.fromkeys(name.split(", ")[0] for name in cases if name != ROUNDED):
        of_kind = [name for name in cases if name.startswith(f"{kind}, ")]
        expected = on_one_rank(divided(cases[of_kind[0]], ep=1))
        for name in of_kind:
            assert_equal_results(found[0][name], expected)


@pytest.mark.long
def test_in_bfloat16_gradients_differ_by_its_rounding_only(rest, replayed: Case) -> None:
    """Experts are replayed and routers compute in float32; gradients are added up in float32."""
    exact, found = on_one_rank(replayed).gradients, rest[0][0][ROUNDED].gradients
    for name, gradient in exact.items():
        assert 1e-4 < np.linalg.norm(found[name] - gradient) / np.linalg.norm(gradient) < 0.05, name


@pytest.mark.long
def test_the_export_of_divided_experts_is_the_model(rest) -> None:
    found, _, directory = rest
    exported = AutoModelForCausalLM.from_pretrained(directory / "export", dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    log_p = exported(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert found[0]["plain, ep 4"].score == pytest.approx(log_p.tolist(), abs=1e-5)
    assert "experts_implementation" not in (directory / "export" / "config.json").read_text()


@pytest.mark.long
def test_a_checkpoint_goes_from_two_ranks_to_one_and_to_four(
    plain: Case, forked: type[Forked], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each saves after its first step; three steps in all."""
    two, four = (tmp_path_factory.mktemp(name) for name in ("two", "four"))
    first, second = plain.batches
    plain = replace(plain, shared=False)
    whole = on_one_rank(replace(plain, batches=(first, second, first)))
    run_ranks(forked, two, {"": divided(replace(plain, batches=(first,), save=str(two / "saved")), ep=2)}, 2)
    on_one_rank(replace(plain, batches=(second,), load=str(two / "saved"), save=str(four / "saved")))
    last = divided(replace(plain, batches=(first,), load=str(four / "saved")), ep=4)
    found = run_ranks(forked, four, {"": last}, 4)[0][""]
    assert_same_metrics(found.metrics[0], whole.metrics[2], shared=False)
    assert_same_steps(found.weights, whole.weights)


@pytest.mark.long
def test_three_ranks_shard_the_columns_of_experts_whose_rows_they_cannot_divide(
    replayed: Case, forked: type[Forked], tmp_path: Path
) -> None:
    """down_proj has 32 rows and 24 columns."""
    torch.manual_seed(0)
    config = Qwen2MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=16)
    Qwen2MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    case = replace(replayed, spec=replace(replayed.spec, model_path=str(tmp_path / "model")))
    (found, *_) = run_ranks(forked, tmp_path, {"": divided(case, ep=2)}, 6)
    assert_equal_results(found[""], on_one_rank(case))
    assert found[""].shard_elements["model.layers.0.mlp.experts.down_proj"] == 4 * 32 * 24 // 6
