"""run.json: the id of a run, and checksums of the files that decide what it trains. Written at the first start."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from grmpipe.config.io.resume_rules import NEW_RUN
from grmpipe.config.judge import JudgeConfig
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.data.catalogs import is_made
from grmpipe.judge.prompt import find_template
from grmpipe.models.stored_files import compute_checksum

IDENTITY_FILE = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """The identity of a run. run_id: part of each line of its journals. inputs: key that names a file -> its checksum
    (xxh3).
    """

    run_id: str
    inputs: Mapping[str, str]

    @staticmethod
    def new(files: Mapping[str, Path]) -> RunIdentity:
        return RunIdentity(run_id=uuid.uuid4().hex[:16], inputs=compute_checksums(files))

    def write(self, run_dir: Path) -> None:
        path = run_dir / IDENTITY_FILE
        draft = path.with_name(path.name + ".tmp")
        draft.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        draft.replace(path)


def read_identity(run_dir: Path) -> RunIdentity | None:
    """The identity of a run; None if an older version wrote none. Raises ConfigError for a file that can't be read."""
    path = run_dir / IDENTITY_FILE
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return RunIdentity(run_id=str(values["run_id"]), inputs=dict(values["inputs"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"resume: {path} can't be read ({error!r}); restore it, remove it to continue without its checks, or "
            f"{NEW_RUN}"
        ) from error


def read_run_id(run_dir: Path) -> str:
    """The id of a run; empty if it has none."""
    identity = read_identity(run_dir)
    return identity.run_id if identity is not None else ""


def check_is_there(run_dir: Path, run_id: str) -> None:
    """Raises FileNotFoundError if a directory isn't that of the run any more: a checkpoint in it would be lost, or be
    taken for another run's.
    """
    if read_run_id(run_dir) != run_id:
        raise FileNotFoundError(
            f"run_dir: {run_dir} was deleted or replaced during the run; what was trained since its last checkpoint "
            "can't be kept"
        )


def check_inputs(identity: RunIdentity, files: Mapping[str, Path], run_dir: Path) -> None:
    """Raises ConfigError if a file differs from the one that the run began with: its rollouts would answer other
    prompts, or come from another judge template. A missing file is reported by the code that opens it.
    """
    now = compute_checksums(files)
    changed = [key for key, was in identity.inputs.items() if now.get(key, was) != was]
    if changed:
        raise ConfigError(
            f"resume: {'; '.join(f'{key}: {files[key]}' for key in changed)}: not the content that {run_dir} started "
            f"with (by its checksum); restore that, or {NEW_RUN}"
        )


def compute_checksums(files: Mapping[str, Path]) -> dict[str, str]:
    return {key: compute_checksum(path) for key, path in files.items() if path.is_file()}


def input_files(config: RunConfig) -> dict[str, Path]:
    """Key -> file, for the files that decide what is sampled, judged and trained. Models are not among them."""
    if config.data.retrain_from is not None:  # the other files aren't used
        template = config.policy.chat_template
        return {"policy.chat_template": Path(template)} if template is not None else {}
    named = {
        "data.path": config.data.path,
        "data.eval_path": config.data.eval_path,
    }
    named |= {f"{model.key}.chat_template": model.chat_template for model in config.models.values()}
    named |= {
        f"{config.models[role].key}.train.data_path": cotrain.data_path for role, cotrain in config.trained_grms.items()
    }
    files = {key: Path(path) for key, path in named.items() if path is not None and not is_made(path)}
    for name, judge in config.judging.judges.items():
        if name in config.judging.generative or judge.kind == "label":
            files |= {f"{judge.key}.{key}": file for key, file in find_templates(judge).items()}
        if judge.calibration is not None:
            files[f"{judge.key}.calibration"] = Path(judge.calibration)
    return files


def find_templates(judge: JudgeConfig) -> dict[str, Path]:
    templates = {"template": judge.template}
    if judge.principles.kind == "shared":
        templates["principles.template"] = judge.principles.template
    return {key: template_file(key, template) for key, template in templates.items()}


def template_file(key: str, template: str) -> Path:
    try:
        return find_template(key, template)
    except ValueError:  # it is missing
        return Path(template)
