"""Whole runs whose models are adapters of one base, on its engines."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grmpipe.config.run_config import ConfigError
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine

TRAIN = "{enabled: true, warmup_steps: 1, prompts_per_batch: 4, group_size: 4, num_items: 32, data_path: 'tiny://judgements'}"
# A jury of two, of which each learns by itself.
JURY = (
    "grm.lora.rank=4", "grm.lora.sync=adapters", f"grm.train={TRAIN}", "+grm@models.second=adapter",
    "models.second.lora.rank=4", f"models.second.train={TRAIN}", "+judge@judges.second=generative",
    "judges.second.model=second", "reward=jury", "reward.members=[judge,second]",
)  # fmt: skip


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[EmbeddedEngine]:
    """Every engine that is made from now on."""
    made: list[EmbeddedEngine] = []
    make = EmbeddedEngine.__init__

    def watched(engine: EmbeddedEngine, *args: Any) -> None:
        make(engine, *args)
        made.append(engine)

    monkeypatch.setattr(EmbeddedEngine, "__init__", watched)
    return made


@pytest.mark.long
def test_a_jury_of_adapters_learns_on_one_engine_resumes_and_outlives_it(
    small_run: Callable, engines: list[EmbeddedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    from grmpipe.judge.monitor import preflight

    begin = preflight.preflight_judgements

    async def kill_then_begin(*args: Any) -> str:
        """The engine of both dies once it has served; both models get the next one, with what they learned by then."""
        found = await begin(*args)
        engines[1].close()
        return found

    monkeypatch.setattr("grmpipe.run.build.try_models.preflight_judgements", kill_then_begin)
    files = small_run(*JURY, "train.checkpoint_every=2")
    assert files.summary["status"] == "completed", files.summary["failure"]
    assert [engine.model_name for engine in engines] == ["policy", "grm", "grm"], "one engine, and what replaced it"
    assert files.summary["engines_replaced"] == {"policy": 0, "grm": 1, "second": 1}
    steps = files.steps()
    for name in ("grm", "second"):
        assert files.summary["versions"][name] >= 3
        # What the engine sampled has the learner's log-probs: each request met its own adapter, of its version.
        assert max(line[f"{name}/mismatch/max_nats"] for line in steps if f"{name}/mismatch/max_nats" in line) < 1e-3
        assert (files.run_dir / f"{name}_adapter" / "adapter_model.safetensors").is_file()
        assert (files.run_dir / f"{name}_adapter" / "trained_prompts.json").is_file()

    (files.run_dir / "checkpoints" / "latest").write_text("step_2")  # as after a kill at the end of the second step
    (files.run_dir / "summary.json").unlink()
    monkeypatch.setattr("grmpipe.run.build.try_models.preflight_judgements", begin)
    engines.clear()
    again = small_run(*JURY, "train.checkpoint_every=2", "resume=auto")
    assert again.summary["status"] == "completed"
    given = {"grm": "grm", "models.second": "second"}
    measured = small_run(
        *JURY, "task=evaluate", "evaluate.what=judge", "evaluate.path=tiny://judgements", "evaluate.num_items=8",
        *(f"{key}.lora.path={files.run_dir / name}_adapter" for key, name in given.items()),
        run_dir="measured",
    )  # fmt: skip
    assert measured.summary["status"] == "completed"
    assert [engine.model_name for engine in engines] == ["policy", "grm", "grm"], "one for each of the runs"


@pytest.mark.long
def test_policy_teacher_and_a_judge_that_learns_are_adapters_on_one_engine(
    small_run: Callable, engines: list[EmbeddedEngine], tmp_path: Path
) -> None:
    from grmpipe.data.catalogs import resolve_model
    from grmpipe.models.lm.causal_lm import load_causal_lm
    from grmpipe.models.lm.lora import ADAPTER, adapters, add_adapters, merge_state, save_adapters
    from grmpipe.models.settings import LoraConfig

    base, lora = resolve_model("tiny://policy_judge"), LoraConfig(rank=4, sync="adapters")
    model = add_adapters(load_causal_lm(base), {ADAPTER: lora}, "float32")
    for _, low_rank in adapters(model):
        torch.nn.init.normal_(low_rank.b_OR, std=0.1)  # a teacher that differs from the policy
    save_adapters(str(tmp_path / "teacher"), model, model.state_dict(), lora)
    merged = tmp_path / "merged"
    shutil.copytree(base, merged)
    whole = merge_state(model, model.state_dict())
    save_file(
        {name: whole[name].contiguous() for name in load_file(merged / "model.safetensors")},
        merged / "model.safetensors",
    )

    same_base = ("policy=tiny_judge", "policy.lora.rank=4", "policy.lora.sync=adapters", "grm.path=tiny://policy_judge")
    judge = ("grm.adapter_of=policy", "grm.lora.rank=4", "grm.lora.sync=adapters", f"grm.train={TRAIN}")
    taught = (
        "algorithm.distill.teachers={default: teacher}",
        "algorithm.distill.top_k=4",
        "train.num_steps=3",
        "train.max_staleness=0",
    )
    hosted = (
        "+grm@models.teacher=adapter", "models.teacher.adapter_of=policy", "models.teacher.lora.rank=4",
        f"models.teacher.lora.path={tmp_path / 'teacher'}",
    )  # fmt: skip
    files = small_run(*same_base, *judge, *taught, *hosted)
    assert files.summary["status"] == "completed", files.summary["failure"]
    assert [engine.model_name for engine in engines] == ["policy"], "one engine serves all three"
    assert files.summary["versions"]["grm"] >= 3 and files.summary["versions"]["policy"] == 3
    alone = small_run(
        *same_base, *judge, *taught, "+policy@models.teacher=tiny", f"models.teacher.path={merged}", run_dir="alone"
    )
    assert alone.summary["status"] == "completed", alone.summary["failure"]
    first, other = files.steps()[0], alone.steps()[0]
    assert first["teacher/scored"] == other["teacher/scored"] > 0
    # The teacher, not the policy under its name: the same scores as by its merged weights on engines of its own.
    assert abs(first["train/distill_kl_nats"]) > 0.1
    assert first["train/distill_kl_nats"] == pytest.approx(other["train/distill_kl_nats"], rel=1e-4)


def test_an_adapter_of_another_base_is_refused_by_its_key(small_run: Callable, tmp_path: Path) -> None:
    from grmpipe.data.catalogs import resolve_model
    from grmpipe.models.lm.causal_lm import load_causal_lm
    from grmpipe.models.lm.lora import ADAPTER, add_adapters, save_adapters
    from grmpipe.models.settings import LoraConfig

    lora = LoraConfig(rank=4, sync="adapters")
    for name in ("policy", "grm"):
        model = add_adapters(load_causal_lm(resolve_model(f"tiny://{name}")), {ADAPTER: lora}, "float32")
        save_adapters(str(tmp_path / name), model, model.state_dict(), lora)
    asked = [f"models.second.lora.path={tmp_path / 'policy'}", "models.second.train.enabled=false"]
    with pytest.raises(
        ConfigError, match=r"^models\.second\.lora\.path: .* other weights .*their hash differs.* this base"
    ):
        small_run(*JURY, *asked)
    with pytest.raises(ConfigError, match=r"^models\.second\.lora\.path: no adapter_config\.json.*<run_dir>/adapter"):
        small_run(*JURY, "models.second.lora.path=nowhere")
    with pytest.raises(ConfigError, match=r"^models\.second\.adapter_of: the pool .* is elastic.*elastic=false"):
        small_run(*JURY, "placement=elastic")
    with pytest.raises(ConfigError, match=r"^models\.second\.lora\.rank: .* has 4, got 8"):
        small_run(*JURY, *asked, f"models.second.lora.path={tmp_path / 'grm'}", "models.second.lora.rank=8")
