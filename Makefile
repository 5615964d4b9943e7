# make run    execute every notebook into build/           make lab           open the notebooks in JupyterLab
# make test   the whole suite                              make notebooks     regenerate the committed outputs
# make test-hosts    in environments like Colab's, ...     make test-browser  in a real browser
# make bench         compare the speed with peers        make clean         remove what was set up
# make test-nightly  more random parameters
# make site          the book, in build/site/               make test-site     it in a real browser
# make standalone    notebooks that carry their helper      make exercises     the same without solutions
# make publish, make kaggle: see the README
# make notebooks RECORD=anew compiles all that the notebooks show as recorded, more than an hour.
# All but make standalone, exercises, publish and kaggle set up .venv first, once. TF=2.20 uses that TensorFlow (in .venv-2.20), KERAS=3 trains with Keras 3.

VENV := .venv$(if $(TF),-$(TF))
BIN := $(VENV)/bin
READY := $(VENV)/ready
# The first Python that TensorFlow has packages for: 3.11 to 3.13.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo "$$python" && break; done)

ifeq ($(KERAS),3)
export TF_USE_LEGACY_KERAS := 0
endif

.PHONY: run test test-nightly test-hosts test-browser test-site bench lab notebooks site standalone exercises publish named kaggle setup clean

run: setup
	@$(BIN)/python tools/notebooks.py run

test: setup
	@$(BIN)/python -m pytest --numprocesses=2 --dist=worksteal

# Every notebook with 25 more random sets of parameters than the suite's five.
test-nightly: setup
	@$(BIN)/python -m pytest --numprocesses=2 --dist=worksteal -m nightly

# Environments are kept in .hosts/, one for each host: the second run installs nothing.
test-hosts: setup
	@$(BIN)/python -m pytest --numprocesses=2 --dist=worksteal -m hosts

test-browser: $(VENV)/ready-browser
	@$(BIN)/python -m pytest -m browser

test-site: $(VENV)/ready-site $(VENV)/ready-browser
	@$(BIN)/python -m pytest -m site

site: $(VENV)/ready-site
	@$(BIN)/python tools/make_site.py

# The listing, the kit, JAX and PyTorch in turns, half an hour; RECORD=anew writes the README's section from it.
bench: $(VENV)/ready-bench
	@$(BIN)/python benchmarks/speed.py $(if $(filter anew,$(RECORD)),--record)

lab: setup
	@$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --LabApp.default_url=/lab/tree/notebooks

notebooks: setup
	@$(if $(filter anew,$(RECORD)),rm -f recorded/predictions.json)
	@$(BIN)/python tools/notebooks.py regenerate

# These need Python alone, no set-up.
standalone:
	@$(or $(PYTHON),python3) tools/publish.py standalone

exercises:
	@$(or $(PYTHON),python3) tools/publish.py exercises

GIVEN := $(origin REPO)
export REPO TAG KAGGLE_USER NOTEBOOK
publish: named
	@$(or $(PYTHON),python3) tools/publish.py links "$$REPO" "$$TAG"

named:
ifeq ($(GIVEN),undefined)
	@echo "Say where: make publish REPO=owner/name TAG=v1.0.0 (make publish REPO= takes the links out)"; exit 1
endif

kaggle:
	@$(or $(PYTHON),python3) tools/publish.py kaggle "$$KAGGLE_USER" "$$NOTEBOOK"

setup: $(READY)

$(READY): requirements.txt requirements-compiler.txt
	@test -n "$(PYTHON)" || { echo "No Python from 3.11 to 3.13 found: install one, or name it, as in make run PYTHON=/path/to/python3.12"; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version), a few minutes the first time ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --requirement requirements.txt --requirement requirements-compiler.txt \
		$(if $(TF),"tensorflow==$(TF).*" "tf-keras==$(TF).*")
	@touch $@

$(VENV)/ready-bench: $(READY) requirements-bench.txt
	@$(BIN)/python -m pip install --quiet --requirement requirements-bench.txt
	@touch $@

$(VENV)/ready-site: $(READY) requirements-site.txt
	@$(BIN)/python -m pip install --quiet --requirement requirements-site.txt
	@touch $@

$(VENV)/ready-browser: $(READY) requirements-browser.txt
	@$(BIN)/python -m pip install --quiet --requirement requirements-browser.txt
	@touch $@

clean:
	rm -rf build my_report.html notebooks/my_report.html .hosts .venv .venv-* .pytest_cache .ruff_cache
