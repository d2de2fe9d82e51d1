"""The quality of a meta-RM on labelled judgements: of its probabilities, and of the votes it weights. Pure."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from grmpipe.evaluation.labelled_judgements import LabelledJudgement
from grmpipe.judge.kinds.labels import judged_right
from grmpipe.judge.votes import average_weighted, best_indices, mean
from grmpipe.train.scalar.classification import quality
from grmpipe.types import Metrics

Weighed = tuple[LabelledJudgement, float]  # a judgement, and the probability that the meta-RM gives it
VoteOf = Callable[[Sequence[float], Sequence[float]], float]  # (scores of a response, probabilities) -> its score


def measure(examples: Sequence[LabelledJudgement], probabilities: Sequence[float], k_meta: int) -> Metrics:
    """Metrics of single judgements, then of votes over all judgements of an item: unweighted, best `k_meta` (0: half),
    weighted.

    accuracy, auc, brier, calibration_error, base_rate: of `right` under the probabilities.
    vote_*: share of items whose voted scores agree with the label.
    """
    weighed = list(zip(examples, probabilities, strict=True))
    items = [[one for one in weighed if one[0].item_id == item_id] for item_id in {e.item_id: None for e in examples}]

    def best(scores: Sequence[float], weights: Sequence[float]) -> float:
        return mean([scores[index] for index in best_indices(weights, k_meta or max(1, len(scores) // 2))])

    votes: dict[str, VoteOf] = {
        "mean": lambda scores, weights: mean(scores),
        "best": best,
        "weighted": average_weighted,
    }
    agreed = {f"vote_{name}": fmean(agrees(item, vote) for item in items) for name, vote in votes.items()}
    return quality(probabilities, [example.right for example in examples]) | agreed


def agrees(item: Iterable[Weighed], vote: VoteOf) -> bool:
    """Whether the voted scores of an item agree with its label."""
    judgements, weights = zip(*item, strict=True)
    by_response = zip(*(judgement.scores for judgement in judgements), strict=True)
    return judged_right([vote(scores, weights) for scores in by_response], judgements[0].label)
