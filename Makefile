# make train   train a small GPT: on two ranks of the CPU, or on one rank per GPU
#              (make train ARGS="--steps 100 --strategy shard_grad_op")
# make test    run the tests, and report what of the package they ran (make test COVERAGE= does
#              not measure; neither does a part: make test ARGS="tests/testing -k hang")
# make lint    ruff, mypy, and the order of imports
# make docs    build the documentation as a site, in site/, with all links checked
# Each creates .venv when it is missing or older than what it is made from.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
ARGS ?=

.PHONY: train test test-long lint docs format clean

train: $(STAMP)
	$(BIN)/fullshard train $(ARGS)

# All of them in three processes, because tests wait as well (on two cores 603 s in two, 535 s in
# three), in the order of their names, which has the files with few and long tests first.
ALL := --numprocesses 3 --dist loadfile --no-loadscope-reorder
# Ranks are measured, too, which takes 30 to 47 % more of the processors' time.
COVERAGE ?= --cov --cov-report=term

test: $(STAMP)
	$(BIN)/python -m pytest $(or $(ARGS),$(ALL) $(COVERAGE))

# The same tests with many more generated cases for each property.
test-long: $(STAMP)
	FULLSHARD_LONG=1 $(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "To read and search it: $(BIN)/python -m http.server --directory site, then http://localhost:8000"

# Only who builds the site needs what builds it.
$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[docs]'
	touch $(VENV)/.docs

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*

# torch is asked for by its exact version and first: an open range, or an isolated build
# environment, could choose another build of it that is larger by gigabytes.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('fullshard needs Python 3.11 or newer, and $(PYTHON) is ' + sys.version.split()[0] + '; choose another one with make PYTHON=...')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0 setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $(STAMP)
