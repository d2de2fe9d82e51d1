"""The labels of `labels_from`: a judge's verdicts on the groups that the policy trains on, or people's, in a file that
grows. What nobody labels, because its verdict failed or wasn't asked for, teaches nothing.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from grmpipe.data.rubrics import encode_criterion, name_criteria
from grmpipe.judge.protocols.stepwise import ResponseStep, show_steps, split_steps
from grmpipe.judge.trajectory import make_trajectory
from grmpipe.judge.votes import MET
from grmpipe.observe.guard import Guard
from grmpipe.observe.journal import Journal
from grmpipe.observe.recorder import JUDGEMENTS, ROLLOUTS, RecordedRollout, load_rollouts, load_verdicts
from grmpipe.observe.records import TEXT
from grmpipe.run.features.cotrain.judging_tasks import JudgingTaskStream
from grmpipe.run.features.cotrain.refit_calibration import NUM_GROUPS, make_refits
from grmpipe.run.prepare import Prepared
from grmpipe.run.run_prompts import load_judging_tasks
from grmpipe.run_dir.identity import read_run_id
from grmpipe.types import Failed, JudgedGroup, Prompt, RewardsByPart, Rollout, Verdict

log = logging.getLogger(__name__)

TO_LABEL = "to_label.jsonl"


class LabelSource:
    """Gives the judging tasks of a model their labels. Without `labels_from` it gives none."""

    def __init__(
        self, prepared: Prepared, role: str, run_dir: Path, judging_tasks: JudgingTaskStream, guard: Guard
    ) -> None:
        """role: of the model that learns. guard: shared by all journals of the run."""
        self._prepared, self._config, own = prepared, prepared.config, prepared.config.trained_grms[role]
        self._key = f"{prepared.config.models[role].key}.train.labels_from"
        self._judge = prepared.config.judging.find_training_judge(role)
        self._labeller, self._file = own.labeller, own.labels_file
        self._judging_tasks = judging_tasks
        self._stamp: tuple[int, int] | None = None  # of the file as it was read
        self._wanted = Journal(run_dir / TO_LABEL, run_id=read_run_id(run_dir), checked=False)
        self._guard = guard
        self._refits = make_refits(prepared, role)

    @property
    def are_missing(self) -> bool:
        """Whether all labels come from others, and there are too few of them so far."""
        return (self._labeller or self._file) is not None and not self._judging_tasks.is_usable

    def take(self, group: JudgedGroup) -> None:
        """Take the labels of a judged group; for people, write down what the judges don't agree on."""
        for refit in self._refits:
            refit.take(group)
        if group.prompt.self_judging:
            return
        judged = [
            (rollout, verdict)
            for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True)
            if isinstance(verdict, Verdict)
        ]
        if self._file is not None:
            for rollout, verdict in judged:
                self._want(group.prompt, rollout, verdict)
        elif (name := self._labeller) is None:
            return
        elif self._judge.protocol_kind.scores != "responses":
            for rollout, by_part in zip(group.rollouts, group.by_part, strict=True):
                self._add_parts(group.prompt, rollout, by_part.get(name, {}))
        else:
            self._add(group, [(one, verdict.breakdown[name]) for one, verdict in judged if name in verdict.breakdown])

    def refit(self) -> None:
        """Refit the calibrations, for the next version of the weights."""
        for refit in self._refits:
            refit.fit()

    def _add(self, group: JudgedGroup, rewards: Sequence[tuple[Rollout, float]]) -> None:
        if self._judge.protocol_kind.compares:
            if len(rewards) > 1:
                self._judging_tasks.add_ranked(group.group_id, group.prompt, rewards)
            return
        for rollout, reward in rewards:
            self._judging_tasks.add_judged(group.prompt, rollout, reward, self._judge.scale.to_score(reward))

    def _add_parts(self, prompt: Prompt, rollout: Rollout, rewards: Mapping[str, float]) -> None:
        """rewards: by the labeller's names of criteria, or places of steps. Those that only it has teach nothing."""
        tasks, name = self._judging_tasks.tasks, f"{rollout.group_id}/{rollout.sibling}"
        if self._judge.protocol_kind.scores == "steps":
            steps = self._split(rollout)
            shares = [rewards.get(one.place) for one in steps]
            known = [share for share in shares if share is not None]
            if known:
                labels = [None if share is None else tasks.label_score(tasks.scale.to_score(share)) for share in shares]
                task = tasks.ask_steps(name, prompt, list(show_steps(prompt, rollout, steps)), labels)
                self._judging_tasks.add_task(all(map(self._judging_tasks.passes, known)), task)
            return
        rubric = tasks.template.find_rubric(prompt)
        named = zip(name_criteria(rubric), rubric, strict=True)
        met = {criterion: rewards[one] for one, criterion in named if one in rewards}
        labelled = [(criterion, tasks.label_criterion(criterion, share)) for criterion, share in met.items()]
        shown = make_trajectory(prompt, rollout, thoughts=tasks.show_thoughts)
        for task in tasks.ask_criteria(name, prompt, shown, labelled):
            self._judging_tasks.add_task(all(met[criterion] >= MET for criterion in task.rubric), task)

    def _split(self, rollout: Rollout) -> tuple[ResponseStep, ...]:
        """The steps of a rollout, as the judge that learns sees them."""
        decode, step_end = self._prepared.policy.renderer.decode, self._judge.split.step_end
        return split_steps(rollout, step_end, decode, thoughts=self._judge.format.show_thoughts)

    def restore(self, run_dir: Path, run_id: str) -> None:
        """Take the latest groups of the run's journals again, before a resume continues."""
        if self._labeller is None:
            return
        verdicts: dict[str, dict[int, tuple[Verdict | Failed, RewardsByPart]]] = {}
        for (group_id, sibling), report in load_verdicts(run_dir / JUDGEMENTS, run_id=run_id):
            verdicts.setdefault(group_id, {})[sibling] = report.verdict, report.rewards_by_part
            while len(verdicts) > NUM_GROUPS:
                del verdicts[next(iter(verdicts))]
        groups: dict[str, list[RecordedRollout]] = {}
        for line in load_rollouts(run_dir / ROLLOUTS, run_id=run_id):
            if line.rollout.sibling in verdicts.get(line.rollout.group_id, {}) and line.thinned != TEXT:
                groups.setdefault(line.rollout.group_id, []).append(line)
        for group_id, lines in groups.items():
            judged = [verdicts[group_id][line.rollout.sibling] for line in lines]
            self.take(
                JudgedGroup(
                    group_id=group_id,
                    prompt=lines[0].prompt,
                    rollouts=tuple(line.rollout for line in lines),
                    verdicts=tuple(verdict for verdict, _ in judged),
                    by_part=tuple(by_part for _, by_part in judged),
                )
            )

    # -- people ------------------------------------------------------------------------------------------------------

    def read_file(self) -> None:
        """Take the labels of the file, if it changed. One that can't be read changes nothing."""
        try:
            stat = self._file.stat() if self._file is not None else None
        except FileNotFoundError:
            return
        if stat is None or self._file is None or (stamp := (stat.st_mtime_ns, stat.st_size)) == self._stamp:
            return
        self._stamp = stamp
        try:
            found = load_judging_tasks(self._judge, self._config.data, str(self._file), 1, self._prepared.held_out)
        except ValueError as error:
            log.warning("%s: the labels stay as they were: %s", self._key, error)
            return
        self._judging_tasks.replace_annotated(found)

    def _want(self, prompt: Prompt, rollout: Rollout, verdict: Verdict) -> None:
        """Write a response to TO_LABEL, as a row of labels without its label, if not all judges pass or fail it: with
        its steps, or once for each criterion, if the judge learns from labels of these.
        """
        rewards = {name: verdict.breakdown[name] for name in self._config.judging.judges if name in verdict.breakdown}
        if len({self._judging_tasks.passes(reward) for reward in rewards.values()}) < 2:
            return
        row = {
            "item_id": f"{rollout.group_id}/{rollout.sibling}",
            "messages": [{"role": message.role, "content": message.content} for message in prompt.messages],
            **{name: value for name, value in (("reference", prompt.reference), ("source", prompt.source)) if value},
            "rewards": rewards,
        }
        scores = self._judge.protocol_kind.scores
        if scores == "steps":
            about: list[dict[str, object]] = [{"steps": [step.text for step in self._split(rollout)]}]
        elif scores == "criteria":
            rubric = self._judging_tasks.tasks.template.find_rubric(prompt)
            about = [{"response": rollout.answer, "criterion": encode_criterion(one)} for one in rubric]
        else:
            about = [{"response": rollout.answer}]
        with self._guard.watch(TO_LABEL):
            for part in about:
                self._wanted.append(row | part)

    def close(self) -> None:
        with self._guard.watch(TO_LABEL):
            self._wanted.close()
