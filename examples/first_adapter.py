# %% [markdown]
# # An adapter in ten minutes
#
# SmolLM2-135M-Instruct is bad at sorting numbers and at spelling words backwards. Here it learns some of that from 200
# rows, by LoRA: what it will cost, the run, and how much better it has become. A free GPU will do, and so will two
# cores. 270 MB of weights are downloaded.

# %% tags=["parameters"]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # a hub id, or a directory
NUM_ROWS = 200
EPOCHS = 4

# %% [markdown]
# The rows come with tonnage, and so do questions about words and numbers that are in no row. Of your own, `"train"` is
# a file or a data set of the hub, such as `{"path": "databricks/databricks-dolly-15k", "first": 200}`, and
# `"validation"` a file or a share of them, such as 0.1.

# %%
from typing import Any

import torch

import tonnage
from tonnage.demo.tasks import held_out_examples, training_examples

rows, questions = (
    [{"instruction": task.instruction, "output": task.answer} for task in tasks]
    for tasks in (training_examples(0)[:NUM_ROWS], held_out_examples(8, 0))
)
data = {"train": rows, "validation": questions, "max_length": 256}
print(f"{len(rows)} rows, such as {rows[0]}; {len(questions)} questions")

# %% [markdown]
# The T4 that Colab and Kaggle lend has no bf16: a plan in bf16 is refused there, with the advice to write
# `precision=fp16`. This asks torch first.

# %%
has_bf16 = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
settings: dict[str, Any] = {"precision": "bf16" if has_bf16 else "fp16", "launch": {"workers": 1}}
settings |= {"adapter": {"rank": 16}, "optimizer": {"lr": 1e-3, "warmup": 0.1}}
settings |= {"batch": {"sequences": 8}, "epochs": EPOCHS}
settings |= {"evaluate": {"scorer": "exact_match", "answers": 64, "max_new_tokens": 24}}

# %% [markdown]
# The plan: steps, memory and seconds, before a weight is loaded. The last line draws it.

# %%
plan = tonnage.plan(MODEL, data, **settings)
minutes = plan.num_steps * plan.choice.seconds.total / 60
print(f"{plan.num_steps} steps, {plan.choice.peak_bytes / 2**30:.2f} GiB, about {minutes:.1f} minutes")
plan

# %%
run = tonnage.train(MODEL, data, output="runs/adapter", **settings)
print(run.summary())

# %% [markdown]
# Before and after, on questions that it was not trained on: their loss, and the share of answers that are exactly
# right.

# %%
for line in run.comparison.lines():
    print("{:12}{:16}{:>8} before, {:>8} after".format(*line.cells))
asked = ["Sort these numbers: 7 2 9", "The soup is hot. Say the opposite."]
for question, answer in zip(asked, run.generate(asked, max_new_tokens=24), strict=True):
    print(f"{question} -> {answer}")
print("adapter:", run.export)
