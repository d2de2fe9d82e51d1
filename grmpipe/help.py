"""What `grmpipe`, `grmpipe --help` and `grmpipe --version` print. Imports nothing that takes time."""

from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

import grmpipe

HELP, VERSION = ("-h", "--help"), "--version"
CONF = Path(__file__).parent / "conf"
DOCS = Path(__file__).parent / "docs"
PROJECT = "grmpipe.yaml"
WIDTH, INDENT = 116, 15
HEAD = """\
grmpipe post-trains language models by reinforcement learning against generative reward models.

  grmpipe +experiment=quickstart                                 train
  grmpipe +experiment=quickstart train.lr=1e-4 judge=listwise    with other values and choices
  grmpipe -m +experiment=quickstart train.lr=1e-4,3e-4           a sweep
  grmpipe +experiment=qwen3_8b task=plan                         what goes where, memory, costs
  grmpipe task=report run_dir=runs/quickstart/latest             report.html of a run
  grmpipe task=view run_dir=runs                                 look into runs in a browser

In a checkout `python launch.py` is the same command.

Tasks (task=name):
  train             train a policy, or a judge on labels (the default)
  train_judge_rft   fine-tune a judge on its own right critiques
  train_meta_rm     train a model that weighs judgements
  evaluate          measure a judge against labels, or a policy on prompts
  calibrate         fit a judge's rewards to labels: probabilities instead of scores
  probe_judge       try before a run which tricks get wrong responses past the judge
  score             judge a file of responses
  serve             answer other programs' questions with a judge
  rejudge           judge stored rollouts again by another judge: those of run_dir, or of another trainer
  play              one episode on the console: you, a script or the policy acts
  plan, simulate    memory and costs, or the seconds of a step, without a GPU
  report            report.html of a run, also of a crashed one
  runs              a table of the runs in a folder: how they stand, their figures, what differs
  view              pages of a run, or of a folder of runs, in a browser on this machine
  new               a project of your own in new.dir
  doctor            what is installed and missing, and what to type

Choices (group=choice; an experiment by +experiment=name):
"""
FOOT = """
--cfg job prints all keys of a run with their values, --hydra-help what Hydra takes, --version the version.
What the keys mean: configuration.md; first page: index.md; in {docs}
"""
GROUPS = {
    "experiment": "a whole run",
    "policy": "the model that learns",
    "grm": "the model that judges",
    "judge": "how it judges: prompt, parser, votes; or a rule, a function, a reward model",
    "reward": "how the verdicts of several judges become one",
    "algorithm": "advantages, loss, corrections",
    "data": "prompts",
    "env": "what the policy acts in",
    "engine": "what samples",
    "placement": "which models are on which cores and GPUs",
    "train": "batches, optimizer, checkpoints",
    "critic": "a model of values, for ppo and others",
    "meta_rm": "a model that weighs judgements",
    "cluster": "processes on one machine or several",
    "tracking": "where metrics go beside the run's files",
}


def write_help() -> str:
    folders = [CONF, *find_own_conf()]
    return HEAD + "".join(map(str, list_choices(folders))) + FOOT.format(docs=DOCS)


def list_choices(folders: list[Path]) -> Iterator[str]:
    """The lines of the groups, the known ones first."""
    found: dict[str, set[str]] = {group: set() for group in GROUPS}
    for folder in folders:
        for file in folder.glob("*/*.yaml"):
            found.setdefault(file.parent.name, set()).add(file.stem)
    for group, choices in found.items():
        if choices:
            indent = " " * INDENT
            yield f"  {group:<{INDENT - 3}} {GROUPS.get(group, 'your own')}\n"
            yield fill(", ".join(sorted(choices)), WIDTH, initial_indent=indent, subsequent_indent=indent) + "\n"


def find_own_conf() -> list[Path]:
    """The configurations of the user's project, if the working folder is in one that can be read."""
    here = Path.cwd()
    if not any((folder / PROJECT).is_file() for folder in (here, *here.parents)):
        return []
    from grmpipe.config.io.project import find_project  # late: it takes half a second

    project = find_project(here)
    return [] if project is None else [project.conf]


def write_version() -> str:
    return f"grmpipe {grmpipe.__version__}"
