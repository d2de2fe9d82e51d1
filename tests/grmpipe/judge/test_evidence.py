"""What a judge quotes as evidence, in the forms that models write, and whether the response has it."""

import time

import pytest

from grmpipe.judge.evidence import find_fault, is_quoted, normalise, read_quotes

POEM = "Roses are red,\nviolets — they’re **blue**;\n“so” it goes."


@pytest.mark.parametrize(
    "said",
    [
        'Evidence 2: "Roses are red"',
        "evidence 2: “roses are red”",
        "**Evidence #2** — „Roses are red“",
        'Evidence for criterion 2: "Roses are red".',
        '[Evidence 2] - "Roses are red" (the first line)',
        "Quote (2)： 「Roses are red」",
        '- Quote 2: "Roses [...] blue"',
        'Evidence 2: "Roses" (…) "red"',
        'Evidence 1, 2: "Roses are red"',
        'Evidence 2:\n\n"Roses are red"',
        "Evidence 2:\n> Roses are red,\n> violets",
        'Evidence 2: "Roses are red,\nviolets - they\'re blue"',
        'Evidence 2: "Roses are red,\\nviolets"',
        'Evidence 2: "\\"so\\" it goes"',
        'Criterion 1: no.\nEvidence: none\n\nCriterion 2: it rhymes.\nEvidence: "Roses are red"',
        '1. Not short.\n   Evidence: n/a\n2. It rhymes.\n   **Quote:** "Roses are red"',
    ],
)
def test_quotes_are_read_as_models_write_them(said: str) -> None:
    quotes = read_quotes(f"{said}\n\\boxed{{1, 10}}", 2)
    assert not find_fault(quotes.get(2, ()), POEM), quotes


@pytest.mark.parametrize(
    "said",
    [
        'Evidence: "Roses are red"',  # of which criterion?
        '1. It has lines.\n1. It rhymes.\n2. It is short.\nEvidence: "Roses are red"',  # not numbered by criterion
        '2. It rhymes.\nEvidence: "Roses are red"',
        'Evidence 1: "Roses are red"',
        'Evidence 2: "Tulips ... red"',
        'Evidence 2: "red ... Roses"',
        "Evidence 2: none",
        "Evidence 2:\n\\boxed{1, 10}",
        '> Evidence 2: "Roses are red"',  # a line of the response
        'The evidence 2: "Roses are red"',
        'Evidence 2: "Roses are red"\nQuote 2: "Tulips"',
    ],
)
def test_a_quote_that_is_unclear_is_none(said: str) -> None:
    assert find_fault(read_quotes(f"{said}\n\\boxed{{1, 10}}", 2).get(2, ()), POEM)


def test_no_text_of_a_judge_takes_long_to_read() -> None:
    began_s = time.perf_counter()
    for run in (" ", "* ", ". ", "9", '"', "1, ", "…", "Evidence 1: ", "\n"):
        for before in ("Evidence", "Evidence 1", 'Evidence 1: "', "Criterion", "1"):
            read_quotes(f"{before}{run * 20_000}x", 2)
    assert time.perf_counter() - began_s < 5


def test_the_only_criterion_of_a_call_needs_no_number() -> None:
    assert read_quotes('It rhymes.\nEvidence: "red"', 1) == {1: ['"red"']}


def test_quotes_are_compared_without_white_space_and_typography() -> None:
    assert is_quoted('"a  b\u00a0c"', normalise("A\u200b b\nc")) and not is_quoted('"a b"', normalise("a c b"))
    assert not is_quoted('"-5"', normalise("5")) and not is_quoted("", normalise("anything"))
