# make demo: train a small mixture of experts with PPO on this machine.  make test: run the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test clean

install: $(STAMP)

$(STAMP): docker/requirements/cpu.txt setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install -q --disable-pip-version-check --no-deps -r docker/requirements/cpu.txt
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: install
	$(BIN)/python -m moerl.demo

test: install
	$(BIN)/python -m pytest tests

clean:
	rm -rf $(VENV) build *.egg-info
