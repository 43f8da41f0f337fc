"""The commands of two well-known runs come over whole, to what the recipes of those names have, and plan on their
hardware: Llama 2 70B with FSDP on 2 x 8 A100, and Dolly's DeepSpeed settings on a GPU of 16 GB.

Published: https://huggingface.co/blog/ram-efficient-pytorch-fsdp, and Dolly's notebook,
https://github.com/ray-project/ray/pull/38241.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiny import byte_tokenizer
from tonnage.config import read_config
from tonnage.config.schema import Config, SlurmLaunch
from tonnage.decide.plans import suppose
from tonnage.migration import Import, import_files
from tonnage.planning.machine import parse_hardware

RECIPES = Path(__file__).parents[2] / "recipes"
FSDP = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
        "fsdp_forward_prefetch": True,
        "fsdp_offload_params": False,
        "fsdp_sharding_strategy": 1,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_sync_module_states": True,
        "fsdp_use_orig_params": True,
    },
    "machine_rank": 0,
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}
SHARED = """--dataset_name smangrul/code-chat-assistant-v1 --dataset_text_field content --max_seq_len 2048 \\
    --max_steps 500 --logging_steps 25 --eval_steps 100 --save_steps 250 --bf16 True --packing True \\
    --output_dir runs/llama-2-70b \\
    --per_device_train_batch_size 1 --gradient_accumulation_steps 1 --learning_rate 5e-5 --lr_scheduler_type cosine \\
    --weight_decay 0.01 --warmup_ratio 0.03 --use_flash_attn True"""
TUTORIAL = f"--model_name meta-llama/Llama-2-70b-chat-hf --use_gradient_checkpointing True {SHARED}"
"""The arguments as the tutorial has them."""
LATER = f"""--model_name_or_path meta-llama/Llama-2-70b-chat-hf --gradient_checkpointing True --use_reentrant False \\
    --splits train,test --chat_template_format none --add_special_tokens False --append_concat_token False \\
    --evaluation_strategy steps --save_strategy steps --logging_strategy steps --log_level info --seed 100 \\
    --push_to_hub --hub_private_repo True --hub_strategy every_save --max_grad_norm 1.0 --optim paged_adamw_32bit \\
    --ddp_timeout 5400 {SHARED}"""
"""Those of the same script as it became, with everything that the first one has by default written out."""
DOLLY = {
    "fp16": {"enabled": "auto", "initial_scale_power": 8},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "gather_16bit_weights_on_model_save": True,
        "round_robin_gradients": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 10,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
DOLLY_ARGUMENTS = """python train.py --model_name_or_path databricks/dolly-v2-3b --dataset_name yahma/alpaca-cleaned \\
    --model_max_length 128 --per_device_train_batch_size 16 --gradient_accumulation_steps 16 --num_train_epochs 2 \\
    --learning_rate 2e-5 --weight_decay 0.01 --warmup_steps 0 --fp16 True --logging_steps 1 --disable_tqdm False \\
    --push_to_hub False --output_dir runs/dolly-v2-3b-alpaca --deepspeed dolly.json"""
"""What the notebook gives the Trainer, as a command."""
MACHINES = "--main_process_ip $MASTER_ADDR --main_process_port $MASTER_PORT --machine_rank \\$MACHINE_RANK"
TWO = f"--num_processes 16 --num_machines 2 {MACHINES}"


def imported(folder: Path, launcher: str, arguments: str) -> tuple[Import, Config]:
    (folder / "fsdp_config.yaml").write_text(yaml.safe_dump(FSDP))
    (folder / "launch.sh").write_text(
        f"accelerate launch --config_file fsdp_config.yaml {launcher} \\\n  train.py {arguments}\n"
    )
    found = import_files([folder / "launch.sh"])
    (folder / "config.yaml").write_text(found.text)
    return found, read_config(folder / "config.yaml", check_files=False)


@pytest.mark.parametrize(
    ("arguments", "clip", "seed", "timeout"), [(TUTORIAL, 0.3, 0, 900), (LATER, 1.0, 100, 5400)], ids=["first", "later"]
)
def test_the_command_for_70b_is_the_recipe(
    arguments: str, clip: float, seed: int, timeout: float, tmp_path: Path
) -> None:
    found, config = imported(tmp_path, TWO, arguments)
    assert found.is_whole, [(entry.setting.shown, entry.note) for entry in found.lost]
    assert not found.needs
    recipe = read_config(RECIPES / "llama-2-70b.yaml", check_files=False)
    assert isinstance(config.launch, SlurmLaunch)
    assert isinstance(recipe.launch, SlurmLaunch)
    assert (config.optimizer.clip, config.seed, config.launch.timeout) == (clip, seed, timeout)
    launch = config.launch.model_copy(
        update={name: getattr(recipe.launch, name) for name in ("time", "save_seconds", "options", "hardware")}
        | {"cpus_per_worker": recipe.launch.cpus_per_worker, "timeout": recipe.launch.timeout}
    )
    optimizer = config.optimizer.model_copy(update={"clip": recipe.optimizer.clip})
    routers = {"router_loss": recipe.router_loss}  # TRL's default asks a mixture for its own; this is none
    assert config.model_copy(update={"launch": launch, "optimizer": optimizer, "seed": recipe.seed} | routers) == recipe


def test_the_same_on_one_machine(tmp_path: Path) -> None:
    found, config = imported(tmp_path, "", LATER)
    assert found.is_whole
    assert (config.launch.launcher, config.launch.workers, config.packs_per_step) == ("local", 8, 8)
    _, both = imported(tmp_path, TWO, LATER)
    assert config.model_copy(update={"launch": both.launch, "batch": both.batch}) == both


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("launcher", "hardware", "rest"),
    [(TWO, "2x8xA100-80GB", ("fp32", "host", "device")), ("", "8xA100-80GB", ("int8", "device", "host"))],
    ids=["two machines", "one"],
)
def test_what_is_imported_plans_on_its_hardware(
    launcher: str, hardware: str, rest: tuple[str, str, str], tmp_path: Path
) -> None:
    """On one machine moments of 8 bits stay on the cards: exact ones would travel, and a step take a quarter longer."""
    from recipes.test_recipes import SHAPES

    _, config = imported(tmp_path, launcher, LATER)
    SHAPES["meta-llama/Llama-2-70b-chat-hf"].save_pretrained(tmp_path / "full")
    byte_tokenizer().save_pretrained(tmp_path / "full")
    keys: dict[str, Any] = {
        "precision": config.precision,
        "steps": config.steps,
        "data.max_length": config.data.max_length,
        "data.train_on": config.data.train_on,
        "batch.sequences": config.packs_per_step,
        "memory.zero": config.memory.zero,
        "memory.recompute": config.memory.recompute,
        "memory.micro_batch": config.memory.micro_batch,
        "launch.workers": config.launch.workers,
        "checkpoint.every": config.checkpoint.every,
    }
    words = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    plan = suppose(str(tmp_path / "full"), words, parse_hardware(hardware))
    assert plan.fits
    assert plan.num_steps == 500
    assert (plan.layout.moments, plan.layout.optimizer_tier, plan.layout.gradient_tier) == rest
    assert plan.choice.peak_bytes <= 0.92 * 80 * 2**30


def dolly(folder: Path) -> tuple[Import, Config]:
    (folder / "dolly.json").write_text(json.dumps(DOLLY))
    (folder / "train.sh").write_text(DOLLY_ARGUMENTS)
    found = import_files([folder / "train.sh"])
    (folder / "config.yaml").write_text(found.text)
    return found, read_config(folder / "config.yaml", check_files=False)


def test_the_settings_of_dolly_come_over_whole(tmp_path: Path) -> None:
    found, config = dolly(tmp_path)
    assert not found.lost
    assert not found.needs
    assert not found.of("unknown")
    assert not found.of("not supported")
    assert config.memory.parameter_tier == "host"
    assert any("optimizer.weight_decay: 0" in note for note in found.notes)
    assert (config.precision, config.optimizer.loss_scale, config.packs_per_step) == ("fp16", 2.0**8, 256)
    assert (config.memory.zero, config.memory.optimizer_tier, config.checkpoint.every) == (3, "host", 500)
    assert (config.optimizer.lr, config.optimizer.schedule, config.optimizer.clip) == (2e-5, "linear", 1.0)
    recipe = read_config(RECIPES / "dolly-v2-3b.yaml", check_files=False)
    assert config.memory.model_copy(update={"recompute": recipe.memory.recompute}) == recipe.memory
    for ours in ("model", "optimizer", "precision", "batch", "epochs", "output"):
        assert getattr(config, ours) == getattr(recipe, ours), ours
    assert (config.data.max_length, config.data.pack) == (recipe.data.max_length, recipe.data.pack)
    assert (config.launch.workers, recipe.launch.workers) == (1, 1)
