"""Checks judging a run's rollouts again before anything starts.

Every refusal is a ConfigError that names the key and what to type.
"""

from dataclasses import dataclass
from pathlib import Path

from grmpipe.config.io.key_errors import section
from grmpipe.config.reward_checks import check_sources
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.run_dir.stored_groups import StoredGroups, open_stored
from grmpipe.validate.context_limits import check_judges, check_scalar_judges, check_template
from grmpipe.validate.data import Data, check_references, select_reaching
from grmpipe.validate.evaluation import find_judges, without_adapters
from grmpipe.validate.prepare import Prepared, check_judges_without_model


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRejudging:
    """A checked judging again, ready to start. source: the directory of the run."""

    prepared: Prepared
    stored: StoredGroups
    source: Path

    @property
    def config(self) -> RunConfig:
        return self.prepared.config

    def notes(self) -> list[str]:
        """What the new judge is not."""
        said = []
        if self.config.judging.by_policy:
            said.append("the policy judges as it was at the start of the run")
        for role in self.config.judging.local_roles:
            if (trained := self.source / role).is_dir():
                model = self.config.models[role]
                said.append(
                    f"{model.key}.path: {role} was trained in this run, and judges again as it was at the start, "
                    f"{model.path}; for the trained one type {model.key}.path={trained}"
                )
        return said


def prepare_rejudging(config: RunConfig) -> PreparedRejudging:
    """Open the run's rollouts, find the models that judge, and check that they can read them. Raises ConfigError."""
    assert config.run_dir is not None
    source, config = Path(config.run_dir).parent.parent, without_adapters(config)
    check_judges_again(config)
    with section("run_dir: "):
        stored = open_stored(source, config.rejudge, config.seed)
    with section(""):
        check_sources(config.rewards, {prompt.source for prompt in stored.prompts})
    for judge in config.judging.generative.values():
        check_template(judge, stored.prompts)
    for name, judge in config.judging.judges.items():
        if judge.kind == "rule":
            with section("run_dir: "):
                check_references(judge, str(stored.run.rollouts), select_reaching(config, name, stored.prompts))
    prepared = find_judges(config, stored.prompts)
    data = Data(train=stored.prompts, held_out=())
    check_judges(config, prepared.roles, prepared.generating, data)
    check_scalar_judges(config, prepared.models, data)
    check_judges_without_model(config)
    return PreparedRejudging(prepared=prepared, stored=stored, source=source)


def check_judges_again(config: RunConfig) -> None:
    for judge in config.judging.judges.values():
        if judge.kind == "label":
            raise ConfigError(
                f"{judge.key}.kind: label is for a judge in training; type judge=generative, or another judge of texts"
            )
