"""Axolotl's YAML: what is known of each of its keys.

Source: the schemas of Axolotl 0.18 (https://docs.axolotl.ai/docs/config-reference.html), those of the plugins that it
brings along, and names that earlier versions had. Keys that its schema does not have are not read by Axolotl either;
those that its users write all the same are told so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tonnage.migration.accelerate import fsdp_keys
from tonnage.migration.keys import Key, Table, alike, lacks, maps, moot

_KERNEL = "Says which kernel computes the same."
_ADAPTER = "Adapters here are plain LoRA, started as LoRA is."
_REWARD = "Supervised fine-tuning only: no preferences, no rewards."
_LOG = "Every step is written to metrics.jsonl and log.txt."
_TRACKER = "track has none such; metrics.jsonl has everything."
_LOADER = "Packs are prepared before the run and read by position."
_CACHE = "Prepared data are named by what made them: data.cache."
_EVALUATED = "Evaluation is the loss over all validation rows, with the micro-batch of the run."
_NOT_READ = "Axolotl does not read it."
_VISION = "Towers for images and sounds are left as they are: text is trained."
_CLOUD = "Says where somebody else's machines run it."
_NOT_ADAMW = "Belongs to another optimizer than AdamW."
_ROWS = "Rows: their form follows from type, columns and roles from the fields that are named."


def _quantity(names: Iterable[str], to: str, reason: str, quantity: str) -> Iterator[Key]:
    for name in names:
        yield maps(name, to, reason, quantity=quantity)


MODEL: tuple[Key, ...] = (
    maps("base_model", "model", "The same."),
    maps("base_model_config", "model", "The configuration is the model's.", quantity="tokenizer"),
    maps("tokenizer_config", "model", "The tokenizer is the model's.", quantity="tokenizer"),
    maps("revision_of_model", "revision", "The same."),
    maps("model_revision", "revision", "The same."),
    maps("trust_remote_code", "trust_remote_code", "The same."),
    maps("reinit_weights", "init", "true is `random`.", quantity="reinit"),
    maps("model_type", "model", "The class follows from the model's files.", quantity="model_class"),
    maps("type_of_model", "model", "The class follows from the model's files.", quantity="model_class"),
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
    lacks("overrides_of_model_kwargs.*", "Models are loaded as they are."),
    lacks("model_kwargs.*", "Models are loaded as they are."),
    moot("base_model_ignore_patterns", "Only files that the model's index names are read."),
    maps("special_tokens.eos_token", "data.template", "What ends a turn is the template's.", quantity="eos_token"),
    moot("special_tokens.pad_token", "No padding is ever seen by the model or the loss."),
    moot("special_tokens.bos_token", "What opens a text is the tokenizer's own."),
    moot("special_tokens.unk_token", "No token is unknown to a tokenizer of bytes; others have their own."),
    lacks("special_tokens.*", "The vocabulary is the tokenizer's, and what a template needs."),
    *(moot(f"tokens.{name}_token", "An old way to write special_tokens.") for name in ("bos", "eos", "pad", "unk")),
    maps("tokens", "data.template", "A template brings its tokens along.", quantity="added_tokens"),
    lacks("added_tokens_overrides.*", "The vocabulary is the tokenizer's."),
    moot("resize_token_embeddings_to_32x", "An embedding is made larger only by the tokens that a template adds."),
    moot("mean_resizing_embeddings", "Rows of new tokens are means of the others."),
    lacks("shrink_embeddings", "An embedding keeps its rows."),
    lacks("fix_untrained_tokens", "The embedding starts as it is."),
    moot("is_falcon_derived_model", "The family follows from the model's files."),
    moot("is_llama_derived_model", "The family follows from the model's files."),
    moot("is_mistral_derived_model", "The family follows from the model's files."),
    moot("is_qwen_derived_model", "The family follows from the model's files."),
    *alike(moot, "Each worker reads its own shard only.", "low_cpu_mem_usage experimental_skip_move_to_device"),
    *alike(moot, "Layers rest where the plan says.", "device device_map.* device_map max_memory gpu_memory_limit"),
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
        _KERNEL,
        "flash_attention flash_attention_2 xformers_attention sdp_attention flex_attention sage_attention "
        "eager_attention attn_implementation flex_attn_compile_kwargs.* flash_attn_cross_entropy flash_attn_fuse_mlp "
        "flash_attn_rms_norm flash_attn_d512 flash_optimum gemma4_hybrid_attn_impl large_head_attention sdpa_varlen "
        "fused_attn_kernel experts_implementation lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel "
        "chunked_cross_entropy chunked_cross_entropy_num_chunks tiled_mlp tiled_mlp_num_shards "
        "tiled_mlp_use_original_mlp use_kernels liger_rope liger_rms_norm liger_rms_norm_gated liger_layer_norm "
        "liger_swiglu liger_glu_activation liger_cross_entropy liger_fused_linear_cross_entropy cut_cross_entropy "
        "unsloth_cross_entropy_loss use_scattermoe use_sonicmoe use_dsv4_kernels use_glm_dsa_kernels expert_backend "
        "moe_grouped_backend moe_dequant_chunk_size moe_bnb_fast dsv4_shared_mlp_lora_kernel dsv4_fp8_lora_kernel "
        "dsv4_bf16_all pretrain_multipack_attn heads_k_stride ring_attn_func mlp_kernel",
    ),
    lacks("s2_attention", "Attention is the model's own."),
    lacks("scaling_softmax", "Attention is the model's own."),
    *alike(moot, "Belongs to scaling_softmax.", "scaling_softmax_factor scaling_softmax_bias"),
    lacks("liger_use_token_scaling", "Cross-entropy with every supervised token alike."),
    lacks("rope_scaling", "Positions are the model's own."),
    *alike(
        lacks,
        "Frozen weights rest in 16, 8 or 4 bits of our own kind: adapter.quantize.",
        "nonexpert_quantization dsv4_fp8_nonexpert_mode dsv4_fp4_grouped_mode gemma4_fp8_nonexpert "
        "gemma4_nf4_nonexpert "
        "nvfp4_merge_aware nvfp4_merge_aware_start_step",
    ),
    *alike(moot, _VISION, "freeze_mm_modules image_size image_resize_algorithm role_boundaries.* processor_kwargs.*"),
    maps("processor_type", "data.train", "Rows with images or sounds are not trained on.", quantity="media"),
    maps("plugins", "optimizer", "Kernels are not needed; other plug-ins do what is not there.", quantity="plugins"),
)

OBJECTIVE: tuple[Key, ...] = (
    lacks("rl", _REWARD),
    lacks("reward_model", _REWARD),
    lacks("process_reward_model", _REWARD),
    lacks("num_labels", "Next tokens are predicted, not labels."),
    lacks("center_rewards_coefficient", _REWARD),
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
    lacks("neftune_noise_alpha", "No noise is added to embeddings."),
    lacks("noisy_embedding_alpha", "No noise is added to embeddings."),
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
    maps("adapter", "adapter", "lora and qlora; without one, all weights are trained.", quantity="lora"),
    maps(
        "load_in_4bit",
        "adapter.quantize",
        "NF4; scales in 8 bits too unless bnb_config_kwargs says no.",
        quantity="bits4",
    ),
    maps("load_in_8bit", "adapter.quantize", "8 bits, a scale for each row.", quantity="bits8"),
    maps(
        "bnb_config_kwargs.bnb_4bit_use_double_quant",
        "adapter.quantize",
        "true is nf4-double, false nf4.",
        quantity="double",
    ),
    maps("bnb_config_kwargs.bnb_4bit_quant_type", "adapter.quantize", "nf4.", quantity="quant_type"),
    moot("bnb_config_kwargs.bnb_4bit_compute_dtype", "Products are in the precision of the run."),
    moot("bnb_config_kwargs.bnb_4bit_quant_storage", "Says how bytes are stored."),
    lacks("bnb_config_kwargs.*", "4 bits are NF4 in blocks of 64."),
    maps("lora_r", "adapter.rank", "The same.", quantity="rank"),
    maps("lora_alpha", "adapter.alpha", "The same.", quantity="alpha"),
    maps("lora_dropout", "adapter.dropout", "The same.", quantity="dropout"),
    maps("lora_target_modules", "adapter.targets", "Names, or a pattern for a regular expression.", quantity="targets"),
    maps("lora_target_linear", "adapter.targets", "true is all-linear.", quantity="all_linear"),
    maps("lora_target_parameters", "adapter.targets", "Experts that are stacked in one tensor.", quantity="stacked"),
    maps("lora_modules_to_save", "adapter.also", "Trained whole beside the adapter.", quantity="also"),
    maps("peft_use_rslora", "adapter.scaling", "true is rank_stabilised.", quantity="rslora"),
    moot("lora_fan_in_fan_out", "How a layer stores its matrix follows from its class."),
    moot("quantize_moe_experts", "adapter.quantize is of the experts too."),
    *alike(
        lacks,
        _ADAPTER,
        "peft_use_dora peft_init_lora_weights peft_layer_replication peft_trainable_token_indices lora_rank_pattern "
        "lora_alpha_pattern peft_layers_to_transform peft_layers_pattern peft.* hatchery.*",
    ),
    lacks("lora_model_dir", "Name the adapter's directory as the model: it is trained further."),
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
    *_quantity(("datasets.*", "datasets"), "data.train", _ROWS, "axolotl_rows"),
    *_quantity(("test_datasets.*", "test_datasets"), "data.validation", _ROWS, "axolotl_tests"),
    *_quantity(
        ("pretraining_dataset.*", "pretraining_dataset"),
        "data.train",
        "Rows are read whole before the run: a stream has to be made a file first.",
        "axolotl_stream",
    ),
    maps("val_set_size", "data.validation", "The same fraction; other rows.", quantity="validation_fraction"),
    maps("sequence_len", "data.max_length", "Tokens of the longest conversation, and of a pack."),
    maps("excess_length_strategy", "data.over_length", "drop, truncate, or raise: error.", quantity="excess"),
    lacks("eval_sequence_len", "Validation rows have the length of the others."),
    lacks("min_sample_len", "Short rows are trained as well.", idle=(1, 2)),
    maps("sample_packing", "data.pack", "Whole documents in one row, which never attend to each other."),
    *alike(
        moot,
        "Packing reads all rows, best fit first, and the documents of a pack are apart on every device.",
        "sample_packing_group_size sample_packing_bin_size sample_packing_sequentially sample_packing_mp_start_method "
        "sample_packing_eff_est sample_packing_seq_len_multiplier total_num_tokens total_supervised_tokens "
        "eval_sample_packing multipack_real_batches batch_flattening pad_to_sequence_len pad_to_multiple_of "
        "max_packed_sequence_len",
    ),
    maps("train_on_inputs", "data.train_on", "true is `all`, false `assistant`.", quantity="train_on_inputs"),
    maps(
        "chat_template",
        "data.template",
        "The model's own, or one of ours with the same text.",
        quantity="chat_template",
    ),
    maps("chat_template_jinja", "data.template", "A Jinja file.", quantity="jinja"),
    maps("chat_template_kwargs.*", "data.template_arguments", "The same.", quantity="template_arguments"),
    moot("chat_template_kwargs", "Empty."),
    moot("eot_tokens", "Whatever closes a turn of the assistant is trained."),
    lacks("default_system_message", "A row says its system message, or the template does."),
    maps("dataset_exact_deduplication", "data.duplicates", "true is `drop`.", quantity="deduplicate"),
    *alike(
        lacks, "All rows are trained on: give a source first, or another file.", "dataset_shard_num dataset_shard_idx"
    ),
    lacks("curriculum_sampling", "Packs are always shuffled, by the seed."),
    moot("shuffle_merged_datasets", "Packs are always shuffled, by the seed."),
    moot("shuffle_before_merging_datasets", "Packs are always shuffled, by the seed."),
    moot("group_by_length", "Packs are of about one length; without packing a micro-batch has no padding."),
    lacks("skip_prepare_dataset", "Rows with images are made ready while training."),
    *alike(
        moot,
        _CACHE,
        "dataset_prepared_path push_dataset_to_hub num_dataset_shards_to_save dataset_processes dataset_num_proc "
        "dataset_keep_in_memory is_preprocess preprocess_iterable axolotl_config_path",
    ),
    maps("streaming", "data.train", "Rows are read whole before the run.", quantity="streaming"),
    *alike(moot, _LOADER, "streaming_multipack_buffer_size pretrain_multipack_buffer_size remove_unused_columns"),
    moot("pretraining_sample_concatenation", "Documents of a pack are apart."),
    *alike(
        moot,
        _LOADER,
        "dataloader_pin_memory dataloader_num_workers dataloader_prefetch_factor dataloader_drop_last "
        "accelerator_config.*",
    ),
    moot("hf_use_auth_token", "Log in with hf auth login; the value is not repeated."),
)

STEPS: tuple[Key, ...] = (
    maps(
        "micro_batch_size",
        "batch.sequences memory.micro_batch",
        "Times accumulation times workers it is the batch; by itself it is what one forward holds.",
        quantity="micro_batch",
    ),
    maps(
        "gradient_accumulation_steps",
        "batch.sequences",
        "Micro-batches follow from the batch.",
        quantity="accumulation",
    ),
    maps(
        "batch_size", "batch.sequences", "Of one worker, where accumulation is not given.", quantity="batch_of_worker"
    ),
    moot("auto_find_batch_size", "memory.micro_batch: auto is the planner's."),
    maps("num_epochs", "epochs", "Passes over the data.", quantity="epochs"),
    maps("max_steps", "steps", "Updates.", quantity="steps"),
    maps("learning_rate", "optimizer.lr", "The highest learning rate."),
    lacks("embedding_lr", "One learning rate for all."),
    lacks("embedding_lr_scale", "One learning rate for all."),
    lacks("lr_groups.*", "One learning rate for all."),
    maps("weight_decay", "optimizer.weight_decay", "Not applied to norms and biases, as in the Trainer."),
    maps("adam_beta1", "optimizer.betas", "The first.", quantity="beta1"),
    maps("adam_beta2", "optimizer.betas", "The second.", quantity="beta2"),
    maps("adam_epsilon", "optimizer.eps", "The same."),
    *alike(
        moot,
        _NOT_READ,
        "adam_eps eta_min project_name context_parapllel_size test_value torch_dtype context_paralel_size",
    ),
    *alike(
        moot,
        _NOT_ADAMW,
        "adam_epsilon2 adam_beta3 dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of qgalore_* "
        "torchdistx_path",
    ),
    lacks("optim_args", "AdamW takes nothing else."),
    lacks("optim_args.*", "AdamW takes nothing else."),
    lacks("optim_target_modules", "AdamW updates every parameter that is trained."),
    maps("max_grad_norm", "optimizer.clip", "The same: the global norm; 0 is off."),
    maps(
        "optimizer", "optimizer memory.moments", "AdamW is the one optimizer; 8-bit ones are moments.", quantity="optim"
    ),
    maps("lr_scheduler", "optimizer.schedule", "Cosine, linear or constant.", quantity="schedule"),
    maps("lr_scheduler_kwargs.min_lr", "optimizer.final", "As a fraction of lr.", quantity="min_lr"),
    maps("lr_scheduler_kwargs.min_lr_rate", "optimizer.final", "The same.", quantity="min_lr_rate"),
    lacks("lr_scheduler_kwargs.*", "Belongs to a schedule other than cosine, linear or constant."),
    maps("cosine_min_lr_ratio", "optimizer.final", "The same, of a cosine.", quantity="cosine_final"),
    lacks("cosine_constant_lr_ratio", "A cosine goes on to the end."),
    lacks("lr_quadratic_warmup", "Warm-up is linear."),
    lacks("lr_div_factor", "Belongs to a schedule of one cycle."),
    maps("warmup_steps", "optimizer.warmup", "Steps (a fraction below 1), from near zero.", quantity="warmup_steps"),
    maps("warmup_ratio", "optimizer.warmup", "A fraction of all steps, from near zero.", quantity="warmup_ratio"),
    lacks("early_stopping_patience", "evaluate.patience does it; write it into the config."),
    moot("loss_watchdog_threshold", "A step whose loss is not finite is skipped; many of them end the run."),
    moot("loss_watchdog_patience", "A step whose loss is not finite is skipped; many of them end the run."),
    maps("bf16", "precision", "bf16 weights with an exact fp32 master, not autocast over fp32 ones.", quantity="bf16"),
    maps("bfloat16", "precision", "bf16 weights with an exact fp32 master.", quantity="bf16"),
    maps("fp16", "precision", "fp16 weights with an fp32 master, not autocast over fp32 ones.", quantity="fp16"),
    maps("float16", "precision", "fp16 weights with an fp32 master.", quantity="fp16"),
    moot("float32", "precision says it."),
    moot("tf32", "Says how products of fp32 are computed; torch's default holds."),
    lacks("fp8", "No FP8."),
    moot("fp8_enable_fsdp_float8_all_gather", "Belongs to FP8."),
    moot("fp32_norms", "Norms compute in fp32 where the model does."),
    moot("fp32_norm_classes", "Norms compute in fp32 where the model does."),
)

MEMORY: tuple[Key, ...] = (
    maps("gradient_checkpointing", "memory.recompute", "Whole blocks are recomputed.", quantity="checkpointing"),
    moot("gradient_checkpointing_kwargs.*", "How blocks are recomputed is the same for all."),
    moot("selective_checkpointing.*", "memory.recompute says what is recomputed."),
    maps(
        "activation_offloading",
        "memory.activation_tier memory.recompute",
        "Inputs of blocks go to the host's memory, all else is recomputed.",
        quantity="inputs_elsewhere",
    ),
    moot("layer_offloading", "What rests where is the planner's choice."),
    *alike(
        moot, "Memory of the device is counted before the run.", "gc_steps gc_collect_steps torch_empty_cache_steps"
    ),
    maps(
        "fsdp", "memory.zero parallel.replicate", "full_shard is 3, shard_grad_op 2, no_shard 0.", quantity="sharding"
    ),
    *(key for key in fsdp_keys("fsdp_config.") if "offload" not in key.name),
    *_quantity(
        ("fsdp_config.offload_params", "fsdp_config.cpu_offload"),
        "memory.optimizer_tier",
        "The optimizer's state rests in the host's memory.",
        "offload_all",
    ),
    moot("fsdp_config.final_state_dict_type", "Every worker writes its own shard; export/ holds a whole model."),
    moot("fsdp_config.cpu_offload_pin_memory", "What rests in host memory is locked there."),
    moot("fsdp_config.fsdp_version", "FSDP2 always."),
    moot("fsdp_config", "FSDP is off."),
    moot("fsdp_version", "FSDP2 always."),
    moot("fsdp_final_state_dict_type", "Every worker writes its own shard; export/ holds a whole model."),
    maps("deepspeed", "", "Another file: it is read beside this one.", quantity="deepspeed_file"),
    moot("deepcompile", "compile says what is compiled."),
    maps("dp_shard_size", "launch.workers", "Workers that share the states.", quantity="shard_workers"),
    maps("dp_replicate_size", "parallel.replicate", "The same: groups that hold everything once."),
    maps("tensor_parallel_size", "parallel.tensor", "The same.", quantity="tensor_workers"),
    lacks("context_parallel_size", "Sequences are not divided among workers.", idle=(1,)),
    lacks("sequence_parallel_degree", "Sequences are not divided among workers.", idle=(1,)),
    moot("expert_parallel_size", "Experts are shared out among workers as all other weights are."),
    *alike(
        moot,
        "Belongs to expert parallelism.",
        "expert_parallel_backend expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes "
        "expert_parallel_token_capacity expert_parallel_fallback_on_unsupported",
    ),
    maps("torch_compile", "compile", "Each block is compiled.", quantity="compile"),
    *alike(
        moot,
        "torch.compile's defaults, with inductor.",
        "torch_compile_backend torch_compile_mode torch_compile_options.*",
    ),
    *alike(moot, "Plain reduction or FSDP2; how is not configured.", "ddp ddp_bucket_cap_mb ddp_broadcast_buffers"),
    moot("ddp_find_unused_parameters", "Plain reduction or FSDP2; how is not configured."),
    maps("ddp_timeout", "launch.timeout", "Seconds without progress after which a run ends."),
    *alike(moot, "A worker's place comes from its launcher.", "world_size local_rank"),
    maps("use_ray", "launch.with", "true is `ray`.", quantity="ray"),
    maps("ray_num_workers", "launch.workers", "The same.", quantity="ray_workers"),
    moot("ray_run_name", "A run is named by its directory."),
    moot("resources_per_worker.*", "launch.gpus_per_worker says it."),
)

UPKEEP: tuple[Key, ...] = (
    maps("output_dir", "output", "The run's directory; the model will be in its export/."),
    maps("seed", "seed", "Of the order of packs; other draws than Axolotl's."),
    maps(
        "saves_per_epoch",
        "checkpoint.every",
        "Where all steps are known; else as often as is worth it.",
        quantity="saves_per_epoch",
    ),
    maps("save_steps", "checkpoint.every", "Steps.", quantity="save_steps"),
    maps(
        "save_strategy", "checkpoint.every", "no, or steps; a run is always saved at its end.", quantity="save_strategy"
    ),
    maps("save_total_limit", "checkpoint.keep", "The same; Axolotl keeps 4 by default.", quantity="save_limit"),
    *alike(
        moot, "A checkpoint holds all that a run needs to go on.", "save_only_model save_safetensors save_first_step"
    ),
    moot("dynamic_checkpoint.*", "SIGTERM saves a run and ends it."),
    lacks("resume_from_checkpoint", "Checkpoints of other programs: name one with weights as the model."),
    moot("auto_resume_from_checkpoints", "tonnage train --resume goes on."),
    maps("evals_per_epoch", "evaluate.every", "As a fraction of all steps.", quantity="evals_per_epoch"),
    maps("eval_steps", "evaluate.every", "Steps, or a fraction of all.", quantity="eval_steps"),
    maps("eval_strategy", "evaluate.every", "no, or steps.", quantity="eval_strategy"),
    maps("evaluation_strategy", "evaluate.every", "no, or steps.", quantity="eval_strategy"),
    lacks("load_best_model_at_end", "checkpoint.best: eval_loss does it; write it into the config."),
    *alike(moot, "checkpoint.best names the figure.", "metric_for_best_model greater_is_better"),
    *alike(moot, _EVALUATED, "eval_batch_size eval_table_size eval_max_new_tokens eval_causal_lm_metrics"),
    *alike(
        lacks,
        "Evaluation is the loss over the validation rows: tonnage eval measures more.",
        "do_causal_lm_eval do_bench_eval lm_eval_tasks generate_samples",
    ),
    *alike(
        moot,
        "Belongs to an evaluation that is not there.",
        "bench_dataset bench_split lm_eval_batch_size lm_eval_post_train lm_eval_model num_generation_samples "
        "generation_max_new_tokens generation_temperature generation_top_p generation_top_k generation_prompt_ratio "
        "generation_do_sample",
    ),
    *alike(moot, _LOG, "logging_steps include_tokens_per_second include_tkps debug strict verbose"),
    *alike(moot, "tonnage profile CONFIG shows where the time of a step goes.", "profiler_steps profiler_steps_start"),
    maps("use_tensorboard", "track", "TensorBoard files go into the run directory.", quantity="tensorboard"),
    *_quantity(("use_wandb", "wandb_project"), "track", "The project is WANDB_PROJECT's to say.", "wandb"),
    *_quantity(
        ("use_mlflow", "mlflow_experiment_name"),
        "track",
        "The experiment is MLFLOW_EXPERIMENT_NAME's to say.",
        "mlflow",
    ),
    *_quantity(("use_trackio", "trackio_project_name"), "track", "The project is TRACKIO_PROJECT's to say.", "trackio"),
    *_quantity(
        (*("use_comet", "comet_project_name", "use_swanlab", "swanlab_project", "use_otel_metrics"),),
        "track",
        _TRACKER,
        "other_tracker",
    ),
    *alike(moot, "Belongs to Weights & Biases.", "wandb_*"),
    *alike(moot, "Belongs to MLflow.", "mlflow_* hf_mlflow_log_artifacts"),
    *alike(moot, "Belongs to another tracker.", "comet_* trackio_* swanlab_* otel_*"),
    maps("hub_model_id", "checkpoint.push", "Each save is pushed as a model, to a private repository."),
    moot("hub_strategy", "Each save is pushed, as a model."),
    lacks("hub_revision", "The main branch of the repository.", decides=False),
    *alike(moot, "Says how to talk to the model.", "gradio_*"),
    *alike(
        moot,
        _CLOUD,
        "provider gpu gpu_count node_count volumes.* secrets branch dockerfile_commands memory timeout "
        "memory_preprocess "
        "timeout_preprocess project_workspace",
    ),
    maps("config", "", "Another file: it is read beside this one.", quantity="arguments_file"),
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
