"""Configurations in the style of Axolotl and LLaMA-Factory mean the same here.

The same rows, as many supervised tokens, as many steps, and transformers' own learning rates at the first, the middle
and the last of them. What is supervised is counted by the rules of those programs' documentation, in this file and
without our data code: Axolotl trains the output of a row and the token that ends it, or what the roles to train say and
the token that closes their turns. LLaMA-Factory trains answers, the token that closes a turn, and the line break that
templates such as ChatML write after it: that one is context here, because a model that has closed its turn has stopped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments, get_scheduler

from tiny import byte_tokenizer
from tonnage.checkpoint.save import Cursor
from tonnage.config import read_config
from tonnage.data import Prepared, prepare
from tonnage.migration import import_files
from tonnage.optim.schedule import Schedule
from tonnage.planning.batch import steps_of
from tonnage.planning.search import packs_of_run
from tonnage.training.judging import Judging, compared
from tonnage.training.loop import is_over

Row = dict[str, Any]

ALPACA: list[Row] = [
    {"instruction": f"Count to {n}.", "input": "" if n % 2 else "slowly", "output": " ".join(map(str, range(n + 1)))}
    for n in range(24)
]
CHATS: list[Row] = [
    {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": f"What is {n}+1?"},
            {"from": "gpt", "value": f"It is {n + 1}."},
            {"from": "human", "value": "And one more?"},
            {"from": "gpt", "value": f"{n + 2}"},
        ]
    }
    for n in range(16)
]
TEXTS: list[Row] = [{"body": "lorem ipsum " * (n + 1)} for n in range(8)]


def size(text: str) -> int:
    """Tokens of a text: its bytes."""
    return len(text.encode())


def answers(rows: Sequence[Row]) -> int:
    """Outputs of rows, each with the token that ends it."""
    return sum(size(row["output"]) + 1 for row in rows)


def turns(rows: Sequence[Row], *, last: bool = False) -> int:
    """What the assistant says, each turn with the token that closes it; of the last turn alone if ``last``."""
    said = [[turn["value"] for turn in row["conversations"] if turn["from"] == "gpt"] for row in rows]
    return sum(size(text) + 1 for one in said for text in (one[-1:] if last else one))


def whole_chats(rows: Sequence[Row]) -> int:
    """Every token of conversations in ChatML but the first, which nothing predicts."""
    names = {"human": "user", "gpt": "assistant", "system": "system"}
    return sum(
        sum(1 + size(names[turn["from"]] + "\n" + turn["value"]) + 1 + size("\n") for turn in row["conversations"]) - 1
        for row in rows
    )


def closed(tokens: int, num_turns: int) -> int:
    """Supervised tokens of LLaMA-Factory: with the line break after each turn."""
    return tokens + num_turns


def texts(rows: Sequence[Row], most: int) -> int:
    """Texts with the token that ends them, cut in pieces of ``most``: nothing predicts the first token of a piece."""
    sizes = [size(row["body"]) + 1 for row in rows]
    return sum(total - math.ceil(total / most) for total in sizes)


@dataclass(frozen=True)
class Case:
    """A configuration, and what it means."""

    config: str
    rows: list[Row]
    trained: int
    """Rows that are trained on."""
    supervised: Callable[[list[Row]], int]
    """Of the rows that are trained on; None of those left for validation, which are not the same ones."""
    steps: int
    warmup: int = 0
    schedule: str = "cosine"
    lr: float = 2e-4
    options: dict[str, float] = field(default_factory=dict)
    breaks: int = 0
    """Line breaks after turns that the other program supervises, and that are context here."""
    info: dict[str, Any] = field(default_factory=dict)
    """LLaMA-Factory's dataset_info.json."""
    is_quadratic: bool = False
    """Whether rates rise with the square of the step, of those that transformers has in warm-up."""


AXOLOTL: dict[str, Case] = {
    "alpaca, all weights": Case(
        """
base_model: tiny/llama
datasets: [{path: rows.jsonl, type: alpaca}]
sequence_len: 512
micro_batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 2
learning_rate: 0.0002
warmup_steps: 3
optimizer: adamw_torch_fused
bf16: auto
""",
        ALPACA,
        24,
        answers,
        steps=12,
        warmup=3,
    ),
    "alpaca, lora, constant": Case(
        """
base_model: tiny/llama
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
datasets: [{path: rows.jsonl, type: alpaca, split: "train"}]
sequence_len: 512
micro_batch_size: 3
num_epochs: 1
learning_rate: 1e-3
lr_scheduler: constant_with_warmup
warmup_steps: 4
""",
        ALPACA,
        24,
        answers,
        steps=8,
        warmup=4,
        schedule="constant_with_warmup",
        lr=1e-3,
    ),
    "alpaca, everything trained, linear": Case(
        """
base_model: tiny/llama
datasets: [{path: rows.jsonl, type: alpaca}]
train_on_inputs: true
sequence_len: 400
micro_batch_size: 4
num_epochs: 3
learning_rate: 5e-5
lr_scheduler: linear
warmup_steps: 0
""",
        ALPACA,
        24,
        lambda rows: sum(size(alpaca_text(row)) + 1 - 1 for row in rows),
        steps=18,
        schedule="linear",
        lr=5e-5,
    ),
    "chat, sharegpt fields": Case(
        """
base_model: tiny/llama
chat_template: chatml
datasets:
  - path: rows.jsonl
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    roles_to_train: [assistant]
    train_on_eos: turn
sequence_len: 512
micro_batch_size: 1
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 2e-4
warmup_ratio: 0.5
""",
        CHATS,
        16,
        turns,
        steps=4,
        warmup=2,
    ),
    "chat, qlora, steps": Case(
        """
base_model: tiny/llama
adapter: qlora
load_in_4bit: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
chat_template: chatml
datasets:
  - {path: rows.jsonl, type: chat_template, field_messages: conversations, message_field_role: from,
     message_field_content: value}
sequence_len: 512
micro_batch_size: 2
max_steps: 30
learning_rate: 0.0002
warmup_steps: 10
cosine_min_lr_ratio: 0.1
""",
        CHATS,
        16,
        turns,
        steps=30,
        warmup=10,
        schedule="cosine_with_min_lr",
        options={"min_lr_rate": 0.1},
    ),
    "packed": Case(
        """
base_model: tiny/llama
datasets: [{path: rows.jsonl, type: alpaca}]
sequence_len: 2048
sample_packing: true
micro_batch_size: 1
num_epochs: 4
learning_rate: 0.0002
warmup_steps: 1
""",
        [
            {"instruction": "Say it.", "input": "", "output": "x" * 853} for _ in range(16)
        ],  # a document has 1,024 tokens
        16,
        answers,
        steps=32,
        warmup=2,  # Axolotl's words for one step of warm-up
    ),
    "validation": Case(
        """
base_model: tiny/llama
datasets: [{path: rows.jsonl, type: alpaca}]
val_set_size: 0.25
evals_per_epoch: 4
saves_per_epoch: 1
sequence_len: 256
micro_batch_size: 3
num_epochs: 2
learning_rate: 0.0002
warmup_steps: 2
""",
        [{"instruction": f"Number {n:02}.", "input": "", "output": f"{n:02}"} for n in range(24)],
        18,
        lambda rows: 18 * (2 + 1),
        steps=12,
        warmup=2,
    ),
    "a part of a split": Case(
        """
base_model: tiny/llama
datasets: [{path: rows.jsonl, type: alpaca, split: "train[:50%]"}]
sequence_len: 256
micro_batch_size: 4
num_epochs: 2
learning_rate: 0.0002
warmup_steps: 0
""",
        ALPACA,
        12,
        lambda rows: answers(rows[:12]),
        steps=6,
    ),
    "text in pieces": Case(
        """
base_model: tiny/llama
datasets: [{path: rows.jsonl, type: completion, field: body}]
sequence_len: 32
micro_batch_size: 1
max_steps: 5
learning_rate: 0.0002
warmup_steps: 0
""",
        TEXTS,
        8,
        lambda rows: texts(rows, 32),
        steps=5,
    ),
    "chats without their system message, all trained": Case(
        """
base_model: tiny/llama
chat_template: chatml
datasets:
  - {path: rows.jsonl, type: chat_template, field_messages: conversations, drop_system_message: true}
train_on_inputs: true
sequence_len: 512
micro_batch_size: 4
num_epochs: 1
learning_rate: 0.0002
warmup_steps: 0
""",
        CHATS,
        16,
        lambda rows: whole_chats(
            [{"conversations": [turn for turn in row["conversations"] if turn["from"] != "system"]} for row in rows]
        ),
        steps=4,
    ),
    "a template of another family": Case(
        """
base_model: tiny/llama
chat_template: qwen3
datasets: [{path: rows.jsonl, type: chat_template, field_messages: conversations}]
tokens: ["<|im_start|>", "<|im_end|>"]
sequence_len: 512
micro_batch_size: 4
num_epochs: 1
learning_rate: 0.0002
warmup_steps: 0
""",
        CHATS,
        16,
        turns,  # of a thought that is empty nothing is trained
        steps=4,
    ),
    "a template of Cohere's": Case(
        """
base_model: tiny/llama
chat_template: cohere
datasets: [{path: rows.jsonl, type: chat_template, field_messages: conversations}]
special_tokens: {eos_token: "<|END_OF_TURN_TOKEN|>"}
sequence_len: 512
micro_batch_size: 4
num_epochs: 1
learning_rate: 0.0002
warmup_steps: 0
""",
        CHATS,
        16,
        turns,
        steps=4,
    ),
    "a quadratic warm-up": Case(
        """
base_model: tiny/llama
datasets: [{path: rows.jsonl, type: alpaca}]
sequence_len: 512
micro_batch_size: 2
num_epochs: 1
learning_rate: 0.0002
warmup_steps: 5
lr_quadratic_warmup: true
""",
        ALPACA,
        24,
        answers,
        steps=12,
        warmup=5,
        is_quadratic=True,
    ),
    "another end of text": Case(
        """
base_model: tiny/llama
datasets: [{path: rows.jsonl, type: alpaca}]
special_tokens: {eos_token: "<|im_end|>"}
tokens: ["<|im_start|>"]
sequence_len: 512
micro_batch_size: 4
num_epochs: 1
learning_rate: 0.0002
warmup_steps: 0
""",
        ALPACA,
        24,
        answers,
        steps=6,
    ),
    "a prompt of the chat style, all trained": Case(
        """
base_model: tiny/llama
datasets: [{path: rows.jsonl, type: "alpaca:chat"}]
train_on_inputs: true
sequence_len: 512
micro_batch_size: 4
num_epochs: 1
learning_rate: 0.0002
warmup_steps: 0
""",
        ALPACA,
        24,
        lambda rows: sum(size(chat_text(row)) for row in rows),  # with the end of text, without the first token
        steps=6,
    ),
    "jeopardy": Case(
        """
base_model: tiny/llama
datasets: [{path: rows.jsonl, type: jeopardy}]
sequence_len: 512
micro_batch_size: 4
num_epochs: 1
learning_rate: 0.0002
warmup_steps: 0
""",
        [{"question": f"It follows {n}.", "category": "Numbers", "answer": f"{n + 1}"} for n in range(24)],
        24,
        lambda rows: sum(size("what is " + row["answer"]) + 1 for row in rows),
        steps=6,
    ),
    "a prompt written out": Case(
        """
base_model: tiny/llama
datasets:
  - path: rows.jsonl
    type:
      system_prompt: Be brief.
      system_format: "<<{system}>>"
      field_instruction: ask
      field_output: say
      format: "[Q] {instruction} ({input}) [A]"
      no_input_format: "[Q] {instruction} [A]"
train_on_inputs: true
sequence_len: 512
micro_batch_size: 4
num_epochs: 1
learning_rate: 0.0002
warmup_steps: 0
""",
        [{"ask": "What is it?", "say": f"It's {n}.", "input": "" if n % 2 else "a 'number'"} for n in range(24)],
        24,
        lambda rows: sum(
            size("<<Be brief.>>[Q] What is it?" + (f" ({row['input']})" if row["input"] else "") + " [A]" + row["say"])
            for row in rows
        ),
        steps=6,
    ),
    "rows too long are left out": Case(
        """
base_model: tiny/llama
datasets: [{path: rows.jsonl, type: alpaca}]
sequence_len: 512
micro_batch_size: 4
num_epochs: 1
learning_rate: 0.0002
warmup_steps: 0
""",
        [*({**row, "output": row["output"] * 3} for row in ALPACA[:8]), {"instruction": "Go on.", "output": "y" * 600}],
        8,
        lambda rows: answers(rows[:8]),
        steps=2,
    ),
}


def chat_text(row: Row) -> str:
    """A row as Axolotl's prompt of the chat style shows it."""
    return (
        "SYSTEM: Below is an instruction that describes a task"
        + (", paired with an input that provides further context" if row["input"] else "")
        + f". Write a response that appropriately completes the request.\nUSER: {row['instruction']}\n"
        + (row["input"] + "\n" if row["input"] else "")
        + f"ASSISTANT:{row['output']}"
    )


def alpaca_text(row: Row) -> str:
    """A row as Alpaca's prompt shows it."""
    if row["input"]:
        head = (
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request."
        )
        asked = f"{row['instruction']}\n\n### Input:\n{row['input']}"
    else:
        head = (
            "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        )
        asked = row["instruction"]
    return f"{head}\n\n### Instruction:\n{asked}\n\n### Response:\n{row['output']}"


MESSAGES = {"rows": {"file_name": "rows.jsonl", "formatting": "sharegpt"}}
FACTORY = """
model_name_or_path: tiny/llama
dataset: rows
dataset_dir: .
template: qwen3_nothink
bf16: true
output_dir: out
"""

LLAMA_FACTORY: dict[str, Case] = {
    "lora by default": Case(
        FACTORY + "per_device_train_batch_size: 2\ngradient_accumulation_steps: 2\nnum_train_epochs: 1.0\n"
        "learning_rate: 1.0e-4\nlr_scheduler_type: cosine\nwarmup_ratio: 0.5\n",
        ALPACA,
        24,
        lambda rows: closed(answers(rows), 24),
        steps=6,
        warmup=3,
        lr=1e-4,
        breaks=24,
        info={"rows": {"file_name": "rows.jsonl"}},
    ),
    "all weights, linear by default": Case(
        FACTORY + "finetuning_type: full\nstage: sft\nper_device_train_batch_size: 8\nnum_train_epochs: 2.0\n",
        ALPACA,
        24,
        lambda rows: closed(answers(rows), 24),
        steps=6,
        schedule="linear",
        lr=5e-5,
        breaks=24,
        info={"rows": {"file_name": "rows.jsonl"}},
    ),
    "a template of another family, with empty thoughts": Case(
        FACTORY.replace("qwen3_nothink", "qwen3") + "finetuning_type: full\nper_device_train_batch_size: 4\n"
        "num_train_epochs: 1.0\nlearning_rate: 1.0e-4\nlr_scheduler_type: cosine\n",
        CHATS,
        16,
        lambda rows: closed(turns(rows), 32) + 32 * size("<think>\n\n</think>\n\n"),
        steps=4,
        lr=1e-4,
        breaks=32,
        info=MESSAGES,
    ),
    "thoughts that are off": Case(
        FACTORY.replace("qwen3_nothink", "qwen3") + "finetuning_type: full\nper_device_train_batch_size: 4\n"
        "enable_thinking: false\nnum_train_epochs: 1.0\nlearning_rate: 1.0e-4\nlr_scheduler_type: cosine\n",
        CHATS,
        16,
        lambda rows: closed(turns(rows), 32),
        steps=4,
        lr=1e-4,
        breaks=32,
        info=MESSAGES,
    ),
    "the first rows": Case(
        FACTORY + "finetuning_type: lora\nmax_samples: 10\nper_device_train_batch_size: 1\nnum_train_epochs: 3.0\n"
        "lr_scheduler_type: constant\nlearning_rate: 1.0e-5\n",
        ALPACA,
        10,
        lambda rows: closed(answers(rows[:10]), 10),
        steps=30,
        schedule="constant",
        lr=1e-5,
        breaks=10,
        info={"rows": {"file_name": "rows.jsonl"}},
    ),
    "chats": Case(
        FACTORY + "finetuning_type: lora\nlora_rank: 16\ncutoff_len: 1024\nper_device_train_batch_size: 4\n"
        "num_train_epochs: 1.0\nlearning_rate: 1.0e-4\nlr_scheduler_type: cosine\n",
        CHATS,
        16,
        lambda rows: closed(turns(rows), 32),
        steps=4,
        lr=1e-4,
        breaks=32,
        info=MESSAGES,
    ),
    "the last turn": Case(
        FACTORY + "finetuning_type: full\nmask_history: true\nper_device_train_batch_size: 4\nmax_steps: 9\n"
        "learning_rate: 1.0e-4\nlr_scheduler_type: cosine\nwarmup_steps: 4\n",
        CHATS,
        16,
        lambda rows: closed(turns(rows, last=True), 16),
        steps=9,
        warmup=4,
        lr=1e-4,
        breaks=16,
        info=MESSAGES,
    ),
    "prompts too": Case(
        FACTORY + "finetuning_type: full\ntrain_on_prompt: true\nper_device_train_batch_size: 4\nmax_steps: 9\n"
        "learning_rate: 1.0e-4\nlr_scheduler_type: linear\nwarmup_steps: 4\n",
        CHATS,
        16,
        whole_chats,
        steps=9,
        warmup=4,
        schedule="linear",
        lr=1e-4,
        info=MESSAGES,
    ),
    "columns and tags": Case(
        FACTORY + "finetuning_type: full\nper_device_train_batch_size: 2\nnum_train_epochs: 1.0\n"
        "lr_scheduler_type: cosine\n",
        [{"talk": [{"who": t["from"]} | t for t in row["conversations"]]} for row in CHATS],
        16,
        lambda rows: closed(turns([{"conversations": row["talk"]} for row in rows]), 32),
        steps=8,
        lr=5e-5,
        breaks=32,
        info={
            "rows": {
                "file_name": "rows.jsonl",
                "formatting": "sharegpt",
                "columns": {"messages": "talk"},
                "tags": {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"},
            }
        },
    ),
    "questions and answers": Case(
        FACTORY + "finetuning_type: lora\nper_device_train_batch_size: 3\nnum_train_epochs: 1.0\n"
        "lr_scheduler_type: cosine\nwarmup_steps: 2\n",
        [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(24)],
        24,
        lambda rows: closed(sum(size(row["answer"]) + 1 for row in rows), 24),
        steps=8,
        warmup=2,
        lr=5e-5,
        breaks=24,
        info={"rows": {"file_name": "rows.jsonl", "columns": {"prompt": "question", "response": "answer"}}},
    ),
    "validation": Case(
        FACTORY + "finetuning_type: lora\nval_size: 0.25\neval_strategy: steps\neval_steps: 2\n"
        "per_device_train_batch_size: 3\nnum_train_epochs: 1.0\nlr_scheduler_type: cosine\n",
        [{"instruction": f"Number {n:02}.", "output": f"{n:02}"} for n in range(24)],
        18,
        lambda rows: closed(18 * (2 + 1), 18),
        steps=6,
        lr=5e-5,
        breaks=18,
        info={"rows": {"file_name": "rows.jsonl"}},
    ),
    "packed": Case(
        FACTORY + "finetuning_type: full\npacking: true\nneat_packing: true\ncutoff_len: 512\n"
        "per_device_train_batch_size: 1\nnum_train_epochs: 2.0\nlr_scheduler_type: cosine\n",
        # <|im_start|>user\n ... <|im_end|>\n<|im_start|>assistant\n ... <|im_end|>\n is 256 tokens
        [{"instruction": "Say it.", "output": "x" * 227} for _ in range(16)],
        16,
        lambda rows: closed(answers(rows), 16),
        steps=16,
        lr=5e-5,
        breaks=16,
        info={"rows": {"file_name": "rows.jsonl"}},
    ),
    "text, packed in pieces": Case(
        FACTORY + "stage: pt\nfinetuning_type: full\ncutoff_len: 64\nper_device_train_batch_size: 2\n"
        "num_train_epochs: 1.0\nlr_scheduler_type: cosine\n",
        [{"body": f"{n:>127}"} for n in range(16)],  # 128 tokens with the one that ends a text: two pieces
        16,
        lambda rows: texts(rows, 64),
        steps=16,
        lr=5e-5,
        info={"rows": {"file_name": "rows.jsonl", "columns": {"prompt": "body"}}},
    ),
}


def check(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import a configuration, prepare its rows, and compare."""
    monkeypatch.chdir(folder)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in case.rows))
    (folder / "dataset_info.json").write_text(json.dumps(case.info))
    (folder / "run.yaml").write_text(case.config)
    found = import_files([folder / "run.yaml"])
    assert not found.lost, [(entry.setting.name, entry.note) for entry in found.lost]
    assert not found.needs
    assert not found.of("unknown")
    (folder / "config.yaml").write_text(found.text)
    config = read_config(folder / "config.yaml", ["data.max_loss=1"], check_files=False)
    prepared: Prepared = prepare(config.data, byte_tokenizer(), seed=config.seed, cache=folder / "cache")
    account = prepared.account.total
    assert account.rows_train == case.trained
    assert account.supervised.train == case.supervised(case.rows) - case.breaks
    num_steps = math.ceil(packs_of_run(config, prepared.train.num_packs) / config.packs_per_step)
    assert num_steps == case.steps
    optimizer = config.optimizer
    warmup, decay = (steps_of(length, num_steps) for length in (optimizer.warmup, optimizer.decay))
    ours = Schedule.of(optimizer.model_dump(), num_steps, warmup, decay)
    theirs = rates(case)
    if case.is_quadratic:
        theirs[:warmup] = [case.lr * (rate / case.lr) ** 2 for rate in theirs[:warmup]]
    for step in (1, num_steps // 2, num_steps) if not case.is_quadratic else range(1, num_steps + 1):
        assert ours.lr(step) == pytest.approx(theirs[step - 1], rel=1e-6, abs=1e-12), step


def rates(case: Case) -> list[float]:
    """Learning rates of all steps, by transformers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=case.lr)
    scheduler = get_scheduler(
        case.schedule,
        optimizer,
        num_warmup_steps=case.warmup,
        num_training_steps=case.steps,
        scheduler_specific_kwargs=case.options,
    )
    found = []
    for _ in range(case.steps):
        found.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", AXOLOTL)
def test_axolotl(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(AXOLOTL[name], tmp_path, monkeypatch)


@pytest.mark.parametrize("name", LLAMA_FACTORY)
def test_llama_factory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(LLAMA_FACTORY[name], tmp_path, monkeypatch)


SCHEDULES: list[tuple[str, str, dict[str, Any]]] = [
    ("cosine_with_restarts", "", {}),
    ("cosine_with_restarts", "{num_cycles: 3}", {"num_cycles": 3}),
    ("polynomial", "", {}),
    ("polynomial", "{power: 2.0, lr_end: 1.0e-5}", {"power": 2.0, "lr_end": 1e-5}),
    ("inverse_sqrt", "", {}),
    ("inverse_sqrt", "{timescale: 9}", {"timescale": 9}),
    ("warmup_stable_decay", "{num_decay_steps: 8}", {"num_decay_steps": 8}),
    (
        "warmup_stable_decay",
        "{num_decay_steps: 8, decay_type: 1-sqrt, min_lr_ratio: 0.2}",
        {"num_decay_steps": 8, "decay_type": "1-sqrt", "min_lr_ratio": 0.2},
    ),
]


@pytest.mark.parametrize("tool", ["axolotl", "llama-factory"])
@pytest.mark.parametrize(("name", "kwargs", "options"), SCHEDULES)
def test_schedules_of_transformers(
    name: str, kwargs: str, options: dict[str, Any], tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every learning rate of the run that they ask for."""
    keys = "max_steps: 30\nlearning_rate: 0.0002\nwarmup_steps: 5\n"
    keys += f"lr_scheduler_kwargs: {kwargs}\n" if kwargs else ""
    axolotl = "base_model: tiny/llama\ndatasets: [{path: rows.jsonl, type: alpaca}]\nmicro_batch_size: 2\n"
    if tool == "axolotl":
        text = f"{axolotl}lr_scheduler: {name}\n{keys}"
    else:
        text = f"{FACTORY}finetuning_type: full\nper_device_train_batch_size: 2\nlr_scheduler_type: {name}\n{keys}"
    case = Case(text, [], 0, answers, steps=30, warmup=5, schedule=name, options=options)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ALPACA))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.jsonl"}}))
    (tmp_path / "run.yaml").write_text(text)
    imported = import_files([tmp_path / "run.yaml"])
    assert imported.is_whole, imported.lost
    (tmp_path / "config.yaml").write_text(imported.text)
    optimizer = read_config(tmp_path / "config.yaml", check_files=False).optimizer
    ours = Schedule.of(optimizer.model_dump(), 30, 5, steps_of(optimizer.decay, 30))
    assert [ours.lr(step) for step in range(1, 31)] == pytest.approx(rates(case), rel=0, abs=1e-9)


LOSSES = ([3.0, 2.0, 1.0, 1.0, 1.0, 0.5], [1.0, 2.0, 1.0, 1.0], [2.0, 3.0, 1.5, 1.6, 1.7, 1.8], [1.0, 1.0, 0.9, 0.8])


@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("patience", [1, 2, 3])
def test_a_run_stops_early_at_the_evaluation_at_which_transformers_stops(losses: list[float], patience: int) -> None:
    callback = EarlyStoppingCallback(patience)
    arguments, state, control = TrainingArguments(metric_for_best_model="eval_loss"), TrainerState(), TrainerControl()
    judging = Judging(before=False, patience=patience)
    cursor = Cursor()
    for loss in losses:
        callback.on_evaluate(arguments, state, control, metrics={"eval_loss": loss})
        state.best_metric = loss if state.best_metric is None else min(loss, state.best_metric)
        cursor = compared({"eval_loss": loss}, judging, cursor)
        assert is_over(cursor, judging) == control.should_training_stop
        if control.should_training_stop:
            break
