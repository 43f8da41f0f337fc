"""TRL's SFTTrainer tunes a model on rows of tokens and writes it in bf16; runs in the peers' environment.

    python -m benchmarks.peers.trained_worker SPEC.json

``SPEC`` names the model, the rows (``input_ids`` and ``loss_mask``), the directory to write, seed, steps, documents of
a step and rate, and for LoRA rank and alpha. Weights are fp32 and products bf16; additions are merged at the end.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

MICRO_BATCH = 8


def main(path: str) -> None:
    """Train and write."""
    spec = json.loads(Path(path).read_text())
    transformers.set_seed(spec["seed"])
    rows = []
    for line in Path(spec["rows"]).read_text().splitlines():
        row = json.loads(line)
        pairs = zip(row["input_ids"], row["loss_mask"], strict=True)
        rows.append({"input_ids": row["input_ids"], "labels": [one if learnt else -100 for one, learnt in pairs]})
    config = trl.SFTConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=spec["documents"] // MICRO_BATCH,
        max_steps=spec["steps"],
        learning_rate=spec["lr"],
        lr_scheduler_type="cosine",
        warmup_steps=round(0.1 * spec["steps"]),
        weight_decay=0.0,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=True,
        use_cpu=True,
        seed=spec["seed"],
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    model: Any = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32, attn_implementation="sdpa")
    additions: Any = None
    if "adapter" in spec:
        import peft

        versions["peft"] = peft.__version__
        said = spec["adapter"]
        additions = peft.LoraConfig(r=said["rank"], lora_alpha=said["alpha"], target_modules="all-linear")
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    trainer: Any = trl.SFTTrainer(
        model=model,
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        peft_config=additions,
    )
    trainer.train()
    tuned = trainer.model.merge_and_unload() if additions is not None else trainer.model
    tuned.to(torch.bfloat16).save_pretrained(spec["out"])
    tokenizer.save_pretrained(spec["out"])
    (Path(path).parent / "versions.json").write_text(json.dumps(versions))


if __name__ == "__main__":
    main(sys.argv[1])
