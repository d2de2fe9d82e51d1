"""`python -m grmpipe.tiny build [name ...]`: makes the shipped models again and prints their quality."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from grmpipe.tiny.quality import quality_of
from grmpipe.tiny.recipes import RECIPES, AnyRecipe
from grmpipe.tiny.resolve import build_in_cache, cache_directory, directory_of, ship


def main(argv: list[str]) -> None:
    names = parse(argv) or list(RECIPES)
    table = Table("model", "recipe", "measured on held-out problems", "")
    with Progress(console=Console(stderr=True)) as bars:
        for name in names:
            measured = build_and_ship(RECIPES[name], drawn_on(bars))
            values = "\n".join(f"{value:.3f}" for value in measured.values())
            table.add_row(name, RECIPES[name].hash, "\n".join(measured), values, end_section=True)
    Console().print(table)


def parse(argv: list[str]) -> list[str]:
    parser = argparse.ArgumentParser(prog="python -m grmpipe.tiny", description=__doc__)
    build = parser.add_subparsers(required=True, metavar="build").add_parser("build", help="train, measure and ship")
    build.add_argument("names", nargs="*", metavar="name", help=f"any of {', '.join(RECIPES)}; all of them if none")
    names: list[str] = parser.parse_args(argv).names
    if unknown := set(names) - set(RECIPES):
        parser.error(f"no tiny model {', '.join(sorted(unknown))}; known: {', '.join(RECIPES)}")
    return names


def build_and_ship(recipe: AnyRecipe, progress: Callable[[str, float], None]) -> dict[str, float]:
    shutil.rmtree(cache_directory(recipe), ignore_errors=True)
    directory = build_in_cache(recipe, progress)
    measured = quality_of(recipe, directory, lambda other: directory_of(other, progress))
    ship(recipe, directory, measured)
    return measured


def drawn_on(bars: Progress) -> Callable[[str, float], None]:
    """A progress bar for each model that is built, including its parents."""
    tasks: dict[str, TaskID] = {}

    def draw(name: str, done: float) -> None:
        if name not in tasks:
            tasks[name] = bars.add_task(name, total=1.0)
        bars.update(tasks[name], completed=done)

    return draw


if __name__ == "__main__":
    main(sys.argv[1:])
