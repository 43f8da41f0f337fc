"""TRL's DPOTrainer as a contestant.

    python -m benchmarks.peers.dpo_worker SPEC.json

``SPEC`` names the model, the steps (lists of pairs as token ids), the pairs of a micro-batch, further arguments of
DPOConfig, and with ``"adapter"`` (rank, alpha) low-rank additions by peft. The trainer waits for its turn where it has
written its log of a step.
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
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer


class Trainer(trl.DPOTrainer):  # type: ignore[misc]
    """On pairs that are tokens already, in their order."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def main(path: str) -> None:
    spec = json.loads(Path(path).read_text())
    seat = Seat()
    be_alone()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    steps = json.loads(Path(spec["steps"]).read_text())
    num_micro_batches, rest = divmod(len(steps[0]), spec["pairs"])
    assert not rest
    arguments: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": spec["pairs"],
        "gradient_accumulation_steps": num_micro_batches,
        "max_steps": len(steps),
        "max_length": None,
        "learning_rate": spec["lr"],
        "lr_scheduler_type": "constant",
        "adam_beta2": spec["beta2"],
        "optim": "adamw_torch_fused",
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **spec.get("arguments", {}),
    }
    dtype = getattr(torch, spec.get("dtype", "float32"))
    model: Any = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype, attn_implementation="sdpa")
    adapter = {}
    if (additions := spec.get("adapter")) is not None:
        from peft import LoraConfig

        lora = LoraConfig(r=additions["rank"], lora_alpha=additions["alpha"], target_modules="all-linear")
        adapter = {"peft_config": lora}
    tokens = [sum(sum(map(len, pair.values())) for pair in step) for step in steps]
    trainer = Trainer(
        model,
        args=trl.DPOConfig(**arguments),
        train_dataset=Dataset.from_list([pair for step in steps for pair in step]),
        processing_class=AutoTokenizer.from_pretrained(spec["model"]),
        callbacks=[Turns(seat, tokens)],
        **adapter,
    )
    told = {name: arguments[name] for name in arguments if name not in ("output_dir", "max_steps")}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    seat.ready(**versions, weights=str(dtype).removeprefix("torch."), arguments=told)
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
