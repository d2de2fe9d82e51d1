"""TRL's GRPOTrainer trained by a judge of `task=serve`, compared with grmpipe's own run by the same judge.

    python benchmarks/served_judge.py runs/served_judge --trl-python .trl/bin/python

For each seed: the quickstart, then TRL with the same policy, prompts and group size, rewarded over HTTP by the
quickstart's judge. Then seed 0 again, while the judge's engine is killed three times. All policies answer 2048
held-out problems at T = 1, which no run has seen. Finished runs are reused. trl_run.py says how to make TRL's
environment. Exits 1 if a reward that TRL was given isn't in the service's journal, or a policy is more than 3 points
from grmpipe's. Writes benchmarks/served_judge.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from against_trl import GROUP_SIZE, GROUPS, STEPS, paragraph, tiny, write_questions
from quickstart import commit_date, machine

import grmpipe
from grmpipe.run.features.cpu_seconds import list_family
from grmpipe.tiny.problems import make_problems
from grmpipe.tiny.quality import accuracy
from grmpipe.tiny.tasks import SUMS
from grmpipe.tiny.tiny_sampler import TinySampler

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "served_judge.md"
SEEDS = (0, 1)
NUM_PROBLEMS, HELD_OUT_SEED = 2048, 90_000
KILLED_AFTER = (20, 40, 60)  # steps
BOUND = 0.03
ENGINE = "EngineHost"  # in the command line of an engine's process

Answer = tuple[str, str, float | None]  # question, completion, reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A trained policy. Of TRL's runs also: what became of the rewards."""

    accuracy: float
    code: str  # the date of its commit
    rewards: int = 0
    failed: int = 0  # None
    unknown: int = 0  # not in the service's journal
    kills: int = 0


def measure_policy(policy: Path) -> float:
    return accuracy(SUMS, TinySampler(policy), make_problems("held_out", NUM_PROBLEMS, HELD_OUT_SEED))


def run_checked(command: list[str], **env: str) -> None:
    if subprocess.run(command, cwd=ROOT, env=os.environ | env, check=False).returncode != 0:
        sys.exit(f"failed: {' '.join(command)}")


def run_ours(folder: Path, seed: int) -> Measured:
    run_dir = folder / f"grmpipe-{seed}"
    run_checked(
        [
            sys.executable, "launch.py", "+experiment=quickstart", "tracking=none", "judge_monitor.every=0",
            f"seed={seed}", f"train.num_steps={STEPS}", f"train.groups_per_batch={GROUPS}",
            f"train.group_size={GROUP_SIZE}", "train.checkpoint_every=0", f"evaluate.every={STEPS}",
            f"run_dir={run_dir}",
        ],
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    return Measured(accuracy=measure_policy(run_dir / "policy"), code=commit_date())


def run_trl(folder: Path, python: str, seed: int, name: str, kills: tuple[int, ...]) -> Measured:
    out, run_dir = folder / name, folder / f"{name}-service"
    questions, rewards = write_questions(out, seed, STEPS), out / "rewards.jsonl"
    rewards.unlink(missing_ok=True)
    with serving(run_dir) as (url, service), killing(url, service, rewards, kills) as killed:
        run_checked(
            [
                python, "benchmarks/trl_run.py", str(out), f"--policy={tiny('policy')}", f"--judge={url}",
                f"--questions={questions}", f"--steps={STEPS}", f"--groups={GROUPS}", f"--seed={seed}",
                f"--look-every={STEPS}", "--held-out=1", "--threads=1",
            ],
            OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
        )  # fmt: skip
    given = Counter(tuple(json.loads(line)) for line in rewards.read_text(encoding="utf-8").splitlines())
    return Measured(
        accuracy=measure_policy(out / "policy"),
        code=commit_date(),
        rewards=given.total(),
        failed=sum(count for (_, _, reward), count in given.items() if reward is None),
        unknown=(given - read_journal(run_dir)).total(),
        kills=len(killed),
    )


@contextmanager
def serving(run_dir: Path) -> Iterator[tuple[str, int]]:
    """The quickstart's judge as a service: its address and its process."""
    command = [
        sys.executable, "launch.py", "task=serve", "+experiment=quickstart", "tracking=none", "serve.port=0",
        f"run_dir={run_dir}",
    ]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env) as service:
        assert service.stdout is not None
        found = re.search(r"http://[\d.]+:\d+", service.stdout.readline())
        if found is None:
            sys.exit(f"failed: {' '.join(command)}")
        try:
            yield found[0], service.pid
        finally:
            service.terminate()
            service.wait()


@contextmanager
def killing(url: str, service: int, rewards: Path, after: tuple[int, ...]) -> Iterator[list[int]]:
    """Kills an engine of the service after each of these steps, while it judges. The killed processes."""
    killed: list[int] = []
    ended = threading.Event()

    def kill() -> None:
        for step in after:
            while not (count_lines(rewards) >= step * GROUPS * GROUP_SIZE and count_in_flight(url)):
                if ended.wait(0.005):
                    return
            engine = next(process for process in list_family([service]) if ENGINE in read_command(process))
            os.kill(engine, signal.SIGKILL)
            killed.append(engine)
            print(f"after step {step} engine {engine} was killed, with {count_in_flight(url)} in flight", flush=True)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        ended.set()
        thread.join()


def count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def count_in_flight(url: str) -> int:
    with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
        return json.load(answer)["in_flight"]


def read_command(process: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8", errors="replace")
    return ""


def read_journal(run_dir: Path) -> Counter[Answer]:
    """What the service has on file: each response with its reward; None where the judgement failed."""
    run = grmpipe.read_run(run_dir)
    asked = {
        (one.rollout.group_id, one.rollout.sibling): (one.prompt.messages[0].content, one.rollout.text)
        for one in run.rollouts
    }
    return Counter((*asked[one.group_id, one.sibling], one.reward) for one in run.judgements)


def report(found: Mapping[str, Measured]) -> list[str]:
    rows = [
        f"| {name} | {one.accuracy:.3f} | {one.accuracy - found[f'grmpipe-{seed}'].accuracy:+.3f} | {one.rewards} | "
        f"{one.failed} | {one.unknown} | {one.kills} |"
        for seed, name in [*((seed, f"trl-{seed}") for seed in SEEDS), (0, "killed-0")]
        for one in [found[name]]
    ]
    ours = ", ".join(f"{found[f'grmpipe-{seed}'].accuracy:.3f} (seed {seed})" for seed in SEEDS)
    codes = sorted({one.code for one in found.values()})
    return [
        "# A served judge",
        "",
        *paragraph(f"""
            `python benchmarks/served_judge.py runs/served_judge --trl-python .trl/bin/python`: TRL 1.16.0's
            `GRPOTrainer` trains the quickstart's policy with `reward_funcs=JudgeReward(url)`, by the quickstart's judge
            behind `task=serve` on the same machine: {machine()}; code of {" and ".join(codes)}. {STEPS} steps of
            {GROUPS} groups of {GROUP_SIZE}; the settings of [against_trl.md](against_trl.md).
        """),
        "",
        *paragraph(f"""
            True accuracy on {NUM_PROBLEMS} held-out problems at T = 1 after grmpipe's own runs: {ours}. One
            measurement is good to 1 point.
        """),
        "",
        "| TRL | true accuracy | less grmpipe's | rewards | of them None | not in the journal | engines killed |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        *paragraph("""
            Not in the journal: rewards that TRL was given and that don't stand, with their question and completion, in
            the service's rollouts.jsonl and judgements.jsonl; a reward that the judge didn't give would be one. None
            stands there as a failure with its cause. `killed-0` is seed 0 again; after steps 20, 40 and 60 the
            process of the judge's engine got SIGKILL while it was judging, and the service started another one.
        """),
    ]


def list_parts(folder: Path, python: str) -> dict[str, Callable[[], Measured]]:
    parts: dict[str, Callable[[], Measured]] = {}
    for seed in SEEDS:
        parts[f"grmpipe-{seed}"] = lambda seed=seed: run_ours(folder, seed)  # type: ignore[misc]
        parts[f"trl-{seed}"] = lambda seed=seed: run_trl(folder, python, seed, f"trl-{seed}", ())  # type: ignore[misc]
    return parts | {"killed-0": lambda: run_trl(folder, python, 0, "killed-0", KILLED_AFTER)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the runs; finished runs there aren't repeated")
    parser.add_argument("--trl-python", required=True, help="the interpreter of TRL's environment: see trl_run.py")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Measured] = {}
    for name, measure in list_parts(folder, str(Path(args.trl_python).absolute())).items():
        path = folder / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(asdict(measure())), encoding="utf-8")
        found[name] = Measured(**json.loads(path.read_text(encoding="utf-8")))
        print(f"{name}: {found[name]}", flush=True)
    REPORT.write_text("\n".join([*report(found), ""]), encoding="utf-8")
    wrong = [
        f"{name}: {one.unknown} rewards that no judgement stands for" for name, one in found.items() if one.unknown
    ]
    wrong += [
        f"{name}: {less:+.3f} from grmpipe's true accuracy"
        for name in found
        if abs(less := found[name].accuracy - found[f"grmpipe-{name[-1]}"].accuracy) > BOUND
    ]
    if found["killed-0"].kills < len(KILLED_AFTER):
        wrong.append(f"killed-0: only {found['killed-0'].kills} engines were killed")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
