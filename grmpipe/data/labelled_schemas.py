"""Rows of labels, by their fields: people's own, and those of judgement benchmarks. Each kind is a row of SCHEMAS."""

import difflib
import json
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from grmpipe.config.keys.user_code import format_value, to_number
from grmpipe.data.prompts import parse_messages, parse_reference, parse_text
from grmpipe.data.rows import Row, parse_cell
from grmpipe.types import Labelled, Prompt, RankedResponses, ScoredResponse, mark_best

LARGEST = 1e15  # of grades: below it sums of several raters' whole grades are exact
HELPFULNESS = (0, 4)  # the ends of HelpSteer's ratings
FIRST = ("a", "1", "model_a", "response_a", "response_1", "first", "left", "a>b")
SECOND = ("b", "2", "model_b", "response_b", "response_2", "second", "right", "b>a")
TIES = ("tie", "tied", "equal", "same", "draw", "both", "neither", "a=b", "tie (bothbad)")
YES = ("true", "1", "yes", "y", "right", "correct", "good", "pass", "passed")
NO = ("false", "0", "no", "n", "wrong", "incorrect", "bad", "fail", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledRow:
    """A row and its place.

    name:        the id of its item, or the prefix of its items' ids.
    scale:       the ends of the judge's scale.
    score_range: those of the scale of the file's scores; None: the judge's.
    """

    fields: Row
    where: str
    name: str
    scale: tuple[int, int]
    score_range: tuple[float, float] | None = None

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
            prompt_id=self.name,
            messages=parse_messages(self.fields, self.where),
            source=parse_text(self.fields, "source", self.where, ""),
            reference=parse_reference(self.fields, self.where),
        )

    def read_word(self, field: str) -> str:
        """A value as a word: a text in small letters, a number or a boolean as text."""
        value = self.fields[field]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return str(value).strip().casefold() if isinstance(value, str | int) else ""

    def stretch(self, field: str, ends: tuple[float, float]) -> float:
        """A number between these ends, stretched to the judge's scale."""
        value, (worst, best), (low, high) = parse_cell(self.fields[field]), ends, self.scale
        if not isinstance(value, int | float) or not is_number(value) or not worst <= value <= best:
            raise self.wrong(field, f"a number from {worst:g} to {best:g}", value)
        return value if (worst, best) == (low, high) else low + (value - worst) / (best - worst) * (high - low)

    def prompt(self, field: str = "prompt") -> Prompt:
        """The prompt of a benchmark: a text, or a conversation whose last message is the user's."""
        if field not in self.fields:
            raise ValueError(f"{self.where}: {field}: missing; its fields: {', '.join(self.fields) or 'none'}")
        return self.read_prompt(self.fields[field], field)

    def read_prompt(self, value: object, field: str) -> Prompt:
        as_ours = {"prompt" if isinstance(value, str) else "messages": value}
        source, reference = parse_text(self.fields, "source", self.where, ""), parse_reference(self.fields, self.where)
        try:
            messages = parse_messages(as_ours, self.where)
            return Prompt(prompt_id=self.name, messages=messages, source=source, reference=reference)
        except ValueError as error:
            raise ValueError(f"{error} (read from the field {field})") from error


Read = Callable[[LabelledRow], Sequence[Labelled]]  # empty for a row that says nothing of which is better


def is_chat(value: object) -> bool:
    """Whether a value is a list of chat messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


# -- our own -------------------------------------------------------------------------------------------------------


def read_best(row: LabelledRow) -> Sequence[Labelled]:
    responses, best = row.texts("responses"), row.fields["best"]
    if not isinstance(best, int) or isinstance(best, bool) or not 0 <= best < len(responses):
        raise row.wrong("best", f"an index into responses (0 to {len(responses) - 1})", best)
    return read_graded(row, mark_best(best, len(responses)))


def read_grades(row: LabelledRow) -> Sequence[Labelled]:
    """A number per response, the higher the better."""
    return read_graded(row, read_numbers(row, "grades"))


def read_ranking(row: LabelledRow) -> Sequence[Labelled]:
    """A rank per response, 1 for the best; equal ones are ties."""
    ranks = read_numbers(row, "ranking")
    if min(ranks) != 1:
        raise row.wrong("ranking", "the rank of each response, 1 for the best", row.fields["ranking"])
    return read_graded(row, tuple(-rank for rank in ranks))


def read_numbers(row: LabelledRow, field: str) -> tuple[float, ...]:
    """A number per response."""
    value, count = row.fields[field], len(row.texts("responses"))
    found = [one for one in value if is_number(one)] if isinstance(value, list) else []
    if not isinstance(value, list) or len(found) != len(value) or len(value) != count:
        raise row.wrong(field, f"{count} numbers, one per response", value)
    if not all(abs(one) <= LARGEST for one in found):
        raise row.wrong(field, f"numbers up to {LARGEST:g}", value)
    return tuple(map(float, found))


def read_graded(row: LabelledRow, grades: tuple[float, ...]) -> Sequence[Labelled]:
    responses = row.texts("responses")
    if len(responses) < 2:
        raise row.wrong("responses", "two or more", len(responses))
    prompt, subset = row.own_prompt(), row.subset()
    return [RankedResponses(item_id=row.name, prompt=prompt, responses=responses, grades=grades, subset=subset)]


def read_scored(row: LabelledRow) -> Sequence[Labelled]:
    try:
        score = row.stretch("score", row.score_range or row.scale)
    except ValueError as error:
        raise ValueError(f"{error}; a scale of your own is data.labels.score_range=[lowest, highest]") from None
    prompt, response = row.own_prompt(), row.text("response")
    return [ScoredResponse(item_id=row.name, prompt=prompt, response=response, score=score, subset=row.subset())]


def read_right(field: str, response: str = "response") -> Read:
    """A reader of single responses that are right or wrong."""

    def read(row: LabelledRow) -> Sequence[Labelled]:
        if (word := row.read_word(field)) not in (*YES, *NO):
            raise row.wrong(field, "true or false, 1 or 0, yes or no, good or bad, pass or fail", row.fields[field])
        text = row.messages(response)[-1]["content"] if is_chat(row.fields[response]) else row.text(response)
        prompt, score = row.own_prompt(), row.scale[word in YES]
        return [
            ScoredResponse(
                item_id=row.name, prompt=prompt, response=str(text), score=score, subset=row.subset(), is_yes_no=True
            )
        ]

    return read


# -- two responses in the order of the row ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """The fields of a schema with two responses. best: reads the better one's index; None: a tie."""

    texts: tuple[str, str]
    best: Callable[[LabelledRow], int | None]
    prompt: str = ""
    subset: str = "subset"

    def __call__(self, row: LabelledRow) -> Sequence[Labelled]:
        best, responses = self.best(row), tuple(map(row.text, self.texts))
        prompt = row.prompt(self.prompt) if self.prompt else row.own_prompt()
        grades = (0.0, 0.0) if best is None else mark_best(best, 2)
        subset = row.subset(self.subset)
        return [RankedResponses(item_id=row.name, prompt=prompt, responses=responses, grades=grades, subset=subset)]


def by_word(field: str) -> Callable[[LabelledRow], int | None]:
    def best(row: LabelledRow) -> int | None:
        word = row.read_word(field)
        found = next((place for place, words in enumerate((FIRST, SECOND, TIES)) if word in words), None)
        if found is None:
            raise row.wrong(field, "A, B or tie; or 1, 2; or model_a, model_b; or A>B, B>A", row.fields[field])
        return found if found < 2 else None

    return best


def by_sign(field: str) -> Callable[[LabelledRow], int | None]:
    """By the sign of HelpSteer's field: 0 (the first) below 0, 1 (the second) above 0, a tie at 0."""

    def best(row: LabelledRow) -> int | None:
        strength = row.fields[field]
        if not isinstance(strength, int | float) or not is_number(strength):
            raise row.wrong(field, "a number, below 0 for the first", strength)
        return None if strength == 0 else int(strength > 0)

    return best


# -- the best first, then the others ---------------------------------------------------------------------------------


def best_first(texts: Sequence[str], row: LabelledRow, prompt: Prompt, subset: str, item_id: str) -> RankedResponses:
    """A ranking whose first text is best, unless the row says that it is a tie: the others keep their order, the best
    moves to a place that its id decides.
    """
    best = random.Random(item_id).randrange(len(texts))
    responses = (*texts[1 : best + 1], texts[0], *texts[best + 1 :])
    is_tie = any(field in row.fields and row.read_word(field) in TIES for field in ("preference", "winner"))
    grades = (0.0,) * len(texts) if is_tie else mark_best(best, len(texts))
    return RankedResponses(item_id=item_id, prompt=prompt, responses=responses, grades=grades, subset=subset)


def reward_bench(row: LabelledRow) -> Sequence[Labelled]:
    """One item. Several right answers (RewardBench 2, Ties) share the highest grade; there the id that the benchmark
    gives (ref:3, tied:3) says which items its measure puts together (allenai/reward-bench, rewardbench/utils.py,
    process_single_model).
    """
    if is_chat(row.fields["chosen"]) or is_chat(row.fields["rejected"]):
        return chat_pair(row)
    wrong, right, prompt, subset = row.texts("rejected"), row.texts("chosen"), row.prompt(), row.subset()
    item_id = parse_text(row.fields, "id", row.where, row.name) if subset == "Ties" else row.name
    if len(right) == 1:
        return [best_first((*right, *wrong), row, prompt, subset, item_id)]
    graded = [*((text, 1.0) for text in right), *((text, 0.0) for text in wrong)]
    responses, grades = zip(*random.Random(item_id).sample(graded, len(graded)), strict=True)
    return [RankedResponses(item_id=item_id, prompt=prompt, responses=responses, grades=grades, subset=subset)]


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
        best_first((best, other), row, prompt, f"{domain}/{difficulty(i, j)}", f"{row.name}#{i}{j}")
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
    return [best_first(texts, row, row.read_prompt(history, "history"), row.subset(), row.name)]


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
            items.append(best_first(texts, row, prompt, subset, f"{row.name}#{index}"))
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
    """Its answers by their fields, the best first. The subset is for example Pairwise_set/Helpfulness/Code, from
    Pairwise_set/Helpfulness/Code/Documentation.
    """
    texts = []
    for field, value in answers.items():
        if not isinstance(value, Mapping) or not isinstance(value.get("answer"), str):
            raise row.wrong(field, "an object with a text `answer`", value)
        texts.append(str(value["answer"]))
    subset = "/".join(row.subset("category_path").split("/")[:3])
    return [best_first(texts, row, row.prompt("conversation_input"), subset, row.name)]


def plan_reward_bench(row: LabelledRow) -> Sequence[Labelled]:
    """Two trajectories, each written down as one text, as its own judge prompt shows them. The subset is the file's
    name, as planning_multi_hard.
    """
    texts = []
    for field in ("chosen", "reject"):
        value = row.fields[field]
        messages = value.get("messages") if isinstance(value, Mapping) else value
        if not is_chat(messages) or not isinstance(messages, list):
            raise row.wrong(field, "an object with `messages`, a list of {role, content}", value)
        texts.append(
            "\n\n".join(f"[{i}] {str(one.get('role')).upper()}: {one.get('content')}" for i, one in enumerate(messages))
        )
    tools = json.dumps(row.fields.get("tools") or [], ensure_ascii=False)
    prompt = row.read_prompt(f"{row.text('query')}\n\nTools: {tools}", "query")
    subset = row.subset() or row.name.partition(".")[0].removesuffix("_unified")
    return [best_first(texts, row, prompt, subset, row.name)]


def help_steer(row: LabelledRow) -> Sequence[Labelled]:
    score = row.stretch("helpfulness", HELPFULNESS)
    return [ScoredResponse(item_id=row.name, prompt=row.prompt(), response=row.text("response"), score=score)]


HELP_STEER3 = Preference(
    texts=("response1", "response2"), best=by_sign("overall_preference"), prompt="context", subset="domain"
)
HELP_STEER2 = Preference(texts=("response_1", "response_2"), best=by_sign("preference_strength"), prompt="prompt")
PPE_HUMAN = Preference(texts=("response_1", "response_2"), best=by_word("winner"), prompt="prompt", subset="language")
JUDGE_BENCH = Preference(texts=("response_A", "response_B"), best=by_word("label"), prompt="question", subset="source")
PAIR = Preference(texts=("response_a", "response_b"), best=by_word("preference"))
# The most specific fields first: many datasets have a prompt and a response.
SCHEMAS: tuple[tuple[str, frozenset[str], Read], ...] = (
    ("RMB best of n", frozenset({"conversation_input", "bon_best", "loser_list"}), rmb_best_of_n),
    ("RMB pairs", frozenset({"conversation_input", "chosen", "reject"}), rmb_pair),
    ("Plan-RewardBench", frozenset({"query", "chosen", "reject"}), plan_reward_bench),
    ("HelpSteer3 preference", frozenset({"context", "response1", "response2", "overall_preference"}), HELP_STEER3),
    ("HelpSteer2 preference", frozenset({"response_1", "response_2", "preference_strength"}), HELP_STEER2),
    ("PPE correctness", frozenset({"response_1", "scores", "sampled_conflict_pairs"}), ppe_correctness),
    ("PPE human preference", frozenset({"response_1", "response_2", "winner"}), PPE_HUMAN),
    ("JudgeBench", frozenset({"question", "response_A", "response_B", "label"}), JUDGE_BENCH),
    ("pairs", frozenset({"response_a", "response_b", "preference"}), PAIR),
    ("best of several", frozenset({"responses", "best"}), read_best),
    ("grades", frozenset({"responses", "grades"}), read_grades),
    ("ranked lists", frozenset({"responses", "ranking"}), read_ranking),
    ("scores", frozenset({"response", "score"}), read_scored),
    ("yes or no", frozenset({"response", "right"}), read_right("right")),
    ("yes or no, as label", frozenset({"response", "label"}), read_right("label")),
    ("TRL unpaired preference", frozenset({"completion", "label"}), read_right("label", "completion")),
    ("RM-Bench", frozenset({"prompt", "chosen", "rejected", "domain"}), rm_bench),
    ("chosen and rejected", frozenset({"prompt", "chosen", "rejected"}), reward_bench),
    ("preference between chats", frozenset({"chosen", "rejected"}), chat_pair),
    ("HelpSteer", frozenset({"prompt", "response", "helpfulness"}), help_steer),
)
FIELDS = frozenset().union(  # that a schema may read
    *(fields for _, fields, _ in SCHEMAS),
    {
        "messages",
        "reference",
        "item_id",
        "subset",
        "source",
        "category_path",
        "id",
        "tools",
        "rater",
        "ratings",
        "criterion",
    },
)
LABELS = frozenset(  # fields that hold a label, not what it is about
    {"best", "grades", "helpfulness", "label", "overall_preference", "preference", "preference_strength", "ranking"}
    | {"right", "score", "winner"}
)
VALUES = LABELS | {"messages", "responses", "ratings"}  # fields that are no texts
# The kinds that most people mean, the likeliest first.
USUAL = ("chosen and rejected", "scores", "best of several", "yes or no", "pairs", "grades")
EXAMPLES = (
    'a line looks like {"prompt": "6 x 7?", "responses": ["42", "43"], "best": 0} '
    'or {"prompt": "6 x 7?", "response": "43", "score": 1}'
)
# What people call our fields, the likeliest first.
OTHER_NAMES = {
    "prompt": ("instruction", "question", "query", "input", "problem", "context"),
    "chosen": ("good", "preferred", "better", "accepted", "positive", "best_response", "win"),
    "rejected": ("bad", "dispreferred", "worse", "negative", "worst_response", "lose"),
    "response": ("answer", "output", "completion", "reply", "generation", "text"),
    "responses": ("answers", "outputs", "completions", "replies", "generations", "candidates"),
    "response_a": ("answer_a", "output_a", "response_1", "answer_1", "output_1", "a"),
    "response_b": ("answer_b", "output_b", "response_2", "answer_2", "output_2", "b"),
    "score": ("rating", "grade", "mark", "points", "stars", "quality"),
    "right": ("correct", "is_correct", "is_right", "passed", "verdict"),
    "preference": ("winner", "vote", "choice", "better", "preferred"),
    "best": ("best_index", "best_of", "winner_index"),
    "grades": ("scores", "marks"),
    "ranking": ("ranks", "rank"),
}  # fmt: skip


def read_labels(row: LabelledRow, columns: Mapping[str, str]) -> Sequence[Labelled]:
    """The items of a row, by its fields: one file may hold ranked and scored items. ValueError names what is
    missing, and the line to type.
    """
    known = row.fields.keys()
    for _, fields, read in SCHEMAS:
        if fields <= known:
            return read(row)
    guesses = {name: guess_columns(fields, known) for name, fields, _ in SCHEMAS}
    places = {name: place for place, name in enumerate(USUAL)}
    by_likeness = sorted(
        SCHEMAS,
        key=lambda one: (
            -len(guesses[one[0]].keys() - {"prompt"}) / len(one[1] - {"prompt"}),  # which nearly all have
            places.get(one[0], len(USUAL)),
            -len(one[1]),
        ),
    )
    lacking = [f"to be read as {name} it lacks {', '.join(sorted(one - known))}" for name, one, _ in by_likeness[:2]]
    fields = by_likeness[0][1]
    needed = fields | ({"prompt"} if not known & {"messages", "prompt"} and "question" not in fields else set())
    found = {**columns, **{field: guess_columns(needed, known).get(field, "<column>") for field in needed - known}}
    line = ", ".join(f"{field}: {column}" for field, column in sorted(found.items()))
    raise ValueError(
        f"{row.where}: its fields ({', '.join(known) or 'none'}) are no known kind of labels: {'; '.join(lacking)}; "
        f"type 'data.columns={{{line}}}' with the names of its columns, or rename them; {EXAMPLES}; known kinds: "
        f"{', '.join(name for name, _, _ in SCHEMAS)}"
    )


def guess_columns(fields: Collection[str], known: Collection[str]) -> dict[str, str]:
    """Field -> the column that probably holds it: of the same name, of one that people use for it, or a slip of it.
    Fields without one aren't there.
    """
    found = {field: field for field in fields if field in known}
    for field in sorted(set(fields) - found.keys()):
        free = {name.casefold(): name for name in known if name not in found.values()}
        names = (field, *OTHER_NAMES.get(field, ()))
        near = difflib.get_close_matches(field, free, n=1, cutoff=0.75)
        if meant := next((name for name in (*names, *near) if name in free), None):
            found[field] = free[meant]
    return found
