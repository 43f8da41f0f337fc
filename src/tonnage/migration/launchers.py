"""Options of the programs that start a training script: torchrun, deepspeed, python, and the shell around them.

Sources: https://docs.pytorch.org/docs/stable/elastic/run.html, ``deepspeed --help`` (0.19). Those of ``accelerate
launch`` are in ``accelerate``.
"""

from __future__ import annotations

from tonnage.migration import reasons
from tonnage.migration.keys import Key, Table, alike, lacks, moot
from tonnage.migration.quantities import tells

_OUTPUT = "Every worker's output is in workers/ of the run."
_SCRIPT = "There is no script."

SCRIPT = lacks("script", "Where its name does not say that it trains on supervised rows.")

SHELL: tuple[Key, ...] = (tells("CUDA_VISIBLE_DEVICES", "devices"), SCRIPT)

TORCHRUN = Table(
    "torchrun",
    (
        tells("nproc_per_node", "processes_per_node"),
        tells("nnodes", "nodes"),
        *alike(
            moot,
            reasons.RENDEZVOUS,
            "node_rank master_addr master_port local_addr rdzv_backend rdzv_endpoint rdzv_id rdzv_conf",
        ),
        moot("standalone", reasons.RENDEZVOUS, is_flag=True),
        moot("max_restarts", "A run never starts over by itself: tonnage train --resume."),
        moot("monitor_interval", "Workers are watched ten times a second."),
        moot("start_method", "Workers are processes of their own."),
        moot("event_log_handler", _OUTPUT),
        moot("role", "Workers are named by their rank."),
        *alike(moot, _SCRIPT, "module no_python run_path", is_flag=True),
        *alike(
            moot,
            _OUTPUT,
            "log_dir redirects tee local_ranks_filter duplicate_stdout_filters duplicate_stderr_filters logs_specs",
        ),
        moot("numa_binding", "launch.threads divides the cores."),
        *alike(moot, "SIGTERM and SIGUSR1 save a run and end it.", "signals_to_handle shutdown_timeout"),
        *alike(moot, reasons.RENDEZVOUS, "virtual_local_rank use_env", is_flag=True),
        *SHELL,
    ),
    {},
)

DEEPSPEED_LAUNCHER = Table(
    "the `deepspeed` launcher",
    (
        tells("num_gpus", "processes_per_node"),
        tells("num_accelerators", "processes_per_node", "Another name of num_gpus."),
        tells("num_nodes", "nodes"),
        tells("include", "devices", "The number of devices of one host."),
        *alike(moot, reasons.MACHINES, "exclude hostfile"),
        *alike(moot, reasons.RENDEZVOUS, "master_port master_addr node_rank launcher launcher_args ssh_port"),
        *alike(moot, reasons.RENDEZVOUS, "no_ssh no_ssh_check force_multi no_local_rank save_pid", is_flag=True),
        *alike(moot, _SCRIPT, "module no_python", is_flag=True),
        *alike(moot, _OUTPUT, "enable_each_rank_log log_level"),
        moot("quiet", _OUTPUT, is_flag=True),
        moot("venv_script", "Workers use the Python that started them."),
        moot("bind_cores_to_rank", "launch.threads divides the cores.", is_flag=True),
        moot("bind_core_list", "launch.threads divides the cores."),
        lacks("autotuning", "Describes a search, not a run."),
        lacks("elastic_training", "The number of workers of a run that goes is fixed.", is_flag=True, decides=False),
        *alike(moot, "The number of workers of a run that goes is fixed.", "min_elastic_nodes max_elastic_nodes"),
        *SHELL,
    ),
    {},
)

PYTHON = Table("python, and the shell", (*SHELL, tells("srun", "slurm_tasks")), {})
