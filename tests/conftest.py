"""Tests see ``tests/`` on the path (``import tiny``) and use one thread each, as they may run side by side.

What the user's cache holds (measurements of this machine among them) is not seen: it would decide plans.

Signals that whoever started the tests ignores (a background job ignores Ctrl-C, nohup a lost terminal) would be
ignored by every process that the tests start, so they get their usual meaning back.
"""

import atexit
import os
import shutil
import signal
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have that of the process that started them
    os.environ["TONNAGE_CACHE"] = tempfile.mkdtemp(prefix="tonnage-tests-")
    atexit.register(shutil.rmtree, os.environ["TONNAGE_CACHE"], ignore_errors=True)
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
