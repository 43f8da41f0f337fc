"""Axolotl's YAML: what is known of each of its keys.

Source: the schemas of Axolotl 0.19 (https://docs.axolotl.ai/docs/config-reference.html), those of the plugins that it
brings along, and names that earlier versions had. Keys that its schema does not have are not read by Axolotl either;
those that its users write all the same are told so. What it hands on to the Trainer or to PEFT as it is, is said in
``arguments``.
"""

from __future__ import annotations

from tonnage.migration import reasons
from tonnage.migration.accelerate import FSDP
from tonnage.migration.arguments import ARGUMENTS
from tonnage.migration.keys import Key, Table, alike, lacks, maps, moot, within
from tonnage.migration.quantities import tells

_CACHE = "Prepared data are named by what made them: data.cache."
_NOT_READ = "Axolotl does not read it."
_VISION = "Towers for images and sounds are left as they are: text is trained."
_CLOUD = "Says where somebody else's machines run it."
_ROWS = "Rows: their form follows from type, columns and roles from the fields that are named."
_STREAM = "Rows are read whole before the run: a stream has to be made a file first."
_OFFLOADED = "The optimizer's state rests in the host's memory."

MODEL: tuple[Key, ...] = (
    tells("base_model", "model"),
    tells("base_model_config", "tokenizer", "The configuration is the model's."),
    tells("tokenizer_config", "tokenizer"),
    *alike(tells, "revision", "revision_of_model model_revision"),
    tells("trust_remote_code", "trust_remote_code"),
    tells("reinit_weights", "reinit"),
    *alike(tells, "model_class", "model_type type_of_model"),
    *alike(
        moot,
        "The tokenizer is made from the model's files.",
        "tokenizer_type tokenizer_use_fast tokenizer_legacy tokenizer_save_jinja_files tokenizer_use_mistral_common",
    ),
    lacks("cls_model_config", "The class follows from the model's files."),
    lacks("overrides_of_model_config.*", "The configuration is the model's."),
    maps(
        "model_config.output_router_logits",
        "router_loss",
        "true: the loss of the routers counts; how much, the model's config says.",
        quantity="router_logits",
    ),
    maps("overrides_of_model_config.output_router_logits", "router_loss", "As model_config.", quantity="router_logits"),
    lacks("model_config.*", "The configuration is the model's."),
    *alike(lacks, "Models are loaded as they are.", "overrides_of_model_kwargs.* model_kwargs.*"),
    moot("base_model_ignore_patterns", "Only files that the model's index names are read."),
    maps("special_tokens.eos_token", "data.eos_token", "The same; added where it is new.", quantity="eos_token"),
    moot("special_tokens.pad_token", "No padding is ever seen by the model or the loss."),
    moot("special_tokens.bos_token", "What opens a text is the tokenizer's own."),
    moot("special_tokens.unk_token", "No token is unknown to a tokenizer of bytes; others have their own."),
    lacks("special_tokens.*", reasons.VOCABULARY),
    *(moot(f"tokens.{name}_token", "An old way to write special_tokens.") for name in ("bos", "eos", "pad", "unk")),
    maps("tokens", "data.added_tokens", "The same; a built-in template brings its own.", quantity="added_tokens"),
    lacks("added_tokens_overrides.*", "The vocabulary is the tokenizer's."),
    moot("resize_token_embeddings_to_32x", "An embedding has a row for each token."),
    moot("mean_resizing_embeddings", "Rows of new tokens are means of the others."),
    lacks("shrink_embeddings", "An embedding keeps its rows."),
    lacks("fix_untrained_tokens", "The embedding starts as it is."),
    *(
        moot(f"is_{name}_derived_model", "The family follows from the model's files.")
        for name in ("falcon", "llama", "mistral", "qwen")
    ),
    *alike(moot, reasons.OWN_SHARD, "low_cpu_mem_usage experimental_skip_move_to_device"),
    *alike(
        moot,
        "Layers rest where the plan says.",
        "ple_cpu_offload device device_map.* device_map max_memory gpu_memory_limit",
    ),
    moot("device_map.", "Layers rest where the plan says."),
    lacks(
        "model_quantization_config",
        "Weights stored in mxfp4, or in fp8 with block scales, are read as bf16; others are not.",
        idle=("Mxfp4Config", "FineGrainedFP8Config"),
    ),
    lacks("model_quantization_config_kwargs.dequantize", "Weights are read as bf16.", idle=(True, "true")),
    lacks("model_quantization_config_kwargs.*", "Weights are read as bf16."),
    moot("llama4_linearized_experts", "Experts are found by the model's family."),
    lacks("use_onebitllms", "No weights of 1.58 bits."),
    lacks("gptq", "A base in GPTQ's form is not trained on.", idle=(False,)),
    *alike(moot, "Belongs to gptq.", "gptq_groupsize gptq_model_v1 gptq_disable_exllama"),
    *alike(
        moot,
        reasons.KERNEL,
        "flash_attention flash_attention_2 xformers_attention sdp_attention flex_attention sage_attention "
        "eager_attention attn_implementation flex_attn_compile_kwargs.* flash_attn_cross_entropy flash_attn_fuse_mlp "
        "flash_attn_rms_norm flash_attn_d512 flash_optimum gemma4_hybrid_attn_impl large_head_attention sdpa_varlen "
        "fused_attn_kernel experts_implementation lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel "
        "chunked_cross_entropy chunked_cross_entropy_num_chunks tiled_mlp tiled_mlp_num_shards "
        "tiled_mlp_use_original_mlp use_kernels liger_rope liger_rms_norm liger_rms_norm_gated liger_layer_norm "
        "liger_swiglu liger_glu_activation liger_cross_entropy liger_fused_linear_cross_entropy cut_cross_entropy "
        "unsloth_cross_entropy_loss use_scattermoe use_sonicmoe use_dsv4_kernels use_glm_dsa_kernels expert_backend "
        "moe_grouped_backend moe_dequant_chunk_size moe_bnb_fast dsv4_shared_mlp_lora_kernel dsv4_fp8_lora_kernel "
        "dsv4_bf16_all pretrain_multipack_attn heads_k_stride ring_attn_func mlp_kernel liger_kernel_impl",
    ),
    *alike(lacks, "Attention is the model's own.", "s2_attention scaling_softmax"),
    *alike(moot, "Belongs to scaling_softmax.", "scaling_softmax_factor scaling_softmax_bias"),
    lacks("liger_use_token_scaling", "Cross-entropy with every supervised token alike."),
    lacks("rope_scaling", "Positions are the model's own."),
    *alike(
        lacks,
        "Frozen weights rest in 16, 8 or 4 bits of our own kind: adapter.quantize.",
        "nonexpert_quantization dsv4_fp8_nonexpert_mode dsv4_fp4_grouped_mode gemma4_fp8_nonexpert "
        "gemma4_nf4_nonexpert nvfp4_merge_aware nvfp4_merge_aware_start_step",
    ),
    *alike(moot, _VISION, "freeze_mm_modules image_size image_resize_algorithm role_boundaries.* processor_kwargs.*"),
    maps("processor_type", "data.train", "Rows with images or sounds are not trained on.", quantity="media"),
    maps("plugins", "optimizer", "Kernels are not needed; other plug-ins do what is not there.", quantity="plugins"),
)

OBJECTIVE: tuple[Key, ...] = (
    *alike(lacks, reasons.NO_REWARDS, "rl reward_model process_reward_model"),
    lacks("num_labels", "Next tokens are predicted, not labels."),
    lacks("center_rewards_coefficient", reasons.NO_REWARDS),
    *alike(
        moot,
        "Belongs to preferences and rewards.",
        "trl.* vllm.* ebft.* dpo_use_weighting dpo_label_smoothing precompute_ref_log_probs dpo_use_liger_kernel "
        "dpo_padding_free dpo_loss_type dpo_loss_weights dpo_beta dpo_use_logits_to_keep dpo_generate_during_eval "
        "dpo_norm_loss rpo_alpha orpo_alpha simpo_gamma cpo_alpha kto_desirable_weight kto_undesirable_weight rl_beta "
        "max_prompt_len",
    ),
    lacks("qat.*", "No quantisation while training."),
    lacks("quantization.*", "Exports are not quantised."),
    lacks("use_eaft", "Cross-entropy with every supervised token alike."),
    *alike(moot, "Belongs to use_eaft.", "eaft_alpha eaft_k"),
    lacks("kd_trainer", "No distillation."),
    *alike(
        moot, "Belongs to distillation.", "kd_ce_alpha kd_alpha kd_temperature kd_beta kd_normalize_topk kd_online_*"
    ),
    moot("kd_temperature_min", "Belongs to distillation."),
    lacks("diffusion.*", "Next tokens are predicted, from left to right."),
    lacks("llmcompressor.*", "No weights are pruned."),
    *alike(lacks, "No noise is added to embeddings.", "neftune_noise_alpha noisy_embedding_alpha"),
    lacks("trainer_cls", "There is one loop, and no class to put in its place."),
    lacks("use_pose", "Positions are the model's own."),
    *alike(moot, "Belongs to use_pose.", "pose_split_on_token_ids pose_max_context_len pose_num_chunks"),
    *alike(
        lacks,
        "All layers are trained at every step.",
        "lisa_n_layers relora jagged_restart_steps spectrum_top_fraction dense_mixer grokfast_alpha mora.*",
    ),
    *alike(
        moot,
        "Belongs to LISA, ReLoRA or a schedule of restarts.",
        "lisa_step_interval lisa_layers_attribute relora_steps relora_warmup_steps relora_anneal_steps "
        "relora_prune_ratio relora_prune_method relora_cpu_offload jagged_restart_warmup_steps "
        "jagged_restart_anneal_steps spectrum_model_name grokfast_lamb",
    ),
)

ADAPTER: tuple[Key, ...] = (
    tells("adapter", "lora", "lora and qlora; without one, all weights are trained."),
    tells("load_in_4bit", "bits4", "NF4; scales in 8 bits too unless bnb_config_kwargs says no."),
    tells("load_in_8bit", "bits8"),
    tells("bnb_config_kwargs.bnb_4bit_use_double_quant", "double"),
    tells("bnb_config_kwargs.bnb_4bit_quant_type", "quant_type"),
    moot("bnb_config_kwargs.bnb_4bit_compute_dtype", "Products are in the precision of the run."),
    moot("bnb_config_kwargs.bnb_4bit_quant_storage", "Says how bytes are stored."),
    lacks("bnb_config_kwargs.*", "4 bits are NF4 in blocks of 64."),
    *ARGUMENTS.keys_named("lora_r lora_alpha lora_dropout"),
    tells("lora_target_modules", "targets", "Names, or a pattern for a regular expression."),
    maps("lora_target_linear", "adapter.targets", "true is all-linear.", quantity="all_linear"),
    *ARGUMENTS.keys_named("lora_target_parameters lora_modules_to_save"),
    tells("peft_use_rslora", "rslora"),
    moot("lora_fan_in_fan_out", "How a layer stores its matrix follows from its class."),
    moot("quantize_moe_experts", "adapter.quantize is of the experts too."),
    *alike(
        lacks,
        reasons.PLAIN_LORA,
        "peft_use_dora peft_init_lora_weights peft_layer_replication peft_trainable_token_indices lora_rank_pattern "
        "lora_alpha_pattern peft_layers_to_transform peft_layers_pattern peft.* hatchery.*",
    ),
    lacks("lora_model_dir", reasons.TRAINED_FURTHER),
    lacks("loraplus_lr_ratio", "One learning rate for all."),
    moot("loraplus_lr_embedding", "Belongs to loraplus_lr_ratio."),
    *alike(
        moot,
        "How an adapter is loaded and merged is not configured.",
        "qlora_sharded_model_loading lora_on_cpu merge_lora merge_method peft_autocast_adapter_dtype "
        "peft_ensure_weight_tying embeddings_skip_upcast",
    ),
    maps("unfrozen_parameters", "train", "Patterns in place of regular expressions.", quantity="trained"),
    moot("full_finetune", _NOT_READ),
)

DATA: tuple[Key, ...] = (
    maps("datasets.*", "data.train", _ROWS, quantity="axolotl_rows"),
    maps("datasets", "data.train", _ROWS, quantity="axolotl_rows"),
    maps("test_datasets.*", "data.validation", _ROWS, quantity="axolotl_tests"),
    maps("test_datasets", "data.validation", _ROWS, quantity="axolotl_tests"),
    maps("pretraining_dataset.*", "data.train", _STREAM, quantity="axolotl_stream"),
    maps("pretraining_dataset", "data.train", _STREAM, quantity="axolotl_stream"),
    tells("val_set_size", "validation_fraction"),
    tells("sequence_len", "data.max_length"),
    maps("excess_length_strategy", "data.over_length", "drop, truncate, or raise: error.", quantity="excess"),
    lacks("eval_sequence_len", "Validation rows have the length of the others."),
    lacks("min_sample_len", "Short rows are trained as well.", idle=(1, 2)),
    tells("sample_packing", "data.pack"),
    *alike(
        moot,
        "Packing reads all rows, best fit first, and the documents of a pack are apart on every device.",
        "sample_packing_group_size sample_packing_bin_size sample_packing_sequentially sample_packing_mp_start_method "
        "sample_packing_eff_est sample_packing_seq_len_multiplier total_num_tokens total_supervised_tokens "
        "eval_sample_packing multipack_real_batches batch_flattening pad_to_sequence_len pad_to_multiple_of "
        "max_packed_sequence_len",
    ),
    tells("train_on_inputs", "train_on_inputs"),
    tells("chat_template", "chat_template"),
    maps("chat_template_jinja", "data.template", "A Jinja file, or its text.", quantity="jinja"),
    maps("chat_template_kwargs.*", "data.template_arguments", "The same.", quantity="template_arguments"),
    moot("chat_template_kwargs", "Empty."),
    moot("eot_tokens", "Whatever closes a turn of the assistant is trained."),
    lacks("default_system_message", "A row says its system message, or the template does."),
    maps("dataset_exact_deduplication", "data.duplicates", "true is `drop`.", quantity="deduplicate"),
    *alike(
        lacks, "All rows are trained on: give a source first, or another file.", "dataset_shard_num dataset_shard_idx"
    ),
    maps("curriculum_sampling", "data.order", "true is `given`, unless data sets are shuffled.", quantity="curriculum"),
    maps("shuffle_merged_datasets", "data.order", "Without curriculum_sampling rows are shuffled.", quantity="merged"),
    maps("shuffle_before_merging_datasets", "data.order", "As shuffle_merged_datasets.", quantity="before_merging"),
    *ARGUMENTS.keys_named("group_by_length"),
    lacks("skip_prepare_dataset", "Rows with images are made ready while training."),
    *alike(
        moot,
        _CACHE,
        "dataset_prepared_path push_dataset_to_hub num_dataset_shards_to_save dataset_processes dataset_num_proc "
        "dataset_keep_in_memory is_preprocess preprocess_iterable axolotl_config_path",
    ),
    maps("streaming", "data.train", "Rows are read whole before the run.", quantity="streaming"),
    *alike(
        moot, reasons.LOADER, "streaming_multipack_buffer_size pretrain_multipack_buffer_size remove_unused_columns"
    ),
    moot("pretraining_sample_concatenation", "Documents of a pack are apart."),
    *alike(
        moot,
        reasons.LOADER,
        "dataloader_pin_memory dataloader_num_workers dataloader_prefetch_factor dataloader_drop_last "
        "accelerator_config.*",
    ),
    moot("hf_use_auth_token", reasons.LOG_IN),
)

STEPS: tuple[Key, ...] = (
    tells("micro_batch_size", "micro_batch"),
    tells("gradient_accumulation_steps", "accumulation", "Micro-batches follow from the batch."),
    maps(
        "batch_size", "batch.sequences", "Of one worker, where accumulation is not given.", quantity="batch_of_worker"
    ),
    *ARGUMENTS.keys_named("auto_find_batch_size"),
    tells("num_epochs", "epochs"),
    *ARGUMENTS.keys_named("max_steps learning_rate"),
    *alike(lacks, "One learning rate for all.", "embedding_lr embedding_lr_scale lr_groups.*"),
    *ARGUMENTS.keys_named("weight_decay adam_beta1 adam_beta2 adam_epsilon"),
    *alike(
        moot,
        _NOT_READ,
        "adam_eps eta_min project_name context_parapllel_size test_value torch_dtype context_paralel_size",
    ),
    *alike(
        moot,
        reasons.OTHER_OPTIMIZER,
        "adam_epsilon2 adam_beta3 dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of qgalore_* "
        "torchdistx_path",
    ),
    *alike(lacks, "AdamW takes nothing else.", "optim_args optim_args.*"),
    lacks("optim_target_modules", "AdamW updates every parameter that is trained."),
    *ARGUMENTS.keys_named("max_grad_norm"),
    tells("optimizer", "optim"),
    tells("lr_scheduler", "schedule"),
    *ARGUMENTS.keys_named("lr_scheduler_kwargs.min_lr lr_scheduler_kwargs.min_lr_rate lr_scheduler_kwargs.*"),
    maps("cosine_min_lr_ratio", "optimizer.final", "The same, of a cosine.", quantity="cosine_final"),
    lacks("cosine_constant_lr_ratio", "A cosine goes on to the end."),
    maps(
        "lr_quadratic_warmup", "optimizer.warmup_shape", "true is quadratic, of a cosine.", quantity="quadratic_warmup"
    ),
    lacks("lr_div_factor", "Belongs to a schedule of one cycle."),
    *ARGUMENTS.keys_named("warmup_steps warmup_ratio"),
    maps(
        "early_stopping_patience",
        "evaluate.patience checkpoint.best",
        "The same, of the loss over the validation rows; the best step is exported.",
        quantity="patience",
    ),
    moot("loss_watchdog_threshold", "A step whose loss is not finite is skipped; many of them end the run."),
    moot("loss_watchdog_patience", "A step whose loss is not finite is skipped; many of them end the run."),
    *ARGUMENTS.keys_named("bf16"),
    tells("bfloat16", "bf16"),
    *ARGUMENTS.keys_named("fp16"),
    tells("float16", "fp16"),
    moot("float32", "precision says it."),
    *ARGUMENTS.keys_named("tf32"),
    lacks("fp8", "No FP8."),
    *alike(moot, "Belongs to FP8.", "fp8_enable_fsdp_float8_all_gather fp8_config.* fp8_config"),
    *alike(moot, "Norms compute in fp32 where the model does.", "fp32_norms fp32_norm_classes"),
)

MEMORY: tuple[Key, ...] = (
    maps("gradient_checkpointing", "memory.recompute", "Whole blocks are recomputed.", quantity="checkpointing"),
    *ARGUMENTS.keys_named("gradient_checkpointing_kwargs.*"),
    moot("selective_checkpointing.*", "memory.recompute says what is recomputed."),
    tells("activation_offloading", "inputs_elsewhere"),
    moot("layer_offloading", "What rests where is the planner's choice."),
    *alike(
        moot, "Memory of the device is counted before the run.", "gc_steps gc_collect_steps torch_empty_cache_steps"
    ),
    tells("fsdp", "sharding"),
    *within("fsdp_config.", (key for key in FSDP if "offload" not in key.name)),
    maps("fsdp_config.offload_params", "memory.optimizer_tier", _OFFLOADED, quantity="offload_all"),
    maps("fsdp_config.cpu_offload", "memory.optimizer_tier", _OFFLOADED, quantity="offload_all"),
    moot("fsdp_config.final_state_dict_type", "Every worker writes its own shard; export/ holds a whole model."),
    moot("fsdp_config.cpu_offload_pin_memory", "What rests in host memory is locked there."),
    moot("fsdp_config.fsdp_version", "FSDP2 always."),
    moot("fsdp_config", "FSDP is off."),
    moot("fsdp_version", "FSDP2 always."),
    moot("fsdp_final_state_dict_type", "Every worker writes its own shard; export/ holds a whole model."),
    tells("deepspeed", "deepspeed_file", reasons.READ_BESIDE),
    moot("deepcompile", "compile says what is compiled."),
    tells("dp_shard_size", "shard_workers"),
    tells("dp_replicate_size", "parallel.replicate"),
    tells("tensor_parallel_size", "tensor_workers"),
    lacks("context_parallel_size", reasons.NOT_DIVIDED, idle=(1,)),
    lacks("sequence_parallel_degree", reasons.NOT_DIVIDED, idle=(1,)),
    moot("expert_parallel_size", reasons.EXPERTS),
    *alike(
        moot,
        "Belongs to expert parallelism.",
        "expert_parallel_backend expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes "
        "expert_parallel_token_capacity expert_parallel_fallback_on_unsupported",
    ),
    tells("torch_compile", "compile"),
    *alike(
        moot,
        "torch.compile's defaults, with inductor.",
        "torch_compile_backend torch_compile_mode torch_compile_options.*",
    ),
    *alike(moot, "Plain reduction or FSDP2; how is not configured.", "ddp ddp_bucket_cap_mb ddp_broadcast_buffers"),
    moot("ddp_find_unused_parameters", "Plain reduction or FSDP2; how is not configured."),
    tells("ddp_timeout", "launch.timeout"),
    *alike(moot, "A worker's place comes from its launcher.", "world_size local_rank"),
    maps("use_ray", "launch.with", "true is `ray`.", quantity="ray"),
    tells("ray_num_workers", "ray_workers"),
    moot("ray_run_name", "A run is named by its directory."),
    moot("resources_per_worker.*", "launch.gpus_per_worker says it."),
)

UPKEEP: tuple[Key, ...] = (
    tells("output_dir", "output"),
    maps("seed", "seed", "Of the order of packs; other draws than Axolotl's."),
    maps(
        "saves_per_epoch",
        "checkpoint.every",
        "Where all steps are known; else as often as is worth it.",
        quantity="saves_per_epoch",
    ),
    tells("save_steps", "save_steps"),
    tells("save_strategy", "save_strategy"),
    tells("save_total_limit", "save_limit", "The same; Axolotl keeps 4 by default."),
    *alike(
        moot, "A checkpoint holds all that a run needs to go on.", "save_only_model save_safetensors save_first_step"
    ),
    moot("dynamic_checkpoint.*", "SIGTERM saves a run and ends it."),
    *ARGUMENTS.keys_named("resume_from_checkpoint"),
    moot("auto_resume_from_checkpoints", "tonnage train --resume goes on."),
    maps("evals_per_epoch", "evaluate.every", "As a fraction of all steps.", quantity="evals_per_epoch"),
    tells("eval_steps", "eval_steps", "Steps, or a fraction of all."),
    *ARGUMENTS.keys_named(
        "eval_strategy evaluation_strategy load_best_model_at_end metric_for_best_model greater_is_better"
    ),
    *alike(moot, reasons.EVALUATED, "eval_batch_size eval_table_size eval_max_new_tokens eval_causal_lm_metrics"),
    *(
        lacks(name, "Evaluation is the loss over the validation rows: tonnage eval measures more.", decides=False)
        for name in ("do_causal_lm_eval", "do_bench_eval", "lm_eval_tasks", "generate_samples")
    ),
    *alike(
        moot,
        "Belongs to an evaluation that is not there.",
        "bench_dataset bench_split lm_eval_batch_size lm_eval_post_train lm_eval_model num_generation_samples "
        "generation_max_new_tokens generation_temperature generation_top_p generation_top_k generation_prompt_ratio "
        "generation_do_sample",
    ),
    *alike(moot, reasons.LOGGED, "logging_steps include_tokens_per_second include_tkps debug strict verbose"),
    *alike(moot, "tonnage profile CONFIG shows where the time of a step goes.", "profiler_steps profiler_steps_start"),
    tells("use_tensorboard", "tensorboard"),
    *alike(tells, "wandb", "use_wandb wandb_project"),
    *alike(tells, "mlflow", "use_mlflow mlflow_experiment_name"),
    *alike(tells, "trackio", "use_trackio trackio_project_name"),
    *alike(tells, "other_tracker", "use_comet comet_project_name use_swanlab swanlab_project use_otel_metrics"),
    *alike(moot, "Belongs to Weights & Biases.", "wandb_*"),
    *alike(moot, "Belongs to MLflow.", "mlflow_* hf_mlflow_log_artifacts"),
    *alike(moot, "Belongs to another tracker.", "comet_* trackio_* swanlab_* otel_*"),
    maps("hub_model_id", "checkpoint.push", "Each save is pushed as a model, to a private repository."),
    *ARGUMENTS.keys_named("hub_strategy hub_revision"),
    *alike(moot, "Says how to talk to the model.", "gradio_*"),
    *alike(
        moot,
        _CLOUD,
        "provider gpu gpu_count node_count volumes.* secrets branch dockerfile_commands memory timeout "
        "memory_preprocess timeout_preprocess project_workspace",
    ),
    tells("config", "arguments_file", reasons.READ_BESIDE),
    maps("launcher", "", "How Axolotl starts its workers.", quantity="launcher_word"),
)

AXOLOTL = Table(
    "Axolotl YAML",
    (*MODEL, *OBJECTIVE, *ADAPTER, *DATA, *STEPS, *MEMORY, *UPKEEP),
    {"fsdp_config.fsdp_": "fsdp_config."},
    {
        "lr": "learning_rate",
        "model": "base_model",
        "model_name_or_path": "base_model",
        "max_length": "sequence_len",
        "cutoff_len": "sequence_len",
        "per_device_train_batch_size": "micro_batch_size",
        "num_train_epochs": "num_epochs",
        "warmup": "warmup_steps",
        "lora_rank": "lora_r",
    },
)
