# Every target makes what it needs first: a virtual environment in .venv with the pinned packages.
PYTHON ?= python3
BIN := .venv/bin
# The tested set of this Python: the newest that pip gives on 3.11, or on 3.13.
CONSTRAINTS := $(shell $(PYTHON) -c 'import sys; print("constraints-3.13.txt" if sys.version_info >= (3, 12) else "constraints.txt")' 2>/dev/null || echo constraints.txt)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)
MODEL ?= toy
OUT ?= out/play
# The demo games: of the toy world for the embedded model, of the film for a converted one.
GAMES := animegamer_jax/assets/instructions
INSTRUCTIONS ?= $(GAMES)/$(if $(filter toy,$(MODEL)),toy,qiqi).txt

.PHONY: help play serve demo train-toy toy-report art test test-all test-hosts test-scale test-faults lint package docs format clean

help:
	@echo "make play             play the demo game with the embedded model; clips in $(OUT)"
	@echo "make play MODEL=DIR   the same with a converted model"
	@echo "make demo             the same with random weights: noise, but the whole way"
	@echo "make serve            a web page to play on, at http://127.0.0.1:7860"
	@echo "make train-toy        trains the embedded model from scratch in out/toy, up to 12 hours on two cores"
	@echo "make toy-report       scores the embedded model on 100 games: docs/toy-report, README table"
	@echo "make test             the tests, 10 minutes on two cores with a cold compilation cache"
	@echo "make test-all         with the slow ones: every recorded number, memory, a VAE's training"
	@echo "make test-hosts       two real processes as two hosts train every stage, and are killed"
	@echo "make test-faults      hostile files, kills, full disks, a bucket, a crowd, requests: CASES=5000 KILLS=600"
	@echo "make test-scale       films to training in a bucket, over a cluster; a worker and the server are killed"
	@echo "make art              painted art of free games (Debian), for the tests of films: 180 MB in out/art"
	@echo "make lint             ruff, basedpyright and the import rule"
	@echo "make docs             these docs as a site in out/site; a broken link is an error"
	@echo "make package          builds wheel and source distribution, plays from the wheel in an empty environment"

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) is too old: Python 3.11 or newer is needed (PYTHON=python3.11)"; exit 2; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.play: .venv/.made pyproject.toml $(CONSTRAINTS)
	$(PIP) --editable .
	@touch $@

.venv/.train: .venv/.made pyproject.toml $(CONSTRAINTS)
	$(PIP) --editable '.[train]'
	@touch $@ .venv/.play

.venv/.dev: .venv/.made pyproject.toml $(CONSTRAINTS)
	$(PIP) --editable '.[dev]'
	@touch $@ .venv/.play .venv/.serve .venv/.train .venv/.evaluate

play: .venv/.play
	$(BIN)/animegamer play --model $(MODEL) --instructions $(INSTRUCTIONS) --out $(OUT)

.venv/.serve: .venv/.play
	$(PIP) --editable '.[serve]'
	@touch $@

serve: .venv/.serve
	$(BIN)/animegamer serve --model $(MODEL)

out/random/config.json: | .venv/.play
	$(BIN)/python scripts/random_model.py out/random

demo: .venv/.play out/random/config.json
	$(BIN)/animegamer play --model out/random --instructions $(INSTRUCTIONS) --out out/demo

train-toy: .venv/.train
	scripts/toy/train.sh out/toy

.venv/.evaluate: .venv/.made pyproject.toml $(CONSTRAINTS)
	$(PIP) --editable '.[evaluate]'
	@touch $@ .venv/.play

toy-report: .venv/.evaluate
	$(BIN)/animegamer evaluate --window 5 1 --out out/toy-report
	rm -rf docs/toy-report && mkdir docs/toy-report
	cp -r out/toy-report/report.md out/toy-report/report docs/toy-report
	$(BIN)/python scripts/toy/headline.py out/toy-report

test: .venv/.dev
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -m 'not slow and not hosts and not scale'

test-all: .venv/.dev
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -m 'not hosts and not scale'

test-hosts: .venv/.dev
	$(BIN)/python -m pytest -m hosts

# Without CASES and KILLS the whole campaign; one that was stopped continues. See docs/reliability.md.
CASES ?= 5000
KILLS ?= 600
test-faults: .venv/.dev
	nice -n 10 $(BIN)/python tests/faults/campaign.py --cases $(CASES) --kills $(KILLS) --out out/faults

screenshots: .venv/.dev
	SCREENSHOTS=docs/images $(BIN)/python -m pytest tests/serve/page/test_page.py -k screenshots

# Art for the tests of films, from Debian's packages of free games; without it they are skipped.
art:
	mkdir -p out/art
	cd out/art && apt-get download renpy-demo renpy-thequestion \
	  $$(apt-cache pkgnames wesnoth-1 | grep -- '-data$$' | sort | tail -n 1)
	cd out/art && for file in *.deb; do dpkg-deb -x $$file $${file%%_*} && rm $$file; done

test-scale: .venv/.dev
	$(BIN)/python -m pytest -m scale tests/data

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

.venv/.docs: .venv/.made pyproject.toml $(CONSTRAINTS)
	$(PIP) --editable '.[docs]'
	@touch $@ .venv/.play

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

package:
	PYTHON=$(PYTHON) scripts/check_package.sh

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .jax_cache .pytest_cache .ruff_cache out
