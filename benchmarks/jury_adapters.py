"""Three jury members as adapters on one embedded engine, compared with an engine for each: judgements bit for bit,
log-probs of the merged models, bytes of parameters, resident memory, judgements per CPU second.

    OMP_NUM_THREADS=1 python benchmarks/jury_adapters.py smollm2=.smollm2/SmolLM2-135M-Instruct.Q4_1.gguf tiny=tiny://grm

Writes benchmarks/jury_adapters.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import torch

from grmpipe.data.catalogs import resolve_model
from grmpipe.models.adapter_view import AdapterView
from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.hub import find_files
from grmpipe.models.lm.causal_lm import load_causal_lm
from grmpipe.models.lm.lora import ADAPTER, adapters, add_adapters, merge_state, save_adapters
from grmpipe.models.repeatable_kernels import VARIABLE
from grmpipe.models.seeds import derive_seed
from grmpipe.models.settings import EmbeddedConfig, LoraConfig
from grmpipe.models.types import Completion, Message, RequestContext, SamplingParams

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "jury_adapters.md"
MEMBERS = ("first", "second", "third")
RANK, ALPHA, SPREAD = 16, 32.0, 0.02  # B's values are drawn with this deviation
RESPONSES, EXACT, NEW_TOKENS, ROUNDS = 8, 3, 16, 5  # EXACT: of them, in the batch-invariant comparison
EXACT_ROWS = 8  # in a batch: its engines try out as many rows before they begin
FAST_KERNELS = "AVX2,STRICT"  # enough for these models: the engine checks it
PAGE = """\
# Three jury members on one engine

Measured by `OMP_NUM_THREADS=1 python benchmarks/jury_adapters.py {command}` on one core of a CPU that had other work.
The members are adapters of rank {rank} at every linear layer of the blocks, with random values that change every
answer. {responses} responses are judged, each by all members ({requests} judgements in flight); {exact} of them also on
batch-invariant engines. One adapter alone judges as many other responses, so that both have {requests} different
prompts to read. Rates are medians of {rounds} alternating rounds in one process; the interval is the range of the
pairs' quotients.

| | {models} |
|---|{rules}|
{rows}

Parameters are counted: the base once, and the matrices of the adapters. The embedded engine multiplies the layers
that read one input (q, k and v; gate and up) together, and holds their B as one block-diagonal matrix: its zeros are in
the row "as stored".
"""


def prompts(renderer: Renderer, count: int) -> list[tuple[int, ...]]:
    """Judging prompts, all different."""
    asked = (
        f"Question: {a} + {7 * a + 3} = ?\nResponse: I add both: {8 * a + 3 + a % 2}." for a in range(11, 11 + count)
    )
    text = "{}\nIs it right? Say why, then give a score from 1 to 10."
    return [tuple(renderer.render((Message(role="user", content=text.format(one)),))) for one in asked]


def make_adapters(base: str, folder: Path) -> dict[str, LoraConfig]:
    found = {}
    for seed, name in enumerate(MEMBERS):
        lora = LoraConfig(rank=RANK, alpha=ALPHA, sync="adapters")
        model, dice = (
            add_adapters(load_causal_lm(base), {ADAPTER: lora}, "float32", seed),
            torch.Generator().manual_seed(seed),
        )
        with torch.no_grad():
            for _, low_rank in adapters(model):
                low_rank.b_OR.copy_(torch.randn(low_rank.b_OR.shape, generator=dice) * SPREAD)
        save_adapters(str(folder / name), model, model.state_dict(), lora)
        found[name] = LoraConfig(rank=RANK, alpha=ALPHA, sync="adapters", path=str(folder / name))
    return found


def open_engine(base: str, loras: Mapping[str, LoraConfig], *, invariant: bool = False) -> EmbeddedEngine:
    spec = EngineSpec(path=base, role="grm", adapters=loras, batch_invariant=invariant)
    return EmbeddedEngine(spec, EmbeddedConfig(max_batch_rows=EXACT_ROWS if invariant else 3 * RESPONSES))


async def judge(
    engine: EmbeddedEngine, asked: list[tuple[str, tuple[int, ...]]], new_tokens: int = NEW_TOKENS
) -> list[Completion]:
    """One judgement of each (member, prompt), all at once."""
    calls = []
    for number, (member, ids) in enumerate(asked):
        params = SamplingParams(max_new_tokens=new_tokens, seed=derive_seed(0, f"{member} {ids}"))
        context = RequestContext(request_id=f"{number}", group_id="g", role=member)
        calls.append(AdapterView(engine, member).generate(ids, params, context))
    return list(await asyncio.gather(*calls))


def resident_mb() -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def measure_memory(base: str, loras: Mapping[str, LoraConfig]) -> dict[str, float]:
    """Of this process: bytes of parameters and of their storage, resident MiB after a first judgement."""
    engine = open_engine(base, loras)
    ids = prompts(Renderer.load(base, None), 1)[0]
    asyncio.run(judge(engine, [(name, ids) for name in loras], 2))
    parameters = list(engine._worker._model.parameters())
    stored = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    found = {"bytes": sum(p.nbytes for p in parameters), "stored": sum(stored.values()), "resident_mb": resident_mb()}
    engine.close()
    return found


def compare_exactly(base: str, loras: Mapping[str, LoraConfig]) -> dict[str, float]:
    """Raises AssertionError for a judgement that differs from that of an engine of its own."""
    asked = [(name, one) for one in prompts(Renderer.load(base, None), EXACT) for name in loras]
    together = open_engine(base, loras, invariant=True)
    found = asyncio.run(judge(together, asked))
    together.close()
    for name in loras:
        alone = open_engine(base, {name: loras[name]}, invariant=True)
        own = asyncio.run(judge(alone, [(member, one) for member, one in asked if member == name]))
        alone.close()
        theirs = [one for (member, _), one in zip(asked, found, strict=True) if member == name]
        for one, other in zip(theirs, own, strict=True):
            assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs), f"{name} differs"
    assert len({one.token_ids for one in found}) > EXACT, "the members differ from each other"
    return {"judgements": len(found)}


def in_own_process(what: str, base: str, folder: Path, names: tuple[str, ...]) -> dict[str, float]:
    """A measurement in a process of its own: its memory, and kernels that add in one order."""
    command = [sys.executable, __file__, f"--only={what}", base, str(folder), *names]
    env = os.environ | ({VARIABLE: FAST_KERNELS} if what == "exact" else {})
    done = subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(base: str, folder: Path) -> dict[str, str]:
    """The rows of a model."""
    loras, ids = make_adapters(base, folder), prompts(Renderer.load(base, None), 3 * RESPONSES)
    in_own_process("exact", base, folder, MEMBERS)
    jury = [(name, one) for one in ids[:RESPONSES] for name in MEMBERS]
    engine, furthest = open_engine(base, loras), 0.0
    for name in MEMBERS:
        (judged,) = asyncio.run(judge(engine, [(name, ids[0])]))
        learner = add_adapters(load_causal_lm(base), {ADAPTER: loras[name]}, "float32")
        merged = load_causal_lm(base)
        merged.load_state_dict(merge_state(learner, learner.state_dict()), strict=False)
        with torch.no_grad():
            text = torch.tensor([[*ids[0], *judged.token_ids]])
            logprobs_TV = merged(text).logits[0, len(ids[0]) - 1 : -1].log_softmax(-1)
        expected_T = logprobs_TV.gather(1, text[0, len(ids[0]) :, None])[:, 0]
        furthest = max(furthest, float((torch.tensor(judged.logprobs) - expected_T).abs().max()))
    assert furthest < 1e-4, furthest
    one = open_engine(base, {"first": loras["first"]})
    rates: dict[str, list[float]] = {"three": [], "one": []}
    for turn in range(ROUNDS + 1):
        cases = {"three": (engine, jury), "one": (one, [("first", prompt) for prompt in ids])}
        for case, (asked, requests) in cases.items() if turn % 2 else reversed(cases.items()):
            before = time.process_time()
            asyncio.run(judge(asked, requests))
            if turn:  # the first round warms up
                rates[case].append(len(requests) / (time.process_time() - before))
    engine.close()
    one.close()
    quotients = [three / alone for three, alone in zip(rates["three"], rates["one"], strict=True)]
    memory = {number: in_own_process("memory", base, folder, MEMBERS[:number]) for number in (0, 1, 3)}
    bytes_of = {number: held["bytes"] for number, held in memory.items()}
    own = bytes_of[1] - bytes_of[0]
    assert bytes_of[3] == bytes_of[0] + 3 * own, "the base once, and each adapter"
    return {
        "judgements that differ from those of an engine of its own, batch-invariant": f"0 of {3 * EXACT}",
        "furthest log-prob from the merged model's (nats)": f"{furthest:.1e}",
        "parameters of the base (MB)": f"{bytes_of[0] / 1e6:.1f}",
        "parameters of each adapter (MB)": f"{own / 1e6:.2f}",
        "parameters of the engine of three (MB)": f"{bytes_of[3] / 1e6:.1f}",
        "as stored (MB)": f"{memory[3]['stored'] / 1e6:.1f}",
        "resident, engine of three (MiB)": f"{memory[3]['resident_mb']:.0f}",
        "resident, three engines of one (MiB)": f"3 x {memory[1]['resident_mb']:.0f}",
        "judgements per CPU second, three adapters": f"{median(rates['three']):.2f}",
        "judgements per CPU second, one adapter": f"{median(rates['one']):.2f}",
        "quotient": f"{median(quotients):.3f} ({min(quotients):.3f} to {max(quotients):.3f})",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="name=path")
    parser.add_argument("--only", choices=("memory", "exact"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.only:
        base, folder, *names = args.models
        loras = {n: LoraConfig(rank=RANK, alpha=ALPHA, sync="adapters", path=str(Path(folder) / n)) for n in names}
        print(json.dumps((measure_memory if args.only == "memory" else compare_exactly)(base, loras)))
        return
    columns: dict[str, dict[str, str]] = {}
    for name, path in (typed.split("=", 1) for typed in args.models):
        with tempfile.TemporaryDirectory() as folder:
            columns[name] = compare(find_files(resolve_model(path), weights=True), Path(folder))
        print(name, json.dumps(columns[name], indent=1), flush=True)
    shown = " ".join(
        f"{name}={path if '://' in path else '.smollm2/' + Path(path).name}"
        for name, path in (typed.split("=", 1) for typed in args.models)
    )
    rows = [
        f"| {what} | {' | '.join(column[what] for column in columns.values())} |"
        for what in next(iter(columns.values()))
    ]
    REPORT.write_text(
        PAGE.format(
            command=shown, rank=RANK, responses=RESPONSES, requests=3 * RESPONSES, exact=EXACT, rounds=ROUNDS,
            models=" | ".join(columns), rules="|".join("---" for _ in columns), rows="\n".join(rows),
        ),
        encoding="utf-8",
    )  # fmt: skip


if __name__ == "__main__":
    main()
