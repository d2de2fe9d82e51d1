"""The names that users import. Imports neither torch nor Hydra before one of them is used."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(_ROOT))  # `models` and `scheduler` are common names: ours are found before all others
try:
    import models
    import scheduler
finally:
    sys.path.remove(str(_ROOT))
for _found in (models, scheduler):
    if (_theirs := Path(_found.__file__ or _found.__path__[0])).resolve().parents[1] != _ROOT.resolve():
        raise ImportError(
            f"grmpipe has a package {_found.__name__} ({_ROOT / _found.__name__}), and another one was imported before "
            f"it ({_theirs}); rename that"
        )

from models.import_path import put_working_folder_last  # noqa: E402

__version__ = "0.1.0"

put_working_folder_last()
