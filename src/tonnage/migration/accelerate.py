"""Accelerate's YAML, and the options of ``accelerate launch``, which have the same names.

Source: https://huggingface.co/docs/accelerate (1.15): ``ClusterConfig`` and its sections, ``accelerate launch
--help``. Keys of ``fsdp_config``, ``deepspeed_config``, ``dynamo_config`` and ``parallelism_config`` are listed
without the section, as on the command line.
"""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.migration.deepspeed import OFFLOAD, OFFLOAD_PARAMETERS
from tonnage.migration.keys import Key, Table, lacks, maps, moot

_RENDEZVOUS = "Workers on this machine find each other by themselves."
_TPU = "TPUs are not supported."


def fsdp_keys(prefix: str) -> Iterator[Key]:
    """Keys of FSDP, which Accelerate and transformers write with different prefixes."""
    blocks = "The blocks of a model are found by its family."
    schedule = "Parameters of the next block are gathered while one runs."
    yield moot(f"{prefix}version", "FSDP2 always.")
    yield maps(
        f"{prefix}sharding_strategy",
        "memory.zero parallel.replicate",
        "FULL_SHARD is 3, SHARD_GRAD_OP 2, NO_SHARD 0; hybrid ones replicate over the nodes.",
        quantity="sharding",
    )
    yield maps(
        f"{prefix}reshard_after_forward",
        "memory.zero parallel.replicate",
        "true is ZeRO 3, false 2; in FSDP1 it held the sharding strategy.",
        quantity="sharding",
    )
    for name in ("offload_params", "cpu_offload"):
        yield lacks(
            f"{prefix}{name}",
            "Those of several workers stay on the device; memory.optimizer_tier: host is for the optimizer's state.",
        )
    for name in ("auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "no_wrap", "ignored_modules"):
        yield moot(f"{prefix}{name}", blocks)
    for name in ("backward_prefetch", "forward_prefetch", "backward_prefetch_policy", "limit_all_gathers"):
        yield moot(f"{prefix}{name}", schedule)
    yield moot(f"{prefix}state_dict_type", "Every worker writes its own shard; export/ holds a whole model.")
    yield moot(f"{prefix}use_orig_params", "FSDP2 keeps the model's own parameters.")
    yield moot(f"{prefix}cpu_ram_efficient_loading", "Each worker reads its own shard only.")
    yield moot(f"{prefix}sync_module_states", "Each worker reads its own shard only.")
    yield maps(
        f"{prefix}activation_checkpointing",
        "memory.recompute",
        "Whole blocks are recomputed.",
        quantity="recompute",
    )
    yield moot(f"{prefix}mixed_precision_policy", "precision says it; gradients are reduced in fp32.")


def parallelism_keys(prefix: str) -> Iterator[Key]:
    """Sizes of the axes of a device mesh."""
    yield maps(f"{prefix}dp_replicate_size", "parallel.replicate", "The same: groups that hold everything once.")
    yield moot(f"{prefix}dp_shard_size", "What is left of the workers after parallel.replicate.")
    for name, why in (
        ("tp_size", "The same batch; parallel.tensor is not set."),
        ("cp_size", "There is no context parallelism."),
        ("sp_size", "There is no sequence parallelism."),
    ):
        yield maps(f"{prefix}{name}", "batch.sequences", why, quantity="ranks_per_replica")
    for name in (
        "cp_backend",
        "cp_comm_strategy",
        "sp_backend",
        "sp_seq_length",
        "sp_seq_length_is_variable",
        "sp_attn_implementation",
    ):
        yield moot(f"{prefix}{name}", "Belongs to context or sequence parallelism.")


def compile_keys(prefix: str) -> Iterator[Key]:
    """Options of ``torch.compile``."""
    yield maps(f"{prefix}backend", "compile", "Each block is compiled, with inductor.", quantity="compile_backend")
    yield moot(f"{prefix}mode", "torch.compile's default mode.")
    yield moot(f"{prefix}use_fullgraph", "Blocks are compiled one by one.", is_flag=True)
    yield moot(
        f"{prefix}use_dynamic", "Lengths of documents differ from pack to pack, and compiled blocks know.", is_flag=True
    )
    yield moot(f"{prefix}use_regional_compilation", "Always: each block is compiled by itself.", is_flag=True)


DEEPSPEED_PLUGIN: tuple[Key, ...] = (
    maps("deepspeed_config_file", "", "Another file: give it as well.", quantity="deepspeed_file"),
    maps("zero_stage", "memory.zero", "The same stages.", quantity="zero_stage"),
    maps("offload_optimizer_device", "memory.optimizer_tier", OFFLOAD, quantity="optimizer_device"),
    maps("offload_param_device", "memory.parameter_tier", OFFLOAD_PARAMETERS, quantity="parameter_device"),
    maps("offload_optimizer_nvme_path", "memory.offload_dirs", "Where tiles rest.", quantity="nvme_path"),
    maps("offload_param_nvme_path", "memory.offload_dirs", "Where the files of parameters rest.", quantity="nvme_path"),
    maps(
        "gradient_accumulation_steps",
        "batch.sequences",
        "Micro-batches follow from the batch and memory.micro_batch.",
        quantity="accumulation",
    ),
    maps("gradient_clipping", "optimizer.clip", "The same: the global norm."),
    moot("zero3_init_flag", "Models are always built without weights, then each worker reads its own shard."),
    moot("zero3_save_16bit_model", "A finished run always holds a Hugging Face model in export/."),
    moot("seq_parallel_communication_data_type", "There is no sequence parallelism."),
    moot("deepspeed_multinode_launcher", _RENDEZVOUS),
    moot("deepspeed_hostfile", "Which machines is the launcher's affair."),
    moot("deepspeed_exclusion_filter", "Which machines is the launcher's affair."),
    moot("deepspeed_inclusion_filter", "Which machines is the launcher's affair."),
    lacks("deepspeed_moe_layer_cls_names", "No expert parallelism."),
)

ACCELERATE = Table(
    "Accelerate YAML and `accelerate launch`",
    (
        maps("config_file", "", "Another file: give it as well.", quantity="accelerate_file"),
        lacks("compute_environment", "The launchers of tonnage, not SageMaker.", idle=("LOCAL_MACHINE",)),
        *(
            moot(name, "SageMaker is not used.")
            for name in (
                "ec2_instance_type",
                "iam_role_name",
                "image_uri",
                "profile",
                "region",
                "base_job_name",
                "pytorch_version",
                "transformers_version",
                "py_version",
                "sagemaker_inputs_file",
                "sagemaker_metrics_file",
                "additional_args.*",
            )
        ),
        maps(
            "distributed_type",
            "memory.zero",
            "MULTI_GPU is ZeRO 0; FSDP and DEEPSPEED say more in their own sections.",
            quantity="distributed_type",
        ),
        maps("num_processes", "launch.workers", "The same: all processes.", quantity="processes"),
        maps("num_machines", "launch.workers parallel.replicate", "launch.workers counts all.", quantity="nodes"),
        maps(
            "mixed_precision",
            "precision",
            "bf16 weights with an exact fp32 master, not autocast.",
            quantity="mixed_precision",
        ),
        maps("gpu_ids", "launch.workers", "Their number, where nothing else says it.", quantity="devices"),
        moot("machine_rank", _RENDEZVOUS),
        moot("main_process_ip", _RENDEZVOUS),
        moot("main_process_port", _RENDEZVOUS),
        moot("rdzv_backend", _RENDEZVOUS),
        moot("rdzv_conf", _RENDEZVOUS),
        moot("same_network", _RENDEZVOUS, is_flag=True),
        moot("main_training_function", "There is no script.", is_flag=False),
        moot("enable_cpu_affinity", "launch.threads divides the cores.", is_flag=True),
        maps("num_cpu_threads_per_process", "launch.threads", "The same."),
        moot("max_restarts", "A run never starts over by itself: tonnage train --resume."),
        moot("monitor_interval", "Workers are watched ten times a second."),
        moot("tee", "Every worker's output is in workers/ of the run."),
        moot("log_dir", "Every worker's output is in workers/ of the run."),
        moot("role", "Workers are named by their rank."),
        moot("debug", "Workers that wait for each other in vain are found and shown.", is_flag=True),
        moot("quiet", "Progress is one line.", is_flag=True),
        moot("multi_gpu", "launch.workers says it.", is_flag=True),
        moot("use_fsdp", "memory.zero says it.", is_flag=True),
        moot("use_deepspeed", "memory.zero says it.", is_flag=True),
        moot("use_parallelism_config", "parallel says it.", is_flag=True),
        moot("cpu", "The device is found.", is_flag=True),
        moot("use_cpu", "The device is found."),
        moot("module", "There is no script.", is_flag=True),
        moot("no_python", "There is no script.", is_flag=True),
        moot("help", "Asks for help.", is_flag=True),
        moot("mpirun_hostfile", "Which machines is the launcher's affair."),
        moot("mpirun_ccl", "Which machines is the launcher's affair."),
        moot("mpirun_config.*", "Which machines is the launcher's affair."),
        lacks("fp8_config.*", "No FP8."),
        lacks("fp8_backend", "No FP8."),
        *(
            moot(f"fp8_{name}", "Belongs to FP8.", is_flag=is_flag)
            for name, is_flag in (
                ("use_autocast_during_eval", True),
                ("margin", False),
                ("interval", False),
                ("format", False),
                ("amax_history_len", False),
                ("amax_compute_algo", False),
                ("override_linear_precision", False),
                ("opt_level", False),
                ("enable_fsdp_float8_all_gather", False),
                ("pad_inner_dim", False),
            )
        ),
        lacks("use_megatron_lm", "No Megatron-LM.", is_flag=True),
        lacks("megatron_lm_config.*", "No Megatron-LM."),
        *(
            moot(f"tpu_{name}", _TPU, is_flag=is_flag)
            for name, is_flag in (
                ("name", False),
                ("zone", False),
                ("env", False),
                ("vm", False),
                ("use_cluster", False),
                ("use_sudo", True),
            )
        ),
        lacks("tpu", _TPU, is_flag=True),
        lacks("tpu_cluster", _TPU, is_flag=True),
        moot("no_tpu_cluster", _TPU, is_flag=True),
        moot("vm", _TPU),
        moot("env", _TPU),
        moot("downcast_bf16", _TPU, is_flag=False),
        moot("command_file", _TPU),
        moot("commands", _TPU),
        moot("aws_access_key_id", "SageMaker is not used; the value is not repeated."),
        moot("aws_secret_access_key", "SageMaker is not used; the value is not repeated."),
        *DEEPSPEED_PLUGIN,
        *fsdp_keys("fsdp_"),
        *parallelism_keys("parallelism_config_"),
        *compile_keys("dynamo_"),
    ),
    {
        "fsdp_config.": "",
        "deepspeed_config.": "",
        "parallelism_config.": "",
        "dynamo_config.": "",
        "megatron_lm_": "megatron_lm_config.",
    },
)
