"""Groups of workers, one group after another: ``train_groups.py '[[2, ["RUN", "RUN"]], [3, ["RUN"]]]'``.

Each group has its own number of workers, which train their runs as ``train_runs`` does. They are forked from one
process that has imported everything, since importing is most of what a short run costs. Exit status 1 if one fails.
"""

import json
import os
import socket
import sys
import traceback

import torch.distributed.checkpoint  # noqa: F401
import train_runs
from transformers import LlamaForCausalLM  # noqa: F401

from tonnage.train import loop  # noqa: F401


def main(groups: list[tuple[int, list[str]]]) -> int:
    for size, paths in groups:
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            port = holder.getsockname()[1]
        children = [forked(rank, size, port, paths) for rank in range(size)]
        failed = [status for _ in children if (status := os.wait()[1])]
        if failed:
            return 1
    return 0


def forked(rank: int, size: int, port: int, paths: list[str]) -> int:
    if child := os.fork():
        return child
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        train_runs.main(paths)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os.killpg(0, 9)  # the others wait for this one
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
