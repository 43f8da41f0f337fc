# Two commands: `make demo` and `make test`. Each does all its own set-up.
PYTHON ?= python3
READY := .venv/ready

.PHONY: demo test pins clean

demo: $(READY)
	.venv/bin/tonnage demo

test: $(READY)
	scripts/check -m "not slow" --numprocesses 2 --dist loadfile

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: found $$($(PYTHON) --version), needed Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@echo "Setting up .venv (once, about a minute)"
	@$(PYTHON) -m venv .venv
	@.venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

# After changing dependencies: install without pins, then write down what was installed.
pins:
	@{ head -n 1 constraints.txt; .venv/bin/pip freeze --exclude-editable | sed 's/ @ .*//; s/+cpu//' | \
		sed "s/^torch$$/torch==$$(.venv/bin/python -c 'import torch; print(torch.__version__.split(chr(43))[0])')/"; } > .pins
	@mv .pins constraints.txt

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache
