"""What a run has asked of endpoints by the end of each step, with its cost and what its budget has left."""

from grmpipe.observe.spending import Spending
from grmpipe.run.features.run_feature import RunFeature, StepEnd
from grmpipe.types import Metrics


class BudgetMetrics(RunFeature):
    """Metrics of a run with a price or a budget; of the whole run, resumes included, evaluations too."""

    def __init__(self, spending: Spending) -> None:
        self._spending = spending

    async def after_step(self, end: StepEnd) -> Metrics:
        return {f"budget/{name}": value for name, value in self._spending.figures.items()}
