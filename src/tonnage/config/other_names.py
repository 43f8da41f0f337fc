"""Names that other programs have for what a config says here, for those who write them by habit.

Only hints: what ``tonnage import`` makes of whole configurations is in ``migration``, and a test holds both together.
"""

from __future__ import annotations

WHOLE = "tonnage import FILE converts whole configurations"

_STEP = "batch.sequences counts a whole step: sequences of a device, times accumulation, times workers"

OURS: dict[str, str] = {
    name: ours
    for ours, names in {
        "model": "model_name_or_path model_name model_path base_model pretrained_model_name_or_path",
        "tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_config",
        "data.train": "dataset datasets dataset_name dataset_path data_path train_file train_data train_data_file",
        "data.train.split": "dataset_train_split train_split",
        "data.validation": "validation_file eval_file eval_data_path val_size val_set_size test_split_size",
        "data.max_length": "max_seq_length max_seq_len model_max_length block_size cutoff_len sequence_len seq_length",
        "data.pack": "packing sample_packing neat_packing",
        "data.train_on": "train_on_inputs assistant_only_loss completion_only_loss",
        "data.template": "chat_template chat_template_path",
        "data.cache": "dataset_prepared_path",
        "batch.sequences": "global_batch_size train_batch_size",
        "epochs": "num_train_epochs num_epochs max_epochs train_epochs",
        "steps": "max_steps train_iters max_train_steps num_training_steps",
        "optimizer.lr": "learning_rate",
        "optimizer.weight_decay": "wd adam_weight_decay",
        "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
        "optimizer.eps": "adam_epsilon adam_eps",
        "optimizer.clip": "max_grad_norm gradient_clipping gradient_clip_val grad_clip clip_grad",
        "optimizer.schedule": "lr_scheduler_type lr_scheduler lr_decay_style",
        "optimizer.warmup": "warmup_ratio warmup_steps num_warmup_steps lr_warmup_iters lr_warmup_steps",
        "optimizer.final": "cosine_min_lr_ratio min_lr_ratio min_lr",
        "optimizer.decay": "num_decay_steps",
        "optimizer.decay_shape": "decay_type",
        "optimizer.cycles": "num_cycles",
        "adapter": "peft peft_config lora lora_config use_peft use_lora qlora",
        "adapter.kind": "use_dora peft_use_dora dora",
        "adapter.init": "init_lora_weights peft_init_lora_weights pissa_init",
        "adapter.rounds": "pissa_iter loftq_iter",
        "adapter.patterns": "rank_pattern alpha_pattern lora_rank_pattern lora_alpha_pattern",
        "adapter.rank": "lora_r lora_rank r",
        "adapter.alpha": "lora_alpha",
        "adapter.dropout": "lora_dropout",
        "adapter.targets": "lora_target_modules target_modules lora_target lora_target_linear",
        "adapter.also": "lora_modules_to_save modules_to_save additional_target",
        "adapter.quantize": "load_in_4bit load_in_8bit quantization_bit bnb_4bit_quant_type",
        "train": "unfrozen_parameters trainable_layers",
        "router_loss": "router_aux_loss_coef aux_loss_coef moe_aux_loss_coeff aux_loss_alpha",
        "precision": "bf16 fp16 mixed_precision torch_dtype dtype",
        "compile": "torch_compile",
        "memory.recompute": "gradient_checkpointing activation_checkpointing use_gradient_checkpointing",
        "memory.zero": "zero_stage zero_optimization deepspeed fsdp fsdp_config sharding_strategy",
        "memory.optimizer_tier": "offload_optimizer optimizer_offload cpu_offload",
        "memory.parameter_tier": "offload_param",
        "memory.micro_batch": "micro_batch_size train_micro_batch_size_per_gpu",
        "parallel.tensor": "tensor_parallel_size tensor_model_parallel_size tp_size tp_degree tp",
        "parallel.context": "context_parallel_size context_parallel_degree cp_size sequence_parallel_size ulysses_size",
        "parallel.pipeline": "pipeline_parallel_size pipeline_model_parallel_size pp_size pp_degree pp",
        "launch.workers": "num_processes nproc_per_node num_gpus world_size devices n_gpu",
        "launch.nodes": "num_machines num_nodes nnodes",
        "checkpoint.every": "save_steps save_interval save_strategy saves_per_epoch save_freq",
        "checkpoint.keep": "save_total_limit",
        "evaluate.every": "eval_steps eval_interval eval_strategy evaluation_strategy evals_per_epoch",
        "track": "report_to wandb_project use_wandb",
        "output": "output_dir out_dir save_dir output_path",
        "seed": "data_seed random_seed",
    }.items()
    for name in names.split()
}
"""Name there -> key here that says it."""

SENTENCES: dict[str, str] = {
    **dict.fromkeys(("per_device_train_batch_size", "per_gpu_train_batch_size", "batch_size"), _STEP),
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_accumulation"), _STEP),
    **dict.fromkeys(("per_device_eval_batch_size", "eval_batch_size"), "nothing: evaluations go as training does"),
    **dict.fromkeys(("logging_steps", "log_interval"), "nothing: every step is written to metrics.jsonl and log.txt"),
    **dict.fromkeys(
        ("dataloader_num_workers", "preprocessing_num_workers"), "nothing: packs are prepared before a run"
    ),
    **dict.fromkeys(("optim", "optimizer_type"), "nothing: it is AdamW; how its moments rest is memory.moments"),
    **dict.fromkeys(("attn_implementation", "flash_attention", "use_flash_attention_2"), "nothing: it is chosen"),
}
"""Name there -> what becomes of it here, where that is not one key."""


def hint(name: str) -> str:
    """What to write instead of another program's name; empty for a name that none has."""
    plain = name.lower().replace("-", "_").lstrip("_")
    if (ours := OURS.get(plain)) is not None:
        return f"write {ours} instead"
    return SENTENCES.get(plain, "")
