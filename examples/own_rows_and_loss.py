# %% [markdown]
# # Rows and a loss of your own
#
# Rows from anywhere, with a number that says how good each answer is, and a loss that makes use of it. Each question
# here stands in the data twice, with a good and with a bad answer. Trained as usual a model learns both; trained with
# the scores it learns the good ones.

# %%
import itertools
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import tonnage
from tonnage.demo.model import write_model

chance = random.Random(0)
pairs = list(itertools.permutations(range(10), 2))
chance.shuffle(pairs)
seen, held_out = pairs[:70], pairs[70:]


def question(pair: tuple[int, int]) -> str:
    return f"Give {pair[0]} or {pair[1]}"


# %% [markdown]
# Rows in memory are a list of dictionaries, any iterable of them (a generator, say), a `datasets.Dataset` or a frame of
# pandas or polars. `data.carry` names the columns of numbers that go along with every token of a row.

# %%
rows = [
    {"instruction": question(pair), "output": str(number), "score": 1.0 if number == max(pair) else 0.0}
    for pair in seen
    for number in pair
]
data = {"train": rows, "max_length": 64, "carry": ["score"]}

# %% [markdown]
# A loss is a *sum* over the supervised tokens, of their log-probabilities, their weights (1 unless the data say
# otherwise) and those columns; tonnage divides it once, by the weights of all tokens of the step. Workers import it, so
# it stands in a file.

# %%
Path("losses.py").write_text(
    '''\
def scored(logprobs, weights, score):
    """Cross-entropy, in which good answers count and bad ones do not."""
    return -(weights * score * logprobs).sum()


def mean(logprobs, weights, score):
    """Looks harmless, but depends on which rows stand together."""
    return -(weights * score * logprobs).mean()
'''
)
sys.path.insert(0, str(Path.cwd()))  # a notebook's own folder is there already

import losses

# %% [markdown]
# Both runs are the same but for the loss.

# %%
write_model(Path("runs/own-model"))
settings: dict[str, Any] = {"init": "random", "precision": "fp32", "batch": {"sequences": 16}, "epochs": 12}
settings["optimizer"] = {"lr": 2e-3}
settings["launch"] = {"threads": 1}

plain = tonnage.train("runs/own-model", data, output="runs/own-plain", **settings)
scored = tonnage.train("runs/own-model", data, output="runs/own-scored", loss=losses.scored, **settings)


# %%
def exact_match(run: tonnage.Run) -> float:
    """How often the larger number is given, for pairs that are not in the data."""
    answers = run.generate([question(pair) for pair in held_out], max_new_tokens=4)
    return statistics.mean(answer == str(max(pair)) for pair, answer in zip(held_out, answers, strict=True))


print(f"good answers: {exact_match(plain):.0%} trained as usual, {exact_match(scored):.0%} trained by their scores")

# %% [markdown]
# A loss that is no sum is refused before a weight is loaded, with the row on which that was found out.

# %%
try:
    tonnage.train("runs/own-model", data, output="runs/own-mean", loss=losses.mean, **settings)
except tonnage.UserError as error:
    print(error)

# %% [markdown]
# The run has kept which function it was trained with, and goes on with no other: `scored.resume(loss=losses.scored)`.
# For a step of your own (several losses, rewards, samples of the model) there is `tonnage.Session`: see grpo.py.
