"""Rows with images of Axolotl and LLaMA-Factory: what comes over, and what is refused by the key that asks for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tonnage.config import read_config
from tonnage.migration import Import, import_files
from tonnage.migration.images import in_text_model, names_tower

LAYERS = r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"
A: dict[str, Any] = {
    "base_model": "Qwen/Qwen2-VL-7B-Instruct",
    "processor_type": "AutoProcessor",
    "skip_prepare_dataset": True,
    "remove_unused_columns": False,
    "sample_packing": False,
    "chat_template": "qwen2_vl",
    "datasets": [
        {"path": "owner/pictures", "type": "chat_template", "split": "train[:1%]", "field_messages": "messages"}
    ],
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_target_modules": LAYERS,
    "micro_batch_size": 1,
    "learning_rate": 2e-4,
    "output_dir": "out",
}
WHOLE = {"adapter": None, "lora_r": None, "lora_alpha": None, "lora_target_modules": None}
F: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct",
    "finetuning_type": "full",
    "dataset": "seen,read",
    "template": "qwen2_vl",
    "image_max_pixels": 262144,
    "video_max_pixels": 16384,
    "freeze_vision_tower": True,
    "freeze_multi_modal_projector": True,
    "output_dir": "out",
}
TALK = {"formatting": "sharegpt", "columns": {"messages": "messages"}}
SEEN = {"file_name": "seen.json", "formatting": "sharegpt", "columns": {"messages": "messages", "images": "images"}}


def axolotl(folder: Path, **keys: Any) -> Import:
    (folder / "axolotl.yaml").write_text(yaml.safe_dump(A | keys))
    return import_files([folder / "axolotl.yaml"])


def factory(folder: Path, info: dict[str, Any] | None = None, **keys: Any) -> Import:
    (folder / "data").mkdir(exist_ok=True)
    known = {"seen": SEEN, "read": {"file_name": "read.json", **TALK}} | (info or {})
    (folder / "data" / "dataset_info.json").write_text(json.dumps(known))
    (folder / "factory.yaml").write_text(yaml.safe_dump(F | keys))
    return import_files([folder / "factory.yaml"])


def lost(account: Import) -> set[str]:
    return {entry.setting.name for entry in account.lost}


def whole(account: Import, folder: Path) -> dict[str, Any]:
    """The config of an import that lost nothing, which our own reader takes."""
    assert not lost(account), [(entry.setting.shown, entry.note) for entry in account.lost]
    assert account.is_whole
    assert not account.needs
    (folder / "config.yaml").write_text(account.text)
    read_config(folder / "config.yaml", (), check_files=False)
    return account.tree


def noted(account: Import) -> str:
    return "\n".join(account.notes)


def test_a_run_of_axolotl_with_images(tmp_path: Path) -> None:
    account = axolotl(tmp_path)
    tree = whole(account, tmp_path)
    assert tree["data"]["train"] == [{"path": "owner/pictures", "format": "messages", "first": 0.01}]
    assert (tree["data"]["template"], tree["data"]["train_on"], tree["data"]["pack"]) == ("auto", "assistant", False)
    assert tree["adapter"]["targets"][0] == "layers.*.mlp.up_proj"
    assert len(tree["adapter"]["targets"]) == 7
    assert "pip install 'tonnage[pictures]'" in noted(account)
    assert "first image of a column" in noted(account)
    assert "that a tower or projector has" not in noted(account)


@pytest.mark.parametrize(
    ("model", "name", "template", "train_on"),
    [
        ("google/gemma-3-4b-it", "gemma3", "auto", "assistant"),
        ("google/gemma-3n-E2B-it", "gemma3n", "auto", "assistant"),
        ("google/gemma-4-E2B-it", "gemma4", "auto", "assistant"),
        ("mistral-community/pixtral-12b", "pixtral", "auto", "assistant"),
        ("Qwen/Qwen3.5-9B", "qwen3_5", "auto", "assistant"),
        ("llava-hf/llava-1.5-7b-hf", "llava", "auto", "all"),
        ("owner/of-nobody", None, "auto", "all"),
        ("PaddlePaddle/PaddleOCR-VL", None, "auto", "assistant"),
        ("owner/of-nobody", "gemma3", "", "assistant"),
        ("owner/of-nobody", "chatml", "", "all"),
        ("owner/of-nobody", "qwen_25", "", "all"),
    ],
)
def test_templates_and_what_is_trained(
    model: str, name: str | None, template: str, train_on: str, tmp_path: Path
) -> None:
    account = axolotl(tmp_path, base_model=model, chat_template=name)
    assert lost(account) == (set() if template else {"chat_template"})
    assert account.tree["data"].get("template", "") == template
    assert account.tree["data"]["train_on"] == train_on
    assert (
        ("knows no turns" in account.text)
        == ("write data.train_on: assistant" in noted(account))
        == (train_on == "all")
    )


def test_what_axolotl_does_not_mask_is_trained_whatever_it_is_told(tmp_path: Path) -> None:
    unknown: dict[str, Any] = {"base_model": "owner/of-nobody", "chat_template": None}
    assert whole(axolotl(tmp_path, **unknown, train_on_inputs=False), tmp_path)["data"]["train_on"] == "all"
    borders = [{"role": "assistant", "start": "<a>", "end": "</a>"}]
    assert whole(axolotl(tmp_path, **unknown, role_boundaries=borders), tmp_path)["data"]["train_on"] == "assistant"
    assert whole(axolotl(tmp_path, train_on_inputs=True), tmp_path)["data"]["train_on"] == "all"


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"image_size": 512}, "image_size"),
        ({"image_resize_algorithm": "bilinear"}, "image_resize_algorithm"),
        ({"processor_kwargs": {"max_pixels": 9}}, "processor_kwargs.max_pixels"),
        ({"processor_type": "VoxtralProcessor"}, "processor_type"),
        ({"rl": "dpo", "datasets": [{"path": "owner/pairs", "type": "chat_template.default"}]}, "processor_type"),
        ({"datasets": [{"path": "owner/text-audio-2k", "type": "chat_template"}]}, "processor_type"),
        ({"datasets": [{"path": "owner/videos", "type": "chat_template"}]}, "processor_type"),
        (
            {"lora_target_modules": r"model\.visual\.blocks\.\d+\.attn\.qkv", "lora_dropout": 0.1},
            "lora_target_modules",
        ),
    ],
)
def test_what_axolotl_asks_of_images_and_is_not_there(keys: dict[str, Any], key: str, tmp_path: Path) -> None:
    assert lost(axolotl(tmp_path, **keys)) == {key}


def test_towers_are_trained_as_axolotl_does_unless_it_freezes_them(tmp_path: Path) -> None:
    for keys in ({}, {"freeze_mm_modules": False}):
        assert whole(axolotl(tmp_path, **WHOLE, **keys), tmp_path)["train"] == ["*", "tower.*"]
    assert not {"adapter", "train"} & set(whole(axolotl(tmp_path, **WHOLE, freeze_mm_modules=True), tmp_path))
    for pattern in ("model.layers.3.*", "model.visual.merger.*"):
        tree = whole(axolotl(tmp_path, **WHOLE, unfrozen_parameters=[pattern]), tmp_path)
        assert tree["train"] == [pattern.removesuffix(".*") + "*"]
    both = r"model\.(language_model\.layers|visual\.blocks)\.\d+\.attn\.(q|qkv)"
    targets = whole(axolotl(tmp_path, lora_target_modules=both, lora_dropout=0), tmp_path)["adapter"]["targets"]
    assert {"layers.*.attn.q", "model.visual.blocks.*.attn.qkv"} <= set(targets)
    account = axolotl(tmp_path, lora_target_modules=["q_proj", "v_proj"])
    assert whole(account, tmp_path)["adapter"]["targets"] == ["q_proj", "v_proj"]
    assert "that a tower or projector has" in noted(account)


def test_keys_of_images_mean_nothing_beside_rows_of_text(tmp_path: Path) -> None:
    text: dict[str, Any] = {
        "processor_type": None,
        "image_size": 512,
        "freeze_mm_modules": True,
        "processor_kwargs": {"a": 1},
    }
    towers = r"model\.(language_model|visual)\.layers\.\d+\.q_proj"
    account = axolotl(tmp_path, **text, role_boundaries=[{"role": "user"}], lora_target_modules=towers)
    tree = whole(account, tmp_path)
    assert tree["adapter"]["targets"] == ["layers.*.q_proj"]
    assert "pictures" not in noted(account)
    account = factory(tmp_path, dataset="read", image_max_pixels=9, freeze_vision_tower=False, media_dir="m")
    assert "image_max_pixels" not in whole(account, tmp_path)["data"]
    assert "pictures" not in noted(account)


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("model.language_model.layers.*.q_proj", "layers.*.q_proj"),
        ("language_model.model.layers.*.q_proj", "layers.*.q_proj"),
        ("model.text_model.layers.0.mlp.up_proj", "layers.0.mlp.up_proj"),
        ("base_model.model.model.language_model.layers.0", "layers.0"),
        ("model.layers.*.q_proj", "model.layers.*.q_proj"),
        ("language_models.x", "language_models.x"),
    ],
)
def test_names_in_the_whole_of_a_model(name: str, inner: str) -> None:
    assert in_text_model(name) == inner
    assert not names_tower(name)
    assert names_tower("model.vision_tower.encoder.layers.0.q_proj")


@pytest.mark.parametrize(
    ("model", "names", "targets"),
    [
        ("LiquidAI/LFM2-VL-450M", LAYERS, [f"layers.*.self_attn.{name}_proj" for name in "qkv"]),
        ("owner/Mistral-Small-4-119B", LAYERS, ["layers.*.self_attn.o_proj"]),
        ("zai-org/GLM-4.6V-Flash", ["gate_proj", "down_proj", "q_proj"], ["down_proj", "q_proj"]),
    ],
)
def test_layers_that_a_family_lacks_are_not_named(
    model: str, names: str | list[str], targets: list[str], tmp_path: Path
) -> None:
    account = axolotl(tmp_path, base_model=model, chat_template=None, lora_target_modules=names)
    assert whole(account, tmp_path)["adapter"]["targets"] == targets
    assert "gate_proj" in noted(account)
    assert "PEFT passes over these names" in noted(account)


def test_a_run_of_llama_factory_with_images(tmp_path: Path) -> None:
    account = factory(tmp_path)
    tree = whole(account, tmp_path)
    folder = tmp_path / "data"
    assert tree["data"]["train"] == [
        {"path": f"{folder}/seen.json", "format": "messages"},
        {"path": f"{folder}/read.json", "format": "messages"},
    ]
    assert (tree["data"]["image_min_pixels"], tree["data"]["image_max_pixels"]) == (1024, 262144)
    assert tree["data"]["template"] == "auto"
    assert "pip install 'tonnage[pictures]'" in noted(account)
    assert "here it is left out" in noted(account)
    assert whole(factory(tmp_path, image_max_pixels=None), tmp_path)["data"]["image_max_pixels"] == 589824


@pytest.mark.parametrize(
    ("entry", "keys", "source"),
    [
        ({"file_name": "deep/seen.json"}, {}, {"path": "{}/deep/seen.json", "images": "{}"}),
        ({}, {"media_dir": "/pictures"}, {"path": "{}/seen.json", "images": "/pictures"}),
        ({"hf_hub_url": "a/b"}, {}, {"path": "a/b"}),
        (
            {"columns": {"messages": "messages", "images": "photo"}},
            {},
            {"path": "{}/seen.json", "columns": {"images": "photo"}},
        ),
        ({"columns": {"messages": "messages", "images": "image"}}, {}, {"path": "{}/seen.json"}),
    ],
)
def test_where_images_are(entry: dict[str, Any], keys: dict[str, Any], source: dict[str, Any], tmp_path: Path) -> None:
    tree = whole(factory(tmp_path, {"seen": SEEN | entry}, **keys), tmp_path)
    filled = {
        name: value.format(tmp_path / "data") if isinstance(value, str) else value for name, value in source.items()
    }
    assert tree["data"]["train"][0] == {"format": "messages"} | filled


@pytest.mark.parametrize(
    ("entry", "keys", "key"),
    [
        ({"columns": {"messages": "messages", "videos": "videos"}}, {}, "dataset"),
        ({"columns": {"messages": "messages", "images": "images", "audios": "audios"}}, {}, "dataset"),
        (
            {"columns": {"chosen": "a", "rejected": "b", "images": "images"}, "ranking": True},
            {"stage": "dpo"},
            "dataset",
        ),
        ({}, {"freeze_vision_tower": False}, "freeze_vision_tower"),
        ({}, {"freeze_multi_modal_projector": False}, "freeze_multi_modal_projector"),
        ({}, {"freeze_vision_tower": False, "finetuning_type": "freeze"}, "freeze_vision_tower"),
        ({}, {"freeze_language_model": True}, "freeze_language_model"),
        ({}, {"image_do_pan_and_scan": True}, "image_do_pan_and_scan"),
        ({}, {"crop_to_patches": True}, "crop_to_patches"),
        ({}, {"template": "gemma3"}, "template"),
        ({}, {"template": "moss_vl"}, "template"),
    ],
)
def test_what_llama_factory_asks_of_images_and_is_not_there(
    entry: dict[str, Any], keys: dict[str, Any], key: str, tmp_path: Path
) -> None:
    assert lost(factory(tmp_path, {"seen": SEEN | entry}, **{"dataset": "seen", **keys})) == {key}


def test_towers_are_trained_as_llama_factory_does_when_told(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}
    assert whole(factory(tmp_path, **keys), tmp_path)["train"] == ["*", "tower.*"]
    assert lost(factory(tmp_path, **keys, finetuning_type="lora")) == set(keys)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_nothink"])
def test_templates_of_qwen3_vl_are_the_model_s_own(name: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct", "template": name}
    assert whole(factory(tmp_path, **keys), tmp_path)["data"]["template"] == "auto"


def test_layers_are_not_divided_beside_images(tmp_path: Path) -> None:
    axes: dict[str, Any] = {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "gradient_accumulation_steps": 2,
    }
    tree = whole(factory(tmp_path, **axes), tmp_path)
    assert (tree["parallel"], tree["launch"]["workers"]) == ({"pipeline": 2}, 2)
    text = whole(factory(tmp_path, **axes, dataset="read"), tmp_path)
    assert (text["parallel"], text["launch"]["workers"]) == ({"tensor": 4, "pipeline": 2}, 8)
