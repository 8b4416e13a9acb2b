# make           shows the targets
# make run       sets up what is missing, then runs the model for real and checks it
# make test      sets up what is missing, then runs every test and every notebook

VENV   ?= .venv
PYTHON ?= python3
ARGS   ?=
# A wheel index for torch alone, e.g. https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# The whole suite goes to two workers: one starts processes, test after test, the other runs all the rest.
WORKERS := -n 2
# A page of the run, if there is a trace for it: with a size flag expert parallelism is off unless the flags ask for it.
SIZES := -tp% -dp% -pcp% --tensor% --data% --prefill%
OFF = $(filter --no-enable%,$(ARGS))$(if $(filter --enable-expert-parallel,$(ARGS)),,$(filter $(SIZES),$(ARGS)))
REPORT = $(if $(filter --report% --nnodes%,$(ARGS))$(OFF),,--report runs/report.html)

PY    := $(VENV)/bin/python
PIP   := $(PY) -m pip --disable-pip-version-check -q
READY := $(VENV)/.moe-course-ready

VERSION_OK = import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else \
  "error: Python 3.11, 3.12 or 3.13 is needed, {} is {}.{}. Name another one: PYTHON=python3.12 " \
  "(or VENV= and the folder of an environment that has it)".format(sys.executable, *v))
HAS_TORCH = import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)

.NOTPARALLEL:
.PHONY: help setup run test lab notebooks slides lint clean again

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Options: ARGS='...' for run, test and lab; VENV=folder; PYTHON=python3.12; setup TORCH_INDEX=URL"

setup: $(READY)  ## install everything into $(VENV); TORCH_INDEX=URL takes torch from there
	@$(PY) -c 'import sys, importlib.metadata as m; print("ready: $(VENV), Python %d.%d.%d, torch %s" % (*sys.version_info[:3], m.version("torch")))'

run: $(READY)  ## run the model on several processes, checked against the untouched one; a page in runs/report.html
	@mkdir -p runs
	@$(VENV)/bin/moe-course run --check $(REPORT) $(ARGS)
	@$(if $(OFF),echo "no page of this run: without expert parallelism there are no routes (runs/report.html, if it is there, shows an earlier run)",:)

test: $(READY)  ## run all tests and notebooks; ARGS='tests/unit -k router' runs some
	@$(PY) -m pytest $(or $(strip $(ARGS)),$(WORKERS))

lab: $(READY)  ## open the course in JupyterLab
	@$(PY) -m jupyterlab notebooks $(ARGS)

notebooks: $(READY)  ## execute the notebooks again and store their outputs
	@$(PY) -m moe_course.lessons.notebooks notebooks/*.ipynb

slides: $(READY)  ## build the decks of slides/: HTML in slides/build, PDF beside; needs npm and chromium
	@$(PY) -m moe_course.lessons.slides $(ARGS)

# Without the cache: what ruff remembers of a file does not notice that another file became a module of ours.
lint: $(READY)  ## check style and format
	@$(PY) -m ruff check --no-cache .
	@$(PY) -m ruff format --check --no-cache .

clean:  ## remove build leftovers and caches, keep the environment
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis notebooks/.ipynb_checkpoints
	find moe_course tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(PY):
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON) here; install Python 3.11 or newer, or name yours with PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c '$(VERSION_OK)'
	@echo "setup: making the environment $(VENV)"
	@$(PYTHON) -m venv --without-pip $(VENV) || { \
	  echo "error: $(PYTHON) has no working venv module. Debian, Ubuntu: apt install python3-venv." >&2; \
	  echo "       Or use an environment you have: VENV=folder, e.g. VENV=\$$CONDA_PREFIX" >&2; exit 1; }

# Asked for by name with an index, setup fetches torch again; run and test do so only when something changed.
$(READY): pyproject.toml constraints.txt $(if $(TORCH_INDEX),$(if $(filter setup,$(MAKECMDGOALS)),again)) | $(PY)
	@$(PY) -c '$(VERSION_OK)'
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip --default-pip >/dev/null 2>&1 \
	  || $(PYTHON) -m pip --python $(PY) install -q pip || { \
	  echo "error: no pip in $(VENV), and $(PYTHON) has neither ensurepip nor a pip (22.3 or newer) to put it there." >&2; \
	  echo "       Debian, Ubuntu: apt install python3-venv; elsewhere: $(PYTHON) -m ensurepip." >&2; \
	  echo "       Or use an environment you have: VENV=folder, e.g. VENV=\$$CONDA_PREFIX" >&2; exit 1; }
ifneq ($(TORCH_INDEX),)
	@echo "setup: torch from $(TORCH_INDEX)"
	@$(PIP) install --force-reinstall --no-deps --index-url $(TORCH_INDEX) -c constraints.txt torch
else
	@if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null && [ ! -e /dev/nvidia0 ] \
	  && ! $(PY) -c '$(HAS_TORCH)'; then \
	  echo "warning: no NVIDIA GPU seen, and on Linux pip may fetch the CUDA build of torch, several GB."; \
	  echo "         PyTorch's CPU build is far smaller. To have it, press Ctrl-C and type"; \
	  echo "         make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu"; fi
endif
	@echo "setup: installing the course and its tools into $(VENV); this takes minutes the first time"
	@$(PIP) install -c constraints.txt -e '.[test]'
	@touch $@
