"""All rollouts that a run has stored, group by group, for judging them again. Reads only."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from grmpipe.config.task_settings import RejudgeConfig
from grmpipe.models.seeds import is_drawn
from grmpipe.observe.recorder import GROUPS, JUDGEMENTS, ROLLOUTS, decode_recorded, load_group_ends
from grmpipe.observe.records import TEXT
from grmpipe.run_dir.recorded_run import JournalLines, RecordedGroups
from grmpipe.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroups:
    """Groups of a run that are to be judged again, those of the first steps first.

    steps:   group_id -> the step that trained it; None: none did.
    prompts: those of these groups, each once.
    num_without_text: further groups, whose text was dropped: they can't be judged again.
    run:     the groups with the run's own verdicts.
    """

    steps: Mapping[str, int | None]
    prompts: tuple[Prompt, ...]
    run: RecordedGroups
    num_without_text: int = 0

    @property
    def num_rollouts(self) -> int:
        return sum(len(self.run.rollouts.places[group_id]) for group_id in self.steps)

    def read_new_verdicts(self, run_dir: Path) -> RecordedGroups:
        """The same groups with the new verdicts in a directory."""
        return replace(self.run, judgements=JournalLines(run_dir / JUDGEMENTS, self.steps.keys()))


def open_stored(run_dir: Path, chosen: RejudgeConfig, seed: int) -> StoredGroups:
    """Open a run's journals, also of a run that goes on: a torn last line is ignored. ValueError says what is
    missing.
    """
    rollouts, judgements, groups = (run_dir / name for name in (ROLLOUTS, JUDGEMENTS, GROUPS))
    if not rollouts.exists():
        raise ValueError(f"there is no {rollouts}; give the directory of a run that has stored rollouts")
    trained = {} if not groups.exists() else {end.group_id: end.step for end in load_group_ends(groups)}
    lines = JournalLines(rollouts)
    steps = {
        group_id: trained.get(group_id)
        for group_id in lines.places
        if chosen.wants(trained.get(group_id)) and is_drawn(seed, f"rejudge/{group_id}", chosen.sample)
    }
    if not steps:
        raise ValueError(f"{rollouts} has no group for rejudge.steps={chosen.steps} and rejudge.sample={chosen.sample}")
    first = {group_id: min((at, sibling) for sibling, at in lines.places[group_id].items()) for group_id in steps}
    in_order = sorted(steps, key=lambda group_id: (steps[group_id] is None, steps[group_id] or 0, first[group_id]))
    firsts = ((group_id, lines.read(group_id, first[group_id][1], decode_recorded)) for group_id in in_order)
    texts = {group_id: line.prompt for group_id, line in firsts if line.thinned != TEXT}
    found = {group_id: prompt for group_id, prompt in texts.items() if not prompt.self_judging}  # which labels judge
    if not found:
        raise ValueError(f"{rollouts} holds no text of these groups: journals.keep dropped it; choose other steps")
    return StoredGroups(
        steps={group_id: steps[group_id] for group_id in found},
        prompts=tuple({prompt.prompt_id: prompt for prompt in found.values()}.values()),
        num_without_text=len(in_order) - len(texts),
        run=RecordedGroups(rollouts=lines, judgements=JournalLines(judgements)),
    )
