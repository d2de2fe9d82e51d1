"""`python -m grmpipe.tiny build [name ...]`: makes the shipped models again and prints their quality."""

import argparse
import shutil
import sys

from rich.console import Console
from rich.table import Table

from grmpipe.tiny.quality import measure_quality
from grmpipe.tiny.recipes import RECIPES, AnyRecipe
from grmpipe.tiny.resolve import build_in_cache, cache_directory, resolve_directory, ship


def main(argv: list[str]) -> None:
    names = parse(argv) or list(RECIPES)
    table = Table("model", "recipe", "measured on held-out problems", "")
    for name in names:
        measured = build_and_ship(RECIPES[name])
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


def build_and_ship(recipe: AnyRecipe) -> dict[str, float]:
    shutil.rmtree(cache_directory(recipe), ignore_errors=True)
    directory = build_in_cache(recipe)
    measured = measure_quality(recipe, directory, resolve_directory)
    ship(recipe, directory, measured)
    return measured


if __name__ == "__main__":
    main(sys.argv[1:])
