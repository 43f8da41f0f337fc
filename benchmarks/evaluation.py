"""Tokens a second of generated answers: the engine of ``tonnage eval`` beside transformers' ``generate`` with padding.

    python benchmarks/evaluation.py [--prompts 500] [--trial 128] [--layers 12] [--hidden 768] [--output FILE]

A model of random weights answers prompts of random tokens, greedily, in fp32; by default it has the shape of a model
of 160M parameters. Every so-many-th token of the vocabulary ends an answer, so that answers have lengths as varied as
those of a trained model. transformers has the prompts sorted by length, in each of several batch sizes; the fastest
for the first prompts (``--trial``) is the one that answers all of them. Both must give the same answers to every
prompt. Prints tokens a second of both and their ratio, and those of passes over every token once at the rate of the
processor's own matrix products (``bound``), which no engine exceeds in fp32; JSON goes to ``--output``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tonnage.host.processor import processor

MEAN_ANSWER = 48
"""Tokens of an answer on average, were each token drawn."""


def build(arguments: argparse.Namespace, directory: Path) -> Any:
    """A model of random weights, written to ``directory``, as transformers has it."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=max(1, arguments.hidden // 64),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.2,  # so that answers do not run in circles
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(directory)
    return model


def by_transformers(model: Any, prompts: list[list[int]], stops: list[int], room: int, batch: int) -> list[list[int]]:
    """Answers in padded batches of prompts of similar length."""
    found: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for start in range(0, len(order), batch):
        some = order[start : start + batch]
        longest = max(len(prompts[number]) for number in some)
        ids = torch.tensor([[0] * (longest - len(prompts[one])) + prompts[one] for one in some])
        mask = torch.tensor([[0] * (longest - len(prompts[one])) + [1] * len(prompts[one]) for one in some])
        with torch.inference_mode():
            whole = model.generate(
                ids, attention_mask=mask, max_new_tokens=room, do_sample=False, eos_token_id=stops, pad_token_id=0
            )
        for number, tokens in zip(some, whole[:, longest:].tolist(), strict=True):
            end = next((at for at, token in enumerate(tokens) if token in stops), len(tokens))
            found[number] = tokens[:end]
    return found


def product_rate(hidden: int, rows: int = 512) -> float:
    """FLOP/s of fp32 products of the shape of an MLP's."""
    left, right = torch.randn(rows, hidden), torch.randn(hidden, 4 * hidden)
    seconds = []
    for _ in range(50):
        began = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - began)
    return 2 * rows * hidden * 4 * hidden / statistics.median(seconds)


def of_transformers(
    model: Any, prompts: list[list[int]], stops: list[int], room: int, batch: int
) -> tuple[float, list[list[int]]]:
    """Tokens a second of its answers, what ends each counted, and the answers."""
    began = time.perf_counter()
    found = by_transformers(model, prompts, stops, room, batch)
    return (sum(map(len, found)) + len(found)) / (time.perf_counter() - began), found


def by_engine(directory: Path, prompts: list[list[int]], stops: list[int], room: int) -> tuple[list[list[int]], float]:
    """Answers of the engine, and the seconds that they took; loading is not counted, as it is not for the other."""
    from tonnage.decide.evaluation import MOST_TOGETHER, Checked, Loading, assembled, deal_of, kept_tokens
    from tonnage.model.files import find_model, read_model_config
    from tonnage.parallel.world import join_world
    from tonnage.rundir.samples import Prompt
    from tonnage.training.answers import Asking, answer

    files = find_model(str(directory), tokenizer=False)
    config = read_model_config(files)
    with join_world() as world:
        pipeline, dtypes, isolation = assembled(Checked(files, config, Loading("fp32"), None), world, 2048)
        asking = Asking(
            tuple(Prompt("", one, room) for one in prompts),
            frozenset(stops),
            row_tokens=kept_tokens(config, torch.float32, [len(one) + room for one in prompts]),
            decode=str,
            most_together=MOST_TOGETHER,
        )
        began = time.perf_counter()
        found = answer(pipeline, asking, deal_of(isolation, 2048, world, dtypes), world)
        return found, time.perf_counter() - began


def main() -> None:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompts", 500), ("layers", 12), ("hidden", 768), ("vocabulary", 50304), ("room", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--trial", type=int, default=128)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    draws = np.random.default_rng(0)
    lengths = np.clip(draws.lognormal(np.log(90), 0.5, arguments.prompts), 8, 400).astype(int)
    prompts = [draws.integers(3, arguments.vocabulary, length).tolist() for length in lengths]
    stops = list(range(2, arguments.vocabulary, MEAN_ANSWER))
    with tempfile.TemporaryDirectory() as folder:
        model = build(arguments, Path(folder))
        parameters = sum(one.numel() for one in model.parameters())
        answers, seconds = by_engine(Path(folder), prompts, stops, arguments.room)
        tokens = sum(map(len, answers)) + len(answers)  # what ends an answer was generated as well
        found: dict[str, Any] = {
            "parameters": parameters,
            "prompts": len(prompts),
            "processor": processor(),
            "date": datetime.date.today().isoformat(),
            "threads": torch.get_num_threads(),
            "answer_tokens": {"mean": tokens / len(answers), "median": statistics.median(map(len, answers))},
            "tonnage": tokens / seconds,
            "transformers": {},
        }
        print(f"{parameters / 1e6:.0f}M parameters, {tokens:,} tokens of answers")
        print(f"tonnage: {tokens / seconds:,.1f} a second")
        for batch in arguments.batches:
            rate, _ = of_transformers(model, prompts[: arguments.trial], stops, arguments.room, batch)
            found["transformers"][batch] = rate
            print(f"transformers, {arguments.trial} prompts in batches of {batch}: {rate:,.1f} a second", flush=True)
        # Head: of answers' tokens and the last of each prompt alone.
        within = parameters - 2 * arguments.vocabulary * arguments.hidden
        passed = sum(map(len, prompts)) + tokens
        flops = 2 * (within * passed + arguments.vocabulary * arguments.hidden * tokens)
        found["bound"] = tokens / (flops / product_rate(arguments.hidden))
        print(f"bound by the processor's products: {found['bound']:,.1f} a second")
        best = max(found["transformers"], key=found["transformers"].get)
        rate, others = of_transformers(model, prompts, stops, arguments.room, best)
        same = sum(one == other for one, other in zip(answers, others, strict=True))
        found |= {"transformers_batch": best, "transformers_all": rate, "same_answers": same}
        print(f"transformers, all in batches of {best}: {rate:,.1f} a second, {same} of {len(prompts)} answers alike")
    found["ratio"] = found["tonnage"] / rate
    print(f"{found['ratio']:.2f} times as fast")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
