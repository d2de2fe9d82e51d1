"""The tests of this folder import rank_metrics.py and expert_rank_process.py, which lie beside them, by their names."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
