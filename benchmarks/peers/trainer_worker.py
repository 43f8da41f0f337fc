"""transformers' Trainer and TRL's SFTTrainer as contestants; runs in the peers' environment.

    python -m benchmarks.peers.trainer_worker SPEC.json

``SPEC`` says which (``"class": "Trainer" | "SFTTrainer"``), names the model and the steps (``inputs.write_steps``), the
documents of a micro-batch, and further arguments of the trainer's config. Within a step the documents are sorted by
length, which is what grouping by length is for: little of a micro-batch is padding, and the step is the same.
``"experts"`` names a way in which transformers computes those of a mixture. ``"collator": "flat"`` lays the documents
of a micro-batch side by side instead (padding-free), for the Trainer. With ``"adapter"`` (rank, alpha, and the file
with its first weights) the model is one of peft's over frozen weights, in bitsandbytes' 4 bits if ``"bits4"``.
With ``"ddp"`` a trainer that is alone is wrapped in DDP all the same, as ``torchrun`` with one process has it.
``"device": "cuda"`` trains on a GPU,
and ``"drawn"`` says that the model's directory has no weights: they are drawn, in the type that it names, as those of a
run of tonnage are (``build.filling_where_they_lie``), which must be installed.

The trainer waits for its turn where it has written its log of a step.
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
from benchmarks.peers.protocol import Seat, be_alone
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback


class Turns(TrainerCallback):
    """Waits for turns; at the end of one it tells the losses that were logged."""

    def __init__(self, seat: Seat, tokens: list[int]) -> None:
        self._seat, self._tokens = seat, tokens
        self._taken = self._told = self._turn = 0
        self._losses: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Everything is built."""
        self._turn = self._seat.turn()

    def on_log(self, args: Any, state: Any, control: Any, **told: Any) -> None:
        """A step is over."""
        logs = told["logs"]
        if "loss" not in logs:
            return
        self._losses.append(float(logs["loss"]))
        self._taken += 1
        if len(self._losses) == self._turn:
            device_peak = None
            if args.device.type == "cuda":
                torch.cuda.synchronize()
                device_peak = torch.cuda.max_memory_allocated()
            tokens = self._tokens[self._taken - self._turn : self._taken]
            self._seat.done(self._losses, tokens, device_peak=device_peak)
            self._losses = []
            self._turn = self._seat.turn()
            if not self._turn:
                os._exit(0)


def load(spec: dict[str, Any], dtype: torch.dtype, **how: Any) -> Any:
    """The model."""
    if "experts" in spec:
        how["experts_implementation"] = spec["experts"]
    how["attn_implementation"] = spec.get("attention", "sdpa")
    if spec.get("drawn"):
        model = drawn(spec, how)
        return model.float() if dtype == torch.float32 else model  # buffers stay as they are
    return AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype, **how)


def drawn(spec: dict[str, Any], how: dict[str, Any]) -> Any:
    """A model without files, with the weights that a run of tonnage draws."""
    from tonnage.model.build import filling_where_they_lie, initialise_randomly

    config = AutoConfig.from_pretrained(spec["model"])
    with torch.device(spec["device"]):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, spec["drawn"]), **how)
    with filling_where_they_lie():
        initialise_randomly(model, 0)
    return model


def with_additions(spec: dict[str, Any], dtype: torch.dtype, versions: dict[str, str]) -> Any:
    """The model with low-rank additions to all its linear layers."""
    import peft
    from safetensors.torch import load_file

    versions["peft"], how = peft.__version__, {}
    if spec.get("bits4"):
        import bitsandbytes

        versions["bitsandbytes"] = bitsandbytes.__version__
        how["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    said = spec["adapter"]
    config = peft.LoraConfig(r=said["rank"], lora_alpha=said["alpha"], target_modules="all-linear")
    model = peft.get_peft_model(load(spec, dtype, **how), config)
    first = load_file(said["start"])
    told: Any = peft.set_peft_model_state_dict(model, first)
    assert not told.unexpected_keys, told.unexpected_keys
    assert sum(one.numel() for one in first.values()) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    model.enable_input_require_grads()
    return model


def main(path: str) -> None:
    spec = json.loads(Path(path).read_text())
    seat = Seat()
    if not spec.get("ddp"):
        be_alone()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    steps = json.loads(Path(spec["steps"]).read_text())
    rows: list[dict[str, list[int]]] = []
    for step in steps:
        for document in sorted(step, key=lambda document: -len(document["ids"])):
            pairs = zip(document["ids"], document["supervised"], strict=True)
            labels = [one if wanted else -100 for one, wanted in pairs]
            rows.append({"input_ids": document["ids"], "labels": labels})
    num_micro_batches, rest = divmod(len(steps[0]), spec["documents"])
    assert not rest
    arguments: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": spec["documents"],
        "gradient_accumulation_steps": num_micro_batches,
        "max_steps": len(steps),
        "learning_rate": spec["lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "adam_beta1": spec["betas"][0],
        "adam_beta2": spec["betas"][1],
        "adam_epsilon": spec["eps"],
        "max_grad_norm": spec["clip"],
        "optim": "adamw_torch_fused",
        "bf16": True,
        "use_cpu": spec.get("device", "cpu") == "cpu",
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        **spec.get("arguments", {}),
    }
    dtype = getattr(torch, spec.get("dtype", "float32"))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    model = with_additions(spec, dtype, versions) if "adapter" in spec else load(spec, dtype)
    model.config.use_cache = False
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    turns = Turns(seat, [sum(len(document["ids"]) for document in step) for step in steps])
    common = {"model": model, "train_dataset": Dataset.from_list(rows), "callbacks": [turns]}
    trainer: Any
    if spec["class"] == "SFTTrainer":
        import trl

        versions["trl"] = trl.__version__
        config = trl.SFTConfig(**arguments)
        trainer = trl.SFTTrainer(args=config, processing_class=tokenizer, **common)
    else:
        collator: Any = transformers.DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100)
        if spec.get("collator") == "flat":
            collator = transformers.DataCollatorWithFlattening()
        config = transformers.TrainingArguments(**arguments)
        trainer = transformers.Trainer(args=config, data_collator=collator, **common)
    told = {name: arguments[name] for name in arguments if name not in ("output_dir", "max_steps")}
    seat.ready(**versions, weights=str(dtype).removeprefix("torch."), arguments=told, collator=spec.get("collator"))
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
