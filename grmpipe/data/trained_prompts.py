"""The prompts of the labels that a judge was trained on, beside its weights: an evaluation leaves them out."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from grmpipe.data.prompts import identify_prompt
from grmpipe.types import Prompt

FILE = "trained_prompts.json"
LABELLED = "labelled_prompt"  # column of a judging task: the digest of the prompt whose answer is judged


def digest_prompt(prompt: Prompt) -> str:
    """16 hexadecimal digits, equal for prompts of the same words."""
    return hashlib.sha256(json.dumps(identify_prompt(prompt)).encode()).hexdigest()[:16]


def write_trained_prompts(folder: Path, judging_tasks: Iterable[Prompt]) -> None:
    """Write the digests of these tasks' prompts; nothing if they aren't known."""
    found = {task.columns[LABELLED] for task in judging_tasks if LABELLED in task.columns}
    if found:
        (folder / FILE).write_text(json.dumps(sorted(map(str, found))) + "\n", encoding="utf-8")


def read_trained_prompts(folder: str) -> frozenset[str]:
    """The digests that a model's folder holds, if it holds some. Raises ValueError that begins with the file."""
    file = Path(folder) / FILE
    try:
        return frozenset(map(str, json.loads(file.read_text(encoding="utf-8"))))
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{file}: expected a JSON list of digests ({error})") from error
