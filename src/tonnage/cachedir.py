"""Where results are kept that any run of this user may want again: prepared data, measurements of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def default_directory() -> Path:
    """``$TONNAGE_CACHE``, else ``tonnage`` in the user's cache directory."""
    named = os.environ.get("TONNAGE_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tonnage"
