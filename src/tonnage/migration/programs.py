"""Whose a configuration is, and what that program does where the configuration is silent.

Defaults of a program are part of what a file of it means: they are written into the config with the words ``by
default``. Each is the name that the program has for it and the value, read off the versions that are named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Defaults = Mapping[str, tuple[str, Any]]
"""By what it decides (see ``DECIDED``): the program's own name for it, and its value."""

DECIDED = {
    "micro_batch": "what one forward of a worker holds",
    "epochs": "passes over the data",
    "lr": "the highest learning rate",
    "schedule": "its shape after warm-up",
    "warmup": "steps of warm-up, or a fraction of all",
    "weight_decay": "weight decay",
    "betas": "betas of AdamW",
    "eps": "epsilon of AdamW",
    "clip": "the largest norm of the gradient",
    "router_loss": "weight of the loss of a mixture's routers",
    "accumulation": "forwards of a worker in a step",
    "precision": "precision",
    "max_length": "tokens of a sequence",
    "over_length": "what becomes of longer ones",
    "pack": "several conversations in a row",
    "recompute": "blocks computed again in the backward pass",
    "saves": "steps between checkpoints",
    "evaluates": "evaluations on the way",
    "rank": "rank of an adapter",
    "alpha": "its alpha",
    "dropout": "its dropout",
    "targets": "what it adapts",
}
"""What defaults are about, in the order in which the page shows them."""


@dataclass(frozen=True)
class Program:
    """A program whose configurations are read."""

    name: str
    versions: str
    defaults: Defaults = field(default_factory=dict, repr=False)
    counts_workers: bool = True
    """Whether how many workers there are is said in its files or beside them, and not found out when it starts."""

    @property
    def with_version(self) -> str:
        """``TRL 1.16``: whose defaults an import goes by."""
        return f"{self.name} {self.versions.partition(' (')[0]}"


_BETAS = ("betas", [0.9, 0.999])

DEEPSPEED_JSON = Program("DeepSpeed", "0.19")
ACCELERATE_YAML = Program("Accelerate", "1.15")
TRAINER = Program(
    "transformers' Trainer",
    "5.24 (and names of 4)",
    {
        "micro_batch": ("per_device_train_batch_size", 8),
        "epochs": ("num_train_epochs", 3.0),
        "lr": ("learning_rate", 5e-5),
        "schedule": ("lr_scheduler_type", "linear"),
        "warmup": ("warmup_steps", 0),
        "weight_decay": ("weight_decay", 0.0),
        "betas": _BETAS,
        "eps": ("adam_epsilon", 1e-8),
        "clip": ("max_grad_norm", 1.0),
        "precision": ("bf16 and fp16 false", "fp32"),
        "pack": ("a row of its own for each conversation", False),
        "saves": ("save_steps", 500),
    },
)
TRL = Program(
    "TRL",
    "1.16 (and names before)",
    {
        **TRAINER.defaults,
        "lr": ("learning_rate", 2e-5),
        "precision": ("bf16 true", "bf16"),
        "max_length": ("max_length", 1024),
        "over_length": ("truncation_mode keep_start", "truncate"),
        "recompute": ("gradient_checkpointing true", "full"),
        "router_loss": ("router_aux_loss_coef of config.json since TRL 1.14 (0.001 since 1.7, none before)", "model"),
        "rank": ("lora_r", 16),
        "alpha": ("lora_alpha", 32),
        "dropout": ("lora_dropout", 0.05),
        "targets": ("PEFT's choice for Llama and its kin", ["q_proj", "v_proj"]),
    },
)
TUTORIAL = Program(
    "the FSDP tutorial's script",
    "of September 2023",
    {
        "micro_batch": ("per_device_train_batch_size", 4),
        "accumulation": ("gradient_accumulation_steps", 4),
        "epochs": ("num_train_epochs", 1.0),
        "lr": ("learning_rate", 2e-4),
        "schedule": ("lr_scheduler_type", "constant"),
        "warmup": ("warmup_ratio", 0.03),
        "weight_decay": ("weight_decay", 0.001),
        "betas": _BETAS,
        "eps": ("adam_epsilon", 1e-8),
        "clip": ("max_grad_norm", 0.3),
        "precision": ("bf16 and fp16 false", "fp32"),
        "max_length": ("max_seq_length", 512),
        "over_length": ("rows cut at borders of packs", "split"),
        "pack": ("rows one after another, cut into packs", True),
        "recompute": ("use_gradient_checkpointing false", "none"),
        "saves": ("save_steps", 10),
        "evaluates": ("evaluation_strategy steps", "steps"),
        "rank": ("lora_r", 64),
        "alpha": ("lora_alpha", 16),
        "dropout": ("lora_dropout", 0.1),
        "targets": (
            "lora_target_modules",
            ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "up_proj", "gate_proj"],
        ),
    },
)
"""``train.py`` of "Fine-tuning Llama 2 70B using PyTorch FSDP" (https://huggingface.co/blog/ram-efficient-pytorch-fsdp),
as it was when that was published. Its later versions take the Trainer's own arguments, and are TRL's."""
AXOLOTL_YAML = Program(
    "Axolotl",
    "0.19 (and names before)",
    {
        "micro_batch": ("micro_batch_size", 1),
        "epochs": ("num_epochs", 1.0),
        "schedule": ("lr_scheduler", "cosine"),
        "warmup": ("warm-up of 3% of all steps, at most 100,", 0.03),
        "weight_decay": ("weight_decay", 0.0),
        "betas": _BETAS,
        "eps": ("adam_epsilon", 1e-8),
        "clip": ("max_grad_norm", 1.0),
        "precision": ("bf16 auto", "bf16"),
        "max_length": ("sequence_len", 512),
        "over_length": ("excess_length_strategy", "drop"),
        "pack": ("sample_packing", False),
        "recompute": ("gradient_checkpointing false", "none"),
        "dropout": ("lora_dropout", 0.0),
    },
    counts_workers=False,
)
LLAMA_FACTORY_YAML = Program(
    "LLaMA-Factory",
    "0.9.5",
    {
        **TRAINER.defaults,
        "precision": ("the model's own type", "bf16"),
        "max_length": ("cutoff_len", 2048),
        "over_length": ("rows cut at cutoff_len", "truncate"),
        "pack": ("packing", False),
        "recompute": ("disable_gradient_checkpointing false", "full"),
        "rank": ("lora_rank", 8),
        "alpha": ("lora_alpha twice lora_rank", None),
        "dropout": ("lora_dropout", 0.0),
        "targets": ("lora_target all", "all-linear"),
    },
    counts_workers=False,
)
LLAMA_FACTORY_1 = Program(
    "LLaMA-Factory 1",
    "of 0.9.5",
    {
        "micro_batch": ("micro_batch_size", 1),
        "epochs": ("num_train_epochs", 3.0),
        "lr": ("learning_rate", 1e-4),
        "schedule": ("no lr_scheduler_config", "constant"),
        "warmup": ("no lr_scheduler_config", 0),
        "weight_decay": ("weight decay of torch.optim.AdamW", 0.01),
        "betas": _BETAS,
        "eps": ("eps of torch.optim.AdamW", 1e-8),
        "clip": ("max_grad_norm", 1.0),
        "precision": ("bf16", "bf16"),
        "max_length": ("cutoff_len", 2048),
        "over_length": ("rows cut at cutoff_len", "truncate"),
        "pack": ("batching_strategy normal", False),
        "recompute": ("enable_activation_checkpointing true", "full"),
        "rank": ("r", 8),
        "alpha": ("lora_alpha", 16),
        "dropout": ("lora_dropout", 0.05),
        "targets": ("target_modules all", "all-linear"),
    },
    counts_workers=False,
)
PROGRAMS = (
    AXOLOTL_YAML,
    LLAMA_FACTORY_YAML,
    LLAMA_FACTORY_1,
    TRL,
    TRAINER,
    TUTORIAL,
    ACCELERATE_YAML,
    DEEPSPEED_JSON,
)


def in_words(default: tuple[str, Any]) -> str:
    """``weight_decay 0 by default``, of a default."""
    name, value = default
    said = value if isinstance(value, str) else in_numbers(value)
    is_told = value is None or isinstance(value, bool) or name.endswith((f" {said}", "true", "false")) or " " in name
    return f"{name} by default" if is_told and name != "betas" else f"{name} {said} by default"


def in_numbers(value: Any) -> str:
    """A value as a page shows it: ``0.9 and 0.999``."""
    if isinstance(value, list):
        return " and ".join(map(in_numbers, value))
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
