"""What engines can have in flight: counted by hand for the tiny models."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import grmpipe.cli  # noqa: F401  registers the schema
from grmpipe.capacity.plan.in_flight import Longest, count_batch_tokens, longest_rollout, requests_in_flight
from grmpipe.capacity.plan.memory import list_memory
from grmpipe.capacity.plan.run_facts import RunFacts, collect_facts
from grmpipe.config.io.yaml_io import build

ROOT = Path(__file__).parents[4]
SMALL = ("train.groups_per_batch=4", "train.group_size=4", "train.max_staleness=1", "rollout.max_new_tokens=48")


def facts_with(*overrides: str) -> RunFacts:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return collect_facts(build(compose("config", [*SMALL, "data.eval_path=null", *overrides])))


@pytest.mark.parametrize(
    ("overrides", "policy", "judge"),
    [
        ((), 32, 32),
        (("train.max_staleness=0",), 16, 16),
        (("rollout.max_concurrency=20",), 20, 20),
        (("judge.num_judgements=3", "judge.limits.max_concurrency=90"), 32, 90),
        (("engine.embedded.max_batch_rows=8",), 8, 8),
        (("placement.pools.judging.slots=2", "placement.roles.grm.replicas=2"), 32, 16),
        (("placement=elastic", "placement.pools.engines.slots=2"), 32, 32),
    ],
)
def test_the_smallest_of_all_limits_bounds_the_requests(overrides: tuple[str, ...], policy: int, judge: int) -> None:
    facts = facts_with(*overrides)
    assert requests_in_flight("policy", facts).requests == policy
    assert requests_in_flight("grm", facts).requests == judge


def test_a_held_out_evaluation_asks_all_its_prompts_at_once() -> None:
    facts = facts_with("data.eval_path=auto", "data.num_eval_prompts=50", "evaluate.greedy=true")
    assert len(facts.data.held_out) == 50
    assert requests_in_flight("policy", facts).requests == 100
    assert requests_in_flight("grm", facts).requests == 50, "greedy answers are not judged"


def test_a_judge_reads_the_longest_answer_and_nothing_is_longer_than_the_window() -> None:
    facts = facts_with("judge.max_new_tokens=20")
    rollout = longest_rollout(facts)
    assert rollout.answer == 48 and rollout.tokens == rollout.prompt + 48
    short, long = (
        requests_in_flight("grm", facts_with("judge.max_new_tokens=20", f"rollout.max_new_tokens={tokens}")).tokens
        for tokens in (48, 64)
    )
    assert long - short == 16
    assert Longest(prompt=100, answer=200, window=250).tokens == 250


def test_a_batch_has_the_prompt_of_a_group_once_where_it_is_shared() -> None:
    one = Longest(prompt=100, answer=10, window=0)
    assert one.batch_tokens(3, 4, shares=True) == 3 * (100 + 4 * 10)
    assert one.batch_tokens(3, 4, shares=False) == 3 * 4 * 110
    facts = facts_with()
    assert count_batch_tokens("policy", facts) == 4 * (longest_rollout(facts).prompt + 4 * 48)


def test_a_cache_holds_what_is_in_flight_twice_and_a_learner_no_more_than_its_batch() -> None:
    facts = facts_with("train.micro_batch_tokens=100000")
    at_once, footprint = requests_in_flight("policy", facts), facts.models["policy"].footprint
    assert footprint is not None
    held = {use.what: use.num_bytes for use in list_memory(facts, "policy")}
    cache = at_once.requests * at_once.tokens * footprint.kv_bytes_per_token("float32")
    assert held[f"KV of 32 rows x {at_once.tokens} tokens, twice during growth"] == 2 * cache
    tokens = count_batch_tokens("policy", facts)
    assert f"activations of {tokens} tokens" in [use.what for use in list_memory(facts, "learner")]


def test_a_learner_on_cores_copies_what_it_writes_beside_activations_or_after_them() -> None:
    def copied(*overrides: str) -> float:
        facts = facts_with("train.num_steps=30", *overrides)
        return {use.what: use.num_bytes for use in list_memory(facts, "learner")}["copies for checkpoints, export"]

    num_bytes = 3 * 4 * 370_368  # weights and two moments
    assert copied("train.checkpoint_every=20") == num_bytes
    assert copied("train.checkpoint_every=30") == 0, "activations take more, and are gone at the end"
    assert copied("train.checkpoint_every=20", "train.async_checkpoints=false") == 0
    tiny = ("train.group_size=2", "train.groups_per_batch=1", "train.checkpoint_every=0", "rollout.max_new_tokens=1")
    assert 0 <= copied(*tiny) < num_bytes


@pytest.mark.parametrize("shares", [True, False])
def test_a_prompt_beyond_the_window_counts_as_the_window(shares: bool) -> None:
    longest = Longest(prompt=900, answer=64, window=512)
    assert longest.tokens == 512
    assert longest.batch_tokens(groups=2, group_size=4, shares=shares) == (2 * 512 if shares else 2 * 4 * 512)
