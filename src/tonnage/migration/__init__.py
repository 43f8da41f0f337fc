"""Configurations of other programs become ours: Axolotl, LLaMA-Factory, transformers, TRL, Accelerate and DeepSpeed.

``reading`` finds the keys in a file (``command`` those of a saved command line), and ``telling`` says whose they are.
The tables (``axolotl``, ``llama_factory``, ``arguments``, ``accelerate``, ``deepspeed``, ``launchers``) say what is
known of each key, in the words of ``keys``; what several of them say alike is in ``quantities`` and ``reasons``.
``programs`` says what holds where a file is silent. The rules (``placement``, ``training``, ``adapters``,
``showing``, ``material``, ``upkeep``) make keys of ours of them on a ``sheet``, and ``convert`` puts it all together.
``page`` renders the tables as ``docs/importing.md``.
"""

from tonnage.migration.convert import Import, import_files
from tonnage.migration.sheet import Entry

__all__ = ["Entry", "Import", "import_files"]
