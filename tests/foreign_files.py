"""Files as other trainers write them. The forms were read from the named code; `pytest -m long` compares them with what
the code of verl and TRL itself writes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Rows = Sequence[Mapping[str, Any]]
NONE = math.nan
QUESTION = "What is 6 x 7?"
CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
STRIPPED = "user\n{}\nassistant\n"  # Qwen's template, decoded without special tokens


def write_lines(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_trl(folder: Path, step: int, question: str, answers: Sequence[str], **columns: Sequence[object]) -> Path:
    """A table of log_completions (trl 1.16.0, trl/trainer/grpo_trainer.py, GRPOTrainer.log): NaN becomes null."""
    asked = [[{"role": "user", "content": question}]] * len(answers)
    said = [[{"role": "assistant", "content": one}] for one in answers]
    values = {name: [None if one is NONE else one for one in column] for name, column in columns.items()}
    table = {"step": [step] * len(answers), "prompt": asked, "completion": said, **values}
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), path := folder / f"completions_{step:05d}.parquet")
    return path


def verl_rows(step: int, question: str, scores: Mapping[str, float], **more: object) -> list[dict[str, Any]]:
    """Lines of rollout_data_dir (verl 0.9.1, verl/trainer/ppo/ray_trainer.py, _write_generations)."""
    asked = STRIPPED.format(question)
    return [
        {"input": asked, "output": text, "gts": "42", "score": one, "step": step, **more}
        for text, one in scores.items()
    ]


def episode(
    number: int, answer: str, rewards: Mapping[str, float], *, step: int | None = 3, ok: bool = True, **more: object
) -> dict[str, Any]:
    """A line of traces.jsonl, without the fields that aren't read: what `write_episode` of verifiers 0.4.0
    (verifiers/v1/utils/trace_store.py) gives, and FileMonitor of prime-rl 559b447 (src/prime_rl/monitors/file.py).
    """
    task = {
        "type": "ArithmeticTask",
        "data": {"idx": 0, "prompt": QUESTION, "system_prompt": "Be brief.", "timeout": {}, "answer": "42"},
        "key": "t0", "hash": "h0",
    }  # fmt: skip
    result = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    call = {"id": "c1", "type": "function", "name": "multiply", "arguments": '{"a": 6, "b": 7}'}
    nodes = [
        {"message": {"role": "system", "content": "Be brief."}, "sampled": False},
        {"parent": 0, "message": {"role": "user", "content": QUESTION}, "sampled": False},
        {
            "parent": 1, "sampled": True,
            "message": {"role": "assistant", "content": "", "reasoning_content": "6 x 7", "tool_calls": [call]},
        },
        {"parent": 2, "message": result, "sampled": False},
        {"parent": 2, "message": {**result, "content": "an abandoned branch"}, "sampled": False},
        {"parent": 3, "message": {"role": "assistant", "content": answer}, "sampled": True},
    ]  # fmt: skip
    trace = {
        "version": 1, "id": f"trace{number}", "task": task, "agent": {"name": "solver", "trainable": True},
        "nodes": nodes,
        "rewards": {name: {"score": one, "weight": 1.0 if name == "correct" else 0.2} for name, one in rewards.items()},
        "is_completed": True, "ok": ok, "errors": [], **more,
    }  # fmt: skip
    run = {"run": {"type": "train", "id": "r", "work": {"type": "train", "step": step}}} if step is not None else {}
    return {
        "id": f"e{number}", "env": {"id": "arithmetic"}, "task": task, "group": {"id": "g7"}, **run, "ok": ok,
        "errors": [], "traces": [trace],
    }  # fmt: skip


def result(example: int, answer: str, reward: float, **more: object) -> dict[str, Any]:
    """A line of results.jsonl (verifiers 0.1.14, verifiers/utils/save_utils.py, and RolloutOutput in types.py)."""
    return {
        "example_id": example, "task": "arithmetic", "prompt": [{"role": "user", "content": QUESTION}],
        "completion": [{"role": "assistant", "content": answer}], "answer": "42", "reward": reward, "timing": {},
        "is_completed": True, "is_truncated": False, "metrics": {"correct": reward}, **more,
    }  # fmt: skip


def sample(response: str, reward: object, *, status: str = "completed", **more: object) -> dict[str, Any]:
    """A sample of --save-debug-rollout-data (slime 624b824, Sample.to_dict in slime/utils/types.py)."""
    return {
        "group_index": 0, "index": 0, "prompt": CHATML.format(QUESTION) + "<think>\n", "tokens": [1, 2],
        "response": response, "response_length": 1, "label": "42", "reward": reward, "status": status, "metadata": {},
        **more,
    }  # fmt: skip


def count_words(response: str) -> float:
    """A reward function that likes words."""
    return float(len(response.split()))
