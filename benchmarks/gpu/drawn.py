"""A worker of tonnage whose random weights its device draws, in a moment:

    python -m benchmarks.gpu.drawn MODULE ...

For runs of models that have no weights (``init: random``), which are otherwise drawn on the CPU, minutes of them for
eight billion.
"""

from __future__ import annotations

import runpy
import sys

from tonnage.model.build import filling_where_they_lie

if __name__ == "__main__":
    del sys.argv[0]
    with filling_where_they_lie():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
