# Everything a fresh machine with Python 3.11 and make needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
# pip would compile with one core; files that no Python of today compiles do not matter
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

.PHONY: demo test test-slow browser lint format bench bench-quick docs notebooks clean

demo: $(VENV)/installed  ## set up and run the main job on the data inside the package
	$(BIN)/fedflat run

test: $(VENV)/tested browser  ## set up and run the tests: about six minutes on two cores
	$(BIN)/python -m pytest -n 3 -m "not slow"  # one more than two cores: the tests of Flower mostly wait

test-slow: $(VENV)/tested-slow browser  ## what takes long: Flower deployments, kills, notebooks, whole pages, the wheel
	$(BIN)/python -m pytest -n 3 -m slow

browser:  ## the browser that the report's tests drive
	tools/get-chromium

lint: $(VENV)/linted  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/linted  ## put style right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/measurable  ## measure everything and write benchmarks/README.md: about an hour
	$(BIN)/python -m benchmarks

bench-quick: $(VENV)/measurable  ## the main parts with less of everything: under 3 minutes
	$(BIN)/python -m benchmarks --quick

docs: $(VENV)/documented  ## the documentation as a site, in site/, without a network
	$(BIN)/python docs/make_method_pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Open site/index.html; to search too, python3 -m http.server --directory site"

notebooks: $(VENV)/tested-slow  ## run the notebooks in examples/ and store their results: about two minutes
	$(BIN)/python tools/run-notebooks

clean:
	rm -rf $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (PyTorch is large: this can take a few minutes the first time)"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedflat needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@$(COMPILE)
	@touch $@

$(VENV)/tested: $(VENV)/installed
	$(PIP) --editable '.[test]'
	@$(COMPILE)
	@touch $@

$(VENV)/tested-slow: $(VENV)/tested
	$(PIP) --editable '.[test-slow]'
	@$(COMPILE)
	@touch $@

$(VENV)/linted: $(VENV)/tested
	$(PIP) --editable '.[lint]'
	@touch $@

$(VENV)/measurable: $(VENV)/installed
	$(PIP) --editable '.[ray,flower]'
	@$(COMPILE)
	@touch $@

$(VENV)/documented: $(VENV)/installed
	$(PIP) --editable '.[docs]'
	@$(COMPILE)
	@touch $@
