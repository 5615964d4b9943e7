# make run    execute every notebook into build/           make lab        open the notebooks in JupyterLab
# make test   the whole suite                              make notebooks  regenerate the committed outputs
# All set up .venv first, once. TF=2.20 uses that TensorFlow (in .venv-2.20), KERAS=3 trains with Keras 3.

VENV := .venv$(if $(TF),-$(TF))
BIN := $(VENV)/bin
READY := $(VENV)/ready
# The first Python that TensorFlow has packages for: 3.11 to 3.13.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo "$$python" && break; done)

ifeq ($(KERAS),3)
export TF_USE_LEGACY_KERAS := 0
endif

.PHONY: run test lab notebooks setup clean

run: setup
	@$(BIN)/python tools/notebooks.py run

test: setup
	@$(BIN)/python -m pytest --numprocesses=2 --dist=worksteal

lab: setup
	@$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/notebooks

notebooks: setup
	@$(BIN)/python tools/notebooks.py regenerate

setup: $(READY)

$(READY): requirements.txt
	@test -n "$(PYTHON)" || { echo "No Python from 3.11 to 3.13 found: install one, or name it, as in make run PYTHON=/path/to/python3.12"; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version), a few minutes the first time ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --requirement requirements.txt $(if $(TF),"tensorflow==$(TF).*" "tf-keras==$(TF).*")
	@touch $@

clean:
	rm -rf build .venv .venv-* .pytest_cache .ruff_cache
