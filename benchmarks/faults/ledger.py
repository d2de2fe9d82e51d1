"""What a run has lost, doubled or made up: from its files alone, after any faults and resumes."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from grmpipe.observe.recorder import load_rollouts

Line = Mapping[str, Any]
Key = tuple[str, int]  # group_id, sibling


class Ledger:
    """The files of a run that is complete. `find_losses` says what is wrong with them.

    has_gaps: some lines could not be written; those that are there must hold.
    """

    def __init__(self, run_dir: Path, *, has_gaps: bool = False) -> None:
        self._run_dir, self._has_gaps = run_dir, has_gaps
        self._summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        self._train = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))["train"]
        self._ends = self._lines("groups")
        self._trained = self._lines("trained")
        self._judged = self._lines("judgements")
        self._rollouts = [line.rollout for line in load_rollouts(run_dir / "rollouts.jsonl")]

    def find_losses(self) -> list[str]:
        """One line for each guarantee that doesn't hold; empty if nothing was lost."""
        return [*self._of_summary(), *self._of_groups(), *self._of_siblings(), *self._of_numbers()]

    def _lines(self, name: str) -> Sequence[Line]:
        text = (self._run_dir / f"{name}.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def _of_summary(self) -> Iterator[str]:
        summary, steps = self._summary, self._train["num_steps"]
        if (summary["status"], summary["steps"]) != ("completed", steps):
            yield f"{summary['status']} after {summary['steps']} of {steps} steps"
        groups = summary["groups"]
        if groups["submitted"] != groups["trained"] + sum(groups["dropped"].values()) + groups["in_flight"]:
            yield f"the ledger doesn't hold: {groups}"
        if groups["trained"] != summary["steps"] * self._train["groups_per_batch"]:
            yield f"{groups['trained']} groups trained in {summary['steps']} steps"
        if summary["max_staleness_trained"] > self._train["max_staleness"]:
            yield f"staleness {summary['max_staleness_trained']} was trained"
        envs = summary["envs"]
        if envs["opened"] != envs["closed"] + envs["killed"]:
            yield f"environments left open: {envs['opened'] - envs['closed'] - envs['killed']}"
        written = [line["step"] for line in self._lines("metrics") if "time/step_s" in line]
        if written != sorted(set(written)) or set(written) - set(range(1, steps + 1)):
            yield f"steps of metrics.jsonl: {written}"
        if self._has_gaps:
            return
        if lines := summary["journal_failures"]:
            yield f"lines that were not written: {lines}"
        if len(written) != steps:
            yield f"steps of metrics.jsonl: {written}"

    def _of_groups(self) -> Iterator[str]:
        """Each draw ended once, or is in flight."""
        groups = self._summary["groups"]
        if doubled := repeated(end["prompt_index"] for end in self._ends):
            yield f"draws that ended twice: {doubled}"
        beyond = [end["prompt_index"] for end in self._ends if end["prompt_index"] >= groups["submitted"]]
        if beyond:
            yield f"draws that were never submitted: {beyond}"
        if self._has_gaps:
            return
        outcomes = Counter(end["outcome"] for end in self._ends)
        if outcomes != Counter(trained=groups["trained"], dropped=sum(groups["dropped"].values())):
            yield f"groups.jsonl has {dict(outcomes)}, the summary {groups}"
        missing = set(range(groups["submitted"])) - {end["prompt_index"] for end in self._ends}
        if len(missing) != groups["in_flight"]:
            yield f"{groups['in_flight']} draws are in flight, and these didn't end: {sorted(missing)}"
        by_step = Counter(end["step"] for end in self._ends if end["outcome"] == "trained")
        if set(by_step.values()) - {self._train["groups_per_batch"]}:
            yield f"groups by step: {dict(by_step)}"

    def _of_siblings(self) -> Iterator[str]:
        """Each rollout is on file once, was judged once and trained once, by a policy that is new enough."""
        trained_at = {end["group_id"]: end["step"] for end in self._ends if end["outcome"] == "trained"}
        rollouts = [(rollout.group_id, rollout.sibling) for rollout in self._rollouts]
        if doubled := repeated(rollouts):
            yield f"two rollouts under one name: {doubled}"
        expected = {key for key in rollouts if key[0] in trained_at}
        trained = [key_of(line) for line in self._trained]
        if doubled := repeated(trained):
            yield f"trained twice: {doubled}"
        if not self._has_gaps and set(trained) != expected:
            yield f"on file, but not as trained: {sorted(expected ^ set(trained))}"
        known = [line for line in self._trained if not self._has_gaps or line["group_id"] in trained_at]
        if wrong := [key_of(line) for line in known if trained_at.get(line["group_id"]) != line["step"]]:
            yield f"trained at another step than their groups: {wrong}"
        for rollout in self._rollouts:
            age = trained_at.get(rollout.group_id, 0) - 1 - rollout.oldest_version
            if age > self._train["max_staleness"]:
                yield f"{rollout.group_id}/{rollout.sibling} was trained {age} steps old"

    def _of_numbers(self) -> Iterator[str]:
        """A reward is the sum of a verdict's, and nothing else: of a failed verdict there is none."""
        verdicts: dict[Key, Line | None] = {}
        for line in self._judged:
            verdicts[key_of(line)] = line.get("verdict")
        if not self._may_judge_again and (twice := repeated(map(key_of, self._judged))):
            yield f"judged twice: {twice}"
        for line in self._trained:
            if self._has_gaps and key_of(line) not in verdicts:
                continue
            verdict = verdicts.get(key_of(line))
            reward = sum(span["value"] for span in verdict["rewards"]) if verdict is not None else None
            if line.get("reward") != reward:
                yield f"{key_of(line)} has the reward {line.get('reward')}, its verdict {reward}"
            if not all(math.isfinite(number) for number in line.values() if isinstance(number, float)):
                yield f"{key_of(line)} has numbers that aren't finite"

    @property
    def _may_judge_again(self) -> bool:
        """A judge that changed judges again; one in training that a resume puts back too, and that is counted."""
        voided = self._summary["judging"]["voided_verdicts"]
        put_back = self._summary["versions"].get("grm", 0) > 0 and self._summary["voided_by_resumes"]["judgements"] > 0
        return voided > 0 or put_back


def key_of(line: Line) -> Key:
    return line["group_id"], line["sibling"]


def repeated(names: Any) -> list[Any]:
    return [name for name, count in Counter(names).items() if count > 1]
