"""Rows of judgement benchmarks, by their fields. Each schema is a row of SCHEMAS."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grmpipe.config.keys.user_code import format_value, to_number
from grmpipe.data.prompts import parse_messages, parse_reference, parse_text
from grmpipe.data.rows import Row
from grmpipe.types import Labelled, Prompt, RankedResponses, ScoredResponse, mark_best

HELPFULNESS = (0, 4)  # the ends of HelpSteer's ratings
WINNERS = {"model_a": 0, "model_b": 1}
LABELS = {"A>B": 0, "B>A": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledRow:
    """A row and its place. name: prefix of its items' ids. scale: the ends of the judge's scale."""

    fields: Row
    where: str
    name: str
    scale: tuple[int, int]

    def wrong(self, field: str, expected: str, got: object) -> ValueError:
        return ValueError(f"{self.where}: {field}: expected {expected}, got {format_value(got)}")

    def text(self, field: str) -> str:
        if not isinstance(value := self.fields.get(field), str):
            raise self.wrong(field, "a text", value)
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        """A text, or a list of at least one text. An empty text is a response too."""
        value = self.fields[field]
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise self.wrong(field, "a text or a list of texts", value)
        return tuple(texts)

    def subset(self, field: str = "subset") -> str:
        return parse_text(self.fields, field, self.where, "")

    def messages(self, field: str, last: str = "assistant") -> list[dict[str, object]]:
        """The messages of a conversation, of which the last one has this role."""
        value = self.fields[field]
        if not isinstance(value, list) or not is_chat(value):
            raise self.wrong(field, "a list of {role, content}", value)
        found = [{key: message.get(key) for key in ("role", "content")} for message in value]
        for index, message in enumerate(found):
            if not isinstance(message["content"], str):
                raise self.wrong(f"{field}[{index}].content", "a text", message)
        if found[-1]["role"] != last:
            raise ValueError(
                f"{self.where}: {field}: its last message must have role {last}, got role {found[-1]['role']!r}"
            )
        return found

    def own_prompt(self) -> Prompt:
        return Prompt(
            prompt_id=parse_text(self.fields, "item_id", self.where, self.name),
            messages=parse_messages(self.fields, self.where),
            source=parse_text(self.fields, "source", self.where, ""),
            reference=parse_reference(self.fields, self.where),
        )

    def prompt(self, field: str = "prompt") -> Prompt:
        """The prompt of a benchmark: a text, or a conversation whose last message is the user's."""
        if field not in self.fields:
            raise ValueError(f"{self.where}: {field}: missing; its fields: {', '.join(self.fields) or 'none'}")
        return self.read_prompt(self.fields[field], field)

    def read_prompt(self, value: object, field: str) -> Prompt:
        as_ours = {"prompt" if isinstance(value, str) else "messages": value}
        try:
            return Prompt(prompt_id=self.name, messages=parse_messages(as_ours, self.where))
        except ValueError as error:
            raise ValueError(f"{error} (read from the field {field})") from error


Read = Callable[[LabelledRow], Sequence[Labelled]]  # empty for a row without a winner


def is_chat(value: object) -> bool:
    """Whether a value is a list of chat messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


# -- our own -------------------------------------------------------------------------------------------------------


def read_ranked(row: LabelledRow) -> Sequence[Labelled]:
    responses, best = row.texts("responses"), row.fields["best"]
    if len(responses) < 2:
        raise row.wrong("responses", "two or more", len(responses))
    if not isinstance(best, int) or isinstance(best, bool) or not 0 <= best < len(responses):
        raise row.wrong("best", f"an index into responses (0 to {len(responses) - 1})", best)
    prompt = row.own_prompt()
    return [
        RankedResponses(
            item_id=prompt.prompt_id,
            prompt=prompt,
            responses=responses,
            grades=mark_best(best, len(responses)),
            subset=row.subset(),
        )
    ]


def read_scored(row: LabelledRow) -> Sequence[Labelled]:
    score, (low, high) = row.fields["score"], row.scale
    if not isinstance(score, int | float) or not is_number(score) or not low <= score <= high or score != int(score):
        raise row.wrong("score", f"a whole number from {low} to {high}", score)
    prompt, response = row.own_prompt(), row.text("response")
    return [
        ScoredResponse(
            item_id=prompt.prompt_id, prompt=prompt, response=response, score=int(score), subset=row.subset()
        )
    ]


# -- two responses in the order of the row ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """The fields of a schema with two responses. best: reads the better one's index; None: the row has no winner."""

    texts: tuple[str, str]
    best: Callable[[LabelledRow], int | None]
    prompt: str = "prompt"
    subset: str = "subset"

    def __call__(self, row: LabelledRow) -> Sequence[Labelled]:
        best, responses = self.best(row), tuple(map(row.text, self.texts))
        if best is None:
            return ()
        prompt, subset = row.prompt(self.prompt), row.subset(self.subset)
        grades = mark_best(best, len(responses))
        return [RankedResponses(item_id=row.name, prompt=prompt, responses=responses, grades=grades, subset=subset)]


def by_winner(row: LabelledRow) -> int | None:
    """Ties (tie, tie (bothbad)) have no winner."""
    winner = row.text("winner")
    if winner not in WINNERS and not winner.startswith("tie"):
        raise row.wrong("winner", "model_a, model_b or tie", winner)
    return WINNERS.get(winner)


def by_label(row: LabelledRow) -> int:
    if (label := row.text("label")) not in LABELS:
        raise row.wrong("label", f"one of {', '.join(LABELS)}", label)
    return LABELS[label]


def by_sign(field: str) -> Callable[[LabelledRow], int | None]:
    """By the sign of HelpSteer's field: 0 (the first) below 0, 1 (the second) above 0."""

    def best(row: LabelledRow) -> int | None:
        strength = row.fields[field]
        if not isinstance(strength, int | float) or not is_number(strength):
            raise row.wrong(field, "a number, below 0 for the first", strength)
        return None if strength == 0 else int(strength > 0)

    return best


# -- the best first, then the others ---------------------------------------------------------------------------------


def best_first(texts: Sequence[str], prompt: Prompt, subset: str, item_id: str) -> RankedResponses:
    """A ranking whose first text is best: the others keep their order, the best moves to a place that its id
    decides.
    """
    best = random.Random(item_id).randrange(len(texts))
    responses = (*texts[1 : best + 1], texts[0], *texts[best + 1 :])
    grades = mark_best(best, len(texts))
    return RankedResponses(item_id=item_id, prompt=prompt, responses=responses, grades=grades, subset=subset)


def reward_bench(row: LabelledRow) -> Sequence[Labelled]:
    if is_chat(row.fields["chosen"]) or is_chat(row.fields["rejected"]):
        return chat_pair(row)
    wrong, right, prompt, subset = row.texts("rejected"), row.texts("chosen"), row.prompt(), row.subset()
    ids = [row.name] if len(right) == 1 else [f"{row.name}#{index}" for index in range(len(right))]
    return [best_first((best, *wrong), prompt, subset, item_id) for best, item_id in zip(right, ids, strict=True)]


def rm_bench(row: LabelledRow) -> Sequence[Labelled]:
    """An item per pair of a right and a wrong response. Both come in three styles, the plainest first: a pair is hard
    if the wrong one has the fancier style, easy if the right one has (arXiv 2410.16184). Other rows with these fields
    are read as RewardBench's.
    """
    styles = (row.fields["chosen"], row.fields["rejected"])
    if not all(isinstance(one, list) and len(one) == 3 and not is_chat(one) for one in styles):
        return reward_bench(row)
    right, wrong, prompt, domain = row.texts("chosen"), row.texts("rejected"), row.prompt(), row.subset("domain")
    if domain.startswith("safety"):  # safety-refuse and safety-response are one domain of the benchmark
        domain = "safety"
    return [
        best_first((best, other), prompt, f"{domain}/{difficulty(i, j)}", f"{row.name}#{i}{j}")
        for i, best in enumerate(right)
        for j, other in enumerate(wrong)
    ]


def difficulty(right_style: int, wrong_style: int) -> str:
    return "normal" if right_style == wrong_style else "hard" if right_style < wrong_style else "easy"


def chat_pair(row: LabelledRow) -> Sequence[Labelled]:
    """A preference between two conversations (TRL, UltraFeedback, HH as messages): each ends with the answer. What they
    begin with is the prompt; with a field `prompt` as messages, they follow it.
    """
    chosen, rejected = row.messages("chosen"), row.messages("rejected")
    if chosen[:-1] != rejected[:-1]:
        raise ValueError(
            f"{row.where}: chosen, rejected: expected two conversations that differ only in their last message"
        )
    history = chosen[:-1]
    if isinstance(row.fields.get("prompt"), list):
        given = row.messages("prompt", last="user")
        history = history if history[: len(given)] == given else [*given, *history]
    if not history:
        history = [{"role": "user", "content": row.text("prompt")}]
    texts = (str(chosen[-1]["content"]), str(rejected[-1]["content"]))
    return [best_first(texts, row.read_prompt(history, "history"), row.subset(), row.name)]


def ppe_correctness(row: LabelledRow) -> Sequence[Labelled]:
    """One item per pair of a right and a wrong response that the benchmark sampled."""
    scores, pairs = row.fields["scores"], row.fields["sampled_conflict_pairs"]
    if not isinstance(scores, list) or not isinstance(pairs, list):
        raise row.wrong("scores, sampled_conflict_pairs", "lists", (scores, pairs))
    prompt, subset, items = row.prompt(), row.subset("category"), []
    for index, pair in enumerate(pairs):
        field = f"sampled_conflict_pairs[{index}]"
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(i, int) for i in pair):
            raise row.wrong(field, "two indices", pair)
        if not all(0 <= i < len(scores) for i in pair):
            raise ValueError(f"{row.where}: {field}: outside scores, got {format_value(pair)}")
        truths = {i: read_truth(scores[i], row) for i in pair}
        right, wrong = sorted(pair, key=lambda i: truths[i], reverse=True)
        if truths[right] != truths[wrong]:
            texts = [row.text(f"response_{i + 1}") for i in (right, wrong)]
            items.append(best_first(texts, prompt, subset, f"{row.name}#{index}"))
    return items


def read_truth(score: object, row: LabelledRow) -> float:
    """Whether a response is right, as a number: PPE gives a number or a boolean, or a list of one."""
    if (truth := to_number(score[0] if isinstance(score, list) and score else score)) is None:
        raise row.wrong("scores", "numbers or booleans", score)
    return truth


def rmb_pair(row: LabelledRow) -> Sequence[Labelled]:
    return rmb(row, {"chosen": row.fields["chosen"], "reject": row.fields["reject"]})


def rmb_best_of_n(row: LabelledRow) -> Sequence[Labelled]:
    losers = row.fields["loser_list"]
    if not isinstance(losers, list) or not losers:
        raise row.wrong("loser_list", "a list of answers", losers)
    others = {f"loser_list[{index}]": loser for index, loser in enumerate(losers)}
    return rmb(row, {"bon_best": row.fields["bon_best"], **others})


def rmb(row: LabelledRow, answers: Mapping[str, object]) -> Sequence[Labelled]:
    """Its answers by their fields, the best first. The subset is for example Helpfulness/Code, from
    Pairwise_set/Helpfulness/Code/Documentation.
    """
    texts = []
    for field, value in answers.items():
        if not isinstance(value, Mapping) or not isinstance(value.get("answer"), str):
            raise row.wrong(field, "an object with a text `answer`", value)
        texts.append(str(value["answer"]))
    subset = "/".join(row.subset("category_path").split("/")[1:3])
    return [best_first(texts, row.prompt("conversation_input"), subset, row.name)]


def help_steer(row: LabelledRow) -> Sequence[Labelled]:
    rating, (worst, best), (low, high) = row.fields["helpfulness"], HELPFULNESS, row.scale
    if not isinstance(rating, int | float) or not is_number(rating) or not worst <= rating <= best:
        raise row.wrong("helpfulness", f"a number from {worst} to {best}", rating)
    score = low + (rating - worst) / (best - worst) * (high - low)
    return [ScoredResponse(item_id=row.name, prompt=row.prompt(), response=row.text("response"), score=score)]


HELP_STEER3 = Preference(
    texts=("response1", "response2"), best=by_sign("overall_preference"), prompt="context", subset="domain"
)
HELP_STEER2 = Preference(texts=("response_1", "response_2"), best=by_sign("preference_strength"))
PPE_HUMAN = Preference(texts=("response_1", "response_2"), best=by_winner, subset="language")
JUDGE_BENCH = Preference(texts=("response_A", "response_B"), best=by_label, prompt="question", subset="source")
# The most specific fields first: many datasets have a prompt and a response.
SCHEMAS: tuple[tuple[str, frozenset[str], Read], ...] = (
    ("RMB best of n", frozenset({"conversation_input", "bon_best", "loser_list"}), rmb_best_of_n),
    ("RMB pairs", frozenset({"conversation_input", "chosen", "reject"}), rmb_pair),
    ("HelpSteer3 preference", frozenset({"context", "response1", "response2", "overall_preference"}), HELP_STEER3),
    ("HelpSteer2 preference", frozenset({"response_1", "response_2", "preference_strength"}), HELP_STEER2),
    ("PPE correctness", frozenset({"response_1", "scores", "sampled_conflict_pairs"}), ppe_correctness),
    ("PPE human preference", frozenset({"response_1", "response_2", "winner"}), PPE_HUMAN),
    ("JudgeBench", frozenset({"question", "response_A", "response_B", "label"}), JUDGE_BENCH),
    ("grmpipe ranked", frozenset({"responses", "best"}), read_ranked),
    ("grmpipe scored", frozenset({"response", "score"}), read_scored),
    ("RM-Bench", frozenset({"prompt", "chosen", "rejected", "domain"}), rm_bench),
    ("RewardBench", frozenset({"prompt", "chosen", "rejected"}), reward_bench),
    ("preference between chats", frozenset({"chosen", "rejected"}), chat_pair),
    ("HelpSteer", frozenset({"prompt", "response", "helpfulness"}), help_steer),
)
FIELDS = frozenset().union(  # that a schema may read
    *(fields for _, fields, _ in SCHEMAS), {"messages", "reference", "item_id", "subset", "source", "category_path"}
)
# The schemas that most people mean, if a row has no field of any.
USUAL = ("RewardBench", "grmpipe ranked")
EXAMPLES = (
    'a line looks like {"prompt": "6 x 7?", "responses": ["42", "43"], "best": 0} '
    'or {"prompt": "6 x 7?", "response": "43", "score": 1}'
)


def read_labels(row: LabelledRow) -> Sequence[Labelled]:
    """The items of a row, by its fields: one file may hold ranked and scored items. ValueError names what is
    missing.
    """
    known = row.fields.keys()
    for _, fields, read in SCHEMAS:
        if fields <= known:
            return read(row)
    by_likeness = sorted(SCHEMAS, key=lambda one: (-len(one[1] & known) / len(one[1]), one[0] not in USUAL))
    lacking = (f"to be read as {name} it lacks {', '.join(sorted(fields - known))}" for name, fields, _ in by_likeness)
    raise ValueError(
        f"{row.where}: its fields ({', '.join(known) or 'none'}) are no known kind of labels: {next(lacking)}; "
        f"{next(lacking)}; rename its columns, or add them; {EXAMPLES}; known schemas: "
        f"{', '.join(name for name, _, _ in SCHEMAS)}"
    )
