"""What a script trains: by its name, however it is started."""

from __future__ import annotations

from itertools import product

import pytest

from tonnage.migration import Import, import_files
from tonnage.migration.methods import method_of

ARGUMENTS = "--model_name_or_path a/b --dataset_name a/rows --learning_rate 1e-5 --output_dir out"
STARTED = (
    "python {}",
    "python3 -B -u {}",
    "/opt/venv/bin/python3.12 -X faulthandler {}",
    "uv run {}",
    "uv run --with trl python {}",
    "env CUDA_VISIBLE_DEVICES=0 WANDB_MODE=offline python {}",
    "HF_HUB_OFFLINE=1 nohup python -u {}",
    "conda run -n ml python {}",
    "accelerate launch {}",
    "accelerate-launch --num_processes 2 {}",
    "accelerate launch --config_file fsdp.yaml --num_processes=4 {}",
    "python -m accelerate.commands.launch --num_processes 2 {}",
    "uv run accelerate launch --mixed_precision bf16 {}",
    "torchrun --nproc_per_node 4 {}",
    "srun --gpus 4 torchrun --standalone --nproc-per-node=4 {}",
    "python -m torch.distributed.run --nproc_per_node=2 {}",
    "python -u -m torch.distributed.launch --nproc_per_node=2 --use_env {}",
    "deepspeed --num_gpus 2 {}",
)
FILES = {
    "trl/scripts/sft.py": True,
    "examples/scripts/sft_gpt_oss.py": True,
    "./train.py": True,
    "src/finetune_lora.py": True,
    "run_clm.py": True,
    "trl/scripts/dpo.py": True,
    "trl/scripts/kto.py": True,
    "trl/scripts/reward.py": True,
    "trl/scripts/grpo.py": False,
    "trl/scripts/rloo.py": False,
    "trl/scripts/distillation.py": False,
    "examples/scripts/orpo.py": True,
    "examples/scripts/cpo.py": False,
    "examples/scripts/bco.py": False,
    "examples/scripts/xpo.py": False,
    "examples/scripts/gkd.py": False,
    "examples/scripts/gold.py": False,
    "examples/scripts/prm.py": False,
    "examples/scripts/ssd.py": False,
    "examples/scripts/nash_md.py": False,
    "examples/scripts/dpo_online.py": False,
    "examples/scripts/online_dpo_vlm.py": False,
    "examples/scripts/reward_modeling.py": True,
    "examples/scripts/ppo/ppo_tldr.py": False,
    "examples/scripts/sft_vlm_gemma3.py": False,
    "examples/scripts/sft_video_llm.py": False,
    "examples/scripts/sft_diffusion_gemma.py": False,
    "examples/scripts/openenv/wordle.py": False,
    "run_glue.py": False,
    "run_mlm.py": False,
    "dpo/train.py": True,
    "my_dpo_training.py": True,
    "trainDPO.py": True,
    "rewardtrainer.py": True,
    "runKTO.py": True,
    "run_dpo_or_kto.py": False,
    "main.py": False,
    "my_script.py": False,
}
MODULES = {
    "trl.scripts.sft": True,
    "pkg.train": True,
    "trl.scripts.dpo": True,
    "trl.scripts.reward": True,
    "trl.scripts.kto": True,
    "pkg.rl.train": False,
    "pkg.main": False,
}
WITH_MODULES = (
    "python -m {}",
    "python -u -m {}",
    "uv run python -m {}",
    "accelerate launch -m {}",
    "accelerate launch --num_processes 2 --module {}",
    "torchrun --nproc_per_node 2 -m {}",
    "deepspeed --num_gpus 2 --module {}",
)


def refused(found: Import) -> list[str]:
    return [entry.setting.value for entry in found.lost]


@pytest.mark.parametrize("started", STARTED)
def test_scripts_are_told_by_name_however_they_are_started(started: str) -> None:
    for script, is_known in FILES.items():
        found = import_files([f"{started.format(script)} {ARGUMENTS}"])
        assert [entry.setting.value for entry in found.entries if entry.setting.name == "script"] == [script]
        assert refused(found) == ([] if is_known else [script]), script
        assert found.tree["model"] == "a/b"


@pytest.mark.parametrize("started", WITH_MODULES)
def test_so_are_modules(started: str) -> None:
    for module, is_known in MODULES.items():
        found = import_files([f"{started.format(module)} {ARGUMENTS}"])
        assert refused(found) == ([] if is_known else [module]), module


@pytest.mark.parametrize(
    ("prefix", "command"),
    [
        *product(
            ("", "uvx ", "uv run ", "CUDA_VISIBLE_DEVICES=0 ", "poetry run ", "uvx --from trl "),
            ("grpo", "rloo", "distillation", "ppo", "gkd"),
        )
    ],
)
def test_commands_of_trl_for_neither_rows_nor_preferences_are_refused(prefix: str, command: str) -> None:
    found = import_files([f"{prefix}trl {command} {ARGUMENTS} --num_processes 2"])
    assert refused(found) == [command]
    for other in ("sft", "dpo", "orpo", "kto", "reward"):
        assert not import_files([f"{prefix}trl {other} {ARGUMENTS} --num_processes 2"]).lost


@pytest.mark.parametrize(
    "command", ["python trl/scripts/grpo.py --config x.yaml", "torchrun grpo.py x.yaml --config y.yaml"]
)
def test_a_script_whose_arguments_are_all_in_a_file_is_refused_too(command: str) -> None:
    assert [entry.setting.name for entry in import_files([command]).lost] == ["script"]


def test_a_refusal_says_what_it_trains_or_that_nobody_knows() -> None:
    (entry,) = import_files([f"python examples/scripts/prm.py {ARGUMENTS}"]).lost
    assert entry.note.startswith("By its name (prm) it trains a reward model of steps")
    (entry,) = import_files([f"python examples/scripts/gkd.py {ARGUMENTS}"]).lost
    assert "distillation" in entry.note
    (entry,) = import_files([f"python run.py {ARGUMENTS}"]).lost
    assert "--partial" in entry.note


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("/home/kto/work/train.py", "train"),
        ("support_train.py", "train"),
        ("C:\\work\\sft.py", "sft"),
        ("train2.py", "train"),
        ("finetuning.py", "finetuning"),
        ("training/evaluate.py", ""),
        ("", ""),
        (".py", ""),
    ],
)
def test_what_a_name_says(script: str, word: str) -> None:
    assert method_of(script) == (word, "supervised" if word else "")


def test_scripts_of_programs_with_files_of_their_own_are_told_by_those() -> None:
    words = "--model_name_or_path a/b --stage sft --finetuning_type full --dataset rows --template llama3 --do_train"
    found = import_files([f"torchrun --nproc_per_node 2 src/llamafactory/launcher.py {words}"])
    assert "script" not in [entry.setting.name for entry in found.lost]


def test_srun_starts_as_many_processes_as_nothing_here_says() -> None:
    found = import_files([f"srun -n 8 python train.py {ARGUMENTS}"])
    assert "launch" not in found.tree
    assert {"launch.workers", "batch.sequences"} <= {need.key for need in found.needs}
    assert import_files([f"srun -n 8 python train.py {ARGUMENTS}"], workers=8).tree["batch"]["sequences"] == 64
    assert not import_files([f"srun --gpus 4 torchrun --nproc_per_node 4 train.py {ARGUMENTS}"]).needs
