"""A critic learns the expected reward: the whole batch's gradient for any rounds and ranks, and its files."""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import Forked
from torch.distributed.tensor import DTensor
from transformers import AutoModelForTokenClassification

from grmpipe.config.train import TrainConfig
from grmpipe.models.settings import ParallelConfig
from grmpipe.train.critic.critic_learner import CriticLearner, CriticSpec
from grmpipe.train.critic.value_samples import ValuePacker, ValueSample, pack_values
from grmpipe.train.non_finite_gradients import NonFiniteGradients
from grmpipe.train.scalar.scalar_batch import pack_sequences

WHOLE_BATCH, PIECES = 10_000, 24  # packed tokens per batch


def samples(count: int, seed: int = 0, old: float = 0.0) -> list[ValueSample]:
    """The return is 1 if the prompt's first token is 7, else -1; a prompt of 2 to 4 tokens, an answer of 1 to 8."""
    draw = np.random.default_rng(seed)
    made = []
    for index in range(count):
        good, prompt, answer = bool(draw.integers(2)), int(draw.integers(2, 5)), int(draw.integers(1, 9))
        ids = (7 if good else 8, *draw.integers(10, 64, prompt + answer - 1).tolist())
        made.append(
            ValueSample(
                group_id=str(index // 4),
                token_ids=ids,
                loss_mask=(0,) * prompt + (1,) * answer,
                values=(0.0,) * prompt + (old,) * answer,
                returns=(0.0,) * prompt + (1.0 if good else -1.0,) * answer,
            )
        )
    return made


def spec(path: str, clip: float | None = None, dtype: str = "float32", **train: object) -> CriticSpec:
    options = {"lr": 1e-2, "warmup_steps": 0, "max_grad_norm": 100.0, **train}
    return CriticSpec(
        # type: ignore[arg-type]
        model_path=path, tokenizer_path=path, train=TrainConfig(**options), device="cpu", value_clip=clip,
        master_dtype=dtype,
    )  # fmt: skip


def test_the_learning_rate_decays_over_the_run_however_many_updates_a_batch_has(qwen_path: str) -> None:
    told = {}
    for updates in (1, 2, 4):
        one = dataclasses.replace(spec(qwen_path, num_steps=2, schedule="cosine"), updates_per_batch=updates)
        critic, told[updates] = CriticLearner(one), []
        for _ in range(2 * updates):
            accumulate(critic, samples(2), WHOLE_BATCH)
            told[updates].append(critic.step()["critic/lr"])
        assert told[updates][::updates] == pytest.approx(told[1])
        assert told[updates][-1] > 0


def test_an_update_without_targets_moves_the_version_and_nothing_else(qwen_path: str) -> None:
    told = []
    for skips in (0, 1):
        critic = CriticLearner(spec(qwen_path))
        for _ in range(2):
            accumulate(critic, samples(2), WHOLE_BATCH)
            metrics = critic.step()
            assert [critic.step() for _ in range(skips)] == [{}] * skips
        assert critic.version == 2 + 2 * skips
        told.append(metrics)
    assert told[0] == told[1]


def accumulate(critic: CriticLearner, batch: list[ValueSample], max_tokens: int, rank: int = 0, size: int = 1) -> int:
    """The number of rounds."""
    packer = ValuePacker(max_tokens, size)
    rounds = packer.add(batch) + packer.flush()
    for round_ in rounds:
        critic.accumulate(round_[rank])
    return len(rounds)


def gradients(critic: CriticLearner, factor: float) -> dict[str, np.ndarray]:
    found = {}
    for name, parameter in critic._model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        found[name] = (parameter.grad.full_tensor() * factor).numpy()
    return found


def scores(critic: CriticLearner, batch: list[ValueSample]) -> np.ndarray:
    return critic.scores(pack_sequences([sample.token_ids for sample in batch]))


# -- batches -----------------------------------------------------------------------------------------------------------


def test_the_head_speaks_of_the_token_after_and_of_none_after_the_last() -> None:
    first = ValueSample(
        group_id="g", token_ids=(1, 2, 3), loss_mask=(0, 1, 1), values=(0.0, 0.5, 0.25), returns=(0.0, 1.0, 2.0)
    )
    packed = pack_values([first, first])
    assert packed.weights_T.tolist() == [1, 1, 0] * 2
    assert packed.returns_T.tolist() == [1, 2, 0] * 2 and packed.values_T.tolist() == [0.5, 0.25, 0] * 2
    assert packed.position_ids_T.tolist() == [0, 1, 2] * 2
    assert pack_values([]).weights_T.tolist() == [0, 0] and len(pack_values([]).token_ids_T) == 2


def test_rounds_hold_every_sample_once_and_full_ones_come_at_once() -> None:
    batch = samples(20)
    packer = ValuePacker(PIECES, 2)
    early, late = packer.add(batch), packer.flush()
    packed = [batch for round_ in early + late for batch in round_]
    assert all(len(round_) == 2 for round_ in early + late) and len(early) > 2
    assert sum(int(batch.weights_T.sum()) for batch in packed) == sum(sum(sample.loss_mask) for sample in batch)
    assert all(len(batch.token_ids_T) <= PIECES for batch in packed)
    assert packer.flush() == []


# -- learning ----------------------------------------------------------------------------------------------------------


def test_a_new_critic_says_0_and_learns_what_came(qwen_path: str) -> None:
    critic = CriticLearner(spec(qwen_path))
    assert not scores(critic, samples(4)).any()
    for step in range(25):
        accumulate(critic, samples(32, step), WHOLE_BATCH)
        told = critic.step()
        if step == 0:
            assert told["critic/value_loss"] == pytest.approx(0.5)
    held_out = samples(64, seed=99)
    packed = pack_values(held_out)
    wrong = (scores(critic, held_out) - packed.returns_T)[packed.weights_T > 0]
    assert told["critic/value_loss"] < 0.05 and 1 - wrong.var() > 0.9  # explained variance


def test_the_loss_is_that_of_transformers_own_forward(qwen_path: str, tmp_path: Path) -> None:
    critic, batch = CriticLearner(spec(qwen_path, clip=0.1)), samples(6, old=0.2)
    for _ in range(3):
        accumulate(critic, batch, WHOLE_BATCH)
        critic.step()
    (Path(qwen_path) / "tokenizer.json").write_text("{}")
    critic.export(str(tmp_path / "export"))
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "export").eval()
    losses, clipped = [], []
    for sample in batch:
        said = plain(input_ids=torch.tensor([sample.token_ids])).logits[0, :, 0].tolist()
        for t in range(1, len(sample.token_ids)):
            if sample.loss_mask[t]:
                far = (said[t - 1] - sample.returns[t]) ** 2
                held = (min(max(said[t - 1], 0.1), 0.3) - sample.returns[t]) ** 2
                losses.append(max(far, held) / 2)
                clipped.append(held > far)
    accumulate(critic, batch, PIECES)
    told = critic.step()
    assert told["critic/value_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert told["critic/clip_share"] == pytest.approx(np.mean(clipped)) and np.mean(clipped) > 0.1
    assert (tmp_path / "export" / "tokenizer.json").is_file()


def test_gradients_in_pieces_equal_those_of_the_whole_batch(qwen_path: str) -> None:
    batch, found = samples(17, old=0.3), []
    for max_tokens in (WHOLE_BATCH, PIECES):
        critic = CriticLearner(spec(qwen_path, clip=0.5, dtype="float64"))
        accumulate(critic, batch, WHOLE_BATCH)
        critic.step()  # a head of zeros has no gradient for the trunk
        assert (accumulate(critic, batch, max_tokens) > 2) is (max_tokens == PIECES)
        found.append(gradients(critic, 1.0))
    for name, whole in found[0].items():
        np.testing.assert_allclose(found[1][name], whole, atol=1e-6, rtol=1e-6, err_msg=name)
        assert np.abs(whole).max() > 1e-4, f"{name} has no gradient to compare"


def test_nan_prevents_the_step_and_names_the_critics_key(qwen_path: str) -> None:
    critic, batch = CriticLearner(spec(qwen_path)), samples(4)
    packed = pack_values(batch)
    packed.returns_T[:] = np.nan
    critic.accumulate(packed)
    with pytest.raises(NonFiniteGradients, match=r"critic\.lr"):
        critic.step()
    assert critic.version == 0 and not scores(critic, batch).any()


@pytest.mark.parametrize("cp", [1, 2])
def test_two_ranks_are_one_critic_and_one_rank_loads_their_checkpoint(
    cp: int, qwen_path: str, tmp_path: Path, forked: type[Forked]
) -> None:
    """Ranks with samples of their own, and ranks that share each sample."""
    ranks = [forked(Path(__file__), qwen_path, tmp_path, rank, cp) for rank in range(2)]
    one = CriticLearner(spec(qwen_path, clip=0.5, dtype="float64"))
    metrics = []
    for step in range(3):
        batch = samples(9, step, old=0.3)
        accumulate(one, batch, WHOLE_BATCH)
        if step == 1:
            whole = gradients(one, 1.0)
        metrics.append(one.step())
    for process in ranks:
        assert process.wait(120) == 0, process.output[-3000:]
    for rank in range(2):
        theirs = pickle.loads((tmp_path / f"rank{rank}.pkl").read_bytes())
        for name, gradient in whole.items():
            np.testing.assert_allclose(theirs["gradients"][name], gradient, atol=1e-6, rtol=1e-6, err_msg=name)
        for mine, other in zip(metrics, theirs["metrics"], strict=True):
            assert other == pytest.approx(mine, rel=1e-5, abs=1e-8)
        np.testing.assert_allclose(theirs["scores"], scores(one, samples(9)), atol=1e-5)
    resumed = CriticLearner(spec(qwen_path, clip=0.5, dtype="float64"))
    assert resumed.load(str(tmp_path / "checkpoint")) == resumed.version == 2
    accumulate(resumed, samples(9, 2, old=0.3), PIECES)
    assert resumed.step() == pytest.approx(metrics[2], rel=1e-5, abs=1e-8)


def one_rank(path: str, directory: str, rank: int, cp: int) -> None:
    one = spec(path, clip=0.5, dtype="float64", parallel=ParallelConfig(cp=cp))
    critic = CriticLearner(one, rank, 2, f"file://{directory}/meet")
    metrics, found = [], {}
    for step in range(3):
        if step == 2:
            critic.save(f"{directory}/checkpoint")
        accumulate(critic, samples(9, step, old=0.3), PIECES, rank // cp, 2 // cp)
        if step == 1:
            found = gradients(critic, 2.0)  # FSDP2 averages
        metrics.append(critic.step())
    out = {"metrics": metrics, "gradients": found, "scores": scores(critic, samples(9))}
    Path(f"{directory}/rank{rank}.pkl").write_bytes(pickle.dumps(out))
    torch.distributed.barrier()
    os._exit(0)  # as a killed actor ends: gloo's threads now and then abort an orderly exit


if __name__ == "__main__":
    one_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
