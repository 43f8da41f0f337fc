"""What all contestants get: one model directory with random weights, one set of documents, cut into steps once.

The steps are those of a run of tonnage: its own preparation reads, renders, masks and orders the rows. The peers get
the same documents as token ids with a mask, step by step, so that everybody sees the same tokens between two updates.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from tonnage.data import PackedDataset, pack_at
from tonnage.decide.decision import Decision, decide
from tonnage.decide.written import write_run
from tonnage.demo.tasks import training_examples
from tonnage.model.adapters import AdapterSpec, Trains, initialise, is_addition, prepare
from tonnage.model.anatomy import dissect
from tonnage.model.build import build_on_meta
from tonnage.prove import bench
from tonnage.prove.bench import shape_named
from tonnage.rundir.directory import RunDirectory

SHAPES: dict[str, PreTrainedConfig] = {name: shape_named(name) for name in bench.SHAPES}


def write_model(folder: Path, shape: str, tokenizer_file: Path | None = None) -> Path:
    """A model directory of a known shape, with random weights in bf16 (seed 0) and a tokenizer: one of bytes where no
    ``tokenizer.json`` is given."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=torch.bfloat16)
    model.save_pretrained(folder)
    end = dict.fromkeys(("eos_token", "bos_token", "pad_token"), "<|endoftext|>")
    if tokenizer_file is not None:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), **end)
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        bytewise = Tokenizer(models.BPE({letter: n for n, letter in enumerate(["<|endoftext|>", *letters])}, []))
        bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bytewise.decoder = decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, **end)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, number: int, least_bytes: int = 0) -> Path:
    """Instructions made up here, of lengths like those of instruction data: several small tasks each, and as many more
    as make an answer of ``least_bytes``."""
    draw = random.Random(0)
    examples = training_examples(0)
    with path.open("w") as out:
        for _ in range(number):
            tasks = draw.choices(examples, k=draw.choice((1, 1, 2, 2, 3, 4, 6)))
            while sum(len(task.instruction) + len(task.answer) for task in tasks) < least_bytes:
                tasks.append(draw.choice(examples))
            row = {
                "instruction": "\n".join(task.instruction for task in tasks),
                "output": "\n".join(f"{task.instruction} -> {task.answer}" for task in tasks),
            }
            out.write(json.dumps(row) + "\n")
    return path


def write_our_run(folder: Path, config: dict[str, Any]) -> Decision:
    """Decide on ``config`` and write the run directory ``folder``, for ``ours`` to carry out."""
    path = folder.with_suffix(".yaml")
    path.write_text(json.dumps({"track": [], "output": str(folder), **config}))
    decision = decide(str(path), [])
    write_run(RunDirectory(folder), decision)
    return decision


def write_additions(path: Path, model: Path, rank: int) -> Path:
    """The low-rank additions to all linear layers with which a run of seed 0 begins, under peft's names."""
    meta = build_on_meta(AutoConfig.from_pretrained(model), torch.float32)
    prepare(meta, dissect(meta), Trains(AdapterSpec(rank, 1.0)), torch.float32)
    made = {name: torch.empty(one.shape) for name, one in meta.named_parameters() if is_addition(name)}
    initialise(made, 0)
    save_file({f"base_model.model.{name}.weight": one for name, one in made.items()}, path)
    return path


def write_steps(path: Path, decision: Decision, num_steps: int) -> list[list[dict[str, list[int]]]]:
    """The documents of the first steps of a run, in its order: ids, and which of them are supervised.

    Written as one JSON list of steps, each a list of documents.
    """
    data = PackedDataset.open(decision.plan.data.train_path)
    steps: list[list[dict[str, list[int]]]] = []
    for step in range(num_steps):
        documents = []
        for position in range(step * decision.plan.packs_per_step, (step + 1) * decision.plan.packs_per_step):
            pack = data.pack(pack_at(position, data.num_packs, decision.config.seed))
            start = 0
            for length in pack.lengths.tolist():
                part = slice(start, start + length)
                start += length
                supervised = (pack.weights[part] > 0).astype(int).tolist()
                documents.append({"ids": pack.input_ids[part].tolist(), "supervised": supervised})
        steps.append(documents)
    path.write_text(json.dumps(steps))
    return steps
