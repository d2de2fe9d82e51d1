"""Rows of judgement benchmarks, by their fields. Each schema is a function and a row of SCHEMAS; opens no file."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grmpipe.data.prompts import Row, messages_of, reference_of, shown, text_of
from grmpipe.types import Labelled, Prompt, RankedResponses, ScoredResponse

HELPFULNESS = (0, 4)  # the ends of HelpSteer's ratings
WINNERS = {"model_a": 0, "model_b": 1}
LABELS = {"A>B": 0, "B>A": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldPlace:
    """The place of a row. name: prefix of its items' ids. scale: the ends of the judge's scale."""

    where: str
    name: str
    scale: tuple[int, int]


Read = Callable[[Row, FieldPlace], Sequence[Labelled]]  # empty for a row without a winner


def ranked_row(row: Row, place: FieldPlace) -> Sequence[Labelled]:
    responses = texts_of(row, "responses", place)
    best = row["best"]
    if len(responses) < 2:
        raise ValueError(f"{place.where}: responses: expected two or more, got {len(responses)}")
    if not isinstance(best, int) or isinstance(best, bool) or not 0 <= best < len(responses):
        raise ValueError(
            f"{place.where}: best: expected an index into responses (0 to {len(responses) - 1}), got {best!r}"
        )
    prompt = own_prompt(row, place)
    return (
        RankedResponses(
            item_id=prompt.prompt_id,
            prompt=prompt,
            responses=responses,
            best=best,
            subset=subset_of(row, "subset", place),
        ),
    )


def scored_row(row: Row, place: FieldPlace) -> Sequence[Labelled]:
    score, (low, high) = row["score"], place.scale
    if not isinstance(score, int | float) or isinstance(score, bool) or score != int(score) or not low <= score <= high:
        raise ValueError(f"{place.where}: score: expected a whole number from {low} to {high}, got {shown(score)}")
    prompt = own_prompt(row, place)
    return (
        ScoredResponse(
            item_id=prompt.prompt_id,
            prompt=prompt,
            response=text_at(row, "response", place),
            score=int(score),
            subset=subset_of(row, "subset", place),
        ),
    )


def reward_bench_row(row: Row, place: FieldPlace) -> Sequence[Labelled]:
    if is_chat(row["chosen"]) or is_chat(row["rejected"]):
        return chat_pair(row, place)
    rejected = texts_of(row, "rejected", place)
    right = texts_of(row, "chosen", place)
    prompt, subset = prompt_at(row, "prompt", place), subset_of(row, "subset", place)
    return tuple(
        first_is_best((best, *rejected), prompt, subset, f"{place.name}#{index}" if len(right) > 1 else place.name)
        for index, best in enumerate(right)
    )


def rm_bench_row(row: Row, place: FieldPlace) -> Sequence[Labelled]:
    """An item per pair of a right and a wrong response. Both come in three styles, the plainest first: a pair is hard
    if the wrong one has the fancier style, easy if the right one has (arXiv 2410.16184). Other rows with these fields
    are read as RewardBench's.
    """
    styles = (row["chosen"], row["rejected"])
    if not all(isinstance(one, list) and len(one) == 3 and not is_chat(one) for one in styles):
        return reward_bench_row(row, place)
    right, wrong = texts_of(row, "chosen", place), texts_of(row, "rejected", place)
    prompt, domain = prompt_at(row, "prompt", place), subset_of(row, "domain", place)
    if domain.startswith("safety"):  # safety-refuse and safety-response are one domain of the benchmark
        domain = "safety"
    return tuple(
        first_is_best((best, other), prompt, f"{domain}/{difficulty(i, j)}", f"{place.name}#{i}{j}")
        for i, best in enumerate(right)
        for j, other in enumerate(wrong)
    )


def difficulty(right_style: int, wrong_style: int) -> str:
    return "normal" if right_style == wrong_style else "hard" if right_style < wrong_style else "easy"


def chat_pair(row: Row, place: FieldPlace) -> Sequence[Labelled]:
    """A preference between two conversations (TRL, UltraFeedback, HH as messages): each ends with the answer. What they
    begin with is the prompt; with a field `prompt` as messages, they follow it.
    """
    chosen, rejected = messages_at(row, "chosen", place), messages_at(row, "rejected", place)
    if chosen[:-1] != rejected[:-1]:
        raise ValueError(
            f"{place.where}: chosen, rejected: expected two conversations that differ only in their last message"
        )
    history = chosen[:-1]
    if isinstance(row.get("prompt"), list):
        given = messages_at(row, "prompt", place, last="user")
        history = history if history[: len(given)] == given else [*given, *history]
    if not history:
        history = [{"role": "user", "content": text_at(row, "prompt", place)}]
    prompt = prompt_at({"history": history}, "history", place)
    texts = (str(chosen[-1]["content"]), str(rejected[-1]["content"]))
    return (first_is_best(texts, prompt, subset_of(row, "subset", place), place.name),)


def is_chat(value: object) -> bool:
    """Whether a value is a list of chat messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)


def messages_at(row: Row, field: str, place: FieldPlace, last: str = "assistant") -> list[dict[str, object]]:
    """The messages of a conversation, of which the last one has this role."""
    value = row[field]
    if not isinstance(value, list) or not is_chat(value):
        raise ValueError(f"{place.where}: {field}: expected a list of {{role, content}}, got {shown(value)}")
    found = [{key: message.get(key) for key in ("role", "content")} for message in value]
    for index, message in enumerate(found):
        if not isinstance(message["content"], str):
            raise ValueError(f"{place.where}: {field}[{index}].content: expected a text, got {shown(message)}")
    if found[-1]["role"] != last:
        raise ValueError(
            f"{place.where}: {field}: its last message must have role {last}, got role {found[-1]['role']!r}"
        )
    return found


def ppe_correctness_row(row: Row, place: FieldPlace) -> Sequence[Labelled]:
    """One item per pair of a right and a wrong response that the benchmark sampled."""
    scores, pairs = row["scores"], row["sampled_conflict_pairs"]
    if not isinstance(scores, list) or not isinstance(pairs, list):
        raise ValueError(f"{place.where}: scores, sampled_conflict_pairs: expected lists, got {shown((scores, pairs))}")
    prompt, subset = prompt_at(row, "prompt", place), subset_of(row, "category", place)
    items = []
    for index, pair in enumerate(pairs):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(i, int) for i in pair):
            raise ValueError(f"{place.where}: sampled_conflict_pairs[{index}]: expected two indices, got {shown(pair)}")
        if not all(0 <= i < len(scores) for i in pair):
            raise ValueError(f"{place.where}: sampled_conflict_pairs[{index}]: outside scores, got {shown(pair)}")
        right, wrong = sorted(pair, key=lambda i: truth_of(scores[i], place), reverse=True)
        if truth_of(scores[right], place) == truth_of(scores[wrong], place):
            continue
        texts = tuple(text_at(row, f"response_{i + 1}", place) for i in (right, wrong))
        items.append(first_is_best(texts, prompt, subset, f"{place.name}#{index}"))
    return tuple(items)


def ppe_human_row(row: Row, place: FieldPlace) -> Sequence[Labelled]:
    """One item. Ties (tie, tie (bothbad)) have no winner."""
    winner = text_at(row, "winner", place)
    if winner not in WINNERS and not winner.startswith("tie"):
        raise ValueError(f"{place.where}: winner: expected model_a, model_b or tie, got {winner!r}")
    return paired(row, ("response_1", "response_2"), WINNERS.get(winner), "prompt", "language", place)


def judge_bench_row(row: Row, place: FieldPlace) -> Sequence[Labelled]:
    label = text_at(row, "label", place)
    if label not in LABELS:
        raise ValueError(f"{place.where}: label: expected one of {', '.join(LABELS)}, got {label!r}")
    return paired(row, ("response_A", "response_B"), LABELS[label], "question", "source", place)


def help_steer3_row(row: Row, place: FieldPlace) -> Sequence[Labelled]:
    best = preferred(row, "overall_preference", place)
    return paired(row, ("response1", "response2"), best, "context", "domain", place)


def help_steer2_pair_row(row: Row, place: FieldPlace) -> Sequence[Labelled]:
    best = preferred(row, "preference_strength", place)
    return paired(row, ("response_1", "response_2"), best, "prompt", "subset", place)


def help_steer_row(row: Row, place: FieldPlace) -> Sequence[Labelled]:
    rating, (worst, best), (low, high) = row["helpfulness"], HELPFULNESS, place.scale
    if not isinstance(rating, int | float) or not worst <= rating <= best:
        raise ValueError(f"{place.where}: helpfulness: expected a number from {worst} to {best}, got {shown(rating)}")
    return (
        ScoredResponse(
            item_id=place.name,
            prompt=prompt_at(row, "prompt", place),
            response=text_at(row, "response", place),
            score=round(low + (rating - worst) / (best - worst) * (high - low)),
        ),
    )


def rmb_pair_row(row: Row, place: FieldPlace) -> Sequence[Labelled]:
    texts = (answer_of(row["chosen"], "chosen", place), answer_of(row["reject"], "reject", place))
    return (first_is_best(texts, prompt_at(row, "conversation_input", place), rmb_subset(row, place), place.name),)


def rmb_best_of_n_row(row: Row, place: FieldPlace) -> Sequence[Labelled]:
    losers = row["loser_list"]
    if not isinstance(losers, list) or not losers:
        raise ValueError(f"{place.where}: loser_list: expected a list of answers, got {shown(losers)}")
    texts = (
        answer_of(row["bon_best"], "bon_best", place),
        *(answer_of(loser, f"loser_list[{index}]", place) for index, loser in enumerate(losers)),
    )
    return (first_is_best(texts, prompt_at(row, "conversation_input", place), rmb_subset(row, place), place.name),)


# The most specific fields first: many datasets have a prompt and a response.
SCHEMAS: tuple[tuple[str, frozenset[str], Read], ...] = (
    ("RMB best of n", frozenset({"conversation_input", "bon_best", "loser_list"}), rmb_best_of_n_row),
    ("RMB pairs", frozenset({"conversation_input", "chosen", "reject"}), rmb_pair_row),
    ("HelpSteer3 preference", frozenset({"context", "response1", "response2", "overall_preference"}), help_steer3_row),
    ("HelpSteer2 preference", frozenset({"response_1", "response_2", "preference_strength"}), help_steer2_pair_row),
    ("PPE correctness", frozenset({"response_1", "scores", "sampled_conflict_pairs"}), ppe_correctness_row),
    ("PPE human preference", frozenset({"response_1", "response_2", "winner"}), ppe_human_row),
    ("JudgeBench", frozenset({"question", "response_A", "response_B", "label"}), judge_bench_row),
    ("grmpipe ranked", frozenset({"responses", "best"}), ranked_row),
    ("grmpipe scored", frozenset({"response", "score"}), scored_row),
    ("RM-Bench", frozenset({"prompt", "chosen", "rejected", "domain"}), rm_bench_row),
    ("RewardBench", frozenset({"prompt", "chosen", "rejected"}), reward_bench_row),
    ("preference between chats", frozenset({"chosen", "rejected"}), chat_pair),
    ("HelpSteer", frozenset({"prompt", "response", "helpfulness"}), help_steer_row),
)
EXAMPLES = (
    'a line looks like {"prompt": "6 x 7?", "responses": ["42", "43"], "best": 0} '
    'or {"prompt": "6 x 7?", "response": "43", "score": 1}'
)


def reader_of(row: Row, where: str) -> Read:
    """The reader of a row, by its fields: one file may hold ranked and scored items. ValueError names what is
    missing.
    """
    for _, fields, read in SCHEMAS:
        if fields <= row.keys():
            return read
    name, fields, _ = max(SCHEMAS, key=lambda schema: len(schema[1] & row.keys()) / len(schema[1]))
    lacking = ", ".join(sorted(fields - row.keys()))
    raise ValueError(
        f"{where}: {lacking}: missing, to be read as {name}; its fields: {', '.join(row) or 'none'}; {EXAMPLES}; "
        f"known schemas: {', '.join(name for name, _, _ in SCHEMAS)}"
    )


# -- fields --------------------------------------------------------------------------------------------------------


def own_prompt(row: Row, place: FieldPlace) -> Prompt:
    return Prompt(
        prompt_id=text_of(row, "item_id", place.where, place.name),
        messages=messages_of(row, place.where),
        source=text_of(row, "source", place.where, ""),
        reference=reference_of(row, place.where),
    )


def prompt_at(row: Row, field: str, place: FieldPlace) -> Prompt:
    """The prompt of a benchmark: a text, or a conversation whose last message is the user's."""
    if field not in row:
        raise ValueError(f"{place.where}: {field}: missing; its fields: {', '.join(row) or 'none'}")
    as_ours = {"prompt" if isinstance(row[field], str) else "messages": row[field]}
    try:
        return Prompt(prompt_id=place.name, messages=messages_of(as_ours, place.where))
    except ValueError as error:
        raise ValueError(f"{error} (read from the field {field})") from error


def paired(
    row: Row, fields: tuple[str, str], best: int | None, prompt: str, subset: str, place: FieldPlace
) -> Sequence[Labelled]:
    """Two responses in the order of the row. Empty without a winner."""
    texts = tuple(text_at(row, field, place) for field in fields)
    if best is None:
        return ()
    return (
        RankedResponses(
            item_id=place.name,
            prompt=prompt_at(row, prompt, place),
            responses=texts,
            best=best,
            subset=subset_of(row, subset, place),
        ),
    )


def first_is_best(texts: tuple[str, ...], prompt: Prompt, subset: str, item_id: str) -> RankedResponses:
    """A ranking whose first text is best: the others keep their order, the best moves to a place that its id
    decides.
    """
    best = random.Random(item_id).randrange(len(texts))
    responses = (*texts[1 : best + 1], texts[0], *texts[best + 1 :])
    return RankedResponses(item_id=item_id, prompt=prompt, responses=responses, best=best, subset=subset)


def preferred(row: Row, field: str, place: FieldPlace) -> int | None:
    """The preferred response by the sign of HelpSteer's field: 0 (the first) below 0, 1 (the second) above 0."""
    strength = row[field]
    if not isinstance(strength, int | float) or isinstance(strength, bool) or strength != strength:
        raise ValueError(f"{place.where}: {field}: expected a number, below 0 for the first, got {shown(strength)}")
    return None if strength == 0 else int(strength > 0)


def truth_of(score: object, place: FieldPlace) -> float:
    """Whether a response is right, as a number: PPE gives a number or a boolean, or a list of one."""
    value = score[0] if isinstance(score, list) and score else score
    if not isinstance(value, bool | int | float):
        raise ValueError(f"{place.where}: scores: expected numbers or booleans, got {shown(score)}")
    return float(value)


def answer_of(value: object, field: str, place: FieldPlace) -> str:
    if not isinstance(value, Mapping) or not isinstance(value.get("answer"), str):
        raise ValueError(f"{place.where}: {field}: expected an object with a text `answer`, got {shown(value)}")
    return str(value["answer"])


def texts_of(row: Row, field: str, place: FieldPlace) -> tuple[str, ...]:
    """A text, or a list of at least one text. An empty text is a response too."""
    value = row[field]
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{place.where}: {field}: expected a text or a list of texts, got {shown(value)}")
    return tuple(texts)


def text_at(row: Row, field: str, place: FieldPlace) -> str:
    value = row.get(field)
    if not isinstance(value, str):
        raise ValueError(f"{place.where}: {field}: expected a text, got {shown(value)}")
    return value


def subset_of(row: Row, field: str, place: FieldPlace) -> str:
    return text_of(row, field, place.where, "")


def rmb_subset(row: Row, place: FieldPlace) -> str:
    """The subset, for example Helpfulness/Code from Pairwise_set/Helpfulness/Code/Documentation."""
    return "/".join(subset_of(row, "category_path", place).split("/")[1:3])
