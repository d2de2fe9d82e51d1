"""task=new: a project to begin with, of which each file is to be replaced by the user's own."""

import shutil
from pathlib import Path

from grmpipe.config.run_config import ConfigError

TEMPLATE = Path(__file__).parent / "project_template"


def write_new_project(folder: Path | None) -> str:
    """Returns what to type next. Raises ConfigError for a folder that holds files, or that can't be written."""
    if folder is None:
        raise ConfigError("new.dir: names the folder of the new project; type new.dir=mylab")
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"new.dir: {folder} holds files; type a folder that is empty, or isn't there")
        shutil.copytree(TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise ConfigError(f"new.dir: {folder} can't be written ({error}); type another") from error
    commands = (f"cd {folder}", "grmpipe +experiment=mine", "pip install pytest && python -m pytest")
    return "\n  ".join((f"{folder} is a project; type:", *commands))
