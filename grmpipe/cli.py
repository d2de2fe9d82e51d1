"""The command, Hydra's entry: compose, validate, run the task; returns the objective for sweepers.

grmpipe +experiment=quickstart                          # train
grmpipe -m +experiment=quickstart train.lr=1e-4,3e-4    # sweep
grmpipe +experiment=quickstart task=plan                # placement and costs; starts nothing
grmpipe +experiment=quickstart task=simulate            # step time and stalls; needs no GPU
grmpipe task=rejudge run_dir=runs/x/latest judge=rule   # the stored rollouts of a run, judged again
grmpipe task=rejudge rejudge.path=completions run_dir=y # rollouts that another trainer has written
grmpipe task=report run_dir=runs/x/latest               # report.html of an existing run, also a crashed one
grmpipe task=view run_dir=runs                          # pages of runs, for a browser on this machine
grmpipe task=doctor                                     # what is installed and missing, and what to type
grmpipe task=new new.dir=mylab                          # a project of your own to begin with

Exit codes: 0 done, 1 failed, 2 bad configuration, 130 interrupted (checkpoint kept). A sweep has that of its worst run.
"""

import copy
import functools
import io
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep
from hydra.core.plugins import Plugins
from hydra.core.utils import JobRuntime, setup_globals
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from hydra.version import VersionBase

from grmpipe.config.io.key_errors import explain, no_choice
from grmpipe.config.io.project import find_project
from grmpipe.config.io.rejudged_config import compose_rejudging
from grmpipe.config.io.unused_overrides import EvaluationReads, check_typed_judges, check_typed_keys
from grmpipe.config.io.yaml_io import DictConfig, build, find_interpolated_keys, schema, without_section
from grmpipe.config.keys.entry_names import POLICY
from grmpipe.config.keys.secrets import (
    SHAPED,
    USERINFO,
    environment_secrets,
    keep_secret,
    mask,
    mask_errors,
    may_be_secret,
)
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.config.task_settings import EVALUATIONS
from grmpipe.models.import_path import put_working_folder_last
from grmpipe.models.terminal_text import replace_controls
from grmpipe.new_project import write_new_project
from grmpipe.roles.machines import check_seats
from grmpipe.run.errors import RunFailed, RunInterrupted
from grmpipe.run.run_watcher import RunWatcher
from grmpipe.run.signals import leave, stoppable
from grmpipe.run.tasks.sweep import SweepRun, find_exit_code, sweep_table

CONF = Path(__file__).parent / "conf"
VERSION_BASE = "1.3"  # the version of Hydra whose behaviour is kept
_COMPOSING = threading.Lock()  # Hydra keeps its version and its plugins for the whole process
ConfigStore.instance().store(name="grmpipe_schema", node=schema())  # the store is of all applications in the process


class ProjectFiles(FileConfigSource):
    """Groups and experiments of the user's project. A config.yaml there is none of ours."""

    @staticmethod
    def scheme() -> str:
        return "project"

    def is_config(self, config_path: str) -> bool:
        return "/" in config_path and super().is_config(config_path)


class ProjectSearchPath(SearchPathPlugin):
    """Searches the project before our own folder. Another application in this process, a user's, searches as before."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        ours = any(str(CONF) in (element.path or "") for element in search_path.get_path())
        if ours and (project := find_project(Path.cwd())) is not None:
            search_path.prepend("project", f"project://{project.conf}", anchor="main")


for plugin in (ProjectFiles, ProjectSearchPath):
    Plugins.instance().register(plugin)


RUNS: list[SweepRun] = []  # those of the sweep in this process, in the order of their ends


class RunEnded(SystemExit):
    """The end of a run with an error. As a SystemExit it passes through Hydra, which prints a report of its own on top
    of ours for any other exception.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(exit_code)
        self.message = message
        self.exit_code = exit_code


def compose_and_run(config: DictConfig) -> float | None:
    def run() -> float | None:
        return run_to_end(lambda: run_task(build_checked(config, HydraConfig.get().overrides.task)))

    key = "simulated seconds of a step" if config.task == "simulate" else config.objective
    return run_in_sweep(run, key) if HydraConfig.get().mode == RunMode.MULTIRUN else run()


def compose(experiment: str | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of an experiment with overrides as on the command line. Raises ConfigError."""
    typed = [*([f"+experiment={experiment}"] if experiment else []), *overrides]
    import_from_project()
    keep_secret(typed)
    with mask_errors():
        try:
            return build_checked(compose_alone(typed), typed)
        except HydraException as error:
            raise ConfigError(explain(error)) from error
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(of_null_group(error, typed) or str(error)) from error


def compose_alone(typed: Sequence[str]) -> DictConfig:
    """What hydra.compose gives, from a loader of its own: the global one may be of a user's application, in whose
    @hydra.main or beside whose threads this runs.
    """
    with _COMPOSING:
        version = VersionBase.instance()
        VersionBase.set_instance(copy.copy(version))
        hydra.version.setbase(VERSION_BASE)
        try:
            return without_section(compose_with_hydra(typed, from_shell=False), "hydra")
        finally:
            VersionBase.set_instance(version)


def compose_with_hydra(typed: Sequence[str], *, from_shell: bool) -> DictConfig:
    """The configuration with Hydra's own section. from_shell: words of errors are for someone who types a command."""
    setup_globals()  # the resolver of ${now:...}
    loader = ConfigLoaderImpl(create_config_search_path(str(CONF)))
    return loader.load_configuration("config", list(typed), RunMode.RUN, from_shell)


def run_composed_once(typed: Sequence[str]) -> bool:
    """Compose and run. hydra.main composes twice, half a second each, to learn first whether this is a sweep. False:
    nothing ran, since it is one or asks Hydra for more than a configuration.
    """
    if any(argument.startswith(("-", "hydra", "+hydra")) for argument in typed):
        return False
    hydra.version.setbase(VERSION_BASE)
    JobRuntime.instance().set("name", "grmpipe")
    config = compose_with_hydra(typed, from_shell=True)
    own = config.hydra
    loggings = {own.runtime.choices[f"hydra/{one}"] for one in ("job_logging", "hydra_logging")}
    if own.mode is not None or own.callbacks or own.job.env_set or own.job.chdir or loggings != {"none"}:
        return False
    own.runtime.output_dir = str(Path(own.run.dir).absolute())
    HydraConfig.instance().set_config(config)
    compose_and_run(without_section(config, "hydra"))
    return True


def import_from_project() -> None:
    """Find modules of the user's in the project's folder, or in the working folder."""
    project = find_project(Path.cwd())
    put_working_folder_last(*([project.folder] if project is not None else []), Path.cwd())


def of_null_group(error: ValueError, typed: Sequence[str]) -> str:
    """The message for Hydra's error of a group without a choice, which names no key; empty for other errors."""
    return no_choice(typed) if str(error).startswith("Config group override") else ""


def build_checked(config: DictConfig, typed: Sequence[str]) -> RunConfig:
    """The checked configuration. Raises ConfigError, also for a typed key that the task would ignore."""
    if config.task not in (*EVALUATIONS, "rejudge"):
        built = build(config)
        if built.trains_policy and not built.judging.judges:
            check_typed_judges(built, list_typed_keys(typed), find_interpolated_keys(config))
        return built
    if config.task == "rejudge":
        overrides = OverridesParser.create().parse_overrides(list(typed))
        return compose_rejudging(config, [one.package or one.key_or_group for one in overrides])
    reads = EvaluationReads(
        what=config.evaluate.what,
        task=config.task,
        has_prompts=config.evaluate.prompts is not None,
        by_policy=POLICY in (config.judge.model, *(judge.model for judge in config.judges.values())),
        read_by_others=find_interpolated_keys(config),
    )
    check_typed_keys(reads, list_typed_keys(typed))
    return build(config)


def list_typed_keys(typed: Sequence[str]) -> list[str]:
    """The keys and groups of overrides, without the signs before them."""
    return [one.get_key_element().lstrip("+~") for one in OverridesParser.create().parse_overrides(list(typed))]


def run_to_end(run: Callable[[], float | None]) -> float | None:
    """The objective. Raises RunEnded after the error is printed."""
    try:
        return run()
    except ConfigError as error:
        raise end_run(str(error), 2) from error
    except RunFailed as error:
        raise end_run(str(error), 1) from error
    except (RunInterrupted, KeyboardInterrupt) as error:
        raise end_run(str(error) or "interrupted", 130) from error


def end_run(message: str, exit_code: int) -> RunEnded:
    complain(message, exit_code)
    return RunEnded(message, exit_code)


def run_in_sweep(run: Callable[[], float | None], key: str) -> float | None:
    """The objective of one run of a sweep, which `key` names; NaN if it failed, so that the next ones run. An interrupt
    ends the sweep.
    """
    here = HydraConfig.get()
    if (typed := Path(here.sweep.dir) / "multirun.yaml").exists():  # Hydra's copy of the whole configuration
        typed.chmod(0o600)
    number, overrides = here.job.num, [mask(typed, environment_secrets()) for typed in here.overrides.task]
    print(f"sweep, run {number}: {' '.join(overrides)}", flush=True)
    ended_as = functools.partial(SweepRun, number=number, overrides=overrides)
    try:
        objective = run()
    except RunEnded as end:
        RUNS.append(ended_as(exit_code=end.exit_code, error=mask(end.message, environment_secrets())))
        # The process of another launcher's job has an exit code of its own.
        if end.exit_code == 130 or here.runtime.choices["hydra/launcher"] != "basic":
            raise
        return math.nan
    except Exception as error:  # a defect, which Hydra raises after the last run
        RUNS.append(ended_as(exit_code=1, error=mask(repr(error), environment_secrets())))
        raise
    RUNS.append(ended_as(objective=objective))
    if objective is not None:
        print(f"sweep, run {number}: {key} = {objective:g}", flush=True)
    return objective


def escape_what_stdout_lacks() -> None:
    """Print characters that the encoding of standard output lacks by their numbers, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def run_task(config: RunConfig, watcher: RunWatcher | None = None) -> float | None:
    """The objective. Raises ConfigError, RunFailed or RunInterrupted."""
    escape_what_stdout_lacks()
    if config.task == "doctor":  # works without the other imports
        from grmpipe.data.catalogs import is_made
        from grmpipe.run.doctor.doctor import doctor

        print(doctor(config.engine.sglang.python))
        chosen = not all(is_made(model.path) for model in config.models.values())  # tiny models fit everywhere
        if chosen and not config.cluster.is_joined:
            from grmpipe.capacity.plan.machine import describe_run_memory

            print(f"this run        {describe_run_memory(config)}")
        if config.cluster.address is not None:
            from grmpipe.run.doctor.cluster_doctor import examine_cluster, report

            findings = examine_cluster(config)
            print(report(config.cluster.address, findings), flush=True)
            if problems := sum(not finding.ok for finding in findings):
                raise RunFailed(f"problems of the cluster: {problems}; see the lines above")
        return None
    if config.task == "new":
        print(write_new_project(Path(config.new.dir) if config.new.dir is not None else None))
        return None
    # Late: a misspelt key, or an impossible placement, should not wait for torch to load.
    if config.task == "report":
        from grmpipe.run.tasks.list_runs import make_report

        print(make_report(config))
        return None
    if config.task == "runs":
        from grmpipe.run.tasks.list_runs import list_runs

        list_runs(config)
        return None
    if config.task == "view":
        from grmpipe.run.tasks.list_runs import view_runs

        view_runs(config)
        return None
    check_seats(config)
    from grmpipe.tasks import run_task as run

    return run(config, watcher)


def secrets_typed_in_a_sweep(arguments: Sequence[str]) -> list[str]:
    """Keys of a sweep whose secrets are on the command line, and so in the multirun.yaml that Hydra writes."""
    if not {"-m", "--multirun"} & set(arguments):
        return []
    typed = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    overrides = OverridesParser.create().parse_overrides(typed)
    return [key for one in overrides if holds_secret(key := one.get_key_element().lstrip("+~"), one.value())]


def holds_secret(key: str, value: object) -> bool:
    if isinstance(value, Mapping):
        return any(holds_secret(f"{key}.{name}", entry) for name, entry in value.items())
    if isinstance(value, list | tuple):
        return any(holds_secret(key, entry) for entry in value)
    if isinstance(value, ChoiceSweep):
        return holds_secret(key, list(value.list))
    if value is None or isinstance(value, bool | int | float):
        return False
    text = str(value)
    return bool(USERINFO.search(text) or SHAPED.search(text)) or (may_be_secret(key) and "${" not in text)


def main() -> int:
    """The exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # without it Hydra prints a report and exits 1 before we explain the error
    escape_what_stdout_lacks()
    try:
        import_from_project()
        keep_secret(sys.argv)
        for key in secrets_typed_in_a_sweep(sys.argv[1:]):
            return complain(
                f"{key}: a sweep's command line is written to its multirun.yaml; export the secret in an environment "
                f"variable and type {key}='${{oc.env:NAME}}', or use its key that ends in _env",
                2,
            )
        RUNS.clear()
        if not run_composed_once(sys.argv[1:]):
            # Not a decorator: that sets the version of a process that only imports this.
            hydra.main(version_base=VERSION_BASE, config_path=str(CONF), config_name="config")(compose_and_run)()
    except RunEnded as end:
        return end.exit_code
    except KeyboardInterrupt:
        return complain("interrupted", 130)
    except HydraException as error:
        return complain(explain(error), 2)
    except ConfigError as error:  # of grmpipe.yaml
        return complain(str(error), 2)
    except ValueError as error:
        if not (message := of_null_group(error, sys.argv[1:])):
            raise
        return complain(message, 2)
    finally:
        if RUNS:
            print(replace_controls(sweep_table(RUNS)), flush=True)
    return find_exit_code(RUNS)


def complain(message: str, code: int) -> int:
    print(f"grmpipe: {replace_controls(mask(message, environment_secrets()))}", file=sys.stderr)
    return code


def command() -> NoReturn:
    """The command that an installation brings. After a signal every failure is an interruption: a library within which
    Python raised KeyboardInterrupt may have answered with an error of its own.
    """
    with stoppable() as request:
        try:
            code = main()
        except Exception:
            if not request.came:
                raise
            code = complain("interrupted", 130)
        leave(130 if request.came and code else code)
