# %% [markdown]
# # GRPO with a step of one's own
#
# A reward, and no answers: the model writes several answers to each question, and those that are better than the
# others of their group become likelier (Shao et al., "DeepSeekMath", 2024). `tonnage.Session` samples, computes
# gradients and updates; what is the method's own is the reward, the advantages and the loss.
#
# The model starts from random weights, so it is shown the *form* of an answer first: one of two numbers, either one.
# What is wanted, the larger one, it learns from the reward alone.

# %%
import itertools
import random
import statistics
from pathlib import Path
from typing import Any

import torch

import tonnage
from tonnage.demo.model import write_model

GROUP, QUESTIONS, UPDATES = 8, 12, 40
chance = random.Random(0)
pairs = list(itertools.permutations(range(10), 2))
chance.shuffle(pairs)
asked, held_out = pairs[:70], pairs[70:]


def question(pair: tuple[int, int]) -> str:
    return f"Give {pair[0]} or {pair[1]}"


def reward(pair: tuple[int, int], answer: str) -> float:
    return float(answer == str(max(pair)))


# %% [markdown]
# A loss is a *sum* over tokens, of their log-probabilities, their weights, and the columns of the rows that
# `data.carry` names. There is one update for each sampling, so the ratio of the policies is 1 and nothing is clipped.


# %%
def grpo(logprobs: torch.Tensor, weights: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    ratio = torch.exp(logprobs - logprobs.detach())
    return -(weights * advantage * ratio).sum()


def exact_match(session: tonnage.Session) -> float:
    answers = session.sample([question(pair) for pair in held_out], max_new_tokens=4, temperature=0)
    return statistics.mean(reward(pair, answer.text) for pair, answer in zip(held_out, answers, strict=True))


# %%
write_model(Path("runs/grpo-model"))
rows = [{"instruction": question(pair), "output": str(number), "advantage": 1.0} for pair in asked for number in pair]
data = {"train": rows, "max_length": 64, "carry": ["advantage"]}
settings: dict[str, Any] = {"init": "random", "precision": "fp32", "batch": {"sequences": 16}, "epochs": 12}
settings["launch"] = {"threads": 1}

with tonnage.Session("runs/grpo-model", data, output="runs/grpo", **settings) as session:
    for batch in session.batches():  # the form of an answer
        session.forward_backward(batch)
        session.update(lr=2e-3)
    before = exact_match(session)
    for _ in range(UPDATES):
        group_of = [pair for pair in chance.sample(asked, QUESTIONS) for _ in range(GROUP)]
        answers = session.sample([question(pair) for pair in group_of], max_new_tokens=3, batch_size=128)
        rewards = torch.tensor([reward(*both) for both in zip(group_of, [one.text for one in answers], strict=True)])
        groups = rewards.view(QUESTIONS, GROUP)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        batch = session.batch([one.row(advantage=float(a)) for one, a in zip(answers, advantages, strict=True)])
        session.forward_backward(batch, loss=grpo)
        session.update(lr=1e-3)
    after = exact_match(session)
    session.save()

print(f"exact match on pairs that were never asked: {before:.0%} before, {after:.0%} after")
