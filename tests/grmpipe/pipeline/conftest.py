"""The tests of this folder import pipeline_bench.py, which lies beside them, by its name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
