"""Memory of a rank of the learner, counted in fake tensors, next to the plan's. Needs no GPU and no weights.

    OMP_NUM_THREADS=1 python benchmarks/learner_memory.py [MODEL ...]

The learner is the real one on a fake process group, with the attention of GPUs. Minutes per row. Results are kept in
runs/learner_memory.json, so an interrupted benchmark goes on; the report is benchmarks/learner_memory.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "tests")]
from learner_cases import LearnerCase, measured, planned_gb  # noqa: E402

KEPT = ROOT / "runs" / "learner_memory.json"
REPORT = Path(__file__).with_suffix(".md")
FULL: dict[str, Any] = {"activation_checkpointing": "full"}
OFFLOADED = {**FULL, "activation_offload": True}
ALL = {**OFFLOADED, "optimizer": {"offload": True}}

CASES = [
    LearnerCase(model="Qwen3-0.6B", ranks=1, num_tokens=8192, train=FULL),
    LearnerCase(model="Qwen3-1.7B", ranks=1, num_tokens=8192, train=FULL),
    LearnerCase(model="Qwen3-8B", ranks=4, num_tokens=16384, train=ALL),
    LearnerCase(model="Qwen3-8B", ranks=4, num_tokens=32768, train=ALL),
    LearnerCase(model="Qwen3-32B", ranks=8, num_tokens=16384, train=ALL),
    LearnerCase(model="Llama-3-70B", ranks=32, num_tokens=16384, train=OFFLOADED),
    LearnerCase(model="Qwen3-8B", ranks=8, num_tokens=16384, train={**ALL, "parallel": {"cp": 8}}),
    LearnerCase(model="Qwen3-8B", ranks=4, num_tokens=32768, train=OFFLOADED),
    LearnerCase(model="Qwen3-8B", ranks=4, num_tokens=32768, train=FULL),
    LearnerCase(model="Qwen3-30B-A3B", ranks=8, num_tokens=8192, train=ALL),
    LearnerCase(model="Qwen3-30B-A3B", ranks=16, num_tokens=16384, train=FULL),
    LearnerCase(model="Qwen3-30B-A3B", ranks=16, num_tokens=16384, train={**FULL, "parallel": {"ep": 8}}),
]
HEAD = """# Memory of the learner

`OMP_NUM_THREADS=1 python benchmarks/learner_memory.py`

GB (10^9 bytes) of a rank at most, counted in fake tensors: the real learner, sharded by FSDP2 over a fake process
group, with flash attention, bfloat16 compute and float32 masters, in a micro-batch with gradients held and in an
optimizer step. Nearly all tokens are trained. What no fake tensor counts comes on top: the CUDA context, NCCL's buffers
and fragmentation, 3 to 6 GB.

Options: `ckpt` activation_checkpointing=full, `act` activation_offload, `opt` optimizer.offload, `cp`
parallel.cp, `ep` parallel.ep, where each expert gets as many tokens as any other.

| model | ranks | tokens per rank | options | at rest | micro-batch | step | peak | task=plan | error |
|---|---|---|---|---|---|---|---|---|---|
"""


def options_of(train: dict[str, Any]) -> str:
    optimizer = train.get("optimizer", {})
    found = ["ckpt"] + ["act"] * train.get("activation_offload", False) + ["opt"] * optimizer.get("offload", False)
    found += [f"{name}={ranks}" for name, ranks in train.get("parallel", {}).items()]
    return " + ".join(found)


def row(case: LearnerCase, held: dict[str, float]) -> str:
    planned = planned_gb(case)
    figures = [held["resting_gb"], held["micro_batch_gb"], held["step_gb"], held["peak_gb"], planned]
    cells = [
        case.model,
        str(case.ranks),
        str(case.num_tokens),
        options_of(case.train),
        *(f"{gb:.1f}" for gb in figures),
    ]
    return f"| {' | '.join(cells)} | {100 * (planned / held['peak_gb'] - 1):+.1f} % |"


def main(models: list[str]) -> None:
    kept: dict[str, dict[str, float]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    KEPT.parent.mkdir(exist_ok=True)
    for case in CASES:
        if repr(case) not in kept and (not models or case.model in models):
            kept[repr(case)] = measured(case)
            print(row(case, kept[repr(case)]), flush=True)
            KEPT.write_text(json.dumps(kept, indent=1))
    REPORT.write_text(HEAD + "\n".join(row(case, kept[repr(case)]) for case in CASES if repr(case) in kept) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
