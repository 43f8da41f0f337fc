"""Accelerate's YAML, and the options of ``accelerate launch``, which have the same names.

Source: https://huggingface.co/docs/accelerate (1.15): ``ClusterConfig`` and its sections, ``accelerate launch
--help``. Keys of ``fsdp_config``, ``deepspeed_config``, ``dynamo_config`` and ``parallelism_config`` are listed
without the section, as on the command line.
"""

from __future__ import annotations

from tonnage.migration import reasons
from tonnage.migration.keys import Key, Table, alike, lacks, maps, moot, within
from tonnage.migration.launchers import TORCHRUN
from tonnage.migration.quantities import tells

FSDP: tuple[Key, ...] = (
    moot("version", "FSDP2 always."),
    tells(
        "sharding_strategy",
        "sharding",
        "FULL_SHARD is 3, SHARD_GRAD_OP 2, NO_SHARD 0; hybrid ones replicate over the nodes.",
    ),
    tells("reshard_after_forward", "sharding", "true is ZeRO 3, false 2; in FSDP1 it held the sharding strategy."),
    tells("offload_params", "parameter_device", "true is our host: parameters, and with them state and gradients."),
    tells("cpu_offload", "parameter_device", "true is our host: parameters, and with them state and gradients."),
    *alike(
        moot,
        "The blocks of a model are found by its family.",
        "auto_wrap_policy transformer_layer_cls_to_wrap min_num_params no_wrap ignored_modules",
    ),
    *alike(
        moot,
        "Parameters of the next blocks are gathered while one runs; plans say how many.",
        "backward_prefetch forward_prefetch backward_prefetch_policy limit_all_gathers",
    ),
    moot("state_dict_type", "Every worker writes its own shard; export/ holds a whole model."),
    moot("use_orig_params", "FSDP2 keeps the model's own parameters."),
    *alike(moot, reasons.OWN_SHARD, "cpu_ram_efficient_loading sync_module_states"),
    tells("activation_checkpointing", "recompute"),
    moot("mixed_precision_policy", "precision says it; gradients are reduced in fp32."),
)
"""Keys of FSDP, which Accelerate, transformers and Axolotl write with different prefixes."""

PARALLELISM: tuple[Key, ...] = (
    tells("dp_replicate_size", "parallel.replicate"),
    moot("dp_shard_size", "What is left of the workers after parallel.replicate."),
    maps("tp_size", "batch.sequences", "The same batch; parallel.tensor is not set.", quantity="ranks_per_replica"),
    maps("cp_size", "batch.sequences", "There is no context parallelism.", quantity="ranks_per_replica"),
    maps("sp_size", "batch.sequences", "There is no sequence parallelism.", quantity="ranks_per_replica"),
    *alike(
        moot,
        "Belongs to context or sequence parallelism.",
        "cp_backend cp_comm_strategy sp_backend sp_seq_length sp_seq_length_is_variable sp_attn_implementation",
    ),
)
"""Sizes of the axes of a device mesh."""

COMPILE: tuple[Key, ...] = (
    maps("backend", "compile", "Each block is compiled, with inductor.", quantity="compile_backend"),
    moot("mode", "torch.compile's default mode."),
    moot("use_fullgraph", "Blocks are compiled one by one.", is_flag=True),
    moot("use_dynamic", "Lengths of documents differ from pack to pack, and compiled blocks know.", is_flag=True),
    moot("use_regional_compilation", "Always: each block is compiled by itself.", is_flag=True),
)
"""Options of ``torch.compile``."""

DEEPSPEED_PLUGIN: tuple[Key, ...] = (
    tells("deepspeed_config_file", "deepspeed_file"),
    tells("zero_stage", "zero_stage"),
    tells("offload_optimizer_device", "optimizer_device"),
    tells("offload_param_device", "parameter_device"),
    tells("offload_optimizer_nvme_path", "nvme_path"),
    tells("offload_param_nvme_path", "nvme_path", "Where the files of parameters rest."),
    tells("gradient_accumulation_steps", "accumulation"),
    tells("gradient_clipping", "optimizer.clip"),
    moot("zero3_init_flag", "Models are always built without weights, then each worker reads its own shard."),
    moot("zero3_save_16bit_model", "A finished run always holds a Hugging Face model in export/."),
    moot("seq_parallel_communication_data_type", "There is no sequence parallelism."),
    moot("deepspeed_multinode_launcher", reasons.RENDEZVOUS),
    *alike(moot, reasons.MACHINES, "deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter"),
    lacks("deepspeed_moe_layer_cls_names", "No expert parallelism."),
)

ACCELERATE = Table(
    "Accelerate YAML and `accelerate launch`",
    (
        maps("config_file", "", "Another file: give it as well.", quantity="accelerate_file"),
        lacks("compute_environment", "The launchers of tonnage, not SageMaker.", idle=("LOCAL_MACHINE",)),
        *alike(
            moot,
            "SageMaker is not used.",
            "ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version "
            "transformers_version py_version sagemaker_inputs_file sagemaker_metrics_file additional_args.*",
        ),
        maps(
            "distributed_type",
            "memory.zero",
            "MULTI_GPU is ZeRO 0; FSDP and DEEPSPEED say more in their own sections.",
            quantity="distributed_type",
        ),
        maps("num_processes", "launch.workers", "The same: all processes.", quantity="processes"),
        tells("num_machines", "nodes"),
        tells("mixed_precision", "mixed_precision"),
        tells("gpu_ids", "devices"),
        *alike(moot, reasons.RENDEZVOUS, "machine_rank main_process_ip main_process_port rdzv_backend rdzv_conf"),
        moot("same_network", reasons.RENDEZVOUS, is_flag=True),
        moot("main_training_function", "There is no script."),
        moot("enable_cpu_affinity", "launch.threads divides the cores.", is_flag=True),
        maps("num_cpu_threads_per_process", "launch.threads", "The same."),
        *TORCHRUN.keys_named("max_restarts monitor_interval tee log_dir role"),
        moot("debug", "Workers that wait for each other in vain are found and shown.", is_flag=True),
        moot("quiet", "Progress is one line.", is_flag=True),
        moot("multi_gpu", "launch.workers says it.", is_flag=True),
        *alike(moot, "memory.zero says it.", "use_fsdp use_deepspeed", is_flag=True),
        moot("use_parallelism_config", "parallel says it.", is_flag=True),
        moot("cpu", "The device is found.", is_flag=True),
        moot("use_cpu", "The device is found."),
        *TORCHRUN.keys_named("module no_python"),
        moot("help", "Asks for help.", is_flag=True),
        *alike(moot, reasons.MACHINES, "mpirun_hostfile mpirun_ccl mpirun_config.*"),
        *alike(lacks, "No FP8.", "fp8_config.* fp8_backend"),
        moot("fp8_use_autocast_during_eval", "Belongs to FP8.", is_flag=True),
        *alike(
            moot,
            "Belongs to FP8.",
            "fp8_margin fp8_interval fp8_format fp8_amax_history_len fp8_amax_compute_algo "
            "fp8_override_linear_precision fp8_opt_level fp8_enable_fsdp_float8_all_gather fp8_pad_inner_dim",
        ),
        lacks("use_megatron_lm", "No Megatron-LM.", is_flag=True),
        lacks("megatron_lm_config.*", "No Megatron-LM."),
        *alike(moot, reasons.NO_TPU, "tpu_name tpu_zone tpu_env tpu_vm tpu_use_cluster"),
        moot("tpu_use_sudo", reasons.NO_TPU, is_flag=True),
        *alike(lacks, reasons.NO_TPU, "tpu tpu_cluster", is_flag=True),
        moot("no_tpu_cluster", reasons.NO_TPU, is_flag=True),
        *alike(moot, reasons.NO_TPU, "vm env downcast_bf16 command_file commands"),
        *alike(moot, "SageMaker is not used; the value is not repeated.", "aws_access_key_id aws_secret_access_key"),
        *DEEPSPEED_PLUGIN,
        *within("fsdp_", FSDP),
        *within("parallelism_config_", PARALLELISM),
        *within("dynamo_", COMPILE),
    ),
    {
        "fsdp_config.": "",
        "deepspeed_config.": "",
        "parallelism_config.": "",
        "dynamo_config.": "",
        "megatron_lm_": "megatron_lm_config.",
    },
)
