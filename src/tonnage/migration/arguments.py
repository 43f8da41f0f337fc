"""Arguments of transformers' Trainer and of TRL's supervised fine-tuning: on a command line, in YAML or in JSON.

Sources: ``TrainingArguments`` (https://huggingface.co/docs/transformers/main_classes/trainer, 5.x and the names that
4.x had), ``SFTConfig``, ``ModelConfig``, ``ScriptArguments`` and ``DatasetMixtureConfig``
(https://huggingface.co/docs/trl, 1.x and the names that came before), and the arguments that widely used scripts add:
Alpaca's ``data_path`` and ``model_max_length``, ``run_clm.py``'s ``train_file``.
"""

from __future__ import annotations

from tonnage.migration import reasons
from tonnage.migration.accelerate import FSDP, PARALLELISM
from tonnage.migration.keys import Key, Table, alike, lacks, maps, moot, within
from tonnage.migration.launchers import SCRIPT
from tonnage.migration.quantities import tells

_HUB = "Each save is pushed as a model, to a private repository unless the file says otherwise."
_DDP = "FSDP2 or plain reduction; how is not configured."
_REMOVED = "An option that transformers has dropped."

MODEL: tuple[Key, ...] = (
    *alike(tells, "model", "model_name_or_path model_path model_name"),
    *alike(tells, "tokenizer", "tokenizer_name_or_path tokenizer_name"),
    tells("model_revision", "revision"),
    *alike(lacks, "The configuration is the model's.", "config_name config_overrides"),
    tells("trust_remote_code", "trust_remote_code"),
    maps(
        "torch_dtype", "precision", "Weights rest in the precision of the run, beside an fp32 master.", quantity="dtype"
    ),
    maps("dtype", "precision", "Weights rest in the precision of the run, beside an fp32 master.", quantity="dtype"),
    moot("attn_implementation", "Attention keeps the documents of a pack apart, by one kernel per device."),
    moot("use_flash_attention_2", "Attention keeps the documents of a pack apart, by one kernel per device."),
    moot("use_flash_attn", "Attention keeps the documents of a pack apart, by one kernel per device."),
    moot("low_cpu_mem_usage", reasons.OWN_SHARD),
    maps("model_init_kwargs.torch_dtype", "precision", "Weights rest in the precision of the run.", quantity="dtype"),
    maps("model_init_kwargs.dtype", "precision", "Weights rest in the precision of the run.", quantity="dtype"),
    tells("model_init_kwargs.trust_remote_code", "trust_remote_code"),
    *(
        moot(f"model_init_kwargs.{name}", "Attention and loading are the same for every model.")
        for name in ("attn_implementation", "low_cpu_mem_usage", "use_cache", "device_map", "use_flash_attention_2")
    ),
    tells("model_init_kwargs.revision", "revision"),
    lacks("model_init_kwargs.*", "Models are loaded as they are."),
    moot("cache_dir", "The hub's cache: set HF_HOME. Prepared data: data.cache."),
    moot("use_fast_tokenizer", "Tokenizers are the fast ones."),
    *alike(moot, reasons.LOG_IN, "use_auth_token token"),
    moot("use_cache", "Training keeps no keys and values for later."),
    tells("router_aux_loss_coef", "router_loss", "The same; TRL before 1.7 has no such key."),
    *alike(tells, "lora", "use_peft use_lora use_peft_lora"),
    *alike(tells, "bits4", "load_in_4bit use_4bit_quantization use_4bit_qunatization"),
    *alike(tells, "bits8", "load_in_8bit use_8bit_quantization use_8bit_qunatization"),
    tells("lora_r", "rank"),
    tells("lora_alpha", "alpha"),
    tells("lora_dropout", "dropout"),
    tells("lora_target_modules", "targets", "Names; all-linear is the same word."),
    tells("lora_target_parameters", "stacked"),
    tells("lora_modules_to_save", "also"),
    tells("use_rslora", "rslora"),
    lacks("lora_task_type", "Next tokens are predicted.", idle=("CAUSAL_LM",)),
    lacks("use_dora", reasons.PLAIN_LORA, of="use_peft"),
    lacks("lora_bias", "Biases stay as they are."),
    tells("bnb_4bit_quant_type", "quant_type"),
    *alike(tells, "double", "use_bnb_nested_quant use_nested_quant"),
    *alike(moot, "Says how bytes are stored.", "bnb_4bit_quant_storage bnb_4bit_quant_storage_dtype"),
    moot("bnb_4bit_compute_dtype", "Products are in the precision of the run."),
    moot("use_unsloth", reasons.KERNEL),
)

_TRAIN_FILE = "Rows: Alpaca, messages, ShareGPT, prompt/completion or text, found out from the rows."

DATA: tuple[Key, ...] = (
    maps("dataset_name", "data.train", _TRAIN_FILE, quantity="dataset"),
    maps("data_path", "data.train", _TRAIN_FILE, quantity="train_file"),
    maps("train_file", "data.train", _TRAIN_FILE, quantity="train_file"),
    maps("train_data_file", "data.train", _TRAIN_FILE, quantity="train_file"),
    maps("dataset_path", "data.train", _TRAIN_FILE, quantity="train_file"),
    maps("dataset_train_split", "data.train.split", "The same.", quantity="train_split"),
    maps("dataset_test_split", "data.validation", "Evaluated if the run evaluates.", quantity="test_split"),
    maps("validation_file", "data.validation", "Rows to evaluate on.", quantity="validation_file"),
    maps("eval_data_path", "data.validation", "Rows to evaluate on.", quantity="validation_file"),
    maps("eval_file", "data.validation", "Rows to evaluate on.", quantity="validation_file"),
    tells("test_split_size", "validation_fraction"),
    maps(
        "validation_split_percentage",
        "data.validation",
        "The same share, as a fraction; other rows.",
        quantity="validation_percentage",
    ),
    maps(
        "splits",
        "data.train.split data.validation",
        "The first is trained on, the second evaluated.",
        quantity="splits",
    ),
    lacks("chat_template_format", "Rows are shown by data.template.", idle=("none",)),
    moot("add_special_tokens", "A text begins as its tokenizer begins texts, and ends with its end-of-text token."),
    moot("append_concat_token", "A document ends with the token that ends its turn."),
    moot("use_reentrant", "How blocks are recomputed is the same for all."),
    maps("dataset_config", "data.train.name", "The same: a subset of a hub data set.", quantity="subset"),
    maps("dataset_config_name", "data.train.name", "The same: a subset of a hub data set.", quantity="subset"),
    maps("datasets.path", "data.train", _TRAIN_FILE, quantity="mixture_path"),
    maps("datasets.split", "data.train.split", "The same.", quantity="mixture_split"),
    maps(
        "datasets.fraction",
        "data.train.weight",
        "Of one data set all rows. Of several a share of the mixture's rows, which is not carried over.",
        quantity="mixture_fraction",
    ),
    maps("datasets.name", "data.train.name", "The same: a subset of a hub data set.", quantity="mixture_name"),
    lacks("datasets.data_dir", "Name the directory as the path."),
    *alike(lacks, "Name the files as the path.", "datasets.data_files.* datasets.data_files"),
    moot("datasets.columns", "Columns that a format does not use are not read."),
    maps("dataset_mixture.datasets.id", "data.train", _TRAIN_FILE, quantity="mixture_path"),
    maps(
        "dataset_mixture.datasets.config",
        "data.train.name",
        "The same: a subset of a hub data set.",
        quantity="mixture_name",
    ),
    maps("dataset_mixture.datasets.split", "data.train.split", "The same.", quantity="mixture_split"),
    maps(
        "dataset_mixture.datasets.weight",
        "data.train.weight",
        "The same: a part of the rows.",
        quantity="mixture_weight",
    ),
    moot("dataset_mixture.datasets.columns", "Columns that a format does not use are not read."),
    tells("dataset_mixture.test_split_size", "validation_fraction"),
    moot("dataset_mixture.seed", "One seed decides all."),
    *alike(
        lacks,
        "Name the data sets in dataset_mixture (id, split, weight), which alignment-handbook has in its place.",
        "dataset_mixer.* dataset_mixer dataset_splits dataset_configs",
    ),
    *alike(
        lacks,
        "Rows are read whole before the run: a stream has to be made a file first.",
        "dataset_streaming streaming",
    ),
    maps("dataset_text_field", "data.train.columns", "The column of plain text.", quantity="text_column"),
    lacks("dataset_kwargs.skip_prepare_dataset", "Rows are text, not tokens."),
    maps(
        "dataset_kwargs.add_special_tokens",
        "data.template",
        "A conversation has the special tokens of its template, a text those that its tokenizer adds.",
        quantity="special_tokens",
    ),
    moot("dataset_kwargs.append_concat_token", "A document ends with the token that ends its turn."),
    moot("dataset_num_proc", "Preparing uses the cores there are."),
    moot("preprocessing_num_workers", "Preparing uses the cores there are."),
    moot("dataset_batch_size", "Preparing uses the cores there are."),
    moot("overwrite_cache", "Prepared data are named by what made them."),
    moot("lazy_preprocess", "Rows are prepared once and cached."),
    lacks("max_train_samples", "All rows are trained on: give a source a weight, or another file."),
    moot("max_eval_samples", "All validation rows are evaluated."),
    *alike(tells, "data.max_length", "max_length max_seq_length max_seq_len"),
    tells("model_max_length", "data.max_length", "Longer conversations are an error until data.over_length says more."),
    tells("block_size", "data.max_length", "Tokens of a pack; documents are not cut to fill it."),
    lacks("truncation_mode", "Only ends are cut off.", idle=("keep_start",)),
    tells("packing", "data.pack"),
    maps("packing_strategy", "data.over_length", "What becomes of documents too long.", quantity="packing_strategy"),
    lacks("eval_packing", "Validation rows are packed as training rows are.", idle=(True, "true")),
    *alike(moot, "A micro-batch is one row without padding, always.", "padding_free pad_to_multiple_of"),
    moot("num_of_sequences", "Packing reads all rows."),
    moot("chars_per_token", "Packing counts tokens."),
    moot("pad_token", "A micro-batch is one row without padding, always."),
    maps("eos_token", "data.eos_token", "The token that ends a text.", quantity="eos_token"),
    maps("chat_template_path", "data.template", "A Jinja file.", quantity="template"),
    maps("chat_template", "data.template", "A template's text, as alignment-handbook has it.", quantity="template"),
    maps("assistant_only_loss", "data.train_on", "true is `assistant`, false `all`.", quantity="assistant_only"),
    maps("completion_only_loss", "data.train_on", "true is `assistant`, false `all`.", quantity="completion_only"),
    tells("train_on_inputs", "train_on_inputs"),
    moot("remove_unused_columns", "Columns that a format does not use are not read."),
    moot("label_names", "Labels follow from data.train_on."),
    lacks("shuffle_dataset", reasons.SHUFFLED, idle=(True, "true")),
    moot("group_by_length", "Packs are of about one length; without packing a micro-batch has no padding."),
    lacks("train_sampling_strategy", reasons.SHUFFLED, idle=("random", "group_by_length")),
    moot("length_column_name", "Lengths are counted."),
)

BATCH: tuple[Key, ...] = (
    tells("per_device_train_batch_size", "micro_batch"),
    tells("per_gpu_train_batch_size", "micro_batch", "An old name."),
    tells("gradient_accumulation_steps", "accumulation"),
    moot("auto_find_batch_size", "memory.micro_batch: auto is the planner's."),
    lacks(
        "average_tokens_across_devices",
        "The loss is always divided once by the supervised tokens of all workers.",
        idle=(True, "true"),
    ),
    tells("num_train_epochs", "epochs"),
    tells("max_steps", "steps"),
)

OPTIMIZER: tuple[Key, ...] = (
    tells("learning_rate", "optimizer.lr"),
    tells("weight_decay", "optimizer.weight_decay"),
    tells("adam_beta1", "beta1"),
    tells("adam_beta2", "beta2"),
    tells("adam_epsilon", "optimizer.eps"),
    tells("max_grad_norm", "optimizer.clip", "The same: the global norm; 0 is off."),
    tells("optim", "optim"),
    lacks("optim_args", "AdamW takes nothing else."),
    lacks("optim_target_modules", "AdamW updates every parameter."),
    lacks("adafactor", "AdamW is the one optimizer."),
    tells("lr_scheduler_type", "schedule"),
    tells("lr_scheduler_kwargs.min_lr", "min_lr"),
    tells("lr_scheduler_kwargs.min_lr_rate", "min_lr_rate"),
    lacks("lr_scheduler_kwargs.num_cycles", "Half a cosine.", idle=(0.5,)),
    lacks("lr_scheduler_kwargs.*", "Belongs to a schedule other than cosine, linear or constant."),
    tells("warmup_ratio", "warmup_ratio"),
    tells("warmup_steps", "warmup_steps"),
    lacks("label_smoothing_factor", "Cross-entropy with the tokens as they are."),
    lacks("neftune_noise_alpha", "No noise is added to embeddings."),
    lacks("loss_type", "Cross-entropy, summed in chunks.", idle=("nll", "chunked_nll")),
    moot("use_liger_kernel", "The loss is computed in chunks, at supervised positions only."),
    moot("use_liger", "The loss is computed in chunks, at supervised positions only."),
    moot("liger_kernel_config.*", "The loss is computed in chunks, at supervised positions only."),
)

PRECISION: tuple[Key, ...] = (
    tells("bf16", "bf16", "bf16 weights with an exact fp32 master, not autocast over fp32 ones."),
    tells("fp16", "fp16", "fp16 weights with an fp32 master, not autocast over fp32 ones."),
    moot("tf32", "Says how products of fp32 are computed; torch's default holds."),
    *alike(moot, "Evaluation is in the precision of the run.", "bf16_full_eval fp16_full_eval"),
    *alike(moot, _REMOVED, "half_precision_backend fp16_backend fp16_opt_level"),
)

MEMORY: tuple[Key, ...] = (
    *alike(tells, "recompute", "gradient_checkpointing use_gradient_checkpointing activation_checkpointing"),
    moot("gradient_checkpointing_kwargs.*", "How blocks are recomputed is the same for all."),
    moot("activation_checkpointing_kwargs.*", "How blocks are recomputed is the same for all."),
    moot("gradient_checkpointing_use_reentrant", "How blocks are recomputed is the same for all."),
    tells("activation_offloading", "inputs_elsewhere"),
    moot("torch_empty_cache_steps", "Memory of the device is counted before the run."),
    tells("fsdp", "sharding"),
    *within("fsdp_config.", FSDP),
    lacks("fsdp_config.xla", reasons.NO_TPU),
    *alike(
        moot, reasons.NO_TPU, "fsdp_config.xla_fsdp_v2 fsdp_config.xla_fsdp_settings.* fsdp_config.xla_fsdp_grad_ckpt"
    ),
    maps("fsdp_config", "", "Another file: give it as well.", quantity="fsdp_file"),
    moot("fsdp_transformer_layer_cls_to_wrap", "The blocks of a model are found by its family."),
    moot("fsdp_min_num_params", "The blocks of a model are found by its family."),
    tells("deepspeed", "deepspeed_file"),
    *within("parallelism_config.", PARALLELISM),
    maps("accelerate_config", "memory.zero", "TRL's own, by name, or another file.", quantity="accelerate_config"),
    tells("torch_compile", "compile"),
    moot("torch_compile_backend", "Inductor."),
    moot("torch_compile_mode", "torch.compile's default mode."),
    moot("torchdynamo", _REMOVED),
)

LOGS: tuple[Key, ...] = (
    maps("report_to", "track", "TensorBoard files are in the run directory.", quantity="report_to"),
    *alike(moot, reasons.LOGGED, "logging_strategy logging_steps logging_first_step"),
    moot("logging_dir", "TensorBoard files are in the run directory."),
    moot("logging_nan_inf_filter", "A step that is not finite is skipped and counted."),
    *alike(moot, reasons.LOGGED, "log_on_each_node log_level log_level_replica"),
    moot("disable_tqdm", "Progress is one line."),
    moot("include_num_input_tokens_seen", "Tokens are in metrics.jsonl, for every step."),
    moot("include_tokens_per_second", "Tokens a second are in metrics.jsonl, for every step."),
    *alike(moot, "A run is named by its directory.", "run_name project"),
    *alike(moot, "Belongs to Trackio.", "trackio_space_id trackio_bucket_id trackio_static_space_id"),
    moot("skip_memory_metrics", "Peaks of memory are in metrics.jsonl, for every step."),
    moot("debug", "Steps that are not finite are named with the place."),
    moot("verbose", reasons.LOGGED),
)

EVALUATION: tuple[Key, ...] = (
    *alike(tells, "eval_strategy", "eval_strategy evaluation_strategy"),
    tells("eval_steps", "eval_steps"),
    maps("do_eval", "evaluate.every", "Validation rows are evaluated if there are any.", quantity="do_eval"),
    moot("eval_delay", reasons.EVALUATED),
    moot("eval_on_start", "A run is evaluated before its first step unless evaluate.before is false."),
    *alike(
        moot,
        reasons.EVALUATED,
        "per_device_eval_batch_size per_gpu_eval_batch_size eval_accumulation_steps eval_do_concat_batches "
        "eval_use_gather_object prediction_loss_only batch_eval_metrics include_for_metrics include_inputs_for_metrics",
    ),
    *alike(moot, _REMOVED, "past_index use_legacy_prediction_loop jit_mode_eval"),
    maps("load_best_model_at_end", "checkpoint.best", "true is eval_loss: the best step is exported.", quantity="best"),
    maps("metric_for_best_model", "checkpoint.best", "Of the loss, the best step.", quantity="best_figure"),
    moot("greater_is_better", "Follows from the figure: less is better of a loss."),
)

SAVING: tuple[Key, ...] = (
    tells("output_dir", "output"),
    lacks("overwrite_output_dir", "A directory that holds a run is never overwritten.", decides=False),
    tells("save_strategy", "save_strategy"),
    tells("save_steps", "save_steps"),
    tells("save_total_limit", "save_limit", "The same; without, transformers keeps all."),
    moot("save_safetensors", "Always."),
    moot("save_on_each_node", "Every worker writes its own file into the run directory."),
    moot("save_only_model", "A checkpoint holds all that a run needs to go on."),
    moot("enable_jit_checkpoint", "SIGTERM saves a run and ends it."),
    lacks("resume_from_checkpoint", "Checkpoints of other programs: name one with weights as the model."),
    moot("ignore_data_skip", "A run goes on with the very next pack."),
    moot("restore_callback_states_from_checkpoint", "There are no callbacks."),
    maps("push_to_hub", "checkpoint.push", _HUB, quantity="hub_switch"),
    maps("hub_model_id", "checkpoint.push", _HUB, quantity="hub_name"),
    maps("push_to_hub_model_id", "checkpoint.push", _HUB, quantity="hub_name"),
    maps("push_to_hub_organization", "checkpoint.push", _HUB, quantity="hub_owner"),
    moot("hub_strategy", "Each save is pushed, as a model."),
    moot("hub_token", reasons.LOG_IN),
    maps("hub_private_repo", "checkpoint.public", "Private unless this is false.", quantity="hub_private"),
    moot("hub_always_push", "Every save is pushed, the last one too."),
    lacks("hub_revision", "The main branch of the repository.", decides=False),
    lacks("hub_model_revision", "The main branch of the repository.", decides=False),
    moot("push_to_hub_token", reasons.LOG_IN),
)

PREFERENCES = (
    "alpha beta center_rewards_coefficient cpo_alpha delta desirable_weight discopop_tau epsilon_high "
    "f_alpha_divergence_coef f_divergence_type force_use_ref_model generate_during_eval importance_sampling_level "
    "is_encoder_decoder label_smoothing ld_alpha lmbda loss_weights max_completion_length max_prompt_length "
    "max_target_length num_generations num_iterations precompute_ref_log_probs ref_adapter_name ref_model "
    "ref_model_init_kwargs ref_model_mixup_alpha ref_model_sync_steps reference_free reward_adapters reward_funcs "
    "reward_model_name_or_path reward_model_path reward_weights rpo_alpha scale_rewards simpo_gamma sync_ref_model "
    "teacher_model_name_or_path tpo_alpha undesirable_weight use_weighting"
)
"""Arguments by which TRL's scripts for preferences, rewards and distillation are more than its supervised one."""
ANSWERS = (
    "cache_implementation generation_batch_size generation_kwargs log_completions min_p num_completions_to_print "
    "repetition_penalty steps_per_generation temperature top_k top_p use_vllm vllm_*"
)

REST: tuple[Key, ...] = (
    maps("seed", "seed", "Of the order of packs; other draws than the Trainer's."),
    maps("data_seed", "seed", "One seed decides all.", quantity="data_seed"),
    moot("full_determinism", "The same layout gives the same steps."),
    moot("do_train", "tonnage train."),
    moot("do_predict", "tonnage generate."),
    *alike(moot, "The device is found.", "use_cpu no_cuda use_mps_device"),
    moot("use_ipex", _REMOVED),
    moot("local_rank", "A worker's place comes from its launcher."),
    moot("ddp_backend", "gloo on CPUs, NCCL on GPUs."),
    moot("xpu_backend", _REMOVED),
    *alike(moot, _DDP, "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph"),
    tells("ddp_timeout", "launch.timeout"),
    moot("sharded_ddp", _REMOVED),
    moot("mp_parameters", "Belongs to SageMaker."),
    moot("ray_scope", "Belongs to a search over hyperparameters."),
    *alike(moot, reasons.NO_TPU, "tpu_num_cores tpu_metrics_debug"),
    lacks("accelerator_config.split_batches", "per_device_train_batch_size would be the batch of all processes."),
    moot("accelerator_config.*", reasons.LOADER),
    lacks("split_batches", "per_device_train_batch_size would be the batch of all processes."),
    moot("dispatch_batches", reasons.LOADER),
    moot("dataloader_drop_last", "Packs are counted by position; nothing is dropped."),
    *alike(
        moot,
        reasons.LOADER,
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order",
    ),
    moot("ignore_bias_buffers", _DDP),
    tells("config", "arguments_file"),
    lacks("trl", reasons.NO_REWARDS, idle=("sft",)),
    SCRIPT,
    *alike(lacks, reasons.NO_REWARDS, PREFERENCES),
    *alike(moot, "Says how a model answers while it is trained on rewards.", ANSWERS),
    tells("CUDA_VISIBLE_DEVICES", "devices"),
)

ARGUMENTS = Table(
    "Arguments of transformers and TRL",
    (*MODEL, *DATA, *BATCH, *OPTIMIZER, *PRECISION, *MEMORY, *LOGS, *EVALUATION, *SAVING, *REST),
    {"fsdp_config.fsdp_": "fsdp_config.", "parallelism_config.parallelism_config_": "parallelism_config."},
    {
        "lr": "learning_rate",
        "epochs": "num_train_epochs",
        "num_epochs": "num_train_epochs",
        "batch_size": "per_device_train_batch_size",
        "train_batch_size": "per_device_train_batch_size",
        "micro_batch_size": "per_device_train_batch_size",
        "grad_accum": "gradient_accumulation_steps",
        "model": "model_name_or_path",
        "model_id": "model_name_or_path",
        "model_name": "model_name_or_path",
        "input_model": "model_name_or_path",
        "base_model": "model_name_or_path",
        "dataset": "dataset_name",
        "data": "data_path",
        "train_data": "data_path",
        "seq_length": "max_length",
        "max_len": "max_length",
        "cutoff_len": "max_length",
        "local_output_dir": "output_dir",
        "warmup": "warmup_steps",
    },
)

TRL_ONLY = (
    "assistant_only_loss",
    "attn_implementation",
    "chat_template_path",
    "completion_only_loss",
    "dataset_mixture.datasets.id",
    "dataset_name",
    "dataset_num_proc",
    "dataset_test_split",
    "dataset_text_field",
    "dataset_train_split",
    "datasets.path",
    "eos_token",
    "loss_type",
    "lora_r",
    "max_length",
    "max_seq_length",
    "packing",
    "packing_strategy",
    "padding_free",
    "use_peft",
)
"""Arguments by which those of TRL are told from those of a script of transformers."""

TUTORIAL_ONLY = {"use_gradient_checkpointing", "dataset_text_field"}
"""Arguments that only the script of the FSDP tutorial has together."""
