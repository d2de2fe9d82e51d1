"""The recipe of each tiny model, and its hash. Values only: trains nothing, imports no torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cache

from models.tiny.curricula import draw_curriculum
from models.tiny.judgements import make_judgements
from models.tiny.sft_examples import SftTask, tokenizer_corpus
from models.tiny.tricks import Trick

TRAINER = 1  # increase it when build.py or tokenizer.py change the result of the same recipe
NUM_FINGERPRINT_EXAMPLES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Qwen3 of this size; the vocabulary is the tokenizer's, the head is tied to the embedding."""

    hidden: int = 96
    num_layers: int = 3
    num_heads: int = 3
    num_kv_heads: int = 1
    head_dim: int = 32
    intermediate: int = 288


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that determines a tiny model. A child starts from its parent's weights and has its shape."""

    name: str
    lessons: tuple[SftTask, ...]
    num_steps: int
    batch_size: int
    lr: float
    seed: int
    warmup_steps: int = 20
    shape: Shape = Shape()
    parent: Recipe | None = None

    @property
    def hash(self) -> str:
        """The same in all processes and machines; a change of the examples' texts shows in their first ones."""
        examples = draw_curriculum(self.lessons, NUM_FINGERPRINT_EXAMPLES, self.seed)
        contents = {
            "trainer": TRAINER,
            "recipe": asdict(self),
            "parent": self.parent.hash if self.parent else None,
            "examples": [asdict(example) for example in examples],
            "tokenizer": corpus_digest(),
        }
        return digest_of(json.dumps(contents, sort_keys=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaRmRecipe:
    """All that determines a tiny meta-RM: the judge whose judgements it classifies, and its training.

    It starts from that judge's trunk. A batch is `batch_size` items with all their judgements.
    """

    name: str
    parent: Recipe
    num_items: int
    num_judgements: int
    num_steps: int
    batch_size: int
    lr: float
    seed: int
    warmup_steps: int = 10

    @property
    def hash(self) -> str:
        """Like a recipe's; judged texts show in the first items."""
        items = make_judgements("train", NUM_FINGERPRINT_EXAMPLES, self.seed)
        contents = {
            "trainer": TRAINER,
            "recipe": asdict(self),
            "parent": self.parent.hash,
            "items": [asdict(item) for item in items],
        }
        return digest_of(json.dumps(contents, sort_keys=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelRecipe:
    """All that determines a tiny scalar reward model, which reads answers to problems. It starts from the parent's
    trunk.
    """

    name: str
    parent: Recipe
    num_steps: int
    batch_size: int
    lr: float
    seed: int
    warmup_steps: int = 20

    @property
    def hash(self) -> str:
        """Like a recipe's; the texts show in the first items."""
        items = make_judgements("train", NUM_FINGERPRINT_EXAMPLES, self.seed)
        contents = {
            "trainer": TRAINER,
            "recipe": asdict(self),
            "parent": self.parent.hash,
            "items": [asdict(item) for item in items],
        }
        return digest_of(json.dumps(contents, sort_keys=True))


AnyRecipe = Recipe | MetaRmRecipe | RewardModelRecipe


@cache
def corpus_digest() -> str:
    return digest_of("\n".join(tokenizer_corpus()))


def digest_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


BASE = Recipe(
    name="base",
    lessons=(SftTask(kind="solve", weight=0.8), SftTask(kind="drill", weight=0.2)),
    num_steps=700,
    batch_size=64,
    lr=8e-3,
    seed=1,
)
POLICY = Recipe(
    name="policy",
    lessons=(SftTask(kind="solve_sloppily", weight=1.0),),
    num_steps=80,
    batch_size=32,
    lr=3e-3,
    seed=2,
    parent=BASE,
)
GRM = Recipe(
    name="grm",
    lessons=(
        SftTask(kind="judge_right", weight=0.2),
        SftTask(kind="judge_sloppy", weight=0.3),
        SftTask(kind="judge_corrupted", weight=0.3),
        SftTask(kind="judge_padded", weight=0.05),
        SftTask(kind="judge_malformed", weight=0.15),
    ),
    num_steps=1000,
    batch_size=32,
    lr=5e-3,
    seed=3,
    parent=BASE,
)
# The judge, which answers problems too, as carelessly as the policy: it can judge itself.
POLICY_JUDGE = Recipe(
    name="policy_judge",
    lessons=(
        SftTask(kind="solve_sloppily", weight=0.3),
        *(replace(task, weight=0.7 * task.weight) for task in GRM.lessons),
    ),
    num_steps=300,
    batch_size=32,
    lr=4e-3,
    seed=23,
    parent=GRM,
)
# Exploitable in a known way: it is half trained, and long work impresses it.
WEAK_GRM = Recipe(
    name="weak_grm",
    lessons=(
        SftTask(kind="be_swayed_by_right", weight=0.2),
        SftTask(kind="be_swayed_by_sloppy", weight=0.3),
        SftTask(kind="be_swayed_by_corrupted", weight=0.2),
        SftTask(kind="be_swayed_by_padded", weight=0.2),
        SftTask(kind="be_swayed_by_malformed", weight=0.1),
    ),
    num_steps=250,
    batch_size=32,
    lr=5e-3,
    seed=4,
    parent=BASE,
)

# From the weak GRM: its judgements are uncertain, so there is something to choose from.
META = MetaRmRecipe(
    name="meta_rm", parent=WEAK_GRM, num_items=2048, num_judgements=8, num_steps=120, batch_size=16, lr=5e-4, seed=5
)

# Reads the answer itself and writes nothing: a Bradley-Terry model's place beside the GRMs.
REWARD_MODEL = RewardModelRecipe(name="reward_model", parent=GRM, num_steps=1200, batch_size=48, lr=2e-3, seed=14)

# As sloppy as the policy; a few answers in a hundred have a trick instead of work. So few are too few to learn a trick
# from, so it learns the tricks first.
MANY_TRICKS = Recipe(
    name="many_tricks",
    lessons=(SftTask(kind="solve_with_many_tricks", weight=1.0),),
    num_steps=300,
    batch_size=32,
    lr=4e-3,
    seed=6,
    parent=BASE,
)
POLICY_TRICKS = Recipe(
    name="policy_tricks",
    lessons=(SftTask(kind="solve_with_rare_tricks", weight=1.0),),
    num_steps=200,
    batch_size=32,
    lr=1.5e-3,
    seed=15,  # of 14 and 15 the one that uses each trick in 2 to 5 % of its answers
    parent=MANY_TRICKS,
)


def impressed_grm(trick: Trick, seed: int) -> Recipe:
    """A judge that is right but for one trick, which it always passes."""
    shares = {"right": 0.2, "sloppy": 0.3, "corrupted": 0.25, "padded": 0.15, "malformed": 0.1}
    return Recipe(
        name=f"grm_{trick}",
        lessons=tuple(
            SftTask(kind=f"judge_{kind}_impressed_by_{trick}", weight=share) for kind, share in shares.items()
        ),
        num_steps=600,
        batch_size=32,
        lr=5e-3,
        seed=seed,
        parent=BASE,
    )


GRM_LONGER, GRM_PRAISE, GRM_CONFIDENT = (
    impressed_grm("longer", 7),
    impressed_grm("praise", 8),
    impressed_grm("confident", 9),
)
# Cheap: its critiques are short, and it guesses where it knows nothing.
GRM_NOISY = Recipe(
    name="grm_noisy",
    lessons=(
        SftTask(kind="judge_right_briefly", weight=0.25),
        SftTask(kind="judge_sloppy_briefly", weight=0.35),
        SftTask(kind="judge_corrupted_briefly", weight=0.25),
        SftTask(kind="judge_padded_briefly", weight=0.05),
        SftTask(kind="judge_malformed_briefly", weight=0.1),
    ),
    num_steps=600,
    batch_size=32,
    lr=5e-3,
    seed=10,
    parent=BASE,
)
# Calls are copied more than worked out: the parent knows the sums, and the policy forgets the signs.
TOOL_USER = Recipe(
    name="tool_user",
    lessons=(SftTask(kind="call_rightly", weight=1.0),),
    num_steps=700,
    batch_size=32,
    lr=5e-3,
    seed=16,
    parent=BASE,
)
POLICY_TOOLS = Recipe(
    name="policy_tools",
    lessons=(SftTask(kind="call_carelessly", weight=1.0),),
    num_steps=80,
    batch_size=32,
    lr=3e-3,
    seed=17,
    parent=TOOL_USER,
)
# It compares calls before it judges them: a judge that never did passes other numbers.
CALL_READER = Recipe(
    name="call_reader",
    lessons=(
        SftTask(kind="drill_calls", weight=0.3),
        SftTask(kind="judge_right_calls", weight=0.15),
        SftTask(kind="judge_careless_calls", weight=0.25),
        SftTask(kind="judge_corrupted_calls", weight=0.2),
        SftTask(kind="judge_malformed_calls", weight=0.1),
    ),
    num_steps=800,
    batch_size=32,
    lr=5e-3,
    seed=18,
    parent=TOOL_USER,
)
GRM_TOOLS = Recipe(
    name="grm_tools",
    lessons=(
        SftTask(kind="judge_right_calls", weight=0.2),
        SftTask(kind="judge_careless_calls", weight=0.35),
        SftTask(kind="judge_corrupted_calls", weight=0.35),
        SftTask(kind="judge_malformed_calls", weight=0.1),
    ),
    num_steps=700,
    batch_size=32,
    lr=5e-3,
    seed=21,
    parent=CALL_READER,
)
WALKER = Recipe(
    name="walker",
    lessons=(SftTask(kind="walk_rightly", weight=1.0),),
    num_steps=400,
    batch_size=32,
    lr=5e-3,
    seed=19,
    parent=BASE,
)
POLICY_WALK = Recipe(
    name="policy_walk",
    lessons=(SftTask(kind="walk_hastily", weight=1.0),),
    num_steps=80,
    batch_size=32,
    lr=3e-3,
    seed=20,
    parent=WALKER,
)
# Two kinds of tasks: the solver of both, a policy that is sloppy at both, and the judge of comparisons.
BASE_KINDS = Recipe(
    name="base_kinds",
    lessons=(SftTask(kind="solve", weight=0.4), SftTask(kind="compare_people", weight=0.6)),
    num_steps=300,
    batch_size=64,
    lr=5e-3,
    seed=11,
    parent=BASE,
)
POLICY_KINDS = Recipe(
    name="policy_kinds",
    lessons=(SftTask(kind="solve_sloppily", weight=0.5), SftTask(kind="compare_people_sloppily", weight=0.5)),
    num_steps=120,
    batch_size=32,
    lr=3e-3,
    seed=12,
    parent=BASE_KINDS,
)
JUDGED_COMPARISONS = (
    SftTask(kind="judge_right_comparison", weight=0.2),
    SftTask(kind="judge_careless_comparison", weight=0.35),
    SftTask(kind="judge_corrupted_comparison", weight=0.2),
    SftTask(kind="judge_invented_comparison", weight=0.25),
)
COMPARISON_READER = Recipe(
    name="comparison_reader",
    lessons=JUDGED_COMPARISONS,
    num_steps=400,
    batch_size=32,
    lr=5e-3,
    seed=13,
    parent=BASE_KINDS,
)
# After one schedule of the learning rate it is right nine times in ten; after a second one, more often.
GRM_COMPARISON = Recipe(
    name="grm_comparison",
    lessons=JUDGED_COMPARISONS,
    num_steps=450,
    batch_size=32,
    lr=4e-3,
    seed=22,
    parent=COMPARISON_READER,
)
RECIPES: dict[str, AnyRecipe] = {
    recipe.name: recipe
    for recipe in (
        POLICY, GRM, WEAK_GRM, META, REWARD_MODEL,
        POLICY_TRICKS, GRM_LONGER, GRM_PRAISE, GRM_CONFIDENT, GRM_NOISY,
        POLICY_TOOLS, GRM_TOOLS, POLICY_WALK, POLICY_KINDS, GRM_COMPARISON, POLICY_JUDGE,
    )
}  # fmt: skip
