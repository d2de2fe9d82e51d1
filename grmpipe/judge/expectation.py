"""Scores by tokens: the mean over the likely tokens in the place of a score (G-Eval, arXiv 2303.16634), instead of the
one that was sampled. Pure.

Each likely token is put in the place of the sampled one, and the judgement is parsed again: what parses is a candidate,
in any form of verdict, and counts by its probability among the candidates. So a score must be one token.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from grmpipe.config.judge import JudgeConfig
from grmpipe.judge.parse import Form, Scores, Unparseable
from grmpipe.models.types import Completion

TOP_LOGPROBS = 20  # the most that OpenAI, and vLLM by default, return
WINDOW = 8  # tokens before a place with which its likely tokens are decoded: some tokenizers strip a leading space
CLOSING = " \t\r\n]})>.*_\"'"
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlace:
    """A sampled token in a text, and the likely tokens in its place.

    start, end: its characters.
    likely: what each would write, the sampled one included, and its log-prob in the distribution that was sampled from.
    """

    start: int
    end: int
    likely: tuple[tuple[str, float], ...]


def find_place(completion: Completion, at: int, decode: Decode | None) -> TokenPlace | None:
    """The token that wrote the character `at` of a completion's text. None if its likely tokens aren't known, or if the
    tokens aren't those of the text.

    decode: token ids as text; None for an engine that returns no ids.
    """
    if completion.top is None:
        return None
    return _place_by_bytes(completion, at) if decode is None else _place_by_ids(completion, at, decode)


def _place_by_ids(completion: Completion, at: int, decode: Decode) -> TokenPlace | None:
    top, ids = completion.top, completion.token_ids
    assert top is not None and top.ids_TK is not None
    index = bisect_right(range(len(ids)), at, key=lambda last: len(decode(ids[: last + 1])))
    place = index - len(ids) + len(top.ids_TK)
    before, until = decode(ids[:index]), decode(ids[: index + 1])
    if place < 0 or index == len(ids) or not until.startswith(before) or not completion.text.startswith(before):
        return None
    window = ids[max(0, index - WINDOW) : index]
    shown = len(decode(window))
    likely = dict(zip(top.ids_TK[place].tolist(), top.logprobs_TK[place].tolist(), strict=True))
    return TokenPlace(
        start=len(before),
        end=len(until),
        likely=tuple((decode([*window, token_id])[shown:], logprob) for token_id, logprob in likely.items()),
    )


def _place_by_bytes(completion: Completion, at: int) -> TokenPlace | None:
    """The tokens may have a thought before the text, or only the end of it, and white space around it."""
    top, text = completion.top, completion.text.encode("utf-8", "replace")
    assert top is not None
    whole = b"".join(row[0] for row in top.bytes_TK)
    shift = whole.rfind(text)  # bytes of the tokens before the text
    if shift < 0:
        shift = len(whole) - len(whole.lstrip()) - text.rfind(whole.strip())
        if whole.strip() not in text:
            return None
    target, end = shift + len(completion.text[:at].encode("utf-8", "replace")), 0
    for row, logprobs_K in zip(top.bytes_TK, top.logprobs_TK.tolist(), strict=True):
        start, end = end, end + len(row[0])
        if start <= target < end:
            likely = dict(zip(row, logprobs_K[: len(row)], strict=True))
            return TokenPlace(
                start=len(text[: max(0, start - shift)].decode("utf-8", "replace")),
                end=len(text[: end - shift].decode("utf-8", "replace")),
                likely=tuple((token.decode("utf-8", "replace"), logprob) for token, logprob in likely.items()),
            )
    return None


def expect_scores(
    parse: Callable[[str], Scores | Unparseable],
    text: str,
    temperature: float,
    find: Callable[[int], TokenPlace | None],
    since: int = 0,
) -> Scores | Unparseable:
    """The expected scores of a judgement that parses; unparseable if the log-probs aren't those of its tokens. Of
    several scores each is expected given the sampled ones before it.

    temperature: that of the sample. The probabilities are the model's own, at temperature 1 and without a grammar:
    among the candidates p is proportional to q^temperature, where q was sampled from. A greedy q is at temperature 1.
    find: the token that wrote a character of the text.
    since: where the characters begin that the judge wrote.
    """
    sampled = parse(text)
    assert not isinstance(sampled, str)
    expected, fixed = list(sampled), set(range(len(sampled)))  # scores of which no other candidate was seen
    begin, at = max(since, _find_verdict(parse, text, sampled)), len(text.rstrip()) - 1
    while at >= begin and fixed:
        place = find(at)
        if place is None:
            return "unparseable"
        candidates = list(_read_candidates(parse, text, place, sampled))
        weights = _weigh([logprob for _, logprob in candidates], temperature)
        for index in range(len(sampled)):
            if any(scores[index] != sampled[index] for scores, _ in candidates):
                fixed.discard(index)
                mean = math.fsum(w * scores[index] for w, (scores, _) in zip(weights, candidates, strict=True))
                expected[index] += mean - sampled[index]
        at = place.start - 1
    return tuple(expected)


def _find_verdict(parse: Callable[[str], Scores | Unparseable], text: str, sampled: Scores) -> int:
    """Where the lines begin that hold the verdict: the last ones that give its scores."""
    begin = len(text)
    while (begin := text.rfind("\n", 0, begin)) >= 0:
        if parse(text[begin + 1 :]) == sampled:
            return begin + 1
    return 0


def _read_candidates(
    parse: Callable[[str], Scores | Unparseable], text: str, place: TokenPlace, sampled: Scores
) -> Iterator[tuple[Scores, float]]:
    """The scores that a judgement would have with each likely token in a place, and that token's log-prob. None for a
    place that doesn't matter: signs, and words that other ones could replace.
    """
    token, before, after = text[place.start : place.end], text[: place.start], text[place.end :]
    if not _has_words(token) or parse(f"{before}\0{after}") == sampled:
        return
    closing = token[len(token.rstrip(CLOSING)) :]  # which may come in further tokens
    for other, logprob in place.likely:
        if not _has_words(other) or not math.isfinite(logprob):
            continue
        for rest in dict.fromkeys((after, closing + after)):
            scores = parse(before + other + rest)
            if not isinstance(scores, str):
                yield scores, logprob
                break


def _has_words(text: str) -> bool:
    return any(map(str.isalnum, text))


def _weigh(logprobs: Sequence[float], temperature: float) -> list[float]:
    """Shares of a whole by their log-probs in a sample at this temperature; 0: at temperature 1."""
    powers = [math.exp((temperature or 1.0) * (logprob - max(logprobs))) for logprob in logprobs]
    return [power / math.fsum(powers) for power in powers]


def check_expectation(judge: JudgeConfig, form: Form, split: Callable[[str], Sequence[str]] | None) -> None:
    """Check that each score of the judge is one token. Raises ValueError, which begins with `score_from`.

    split: a verdict -> the texts of its tokens; None for an endpoint, whose tokenizer isn't known.
    """
    if judge.score_from != "expectation":
        return
    by_text = "or type judge.score_from=text"
    if (form.decimals or form.halves or judge.scale.has_halves) and not form.words:
        raise ValueError(
            f"score_from: {judge.parser} reads decimals, which are several tokens; take a template and parser of whole "
            f"numbers, such as judge=pointwise, {by_text}"
        )
    for verdict in form.words or map(str, range(judge.scale.low, judge.scale.high + 1)):
        way_out = f"take a model with a token for it, {by_text}"
        if not form.words:
            way_out = f"type judge.scale.low=1 judge.scale.high=9, {by_text}"
        if not verdict.isalnum() or (split is not None and verdict not in map(str.strip, split(verdict))):
            raise ValueError(f"score_from: {verdict} is several tokens of {judge.model}; {way_out}")
        if split is None and not form.words and len(verdict) > 1:
            raise ValueError(
                f"score_from: an endpoint's tokenizer isn't known, and {verdict} may be several tokens; {way_out}"
            )
