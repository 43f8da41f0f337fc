# %% [markdown]
# # A run on a Ray cluster
#
# The notebook plans, Ray's actors train, and the run's directory is where both meet. `pip install 'tonnage[ray]'`, and
# put the directories below on a file system that all nodes share.
#
# `ADDRESS = None` starts a Ray of its own on this machine, for this run: a stand-in for the cluster. In a notebook on a
# node of a cluster write `ADDRESS = "auto"`.

# %%
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tonnage
from tonnage.demo.folder import write_folder

ADDRESS: str | None = None
WORKERS, NODES = 2, 1

demo = write_folder(Path("runs/ray"))
launch: dict[str, Any] = {"with": "ray", "workers": WORKERS, "cpus_per_worker": 1}
if ADDRESS is not None:  # nodes may be lost and found: it goes on with fewer workers, and with more
    launch |= {"address": ADDRESS, "nodes": NODES, "workers": [1, WORKERS], "max_failures": 3}

# %% [markdown]
# Workers of this machine start from Python (`tonnage.start`); those of a cluster from a command line, which here is
# another process. Both read the same config. YAML is a superset of JSON, so this is a config file.

# %%
config = {
    "model": str(demo.model),
    "init": "random",
    "data": {"train": str(demo.train), "validation": 0.01, "max_length": 256},
    "precision": "fp32",
    "batch": {"tokens": 512},
    "steps": 100,
    "optimizer": {"lr": 3e-3},
    "checkpoint": {"every": 20},
    "launch": launch,
    "output": str(demo.run),
}
path = demo.path / "ray.yaml"
path.write_text(json.dumps(config, indent=2))
plan = tonnage.plan(path)
print(f"{plan.workers} workers, {plan.num_steps} steps, {plan.choice.peak_bytes / 2**30:.2f} GiB a worker")


# %% [markdown]
# Start it, and wait for its directory. What the command prints goes to a file; `ray job submit -- tonnage train ...` is
# the same from outside of the cluster.


# %%
def begin(*words: str) -> subprocess.Popen[bytes]:
    with (demo.path / "train.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "tonnage", "train", *words], stdout=log, stderr=log)


def last_words() -> str:
    return (demo.path / "train.log").read_text()[-2000:]


command = begin(str(path))
while not demo.run.joinpath("plan.json").exists() and command.poll() is None:
    time.sleep(0.2)
if command.poll():
    raise SystemExit(last_words())
run = tonnage.open_run(demo.run)

# %% [markdown]
# Look at it while it trains, from here or from any machine that sees the directory (`tonnage follow`). In a notebook
# `run` alone draws its curves as they are.

# %%
while command.poll() is None and len(run.steps) < 10:
    time.sleep(0.2)
print(run.summary())

# %% [markdown]
# Stop it: the workers finish their step and save. Nothing is lost, and whoever needs the machines can have them.

# %%
if run.is_working:
    run.stop()
command.wait()
print(run.summary())

# %% [markdown]
# Go on, to the end; on another number of workers, if you like. The losses are those that it would have had without the
# stop, to the bit on the same number of workers.

# %%
if len(run.steps) < plan.num_steps:
    command = begin("--resume", str(demo.run))
    if command.wait() != 0:
        raise SystemExit(last_words())
print(run.summary())
print("model:", run.export)
