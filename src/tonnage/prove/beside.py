"""TRL's SFTTrainer on the same shape and rows, where it is installed: all weights, 4,096 tokens, bf16."""

from __future__ import annotations

import gc
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

from tonnage.prove.material import SHAPES, bare_shape, full_rows
from tonnage.prove.memory import DEVICE, MeasuredWay
from tonnage.prove.proof import Proof
from tonnage.prove.speed import LENGTH, SMALL_LENGTH, measure

PACKS, STEPS = 4, 6


def prove(proof: Proof) -> None:
    if not all(map(importlib.util.find_spec, ("trl", "datasets", "accelerate"))):
        proof.skip("beside", "TRL", "trl is not installed; nothing else depends on it")
        return
    name = "1B" if proof.on_gpu else "small"
    memory = {**DEVICE, "recompute": "none"}
    ours = measure(proof, MeasuredWay("beside TRL", {"memory": memory}, PACKS, name, STEPS))
    if ours.refused:
        proof.skip("beside", "TRL", ours.refused)
        return
    seconds = _trl(proof, name)
    later = sorted(seconds[2:])
    tokens = PACKS * (LENGTH if proof.on_gpu else SMALL_LENGTH) / later[len(later) // 2]
    proof.more["TRL"] = {"tokens_per_second": tokens, "step_seconds": seconds}
    proof.found("beside", f"{name}, TRL's SFTTrainer: {tokens:,.0f} tokens/s", ours.tokens_per_second / tokens)


def _trl(proof: Proof, name: str) -> list[float]:
    """Seconds of its steps."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    shape, length = SHAPES[name], LENGTH if proof.on_gpu else SMALL_LENGTH
    folder = bare_shape(proof.folder / name, **shape)
    file = Path(full_rows(proof.folder, PACKS * STEPS, length, shape["vocab_size"]))
    rows = [{"input_ids": json.loads(line)["input_ids"]} for line in file.read_text().splitlines()]
    torch.set_default_device(proof.device)
    try:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    finally:
        torch.set_default_device("cpu")
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if proof.on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    config = trl.SFTConfig(
        output_dir=str(proof.folder / "trl"),
        per_device_train_batch_size=PACKS,
        max_steps=STEPS,
        max_length=length,
        bf16=True,
        use_cpu=not proof.on_gpu,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = trl.SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[Clock()],
    )
    began = time.perf_counter()
    trainer.train()
    del trainer, model
    gc.collect()
    return [after - before for before, after in zip([began, *times], times, strict=False)]
