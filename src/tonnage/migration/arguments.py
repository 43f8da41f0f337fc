"""Arguments of transformers' Trainer and of TRL's supervised fine-tuning: on a command line, in YAML or in JSON.

Sources: ``TrainingArguments`` (https://huggingface.co/docs/transformers/main_classes/trainer, 5.x and the names that
4.x had), ``SFTConfig``, ``ModelConfig``, ``ScriptArguments`` and ``DatasetMixtureConfig``
(https://huggingface.co/docs/trl, 1.x and the names that came before), and the arguments that widely used scripts add:
Alpaca's ``data_path`` and ``model_max_length``, ``run_clm.py``'s ``train_file``.
"""

from __future__ import annotations

from tonnage.migration.accelerate import fsdp_keys, parallelism_keys
from tonnage.migration.keys import Key, Table, lacks, maps, moot

_EVALUATED = "Evaluation is the loss over all validation rows, with the micro-batch of the run."
_LOADER = "Packs are prepared before the run and read by position."
_HUB = "Each save is pushed as a model, to a private repository unless the file says otherwise."
_DDP = "FSDP2 or plain reduction; how is not configured."
_LOG = "Every step is written to metrics.jsonl and log.txt."
_REMOVED = "An option that transformers has dropped."
_FOUR_BITS = ("load_in_4bit", "use_4bit_quantization", "use_4bit_qunatization")
_EIGHT_BITS = ("load_in_8bit", "use_8bit_quantization", "use_8bit_qunatization")
_TRL_RL = "Supervised fine-tuning only."

MODEL: tuple[Key, ...] = (
    maps("model_name_or_path", "model", "The same."),
    maps("model_path", "model", "The same."),
    maps("model_name", "model", "The same."),
    maps("tokenizer_name_or_path", "model", "The tokenizer is the model's.", quantity="tokenizer"),
    maps("tokenizer_name", "model", "The tokenizer is the model's.", quantity="tokenizer"),
    maps("model_revision", "revision", "The same."),
    lacks("config_name", "The configuration is the model's."),
    lacks("config_overrides", "The configuration is the model's."),
    maps("trust_remote_code", "trust_remote_code", "The same."),
    maps(
        "torch_dtype", "precision", "Weights rest in the precision of the run, beside an fp32 master.", quantity="dtype"
    ),
    maps("dtype", "precision", "Weights rest in the precision of the run, beside an fp32 master.", quantity="dtype"),
    moot("attn_implementation", "Attention keeps the documents of a pack apart, by one kernel per device."),
    moot("use_flash_attention_2", "Attention keeps the documents of a pack apart, by one kernel per device."),
    moot("use_flash_attn", "Attention keeps the documents of a pack apart, by one kernel per device."),
    moot("low_cpu_mem_usage", "Each worker reads its own shard only."),
    maps("model_init_kwargs.torch_dtype", "precision", "Weights rest in the precision of the run.", quantity="dtype"),
    maps("model_init_kwargs.dtype", "precision", "Weights rest in the precision of the run.", quantity="dtype"),
    maps("model_init_kwargs.trust_remote_code", "trust_remote_code", "The same."),
    *(
        moot(f"model_init_kwargs.{name}", "Attention and loading are the same for every model.")
        for name in ("attn_implementation", "low_cpu_mem_usage", "use_cache", "device_map", "use_flash_attention_2")
    ),
    maps("model_init_kwargs.revision", "revision", "The same."),
    lacks("model_init_kwargs.*", "Models are loaded as they are."),
    moot("cache_dir", "The hub's cache: set HF_HOME. Prepared data: data.cache."),
    moot("use_fast_tokenizer", "Tokenizers are the fast ones."),
    moot("use_auth_token", "Log in with hf auth login; the value is not repeated."),
    moot("token", "Log in with hf auth login; the value is not repeated."),
    moot("use_cache", "Training keeps no keys and values for later."),
    maps(
        "router_aux_loss_coef", "router_loss", "The same; TRL leaves it out unless the model has output_router_logits."
    ),
    *(
        maps(name, "adapter", "With it low-rank additions are trained, without it all weights.", quantity="lora")
        for name in ("use_peft", "use_lora", "use_peft_lora")
    ),
    *(maps(name, "adapter.quantize", "4 bits are NF4.", quantity="bits4") for name in _FOUR_BITS),
    *(maps(name, "adapter.quantize", "8 bits, a scale for each row.", quantity="bits8") for name in _EIGHT_BITS),
    maps("lora_r", "adapter.rank", "The same.", quantity="rank"),
    maps("lora_alpha", "adapter.alpha", "The same.", quantity="alpha"),
    maps("lora_dropout", "adapter.dropout", "The same.", quantity="dropout"),
    maps("lora_target_modules", "adapter.targets", "Names; all-linear is the same word.", quantity="targets"),
    maps("lora_target_parameters", "adapter.targets", "Experts that are stacked in one tensor.", quantity="stacked"),
    maps("lora_modules_to_save", "adapter.also", "Trained whole beside the adapter.", quantity="also"),
    maps("use_rslora", "adapter.scaling", "true is rank_stabilised.", quantity="rslora"),
    lacks("lora_task_type", "Next tokens are predicted.", idle=("CAUSAL_LM",)),
    lacks("use_dora", "Adapters here are plain LoRA, started as LoRA is.", of="use_peft"),
    lacks("lora_bias", "Biases stay as they are."),
    maps("bnb_4bit_quant_type", "adapter.quantize", "nf4.", quantity="quant_type"),
    maps("use_bnb_nested_quant", "adapter.quantize", "true is nf4-double, false nf4.", quantity="double"),
    maps("use_nested_quant", "adapter.quantize", "true is nf4-double, false nf4.", quantity="double"),
    moot("bnb_4bit_quant_storage", "Says how bytes are stored."),
    moot("bnb_4bit_quant_storage_dtype", "Says how bytes are stored."),
    moot("bnb_4bit_compute_dtype", "Products are in the precision of the run."),
    moot("use_unsloth", "Says which kernel computes the same."),
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
    maps("test_split_size", "data.validation", "The same fraction; other rows.", quantity="validation_fraction"),
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
    maps("datasets.fraction", "data.train.weight", "A fixed part of the rows.", quantity="mixture_fraction"),
    maps("datasets.name", "data.train.name", "The same: a subset of a hub data set.", quantity="mixture_name"),
    lacks("datasets.data_dir", "Name the directory as the path."),
    lacks("datasets.data_files.*", "Name the files as the path."),
    lacks("datasets.data_files", "Name the files as the path."),
    moot("datasets.columns", "Columns that a format does not use are not read."),
    moot("dataset_streaming", "Rows are prepared once and cached."),
    moot("streaming", "Rows are prepared once and cached."),
    maps("dataset_text_field", "data.train.columns", "The column of plain text.", quantity="text_column"),
    lacks("dataset_kwargs.skip_prepare_dataset", "Rows are text, not tokens."),
    lacks("dataset_kwargs.add_special_tokens", "Special tokens are the template's.", idle=(True, "true")),
    moot("dataset_kwargs.append_concat_token", "A document ends with the token that ends its turn."),
    moot("dataset_num_proc", "Preparing uses the cores there are."),
    moot("preprocessing_num_workers", "Preparing uses the cores there are."),
    moot("dataset_batch_size", "Preparing uses the cores there are."),
    moot("overwrite_cache", "Prepared data are named by what made them."),
    moot("lazy_preprocess", "Rows are prepared once and cached."),
    lacks("max_train_samples", "All rows are trained on: give a source a weight, or another file."),
    moot("max_eval_samples", "All validation rows are evaluated."),
    maps("max_length", "data.max_length", "Tokens of the longest conversation, and of a pack."),
    maps("max_seq_length", "data.max_length", "Tokens of the longest conversation, and of a pack."),
    maps("max_seq_len", "data.max_length", "Tokens of the longest conversation, and of a pack."),
    maps("model_max_length", "data.max_length", "Longer conversations are an error until data.over_length says more."),
    maps("block_size", "data.max_length", "Tokens of a pack; documents are not cut to fill it."),
    lacks("truncation_mode", "Only ends are cut off.", idle=("keep_start",)),
    maps("packing", "data.pack", "Whole documents in one row, which never attend to each other."),
    maps("packing_strategy", "data.over_length", "What becomes of documents too long.", quantity="packing_strategy"),
    lacks("eval_packing", "Validation rows are packed as training rows are.", idle=(True, "true")),
    moot("padding_free", "A micro-batch is one row without padding, always."),
    moot("pad_to_multiple_of", "A micro-batch is one row without padding, always."),
    moot("num_of_sequences", "Packing reads all rows."),
    moot("chars_per_token", "Packing counts tokens."),
    moot("pad_token", "A micro-batch is one row without padding, always."),
    lacks("eos_token", "The template ends a turn with its own token."),
    maps("chat_template_path", "data.template", "A Jinja file.", quantity="template"),
    maps("assistant_only_loss", "data.train_on", "true is `assistant`, false `all`.", quantity="assistant_only"),
    maps("completion_only_loss", "data.train_on", "true is `assistant`, false `all`.", quantity="completion_only"),
    maps("train_on_inputs", "data.train_on", "true is `all`, false `assistant`.", quantity="train_on_inputs"),
    moot("remove_unused_columns", "Columns that a format does not use are not read."),
    moot("label_names", "Labels follow from data.train_on."),
    lacks("shuffle_dataset", "Packs are always shuffled, by the seed.", idle=(True, "true")),
    moot("group_by_length", "Packs are of about one length; without packing a micro-batch has no padding."),
    lacks(
        "train_sampling_strategy",
        "Packs are always shuffled, by the seed.",
        idle=("random", "group_by_length"),
    ),
    moot("length_column_name", "Lengths are counted."),
)

BATCH: tuple[Key, ...] = (
    maps(
        "per_device_train_batch_size",
        "batch.sequences memory.micro_batch",
        "Times accumulation times workers it is the batch; by itself it is what one forward holds.",
        quantity="micro_batch",
    ),
    maps("per_gpu_train_batch_size", "batch.sequences memory.micro_batch", "An old name.", quantity="micro_batch"),
    maps(
        "gradient_accumulation_steps",
        "batch.sequences",
        "Micro-batches follow from the batch and memory.micro_batch.",
        quantity="accumulation",
    ),
    moot("auto_find_batch_size", "memory.micro_batch: auto is the planner's."),
    lacks(
        "average_tokens_across_devices",
        "The loss is always divided once by the supervised tokens of all workers.",
        idle=(True, "true"),
    ),
    maps("num_train_epochs", "epochs", "Passes over the data.", quantity="epochs"),
    maps("max_steps", "steps", "Updates.", quantity="steps"),
)

OPTIMIZER: tuple[Key, ...] = (
    maps("learning_rate", "optimizer.lr", "The highest learning rate."),
    maps("weight_decay", "optimizer.weight_decay", "Not applied to norms and biases, as in the Trainer."),
    maps("adam_beta1", "optimizer.betas", "The first.", quantity="beta1"),
    maps("adam_beta2", "optimizer.betas", "The second.", quantity="beta2"),
    maps("adam_epsilon", "optimizer.eps", "The same."),
    maps("max_grad_norm", "optimizer.clip", "The same: the global norm; 0 is off."),
    maps("optim", "optimizer memory.moments", "AdamW is the one optimizer; 8-bit ones are moments.", quantity="optim"),
    lacks("optim_args", "AdamW takes nothing else."),
    lacks("optim_target_modules", "AdamW updates every parameter."),
    lacks("adafactor", "AdamW is the one optimizer."),
    maps("lr_scheduler_type", "optimizer.schedule", "Cosine, linear or constant.", quantity="schedule"),
    maps("lr_scheduler_kwargs.min_lr", "optimizer.final", "As a fraction of lr.", quantity="min_lr"),
    maps("lr_scheduler_kwargs.min_lr_rate", "optimizer.final", "The same.", quantity="min_lr_rate"),
    lacks("lr_scheduler_kwargs.num_cycles", "Half a cosine.", idle=(0.5,)),
    lacks("lr_scheduler_kwargs.*", "Belongs to a schedule other than cosine, linear or constant."),
    maps("warmup_ratio", "optimizer.warmup", "A fraction of all steps, from near zero.", quantity="warmup_ratio"),
    maps("warmup_steps", "optimizer.warmup", "Steps (a fraction below 1), from near zero.", quantity="warmup_steps"),
    lacks("label_smoothing_factor", "Cross-entropy with the tokens as they are."),
    lacks("neftune_noise_alpha", "No noise is added to embeddings."),
    lacks("loss_type", "Cross-entropy, summed in chunks.", idle=("nll", "chunked_nll")),
    moot("use_liger_kernel", "The loss is computed in chunks, at supervised positions only."),
    moot("use_liger", "The loss is computed in chunks, at supervised positions only."),
    moot("liger_kernel_config.*", "The loss is computed in chunks, at supervised positions only."),
)

PRECISION: tuple[Key, ...] = (
    maps("bf16", "precision", "bf16 weights with an exact fp32 master, not autocast over fp32 ones.", quantity="bf16"),
    maps("fp16", "precision", "fp16 weights with an fp32 master, not autocast over fp32 ones.", quantity="fp16"),
    moot("tf32", "Says how products of fp32 are computed; torch's default holds."),
    moot("bf16_full_eval", "Evaluation is in the precision of the run."),
    moot("fp16_full_eval", "Evaluation is in the precision of the run."),
    moot("half_precision_backend", _REMOVED),
    moot("fp16_backend", _REMOVED),
    moot("fp16_opt_level", _REMOVED),
)

MEMORY: tuple[Key, ...] = (
    maps("gradient_checkpointing", "memory.recompute", "Whole blocks are recomputed.", quantity="recompute"),
    maps("use_gradient_checkpointing", "memory.recompute", "Whole blocks are recomputed.", quantity="recompute"),
    maps("activation_checkpointing", "memory.recompute", "Whole blocks are recomputed.", quantity="recompute"),
    moot("gradient_checkpointing_kwargs.*", "How blocks are recomputed is the same for all."),
    moot("activation_checkpointing_kwargs.*", "How blocks are recomputed is the same for all."),
    moot("gradient_checkpointing_use_reentrant", "How blocks are recomputed is the same for all."),
    maps(
        "activation_offloading",
        "memory.activation_tier memory.recompute",
        "Inputs of blocks go to the host's memory, all else is recomputed.",
        quantity="inputs_elsewhere",
    ),
    moot("torch_empty_cache_steps", "Memory of the device is counted before the run."),
    maps(
        "fsdp", "memory.zero parallel.replicate", "full_shard is 3, shard_grad_op 2, no_shard 0.", quantity="sharding"
    ),
    *fsdp_keys("fsdp_config."),
    lacks("fsdp_config.xla", "TPUs are not supported."),
    moot("fsdp_config.xla_fsdp_v2", "TPUs are not supported."),
    moot("fsdp_config.xla_fsdp_settings.*", "TPUs are not supported."),
    moot("fsdp_config.xla_fsdp_grad_ckpt", "TPUs are not supported."),
    maps("fsdp_config", "", "Another file: give it as well.", quantity="fsdp_file"),
    moot("fsdp_transformer_layer_cls_to_wrap", "The blocks of a model are found by its family."),
    moot("fsdp_min_num_params", "The blocks of a model are found by its family."),
    maps("deepspeed", "", "Another file: give it as well.", quantity="deepspeed_file"),
    *parallelism_keys("parallelism_config."),
    maps("accelerate_config", "memory.zero", "TRL's own, by name, or another file.", quantity="accelerate_config"),
    maps("torch_compile", "compile", "Each block is compiled.", quantity="compile"),
    moot("torch_compile_backend", "Inductor."),
    moot("torch_compile_mode", "torch.compile's default mode."),
    moot("torchdynamo", _REMOVED),
)

LOGS: tuple[Key, ...] = (
    maps("report_to", "track", "TensorBoard files are in the run directory.", quantity="report_to"),
    moot("logging_strategy", _LOG),
    moot("logging_steps", _LOG),
    moot("logging_first_step", _LOG),
    moot("logging_dir", "TensorBoard files are in the run directory."),
    moot("logging_nan_inf_filter", "A step that is not finite is skipped and counted."),
    moot("log_on_each_node", _LOG),
    moot("log_level", _LOG),
    moot("log_level_replica", _LOG),
    moot("disable_tqdm", "Progress is one line."),
    moot("include_num_input_tokens_seen", "Tokens are in metrics.jsonl, for every step."),
    moot("include_tokens_per_second", "Tokens a second are in metrics.jsonl, for every step."),
    moot("run_name", "A run is named by its directory."),
    moot("project", "A run is named by its directory."),
    moot("trackio_space_id", "Belongs to Trackio."),
    moot("trackio_bucket_id", "Belongs to Trackio."),
    moot("trackio_static_space_id", "Belongs to Trackio."),
    moot("skip_memory_metrics", "Peaks of memory are in metrics.jsonl, for every step."),
    moot("debug", "Steps that are not finite are named with the place."),
    moot("verbose", _LOG),
)

EVALUATION: tuple[Key, ...] = (
    maps("eval_strategy", "evaluate.every", "no, or steps.", quantity="eval_strategy"),
    maps("evaluation_strategy", "evaluate.every", "no, or steps.", quantity="eval_strategy"),
    maps("eval_steps", "evaluate.every", "Steps.", quantity="eval_steps"),
    maps("do_eval", "evaluate.every", "Validation rows are evaluated if there are any.", quantity="do_eval"),
    moot("eval_delay", _EVALUATED),
    moot("eval_on_start", "A run is evaluated before its first step unless evaluate.before is false."),
    moot("per_device_eval_batch_size", _EVALUATED),
    moot("per_gpu_eval_batch_size", _EVALUATED),
    moot("eval_accumulation_steps", _EVALUATED),
    moot("eval_do_concat_batches", _EVALUATED),
    moot("eval_use_gather_object", _EVALUATED),
    moot("prediction_loss_only", _EVALUATED),
    moot("batch_eval_metrics", _EVALUATED),
    moot("include_for_metrics", _EVALUATED),
    moot("include_inputs_for_metrics", _EVALUATED),
    moot("past_index", _REMOVED),
    moot("use_legacy_prediction_loop", _REMOVED),
    moot("jit_mode_eval", _REMOVED),
    lacks("load_best_model_at_end", "checkpoint.best: eval_loss does it; write it into the config."),
    moot("metric_for_best_model", "checkpoint.best names the figure."),
    moot("greater_is_better", "checkpoint.best names the figure."),
)

SAVING: tuple[Key, ...] = (
    maps("output_dir", "output", "The run's directory; the model will be in its export/."),
    lacks("overwrite_output_dir", "A directory that holds a run is never overwritten.", decides=False),
    maps(
        "save_strategy", "checkpoint.every", "no, or steps; a run is always saved at its end.", quantity="save_strategy"
    ),
    maps("save_steps", "checkpoint.every", "Steps.", quantity="save_steps"),
    maps("save_total_limit", "checkpoint.keep", "The same; without, transformers keeps all.", quantity="save_limit"),
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
    moot("hub_token", "Log in with hf auth login; the value is not repeated."),
    maps("hub_private_repo", "checkpoint.public", "Private unless this is false.", quantity="hub_private"),
    moot("hub_always_push", "Every save is pushed, the last one too."),
    lacks("hub_revision", "The main branch of the repository.", decides=False),
    moot("push_to_hub_token", "Log in with hf auth login; the value is not repeated."),
)

REST: tuple[Key, ...] = (
    maps("seed", "seed", "Of the order of packs; other draws than the Trainer's."),
    maps("data_seed", "seed", "One seed decides all.", quantity="data_seed"),
    moot("full_determinism", "The same layout gives the same steps."),
    moot("do_train", "tonnage train."),
    moot("do_predict", "tonnage generate."),
    moot("use_cpu", "The device is found."),
    moot("no_cuda", "The device is found."),
    moot("use_mps_device", "The device is found."),
    moot("use_ipex", _REMOVED),
    moot("local_rank", "A worker's place comes from its launcher."),
    moot("ddp_backend", "gloo on CPUs, NCCL on GPUs."),
    moot("xpu_backend", _REMOVED),
    moot("ddp_find_unused_parameters", _DDP),
    moot("ddp_bucket_cap_mb", _DDP),
    moot("ddp_broadcast_buffers", _DDP),
    moot("ddp_static_graph", _DDP),
    maps("ddp_timeout", "launch.timeout", "Seconds without progress after which a run ends."),
    moot("sharded_ddp", _REMOVED),
    moot("mp_parameters", "Belongs to SageMaker."),
    moot("ray_scope", "Belongs to a search over hyperparameters."),
    moot("tpu_num_cores", "TPUs are not supported."),
    moot("tpu_metrics_debug", "TPUs are not supported."),
    lacks("accelerator_config.split_batches", "per_device_train_batch_size would be the batch of all processes."),
    moot("accelerator_config.*", _LOADER),
    lacks("split_batches", "per_device_train_batch_size would be the batch of all processes."),
    moot("dispatch_batches", _LOADER),
    moot("dataloader_drop_last", "Packs are counted by position; nothing is dropped."),
    *(
        moot(f"dataloader_{name}", _LOADER)
        for name in (
            "num_workers",
            "pin_memory",
            "persistent_workers",
            "prefetch_factor",
            "multiprocessing_context",
            "in_order",
        )
    ),
    moot("ignore_bias_buffers", _DDP),
    maps("config", "", "Another file: give it as well.", quantity="arguments_file"),
    lacks("trl", _TRL_RL, idle=("sft",)),
    moot("script", "What the script does besides training from its arguments is not known here."),
    *(
        lacks(name, _TRL_RL)
        for name in ("reward_funcs", "reward_model_name_or_path", "num_generations", "ref_model", "desirable_weight")
    ),
    maps("CUDA_VISIBLE_DEVICES", "launch.workers", "Their number, where nothing else says it.", quantity="devices"),
)

ARGUMENTS = Table(
    "Arguments of transformers and TRL",
    (*MODEL, *DATA, *BATCH, *OPTIMIZER, *PRECISION, *MEMORY, *LOGS, *EVALUATION, *SAVING, *REST),
    {
        "fsdp_config.fsdp_": "fsdp_config.",
        "parallelism_config.parallelism_config_": "parallelism_config.",
    },
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
