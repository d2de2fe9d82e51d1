"""A project of the user's: a folder with a grmpipe.yaml, which names its folder of configurations."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from grmpipe.config.run_config import ConfigError

FILE = "grmpipe.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """folder: of the project, which Python imports from. conf: with groups and experiments, searched before ours."""

    folder: Path
    conf: Path


def find_project(start: Path) -> Project | None:
    """The project of a folder: its own grmpipe.yaml, or the next one above. Raises ConfigError if it can't be read."""
    folder = next((folder for folder in (start, *start.parents) if (folder / FILE).is_file()), None)
    if folder is None:
        return None
    try:
        values = yaml.safe_load((folder / FILE).read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise ConfigError(f"{folder / FILE} can't be read: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict) or [*values] != ["conf"] or not isinstance(values["conf"], str):
        raise ConfigError(f"{folder / FILE}: must be `conf: <folder of configurations>`, and no more")
    if not (conf := folder / values["conf"]).is_dir():
        raise ConfigError(f"{folder / FILE}: conf: there is no folder {conf}")
    return Project(folder=folder, conf=conf)


def path_in_project(path: str = "") -> str:
    """A path from the project's folder; without a project, from the working folder."""
    project = find_project(Path.cwd())
    return str((project.folder if project else Path.cwd()) / path)
