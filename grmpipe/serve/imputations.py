"""Responses without a verdict whose trainer got the mean of their siblings: counted, and listed in imputed.jsonl."""

import logging
from collections import Counter
from pathlib import Path

from grmpipe.observe.guard import Guard
from grmpipe.observe.journal import Journal

log = logging.getLogger(__name__)

IMPUTED = "imputed.jsonl"


class Imputations:
    """They stand apart from judgements.jsonl: none of them is a verdict. causes: of the failed judgements, counted."""

    def __init__(self, run_dir: Path, run_id: str, guard: Guard) -> None:
        self.causes = Counter[str]()
        self._journal = Journal(run_dir / IMPUTED, run_id=run_id)
        self._guard = guard

    def record(self, *, judge: str, client: str, group_id: str, cause: str, detail: str, mean: float, of: int) -> None:
        """group_id: of the failed judgement in judgements.jsonl. of: how many siblings the mean is of."""
        self.causes[cause] += 1
        log.warning(
            "%s has no verdict (%s): its trainer gets %.6g, the mean of %d siblings (serve.on_failure=mean_of_group)",
            group_id, cause, mean, of,
        )  # fmt: skip
        with self._guard.watch(IMPUTED):
            self._journal.append({
                "group_id": group_id, "judge": judge, "client": client, "failed": cause, "detail": detail,
                "mean_of_siblings": mean, "num_siblings": of,
            })  # fmt: skip

    def close(self) -> None:
        self._journal.close()
