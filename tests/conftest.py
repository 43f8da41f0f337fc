"""Tests see ``tests/`` on the path (``import tiny``) and use one thread each, as they may run side by side.

Signals that whoever started the tests ignores (a background job ignores Ctrl-C, nohup a lost terminal) would be
ignored by every process that the tests start, so they get their usual meaning back.
"""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
