"""The recipes for GPUs: each composes, is on the page of recipes, and fits its GPUs by its plan."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import recipes  # noqa: E402

from grmpipe.roles.role_placement import seat_roles  # noqa: E402

NAMES = sorted(path.stem for path in recipes.EXPERIMENTS.glob("qwen3_*.yaml"))
PAGES = {num: page.read_text(encoding="utf-8") for num, page in recipes.PAGES.items()}
PAGE = "".join(PAGES.values())
pytestmark = pytest.mark.usefixtures("no_hub")  # as where the page is made


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_seated_and_its_command_is_on_the_page(name: str) -> None:
    config = recipes.composed(name)
    placement, _ = seat_roles(config)
    assert config.experiment_name == name, "its runs have a folder of their own"
    taken = {(seat.pool, slot) for seats in placement.seats.values() for seat in seats for slot in seat.slots}
    assert len(taken) == recipes.num_gpus(config), "no GPU stays empty"
    whom, command = recipes.comment_of(name)
    assert f"+experiment={name} " in command and command in PAGE
    assert whom in PAGE and f"| `{name}` |" in PAGE


def test_there_are_recipes_for_1_8_and_64_gpus() -> None:
    assert {recipes.num_gpus(recipes.composed(name)) for name in NAMES} == {1, 8, 64}


def test_page_has_a_simulation_of_each_recipe_or_the_reason_for_none() -> None:
    by_num = {num: recipes.sections_of(page) for num, page in PAGES.items()}
    assert all(recipes.num_gpus(recipes.composed(name)) == num for num, found in by_num.items() for name in found)
    sections = {name: section for found in by_num.values() for name, section in found.items()}
    assert sections.keys() == set(NAMES)
    for name, section in sections.items():
        begins = "not simulated: " if "_tools" in name else f"{recipes.STEPS} steps of "
        assert recipes.simulation_in(section).startswith(begins), name


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_present_plan_and_it_fits(name: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(recipes.prompt_rows(), encoding="utf-8")
    shown = recipes.planned(name, prompts)
    assert "\nwarnings" not in shown and "GB of 80 GB" in shown
    assert "packed tokens/s, MFU 0." in shown
    assert shown in PAGE, "type python benchmarks/recipes.py"
