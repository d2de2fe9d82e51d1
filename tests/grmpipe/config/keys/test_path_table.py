"""Tables of names: each row leads to an existing object, and a user's own value is a dotted path."""

from __future__ import annotations

import pytest
import torch
from configs import judge_config

from grmpipe.algorithm.corrections import OffPolicyDrift
from grmpipe.algorithm.objective import Objective
from grmpipe.algorithm.parts import AGGREGATIONS
from grmpipe.config.judge import JudgeConfig, Scale
from grmpipe.config.judge_tables import PARSERS, RULES, VOTES
from grmpipe.config.keys.path_table import PathTable
from grmpipe.config.train import AlgorithmConfig
from grmpipe.judge.kinds.rule import rule_named
from grmpipe.judge.parse import Form, parser_named
from grmpipe.judge.votes import vote_named


def halved(drift: OffPolicyDrift, algorithm: AlgorithmConfig) -> torch.Tensor:
    return torch.full_like(drift.log_weights_T, 0.5)


def kept(drift: OffPolicyDrift, algorithm: AlgorithmConfig) -> torch.Tensor:
    return torch.ones_like(drift.sequence_lengths_S, dtype=torch.bool)


def always(text: str, reference: str) -> bool:
    return True


def alone(text: str) -> str:
    return text


ARROW = Form(line=lambda number, scale, num_scores: f"=> {number}")


@pytest.mark.parametrize("table", (VOTES, PARSERS, RULES), ids=lambda table: table.key)
def test_every_row_leads_to_what_takes_its_arguments(table: PathTable) -> None:
    for path in table.values():
        table.check_path(path)


def test_rows_without_arguments_are_aggregations_and_forms() -> None:
    for name in AGGREGATIONS:
        assert AGGREGATIONS.find_object(name).weigh(torch.ones(2), torch.tensor([2])).shape == (2,)
    for name in PARSERS:
        assert PARSERS.find_object(name, Form).line("7", Scale(), 1)


def test_custom_object_is_found_by_its_dotted_path() -> None:
    drift = OffPolicyDrift(
        log_weights_T=torch.zeros(2),
        log_behind_T=torch.zeros(2),
        advantages_T=torch.ones(2),
        loss_mask_T=torch.ones(2),
        sequence_lengths_S=torch.tensor([2]),
    )
    assert Objective.of(AlgorithmConfig(correction=f"{__name__}.halved")).correct(drift).tolist() == [0.5, 0.5]
    judge = JudgeConfig(
        rule=f"{__name__}.always", parser=f"{__name__}.ARROW", vote="statistics.fmean", template="mine.jinja"
    )
    assert rule_named(judge.rule)("no", "yes") and vote_named(judge.vote)([1, 2]) == 1.5
    assert parser_named(judge.parser)("a thought\n=> 7", 1, Scale()) == (7,)


def test_a_part_that_another_machine_lacks_is_refused_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = AlgorithmConfig(correction=f"{__name__}.halved", rejections=[f"{__name__}.kept"])
    Objective.of(algorithm)
    monkeypatch.delitem(globals(), "kept")
    with pytest.raises(ValueError, match=r"^algorithm\.rejections: .* has no kept"):
        Objective.of(algorithm)
    monkeypatch.delitem(globals(), "halved")
    with pytest.raises(ValueError, match=r"^algorithm\.correction: .* has no halved"):
        Objective.of(algorithm)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rule", "similar", "unknown value 'similar'; known: exact_answer, .*; or the dotted path of one of yours"),
        ("vote", "max", "unknown value 'max'; known: mean, sum, median, majority, weighted, best; or "),
        ("rule", f"{__name__}.alone", r"must be a function that takes \(text, reference\)"),
        ("rule", f"{__name__}.nowhere", "has no nowhere"),
        ("parser", "nowhere.FORM", "nowhere can't be imported"),
    ],
)
def test_name_without_a_row_or_a_dotted_path_is_refused_by_its_key(key: str, value: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: .*{words}"):
        judge_config(**{key: value})  # type: ignore[arg-type]


def test_a_path_to_something_else_is_refused_where_it_is_used() -> None:
    with pytest.raises(ValueError, match=r"^judge\.parser: .* is no Form"):
        PARSERS.find_object(f"{__name__}.always", Form)
    with pytest.raises(ValueError, match=r"^algorithm\.aggregation: .* is no Aggregation"):
        AGGREGATIONS.find_object(f"{__name__}.always")
