"""Samples follow the distribution whose log-probs are reported."""

from __future__ import annotations

import torch

from grmpipe.models.engines.embedded.sampling import FEW_TOKENS, draw, keep_likely, uniforms


def limits(*rows: tuple[float, int, float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def num_kept(logits: torch.Tensor, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> int:
    return int((keep_likely(logits, limits((top_p, top_k, min_p))) > -torch.inf).sum())


def test_uniforms_fill_the_unit_interval_and_depend_on_seed_and_counter_alone() -> None:
    seeds, counters = torch.arange(20_000) * 2**40, torch.zeros(20_000, dtype=torch.int64)
    for values in (uniforms(seeds, counters), uniforms(counters, torch.arange(20_000))):
        assert values.min() >= 0 and values.max() < 1
        share_per_tenth = torch.histc(values, 10, 0, 1) / len(values)
        torch.testing.assert_close(share_per_tenth, torch.full((10,), 0.1, dtype=torch.float64), atol=0.01, rtol=0)
    neighbours = torch.stack([uniforms(seeds, counters), uniforms(seeds, counters + 1)])
    assert abs(torch.corrcoef(neighbours)[0, 1]) < 0.03
    assert torch.equal(uniforms(seeds[7:8], counters[7:8]), uniforms(seeds, counters)[7:8])


def test_draws_follow_temperature_and_limits() -> None:
    logits_V = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    num_rows = 20_000
    for temperature, *limited in ((1.0, 1.0, 0, 0.0), (0.5, 1.0, 0, 0.0), (2.0, 0.7, 0, 0.0), (2.0, 0.8, 4, 0.3)):
        limits_13 = limits((limited[0], int(limited[1]), limited[2]))
        token_ids, logprobs, _ = draw(
            logits_V.expand(num_rows, -1),
            torch.full((num_rows,), temperature),
            limits_13.expand(num_rows, -1),
            uniforms(torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int64)),
        )
        shares_V = torch.bincount(token_ids, minlength=5) / num_rows
        expected_V = keep_likely(logits_V[None] / temperature, limits_13)[0].softmax(-1)
        torch.testing.assert_close(shares_V, expected_V, atol=0.012, rtol=0)
        torch.testing.assert_close(logprobs, expected_V.log()[token_ids])


def test_top_p_keeps_the_fewest_tokens_that_hold_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, kept in ((0.4, 1), (0.6, 2), (0.79, 2), (0.81, 3), (0.96, 4)):
        assert num_kept(logits, top_p) == kept


def test_min_p_and_top_k_come_before_top_p() -> None:
    """Which tokens transformers' warpers keep in vLLM's order; top-p is of what the others have left."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_k, kept in ((1, 1), (3, 3), (4, 4), (9, 4)):
        assert num_kept(logits, top_k=top_k) == kept
    for min_p, kept in ((0.05, 4), (0.2, 3), (0.5, 2), (0.7, 1), (1.0, 1)):
        assert num_kept(logits, min_p=min_p) == kept
    assert num_kept(logits, top_p=0.6) == 2 and num_kept(logits, top_p=0.6, top_k=2) == 1
    assert num_kept(logits, top_p=0.6, min_p=0.5) == 1


def test_greedy_rows_know_no_limits() -> None:
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(2))
    at = torch.tensor([0.5, 0.5], dtype=torch.float64)
    plain = draw(logits, torch.zeros(2), None, at)
    for one, other in zip(plain, draw(logits, torch.zeros(2), limits((0.1, 1, 0.9), (1.0, 0, 0.0)), at), strict=True):
        assert torch.equal(one, other)


def test_a_row_without_limits_is_untouched_by_its_neighbours() -> None:
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)) * 9
    assert torch.equal(keep_likely(logits, limits((1.0, 0, 0.0), (0.3, 7, 0.2)))[0], logits[0])


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]] * 3)
    edges = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    token_ids, logprobs, _ = draw(logits, torch.ones(3), None, edges)
    assert token_ids.tolist() == [1, 3, 3]
    torch.testing.assert_close(logprobs, torch.full((3,), 0.5).log())


def test_a_large_vocabulary_is_drawn_from_as_whole_sums_would() -> None:
    """Two searches take the place of one: at any uniform, in a last block that isn't full, and past zeros."""
    logits_V = torch.randn(FEW_TOKENS + 77, generator=torch.Generator().manual_seed(1)) * 4
    logits_V[torch.arange(len(logits_V)) % 3 == 0] = -torch.inf
    logits_V[256:512] = -torch.inf
    cdf_V = logits_V.double().softmax(-1).cumsum(-1)
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    at_B = torch.cat([edges, (torch.arange(500, dtype=torch.float64) + 0.5) / 500])
    token_ids, logprobs, _ = draw(logits_V.expand(len(at_B), -1), torch.ones(len(at_B)), None, at_B)
    assert (logprobs > -torch.inf).all()
    before = torch.where(token_ids > 0, cdf_V[token_ids - 1], 0.0)
    assert ((before - 1e-6 <= at_B) & (at_B <= cdf_V[token_ids] + 1e-6)).all()
    assert token_ids[0] == 1 and token_ids[1] >= len(logits_V) - 2
