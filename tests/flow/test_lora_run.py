"""A whole run that trains adapters: what is sent, what is exported, and that it continues after a stop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

from grmpipe.config.run_config import ConfigError
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.tiny.resolve import SHIPPED

LORA = (
    "judge=rule", "train.num_steps=3", "train.checkpoint_every=2", "train.lr=3e-3", "algorithm.kl_coefficient=0.01",
    "policy.lora.rank=4",
)  # fmt: skip


def test_a_run_trains_adapters_and_leaves_a_policy_behind_however_it_syncs(small_run: Callable) -> None:
    """Stopped after two steps, it continues from the adapters alone, with the other kind of sync."""
    from peft import PeftModel

    merged = small_run(*LORA)
    base, ids = str(SHIPPED / "policy"), torch.tensor([[5, 6, 7, 8, 9]])
    whole = load_causal_lm(base)
    says = load_causal_lm(str(merged.run_dir / "policy"))(ids).logits
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(plain, str(merged.run_dir / "adapter"))
    torch.testing.assert_close(adapted(ids).logits, says, atol=1e-4, rtol=0)
    assert (whole(ids).logits - says).abs().max() > 1e-3
    sent = [line["sync/bytes"] for line in merged.steps()]
    assert max(sent) == min(sent) < sum(parameter.nbytes for parameter in whole.parameters())

    (merged.run_dir / "checkpoints" / "latest").write_text("step_2")  # as after a kill at the end of the second step
    (merged.run_dir / "summary.json").unlink()
    alone = small_run(*LORA, "policy.lora.sync=adapters", "resume=auto")
    assert alone.summary["status"] == "completed"
    assert [line["step"] for line in alone.steps()] == [1, 2, 3]
    last = alone.steps()[-1]
    assert last["sync/bytes"] < sent[0] / 4
    assert last["sync/probe_error_nats"] < 1e-4


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ("policy.lora.rank=4", "policy.lora.target_modules=[qproj]"),
            r"^policy\.lora\.target_modules: .*'qproj'.*q_proj",
        ),
        (("grm.lora.rank=4",), r"^grm\.lora\.rank: .*grm\.train\.enabled=true"),
        (
            ("policy.engine=sglang", "policy.lora.rank=4", "policy.lora.sync=adapters"),
            r"^policy\.engine: SGLang applies adapters on GPUs only.*policy\.engine=embedded or vllm, or lora",
        ),
        (
            ("policy.engine=vllm", "policy.lora.rank=600", "policy.lora.sync=adapters"),
            r"^policy\.lora\.rank: vllm applies adapters up to rank 512, got 600; type policy\.lora\.sync=merged",
        ),
    ],
)
def test_adapters_that_can_not_be_are_refused_before_anything_starts(
    small_run: Callable, overrides: tuple[str, ...], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        small_run(*overrides)


def test_without_peft_a_run_says_what_to_type(small_run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grmpipe.roles.learners.peft_missing", lambda: "peft is not installed; type `pip install it`")
    with pytest.raises(ConfigError, match=r"^policy\.lora\.rank: peft is not installed; .*policy\.lora\.rank=0"):
        small_run("policy.lora.rank=4")
    with pytest.raises(ConfigError, match=r"^grm\.lora\.rank: peft is not installed"):
        small_run("grm.lora.rank=4", experiment="train_grm")
