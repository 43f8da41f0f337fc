"""Fine-tune language models, whole or by adapters, on the hardware people have.

The command line (``tonnage --help``) is the usual way in. What each room is for and who may use whom stands in
docs/rooms.md; pyproject.toml holds the contract.
"""

__version__ = "0.1.0"
