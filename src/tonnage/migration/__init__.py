"""Configurations of other programs become ours: Axolotl, LLaMA-Factory, torchtune, ms-swift, TRL, DeepSpeed and more.

What is known of each key of a program is in ``tables`` (``keys`` reads them), and so are what a program does where a
file is silent (``programs``) and what its words come to here (``meanings``). ``reading`` finds the ``settings`` in a
file, ``command`` those of a saved command line, and ``recognition`` says whose they are. The rules make keys of ours of
them on a ``draft``: what is minimised (``objective``, by the words of ``methods``), on what it runs (``workers``) and
how it fits (``memory``), how it is optimized (``training``), what of which ``model`` is trained (``adapters``), on
which rows (``trainer``, ``axolotl``, ``llama_factory``, ``torchtune_rows``, ``swift``: one for each way to name
them), how long those are (``lengths``) and how they are shown (``rendering``, ``torchtune_chats``), ``evaluation``
and ``saving``. What components of torchtune and names of ms-swift say besides, ``torchtune`` and ``swift`` take
before the shared rules. ``convert`` has their order and puts it all together; ``page`` renders the tables into
``docs/importing.md``.
"""

from tonnage.migration.convert import Import, import_files
from tonnage.migration.draft import Entry

__all__ = ["Entry", "Import", "import_files"]
