"""A command, and whole configurations of other programs, that were imported train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tiny import alpaca_rows, llama_config, write_model, write_rows

COMMAND = """\
python train.py --model_name_or_path model --data_path rows.jsonl --output_dir run --model_max_length 512 \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_steps 3 --learning_rate 1e-3 \\
    --lr_scheduler_type constant --save_strategy no --report_to none --bf16
"""


@pytest.mark.matrix
def test_an_imported_command_trains(tmp_path: Path) -> None:
    write_model(tmp_path / "model", llama_config(num_hidden_layers=1))
    write_rows(tmp_path / "rows.jsonl", alpaca_rows(50))
    (tmp_path / "train.sh").write_text(COMMAND)
    for words in (
        ["import", "train.sh", "--strict", "--output", "config.yaml"],
        ["train", "config.yaml", "launch.threads=1"],
    ):
        command = [sys.executable, "-m", "tonnage", *words]
        result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
        assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [record["lr"] for record in records if "loss" in record]
    assert rates == [1e-3] * 3
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    layout = plan["choice"]["layout"]
    assert (plan["packs_per_step"], layout["micro_batch"], plan["num_packs"]) == (4, 2, 12)


AXOLOTL = """\
base_model: model
datasets: [{path: rows.jsonl, type: alpaca, split: "train[:40]"}]
val_set_size: 0.1
evals_per_epoch: 2
sequence_len: 512
sample_packing: true
micro_batch_size: 1
gradient_accumulation_steps: 2
max_steps: 4
warmup_steps: 2
learning_rate: 1e-3
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
bf16: auto
gradient_checkpointing: true
output_dir: run
"""
QLORA = (
    AXOLOTL
    + """\
adapter: qlora
load_in_4bit: true
lora_r: 4
lora_alpha: 8
lora_target_linear: true
"""
)
MORE = (
    AXOLOTL.replace("type: alpaca,", 'type: "alpaca:chat",')
    + """\
saves_per_epoch: 1
early_stopping_patience: 3
curriculum_sampling: true
special_tokens: {eos_token: "<|im_end|>"}
tokens: ["<|im_start|>"]
"""
)
LLAMA_FACTORY = """\
model_name_or_path: model
dataset: rows
dataset_dir: .
template: qwen3_nothink
finetuning_type: full
do_train: true
cutoff_len: 512
max_samples: 20
per_device_train_batch_size: 5
learning_rate: 1.0e-3
lr_scheduler_type: cosine
num_train_epochs: 1.0
warmup_steps: 2
bf16: true
output_dir: run
"""
TORCHTUNE = """\
tokenizer: {_component_: torchtune.models.mistral.mistral_tokenizer, path: model/tokenizer.model, max_seq_len: 512}
dataset: {_component_: torchtune.datasets.alpaca_dataset, source: json, data_files: rows.jsonl, packed: true}
model:
  _component_: torchtune.models.mistral.qlora_mistral_7b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 4
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: model/}
output_dir: run
optimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit, lr: 1e-3}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 2
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 1
gradient_accumulation_steps: 2
epochs: 1
max_steps_per_epoch: 4
device: cpu
dtype: bf16
"""
SWIFT = """\
model: model
tuner_type: full
dataset: [rows.jsonl]
torch_dtype: bfloat16
max_length: 512
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 1e-3
warmup_steps: 2
max_steps: 4
output_dir: run
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "exported"),
    [
        pytest.param(AXOLOTL, "model.safetensors", marks=pytest.mark.matrix),
        (QLORA, "adapter_model.safetensors"),
        pytest.param(MORE, "model.safetensors", marks=pytest.mark.matrix),
        (LLAMA_FACTORY, "model.safetensors"),
        (TORCHTUNE, "adapter_model.safetensors"),
        (SWIFT, "model.safetensors"),
    ],
    ids=[
        "axolotl",
        "axolotl-qlora",
        "axolotl, with tokens, a prompt and an order",
        "llama-factory",
        "torchtune",
        "swift",
    ],
)
def test_an_imported_configuration_trains_to_an_export(text: str, exported: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model", llama_config(num_hidden_layers=1))
    write_rows(tmp_path / "rows.jsonl", alpaca_rows(50))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.jsonl"}}))
    (tmp_path / "own_single_device.yaml").write_text(text)
    for words in (
        ["import", "own_single_device.yaml", "--strict", "--output", "config.yaml"],
        ["train", "config.yaml", "launch.threads=1"],
    ):
        command = [sys.executable, "-m", "tonnage", *words]
        result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
        assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [record["lr"] for record in records if "loss" in record]
    assert rates == pytest.approx([0.0, 5e-4, 1e-3, 5e-4])  # a warm-up of two steps from zero, then half a cosine
    assert (tmp_path / "run" / "export" / exported).is_file()
    account = json.loads((tmp_path / "run" / "data.json").read_text())
    assert account["total"]["rows_read"] == 50


TAGGED = (
    LLAMA_FACTORY.replace("cutoff_len: 512", "cutoff_len: 256")
    + "stage: kto\npref_beta: 0.2\nkto_rejected_weight: 0.5\n"
)
REWARD = (
    (
        QLORA.replace("{path: rows.jsonl, type: alpaca,", "{path: rows.jsonl, type: bradley_terry.chat_template,")
        .replace("adapter: qlora\nload_in_4bit: true", "adapter: lora")
        .replace("sample_packing: true", "sample_packing: false")
        .replace("sequence_len: 512", "sequence_len: 256")
    )
    + """\
reward_model: true
model_type: AutoModelForSequenceClassification
num_labels: 1
center_rewards_coefficient: 0.01
chat_template: chatml
special_tokens: {eos_token: "<|im_end|>"}
tokens: ["<|im_start|>"]
lora_modules_to_save: [embed_tokens, lm_head]
"""
)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("text", "exported", "figure"),
    [(TAGGED, "model.safetensors", "kl"), (REWARD, "adapter_model.safetensors", "reward_accuracy")],
    ids=["llama-factory, kto", "axolotl, reward"],
)
def test_an_imported_configuration_for_preferences_trains_to_an_export(
    text: str, exported: str, figure: str, tmp_path: Path
) -> None:
    rows = [
        {"instruction": f"What is {number}?", "output": f"It is {number}.", "liked": number % 3 > 0}
        if "stage: kto" in text
        else {"system": "", "input": f"What is {number}?", "chosen": f"It is {number}.", "rejected": f"{number}?"}
        for number in range(50)
    ]
    write_model(tmp_path / "model", llama_config(num_hidden_layers=1))
    write_rows(tmp_path / "rows.jsonl", rows)
    entry = {"file_name": "rows.jsonl", "columns": {"kto_tag": "liked"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": entry}))
    (tmp_path / "theirs.yaml").write_text(text)
    for words in (
        ["import", "theirs.yaml", "--strict", "--output", "config.yaml"],
        ["train", "config.yaml", "launch.threads=1"],
    ):
        command = [sys.executable, "-m", "tonnage", *words]
        result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
        assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "lr" in record]
    assert len(steps) == 4
    assert all(figure in record for record in steps)
    assert (tmp_path / "run" / "export" / exported).is_file()


SEEN = """\
base_model: smolvlm
processor_type: AutoProcessor
skip_prepare_dataset: true
remove_unused_columns: false
datasets: [{path: rows.jsonl, type: chat_template}]
sample_packing: false
sequence_len: 512
micro_batch_size: 1
gradient_accumulation_steps: 2
max_steps: 2
learning_rate: 1e-3
adapter: lora
lora_r: 4
lora_alpha: 8
lora_target_modules: 'model.text_model.layers.[\\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj'
output_dir: run
"""
SEEN_BY_NAME = """\
model_name_or_path: qwen2.5-vl
finetuning_type: full
dataset: rows
dataset_dir: .
template: qwen2_vl
image_max_pixels: 1500
freeze_vision_tower: true
cutoff_len: 512
per_device_train_batch_size: 2
max_steps: 2
learning_rate: 1e-3
output_dir: run
"""


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("text", "family", "name", "exported", "supervised"),
    [
        (SEEN, "idefics3", "smolvlm", "adapter_model.safetensors", 4 * 19),
        (SEEN_BY_NAME, "qwen2_5_vl", "qwen2.5-vl", "processor_config.json", 4 * 6),
    ],
    ids=["axolotl", "llama-factory"],
)
def test_an_imported_configuration_of_rows_with_images_trains(
    text: str, family: str, name: str, exported: str, supervised: int, tmp_path: Path
) -> None:
    """Axolotl trains all but images of a template that it does not know, LLaMA-Factory the answers."""
    pytest.importorskip("PIL")
    from visions import draw_image, write_vision

    write_vision(tmp_path / name, family)
    (tmp_path / "a.png").write_bytes(draw_image(1, (60, 40)))
    talk = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A cat"}]
    rows = [{"messages": talk, "images": ["a.png"]}] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"messages": "messages", "images": "images"}
    info = {"rows": {"file_name": "rows.jsonl", "formatting": "sharegpt", "columns": columns}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "theirs.yaml").write_text(text)
    for words in (
        ["import", "theirs.yaml", "--strict", "--output", "config.yaml"],
        ["train", "config.yaml", "launch.threads=1", "data.cache=cache"],
    ):
        command = [sys.executable, "-m", "tonnage", *words]
        result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
        assert result.returncode == 0, result.stderr
    total = json.loads((tmp_path / "run" / "data.json").read_text())["total"]
    assert (total["rows_with_images"], total["supervised"]["train"]) == (4, supervised)
    assert (tmp_path / "run" / "export" / exported).is_file()
