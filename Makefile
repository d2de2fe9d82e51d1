# Two commands: `make quickstart` runs the main job, `make test` passes the tests. Both set up what they need.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: quickstart test lint clean

quickstart: $(VENV)/.installed
	$(BIN)/python launch.py +experiment=quickstart

test: lint
	$(BIN)/python -m pytest -m "not gpu" --cov --cov-report=term

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch by itself first: a range in a later install would take the newest build, with gigabytes of CUDA.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
