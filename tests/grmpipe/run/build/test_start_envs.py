"""What environments are told of the run: the files that they may not read."""

from __future__ import annotations

from pathlib import Path

import grmpipe
from grmpipe.run.build.start_envs import find_data


def test_files_that_the_configuration_names_are_data_but_for_those_of_the_environment(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("prompts.jsonl", "held_out.jsonl", "more.jsonl", "levels.json")]
    for file in files:
        file.touch()
    prompts, held_out, more, levels = files
    typed = (f"data.path={prompts}", f"data.eval_path={held_out}", f"evaluate.prompts={{more: {more}}}")
    config = grmpipe.compose(overrides=["+experiment=walk", *typed, f"env.isolation.read=[{levels}]"])
    assert find_data(config) == tuple(sorted(map(str, files[:3])))
