# Two commands: `make quickstart` runs the main job, `make test` passes the tests. Both set up what they need.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: quickstart test lint clean

quickstart: $(STAMP)
	$(BIN)/python launch.py +experiment=quickstart

test: $(STAMP) lint
	$(BIN)/python -m pytest -m "not gpu" --cov --cov-report=term

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
