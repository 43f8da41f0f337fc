"""DeepSpeed's JSON configuration, as its documentation describes it.

Source: https://www.deepspeed.ai/docs/config-json/ (0.19), with the fields of ``DeepSpeedZeroConfig`` and the schedules'
parameters from https://deepspeed.readthedocs.io. Names that newer versions have dropped are kept.
"""

from __future__ import annotations

from tonnage.migration import reasons
from tonnage.migration.keys import Key, Table, alike, lacks, maps, moot, within
from tonnage.migration.quantities import tells

_BUCKETS = "Sizes of messages are FSDP2's affair: one for each block."
_PREFETCH = "When parameters are gathered and freed follows the blocks of the model, not a number of elements."
_RING = "What rests on disk moves through a ring of tiles whose sizes were measured (docs/offload.md)."
_PINNED = "What rests in host memory is always locked there, so that a device copies it by itself."
_LOGS = "The metrics of every step are in metrics.jsonl."

BATCH: tuple[Key, ...] = (
    tells("train_batch_size", "batch.sequences"),
    tells("train_micro_batch_size_per_gpu", "micro_batch"),
    tells("gradient_accumulation_steps", "accumulation"),
    moot("managed_gradient_accumulation", "A step is one update, and micro-batches follow from the plan."),
    moot("dataloader_drop_last", "Packs are counted by position; the last step of an epoch goes on into the next."),
)

OPTIMIZER: tuple[Key, ...] = (
    maps("optimizer.type", "optimizer memory.moments", "AdamW is the one optimizer.", quantity="optimizer_type"),
    tells("optimizer.params.lr", "optimizer.lr"),
    maps("optimizer.params.betas", "optimizer.betas", "The same."),
    tells("optimizer.params.eps", "optimizer.eps"),
    tells(
        "optimizer.params.weight_decay",
        "optimizer.weight_decay",
        "Never applied to norms and biases, which the Trainer leaves out too; a script may not have.",
    ),
    moot("optimizer.params.torch_adam", "Says which implementation computes the same update."),
    lacks("optimizer.params.adam_w_mode", "Decoupled weight decay only.", idle=(True, "true")),
    moot("optimizer.params.bias_correction", "The bias of the moments is always corrected."),
    lacks("optimizer.params.amsgrad", "AMSGrad is not there."),
    moot("optimizer.params.fused", "The update is always one loop over a parameter."),
    moot("optimizer.params.set_grad_none", "Gradients are freed after the update."),
    moot("optimizer.params.fp32_optimizer_states", "memory.moments says how moments rest."),
    lacks("optimizer.params.*", reasons.OTHER_OPTIMIZER),
    moot("optimizer.legacy_fusion", "Says which implementation computes the same update."),
    moot("zero_allow_untested_optimizer", "AdamW is the one optimizer."),
    moot("zero_force_ds_cpu_optimizer", "AdamW is the one optimizer, on CPU and elsewhere."),
    tells("gradient_clipping", "optimizer.clip"),
)

SCHEDULER: tuple[Key, ...] = (
    maps(
        "scheduler.type",
        "optimizer.schedule",
        "WarmupLR is constant, WarmupDecayLR linear, WarmupCosineLR cosine, each after warm-up.",
        quantity="ds_schedule",
    ),
    maps("scheduler.params.warmup_max_lr", "optimizer.lr", "The highest learning rate.", quantity="schedule_lr"),
    *alike(lacks, "Warm-up starts near zero.", "scheduler.params.warmup_min_lr scheduler.params.warmup_min_ratio"),
    tells("scheduler.params.warmup_num_steps", "warmup_steps", "In steps."),
    maps(
        "scheduler.params.warmup_type",
        "optimizer.warmup",
        "Warm-up is linear here; DeepSpeed's default, log, rises faster.",
        quantity="warmup_type",
    ),
    maps(
        "scheduler.params.total_num_steps",
        "steps",
        "Length of the run where nothing else says it.",
        quantity="total_steps",
    ),
    maps("scheduler.params.cos_min_ratio", "optimizer.final", "The same: a fraction of the highest rate."),
    moot("scheduler.params.last_batch_iteration", "Where a run goes on is in its checkpoint."),
    lacks("scheduler.params.*", "Belongs to a schedule other than constant, linear or cosine."),
)

PRECISION: tuple[Key, ...] = (
    tells("bf16.enabled", "bf16", "bf16 weights with an exact fp32 master, as here."),
    tells("bfloat16.enabled", "bf16", "An old name of bf16.enabled."),
    moot("bf16.immediate_grad_update", "When gradients reach the master follows from the plan."),
    moot("bf16.check_grad_overflow", "A step whose loss or gradient is not finite is always skipped and counted."),
    moot("bf16.check_overflow", "A step whose loss or gradient is not finite is always skipped and counted."),
    lacks("bf16.bf16_master_weights_and_grads", "The master is always fp32.", of="bf16.enabled"),
    maps(
        "bf16.bf16_optimizer_states",
        "memory.moments",
        "bf16 moments, rounded stochastically here.",
        quantity="bf16_moments",
    ),
    tells("fp16.enabled", "fp16", "fp16 weights with an fp32 master and a dynamic loss scale."),
    moot("fp16.auto_cast", "The model and its inputs have one type."),
    lacks("fp16.loss_scale", "The loss scale is always dynamic.", idle=(0.0,), of="fp16.enabled"),
    maps("fp16.initial_scale_power", "optimizer.loss_scale", "Two to this power.", quantity="loss_scale_power"),
    maps(
        "fp16.loss_scale_window",
        "optimizer.loss_scale_growth",
        "Good steps after which the scale doubles.",
        quantity="loss_scale_window",
    ),
    *alike(moot, "The scale halves at every overflow and grows again.", "fp16.hysteresis fp16.consecutive_hysteresis"),
    moot("fp16.min_loss_scale", "No lower bound; after optimizer.skips overflows in a row the run ends."),
    lacks("fp16.fp16_master_weights_and_grads", "The master is always fp32.", of="fp16.enabled"),
    moot("fp16.fp16_opt_level", "A level of Apex; precision says it all."),
    lacks("amp.enabled", "Apex is not used: write precision: bf16 or fp16."),
    moot("amp.*", "Belongs to Apex."),
    lacks("torch_autocast.enabled", "Weights and arithmetic have one type: write precision: bf16 or fp16."),
    moot("torch_autocast.*", "Belongs to autocast."),
    lacks("data_types.grad_accum_dtype", "Micro-batches are summed in fp32.", idle=("fp32",)),
    *alike(moot, "precision says it.", "data_types.param_dtype data_types.buffer_dtype"),
)

ZERO: tuple[Key, ...] = (
    tells("stage", "zero_stage"),
    tells("offload_optimizer.device", "optimizer_device"),
    tells("offload_optimizer.nvme_path", "nvme_path", "Where tiles rest; several directories are filled evenly."),
    *alike(moot, _RING, "offload_optimizer.buffer_count offload_optimizer.buffer_size"),
    moot("offload_optimizer.pin_memory", _PINNED),
    moot("offload_optimizer.pipeline_read", "Tiles are always read ahead."),
    moot("offload_optimizer.pipeline_write", "Tiles are always written behind."),
    moot("offload_optimizer.pipeline", "Tiles are always read ahead and written behind."),
    moot("offload_optimizer.fast_init", "State on disk needs no initialisation of its own."),
    lacks(
        "offload_optimizer.ratio",
        "How much of the state stays on the device memory.optimizer_resident says, in bytes.",
        idle=(1, 1.0),
        of="offload_optimizer.device",
    ),
    moot(
        "offload_optimizer.super_offload",
        "memory.optimizer_tier: host copies beside the update and the next forward pass.",
    ),
    moot("offload_optimizer.cpuadam_cores_perc", "The update's threads follow launch.threads."),
    tells("offload_param.device", "parameter_device"),
    tells(
        "offload_param.nvme_path",
        "nvme_path",
        "Where the files of parameters rest; several directories are filled evenly.",
    ),
    moot("offload_param.buffer_count", "A block's files are read while the block before it runs."),
    moot("offload_param.buffer_size", "A block's files are read while the block before it runs."),
    moot("offload_param.max_in_cpu", "Two or three blocks are in memory at a time."),
    moot("offload_param.pin_memory", _PINNED),
    tells("cpu_offload", "optimizer_device", "An old name of offload_optimizer.device: cpu."),
    tells("cpu_offload_params", "parameter_device", "An old name of offload_param.device: cpu."),
    tells("cpu_offload_param", "parameter_device", "An old name of offload_param.device: cpu."),
    moot("cpu_offload_use_pin_memory", _PINNED),
    moot("overlap_comm", "FSDP2 always overlaps communication with compute."),
    moot("contiguous_gradients", "FSDP2 reduces the gradients of a block in one buffer."),
    moot("reduce_scatter", "Gradients are always reduce-scattered where they are sharded."),
    *alike(
        moot, _BUCKETS, "reduce_bucket_size allgather_bucket_size allgather_partitions use_multi_rank_bucket_allreduce"
    ),
    moot("round_robin_gradients", "Says which worker copies which gradient to host memory."),
    moot("load_from_fp32_weights", "A checkpoint holds the exact fp32 masters."),
    moot("elastic_checkpoint", "A run goes on with any number of workers."),
    moot("sub_group_size", "Tiles of 16 MB, whatever the model."),
    moot("grad_hooks", "Gradients are reduced as the backward pass goes."),
    *alike(
        moot,
        _PREFETCH,
        "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential",
    ),
    *alike(
        moot,
        "An old name without stage3_; when parameters are gathered follows the blocks.",
        "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
        "max_reuse_distance",
    ),
    moot("stage3_gather_16bit_weights_on_model_save", "A finished run always holds a Hugging Face model in export/."),
    moot("stage3_gather_fp16_weights_on_model_save", "A finished run always holds a Hugging Face model in export/."),
    moot("gather_16bit_weights_on_model_save", "A finished run always holds a model in export/."),
    moot("ignore_unused_parameters", "Says what DeepSpeed checks in the backward pass."),
    moot("legacy_stage1", "Says which implementation of stage 1."),
    moot("zero_hpz_partition_size", "A second copy inside a node; parallel.replicate is the way here."),
    lacks("zero_quantized_weights", "Weights travel in the precision of the run."),
    lacks("zero_quantized_nontrainable_weights", "Weights travel in the precision of the run."),
    *alike(lacks, "Gradients travel unquantised.", "zero_quantized_gradients zeropp_loco_param.*"),
    maps(
        "mics_shard_size",
        "parallel.replicate",
        "Workers divided by it are the groups that hold everything once.",
        quantity="shard_size",
    ),
    moot("mics_hierarchical_params_gather", "How parameters are gathered is FSDP2's affair."),
    lacks("zenflow.*", "ZenFlow updates some parameters later than others."),
    moot("memory_efficient_linear", "Says how DeepSpeed computes a linear layer."),
    moot("pipeline_loading_checkpoint", "Each worker reads its own shard."),
    moot("override_module_apply", "Models are built without weights and then filled."),
    *alike(moot, "There is no trace of gathered parameters.", "log_trace_cache_warnings enable_sanity_checks"),
    moot("save_muon_momentum_buffer_in_memory", "Belongs to Muon."),
    moot("leaf_module.*", "The blocks of a model are found by its family."),
    lacks("shard_dim_fn", "What is sharded along which dimension is FSDP2's affair.", decides=False),
)
"""Keys of ``zero_optimization``."""

COMMUNICATION: tuple[Key, ...] = (
    moot("communication_data_type", "Several workers reduce gradients in fp32."),
    moot("seq_parallel_communication_data_type", "There is no sequence parallelism."),
    lacks("gradient_allreduce_op", "The loss is divided once by all supervised tokens of a step.", idle=("mean",)),
    *alike(moot, "Gradients are reduced in fp32.", "prescale_gradients gradient_predivide_factor"),
    moot("sparse_gradients", "The gradient of the embedding is dense; its values are the same."),
    moot("disable_allgather", "How parameters are gathered is FSDP2's affair."),
    moot("graph_harvesting", "CUDA graphs are not recorded."),
    moot("use_data_before_expert_parallelism", "There is no expert parallelism."),
    moot("use_node_local_storage", "Every worker writes its own file into the run directory."),
)

_RECOMPUTE = "memory.recompute says what is recomputed; it needs no call from the model."
ACTIVATIONS: tuple[Key, ...] = (
    lacks("partition_activations", "Activations of a worker are not divided among others.", decides=False),
    tells("cpu_checkpointing", "inputs_elsewhere"),
    *alike(
        moot, _RECOMPUTE, "contiguous_memory_optimization number_checkpoints synchronize_checkpoint_boundary profile"
    ),
)
"""Keys of ``activation_checkpointing``."""

WATCHING: tuple[Key, ...] = (
    moot("steps_per_print", "Every step is shown and written."),
    moot("wall_clock_breakdown", _LOGS),
    moot("memory_breakdown", "Peaks of memory are in metrics.jsonl, for every step."),
    moot("dump_state", "config.yaml and plan.json of a run say what it does."),
    moot("log_level", "log.txt holds everything."),
    moot("timers.*", _LOGS),
    moot("flops_profiler.*", "The plan says what a step computes; metrics.jsonl how long it took."),
    moot("comms_config.*", "Communication is not logged by itself."),
    moot("monitor_config.*", "Says what is shown where; tensorboard.enabled counts."),
    moot("comms_logger.*", "Communication is not logged by itself."),
    tells("tensorboard.enabled", "tensorboard"),
    *alike(moot, "TensorBoard files go into the run directory.", "tensorboard.output_path tensorboard.job_name"),
    tells("wandb.enabled", "wandb"),
    moot("wandb.*", "Belongs to Weights & Biases."),
    lacks("comet.enabled", "track has none such; metrics.jsonl has everything.", decides=False),
    moot("comet.*", "Belongs to Comet."),
    moot("csv_monitor.*", _LOGS),
)

REST: tuple[Key, ...] = (
    *alike(
        moot,
        _RING,
        "aio.block_size aio.queue_depth aio.thread_count aio.intra_op_parallelism aio.single_submit aio.overlap_events",
    ),
    moot("aio.use_gds", "What rests on disk passes through host memory."),
    lacks("tensor_parallel.autotp_size", "Not carried over: parallel.tensor says it here.", idle=(1,), decides=False),
    moot("tensor_parallel.*", "Belongs to tensor parallelism."),
    lacks("expert_parallel.enabled", "No expert parallelism.", decides=False),
    moot("expert_parallel.*", "Belongs to expert parallelism."),
    lacks("sequence_parallel_size", "There is no sequence parallelism.", idle=(1,)),
    lacks("hybrid_engine.enabled", "Training only: no generation inside a step (RLHF)."),
    moot("hybrid_engine.*", "Belongs to RLHF."),
    lacks("sparse_attention.*", "Attention is exact."),
    lacks("data_efficiency.enabled", "Rows are trained as they are, in an order that the seed decides."),
    moot("data_efficiency.*", "Belongs to data_efficiency."),
    lacks("curriculum_learning.enabled", "No curriculum: the seed decides the order of packs."),
    moot("curriculum_learning.*", "Belongs to curriculum learning."),
    lacks("compression_training.*", "No compression while training."),
    *alike(lacks, "No quantisation while training.", "quantize_training.* weight_quantization.*"),
    lacks("progressive_layer_drop.enabled", "No layer is dropped."),
    moot("progressive_layer_drop.*", "Belongs to progressive layer drop."),
    lacks("eigenvalue.enabled", "No eigenvalues are computed."),
    moot("eigenvalue.*", "Belongs to eigenvalue."),
    lacks(
        "elasticity.enabled",
        "The batch is fixed; a run goes on with any number of workers all the same.",
        decides=False,
    ),
    moot("elasticity.*", "The batch is fixed."),
    moot("autotuning.*", "Describes a search for the other keys, not a run."),
    moot("checkpoint.tag_validation", "A checkpoint exists when all of its files do."),
    moot("checkpoint.load_universal", "Every checkpoint can be read with any layout."),
    moot("checkpoint.use_node_local_storage", "Every worker writes its own file into the run directory."),
    moot("checkpoint.parallel_write.*", "Every worker writes its own file."),
    *alike(moot, "Checkpoints are written beside training.", "checkpoint.* nebula.* datastates_ckpt.*"),
    tells("compile.deepcompile", "compile", "torch.compile, block by block."),
    lacks("compile.offload_activation", "Activations are kept or recomputed.", decides=False),
    moot("compile.*", "Belongs to DeepCompile."),
    lacks("pipeline.*", "Stages are parallel.pipeline; these keys say how a PipelineModule is cut.", decides=False),
    moot("vocabulary_size", "The model's own."),
)

DEEPSPEED = Table(
    "DeepSpeed JSON",
    (
        *(*BATCH, *OPTIMIZER, *SCHEDULER, *PRECISION),
        *within("zero_optimization.", ZERO),
        tells("zero_optimization", "zero_stage", "A bare true was stage 1 in early versions."),
        *COMMUNICATION,
        *within("activation_checkpointing.", ACTIVATIONS),
        *(*WATCHING, *REST),
    ),
    {"monitor_config.": ""},
)
