"""What keys of several programs tell alike, under one name or another.

A table says which of its keys tells which quantity, and has a sentence of its own only where its key does not mean
quite the same as the others. Quantities of one program alone are in its table.
"""

from __future__ import annotations

from collections.abc import Mapping

from tonnage.migration.keys import Key, maps

QUANTITIES: Mapping[str, tuple[str, str]] = {
    "model": ("model", "The same."),
    "tokenizer": ("tokenizer", "The same, where it is not the model's own."),
    "model_class": ("model", "The class follows from the model's files."),
    "revision": ("revision", "The same."),
    "trust_remote_code": ("trust_remote_code", "The same."),
    "reinit": ("init", "true is `random`."),
    "router_loss": ("router_loss", "The same."),
    "lora": ("adapter", "With it low-rank additions are trained, without it all weights."),
    "rank": ("adapter.rank", "The same."),
    "alpha": ("adapter.alpha", "The same."),
    "dropout": ("adapter.dropout", "The same."),
    "targets": ("adapter.targets", "all is all-linear."),
    "stacked": ("adapter.targets", "Experts that are stacked in one tensor."),
    "also": ("adapter.also", "Trained whole beside the adapter."),
    "rslora": ("adapter.scaling", "true is rank_stabilised."),
    "quant_method": ("adapter.quantize", "bnb: 4 bits are NF4."),
    "quant_type": ("adapter.quantize", "nf4."),
    "bits": ("adapter.quantize", "4 is nf4-double, 8 int8."),
    "bits4": ("adapter.quantize", "4 bits are NF4."),
    "bits8": ("adapter.quantize", "8 bits, a scale for each row."),
    "double": ("adapter.quantize", "true is nf4-double, false nf4."),
    "validation_fraction": ("data.validation", "The same fraction; other rows."),
    "data.max_length": ("data.max_length", "Tokens of the longest conversation, and of a pack."),
    "data.pack": ("data.pack", "Whole documents in one row, which never attend to each other."),
    "train_on_inputs": ("data.train_on", "true is `all`, false `assistant`."),
    "chat_template": ("data.template", "The model's own, or one of ours with the same text."),
    "batch.sequences": ("batch.sequences", "Samples in a step over all workers."),
    "micro_batch": (
        "batch.sequences memory.micro_batch",
        "Times accumulation times workers it is the batch; by itself it is what one forward holds.",
    ),
    "accumulation": ("batch.sequences", "Micro-batches follow from the batch and memory.micro_batch."),
    "epochs": ("epochs", "Passes over the data."),
    "steps": ("steps", "Updates."),
    "optim": ("optimizer memory.moments", "AdamW is the one optimizer; 8-bit ones are moments."),
    "optimizer.lr": ("optimizer.lr", "The highest learning rate."),
    "optimizer.weight_decay": ("optimizer.weight_decay", "Not applied to norms and biases, as in the Trainer."),
    "beta1": ("optimizer.betas", "The first."),
    "beta2": ("optimizer.betas", "The second."),
    "optimizer.eps": ("optimizer.eps", "The same."),
    "optimizer.clip": ("optimizer.clip", "The same: the global norm."),
    "schedule": ("optimizer.schedule", "Cosine, linear or constant."),
    "min_lr": ("optimizer.final", "As a fraction of lr."),
    "min_lr_rate": ("optimizer.final", "The same."),
    "warmup_steps": ("optimizer.warmup", "Steps (a fraction below 1), from near zero."),
    "warmup_ratio": ("optimizer.warmup", "A fraction of all steps, from near zero."),
    "bf16": ("precision", "bf16 weights with an exact fp32 master."),
    "fp16": ("precision", "fp16 weights with an fp32 master."),
    "mixed_precision": ("precision", "bf16 weights with an exact fp32 master, not autocast."),
    "recompute": ("memory.recompute", "Whole blocks are recomputed."),
    "inputs_elsewhere": (
        "memory.activation_tier memory.recompute",
        "Inputs of blocks go to the host's memory, all else is recomputed.",
    ),
    "compile": ("compile", "Each block is compiled."),
    "zero_stage": ("memory.zero", "The same stages."),
    "sharding": ("memory.zero parallel.replicate", "full_shard is 3, shard_grad_op 2, no_shard 0."),
    "optimizer_device": ("memory.optimizer_tier", "cpu is our host, nvme our disk."),
    "parameter_device": (
        "memory.parameter_tier",
        "nvme is our disk, cpu our host; several workers need ZeRO 3.",
    ),
    "nvme_path": ("memory.offload_dirs", "Where tiles rest."),
    "nodes": ("launch.workers parallel.replicate", "launch.workers counts all."),
    "processes_per_node": ("launch.workers", "Times the number of nodes it is the number of workers."),
    "devices": ("launch.workers", "Their number, where nothing else says it."),
    "slurm_tasks": ("launch.workers", "As many as the job has tasks."),
    "shard_workers": ("launch.workers", "Workers that share the states."),
    "ray_workers": ("launch.workers", "The same."),
    "tensor_workers": ("parallel.tensor", "The same."),
    "parallel.replicate": ("parallel.replicate", "The same: groups that hold everything once."),
    "launch.timeout": ("launch.timeout", "Seconds without progress after which a run ends."),
    "output": ("output", "The run's directory; the model will be in its export/."),
    "save_strategy": ("checkpoint.every", "no, or steps; a run is always saved at its end."),
    "save_steps": ("checkpoint.every", "Steps."),
    "save_limit": ("checkpoint.keep", "The same."),
    "eval_strategy": ("evaluate.every", "no, or steps."),
    "eval_steps": ("evaluate.every", "Steps."),
    "tensorboard": ("track", "TensorBoard files go into the run directory."),
    "wandb": ("track", "The project is WANDB_PROJECT's to say."),
    "mlflow": ("track", "The experiment is MLFLOW_EXPERIMENT_NAME's to say."),
    "trackio": ("track", "The project is TRACKIO_PROJECT's to say."),
    "other_tracker": ("track", "track has none such; metrics.jsonl has everything."),
    "deepspeed_file": ("", "Another file: give it as well."),
    "arguments_file": ("", "Another file: give it as well."),
}
"""By name: keys of ours it has a say in, separated by blanks, and the sentence for a key that tells it."""


def tells(name: str, quantity: str, reason: str = "") -> Key:
    """A key that tells what keys of other programs tell too; ``reason`` where it is not quite the same."""
    to, usual = QUANTITIES[quantity]
    return maps(name, to, reason or usual, quantity=quantity)
