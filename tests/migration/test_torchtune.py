"""torchtune's recipes: what its components come to, and how its tokenizers write conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tonnage.config import read_config
from tonnage.data.text.rendering import ChatTemplate
from tonnage.errors import UserError
from tonnage.migration import Import, import_files
from tonnage.migration.torchtune_chats import CHAT_FORMATS, NAMED, PROMPTS, PromptTemplate, jinja

PLAIN: dict[str, Any] = {
    "output_dir": "runs/tune",
    "tokenizer": {
        "_component_": "torchtune.models.llama3.llama3_tokenizer",
        "path": "models/m/original/tokenizer.model",
        "max_seq_len": None,
    },
    "dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset", "packed": False},
    "seed": None,
    "shuffle": True,
    "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"},
    "checkpointer": {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": "models/m/",
        "checkpoint_files": ["model.safetensors"],
        "recipe_checkpoint": None,
        "output_dir": "${output_dir}",
        "model_type": "LLAMA3_2",
    },
    "resume_from_checkpoint": False,
    "batch_size": 2,
    "epochs": 1,
    "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "lr": 2e-5},
    "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
    "max_steps_per_epoch": None,
    "gradient_accumulation_steps": 8,
    "clip_grad_norm": None,
    "device": "cuda",
    "dtype": "bf16",
    "enable_activation_checkpointing": True,
    "metric_logger": {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": "${output_dir}/logs",
    },
}
LORA = {
    "_component_": "torchtune.models.llama3_2.lora_llama3_2_1b",
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 64,
    "lora_alpha": 128,
    "lora_dropout": 0.0,
}
COSINE = {
    "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "num_warmup_steps": 100,
}
QUANTIZERS = "torchtune.training.quantization"
ROUNDING = f"{QUANTIZERS}.Int8DynActInt4WeightQATQuantizer"
SEVERAL: dict[str, Any] = {"fsdp_reshard_after_forward": True}


def imported(folder: Path, name: str = "own_single_device.yaml", workers: int | None = None, **changes: Any) -> Import:
    (folder / name).write_text(yaml.safe_dump({**PLAIN, **changes}))
    return import_files([folder / name], workers=workers)


def by_command(folder: Path, command: str, **changes: Any) -> Import:
    (folder / "own.yaml").write_text(yaml.safe_dump({**PLAIN, **changes}))
    (folder / "run.sh").write_text(command)
    return import_files([folder / "run.sh"])


def lost(found: Import) -> list[str]:
    return [entry.setting.shown for entry in found.entries if entry.verdict in ("not supported", "unknown")]


def test_a_recipe_of_all_weights_comes_over_whole(tmp_path: Path) -> None:
    found = imported(tmp_path)
    assert found.is_whole
    assert found.needs == ()
    (tmp_path / "config.yaml").write_text(found.text)
    config = read_config(tmp_path / "config.yaml", check_files=False)
    assert config.model == "models/m"
    assert found.tree["data"]["train"] == [{"path": "yahma/alpaca-cleaned", "format": "alpaca"}]
    assert (config.data.train_on, config.data.pack) == ("all", False)
    assert found.tree["batch"] == {"sequences": 16}
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.clip) == (2e-5, 0.01, 0.0)
    assert (optimizer.schedule, optimizer.warmup, optimizer.betas) == ("constant", 0, (0.9, 0.999))
    assert found.tree["memory"] == {"recompute": "full", "micro_batch": 2}
    assert found.tree["launch"] == {"workers": 1}
    assert config.output == "runs/tune"


def test_lora_has_the_layers_by_our_names(tmp_path: Path) -> None:
    found = imported(tmp_path, model=LORA, lr_scheduler=COSINE)
    assert found.is_whole
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert found.tree["adapter"] == {"rank": 64, "alpha": 128.0, "targets": targets, "dropout": 0.0}
    assert found.tree["optimizer"]["schedule"] == "cosine"
    assert (found.tree["optimizer"]["warmup"], found.tree["optimizer"]["warmup_from"]) == (100, "zero")


def test_ranks_that_are_not_said_are_the_builder_s(tmp_path: Path) -> None:
    model = {"_component_": "torchtune.models.llama2.qlora_llama2_7b", "lora_attn_modules": ["q_proj"]}
    assert imported(tmp_path, model=model).tree["adapter"] == {
        "rank": 8,
        "alpha": 16,
        "targets": ["q_proj"],
        "dropout": 0.0,
        "quantize": "nf4-double",
    }


def test_directions_and_lengths_apart_are_dora(tmp_path: Path) -> None:
    found = imported(tmp_path, model={**LORA, "use_dora": True})
    assert found.is_whole
    assert (found.tree["adapter"]["kind"], found.tree["adapter"]["rank"]) == ("dora", 64)
    assert "kind" not in imported(tmp_path, model={**LORA, "use_dora": False}).tree["adapter"]


def test_weights_are_rounded_as_its_quantizer_does(tmp_path: Path) -> None:
    quantizer = {"_component_": ROUNDING, "groupsize": 128}
    found = imported(tmp_path, quantizer=quantizer, fake_quant_after_n_steps=100)
    assert found.is_whole
    assert found.tree["quantize_aware"] == {"scheme": "int8-int4", "group_size": 128, "after_steps": 100}
    assert any("also rounds the head" in note for note in found.notes)
    by_default = imported(tmp_path, quantizer={"_component_": ROUNDING}, model=LORA)
    assert by_default.tree["quantize_aware"] == {"scheme": "int8-int4", "group_size": 256}
    assert any("the layers that have an addition" in note for note in by_default.notes)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"model": {**LORA, "use_dora": True, "lora_dropout": 0.1}}, ["model.use_dora"]),
        ({"model": {**LORA, "apply_lora_to_output": True}}, ["model.apply_lora_to_output"]),
        (
            {"model": {**LORA, "_component_": "torchtune.models.phi3.lora_phi3_mini"}},
            ["model.apply_lora_to_mlp", "model.lora_attn_modules"],
        ),
        ({"model": {"_component_": "mine.models.small"}}, ["model._component_"]),
        ({"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1}}, ["optimizer._component_"]),
        ({"loss": {"_component_": "mine.Loss"}}, ["loss._component_"]),
        ({"quantizer": {"_component_": f"{QUANTIZERS}.Int8DynActInt4WeightQuantizer"}}, ["quantizer._component_"]),
        ({"quantizer": {"_component_": f"{QUANTIZERS}.Int4WeightOnlyQATQuantizer"}}, ["quantizer._component_"]),
        ({"quantizer": {"_component_": ROUNDING, "groupsize": 512}}, ["quantizer.groupsize"]),
        ({"quantizer": {"_component_": ROUNDING, "padding_allowed": True}}, ["quantizer.padding_allowed"]),
        ({"dataset": {"_component_": "mine.rows"}}, ["dataset._component_"]),
        ({"resume_from_checkpoint": True}, ["resume_from_checkpoint"]),
        ({"tasks": ["truthfulqa_mc2"]}, ["tasks"]),
        ({"max_new_tokens": 300}, ["max_new_tokens"]),
        ({"ppo_epochs": 4}, ["ppo_epochs"]),
        ({"batch_sise": 2}, ["batch_sise"]),
    ],
)
def test_what_is_not_there_is_refused_by_name(changes: dict[str, Any], keys: list[str], tmp_path: Path) -> None:
    assert sorted(lost(imported(tmp_path, **changes))) == keys


@pytest.mark.parametrize("recipe", ["generate", "eleuther_eval", "quantize", "ppo_full_finetune_single_device", "mine"])
def test_recipes_of_something_else_are_refused(recipe: str, tmp_path: Path) -> None:
    assert lost(by_command(tmp_path, f"tune run {recipe} --config own.yaml")) == ["recipe"]


def test_several_devices_are_counted_by_the_command(tmp_path: Path) -> None:
    command = "tune run --nnodes 1 --nproc_per_node 4 lora_finetune_distributed --config own.yaml"
    found = by_command(tmp_path, command, model=LORA, fsdp_cpu_offload=True)
    assert found.is_whole
    assert found.tree["batch"] == {"sequences": 64}
    assert found.tree["launch"] == {"workers": 4}
    assert found.tree["memory"] == {"zero": 3, "optimizer_tier": "host", "recompute": "full", "micro_batch": 2}


def test_a_file_for_several_devices_does_not_say_how_many(tmp_path: Path) -> None:
    alone = imported(tmp_path, "own.yaml", **SEVERAL)
    assert [need.key for need in alone.needs] == ["batch.sequences"]
    told = imported(tmp_path, "own.yaml", workers=2, **SEVERAL)
    assert (told.needs, told.tree["batch"]["sequences"]) == ((), 32)


def test_words_of_the_command_count_before_the_file(tmp_path: Path) -> None:
    command = """tune run lora_finetune_single_device --config own.yaml model.lora_rank=4 ~lr_scheduler \\
        model.lora_attn_modules='[k_proj]' optimizer=bitsandbytes.optim.PagedAdamW8bit epochs=3 output_dir=runs/b"""
    found = by_command(tmp_path, command, model=LORA, lr_scheduler=COSINE)
    assert found.is_whole
    assert found.tree["adapter"]["rank"] == 4
    assert found.tree["adapter"]["targets"][0] == "k_proj"
    assert found.tree["optimizer"]["schedule"] == "constant"
    assert found.tree["memory"]["moments"] == "int8"
    assert (found.tree["epochs"], found.tree["output"]) == (3, "runs/b")


def test_words_of_the_command_name_other_rows(tmp_path: Path) -> None:
    command = """tune run full_finetune_single_device --config own.yaml dataset.split='train[:10%]' \
        dataset=torchtune.datasets.alpaca_cleaned_dataset"""
    rows = {"_component_": "torchtune.datasets.alpaca_dataset", "split": "train", "packed": False}
    found = by_command(tmp_path, command, dataset=rows)
    assert found.tree["data"]["train"] == [{"path": "yahma/alpaca-cleaned", "format": "alpaca", "first": 0.1}]
    assert len(found.conflicts) == 2
    assert not found.lost


def test_a_reference_to_nothing_is_left_open(tmp_path: Path) -> None:
    found = imported(tmp_path, output_dir="/runs/${name}")
    assert [need.key for need in found.needs] == ["output"]


def test_parts_of_a_split_are_trained_and_evaluated(tmp_path: Path) -> None:
    parts: dict[str, Any] = {
        "dataset": {**PLAIN["dataset"], "split": "train[:95%]"},
        "dataset_val": {"_component_": PLAIN["dataset"]["_component_"], "split": "train[95%:]"},
    }
    silent = imported(tmp_path, run_val_every_n_steps=None, **parts)
    assert silent.is_whole
    assert silent.tree["data"]["train"][0]["first"] == 0.95
    assert "validation" not in silent.tree["data"]
    found = imported(tmp_path, run_val_every_n_steps=50, **parts)
    assert found.is_whole
    assert found.tree["data"]["validation"] == 0.05
    assert "first" not in found.tree["data"]["train"][0]
    assert found.tree["evaluate"] == {"every": 50, "before": False}


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ({"_component_": "alpaca_dataset"}, {"path": "tatsu-lab/alpaca", "format": "alpaca"}),
        (
            {"_component_": "alpaca_dataset", "source": "json", "data_files": "a.json"},
            {"path": "a.json", "format": "alpaca"},
        ),
        (
            {"_component_": "instruct_dataset", "source": "a/b", "column_map": {"input": "q", "output": "completion"}},
            {"path": "a/b", "format": "completion", "columns": {"prompt": "q"}},
        ),
        (
            {"_component_": "samsum_dataset"},
            {
                "path": "Samsung/samsum",
                "format": "completion",
                "columns": {"prompt": "dialogue", "completion": "summary"},
            },
        ),
        (
            {
                "_component_": "chat_dataset",
                "source": "a/b",
                "conversation_column": "talk",
                "conversation_style": "sharegpt",
                "split": "test",
                "name": "main",
            },
            {
                "path": "a/b",
                "name": "main",
                "format": "sharegpt",
                "columns": {"messages": "talk"},
                "split": "test",
            },
        ),
        (
            {"_component_": "text_completion_dataset", "source": "a/b", "column": "body", "data_dir": "x"},
            {"path": "a/b", "format": "text", "files": ["x/*"], "columns": {"text": "body"}},
        ),
    ],
)
def test_data_sets_become_sources(dataset: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    found = imported(tmp_path, dataset={**dataset, "_component_": f"torchtune.datasets.{dataset['_component_']}"})
    assert found.is_whole, lost(found)
    assert found.tree["data"]["train"] == [expected]


def test_answers_alone_are_trained_where_inputs_are_not(tmp_path: Path) -> None:
    found = imported(tmp_path, dataset={**PLAIN["dataset"], "train_on_input": False})
    assert found.tree["data"]["train_on"] == "assistant"
    assert any("open an answer" in note for note in found.notes)


def test_packs_and_lengths(tmp_path: Path) -> None:
    tokenizer = {**PLAIN["tokenizer"], "max_seq_len": 4096}
    found = imported(tmp_path, tokenizer=tokenizer, dataset={**PLAIN["dataset"], "packed": True})
    data = found.tree["data"]
    assert (data["max_length"], data["over_length"], data["pack"]) == (4096, "truncate", True)
    refused = imported(tmp_path, tokenizer={**tokenizer, "truncation_type": "left"})
    assert lost(refused) == ["tokenizer.truncation_type"]


def test_pairs_become_dpo(tmp_path: Path) -> None:
    found = imported(
        tmp_path,
        dataset={"_component_": "torchtune.datasets.stack_exchange_paired_dataset"},
        loss={"_component_": "torchtune.rlhf.loss.DPOLoss", "label_smoothing": 0},
        ref_checkpointer={"checkpoint_dir": "models/m"},
        max_steps_per_epoch=1000,
    )
    assert found.is_whole, lost(found)
    assert found.tree["objective"] == {"kind": "dpo", "beta": 0.1}
    (source,) = found.tree["data"]["train"]
    assert source["columns"] == {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
    assert found.tree["steps"] == 1000
    assert "epochs" not in found.tree
    other = imported(
        tmp_path,
        dataset={"_component_": "torchtune.datasets.preference_dataset", "source": "a/b"},
        loss={"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.05},
        ref_checkpointer={"checkpoint_dir": "models/r/"},
    )
    assert other.tree["objective"] == {"kind": "dpo", "beta": 0.05, "reference": "models/r"}


def test_a_teacher_is_distilled_from(tmp_path: Path) -> None:
    found = imported(
        tmp_path,
        model=LORA,
        teacher_model={"_component_": "torchtune.models.llama3_1.llama3_1_8b"},
        teacher_checkpointer={"checkpoint_dir": "models/t/", "model_type": "LLAMA3"},
        kd_loss={"_component_": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"},
        kd_ratio=0.3,
    )
    assert found.is_whole, lost(found)
    assert found.tree["objective"] == {"kind": "distil", "teacher": "models/t", "supervised": 0.7}
    assert any("top_k" in note for note in found.notes)


def test_components_without_a_model_are_nobody_s(tmp_path: Path) -> None:
    (tmp_path / "part.yaml").write_text("optimizer: {_component_: torch.optim.AdamW}\n")
    with pytest.raises(UserError, match="torchtune"):
        import_files([tmp_path / "part.yaml"])


ALPACA = {
    True: "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request."
    "\n\n### Instruction:\nAdd.\n\n### Input:\n2 2\n\n### Response:\n",
    False: "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    "\n\n### Instruction:\nAdd.\n\n### Response:\n",
}
HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
EXPECTED = {
    "llama3": f"<s>{HEAD.format('user')}{{stripped}}<|eot_id|>{HEAD.format('assistant')}4<|eot_id|>",
    "qwen2": "<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n 4 \n<|im_end|>",
    "qwen3": "<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n 4 \n<|im_end|>",
    "gemma": "<s>{asked} 4 \n</s>",
    "llama2": "<s>[INST] {asked}  [/INST]  4 \n</s>",
    "mistral": "<s>[INST] {asked}  [/INST]  4 \n</s>",
    "phi3_mini": "<s><|user|>\n{asked}<|end|>\n<|assistant|>\n 4 \n<|end|>\n",
    "phi4": "<|im_start|>user<|im_sep|>{asked}<|im_end|><|im_start|>assistant<|im_sep|> 4 \n<|im_end|>",
}
"""Texts that torchtune's tokenizers were seen to write, where ``<s>`` and ``</s>`` begin and end a text."""


def rendered(text: str, messages: list[dict[str, Any]], *, opened: bool = False) -> str:
    return ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"}, {}).render(messages, opened=opened)


@pytest.mark.parametrize("has_input", [True, False])
@pytest.mark.parametrize("name", EXPECTED)
def test_alpaca_s_rows_are_written_as_the_tokenizer_does(name: str, has_input: bool) -> None:
    chat = CHAT_FORMATS[name]
    text = jinja(chat, PROMPTS.get(chat.prompt, PromptTemplate()), is_alpaca=True)
    row = {"role": "user", "content": "Add.\n\n2 2" if has_input else "Add.", "instruction": "Add."}
    messages = [row | {"input": "2 2" if has_input else ""}, {"role": "assistant", "content": " 4 \n"}]
    asked = ALPACA[has_input]
    expected = EXPECTED[name].format(asked=asked, stripped=asked.strip())
    assert rendered(text, messages) == expected
    opening = rendered(text, messages[:1], opened=True)
    assert expected.startswith(opening)
    assert expected.removeprefix(opening).lstrip().startswith("4")


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?  "},
    {"role": "assistant", "content": "1  "},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2"},
]


def test_conversations_of_several_turns() -> None:
    llama2 = jinja(CHAT_FORMATS["llama2"], PROMPTS["llama2"], is_alpaca=False)
    system = "<<SYS>>\n Be brief. \n<</SYS>>\n\n "
    assert rendered(llama2, CHAT) == (f"<s>[INST] {system}One?  [/INST] 1</s><s>[INST] {system}Two?  [/INST] 2</s>")
    qwen = jinja(CHAT_FORMATS["qwen2_5"], PromptTemplate(), is_alpaca=False)
    assert rendered(qwen, CHAT) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?  <|im_end|>\n<|im_start|>assistant\n"
        "1  <|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"
    )
    gemma = jinja(CHAT_FORMATS["gemma"], PromptTemplate(), is_alpaca=False, system="Be brief.")
    assert rendered(gemma, CHAT[1:]) == "<s>Be brief.One?1</s><s>Two?2</s>"


def test_prompt_templates_stand_inside_and_lose_their_ends_too(tmp_path: Path) -> None:
    question = NAMED["torchtune.data.QuestionAnswerTemplate"]
    llama3 = jinja(CHAT_FORMATS["llama3"], question, is_alpaca=False)
    expected = f"<s>{HEAD.format('user')}Question:Two?Answer:<|eot_id|>{HEAD.format('assistant')}2<|eot_id|>"
    assert rendered(llama3, CHAT[3:]) == expected
    tokenizer = {**PLAIN["tokenizer"], "prompt_template": {"user": ["Q: ", "\nA: "]}}
    dataset = {"_component_": "torchtune.datasets.instruct_dataset", "source": "a/b", "new_system_prompt": "Hi."}
    found = imported(tmp_path, tokenizer=tokenizer, dataset=dataset)
    assert found.is_whole, lost(found)
    assert found.tree["data"]["train"][0]["system"] == "drop"
    text = rendered(found.tree["data"]["template"], CHAT[3:])
    assert text.startswith(f"<s>{HEAD.format('system')}Hi.<|eot_id|>{HEAD.format('user')}Q:Two?A:<|eot_id|>")
    unknown = imported(tmp_path, tokenizer={**PLAIN["tokenizer"], "prompt_template": "mine.Template"}, dataset=dataset)
    assert lost(unknown) == ["tokenizer.prompt_template"]
