"""task=calibrate: an evaluation of a judge against labels, half of which then make its calibration."""

import json
from collections.abc import Iterator
from dataclasses import fields, replace

import msgspec
from rich.table import Table

from grmpipe.config.io.key_errors import section
from grmpipe.config.run_config import ConfigError, RunConfig
from grmpipe.evaluation.evaluation_files import show_figures, table
from grmpipe.evaluation.fit_calibration import CalibrationResult, Reliability, fit_calibration
from grmpipe.evaluation.judged_items import JudgedItem
from grmpipe.judge.calibration import CALIBRATION
from grmpipe.observe.plain_json import plain
from grmpipe.run.build.start import Running
from grmpipe.run.prepare import describe_own_judge
from grmpipe.run.tasks.evaluate import EvaluationRun
from grmpipe.run.tasks.prepare_evaluation import PreparedEvaluation, prepare_evaluation
from grmpipe.types import Metrics

MEANING = {
    "score": "the label's score, as a share of the scale",
    "right": "the probability that the response is right",
    "better": "the probability that the response is better than another one",
}


def prepare_calibration(config: RunConfig) -> PreparedEvaluation:
    """Raises ConfigError for what no single map of rewards can calibrate."""
    if config.evaluate.what != "judge":
        raise ConfigError(f"evaluate.what: task=calibrate measures a judge, not {config.evaluate.what}; leave it out")
    judge, *others = config.judging.judges.values()
    if others:
        raise ConfigError(
            "reward.kind: task=calibrate calibrates one judge, and this reward asks "
            f"{', '.join(config.judging.judges)}; type reward=single reward.judge=<one of them>"
        )
    if judge.calibration is not None:
        raise ConfigError(f"{judge.key}.calibration: task=calibrate makes a new one; type {judge.key}.calibration=null")
    if config.calibrate.length and judge.compares_pairs:
        raise ConfigError("calibrate.length: is for rewards of single responses, not of pairs; leave it out")
    with section(f"{judge.key}."):
        replace(judge, calibration=CALIBRATION)  # whether it could have one
    return prepare_evaluation(config)


class CalibrationRun(EvaluationRun):
    """Judges all items, then fits and measures."""

    _result: CalibrationResult | None = None

    async def _measure_judge(self, running: Running) -> list[JudgedItem]:
        file = self._run_dir / CALIBRATION
        file.unlink(missing_ok=True)  # of a calibration here before
        judged = await super()._measure_judge(running)
        judge, settings = self._config.main_judge, self._config.calibrate
        known = [one for one in judged if one.outage is None]
        described = describe_own_judge(self._prepared.prepared, judge)
        self._result = result = fit_calibration(known, judge, described, settings, self._config.seed)
        figures = {field.name: getattr(result, field.name) for field in fields(result) if field.name != "calibration"}
        written = msgspec.to_builtins(result.calibration) | {"measured": figures}
        file.write_text(json.dumps(plain(written), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        notes = [*list_notes(result, settings.false_positive_rate), f"to use it type {judge.key}.calibration={file}"]
        show_figures(self._run_dir, make_tables(result), notes)
        return judged

    @property
    def _judge_metrics(self) -> Metrics:
        result = self._result
        if result is None:
            return super()._judge_metrics
        found = {
            "calibration_error_before": result.before.error.mean,
            "calibration_error": result.after.error.mean,
            "squared_error_before": result.before.squared_error,
            "squared_error": result.after.squared_error,
        }
        return super()._judge_metrics | found


# -- what is shown -----------------------------------------------------------------------------------------------------


def make_tables(result: CalibrationResult) -> list[Table]:
    measured = {"as it says": result.before, "calibrated": result.after}
    heads = ("expected error", "95 %", "squared error", "slope by log length")
    rows = [(name, format_row(one)) for name, one in measured.items()]
    curves = [
        table(
            "mean reward", f"reliability, {name}", ("mean label", "responses"),
            [(f"{found.reward:.3f}", (f"{found.label:.3f}", str(found.count))) for found in one.curve],
        )
        for name, one in measured.items()
    ]  # fmt: skip
    return [table("rewards", "rewards against labels, both from 0 to 1", heads, rows), *curves]


def format_row(one: Reliability) -> Iterator[str]:
    yield f"{one.error.mean:.3f}"
    yield f"{max(0.0, one.error.low):.3f}-{one.error.high:.3f}"
    yield f"{one.squared_error:.3f}"
    yield "-" if one.length_slope is None else f"{one.length_slope:+.3f}"


def list_notes(result: CalibrationResult, false_positive_rate: float) -> Iterator[str]:
    calibration = result.calibration
    yield (
        f"a calibrated reward is {MEANING[calibration.target]}: fitted to {result.num_fitted} responses, measured on "
        f"{result.num_measured} to other prompts"
    )
    if result.num_failed:
        yield f"without a verdict: {result.num_failed} responses, which are in no figure; a failed verdict stays failed"
    if result.num_other:
        yield f"not fitted to: {result.num_other} ranked responses, beside labels of single ones"
    if result.label_slope is not None:
        slope = "slope by log length: what one unit adds within the responses to a prompt"
        yield f"{slope}; of the labels {result.label_slope:+.3f}, by the length term {-calibration.length_slope:+.3f}"
    if (found := result.threshold) is not None:
        shares = [f"{one.mean:.1%} ({one.low:.1%}-{one.high:.1%})" for one in (found.false_positives, found.recall)]
        yield (
            f"threshold: from a reward of {found.reward:.4g} on at most {false_positive_rate:.1%} of wrong responses "
            f"pass; measured {shares[0]}, of right ones {shares[1]}"
        )
    elif calibration.target == "right":
        yield f"threshold: none; more than {false_positive_rate:.1%} of wrong responses get the highest reward"
