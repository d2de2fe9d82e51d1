"""Scores by tokens: the mean over the likely tokens in the place of a score (G-Eval, arXiv 2303.16634), instead of the
one that was sampled. Pure.

Each likely token is put in the place of the sampled one, and the judgement is parsed again: what parses is a candidate,
in any form of verdict, and counts by its probability among the candidates. So a score must be one token.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from grmpipe.config.judge import JudgeConfig, Scale
from grmpipe.judge.parse import Form, Scores, find_groups, scores_in
from grmpipe.models.types import Completion

TOP_LOGPROBS = 20  # the most that OpenAI, and vLLM by default, return
WINDOW = 8  # tokens before a place with which its likely tokens are decoded: some tokenizers strip a leading space
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
    """Some endpoints strip the text, or return the tokens of a thought before it too."""
    top, text = completion.top, completion.text
    assert top is not None
    whole = b"".join(row[0] for row in top.bytes_TK)
    offset = whole.rfind(text.encode("utf-8", "replace"))
    target, end = offset + len(text[:at].encode("utf-8", "replace")), 0
    if offset < 0:
        return None
    for row, logprobs_K in zip(top.bytes_TK, top.logprobs_TK.tolist(), strict=True):
        start, end = end, end + len(row[0])
        if start <= target < end:
            likely = dict(zip(row, logprobs_K[: len(row)], strict=True))
            return TokenPlace(
                start=len(whole[offset : max(start, offset)].decode("utf-8", "replace")),
                end=len(whole[offset:end].decode("utf-8", "replace")),
                likely=tuple((token.decode("utf-8", "replace"), logprob) for token, logprob in likely.items()),
            )
    return None


def expect_scores(
    form: Form,
    text: str,
    num_scores: int,
    scale: Scale,
    temperature: float,
    find: Callable[[int], TokenPlace | None],
) -> Scores | str:
    """The expected scores of a judgement that parses, or why there are none. Of several scores each is expected given
    the sampled ones before it.

    temperature: that of the sample. The probabilities are the model's own, at temperature 1 and without a grammar:
    among the candidates p is proportional to q^temperature, where q was sampled from. A greedy q is at temperature 1.
    find: the token that wrote a character of the text.
    """
    sampled = scores_in(form, text, num_scores, scale)
    groups = find_groups(form, text, num_scores, scale)
    assert not isinstance(sampled, str)
    expected = list(sampled)
    for start, end in groups:
        place = find(start)
        if place is None:
            return f"the log-probs aren't those of its score {text[start:end]!r}"
        if end > place.end:
            return (
                f"its score {text[start:end]!r} takes several tokens, and judge.score_from=expectation reads one; type "
                "judge.score_from=text, or a judge.scale of one digit"
            )
        candidates = list(_read_candidates(form, text, end, num_scores, scale, place))
        most = max(logprob for _, logprob in candidates)
        weights = [math.exp((temperature or 1.0) * (logprob - most)) for _, logprob in candidates]
        for index in range(num_scores):
            mean = math.fsum(w * scores[index] for w, (scores, _) in zip(weights, candidates, strict=True))
            expected[index] += mean / math.fsum(weights) - sampled[index]
    return tuple(expected) if groups else "its score isn't found in its text"


def _read_candidates(
    form: Form, text: str, end: int, num_scores: int, scale: Scale, place: TokenPlace
) -> Iterator[tuple[Scores, float]]:
    """The scores that a judgement would have with each likely token in a place, and that token's log-prob. end: of the
    score; what else its token wrote (a bracket) may come in further tokens.
    """
    for token, logprob in place.likely:
        if not token.strip() or not math.isfinite(logprob):
            continue
        for rest in dict.fromkeys((text[place.end :], text[end:])):
            other = text[: place.start] + token + rest
            scores = scores_in(form, other, num_scores, scale)
            if isinstance(scores, str):
                continue
            groups = find_groups(form, other, num_scores, scale)
            if any(place.start <= start < place.start + len(token) for start, _ in groups):
                yield scores, logprob
                break


def check_expectation(judge: JudgeConfig, form: Form, decode_number: Callable[[int], Sequence[str]] | None) -> None:
    """Check that each score of the judge's scale is one token. Raises ValueError, which begins with `score_from`.

    decode_number: a number -> the texts of its tokens; None for an endpoint, whose tokenizer isn't known.
    """
    if judge.score_from != "expectation" or "\0" not in form.line("\0", judge.scale, form.num_scores or 1):
        return
    if form.decimals or form.halves:
        raise ValueError(
            f"score_from: {judge.parser} reads decimals, which are several tokens; type judge.score_from=text, or a "
            "template and parser of whole numbers, such as judge=pointwise"
        )
    for score in range(judge.scale.low, judge.scale.high + 1):
        if decode_number is None and len(str(score)) > 1:
            raise ValueError(
                f"score_from: an endpoint's tokenizer isn't known, and {score} may be several tokens; type "
                "judge.scale.low=1 judge.scale.high=9, or judge.score_from=text"
            )
        if decode_number is not None and str(score) not in map(str.strip, decode_number(score)):
            raise ValueError(
                f"score_from: {score} is several tokens of {judge.model}; type judge.scale.low=1 judge.scale.high=9, "
                "or judge.score_from=text"
            )
