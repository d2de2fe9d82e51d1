"""Finds the directory behind `tiny://<name>`: shipped, cached or built now. Imports torch only to build."""

import filecmp
import json
import logging
import shutil
import tempfile
from pathlib import Path

from grmpipe.models.stored_files import find_cache_folder
from grmpipe.tiny.recipes import RECIPES, AnyRecipe, MetaRmRecipe, Recipe

log = logging.getLogger(__name__)

SCHEME = "tiny://"
SHIPPED = Path(__file__).parent / "shipped"
CARD = "recipe.json"
SHARED_FILES = ("tokenizer.json", "tokenizer_config.json")  # shipped once: the folders of models have links to them


def resolve_model(path: str) -> str:
    """The directory of a tiny model; any other path is returned unchanged. Raises ValueError for an unknown name."""
    if not path.startswith(SCHEME):
        return path
    name = path.removeprefix(SCHEME)
    if name not in RECIPES:
        known = ", ".join(f"{SCHEME}{known}" for known in RECIPES)
        raise ValueError(f"path: no tiny model {path!r}; known: {known}")
    return str(resolve_directory(RECIPES[name]))


def resolve_directory(recipe: AnyRecipe) -> Path:
    """The directory of the recipe's model; builds it, with its parents, if there is none."""
    for directory in (SHIPPED / recipe.name, cache_directory(recipe)):
        if hash_on_card(directory) == recipe.hash:
            return directory
    return build_in_cache(recipe)


def cache_directory(recipe: AnyRecipe) -> Path:
    return find_cache_folder() / "tiny" / recipe.hash


def hash_on_card(directory: Path) -> str | None:
    """The hash of the recipe that made a directory; None: no finished model there."""
    try:
        found: str = json.loads((directory / CARD).read_text(encoding="utf-8"))["hash"]
        return found
    except FileNotFoundError:
        return None


def build_in_cache(recipe: AnyRecipe) -> Path:
    """Build atomically: the directory appears whole or not at all, and of two concurrent builds the first wins."""
    parent = resolve_directory(recipe.parent) if recipe.parent else None
    log.warning("tiny://%s is built now, which takes up to some minutes", recipe.name)
    directory = cache_directory(recipe)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{recipe.name}.", dir=directory.parent) as unfinished:
        made = Path(unfinished) / recipe.name
        make(recipe, parent, made)
        write_card(recipe, made, measured={})
        try:
            made.rename(directory)
        except OSError:
            if hash_on_card(directory) != recipe.hash:
                raise
    return directory


def make(recipe: AnyRecipe, parent: Path | None, directory: Path) -> None:
    if isinstance(recipe, Recipe):
        from grmpipe.tiny.build import build

        build(recipe, parent, directory)
        return
    from grmpipe.tiny.scalar_models import build_meta_rm, build_reward_model

    assert parent is not None
    if isinstance(recipe, MetaRmRecipe):
        build_meta_rm(recipe, parent, directory)
    else:
        build_reward_model(recipe, parent, directory)


def write_card(recipe: AnyRecipe, directory: Path, measured: dict[str, float]) -> None:
    card = {"name": recipe.name, "hash": recipe.hash, "measured": measured}
    (directory / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def ship(recipe: AnyRecipe, directory: Path, measured: dict[str, float]) -> Path:
    """Copy a finished model to the package's directory of shipped models."""
    shipped = SHIPPED / recipe.name
    shutil.rmtree(shipped, ignore_errors=True)
    shutil.copytree(directory, shipped, copy_function=shutil.copyfile)  # without the owner-only mode of weights
    for name in SHARED_FILES:
        if (SHIPPED / name).is_file() and filecmp.cmp(shipped / name, SHIPPED / name, shallow=False):
            (shipped / name).unlink()
            (shipped / name).symlink_to(Path("..", name))
    write_card(recipe, shipped, measured)
    return shipped
