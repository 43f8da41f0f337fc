# %% [markdown]
# # A run on a Ray cluster
#
# The notebook plans and watches, Ray's actors train, and the run's directory is where both meet. Before it runs:
# `pip install '.[ray]'` in the checkout, and put the directories below on a file system that all nodes share.
#
# `ADDRESS = None` starts a Ray of its own on this machine, for this run: a stand-in for the cluster. In a notebook on a
# node of a cluster write `ADDRESS = "auto"`.

# %%
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
# Where it trains is a key of the config like any other.

# %%
model = str(demo.model)
data = {"train": str(demo.train), "validation": 0.01, "max_length": 256}
config: dict[str, Any] = {
    "init": "random",
    "precision": "fp32",
    "batch": {"tokens": 512},
    "steps": 100,
    "optimizer": {"lr": 3e-3},
    "checkpoint": {"every": 20},
    "launch": launch,
    "output": str(demo.run),
}
plan = tonnage.plan(model, data, **config)
print(f"{plan.workers} workers, {plan.num_steps} steps, {plan.choice.peak_bytes / 2**30:.2f} GiB a worker")

# %% [markdown]
# Start it, and see its first steps. Leaving the block has the workers finish their step and save: nothing is lost, and
# whoever needs the machines can have them. From elsewhere `tonnage follow` watches a run, and `tonnage stop` ends it.

# %%
with tonnage.start(model, data, **config) as running:
    for step in running:
        if step.step == 10:
            break
run = running.run
print(run.summary())

# %% [markdown]
# Go on, to the end; on another number of workers, if you like. The losses are those that it would have had without the
# stop, to the bit on the same number of workers. In a notebook `run` alone draws its curves.

# %%
run.resume()
print(run.summary())
print("model:", run.export)
