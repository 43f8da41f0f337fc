"""A Jupyter kernel of this environment, driven without a browser."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def readme_script() -> str:
    """The README's script."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return str(code)


def client_of(cells: list[str], folder: Path) -> Any:
    """A client of nbclient with a notebook of ``cells``, carried out in ``folder``; skips where there is no kernel."""
    pytest.importorskip("ipykernel", reason="no Jupyter kernel (pip install ipykernel nbclient)")
    nbclient, nbformat = pytest.importorskip("nbclient"), import_module("nbformat.v4")
    notebook = nbformat.new_notebook(cells=[nbformat.new_code_cell(cell) for cell in cells])
    return nbclient.NotebookClient(
        notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )


def outputs_of(client: Any) -> list[list[dict[str, Any]]]:
    """What every cell gives."""
    return [[dict(output) for output in cell["outputs"]] for cell in client.execute()["cells"]]
