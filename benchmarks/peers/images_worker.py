"""TRL's SFTTrainer on rows with images as a contestant.

    python -m benchmarks.peers.images_worker SPEC.json

``SPEC`` names the model, the file of rows, which of them every step has, and the rows of a micro-batch. What is no part
of the model of text is frozen. The trainer waits for its turn where it has written its log of a step.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from benchmarks.peers.protocol import Seat, be_alone
from benchmarks.peers.trainer_worker import Turns
from datasets import Dataset, Image, List
from transformers import AutoModelForImageTextToText, AutoProcessor


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Rows as TRL takes them where only answers are trained."""
    rows = []
    for line in path.read_text().splitlines():
        question, answer = json.loads(line)["messages"]
        image, text = question["content"]
        prompt = [{"role": "user", "content": [{"type": "image", "text": None}, text]}]
        rows.append({"images": [str(path.parent / image["path"])], "prompt": prompt, "completion": [answer]})
    return rows


def main(path: str) -> None:
    spec = json.loads(Path(path).read_text())
    seat = Seat()
    be_alone()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rows = rows_of(Path(spec["rows"]))
    in_order = [rows[number] for step in spec["order"] for number in step]
    dataset = Dataset.from_list(in_order).cast_column("images", List(Image()))
    arguments: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": spec["documents"],
        "gradient_accumulation_steps": len(spec["order"][0]) // spec["documents"],
        "max_steps": len(spec["order"]),
        "max_length": None,
        "completion_only_loss": True,
        "learning_rate": spec["lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "adam_beta2": spec["beta2"],
        "optim": "adamw_torch_fused",
        "bf16": True,
        "use_cpu": True,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **spec["arguments"],
    }
    model: Any = AutoModelForImageTextToText.from_pretrained(
        spec["model"], dtype=torch.float32, attn_implementation="sdpa"
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("language_model" in name or "lm_head" in name)
    trainer = trl.SFTTrainer(
        model,
        args=trl.SFTConfig(**arguments),
        train_dataset=dataset,
        processing_class=AutoProcessor.from_pretrained(spec["model"]),
        callbacks=[Turns(seat, spec["tokens"])],
    )
    told = {name: arguments[name] for name in arguments if name not in ("output_dir", "max_steps")}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    seat.ready(**versions, weights="float32", trained=trained, arguments=told)
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
