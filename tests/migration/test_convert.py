"""Published configurations become ours, with every key accounted for, and our own reader takes what comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tonnage.config import Batch, read_config
from tonnage.config.schema import Config
from tonnage.errors import UserError
from tonnage.migration import Import, import_files
from tonnage.migration.settings import flat

FILES = Path(__file__).parent / "files"


def imported(*names: str) -> Import:
    return import_files([FILES / name for name in names])


def read_back(found: Import, folder: Path, *overrides: str) -> Config:
    path = folder / "config.yaml"
    path.write_text(found.text)
    return read_config(path, overrides, check_files=False)


def value_of(found: Import, key: str) -> Any:
    value: Any = found.tree
    for part in key.split("."):
        value = value[part]
    return value


def verdict(found: Import, key: str) -> str:
    (entry,) = [entry for entry in found.entries if entry.setting.shown == key]
    return entry.verdict


def from_json(folder: Path, **keys: Any) -> Import:
    path = folder / "given.json"
    path.write_text(json.dumps(keys))
    return import_files([path])


def from_command(folder: Path, words: str) -> Import:
    path = folder / "train.sh"
    path.write_text(words)
    return import_files([path])


@pytest.mark.parametrize("name", ["dolly_zero3_offload.json", "dolly_zero3_fp16.json", "alpaca_zero3_offload.json"])
def test_published_deepspeed_configurations_are_accounted_for(name: str, tmp_path: Path) -> None:
    found = imported(name)
    keys = [key for key, _ in flat(json.loads((FILES / name).read_text()))]
    assert sorted(entry.setting.shown for entry in found.entries) == sorted(keys)
    assert not found.of("unknown")
    assert value_of(found, "memory.zero") == 3
    assert {"model", "data.train"} <= {need.key for need in found.needs}
    config = read_back(found, tmp_path, "model=m", "data.train=rows.jsonl")
    assert config.memory.zero == 3


def test_dolly(tmp_path: Path) -> None:
    found = imported("dolly_zero3_offload.json")
    assert value_of(found, "precision") == "bf16"
    assert value_of(found, "optimizer.schedule") == "constant"  # WarmupLR
    assert found.of("not supported") == []
    assert verdict(found, "fp16.enabled") == "not applicable"
    config = read_back(found, tmp_path, "model=m", "data.train=rows.jsonl")
    assert config.memory.optimizer_tier == "host"


def test_nvme_is_disk_and_fp16_has_a_loss_scale(tmp_path: Path) -> None:
    config = read_back(imported("dolly_zero3_fp16.json"), tmp_path, "model=m", "data.train=rows.jsonl")
    assert config.memory.optimizer_tier == "disk"
    assert config.memory.offload_dirs == ("/mnt/nvme",)
    assert config.precision == "fp16"
    assert config.optimizer.loss_scale == 2.0**15
    assert config.optimizer.loss_scale_growth == 500
    assert config.batch == Batch(sequences=64)
    assert config.optimizer.clip == 0  # DeepSpeed clips nothing unless told


def test_alpaca_with_deepspeed(tmp_path: Path) -> None:
    found = imported("alpaca_deepspeed.sh", "alpaca_zero3_offload.json")
    assert not found.needs
    assert not found.conflicts
    config = read_back(found, tmp_path)
    assert config.model == "models/llama-7b"
    assert config.data.train[0].path == "./alpaca_data.json"
    assert config.batch == Batch(sequences=4 * 8 * 4)
    assert config.launch.workers == 4
    assert config.memory.micro_batch == 4
    assert config.memory.zero == 3
    assert config.epochs == 3
    assert config.optimizer.lr == 2e-5
    assert config.optimizer.warmup == 0.03
    assert config.optimizer.betas == (0.9, 0.999)
    assert config.optimizer.schedule == "linear"  # WarmupDecayLR
    assert config.precision == "bf16"
    assert (config.checkpoint.every, config.checkpoint.keep) == (2000, 1)
    assert not found.of("not supported")
    assert config.memory.optimizer_tier == config.memory.parameter_tier == "host"
    for entry in found.entries:
        if entry.setting.value == "auto":
            assert "which no file gives" not in entry.note, entry.setting.name


def test_alpaca_without_its_json_asks_for_it() -> None:
    found = imported("alpaca_deepspeed.sh")
    assert ["--deepspeed" in need.sentence for need in found.needs] == [True]


def test_alpaca_with_fsdp(tmp_path: Path) -> None:
    found = imported("alpaca_fsdp.sh")
    assert not found.of("unknown")
    assert not found.of("not supported")
    assert {need.key for need in found.needs} == {"model", "output"}  # both are <your ...>
    config = read_back(found, tmp_path, "model=m")
    assert config.memory.zero == 3
    assert config.optimizer.schedule == "cosine"
    assert config.batch == Batch(sequences=128)
    assert not config.data.pack


def test_accelerate_fsdp(tmp_path: Path) -> None:
    found = imported("accelerate_fsdp.yaml")
    keys = [key for key, _ in flat(yaml.safe_load((FILES / "accelerate_fsdp.yaml").read_text()))]
    assert sorted(entry.setting.shown for entry in found.entries) == sorted(keys)
    assert found.is_whole
    config = read_back(found, tmp_path, "model=m", "data.train=rows.jsonl")
    assert config.launch.workers == 16
    assert config.parallel.replicate == 2  # HYBRID_SHARD on two machines
    assert config.memory.zero == 3
    assert config.memory.recompute == "full"
    assert config.precision == "bf16"


def test_a_trl_command_with_accelerate(tmp_path: Path) -> None:
    found = imported("trl.sh", "accelerate_fsdp.yaml")
    assert found.is_whole
    assert not found.needs
    config = read_back(found, tmp_path)
    assert config.model == "Qwen/Qwen2.5-0.5B"
    assert config.batch == Batch(sequences=2 * 8 * 16)
    assert config.data.pack
    assert config.data.max_length == 2048
    assert config.data.over_length == "truncate"
    assert config.data.train_on == "assistant"
    assert not isinstance(config.data.validation, float)
    assert (config.data.validation[0].path, config.data.validation[0].split) == ("trl-lib/Capybara", "test")
    assert config.evaluate.every == 100
    assert (config.optimizer.schedule, config.optimizer.final) == ("cosine", 0.1)
    assert config.optimizer.warmup == 20
    assert config.memory.moments == "int8"
    assert config.seed == 7


def test_what_cannot_be_done_and_what_is_unknown_is_listed() -> None:
    found = imported("trl_lora.yaml")
    assert not found.is_whole
    refused = {entry.setting.name for entry in found.of("not supported")}
    assert refused == {"neftune_noise_alpha", "datasets.1.fraction"}  # of the mixture, of which none gives the rows
    assert found.tree["track"] == ["wandb"]
    assert {entry.setting.name for entry in found.lost} == {
        "neftune_noise_alpha",
        "learning_rat",
        "datasets.1.fraction",
    }
    assert found.program == "TRL"
    assert found.tree["adapter"] == {"rank": 16, "alpha": 16.0, "dropout": 0.05, "targets": ["q_proj", "v_proj"]}
    (unknown,) = found.of("unknown")
    assert unknown.setting.name == "learning_rat"
    assert "learning_rate" in unknown.note
    assert value_of(found, "data.train")[1] == {"path": "roneneldan/TinyStories"}
    assert [need.key for need in found.needs] == ["batch.sequences"]  # nothing says how many workers


def test_conflicts_are_listed_and_deepspeed_counts(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}))
    (tmp_path / "run.sh").write_text("python train.py --learning_rate 2e-5 --deepspeed ds.json")
    found = import_files([tmp_path / "run.sh", tmp_path / "ds.json"])
    assert value_of(found, "optimizer.lr") == 1e-4
    (conflict,) = found.conflicts
    assert "2e-5" in " ".join(conflict.said)
    assert "ds.json" in conflict.taken
    assert verdict(found, "--learning_rate") == "not applicable"
    assert ("optimizer.clip", 0) in [(i.key, i.value) for i in found.implied]  # the JSON has no gradient_clipping


@pytest.mark.parametrize(
    ("words", "key", "expected"),
    [
        ("--lr_scheduler_type constant --warmup_steps 10", "optimizer.warmup", 0),
        ("--dataset_name a/b --dataset_config main", "data.train", [{"path": "a/b", "name": "main"}]),
        ("--lr_scheduler_type constant_with_warmup --warmup_steps 10", "optimizer.warmup", 10),
        ("--warmup_steps 0 --warmup_ratio 0.1", "optimizer.warmup", 0.1),
        ("--warmup_steps 5 --warmup_ratio 0.1", "optimizer.warmup", 5),
        ("--max_steps 100 --num_train_epochs 2", "steps", 100),
        ("--max_steps -1 --num_train_epochs 2", "epochs", 2),
        ("--max_steps 100 --save_steps 0.2", "checkpoint.every", 20),
        ("--save_strategy no --save_steps 10", "checkpoint.every", 0),
        ("--gradient_checkpointing", "memory.recompute", "full"),
        ("--gradient_checkpointing False", "memory.recompute", "none"),
        ("--activation_offloading --gradient_checkpointing", "memory.activation_tier", "host"),
        ("--adam_beta2 0.95", "optimizer.betas", [0.9, 0.95]),
        ("--max_grad_norm 0", "optimizer.clip", 0),
        ("--bf16", "precision", "bf16"),
        ("--fp16 True", "precision", "fp16"),
        ("--learning_rate 1e-5", "precision", "fp32"),
        ("--torch_dtype bfloat16", "precision", "bf16"),
        ("--report_to none", "track", []),
        ("--report_to all", "track", ["tensorboard"]),
        ("--report_to wandb mlflow", "track", ["wandb", "mlflow"]),
        ("--completion_only_loss False --packing", "data.train_on", "all"),
        ("--packing --packing_strategy bfd_split", "data.over_length", "split"),
        ("--validation_split_percentage 5", "data.validation", 0.05),
        ("--torch_compile", "compile", "on"),
        ("--fsdp 'shard_grad_op auto_wrap'", "memory.zero", 2),
        ("--fsdp hybrid_shard --fsdp_config '{\"min_num_params\": 0}'", "memory.zero", 3),
        ("--ddp_timeout 60", "launch.timeout", 60),
        ("--per_device_train_batch_size 3", "batch.sequences", 3),
        ("--gradient_accumulation_steps 3", "batch.sequences", 24),
        ("--seed 3 --data_seed 3", "seed", 3),
        ("--model_name_or_path a/b --model_revision v2", "revision", "v2"),
        ("--dataset_name a/b --dataset_text_field body", "data.train", [{"path": "a/b", "columns": {"text": "body"}}]),
        ("--dataset_name a/b --dataset_train_split sft", "data.train", [{"path": "a/b", "split": "sft"}]),
    ],
)
def test_arguments(words: str, key: str, expected: Any, tmp_path: Path) -> None:
    found = from_command(tmp_path, f"python train.py {words}")
    assert value_of(found, key) == expected
    assert not found.of("unknown")


@pytest.mark.parametrize(
    "words",
    [
        "--lr_scheduler_type reduce_lr_on_plateau",
        "--lr_scheduler_type cosine --lr_scheduler_kwargs '{\"num_cycles\": 1.5}'",
        "--lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs '{\"num_stable_steps\": 3}'",
        "--optim adafactor",
        "--optim lion_8bit",
        "--save_strategy epoch",
        "--eval_strategy epoch",
        "--load_best_model_at_end",
        "--label_smoothing_factor 0.1",
        "--learning_rate fast",
        "--weight_decay 7",
        "--packing True --packing_strategy wrapped",
        "--average_tokens_across_devices False",
        "--warmup_ratio 1.5",
        "--seed -1",
        "--activation_offloading --gradient_checkpointing False",
        "--resume_from_checkpoint out/checkpoint-5",
        "--fsdp 'shard_grad_op offload'",
    ],
)
def test_what_is_asked_for_and_not_there_is_refused(words: str, tmp_path: Path) -> None:
    found = from_command(tmp_path, f"python train.py {words}")
    assert found.of("not supported"), [(e.setting.name, e.verdict, e.note) for e in found.entries]


@pytest.mark.parametrize(
    ("keys", "key", "expected"),
    [
        ({"zero_optimization": {"stage": 2}}, "memory.zero", 2),
        ({"train_batch_size": 8}, "memory.zero", 0),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "memory.parameter_tier", "disk"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "memory.activation_tier", "host"),
        ({"scheduler": {"type": "WarmupCosineLR"}}, "optimizer.final", 1e-4),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 50}}}, "steps", 50),
        ({"gradient_clipping": 0.5}, "optimizer.clip", 0.5),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "memory.moments", "bf16"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.9]}}}, "optimizer.betas", [0.8, 0.9]),
        ({"tensorboard": {"enabled": True}}, "track", ["tensorboard"]),
        ({"tensorboard": {"enabled": True}, "wandb": {"enabled": True}}, "track", ["tensorboard", "wandb"]),
        ({"fp16": {"enabled": False}, "train_batch_size": 8}, "precision", "fp32"),
    ],
)
def test_deepspeed(keys: dict[str, Any], key: str, expected: Any, tmp_path: Path) -> None:
    found = from_json(tmp_path, **keys)
    assert value_of(found, key) == expected
    assert found.is_whole


@pytest.mark.parametrize(
    "keys",
    [
        {"optimizer": {"type": "OneBitAdam"}},
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}},
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
        {"tensor_parallel": {"autotp_size": 4}},
        {"fp16": {"enabled": True, "loss_scale": 128}},
        {"comet": {"enabled": True}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.1}}},
    ],
)
def test_deepspeed_refuses(keys: dict[str, Any], tmp_path: Path) -> None:
    assert not from_json(tmp_path, **keys).is_whole


@pytest.mark.parametrize("number", ["auto", "gpu"])
def test_a_launcher_that_counts_devices_leaves_the_workers_open(number: str, tmp_path: Path) -> None:
    found = from_command(tmp_path, f"torchrun --nproc_per_node={number} t.py --torch_dtype auto")
    assert {"launch.workers", "batch.sequences"} <= {need.key for need in found.needs}
    assert "launch" not in found.tree
    assert verdict(found, "--torch_dtype") == "not applicable"


def test_machines_of_a_file_leave_the_workers_open(tmp_path: Path) -> None:
    """Unless the command, or the user beside it, says how many there are."""
    words = "--hostfile hosts --num_gpus 4 t.py --model_name_or_path m --per_device_train_batch_size 1"
    assert "launch.workers" in {need.key for need in from_command(tmp_path, f"deepspeed {words}").needs}
    assert value_of(from_command(tmp_path, f"deepspeed --num_nodes 2 {words}"), "launch.workers") == 8
    (tmp_path / "run.sh").write_text(f"deepspeed {words}")
    with_workers = import_files([tmp_path / "run.sh"], workers=12)
    assert value_of(with_workers, "launch.workers") == value_of(with_workers, "batch.sequences") == 12


def test_a_batch_that_does_not_multiply_out_is_said(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2})
    )
    (tmp_path / "run.sh").write_text("deepspeed --num_gpus 4 train.py --deepspeed ds.json")
    found = import_files([tmp_path / "run.sh", tmp_path / "ds.json"])
    assert value_of(found, "batch.sequences") == 64
    assert any("is 16" in note for note in found.notes)


def test_several_processes_without_sharding_are_zero_0(tmp_path: Path) -> None:
    found = from_command(tmp_path, "torchrun --nproc_per_node 2 train.py --model_name_or_path m --data_path d.json")
    assert value_of(found, "memory.zero") == 0
    assert read_back(found, tmp_path).memory.zero == 0


def test_ranks_that_share_a_model_share_its_batch(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 8\nparallelism_config:\n  parallelism_config_tp_size: 2\n"
    )
    (tmp_path / "run.sh").write_text("accelerate launch --config_file a.yaml t.py --per_device_train_batch_size 1")
    found = import_files([tmp_path / "run.sh", tmp_path / "a.yaml"])
    assert value_of(found, "batch.sequences") == 4
    assert verdict(found, "parallelism_config.parallelism_config_tp_size") == "not supported"


def test_arguments_of_the_scripts_own_are_said(tmp_path: Path) -> None:
    found = from_command(tmp_path, "python train.py --lr 5e-6 --epochs 2 --bf16")
    assert [entry.note for entry in found.of("unknown")] == [
        "Did you mean learning_rate?",
        "Did you mean num_train_epochs?",
    ]
    assert any("--lr, --epochs" in note for note in found.notes)


def test_what_is_left_open_gets_no_default(tmp_path: Path) -> None:
    words = "--learning_rate $LR --per_device_train_batch_size $BATCH --gradient_accumulation_steps 2 --weight_decay 7"
    found = from_command(tmp_path, f"torchrun --nnodes $NODES --nproc_per_node 8 train.py {words}")
    assert {need.key for need in found.needs} == {
        "optimizer.lr",
        "batch.sequences",
        "launch.workers",
        "model",
        "data.train",
    }
    assert {"lr", "weight_decay"}.isdisjoint(found.tree["optimizer"])
    assert "batch" not in found.tree
    assert "launch" not in found.tree
    long = from_command(tmp_path, f"python train.py --output_dir out/{'$' * 10_000}")
    assert all(len(need.sentence) < 200 for need in long.needs)
    assert "# lr: ..." in found.text


def test_the_schedule_of_deepspeed_sets_the_rate(tmp_path: Path) -> None:
    found = from_json(
        tmp_path,
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 3e-5}},
        optimizer={"type": "AdamW", "params": {"lr": 1e-5}},
    )
    assert value_of(found, "optimizer.lr") == 3e-5
    assert len(found.conflicts) == 1


def test_offload_to_the_host_is_that_of_fsdp_too(tmp_path: Path) -> None:
    words = (
        '--fsdp "full_shard auto_wrap offload"',
        "--fsdp_config '{\"fsdp_offload_params\": true}' --fsdp full_shard",
    )
    for said in words:
        found = from_command(tmp_path, f"torchrun --nproc_per_node 2 t.py {said}")
        assert value_of(found, "memory.zero") == 3
        assert value_of(found, "memory.parameter_tier") == "host"
        assert verdict(found, "--fsdp") == "mapped"
    found = from_command(tmp_path, 'torchrun --nproc_per_node 2 t.py --fsdp "shard_grad_op offload"')
    assert value_of(found, "memory.zero") == 2
    assert verdict(found, "--fsdp") == "not supported"


def test_fsdp_is_switched_on_and_off(tmp_path: Path) -> None:
    for said, zero, word in (("true", 3, "mapped"), ("false", 0, "not applicable")):
        options = f"--fsdp {said} --fsdp_config '{{\"reshard_after_forward\": true}}'"
        found = from_command(tmp_path, f"torchrun --nproc_per_node 2 t.py {options}")
        assert (value_of(found, "memory.zero"), verdict(found, "--fsdp")) == (zero, word)


def test_any_text_survives_the_comments_beside_it(tmp_path: Path) -> None:
    for model in (
        "/a/very/long/path/to/the/" + "weights/" * 20 + "of a model",
        "a: b # c",
        "- x",
        "null",
        "'quoted'",
        "é\n",
    ):
        found = from_json(tmp_path, model_name_or_path=model, data_path=[model, "rows.jsonl"], output_dir=model)
        config = read_back(found, tmp_path, "batch.sequences=8")
        assert config.model == config.output == model.strip()
        assert [source.path for source in config.data.train] == [model.strip(), "rows.jsonl"]


def test_a_config_of_ours_is_told(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: m\ndata: {train: rows.jsonl}\n")
    with pytest.raises(UserError, match="of tonnage already"):
        import_files([path])


def test_secrets_are_not_repeated(tmp_path: Path) -> None:
    found = from_command(tmp_path, "python train.py --hub_token hf_abc --my_secret_key xyz --learning_rate 1e-5")
    everything = json.dumps(found.to_json())
    assert "hf_abc" not in everything
    assert "xyz" not in everything
    assert "1e-5" in everything


def test_contradictions_of_the_whole_are_needs(tmp_path: Path) -> None:
    found = from_command(tmp_path, "python train.py --max_steps 5 --warmup_steps 10")
    assert any("warm-up of 10 steps" in need.sentence for need in found.needs)


@pytest.mark.parametrize(
    ("words", "pushed", "public"),
    [
        ("--push_to_hub --hub_model_id me/tuned", "me/tuned", False),
        ("--push_to_hub --hub_model_id me/tuned --hub_private_repo True", "me/tuned", False),
        ("--push_to_hub --hub_model_id me/tuned --hub_private_repo False", "me/tuned", True),
        ("--push_to_hub --push_to_hub_organization us --push_to_hub_model_id tuned", "us/tuned", False),
        ("--push_to_hub --hub_model_id tuned", None, False),  # whose it would be, the Trainer asks the hub
        ("--push_to_hub", None, False),
        ("--hub_model_id me/tuned --hub_private_repo False", None, False),  # the Trainer pushes nothing either
        ("--push_to_hub False --hub_model_id me/tuned", None, False),
    ],
)
def test_saves_are_pushed_where_they_were(words: str, pushed: str | None, public: bool, tmp_path: Path) -> None:
    found = from_command(tmp_path, f"python train.py --model_name_or_path m --train_file rows.jsonl {words}")
    config = read_back(found, tmp_path)
    assert (config.checkpoint.push, config.checkpoint.public) == (pushed, public)
    asked = words.startswith("--push_to_hub") and "False --hub" not in words
    assert any("OWNER/NAME" in note for note in found.notes) == (asked and pushed is None)


@pytest.mark.parametrize(
    ("keys", "groups"),
    [
        ({"adapter": "lora", "loraplus_lr_ratio": 16}, [{"match": "*lora_B", "lr": 16e-5}]),
        (
            {"adapter": "lora", "loraplus_lr_ratio": 4, "lora_target_modules": ["q_proj", "embed_tokens"]},
            [{"match": "*lora_B", "lr": 4e-5}, {"match": "*lora_embedding_?", "lr": 1e-6}],
        ),
        (
            {
                "adapter": "lora",
                "loraplus_lr_ratio": 4,
                "loraplus_lr_embedding": 2e-6,
                "lora_target_modules": ["embed_tokens"],
            },
            [{"match": "*lora_B", "lr": 4e-5}, {"match": "*lora_embedding_?", "lr": 2e-6}],
        ),
        ({"adapter": "lora", "loraplus_lr_embedding": 2e-6}, None),
        ({"loraplus_lr_ratio": 16}, None),
    ],
)
def test_lora_plus_of_axolotl_is_a_group(
    keys: dict[str, Any], groups: list[dict[str, Any]] | None, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    rows = [{"path": "a/rows", "type": "alpaca"}]
    path.write_text(yaml.safe_dump({"base_model": "a/b", "datasets": rows, "learning_rate": 1e-5, **keys}))
    result = import_files([path])
    assert result.is_whole, result.lost
    settings = read_back(result, tmp_path).optimizer.groups
    expected = groups or []
    assert [group.match for group in settings] == [group["match"] for group in expected]
    assert [group.lr for group in settings] == pytest.approx([group["lr"] for group in expected])
