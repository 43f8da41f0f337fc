"""Python imports this as it starts, where the folder is on ``PYTHONPATH``."""

from no_linux import begin

begin()
