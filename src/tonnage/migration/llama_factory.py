"""LLaMA-Factory's YAML, of version 0 and of the rewrite that it calls version 1.

Source: the argument classes of LLaMA-Factory 0.9.5 (https://llamafactory.readthedocs.io) and of its ``v1`` package.
Version 0 takes all arguments of transformers' Trainer as well; what is known of those is said in ``arguments``.
"""

from __future__ import annotations

from tonnage.migration import reasons
from tonnage.migration.arguments import ARGUMENTS
from tonnage.migration.keys import Key, Table, alike, lacks, maps, moot, within
from tonnage.migration.quantities import tells

_NOT_ADAMW = "AdamW is the one optimizer."
_EXPORT = "Says how a model is exported: tonnage export."
_ANSWERS = "Says how the model answers: tonnage generate."
_TRACKER = "track has none such; metrics.jsonl has everything."
_MEDIA = "Text is trained: towers for images and sounds are left as they are."
_PREPARED = "Preparing uses the cores there are, once."
_MEGATRON = "Belongs to Megatron; how workers divide a model is the plan's."
_LOSS = "Cross-entropy with every supervised token alike."

_FREEZE = (
    maps(
        "freeze_trainable_layers",
        "train",
        "The last so many blocks, the first if below zero.",
        quantity="freeze_layers",
    ),
    maps("freeze_trainable_modules", "train", "Of these blocks, those layers.", quantity="freeze_modules"),
    maps("freeze_extra_modules", "train", "Outside of the blocks.", quantity="freeze_extra"),
)

LLAMA_FACTORY_SIGNS = (
    *(
        frozenset({name})
        for name in ("finetuning_type", "cutoff_len", "dataset_dir", "lora_target", "quantization_bit")
    ),
    *(frozenset({name}) for name in ("neat_packing", "mask_history", "train_on_prompt", "plot_loss")),
    frozenset({"dataset", "template"}),
)
"""Arguments, some by themselves, by which those of LLaMA-Factory are told from those of a script of transformers.
Names that other scripts have as well (``stage``, ``max_samples``, ``lora_rank``) are none of them."""

MODEL: tuple[Key, ...] = (
    tells("model_name_or_path", "model"),
    lacks("adapter_name_or_path", reasons.TRAINED_FURTHER),
    moot("adapter_folder", "Belongs to adapter_name_or_path."),
    moot("resize_vocab", "An embedding is made larger where tokens are added."),
    lacks("split_special_tokens", "Special tokens in a text are read as such."),
    maps("add_special_tokens", "data.added_tokens", "The same.", quantity="added_tokens"),
    lacks("add_tokens", "Tokens that are added are special ones (add_special_tokens)."),
    lacks("new_special_tokens_config", "Rows of new tokens begin as the mean of the others."),
    moot("init_special_tokens", "Rows of new tokens begin as the mean of the others."),
    lacks("rope_scaling", "Positions are the model's own."),
    lacks("shift_attn", "Attention is the model's own."),
    lacks("mixture_of_depths", "The layers are the model's own."),
    *alike(
        moot,
        reasons.KERNEL,
        "flash_attn use_unsloth use_unsloth_gc enable_liger_kernel use_v1_kernels use_reentrant_gc upcast_layernorm "
        "upcast_lmhead_output use_kv_cache print_param_status block_diag_attn compute_dtype device_map",
    ),
    tells("moe_aux_loss_coef", "router_loss"),
    maps("disable_gradient_checkpointing", "memory.recompute", "false: whole blocks are recomputed.", quantity="kept"),
    tells("train_from_scratch", "reinit"),
    *alike(moot, _ANSWERS, "infer_backend infer_dtype"),
    moot("offload_folder", "What rests where is the plan's."),
    *alike(moot, reasons.LOG_IN, "hf_hub_token ms_hub_token om_hub_token"),
    tells("quantization_method", "quant_method"),
    tells("quantization_bit", "bits", "4 is nf4-double (nf4 if double_quantization is off), 8 int8."),
    tells("quantization_type", "quant_type"),
    tells("double_quantization", "double"),
    moot("quantization_device_map", "What rests where is the plan's."),
    *alike(
        moot,
        _MEDIA,
        "image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels "
        "video_fps video_maxlen use_audio_in_video audio_sampling_rate freeze_vision_tower "
        "freeze_multi_modal_projector media_dir",
    ),
    lacks("freeze_language_model", "Text is trained: the language model has to be."),
    *alike(moot, _EXPORT, "export_*"),
    *alike(moot, _ANSWERS, "vllm_* sglang_*"),
    moot("use_kt", "Experts that do not fit rest where the plan says: memory.parameter_tier."),
    *alike(moot, "Belongs to KTransformers.", "kt_cpu_activation kt_non_expert_weight_path kt_config.*"),
    lacks("kt_weight_path", "Experts in another form than the model's: adapter.quantize says it here."),
    lacks("kt_use_lora_experts", reasons.PLAIN_LORA),
    *alike(moot, "Belongs to KTransformers.", "kt_expert_checkpoint_path kt_lora_*"),
    *alike(moot, "Follows from cutoff_len.", "model_max_length max_length"),
)

TRAINING: tuple[Key, ...] = (
    maps("stage", "data.train", "sft, or pt: rows of text.", quantity="stage"),
    tells("finetuning_type", "lora", "lora (the default), full, or freeze: train."),
    tells("lora_rank", "rank"),
    tells("lora_alpha", "alpha"),
    tells("lora_dropout", "dropout"),
    tells("lora_target", "targets"),
    tells("additional_target", "also"),
    tells("use_rslora", "rslora"),
    *alike(lacks, reasons.PLAIN_LORA, "use_dora pissa_init create_new_adapter"),
    *alike(moot, "Belongs to PiSSA.", "pissa_iter pissa_convert"),
    lacks("loraplus_lr_ratio", "One learning rate for all."),
    moot("loraplus_lr_embedding", "Belongs to loraplus_lr_ratio."),
    *alike(moot, "Belongs to OFT.", "oft_* module_dropout"),
    *_FREEZE,
    *alike(
        moot,
        "Belongs to preferences and rewards.",
        "pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing kto_chosen_weight kto_rejected_weight "
        "simpo_gamma ppo_* ref_model ref_model_adapters ref_model_quantization_bit reward_model "
        "reward_model_adapters reward_model_quantization_bit reward_model_type ld_alpha",
    ),
    *alike(lacks, _NOT_ADAMW, "use_galore use_apollo use_badam use_adam_mini use_muon"),
    *alike(moot, reasons.OTHER_OPTIMIZER, "galore_* apollo_* badam_*"),
    *alike(lacks, _LOSS, "use_dft_loss use_asft_loss use_eaft_loss"),
    *alike(moot, "Belongs to another loss.", "asft_alpha eaft_alpha"),
    lacks("use_llama_pro", "Blocks are trained all or as `train` says, and none are added."),
    tells("pure_bf16", "bf16"),
    *alike(
        lacks,
        "Another engine: parallel says how workers divide a model.",
        "use_mca use_megatron_bridge use_hyper_parallel",
    ),
    *alike(moot, "Belongs to another engine.", "hyper_parallel_*"),
    *alike(
        moot,
        "The loss is in metrics.jsonl, for every step.",
        "plot_loss compute_accuracy include_effective_tokens_per_second",
    ),
    maps("disable_shuffling", "data.order", "true is `given`.", quantity="unshuffled"),
    maps(
        "early_stopping_steps",
        "evaluate.patience",
        "The same, of the loss over the validation rows.",
        quantity="patience",
    ),
    lacks("use_swanlab", _TRACKER, decides=False),
    *alike(moot, "Belongs to SwanLab.", "swanlab_*"),
    moot("overwrite_output_dir", "A directory that holds a run is never overwritten: name another."),
    lacks("fp8", "No FP8."),
    *alike(moot, "Belongs to FP8.", "fp8_backend fp8_enable_fsdp_float8_all_gather"),
    tells("ray_num_workers", "ray_workers", "The same, with launch.with: ray."),
    *alike(
        moot,
        "Where Ray runs is its own affair.",
        "ray_init_kwargs.* ray_init_kwargs ray_storage_path ray_run_name placement_strategy resources_per_worker.*",
    ),
    *alike(moot, reasons.RENDEZVOUS, "master_addr master_port"),
    *alike(
        moot,
        "tonnage profile CONFIG shows where the time of a step goes.",
        "enable_torch_profiler profiler_* profile_modules",
    ),
    lacks(
        "predict_with_generate",
        "Evaluation is the loss over the validation rows: tonnage eval measures more.",
        decides=False,
    ),
    lacks("do_predict", "Training only: tonnage generate answers a file of questions.", decides=False),
    *alike(
        moot,
        _ANSWERS,
        "do_sample temperature top_p top_k num_beams max_new_tokens repetition_penalty length_penalty "
        "skip_special_tokens generation_*",
    ),
    tells("tensor_model_parallel_size", "tensor_workers"),
    maps("pipeline_model_parallel_size", "parallel.pipeline", "The same.", quantity="pipeline_workers"),
    lacks("context_parallel_size", reasons.NOT_DIVIDED, idle=(1,)),
    moot("expert_model_parallel_size", reasons.EXPERTS),
    *alike(
        moot,
        _MEGATRON,
        "sequence_parallel use_distributed_optimizer overlap_param_gather overlap_grad_reduce bias_activation_fusion "
        "apply_rope_fusion masked_softmax_fusion cross_entropy_loss_fusion moe_grouped_gemm "
        "moe_token_dispatcher_type recompute_granularity recompute_method recompute_num_layers "
        "virtual_pipeline_model_parallel_size account_for_embedding_in_pipeline_split "
        "account_for_loss_in_pipeline_split calculate_per_token_loss megatron_pretrained_checkpoint "
        "export_hf_on_finish use_packed_sequences extra_config.*",
    ),
    tells("mixed_precision", "mixed_precision", "bf16_mixed is bf16."),
)

DATA: tuple[Key, ...] = (
    maps("dataset", "data.train", "Names in dataset_info.json, which is read.", quantity="factory_rows"),
    maps("eval_dataset", "data.validation", "Names in dataset_info.json, which is read.", quantity="factory_tests"),
    maps("dataset_dir", "data.train", "Where dataset_info.json and files of rows are.", quantity="factory_folder"),
    tells("template", "chat_template"),
    tells("cutoff_len", "data.max_length"),
    tells("train_on_prompt", "train_on_inputs"),
    maps("mask_history", "data.train_on", "true is `last`.", quantity="mask_history"),
    lacks("streaming", "Rows are read whole before the run: a stream has to be made a file first."),
    moot("buffer_size", "Belongs to streaming."),
    lacks("mix_strategy", "Sources are put one after the other, each as often as its weight.", idle=("concat",)),
    moot("interleave_probs", "Belongs to mix_strategy."),
    *alike(
        moot, _PREPARED, "preprocessing_batch_size preprocessing_num_workers data_shared_file_system overwrite_cache"
    ),
    maps("max_samples", "data.train.first", "The first so many rows of each source.", quantity="max_samples"),
    moot("eval_num_beams", _ANSWERS),
    lacks("ignore_pad_token_for_loss", "Padding is never trained.", idle=(True, "true")),
    tells("val_size", "validation_fraction"),
    moot("eval_on_each_dataset", "Validation rows are evaluated together."),
    tells("packing", "data.pack"),
    maps("neat_packing", "data.pack", "Whole documents in one row, which never attend to each other.", quantity="neat"),
    lacks("tool_format", "Calls are written as the template writes them."),
    lacks("default_system", "A row says its system message, or the template does."),
    maps(
        "enable_thinking", "data.template_arguments", "For templates that ask: qwen3 and the like.", quantity="thinking"
    ),
    lacks("preserve_thinking", "What is left of earlier thoughts, the template says."),
    moot("tokenized_path", "Prepared data are named by what made them: data.cache."),
)

_OWN = {key.name for key in (*MODEL, *TRAINING, *DATA)}
_OTHERWISE = (
    *("dataset", "train_file", "train_split", "test_split", "splits", "validation_file", "validation_percentage"),
    *("subset", "mixture_path", "mixture_name", "mixture_split", "mixture_fraction", "mixture_weight", "text_column"),
    *("packing_strategy", "template", "eos_token", "special_tokens"),
    *("assistant_only", "completion_only", "data.max_length", "tokenizer", "lora", "bits4", "bits8", "stacked"),
    *("rank", "targets", "also", "double", "accelerate_config", "model"),
)
"""Quantities that LLaMA-Factory tells with keys of its own."""

LLAMA_FACTORY = Table(
    "LLaMA-Factory YAML",
    (
        *MODEL,
        *DATA,
        *TRAINING,
        *(key for key in ARGUMENTS.keys if key.name not in _OWN and key.quantity not in _OTHERWISE),
    ),
    ARGUMENTS.sections,
    {
        "lr": "learning_rate",
        "max_length": "cutoff_len",
        "max_seq_length": "cutoff_len",
        "lora_r": "lora_rank",
        "lora_target_modules": "lora_target",
        "dataset_name": "dataset",
        "chat_template": "template",
        "epochs": "num_train_epochs",
    },
)

VERSION_1 = Table(
    "LLaMA-Factory YAML, version 1",
    (
        tells("model", "model"),
        tells("model_class", "model_class", "llm."),
        maps("custom_chat_template", "data.template", "A template's text.", quantity="jinja"),
        tells("template", "chat_template"),
        tells("trust_remote_code", "trust_remote_code"),
        *alike(moot, reasons.KERNEL, "flash_attn kernel_config.* kernel_config init_config.* init_config"),
        tells("peft_config.name", "lora", "lora, or freeze: train; without peft_config, all weights are trained."),
        tells("peft_config.r", "rank"),
        tells("peft_config.lora_alpha", "alpha"),
        tells("peft_config.lora_dropout", "dropout"),
        tells("peft_config.target_modules", "targets"),
        tells("peft_config.use_rslora", "rslora"),
        tells("peft_config.modules_to_save", "also"),
        lacks("peft_config.use_dora", reasons.PLAIN_LORA),
        lacks("peft_config.adapter_name_or_path", reasons.TRAINED_FURTHER),
        *alike(moot, _EXPORT, "peft_config.export_dir peft_config.export_size peft_config.export_hub_model_id"),
        *alike(moot, _EXPORT, "peft_config.infer_dtype peft_config.export_legacy_format"),
        *within("peft_config.", _FREEZE),
        moot("peft_config.cast_trainable_params_to_fp32", "What is trained has a master in fp32."),
        moot("peft_config", "All weights are trained."),
        tells("quant_config.name", "quant_method"),
        tells("quant_config.quantization_bit", "bits"),
        tells("quant_config.quantization_type", "quant_type"),
        tells("quant_config.double_quantization", "double"),
        moot("quant_config", "Nothing is quantised."),
        maps("train_dataset", "data.train", "Another file, which is read.", quantity="factory_file"),
        maps("eval_dataset", "data.validation", "Another file, which is read.", quantity="factory_test_file"),
        tells("output_dir", "output"),
        tells("micro_batch_size", "micro_batch", "What one forward holds."),
        tells("global_batch_size", "batch.sequences"),
        tells("cutoff_len", "data.max_length"),
        *ARGUMENTS.keys_named("learning_rate num_train_epochs max_steps"),
        tells("max_grad_norm", "optimizer.clip"),
        tells("bf16", "bf16"),
        maps(
            "batching_strategy",
            "data.pack",
            "normal, padding_free: a row for each conversation; dynamic_padding_free: whole ones up to the length.",
            quantity="batching",
        ),
        moot("batching_workers", _PREPARED),
        tells("enable_activation_checkpointing", "recompute"),
        maps("dist_config.name", "memory.zero", "fsdp2 is 3, deepspeed as its file says.", quantity="engine"),
        tells("dist_config.config_file", "deepspeed_file", reasons.READ_BESIDE),
        moot("dist_config.dcp_path", "Each worker reads its own shard of the model's files."),
        moot("dist_config.ep_size", reasons.EXPERTS),
        moot("dist_config.*", "How workers divide a model is the plan's."),
        moot("dist_config", "One worker."),
        tells("dp_size", "shard_workers", "Workers with rows of their own."),
        lacks("cp_size", reasons.NOT_DIVIDED, idle=(1,)),
        moot("cp_mode", "Belongs to cp_size."),
        tells("mp_replicate_size", "parallel.replicate"),
        tells("mp_shard_size", "shard_workers"),
        tells("dist_timeout", "launch.timeout"),
        lacks("optim_config.name", "AdamW is the one optimizer.", idle=("adamw",)),
        moot("optim_config.*", reasons.OTHER_OPTIMIZER),
        moot("optim_config", "AdamW is the one optimizer."),
        lacks("lr_scheduler_config.name", "Not carried over: optimizer.schedule says it here.", idle=("constant",)),
        moot("lr_scheduler_config.*", "Belongs to a schedule."),
        moot("lr_scheduler_config", "The learning rate stays as it is."),
        maps("seed", "seed", "Of the order of packs; other draws than LLaMA-Factory's."),
        *ARGUMENTS.keys_named("full_determinism resume_from_checkpoint save_steps"),
        moot("save_epochs", "Checkpoints are counted in steps: checkpoint.every."),
        moot("save_ckpt_as_hf", "A finished run always holds a Hugging Face model in export/."),
        tells("save_total_limit", "save_limit"),
        moot("logging_steps", reasons.LOGGED),
        lacks("pref_loss", reasons.NO_REWARDS),
        *alike(moot, "Belongs to preferences.", "pref_beta pref_ftx simpo_gamma dpo_label_smoothing ld_alpha"),
        *alike(moot, _ANSWERS, "sample_backend max_new_tokens"),
        tells("config", "arguments_file", reasons.READ_BESIDE),
    ),
    {},
    {"model_name_or_path": "model", "lr": "learning_rate", "dataset": "train_dataset"},
)
