"""LLaMA-Factory's YAML, of version 0 and of the rewrite that it calls version 1.

Source: the argument classes of LLaMA-Factory 0.9.5 (https://llamafactory.readthedocs.io) and of its ``v1`` package.
Version 0 takes all arguments of transformers' Trainer as well; what is known of those is said in ``arguments``.
"""

from __future__ import annotations

from tonnage.migration.arguments import ARGUMENTS
from tonnage.migration.keys import Key, Table, alike, lacks, maps, moot

_REWARD = "Supervised fine-tuning only: no preferences, no rewards."
_KERNEL = "Says which kernel computes the same."
_ADAPTER = "Adapters here are plain LoRA, started as LoRA is."
_NOT_ADAMW = "AdamW is the one optimizer."
_EXPORT = "Says how a model is exported: tonnage export."
_ANSWERS = "Says how the model answers: tonnage generate."
_TRACKER = "track has none such; metrics.jsonl has everything."
_MEDIA = "Text is trained: towers for images and sounds are left as they are."
_PREPARED = "Preparing uses the cores there are, once."
_MEGATRON = "Belongs to Megatron; how workers divide a model is the plan's."
_LOSS = "Cross-entropy with every supervised token alike."

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
    maps("model_name_or_path", "model", "The same."),
    lacks("adapter_name_or_path", "Name the adapter's directory as the model: it is trained further."),
    moot("adapter_folder", "Belongs to adapter_name_or_path."),
    lacks("resize_vocab", "An embedding is made larger only by the tokens that a template adds."),
    lacks("split_special_tokens", "Special tokens in a text are read as such."),
    lacks("add_tokens", "The vocabulary is the tokenizer's, and what a template needs."),
    lacks("add_special_tokens", "The vocabulary is the tokenizer's, and what a template needs."),
    lacks("new_special_tokens_config", "The vocabulary is the tokenizer's, and what a template needs."),
    moot("init_special_tokens", "Belongs to add_special_tokens."),
    lacks("rope_scaling", "Positions are the model's own."),
    lacks("shift_attn", "Attention is the model's own."),
    lacks("mixture_of_depths", "The layers are the model's own."),
    *alike(
        moot,
        _KERNEL,
        "flash_attn use_unsloth use_unsloth_gc enable_liger_kernel use_v1_kernels use_reentrant_gc upcast_layernorm "
        "upcast_lmhead_output use_kv_cache print_param_status block_diag_attn compute_dtype device_map",
    ),
    maps("moe_aux_loss_coef", "router_loss", "The same."),
    maps("disable_gradient_checkpointing", "memory.recompute", "false: whole blocks are recomputed.", quantity="kept"),
    maps("train_from_scratch", "init", "true is `random`.", quantity="reinit"),
    moot("infer_backend", _ANSWERS),
    moot("infer_dtype", _ANSWERS),
    moot("offload_folder", "What rests where is the plan's."),
    *alike(moot, "Log in with hf auth login; the value is not repeated.", "hf_hub_token ms_hub_token om_hub_token"),
    maps("quantization_method", "adapter.quantize", "bnb: 4 bits are NF4.", quantity="quant_method"),
    maps(
        "quantization_bit",
        "adapter.quantize",
        "4 is nf4-double (nf4 if double_quantization is off), 8 int8.",
        quantity="bits",
    ),
    maps("quantization_type", "adapter.quantize", "nf4.", quantity="quant_type"),
    maps("double_quantization", "adapter.quantize", "true is nf4-double, false nf4.", quantity="double"),
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
    lacks("kt_use_lora_experts", _ADAPTER),
    *alike(moot, "Belongs to KTransformers.", "kt_expert_checkpoint_path kt_lora_*"),
    *alike(moot, "Follows from cutoff_len.", "model_max_length max_length"),
)

TRAINING: tuple[Key, ...] = (
    maps("stage", "data.train", "sft, or pt: rows of text.", quantity="stage"),
    maps("finetuning_type", "adapter", "lora (the default) or full.", quantity="lora"),
    maps("lora_rank", "adapter.rank", "The same.", quantity="rank"),
    maps("lora_alpha", "adapter.alpha", "The same.", quantity="alpha"),
    maps("lora_dropout", "adapter.dropout", "The same.", quantity="dropout"),
    maps("lora_target", "adapter.targets", "all is all-linear.", quantity="targets"),
    maps("additional_target", "adapter.also", "Trained whole beside the adapter.", quantity="also"),
    maps("use_rslora", "adapter.scaling", "true is rank_stabilised.", quantity="rslora"),
    *alike(lacks, _ADAPTER, "use_dora pissa_init create_new_adapter"),
    *alike(moot, "Belongs to PiSSA.", "pissa_iter pissa_convert"),
    lacks("loraplus_lr_ratio", "One learning rate for all."),
    moot("loraplus_lr_embedding", "Belongs to loraplus_lr_ratio."),
    *alike(moot, "Belongs to OFT.", "oft_* module_dropout"),
    *alike(
        moot,
        "Belongs to finetuning_type freeze.",
        "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules",
    ),
    *alike(
        moot,
        "Belongs to preferences and rewards.",
        "pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing kto_chosen_weight kto_rejected_weight "
        "simpo_gamma ppo_* ref_model ref_model_adapters ref_model_quantization_bit reward_model "
        "reward_model_adapters reward_model_quantization_bit reward_model_type ld_alpha",
    ),
    *alike(lacks, _NOT_ADAMW, "use_galore use_apollo use_badam use_adam_mini use_muon"),
    *alike(moot, "Belongs to another optimizer than AdamW.", "galore_* apollo_* badam_*"),
    *alike(lacks, _LOSS, "use_dft_loss use_asft_loss use_eaft_loss"),
    *alike(moot, "Belongs to another loss.", "asft_alpha eaft_alpha"),
    lacks("use_llama_pro", "Blocks are trained all or as `train` says, and none are added."),
    maps("pure_bf16", "precision", "bf16 weights with an exact fp32 master.", quantity="bf16"),
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
    lacks("disable_shuffling", "Packs are always shuffled, by the seed."),
    lacks("early_stopping_steps", "evaluate.patience does it; write it into the config."),
    lacks("use_swanlab", _TRACKER, decides=False),
    *alike(moot, "Belongs to SwanLab.", "swanlab_*"),
    moot("overwrite_output_dir", "A directory that holds a run is never overwritten: name another."),
    lacks("fp8", "No FP8."),
    *alike(moot, "Belongs to FP8.", "fp8_backend fp8_enable_fsdp_float8_all_gather"),
    maps("ray_num_workers", "launch.workers", "The same, with launch.with: ray.", quantity="ray_workers"),
    *alike(
        moot,
        "Where Ray runs is its own affair.",
        "ray_init_kwargs.* ray_init_kwargs ray_storage_path ray_run_name placement_strategy resources_per_worker.*",
    ),
    *alike(moot, "Workers on this machine find each other by themselves.", "master_addr master_port"),
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
    maps("tensor_model_parallel_size", "parallel.tensor", "The same.", quantity="tensor_workers"),
    maps("pipeline_model_parallel_size", "parallel.pipeline", "The same.", quantity="pipeline_workers"),
    lacks("context_parallel_size", "Sequences are not divided among workers.", idle=(1,)),
    moot("expert_model_parallel_size", "Experts are shared out among workers as all other weights are."),
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
    maps("mixed_precision", "precision", "bf16_mixed is bf16.", quantity="mixed_precision"),
)

DATA: tuple[Key, ...] = (
    maps("dataset", "data.train", "Names in dataset_info.json, which is read.", quantity="factory_rows"),
    maps("eval_dataset", "data.validation", "Names in dataset_info.json, which is read.", quantity="factory_tests"),
    maps("dataset_dir", "data.train", "Where dataset_info.json and files of rows are.", quantity="factory_folder"),
    maps("template", "data.template", "The model's own, or one of ours with the same text.", quantity="chat_template"),
    maps("cutoff_len", "data.max_length", "Tokens of the longest conversation, and of a pack."),
    maps("train_on_prompt", "data.train_on", "true is `all`, false `assistant`.", quantity="train_on_inputs"),
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
    maps("val_size", "data.validation", "The same fraction; other rows.", quantity="validation_fraction"),
    moot("eval_on_each_dataset", "Validation rows are evaluated together."),
    maps("packing", "data.pack", "Whole documents in one row, which never attend to each other."),
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
    *(
        "subset",
        "mixture_path",
        "mixture_name",
        "mixture_split",
        "mixture_fraction",
        "text_column",
        "packing_strategy",
        "template",
    ),
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
        maps("model", "model", "The same."),
        maps("model_class", "model", "llm.", quantity="model_class"),
        lacks("custom_chat_template", "A Jinja file: data.template."),
        maps(
            "template", "data.template", "The model's own, or one of ours with the same text.", quantity="chat_template"
        ),
        maps("trust_remote_code", "trust_remote_code", "The same."),
        *alike(moot, _KERNEL, "flash_attn kernel_config.* kernel_config init_config.* init_config"),
        maps("peft_config.name", "adapter", "lora; without peft_config, all weights are trained.", quantity="lora"),
        maps("peft_config.r", "adapter.rank", "The same.", quantity="rank"),
        maps("peft_config.lora_alpha", "adapter.alpha", "The same.", quantity="alpha"),
        maps("peft_config.lora_dropout", "adapter.dropout", "The same.", quantity="dropout"),
        maps("peft_config.target_modules", "adapter.targets", "all is all-linear.", quantity="targets"),
        maps("peft_config.use_rslora", "adapter.scaling", "true is rank_stabilised.", quantity="rslora"),
        maps("peft_config.modules_to_save", "adapter.also", "Trained whole beside the adapter.", quantity="also"),
        lacks("peft_config.use_dora", _ADAPTER),
        lacks("peft_config.adapter_name_or_path", "Name the adapter's directory as the model: it is trained further."),
        *alike(moot, _EXPORT, "peft_config.export_dir peft_config.export_size peft_config.export_hub_model_id"),
        *alike(moot, _EXPORT, "peft_config.infer_dtype peft_config.export_legacy_format"),
        *alike(
            moot,
            "Belongs to freeze.",
            "peft_config.freeze_trainable_layers peft_config.freeze_trainable_modules peft_config.freeze_extra_modules "
            "peft_config.cast_trainable_params_to_fp32",
        ),
        moot("peft_config", "All weights are trained."),
        maps("quant_config.name", "adapter.quantize", "bnb: 4 bits are NF4.", quantity="quant_method"),
        maps("quant_config.quantization_bit", "adapter.quantize", "4 is nf4-double, 8 int8.", quantity="bits"),
        maps("quant_config.quantization_type", "adapter.quantize", "nf4.", quantity="quant_type"),
        maps(
            "quant_config.double_quantization", "adapter.quantize", "true is nf4-double, false nf4.", quantity="double"
        ),
        moot("quant_config", "Nothing is quantised."),
        maps("train_dataset", "data.train", "Another file, which is read.", quantity="factory_file"),
        maps("eval_dataset", "data.validation", "Another file, which is read.", quantity="factory_test_file"),
        maps("output_dir", "output", "The run's directory; the model will be in its export/."),
        maps(
            "micro_batch_size", "batch.sequences memory.micro_batch", "What one forward holds.", quantity="micro_batch"
        ),
        maps("global_batch_size", "batch.sequences", "Samples in a step over all workers.", quantity="batch.sequences"),
        maps("cutoff_len", "data.max_length", "Tokens of the longest conversation, and of a pack."),
        maps("learning_rate", "optimizer.lr", "The highest learning rate."),
        maps("num_train_epochs", "epochs", "Passes over the data.", quantity="epochs"),
        maps("max_steps", "steps", "Updates.", quantity="steps"),
        maps("max_grad_norm", "optimizer.clip", "The same: the global norm."),
        maps("bf16", "precision", "bf16 weights with an exact fp32 master.", quantity="bf16"),
        maps(
            "batching_strategy", "data.pack", "normal, padding_free: a row for each conversation.", quantity="batching"
        ),
        moot("batching_workers", _PREPARED),
        maps(
            "enable_activation_checkpointing", "memory.recompute", "Whole blocks are recomputed.", quantity="recompute"
        ),
        maps("dist_config.name", "memory.zero", "fsdp2 is 3, deepspeed as its file says.", quantity="engine"),
        maps("dist_config.config_file", "", "Another file: it is read beside this one.", quantity="deepspeed_file"),
        moot("dist_config.dcp_path", "Each worker reads its own shard of the model's files."),
        moot("dist_config.ep_size", "Experts are shared out among workers as all other weights are."),
        moot("dist_config.*", "How workers divide a model is the plan's."),
        moot("dist_config", "One worker."),
        maps("dp_size", "launch.workers", "Workers with rows of their own.", quantity="shard_workers"),
        lacks("cp_size", "Sequences are not divided among workers.", idle=(1,)),
        moot("cp_mode", "Belongs to cp_size."),
        maps("mp_replicate_size", "parallel.replicate", "The same: groups that hold everything once."),
        maps("mp_shard_size", "launch.workers", "Workers that share the states.", quantity="shard_workers"),
        maps("dist_timeout", "launch.timeout", "Seconds without progress after which a run ends."),
        lacks("optim_config.name", "AdamW is the one optimizer.", idle=("adamw",)),
        moot("optim_config.*", "Belongs to another optimizer than AdamW."),
        moot("optim_config", "AdamW is the one optimizer."),
        lacks("lr_scheduler_config.name", "Not carried over: optimizer.schedule says it here.", idle=("constant",)),
        moot("lr_scheduler_config.*", "Belongs to a schedule."),
        moot("lr_scheduler_config", "The learning rate stays as it is."),
        maps("seed", "seed", "Of the order of packs; other draws than LLaMA-Factory's."),
        moot("full_determinism", "The same layout gives the same steps."),
        lacks("resume_from_checkpoint", "Checkpoints of other programs: name one with weights as the model."),
        maps("save_steps", "checkpoint.every", "Steps.", quantity="save_steps"),
        moot("save_epochs", "Checkpoints are counted in steps: checkpoint.every."),
        moot("save_ckpt_as_hf", "A finished run always holds a Hugging Face model in export/."),
        maps("save_total_limit", "checkpoint.keep", "The same.", quantity="save_limit"),
        moot("logging_steps", "Every step is written to metrics.jsonl and log.txt."),
        lacks("pref_loss", _REWARD),
        *alike(moot, "Belongs to preferences.", "pref_beta pref_ftx simpo_gamma dpo_label_smoothing ld_alpha"),
        *alike(moot, _ANSWERS, "sample_backend max_new_tokens"),
        maps("config", "", "Another file: it is read beside this one.", quantity="arguments_file"),
    ),
    {},
    {"model_name_or_path": "model", "lr": "learning_rate", "dataset": "train_dataset"},
)
