"""A scalar head learns: the whole batch's gradient for any rounds and ranks; files that can be served."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forks import Forked
from transformers import AutoModelForTokenClassification

from grmpipe.config.train import TrainConfig
from grmpipe.models.engines.scorer import ScalarScorer, ScorerSpec
from grmpipe.models.lm.scalar_head import load_scalar_head
from grmpipe.train.non_finite_gradients import NonFiniteGradients
from grmpipe.train.scalar.scalar_batch import Classified, pack_classified, plan_rounds
from grmpipe.train.scalar.scalar_rank import ScalarLearner, ScalarSpec

WHOLE_BATCH, PIECES = 10_000, 24  # packed tokens per batch


def sequences(count: int, seed: int = 0) -> list[Classified]:
    """Right if and only if the first token is 7."""
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        right = bool(draw.integers(2))
        ids = (7 if right else 8, *draw.integers(10, 64, int(draw.integers(1, 12))).tolist())
        made.append(Classified(token_ids=ids, right=right))
    return made


def spec(path: str, **train: object) -> ScalarSpec:
    options = {"lr": 1e-2, "warmup_steps": 0, "max_grad_norm": 100.0, **train}
    # type: ignore[arg-type]
    return ScalarSpec(model_path=path, tokenizer_path=path, train=TrainConfig(**options), device="cpu")


def take_step(learner: ScalarLearner, batch: list[Classified], max_tokens: int, rank: int = 0, size: int = 1) -> dict:
    for indices in plan_rounds([len(s.token_ids) for s in batch], max_tokens, size):
        learner.accumulate(pack_classified([batch[index] for index in indices[rank]]))
    return learner.step()


def last_scores(learner: ScalarLearner, batch: list[Classified]) -> np.ndarray:
    packed = pack_classified(batch)
    return learner.scores(packed)[packed.sequence_lengths_S.cumsum() - 1]


# -- batches -----------------------------------------------------------------------------------------------------------


def test_rounds_hold_every_sequence_once_within_the_tokens_and_a_long_one_by_itself() -> None:
    lengths = [5, 3, 30, 2, 8, 8, 1]
    rounds = plan_rounds(lengths, 10, world_size=2)
    assert sorted(index for round_ in rounds for some in round_ for index in some) == list(range(7))
    assert all(len(round_) == 2 for round_ in rounds)
    assert all(sum(lengths[index] for index in some) <= 10 or some == [2] for round_ in rounds for some in round_)


def test_a_rank_without_sequences_gets_idle_work() -> None:
    ((first, second),) = plan_rounds([4], 10, world_size=2)
    assert (first, second) == ([0], [])
    assert pack_classified([]).weights_T.sum() == 0 and len(pack_classified([]).token_ids_T) == 2


def test_only_the_last_token_of_a_sequence_has_a_target() -> None:
    packed = pack_classified([Classified(token_ids=(1, 2, 3), right=True), Classified(token_ids=(4, 5), right=False)])
    assert packed.weights_T.tolist() == [0, 0, 1, 0, 1] and packed.targets_T.tolist() == [0, 0, 1, 0, 0]
    assert packed.position_ids_T.tolist() == [0, 1, 2, 0, 1]


# -- learning ----------------------------------------------------------------------------------------------------------


def test_scalar_learner_learns_to_tell_right_from_wrong(qwen_path: str) -> None:
    learner = ScalarLearner(spec(qwen_path))
    first = take_step(learner, sequences(32), WHOLE_BATCH)
    assert first["train/loss"] == pytest.approx(np.log(2), abs=1e-6)  # a new head gives one half
    for step in range(1, 25):
        last = take_step(learner, sequences(32, step), WHOLE_BATCH)
    held_out = sequences(64, seed=99)
    told = last_scores(learner, held_out) > 0
    assert last["train/loss"] < 0.2 and np.mean(told == [s.right for s in held_out]) > 0.95


def test_a_step_in_pieces_is_the_mean_over_the_whole_batch(qwen_path: str) -> None:
    batch = sequences(9)
    pieces, whole = ScalarLearner(spec(qwen_path)), ScalarLearner(spec(qwen_path))
    for _ in range(2):
        told = [take_step(learner, batch, n) for learner, n in ((pieces, PIECES), (whole, WHOLE_BATCH))]
        assert told[0] == pytest.approx(told[1], rel=1e-4)
    np.testing.assert_allclose(last_scores(pieces, batch), last_scores(whole, batch), atol=2e-4)


def test_the_loss_is_the_cross_entropy_of_transformers_own_forward(qwen_path: str, tmp_path: Path) -> None:
    learner, batch = ScalarLearner(spec(qwen_path)), sequences(5)
    for _ in range(3):
        take_step(learner, batch, WHOLE_BATCH)
    (tmp_path / "tokenizer.json").write_text("{}")
    learner.export(str(tmp_path / "export"))
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "export").eval()
    logits = torch.stack([plain(input_ids=torch.tensor([s.token_ids])).logits[0, -1, 0] for s in batch])
    expected = F.binary_cross_entropy_with_logits(logits, torch.tensor([float(s.right) for s in batch]))
    assert take_step(learner, batch, PIECES)["train/loss"] == pytest.approx(expected.item(), rel=1e-4)


def test_an_export_is_served_with_the_learners_scores(qwen_path: str, tmp_path: Path) -> None:
    learner, batch = ScalarLearner(spec(qwen_path)), sequences(11)
    for _ in range(3):
        take_step(learner, batch, WHOLE_BATCH)
    learner.export(str(tmp_path))
    assert load_scalar_head(str(tmp_path)).config.num_labels == 1
    scorer = ScalarScorer(ScorerSpec(path=str(tmp_path), max_batch_tokens=PIECES))
    np.testing.assert_allclose(scorer.scores([s.token_ids for s in batch]), last_scores(learner, batch), atol=1e-4)


def test_nan_prevents_the_step(qwen_path: str) -> None:
    learner, batch = ScalarLearner(spec(qwen_path)), sequences(4)
    packed = pack_classified(batch)
    packed.targets_T[:] = np.nan
    learner.accumulate(packed)
    with pytest.raises(NonFiniteGradients):
        learner.step()
    assert last_scores(learner, batch).tolist() == [0.0] * 4  # and the batch is dropped
    assert np.isfinite(take_step(learner, batch, WHOLE_BATCH)["train/loss"])


def test_two_ranks_learn_what_one_does(qwen_path: str, tmp_path: Path, forked: type[Forked]) -> None:
    ranks = [forked(Path(__file__), qwen_path, tmp_path, rank) for rank in range(2)]
    for process in ranks:
        assert process.wait(120) == 0, process.output[-3000:]
    one = ScalarLearner(spec(qwen_path))
    metrics = [take_step(one, sequences(9, step), WHOLE_BATCH) for step in range(2)]
    for rank in range(2):
        theirs = pickle.loads((tmp_path / f"rank{rank}.pkl").read_bytes())
        for mine, other in zip(metrics, theirs["metrics"], strict=True):
            assert other == pytest.approx(mine, rel=1e-4)
        np.testing.assert_allclose(theirs["scores"], last_scores(one, sequences(9)), atol=2e-4)
    assert (tmp_path / "export" / "model.safetensors").is_file()


def one_rank(path: str, directory: str, rank: int) -> None:
    learner = ScalarLearner(spec(path), rank, 2, f"file://{directory}/meet")
    metrics = [take_step(learner, sequences(9, step), PIECES, rank, 2) for step in range(2)]
    learner.export(f"{directory}/export")
    found = {"metrics": metrics, "scores": last_scores(learner, sequences(9))}
    Path(f"{directory}/rank{rank}.pkl").write_bytes(pickle.dumps(found))
    torch.distributed.barrier()
    os._exit(0)  # like a killed actor: gloo's threads sometimes abort an orderly exit


if __name__ == "__main__":
    one_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
