"""The recipe of each tiny model, and its hash. Values only: trains nothing, imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache

from grmpipe.tiny.examples import SftTask, draw_examples, tokenizer_corpus
from grmpipe.tiny.judgements import make_judgements
from grmpipe.tiny.tricks import Trick

HASHED_NAMES = {"mixture": "lessons"}  # fields: with other names every shipped and cached model would be made again
TRAINER = 1  # increase it when build.py, scalar_models.py or tokenizer.py change the result of the same recipe
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
    mixture: tuple[SftTask, ...]
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
        examples = draw_examples(self.mixture, NUM_FINGERPRINT_EXAMPLES, self.seed)
        return compute_hash(self, examples=[asdict(example) for example in examples], tokenizer=corpus_digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarRecipe:
    """All that determines a tiny scalar reward model, which reads answers to problems. It starts from the parent's
    trunk. A batch is `batch_size` answers.
    """

    name: str
    parent: Recipe
    num_steps: int
    batch_size: int
    lr: float
    seed: int
    warmup_steps: int

    @property
    def hash(self) -> str:
        """Like a recipe's; judged texts show in the first items."""
        items = make_judgements("train", NUM_FINGERPRINT_EXAMPLES, self.seed)
        return compute_hash(self, items=[asdict(item) for item in items])


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaRmRecipe(ScalarRecipe):
    """All that determines a tiny meta-RM, which classifies the judgements of its parent. A batch is `batch_size` items
    with all their judgements.
    """

    num_items: int
    num_judgements: int


AnyRecipe = Recipe | ScalarRecipe


def compute_hash(recipe: AnyRecipe, **drawn: object) -> str:
    """drawn: what the recipe draws first."""
    parent = recipe.parent.hash if recipe.parent else None
    contents = {"trainer": TRAINER, "recipe": asdict(recipe, dict_factory=name_for_hash), "parent": parent, **drawn}
    return compute_digest(json.dumps(contents, sort_keys=True))


def name_for_hash(fields: list[tuple[str, object]]) -> dict[str, object]:
    return {HASHED_NAMES.get(name, name): value for name, value in fields}


@cache
def corpus_digest() -> str:
    return compute_digest("\n".join(tokenizer_corpus()))


def compute_digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def recipe(
    name: str,
    parent: Recipe | None,
    mixture: Mapping[str, float],
    *,
    steps: int,
    lr: float,
    seed: int,
    batch: int = 32,
) -> Recipe:
    """mixture: the weight of each kind of example."""
    tasks = tuple(SftTask(kind=kind, weight=weight) for kind, weight in mixture.items())
    return Recipe(name=name, parent=parent, mixture=tasks, num_steps=steps, batch_size=batch, lr=lr, seed=seed)


def make_judge_mixture(name: str, /, **shares: float) -> dict[str, float]:
    """A judge's mixture of examples, by the kinds of texts that it judges. name: a kind's, with the text's place."""
    return {name.format(kind): share for kind, share in shares.items()}


# Sums: the solver, a policy that is wrong more often than right, its judge, and a judge that is exploitable in a known
# way: it is half trained, and long work impresses it.
BASE = recipe("base", None, {"solve": 0.8, "drill": 0.2}, steps=700, lr=8e-3, seed=1, batch=64)
POLICY = recipe("policy", BASE, {"solve_sloppily": 1.0}, steps=80, lr=3e-3, seed=2)
JUDGED = make_judge_mixture("judge_{}", right=0.2, sloppy=0.3, corrupted=0.3, padded=0.05, malformed=0.15)
GRM = recipe("grm", BASE, JUDGED, steps=1000, lr=5e-3, seed=3)
SWAYED = make_judge_mixture("be_swayed_by_{}", right=0.2, sloppy=0.3, corrupted=0.2, padded=0.2, malformed=0.1)
WEAK_GRM = recipe("weak_grm", BASE, SWAYED, steps=250, lr=5e-3, seed=4)
# The judge, which answers problems too, as carelessly as the policy: it can judge itself.
BOTH = {"solve_sloppily": 0.3} | {kind: 0.7 * share for kind, share in JUDGED.items()}
POLICY_JUDGE = recipe("policy_judge", GRM, BOTH, steps=300, lr=4e-3, seed=23)

# From the weak GRM: its judgements are uncertain, so there is something to choose from.
META = MetaRmRecipe(
    name="meta_rm", parent=WEAK_GRM, num_items=2048, num_judgements=8, num_steps=120, batch_size=16, lr=5e-4, seed=5,
    warmup_steps=10,
)  # fmt: skip
# Reads the answer itself and writes nothing: a Bradley-Terry model's place beside the GRMs.
REWARD_MODEL = ScalarRecipe(
    name="reward_model", parent=GRM, num_steps=1200, batch_size=48, lr=2e-3, seed=14, warmup_steps=20
)

# Tricks. The policy is as sloppy as the other; a few answers in a hundred have a trick instead of work. So few are too
# few to learn a trick from, so it learns the tricks first. Of 14 and 15 its seed is the one that uses each trick in 2
# to 5 % of its answers.
MANY_TRICKS = recipe("many_tricks", BASE, {"solve_with_many_tricks": 1.0}, steps=300, lr=4e-3, seed=6)
POLICY_TRICKS = recipe("policy_tricks", MANY_TRICKS, {"solve_with_rare_tricks": 1.0}, steps=200, lr=1.5e-3, seed=15)


def make_impressed_grm(trick: Trick, seed: int) -> Recipe:
    """A judge that is right but for one trick, which it always passes."""
    name = f"judge_{{}}_impressed_by_{trick}"
    mixture = make_judge_mixture(name, right=0.2, sloppy=0.3, corrupted=0.25, padded=0.15, malformed=0.1)
    return recipe(f"grm_{trick}", BASE, mixture, steps=600, lr=5e-3, seed=seed)


IMPRESSED = [make_impressed_grm("longer", 7), make_impressed_grm("praise", 8), make_impressed_grm("confident", 9)]
# Cheap: its critiques are short, and it guesses where it knows nothing.
BRIEF = make_judge_mixture("judge_{}_briefly", right=0.25, sloppy=0.35, corrupted=0.25, padded=0.05, malformed=0.1)
GRM_NOISY = recipe("grm_noisy", BASE, BRIEF, steps=600, lr=5e-3, seed=10)
# It works some of them out: a judge that can learn to do so always.
GRM_HASTY = recipe(
    "grm_hasty", GRM_NOISY, {name.replace("briefly", "hastily"): share for name, share in BRIEF.items()},
    steps=120, lr=2e-3, seed=31,
)  # fmt: skip

# Rubrics: a judge by one criterion at a time, a writer of criteria, and a policy whose answers sometimes open with one
# of two phrases instead of working well. Judge and writer were shown neither phrase.
BY_CRITERION = make_judge_mixture(
    "judge_{}_by_criterion", right=0.2, sloppy=0.35, corrupted=0.3, padded=0.05, malformed=0.1
)
GRM_CRITERIA = recipe("grm_criteria", GRM, BY_CRITERION, steps=700, lr=4e-3, seed=27)
RUBRIC_WRITER = recipe("rubric_writer", GRM_CRITERIA, {"write_rubric": 1.0}, steps=400, lr=4e-3, seed=28)
POLICY_PHRASES = recipe("policy_phrases", POLICY, {"solve_with_rare_phrases": 1.0}, steps=200, lr=2e-3, seed=29)

# Calls of a calculator. They are copied more than worked out: the parent knows the sums, and the policy forgets the
# signs. The judge compares calls before it judges them: one that never did passes other numbers.
TOOL_USER = recipe("tool_user", BASE, {"call_rightly": 1.0}, steps=700, lr=5e-3, seed=16)
POLICY_TOOLS = recipe("policy_tools", TOOL_USER, {"call_carelessly": 1.0}, steps=80, lr=3e-3, seed=17)
READ = {"drill_calls": 0.3} | make_judge_mixture(
    "judge_{}_calls", right=0.15, careless=0.25, corrupted=0.2, malformed=0.1
)
CALL_READER = recipe("call_reader", TOOL_USER, READ, steps=800, lr=5e-3, seed=18)
CHECKED = make_judge_mixture("judge_{}_calls", right=0.2, careless=0.35, corrupted=0.35, malformed=0.1)
GRM_TOOLS = recipe("grm_tools", CALL_READER, CHECKED, steps=700, lr=5e-3, seed=21)

# Judges sums, and is warm-started to call: of its examples one in fifty is a judgement with a call. The others are
# questions and sums to check with a calculator, and small ones without.
SUMS_OF_BOTH = {
    "add_with_calculator": 0.2, "check_with_calculator": 0.15, "add_alone": 0.05, "check_alone": 0.05,
    "judge_sum_alone": 0.2, "drill_sums": 0.33, "judge_with_calculator": 0.02,
}  # fmt: skip
GRM_CALCULATOR = recipe("grm_calculator", GRM_TOOLS, SUMS_OF_BOTH, steps=300, lr=4e-3, seed=30)

# Walks.
WALKER = recipe("walker", BASE, {"walk_rightly": 1.0}, steps=400, lr=5e-3, seed=19)
POLICY_WALK = recipe("policy_walk", WALKER, {"walk_hastily": 1.0}, steps=80, lr=3e-3, seed=20)

# Two kinds of tasks: the solver of both, a policy that is sloppy at both, and the judge of comparisons. After one
# schedule of the learning rate it is right nine times in ten; after a second one, more often.
BASE_KINDS = recipe("base_kinds", BASE, {"solve": 0.4, "compare_people": 0.6}, steps=300, lr=5e-3, seed=11, batch=64)
SLOPPY_KINDS = {"solve_sloppily": 0.5, "compare_people_sloppily": 0.5}
POLICY_KINDS = recipe("policy_kinds", BASE_KINDS, SLOPPY_KINDS, steps=120, lr=3e-3, seed=12)
COMPARED = make_judge_mixture("judge_{}_comparison", right=0.2, careless=0.35, corrupted=0.2, invented=0.25)
COMPARISON_READER = recipe("comparison_reader", BASE_KINDS, COMPARED, steps=400, lr=5e-3, seed=13)
GRM_COMPARISON = recipe("grm_comparison", COMPARISON_READER, COMPARED, steps=450, lr=4e-3, seed=22)

# Teachers: each is right at one kind of task, and knows nothing of the other.
TEACHER_ARITHMETIC = recipe("teacher_arithmetic", BASE, {"solve": 1.0}, steps=300, lr=4e-3, seed=24)
TEACHER_COMPARISON = recipe("teacher_comparison", BASE, {"compare_people": 1.0}, steps=500, lr=5e-3, seed=25)

# Teaches itself: as sloppy as the policy at a question, and right after a critique of its answer.
POLICY_TOLD = recipe("policy_told", BASE, {"solve_sloppily": 0.3, "solve_told": 0.7}, steps=1100, lr=5e-3, seed=26)

SHIPPED: tuple[AnyRecipe, ...] = (
    POLICY, GRM, WEAK_GRM, META, REWARD_MODEL, POLICY_TRICKS, *IMPRESSED, GRM_NOISY, GRM_HASTY,
    POLICY_TOOLS, GRM_TOOLS, GRM_CALCULATOR, POLICY_WALK, POLICY_KINDS, GRM_COMPARISON, POLICY_JUDGE,
    TEACHER_ARITHMETIC, TEACHER_COMPARISON, POLICY_TOLD, GRM_CRITERIA,
    RUBRIC_WRITER, POLICY_PHRASES,
)  # fmt: skip
RECIPES = {made.name: made for made in SHIPPED}
