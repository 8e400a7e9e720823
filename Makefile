# Every target sets up what it needs by itself: a .venv next to the code, filled by pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two ranks, unless there is just one GPU for them.
RANKS ?= $(if $(filter 1,$(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')),1,2)
export OMP_NUM_THREADS ?= 1
# Without bytecode each test process compiles the package and pytest rewrites every test: half of its start.
unexport PYTHONDONTWRITEBYTECODE
# Concurrent test processes, each with ranks of its own: one more than two cores have, since tests of
# lost ranks and of signals mostly wait. In order, for the longest files come first.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: setup train test test-full test-gpu check docs pictures format clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "torch>=2.11,<2.14"
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $(STAMP)

train: setup
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) train.py --config configs/quickstart.toml $(ARGS)

test: setup
	$(PYTEST) -m "not full" $(ARGS)

test-full: setup
	$(PYTEST) $(ARGS)

test-gpu: setup  # what needs a GPU, which no other test sees
	$(PYTEST) -m "not full" $(shell find tests -name "test_*_gpu.py") $(ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) docs

docs: export NO_MKDOCS_2_WARNING := 1  # a notice of the theme about its successor
docs: setup  # the site, in site/; a broken link or a page outside of the navigation fails it
	$(BIN)/mkdocs build --quiet

pictures: setup  # of the pages, for docs/, from their tests in a browser; needs Chromium
	$(BIN)/python -m pytest tests/behaviour/test_plan_page.py -k width --pictures docs/pictures

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  # what the targets above made; runs/ holds people's checkpoints and stays
	rm -rf $(VENV) site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
