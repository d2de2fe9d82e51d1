"""Questions that one word answers, for small pretrained models, and the reward of an answer. Pure: no model, no files.

Nothing that a held-out question asks about, and no answer to one, stands in a training question or answer.
"""

import random
from dataclasses import dataclass

from grmpipe.judge.kinds.rule import contains_reference
from grmpipe.tiny.problems import Split

TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
UNITS = ("", "-one", "-two", "-three", "-four", "-five", "-six", "-seven", "-eight", "-nine")
TEENS = (
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortQuestion:
    """kind: capital, opposite, plural, language or number."""

    question: str
    answer: str
    kind: str


def right_and_brief(response: str, reference: str) -> float:
    """The reward: 1 for the reference alone, half with one more word, a third with two; 0 without it."""
    if not contains_reference(response, reference):
        return 0.0
    return 1 / (1 + len(response.split()) - len(reference.split()))


def make_short_questions(split: Split) -> tuple[ShortQuestion, ...]:
    """All questions of a split, the kinds mixed, in the same order each time."""
    questions = [
        ShortQuestion(question=f"{question.format(asked)} Answer with one word.", answer=answer, kind=kind)
        for kind, (question, pairs) in QUESTIONS.items()
        for asked, answer in (pair.split() for pair in pairs[split].split(","))
    ]
    random.Random(split).shuffle(questions)
    return tuple(questions)


def spell(number: int) -> str:
    """A number from 10 to 99 in words."""
    tens, units = divmod(number, 10)
    return TEENS[units] if tens == 1 else TENS[tens - 2] + UNITS[units]


QUESTIONS: dict[str, tuple[str, dict[Split, str]]] = {
    "capital": (
        "What is the capital of {}?",
        {
            "train": (
                "Germany Berlin, Italy Rome, Portugal Lisbon, Austria Vienna, Hungary Budapest, Norway Oslo, "
                "Finland Helsinki, Belgium Brussels, Ukraine Kyiv, Egypt Cairo, Morocco Rabat, Iraq Baghdad, "
                "China Beijing, Vietnam Hanoi, Australia Canberra, Cuba Havana, Chile Santiago, Romania Bucharest, "
                "Serbia Belgrade, Nepal Kathmandu, Pakistan Islamabad, Nigeria Abuja, Senegal Dakar, Lebanon Beirut, "
                "Venezuela Caracas, Ecuador Quito, England London, Algeria Algiers, Libya Tripoli, Jamaica Kingston, "
                "Uganda Kampala, Sudan Khartoum, Latvia Riga, Qatar Doha"
            ),
            "held_out": (
                "France Paris, Spain Madrid, Greece Athens, Poland Warsaw, Ireland Dublin, Sweden Stockholm, "
                "Denmark Copenhagen, Russia Moscow, Turkey Ankara, Kenya Nairobi, Iran Tehran, Japan Tokyo, "
                "Thailand Bangkok, Indonesia Jakarta, Canada Ottawa, Peru Lima, Colombia Bogota, Bulgaria Sofia, "
                "Croatia Zagreb, Afghanistan Kabul, Bangladesh Dhaka, Ghana Accra, Syria Damascus, Jordan Amman, "
                "Uruguay Montevideo, Iceland Reykjavik, Scotland Edinburgh, Tunisia Tunis"
            ),
        },
    ),
    "opposite": (
        "What is the opposite of {}?",
        {
            "train": (
                "big small, left right, black white, open closed, high low, happy sad, hard soft, early late, "
                "clean dirty, thick thin, deep shallow, true false, buy sell, love hate, begin end, inside outside, "
                "more less, easy difficult, alive dead, sharp dull, north south, sweet sour, safe dangerous, "
                "summer winter, friend enemy, asleep awake, front back, public private, guilty innocent, "
                "arrive depart, attack defend, borrow lend, accept reject, ancient modern"
            ),
            "held_out": (
                "hot cold, up down, day night, good bad, fast slow, old young, rich poor, wet dry, full empty, "
                "strong weak, dark light, long short, loud quiet, win lose, push pull, war peace, first last, "
                "above below, before after, near far, cheap expensive, brave cowardly, wide narrow, east west, "
                "male female, question answer, smooth rough, always never"
            ),
        },
    ),
    "plural": (
        "What is the plural of {}?",
        {
            "train": (
                "mouse mice, tooth teeth, man men, goose geese, knife knives, life lives, city cities, "
                "story stories, box boxes, church churches, potato potatoes, hero heroes, half halves, thief thieves, "
                "country countries, cat cats, house houses, book books, car cars, river rivers, key keys, toy toys, "
                "monkey monkeys, class classes, watch watches, beach beaches, berry berries, fly flies, calf calves, "
                "ox oxen, person people, fox foxes, lake lakes, table tables"
            ),
            "held_out": (
                "child children, foot feet, woman women, leaf leaves, wife wives, wolf wolves, baby babies, "
                "party parties, bus buses, dish dishes, tomato tomatoes, shelf shelves, loaf loaves, lady ladies, "
                "family families, dog dogs, horse horses, tree trees, bird birds, apple apples, boy boys, "
                "glass glasses, brush brushes, match matches, cherry cherries, butterfly butterflies, scarf scarves, "
                "echo echoes"
            ),
        },
    ),
    "language": (
        "Which language do most people speak in {}?",
        {
            "train": (
                "Germany German, Italy Italian, Portugal Portuguese, Hungary Hungarian, Norway Norwegian, "
                "Finland Finnish, Ukraine Ukrainian, Egypt Arabic, China Chinese, Vietnam Vietnamese, "
                "Australia English, Romania Romanian"
            ),
            "held_out": (
                "France French, Spain Spanish, Greece Greek, Poland Polish, Sweden Swedish, Denmark Danish, "
                "Russia Russian, Turkey Turkish, Iran Persian, Japan Japanese, Thailand Thai, Indonesia Indonesian, "
                "Bulgaria Bulgarian, Croatia Croatian"
            ),
        },
    ),
    "number": (
        "What is {} in digits?",
        {
            "train": ", ".join(f"{spell(n)} {n}" for n in range(10, 100) if n % 3),
            "held_out": ", ".join(f"{spell(n)} {n}" for n in range(10, 100) if n % 3 == 0),
        },
    ),
}
