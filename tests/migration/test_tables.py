"""The tables: complete where their subject is installed, sound, and every mapped key is taken by a rule."""

from __future__ import annotations

import ast
import importlib.util
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tonnage.config import read_config
from tonnage.config.keys import all_keys
from tonnage.migration import import_files, page
from tonnage.migration.arguments import ARGUMENTS, TRL_ONLY
from tonnage.migration.convert import convert
from tonnage.migration.given import Given
from tonnage.migration.keys import Table
from tonnage.migration.page import TABLES
from tonnage.migration.reading import TRAINERS, Files
from tonnage.migration.sheet import NOT_TAKEN

TRL_FIELDS = """\
    learning_rate model_init_kwargs router_aux_loss_coef trust_remote_code chat_template_path dataset_text_field
    dataset_kwargs dataset_num_proc eos_token max_length truncation_mode shuffle_dataset packing packing_strategy
    padding_free pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss loss_type
    activation_offloading pad_token logging_steps gradient_checkpointing bf16 lr_scheduler_kwargs use_liger_kernel
    model_name_or_path model_revision dtype attn_implementation use_peft lora_r lora_alpha lora_dropout
    lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora load_in_8bit
    load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage dataset_name dataset_config
    dataset_train_split dataset_test_split dataset_streaming ignore_bias_buffers datasets streaming test_split_size
"""
"""Of SFTConfig, ModelConfig, ScriptArguments and DatasetMixtureConfig, TRL 1.10."""


def is_known(table: Table, name: str) -> bool:
    return table.find(name) is not None or table.has_section(name)


def training_arguments() -> dict[str, ast.expr | None]:
    """Fields of the installed ``TrainingArguments`` and what they are set to, read from the source."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0]) / "training_args.py"
    (found,) = [
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"
    ]
    return {
        node.target.id: node.value
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def test_every_field_of_the_installed_training_arguments_is_known() -> None:
    fields = training_arguments()
    assert len(fields) > 90
    assert [name for name in fields if not is_known(ARGUMENTS, name)] == []


def test_defaults_that_are_filled_in_are_those_of_the_installed_transformers(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python train.py --output_dir x")
    tree = import_files([tmp_path / "run.sh"]).tree
    filled_in = {
        "learning_rate": tree["optimizer"]["lr"],
        "weight_decay": tree["optimizer"]["weight_decay"],
        "adam_beta1": tree["optimizer"]["betas"][0],
        "adam_beta2": tree["optimizer"]["betas"][1],
        "adam_epsilon": tree["optimizer"]["eps"],
        "max_grad_norm": tree["optimizer"]["clip"],
        "lr_scheduler_type": tree["optimizer"]["schedule"],
        "warmup_steps": tree["optimizer"]["warmup"],
        "num_train_epochs": tree["epochs"],
        "per_device_train_batch_size": tree["batch"]["sequences"],
        "save_steps": tree["checkpoint"]["every"],
    }
    fields = training_arguments()
    for name, value in filled_in.items():
        call = fields[name]
        assert isinstance(call, ast.Call), name
        (default,) = [word.value for word in call.keywords if word.arg == "default"]
        assert ast.literal_eval(default) == value, name


OLD_NAMES = """\
    overwrite_output_dir evaluation_strategy per_gpu_train_batch_size per_gpu_eval_batch_size warmup_ratio logging_dir
    save_safetensors no_cuda use_mps_device jit_mode_eval use_ipex fp16_opt_level half_precision_backend tpu_num_cores
    tpu_metrics_debug past_index sharded_ddp fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap adafactor
    group_by_length use_legacy_prediction_loop include_inputs_for_metrics fp16_backend push_to_hub_model_id
    push_to_hub_organization push_to_hub_token mp_parameters torchdynamo ray_scope include_tokens_per_second
    dispatch_batches split_batches xpu_backend max_seq_length dataset_batch_size num_of_sequences chars_per_token
    use_liger torch_dtype gradient_checkpointing_use_reentrant use_flash_attention_2
"""


def test_names_of_earlier_versions_are_known() -> None:
    assert [name for name in OLD_NAMES.split() if not is_known(ARGUMENTS, name)] == []


def test_every_field_of_trl_is_known() -> None:
    assert [name for name in TRL_FIELDS.split() if not is_known(ARGUMENTS, name)] == []
    assert [name for name in TRL_ONLY if not is_known(ARGUMENTS, name)] == []


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_keys_are_described(table: Table) -> None:
    ours = {key.name for key in all_keys()}
    names = [key.name for key in table.keys]
    assert [name for name, group in groupby(sorted(names)) if len(list(group)) > 1] == []
    for key in table.keys:
        assert key.reason.endswith("."), key.name
        assert set(key.to) <= ours, key.name
        assert (key.verdict == "mapped") == bool(key.quantity), key.name
        assert not key.of or table.find(key.of) is not None, key.name


def test_the_page_is_up_to_date() -> None:
    written = Path(__file__).parents[2] / "docs" / "importing.md"
    assert written.read_text() == page.render(), "run: python -m tonnage.migration.page > docs/importing.md"


def test_unknown_keys_have_a_nearest_one() -> None:
    assert ARGUMENTS.nearest("learning_rat") == "learning_rate"
    assert TABLES[0].nearest("zero_optimization.stag") == "zero_optimization.stage"
    assert TABLES[0].nearest("zero_optimisation.overlap_com") == "zero_optimization.overlap_comm"


VALUES = st.one_of(
    st.sampled_from(
        [None, True, False, "auto", "", "no", "steps", "nvme", "cpu", "cosine", "bf16", "a/b", "<x>", "$X"]
    ),
    st.integers(-2, 2**40),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=8),
    st.lists(st.sampled_from(["wandb", "tensorboard", "full_shard", 0.9]), max_size=3),
)
NAMES = st.sampled_from(
    [(place, key.name) for place, table in enumerate(TABLES) for key in table.keys if not key.name.endswith("*")]
)


def stand_ins(tree: dict[str, Any]) -> list[str]:
    """Overrides for what every config must have."""
    has_rows = "train" in tree.get("data", {})
    return [*([] if "model" in tree else ["model=m"]), *([] if has_rows else ["data.train=rows.jsonl"])]


def account(pairs: list[tuple[tuple[Table, str], Any]], launcher: str, folder: Path) -> None:
    """Each key is in the account once, with a sentence; what comes out is a config if nothing is needed."""
    givens = tuple(
        Given(number, table, name, value, f"file{number % 2}", number % 5)
        for number, ((table, name), value) in enumerate(pairs)
    )
    found = convert(Files(givens, ("file0", "file1"), (launcher,) if launcher else ()))
    several = len({table for (table, _), _ in pairs} & set(TRAINERS)) > 1  # which is refused where files are read
    assert [entry.given.number for entry in found.entries] == list(range(len(givens)))
    for entry in found.entries:
        assert entry.note.endswith((".", "?")), entry
        assert entry.note != NOT_TAKEN or several, entry
    if {need.key for need in found.needs} <= {"model", "data.train", ""}:
        (folder / "config.yaml").write_text(found.text)
        read_config(folder / "config.yaml", stand_ins(found.tree), check_files=False)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    pairs=st.lists(st.tuples(NAMES, VALUES), max_size=12),
    launcher=st.sampled_from(["", "torchrun", "python", "accelerate"]),
)
def test_whatever_is_given_is_accounted_for_once(
    pairs: list[tuple[tuple[int, str], Any]], launcher: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    named = [((TABLES[place], name), value) for (place, name), value in pairs]
    account(named, launcher, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
@pytest.mark.parametrize("value", ["1", "auto", None, "no", True])
def test_each_key_by_itself(table: Table, value: Any, tmp_path: Path) -> None:
    for key in table.keys:
        account([((table, key.name), value)], "", tmp_path)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_all_keys_together(table: Table, tmp_path: Path) -> None:
    for value in ("1", "no", "steps", "2"):
        account([((table, key.name), value) for key in table.keys], "torchrun", tmp_path)
