"""Notebooks of ``examples/notebooks``, carried out as nbclient does it, in whatever folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "examples" / "notebooks"


def carry_out(name: str, folder: Path, parameters: Mapping[str, Any] | None = None) -> str:
    """What a notebook prints, with other ``parameters``, written after its own as papermill does it."""
    pytest.importorskip("ipykernel", reason="no Jupyter kernel (pip install ipykernel nbclient)")
    nbclient, nbformat = pytest.importorskip("nbclient"), import_module("nbformat")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    if parameters:
        (place,) = (
            number for number, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])
        )
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in parameters.items())
        notebook.cells.insert(place + 1, import_module("nbformat.v4").new_code_cell(lines))
    where = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources=where)
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    complaints = [output["text"] for output in outputs if output.get("name") == "stderr"]
    assert not any("Warning" in text for text in complaints), complaints
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")
