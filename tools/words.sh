#!/bin/bash
# words.sh ROOT: applies words.txt to a checkout, sorts imports, wraps long lines, writes docs/configuration.md again.
here="$(cd "$(dirname "$0")" && pwd)"
cd "$1"
python "$here/words.py" "$PWD"; rc=$?
ruff check --fix -q --select I,F401 .; ruff format -q .
python "$here/words.py" "$PWD" --wrap; ruff format -q .; ruff check . --output-format concise
PYTHONPATH=$PWD python -m grmpipe.config.reference
exit $rc
