"""Configurations of other programs become ours: DeepSpeed, Accelerate, transformers and TRL.

``reading`` finds the keys in a file (``command`` those of a saved command line), the tables (``deepspeed``,
``accelerate``, ``arguments``, ``launchers``) say what is known of each, the rules (``placement``, ``training``,
``material``, ``upkeep``) make keys of ours of them on a ``sheet``, and ``convert`` puts it all together. ``page``
renders the tables as ``docs/importing.md``.
"""

from tonnage.migration.convert import Import, import_files
from tonnage.migration.sheet import Entry

__all__ = ["Entry", "Import", "import_files"]
