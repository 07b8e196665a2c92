PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq -c constraints.txt
INSTALLED := .venv/.installed
# They ask for torchvision, which no test needs and which would bring a torch of its own. So they come without what they ask for, and what
# laplace-torch does need stands beside it: 2 MB of wheels in all.
WITHOUT_TORCHVISION := onnx2pytorch laplace-torch backpack-for-pytorch curvlinops-for-pytorch asdfghjkl einconv einops \
	lightning-utilities linear_operator opt-einsum torchmetrics unfoldNd

.PHONY: demo test lint bench docs clean

demo: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m covprop.demo # threads would wait for each other in so small a network

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.render

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site
	find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +

# hatchling comes first so that the editable build uses the pinned one, without a build environment of its own.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP_INSTALL) hatchling
	$(PIP_INSTALL) --no-build-isolation -e '.[dev,docs]'
	$(PIP_INSTALL) --no-deps $(WITHOUT_TORCHVISION)
	touch $@
