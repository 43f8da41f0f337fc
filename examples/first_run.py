# %% [markdown]
# # A first run
#
# A small model learns to follow instructions on this machine's CPU: what it will cost, the run, what it looks like, and
# what the model says. The data and the model's shape come with tonnage, so nothing is fetched; the weights are random
# at the start. For a run of your own, put a hub id or a directory and your rows in the place of these.

# %%
import json
from pathlib import Path
from typing import Any

import tonnage
from tonnage.demo.folder import write_folder

demo = write_folder(Path("runs/first-run"))
rows = [json.loads(line) for line in demo.train.read_text().splitlines()]
print(f"{len(rows):,} rows, such as {rows[0]}")

# %% [markdown]
# A config is a model, data, and keyword arguments; docs/config.md has every key. Rows may be in memory or in files.
# Half a pass over them is enough to see it learn; `tonnage demo` takes three and a half.

# %%
data = {"train": rows, "validation": 0.01, "max_length": 256}
settings: dict[str, Any] = {"init": "random", "precision": "fp32", "batch": {"tokens": 512}, "epochs": 0.5}
settings["optimizer"] = {"lr": 3e-3, "betas": [0.9, 0.98], "weight_decay": 0.01, "warmup": 0.05}
settings["evaluate"] = {"every": 0.25, "prompts": 3, "max_new_tokens": 16}

# %% [markdown]
# The plan comes first: where every byte and every second will go. In a notebook a plan is drawn where it is the last
# line of a cell.

# %%
plan = tonnage.plan(demo.model, data, **settings)
peak, minutes = plan.choice.peak_bytes / 2**30, plan.num_steps * plan.choice.seconds.total / 60
print(f"{plan.num_steps} steps of {plan.tokens_per_step} tokens, {peak:.2f} GiB, about {minutes:.1f} minutes")
plan

# %% [markdown]
# Now the run. Here it is a loop, so each step can be looked at as it comes; `tonnage.train(...)` with the same
# arguments is that loop with curves that are drawn while you wait.

# %%
with tonnage.start(demo.model, data, output=demo.run, **settings) as running:
    for step in running:
        if step.step == 1 or step.step % 50 == 0:
            print(f"step {step.step:4}  loss {step.loss:6.3f}  {step.tokens_per_second:6,.0f} tokens/s")
run = running.run
print(run.summary())
run

# %% [markdown]
# Everything that was measured is a frame, and the account of the data says what became of every row.

# %%
print(run.metrics[["loss", "eval_loss", "lr", "grad_norm"]].describe().round(3))
print(f"{run.account.total.rows_read:,} rows read, {run.plan.data.supervised_tokens:,} tokens are trained on")

# %% [markdown]
# What it answered at evaluations, and what it answers now. `run.export` is a plain Hugging Face directory: any program
# that loads those loads it.

# %%
for sample in run.samples:
    print(f"step {sample.step:4}  {sample.prompt!r}: {sample.answer!r}, expected {sample.expected!r}")
questions = ["The door is open. Say the opposite.", "Sort these numbers: 9 4 7"]
for question, answer in zip(questions, run.generate(questions, max_new_tokens=16), strict=True):
    print(f"{question} -> {answer}")
print("model:", run.export)

# %% [markdown]
# The run is a directory of plain files. It can be opened again at any time, here or elsewhere, and its report is one
# page to keep or to send.

# %%
again = tonnage.open_run(demo.run)
print(again.config.optimizer.lr, again.steps[-1].loss, again.report())
