"""Options of the programs that start a training script: torchrun, deepspeed, python, and the shell around them.

Sources: https://docs.pytorch.org/docs/stable/elastic/run.html, ``deepspeed --help`` (0.19). Those of ``accelerate
launch`` are in ``accelerate``.
"""

from __future__ import annotations

from tonnage.migration.keys import Key, Table, lacks, maps, moot

_RENDEZVOUS = "Workers on this machine find each other by themselves."
_OUTPUT = "Every worker's output is in workers/ of the run."
_SCRIPT = "There is no script."

SHELL: tuple[Key, ...] = (
    maps("CUDA_VISIBLE_DEVICES", "launch.workers", "Their number, where nothing else says it.", quantity="devices"),
    moot("script", "What the script does besides training from its arguments is not known here."),
)

TORCHRUN = Table(
    "torchrun",
    (
        maps(
            "nproc_per_node",
            "launch.workers",
            "Times the number of nodes it is the number of workers.",
            quantity="processes_per_node",
        ),
        maps("nnodes", "launch.workers parallel.replicate", "launch.workers counts all.", quantity="nodes"),
        *(
            moot(name, _RENDEZVOUS)
            for name in (
                "node_rank",
                "master_addr",
                "master_port",
                "local_addr",
                "rdzv_backend",
                "rdzv_endpoint",
                "rdzv_id",
                "rdzv_conf",
            )
        ),
        moot("standalone", _RENDEZVOUS, is_flag=True),
        moot("max_restarts", "A run never starts over by itself: tonnage train --resume."),
        moot("monitor_interval", "Workers are watched ten times a second."),
        moot("start_method", "Workers are processes of their own."),
        moot("event_log_handler", _OUTPUT),
        moot("role", "Workers are named by their rank."),
        moot("module", _SCRIPT, is_flag=True),
        moot("no_python", _SCRIPT, is_flag=True),
        moot("run_path", _SCRIPT, is_flag=True),
        *(
            moot(name, _OUTPUT)
            for name in (
                "log_dir",
                "redirects",
                "tee",
                "local_ranks_filter",
                "duplicate_stdout_filters",
                "duplicate_stderr_filters",
                "logs_specs",
            )
        ),
        moot("numa_binding", "launch.threads divides the cores."),
        moot("signals_to_handle", "SIGTERM and SIGUSR1 save a run and end it."),
        moot("shutdown_timeout", "SIGTERM and SIGUSR1 save a run and end it."),
        moot("virtual_local_rank", _RENDEZVOUS, is_flag=True),
        moot("use_env", _RENDEZVOUS, is_flag=True),
        *SHELL,
    ),
    {},
)

DEEPSPEED_LAUNCHER = Table(
    "the `deepspeed` launcher",
    (
        maps(
            "num_gpus",
            "launch.workers",
            "Times the number of nodes it is the number of workers.",
            quantity="processes_per_node",
        ),
        maps("num_accelerators", "launch.workers", "Another name of num_gpus.", quantity="processes_per_node"),
        maps("num_nodes", "launch.workers parallel.replicate", "launch.workers counts all.", quantity="nodes"),
        maps("include", "launch.workers", "The number of devices of one host.", quantity="devices"),
        moot("exclude", "Which machines is the launcher's affair."),
        moot("hostfile", "Which machines is the launcher's affair."),
        *(
            moot(name, _RENDEZVOUS)
            for name in ("master_port", "master_addr", "node_rank", "launcher", "launcher_args", "ssh_port")
        ),
        *(
            moot(name, _RENDEZVOUS, is_flag=True)
            for name in ("no_ssh", "no_ssh_check", "force_multi", "no_local_rank", "save_pid")
        ),
        moot("module", _SCRIPT, is_flag=True),
        moot("no_python", _SCRIPT, is_flag=True),
        moot("enable_each_rank_log", _OUTPUT),
        moot("log_level", _OUTPUT),
        moot("quiet", _OUTPUT, is_flag=True),
        moot("venv_script", "Workers use the Python that started them."),
        moot("bind_cores_to_rank", "launch.threads divides the cores.", is_flag=True),
        moot("bind_core_list", "launch.threads divides the cores."),
        lacks("autotuning", "Describes a search, not a run."),
        lacks("elastic_training", "The number of workers of a run that goes is fixed.", is_flag=True, decides=False),
        moot("min_elastic_nodes", "The number of workers of a run that goes is fixed."),
        moot("max_elastic_nodes", "The number of workers of a run that goes is fixed."),
        *SHELL,
    ),
    {},
)

PYTHON = Table("python, and the shell", SHELL, {})
