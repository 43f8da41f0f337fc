# Two commands: `make demo` and `make test`. Each does all its own set-up.
PYTHON ?= python3
READY := .venv/ready
# Python is to keep the files that it compiles, also where this variable is set: hundreds of processes import the same ones.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test matrix oldest walk bench bench-peers pins clean

demo: $(READY)
	.venv/bin/tonnage demo

# What an installation can do; the check of the code itself, with slower tests, is scripts/check.
test: $(READY)
	.venv/bin/pytest -m "not slow" --numprocesses 2 --dist loadfile --no-loadscope-reorder

# What is left out of CI, which runs a slice of it: three hours on two slow cores, as estimated from its parts.
matrix: $(READY)
	.venv/bin/python -m tests.matrix --output benchmarks/results/matrix.json

# The fast tests with the oldest versions of everything, under two Pythons that uv finds: 8 GB, once, and half an hour.
oldest:
	$(PYTHON) scripts/oldest.py --output benchmarks/results/oldest.json

# What runs on GPUs, walked without one: CUDA builds of torch (11 GB, once), then half an hour on two cores.
walk: $(READY)
	.venv/bin/python -m tests.device.stand_in environments
	.venv/bin/python -m tests.device.stand_in walk --output benchmarks/results/cuda_walk.json

# Our own floors and overheads, in minutes; figures go to benchmarks/results, and a table into benchmarks/README.md.
bench: $(READY)
	.venv/bin/python -m benchmarks.floor --output benchmarks/results/floor.json
	.venv/bin/python benchmarks/loop_overhead.py --output benchmarks/results/loop_overhead.json
	.venv/bin/python benchmarks/offload.py --output benchmarks/results/offload.json
	.venv/bin/python benchmarks/scaling.py --output benchmarks/results/scaling.json
	.venv/bin/python -m benchmarks.table

# tonnage beside TRL, transformers and DeepSpeed, which get an environment of their own (see benchmarks/peers/README.md).
bench-peers: $(READY)
	$(PYTHON) benchmarks/peers/environment.py
	.venv/bin/python -m benchmarks.peers.training --shape pythia-160m --output benchmarks/results/peers/training-pythia-160m.json
	.venv/bin/python -m benchmarks.peers.training --shape llama-135m --output benchmarks/results/peers/training-llama-135m.json
	.venv/bin/python -m benchmarks.peers.adapters --shape pythia-160m --output benchmarks/results/peers/adapters-pythia-160m.json
	.venv/bin/python -m benchmarks.peers.adapters --shape llama-135m --output benchmarks/results/peers/adapters-llama-135m.json
	.venv/bin/python -m benchmarks.peers.zero --output benchmarks/results/peers/zero.json
	.venv/bin/python -m benchmarks.peers.offload --output benchmarks/results/peers/offload.json
	.venv/bin/python -m benchmarks.peers.offload --on-disk optimizer --output benchmarks/results/peers/offload-optimizer.json
	.venv/bin/python -m benchmarks.table

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: found $$($(PYTHON) --version), needed Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@echo "Setting up .venv (once, a few minutes)"
	@# To compile all 19,000 files here, most of which nothing imports, takes a minute more.
	@$(PYTHON) -m venv .venv
	@.venv/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

# After changing dependencies: install without pins, then write down what was installed.
pins:
	@{ head -n 1 constraints.txt; .venv/bin/pip freeze --exclude-editable | sed 's/ @ .*//; s/+cpu//' | \
		sed "s/^torch$$/torch==$$(.venv/bin/python -c 'import torch; print(torch.__version__.split(chr(43))[0])')/"; } > .pins
	@mv .pins constraints.txt

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache
