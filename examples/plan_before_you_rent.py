# %% [markdown]
# # Plan before you rent
#
# What a model needs on hardware that you do not have, before you pay for it: which ways of training fit, how long they
# take, and what that costs. No weights are read and no GPU is needed. Seconds of a GPU are computed from its data
# sheet: nobody has carried such a plan out on one yet, so take them as a comparison.

# %%
import json
from pathlib import Path
from typing import Any

import tonnage

GIB = 2**30

# %% [markdown]
# A plan needs a model's `config.json`, so a hub id will do. This notebook shall run without a network, and writes the
# shape of an 8B Llama into a directory.

# %%
shape = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
model = Path("models/llama-8b-shape")
model.mkdir(parents=True, exist_ok=True)
with (model / "config.json").open("w") as file:
    json.dump(shape, file)

# %% [markdown]
# What you want to do, and what you could rent. **The prices are made up**: write in what you are offered.

# %%
TOKENS = 50_000_000
run: dict[str, Any] = {"batch": {"tokens": 65_536}}
ways: dict[str, dict[str, Any]] = {
    "all weights": {},
    "LoRA": {"adapter": {"rank": 32}},
    "LoRA over 4 bits": {"adapter": {"rank": 32, "quantize": "nf4"}},
}
offers = {"RTX4090:64GB": 0.5, "A100-80GB": 2.0, "8xA100-80GB": 16.0}  # an hour of all of it

# %% [markdown]
# Without data a model is planned for full rows of `data.max_length`, half of them trained on. What does not fit is a
# `UserError` that says by how much.

# %%
plans = {}
for hardware, price in offers.items():
    for way, keys in ways.items():
        try:
            plan = tonnage.plan(model, hardware=hardware, **keys, **run)
        except tonnage.UserError as error:
            print(f"{hardware:14}{way:18}does not fit: {error.problems[0].found}")
            continue
        plans[hardware, way] = plan
        hours = TOKENS / plan.tokens_per_step * plan.choice.seconds.total / 3600
        device, host = plan.choice.peak_bytes / GIB, plan.choice.host_bytes / GIB
        memory = f"{device:5.1f} GiB on each device, {host:5.1f} GiB on its host"
        print(f"{hardware:14}{way:18}{memory}, {hours:6.1f} h, costs {hours * price:7.2f}")

# %% [markdown]
# Why it is planned so, and where the memory goes at the fullest moment. In a notebook a plan is drawn, too.

# %%
plan = plans["8xA100-80GB", "all weights"]
for what, why in plan.reasons.items():
    print(f"{what}: {why}")
for category, num_bytes in plan.choice.parts(plan.choice.peak).items():
    print(f"  {category:12}{num_bytes / GIB:6.2f} GiB")
plan

# %% [markdown]
# Other layouts that were weighed: what is faster needs more memory, what needs less is slower.

# %%
for choice in plan.frontier:
    print(f"{choice.peak_bytes / GIB:5.1f} GiB  {choice.seconds.total:5.2f} s a step  {choice.layout.recompute}")

# %% [markdown]
# With your rows, `tonnage.plan(model, rows, hardware=...)` counts their tokens instead of supposing them, and
# `tonnage.train` with the same arguments, on the machine that you have rented, carries the plan out.
