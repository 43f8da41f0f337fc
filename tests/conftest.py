"""Tests see ``tests/`` on the path (``import tiny``) and use one thread each, as they may run side by side."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
