"""Fine-tune language models at full weight on the hardware people have.

The command line (``tonnage --help``) is the usual way in. The rooms of the house, from the top down:
``cli``, ``launch``, ``train``, ``inference``, ``checkpoint``, ``parallel``, ``optim``, ``model``, ``data``,
``plan``, ``config``. Imports point down that list and nowhere else; ``pyproject.toml`` holds the contract.
"""

__version__ = "0.1.0"
