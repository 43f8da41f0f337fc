"""Notebooks made from ``examples/``: the same cells, as Jupyter, Colab and Kaggle open them.

    python scripts/notebooks.py             write examples/notebooks
    python scripts/notebooks.py --check     say what would be written, and end with 1 if there is any

Cells begin at ``# %%``, as Jupytext has them: ``[markdown]`` is text, and ``tags=[...]`` are tags (a cell with the tag
``parameters`` holds what papermill may set). Before them stands a cell that installs tonnage where it is not installed.
Outputs are left out: who opens a notebook sees what comes of it there.

Badges that open a notebook on Colab and Kaggle need the address of the repository: ``repo_url`` in ``mkdocs.yml``, as
for the links of the site. Without it there are none, and tonnage is installed from PyPI; with it, from the repository.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
TARGET = EXAMPLES / "notebooks"
EXTRAS = {"ray_cluster": "ray"}
"""What a notebook needs besides."""
ON_GPU = ("first_adapter",)
"""Those that ask Colab for a GPU; the others are made for processors."""
CELL = re.compile(r"^# %%(?: (\[markdown\]))?(?: tags=(\[.*\]))?$")
INSTALL = """\
# Installs tonnage where it is not installed, as on Colab and Kaggle.
import importlib.util

if importlib.util.find_spec("tonnage") is None:
    %pip install --quiet {requirement}"""


def repository() -> str | None:
    """``owner/name`` of the repository, if ``mkdocs.yml`` says where it is."""
    line = re.search(r"^repo_url: *https://github\.com/([\w.-]+/[\w.-]+?)/?$", (ROOT / "mkdocs.yml").read_text(), re.M)
    return line[1] if line else None


def badges(name: str, address: str) -> str:
    """Two pictures that open the notebook ``name`` of the repository at ``address``."""
    path = f"{address}/blob/main/examples/notebooks/{name}.ipynb"
    colab = f"https://colab.research.google.com/github/{path}"
    kaggle = f"https://kaggle.com/kernels/welcome?src=https://github.com/{path}"
    return (
        f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab})\n"
        f"[![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)]({kaggle})"
    )


def cells_of(text: str) -> list[dict[str, Any]]:
    """The cells of an example."""
    cells: list[dict[str, Any]] = []
    for line in text.splitlines():
        if start := CELL.match(line):
            metadata = {"tags": json.loads(start[2])} if start[2] else {}
            kind = "markdown" if start[1] else "code"
            cells.append({"cell_type": kind, "metadata": metadata, "source": []})
        else:
            is_text = cells[-1]["cell_type"] == "markdown"
            cells[-1]["source"].append(re.sub(r"^# ?", "", line) if is_text else line)
    return [cell | {"source": "\n".join(cell["source"]).strip("\n")} for cell in cells]


def notebook(name: str, address: str | None) -> dict[str, Any]:
    """The notebook of ``examples/NAME.py``."""
    title, *cells = cells_of((EXAMPLES / f"{name}.py").read_text())
    if address is not None:
        title["source"] += "\n\n" + badges(name, address)
    package = f"tonnage[{EXTRAS[name]}]" if name in EXTRAS else "tonnage"
    requirement = f'"{package} @ git+https://github.com/{address}"' if address else f'"{package}"'
    install = {"cell_type": "code", "metadata": {}, "source": INSTALL.format(requirement=requirement)}
    complete = []
    for number, cell in enumerate([title, install, *cells]):
        own = {"execution_count": None, "outputs": []} if cell["cell_type"] == "code" else {}
        lines = cell["source"].splitlines(keepends=True)
        complete.append(cell | own | {"id": f"cell-{number}", "source": lines})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata: dict[str, Any] = {"kernelspec": kernel, "language_info": {"name": "python"}}
    if name in ON_GPU:
        metadata |= {"accelerator": "GPU", "colab": {"gpuType": "T4"}}
    return {"cells": complete, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def written(address: str | None) -> dict[Path, str]:
    """What stands in the folder of notebooks."""
    names = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    return {TARGET / f"{name}.ipynb": json.dumps(notebook(name, address), indent=1) + "\n" for name in names}


def main() -> int:
    """Returns 1 where ``--check`` finds another text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    texts = written(repository())
    wrong = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    wrong += [path for path in TARGET.glob("*.ipynb") if path not in texts]
    for path in wrong:
        if options.check:
            print(f"error: {path.relative_to(ROOT)} is not what scripts/notebooks.py makes of the example; call it")
        elif path in texts:
            TARGET.mkdir(exist_ok=True)
            path.write_text(texts[path])
        else:
            path.unlink()
    return int(options.check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
