"""The groups of hostile inputs, each a function from chance to a case."""

from __future__ import annotations

from hostile.case import Maker
from hostile.groups import configs, faults, images, imports, kubernetes, models, outputs, rows, slurm, terminals, yamls

GROUPS: dict[str, Maker] = {
    "configs": configs.make,
    "models": models.make,
    "rows": rows.make,
    "terminal": terminals.make,
    "slurm": slurm.make,
    "kubernetes": kubernetes.make,
    "yaml": yamls.make,
    "import": imports.make,
    "images": images.make,
    "faults": faults.make,
    "outputs": outputs.make,
}
"""By the names of HOSTILE.md, in short."""
SHARES = {"models": 4, "rows": 4, "configs": 2, "faults": 2, "outputs": 2}
"""Of the tries; one for every other group."""
