"""Runs that learn from pairs of answers: each loss, each way to name rows, and what is refused or differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from imported import FACTORY, WORDS, axolotl, factory, lost, trl, whole
from tonnage.migration import import_files
from tonnage.migration.convert import convert
from tonnage.migration.draft import NOT_TAKEN
from tonnage.migration.keys import ARGUMENTS as TRAINER
from tonnage.migration.keys import AXOLOTL as AXOLOTL_KEYS
from tonnage.migration.keys import LLAMA_FACTORY, Table
from tonnage.migration.reading import Files
from tonnage.migration.settings import RANK_ARGUMENTS, ForeignSetting

HANDBOOK: dict[str, Any] = {
    "model_name_or_path": "alignment-handbook/zephyr-7b-sft-full",
    "dataset_mixer": {"HuggingFaceH4/ultrafeedback_binarized": 1.0, "o/p.q": 0.5},
    "dataset_splits": ["train_prefs", "test_prefs"],
    "beta": 0.01,
    "do_eval": True,
    "eval_strategy": "steps",
    "eval_steps": 100,
    "gradient_accumulation_steps": 2,
    "learning_rate": 5e-7,
    "max_length": 1024,
    "max_prompt_length": 512,
    "output_dir": "out",
    "per_device_train_batch_size": 8,
    "seed": 42,
}
"""As zephyr-7b-beta's, of 2024, but for a second data set."""
OF_TRL = """\
    learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout dataset_num_proc max_length
    truncation_mode padding_free pad_to_multiple_of precompute_ref_log_probs precompute_ref_batch_size loss_type
    loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef label_smoothing beta use_weighting discopop_tau
    activation_offloading sync_ref_model ref_model_mixup_alpha ref_model_sync_steps pad_token max_completion_length
    cpo_alpha simpo_gamma alpha generate_during_eval is_encoder_decoder padding_value
    max_prompt_length max_target_length label_pad_token_id model_adapter_name ref_adapter_name reference_free
    force_use_ref_model rpo_alpha use_logits_to_keep use_num_logits_to_keep use_liger_loss
"""
"""Fields of DPOConfig, CPOConfig and ORPOConfig of TRL 1.16, and in the last lines those of earlier versions."""


def test_every_field_of_trl_s_configurations_for_pairs_is_known() -> None:
    assert [name for name in OF_TRL.split() if TRAINER.find(name) is None and not TRAINER.has_section(name)] == []


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        ("dpo", "", {"kind": "dpo", "beta": 0.1}),
        ("dpo", "--beta 0.05 --loss_type sigmoid", {"kind": "dpo", "beta": 0.05}),
        ("dpo", "--loss_type hinge", {"kind": "hinge", "beta": 0.1}),
        ("dpo", "--loss_type ipo --beta 0.5", {"kind": "ipo", "beta": 0.5}),
        ("dpo", "--loss_type sigmoid_norm --beta 2", {"kind": "dpo", "beta": 2.0, "per_token": True}),
        ("dpo", "--loss_type sigmoid sft --loss_weights 1.0 0.2", {"kind": "dpo", "beta": 0.1, "supervised": 0.2}),
        ("dpo", "--loss_type sft ipo", {"kind": "ipo", "beta": 0.1, "supervised": 1.0}),
        ("dpo", "--loss_type sigmoid sft --loss_weights 2 1", {"kind": "dpo", "beta": 0.1, "supervised": 0.5}),
        ("dpo", "--ref_model other/model", {"kind": "dpo", "beta": 0.1, "reference": "other/model"}),
        ("dpo", "--rpo_alpha 0.3", {"kind": "dpo", "beta": 0.1, "supervised": 0.3}),
        ("dpo", "--label_smoothing 0.1", {"kind": "dpo", "beta": 0.1, "label_smoothing": 0.1}),
        ("dpo", "--label_smoothing 0.1 --loss_type ipo", {"kind": "ipo", "beta": 0.1}),
        ("orpo", "--beta 0.2", {"kind": "orpo", "beta": 0.2}),
        ("cpo", "--loss_type simpo --cpo_alpha 0", {"kind": "simpo", "beta": 0.1, "margin": 0.5, "supervised": 0.0}),
        (
            "cpo",
            "--loss_type simpo --beta 2.5 --simpo_gamma 1.4",
            {"kind": "simpo", "beta": 2.5, "margin": 1.4, "supervised": 1.0},
        ),
    ],
)
def test_losses_of_trl(command: str, words: str, expected: dict[str, Any], tmp_path: Path) -> None:
    found = trl(words, command)
    assert found.tree["objective"] == expected
    assert whole(found, tmp_path).objective.kind == expected["kind"]


@pytest.mark.parametrize(
    ("command", "words", "name"),
    [
        *(
            ("dpo", f"--loss_type {loss}", "loss_type")
            for loss in (
                *("exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero"),
                *("apo_down", "discopop", "kto_pair", "of_nobody", "sft", "sigmoid bco_pair sft"),
            )
        ),
        ("dpo", "--loss_type sigmoid sft --loss_weights 1", "loss_weights"),
        ("cpo", "--beta 0.1", "trl"),
        ("cpo", "--loss_type hinge", "loss_type"),
        ("cpo", "--loss_type alphapo", "loss_type"),
        ("cpo", "--loss_type simpo --alpha 0.25", "alpha"),
        ("cpo", "--loss_type simpo --label_smoothing 0.1", "label_smoothing"),
        ("orpo", "--rpo_alpha 0.1", "rpo_alpha"),
        ("dpo", "--reference_free", "reference_free"),
        ("dpo", "--sync_ref_model", "sync_ref_model"),
        ("dpo", "--f_divergence_type js_divergence", "f_divergence_type"),
        ("dpo", "--ld_alpha 0", "ld_alpha"),
        ("dpo", "--ld_alpha 0.5", "ld_alpha"),
        ("dpo", "--use_weighting", "use_weighting"),
        ("dpo", "--label_smoothing 0.6", "label_smoothing"),
        ("dpo", "--bet 0.2", "bet"),
        ("dpo", "--num_generations 4", "num_generations"),
    ],
)
def test_what_trl_does_with_pairs_and_is_not_there_is_refused_by_name(command: str, words: str, name: str) -> None:
    found = trl(words, command)
    assert name in lost(found)
    assert lost(found)[name].endswith((".", "?"))
    assert "train_on" not in found.tree["data"]  # what --partial writes is no supervised run in disguise


def test_defaults_are_those_of_trl_s_dpo(tmp_path: Path) -> None:
    config = whole(trl(""), tmp_path)
    assert (config.optimizer.lr, config.objective.beta, config.epochs) == (1e-6, 0.1, 3)
    assert (config.data.max_length, config.data.over_length, config.data.pack) == (2048, "drop", False)
    assert (config.data.train_on, config.precision, config.memory.recompute) == ("assistant", "bf16", "full")
    assert config.packs_per_step == 8
    assert config.router_loss == "model"
    assert whole(trl("", "orpo"), tmp_path).router_loss == "auto"
    assert "trl 1.16" in trl("").text.lower()


def test_a_step_has_as_many_pairs_as_there(tmp_path: Path) -> None:
    words = "--per_device_train_batch_size 2 --gradient_accumulation_steps 8 --max_steps 1000 --max_length 1536"
    config = whole(trl(f"{words} --eval_strategy steps --eval_steps 50 --no_remove_unused_columns"), tmp_path)
    assert (config.packs_per_step, config.steps, config.data.max_length) == (16, 1000, 3072)
    assert isinstance(config.data.validation, tuple)
    assert config.data.validation[0].split == "test"


@pytest.mark.parametrize(
    ("words", "dropout"),
    [("", 0.0), ("--lora_dropout 0.1", 0.0), ("--disable_dropout False --lora_dropout 0.1", 0.1)],
)
def test_an_adapter_has_no_dropout_where_the_other_program_switches_it_off(
    words: str, dropout: float, tmp_path: Path
) -> None:
    found = trl(f"--use_peft --lora_r 32 --lora_alpha 16 {words}")
    assert whole(found, tmp_path)
    assert found.tree["adapter"]["dropout"] == dropout


@pytest.mark.parametrize(
    "words",
    [
        "--precompute_ref_log_probs --precompute_ref_batch_size 4 --generate_during_eval --padding_free",
        "--ref_model a/b --f_divergence_type reverse_kl --ld_alpha 1.0 --max_prompt_length 512",
        "--truncation_mode keep_end --max_completion_length 256 --disable_dropout True --is_encoder_decoder False",
        "--loss_weights 1.0 --reference_free False --use_weighting False --label_pad_token_id -100",
    ],
)
def test_keys_that_leave_the_loss_as_it_is_stop_no_import(words: str, tmp_path: Path) -> None:
    whole(trl(words), tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "python trl/scripts/dpo.py",
        "uv run trl/scripts/dpo.py",
        "python examples/scripts/dpo.py",
        "accelerate launch --num_processes 1 scripts/run_dpo.py",
        "torchrun --nproc_per_node 1 -m trl.scripts.dpo",
        "python train_dpo.py",
    ],
)
def test_scripts_for_pairs_are_told_by_name(command: str, tmp_path: Path) -> None:
    found = import_files(
        [f"{command} --model_name_or_path a/b --dataset_name c/d --output_dir out --beta 0.3"], workers=1
    )
    assert whole(found, tmp_path).objective.beta == 0.3
    assert found.tree["optimizer"]["lr"] == 1e-6
    assert found.program.startswith("TRL")
    orpo = import_files(
        [f"{command.replace('dpo', 'orpo')} --model_name_or_path a/b --dataset_name c/d --output_dir o"]
    )
    assert orpo.tree["objective"]["kind"] == "orpo"


@pytest.mark.parametrize(
    ("script", "does"),
    [
        ("bco", "KTO"),
        ("prm", "reward model of steps"),
        ("grpo", "tonnage.Session"),
        ("ppo", "tonnage.Session"),
        ("rloo", "tonnage.Session"),
        ("dpo_online", "tonnage.Session"),
        ("nash_md", "tonnage.Session"),
        ("run_simpo", "TRL's dpo, orpo, cpo and kto are"),
        ("gkd", "distillation"),
        ("dpo_vlm", "images"),
    ],
)
def test_other_scripts_are_refused_with_what_there_is(script: str, does: str) -> None:
    found = import_files([f"python examples/scripts/{script}.py {WORDS} --beta 0.1"])
    assert does in lost(found)["script"]
    assert "beta" in lost(found)
    assert "objective" not in found.tree


def test_a_recipe_of_alignment_handbook_needs_its_script(tmp_path: Path) -> None:
    path = tmp_path / "config_full.yaml"
    path.write_text(yaml.safe_dump(HANDBOOK))
    alone = import_files([path], workers=1)
    assert set(lost(alone)) == {"beta", "max_prompt_length"}
    assert "trl dpo --config FILE" in lost(alone)["beta"]
    found = import_files([f"accelerate launch --num_processes 8 scripts/run_dpo.py {path}"])
    config = whole(found, tmp_path)
    assert (config.objective.kind, config.objective.beta, config.optimizer.lr) == ("dpo", 0.01, 5e-7)
    assert (config.packs_per_step, config.data.max_length) == (128, 2048)
    assert found.tree["data"]["train"] == [
        {"path": "HuggingFaceH4/ultrafeedback_binarized", "split": "train_prefs"},
        {"path": "o/p.q", "split": "train_prefs", "first": 0.5},
    ]
    assert [source["split"] for source in found.tree["data"]["validation"]] == ["test_prefs", "test_prefs"]
    assert any("prompts to a length of their own" in note for note in found.notes)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"dataset_mixer": {"c/d": 0}}, "dataset_mixer.c/d"),
        ({"dataset_splits": ["test_prefs"]}, "dataset_splits"),
        ({"dataset_splits": ["train_prefs", "train_sft"]}, "dataset_splits"),
        ({"dataset_splits": ["train_prefs", "others"]}, "dataset_splits"),
        ({"dataset_configs": ["main"]}, "dataset_configs"),
    ],
)
def test_a_list_of_data_sets_of_which_not_all_can_be_trained_on_is_refused(
    keys: dict[str, Any], name: str, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(HANDBOOK | keys))
    assert name in lost(import_files([f"trl dpo --config {tmp_path / 'recipe.yaml'} --num_processes 1"]))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rl": "dpo"}, {"kind": "dpo", "beta": 0.1}),
        ({"rl": "dpo", "rl_beta": 0.2, "dpo_use_logits_to_keep": True}, {"kind": "dpo", "beta": 0.2}),
        ({"rl": "dpo", "dpo_beta": 0.3}, {"kind": "dpo", "beta": 0.3}),
        ({"rl": "dpo", "trl": {"beta": 0.4}}, {"kind": "dpo", "beta": 0.4}),
        ({"rl": "dpo", "dpo_label_smoothing": 0.1}, {"kind": "dpo", "beta": 0.1, "label_smoothing": 0.1}),
        ({"rl": "dpo", "rpo_alpha": 0.5}, {"kind": "dpo", "beta": 0.1, "supervised": 0.5}),
        ({"rl": "dpo", "dpo_norm_loss": True}, {"kind": "dpo", "beta": 0.1, "per_token": True}),
        ({"rl": "dpo", "dpo_loss_type": ["ipo"]}, {"kind": "ipo", "beta": 0.1}),
        (
            {"rl": "dpo", "dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [1.0, 0.1]},
            {"kind": "dpo", "beta": 0.1, "supervised": 0.1},
        ),
        ({"rl": "ipo", "dpo_label_smoothing": 0.1}, {"kind": "ipo", "beta": 0.1}),
        (
            {"rl": "orpo", "orpo_alpha": 0.15, "datasets": [{"path": "c/d", "type": "chat_template.argilla"}]},
            {"kind": "orpo", "beta": 0.15},
        ),
        (
            {"rl": "simpo", "rl_beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
            {"kind": "simpo", "beta": 2.0, "margin": 1.0, "supervised": 0.0},
        ),
        (
            {"rl": "simpo", "simpo_gamma": 0.5},
            {"kind": "simpo", "beta": 0.1, "margin": 0.5, "supervised": 1.0},
        ),
    ],
)
def test_losses_of_axolotl(keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    found = axolotl(tmp_path, **keys)
    assert found.tree["objective"] == expected
    config = whole(found, tmp_path)
    assert (config.packs_per_step, config.data.max_length, config.data.over_length) == (8, 2000, "drop")
    assert (config.data.pack, config.data.train_on) == (False, "assistant")


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"rl": "dpo", "dpo_loss_type": ["robust"]}, "dpo_loss_type"),
        ({"rl": "dpo", "dpo_use_weighting": True}, "dpo_use_weighting"),
        ({"rl": "dpo", "reward_model": True}, "reward_model"),
        *(({"rl": word}, "rl") for word in ("kto_pair", "grpo", "gdpo", "ebft", "bco", "of_nobody")),
        ({"rl": "dpo", "datasets": [{"path": "c/d", "type": "zephyr.nectar"}]}, "datasets.0.type"),
        ({"rl": "dpo", "datasets": [{"path": "c/d", "type": "alpaca"}]}, "datasets.0.type"),
        ({"rl": "dpo", "datasets": [{"path": "c/d", "type": "chatml.ultra", "x": 1}]}, "datasets.0.x"),
        (
            {"rl": "dpo", "datasets": [{"path": "c/d", "type": {"prompt_format": "{prompt} {other}"}}]},
            "datasets.0.type.prompt_format",
        ),
        (
            {"rl": "dpo", "datasets": [{"path": "c/d", "type": {"chosen_format": "{chosen}!"}}]},
            "datasets.0.type.chosen_format",
        ),
        ({"rl": "dpo", "datasets": [{"path": "c/d", "type": {"format": "x"}}]}, "datasets.0.type.format"),
        (
            {
                "rl": "dpo",
                "datasets": [{"path": "a/b", "type": "chatml.icr"}, {"path": "c/d", "type": "llama3.icr"}],
            },
            "datasets.1.type",
        ),
        ({"datasets": [{"path": "c/d", "type": "chatml.intel"}]}, "datasets.0.type"),
        ({"datasets": [{"path": "c/d", "type": "chat_template", "field_chosen": "good"}]}, "datasets.0.field_chosen"),
    ],
)
def test_what_axolotl_does_with_pairs_and_is_not_there_is_refused_by_name(
    keys: dict[str, Any], name: str, tmp_path: Path
) -> None:
    assert name in lost(axolotl(tmp_path, **keys))


def test_a_loss_that_is_not_there_leaves_the_kind_open_and_nothing_besides() -> None:
    found = trl("--loss_type apo_zero --beta 0.05")
    assert [need.key for need in found.needs] == ["objective.kind"]
    assert found.tree["objective"] == {"beta": 0.05}


def test_simpo_of_axolotl_needs_its_gamma(tmp_path: Path) -> None:
    found = axolotl(tmp_path, rl="simpo")
    assert [need.key for need in found.needs] == ["objective.margin"]


@pytest.mark.parametrize(
    ("data_set", "source", "template"),
    [
        ({"type": "chatml.intel"}, {"columns": {"prompt": "question"}}, "chatml"),
        ({"type": "chatml.icr"}, {"columns": {"prompt": "input"}}, "chatml"),
        ({"type": "chatml.ultra"}, {}, "chatml"),
        ({"type": "chatml.argilla"}, {}, "chatml"),
        ({"type": "chatml.prompt_pairs"}, {}, "chatml"),
        ({"type": "llama3.intel"}, {"columns": {"prompt": "question"}}, "llama3"),
        ({"type": "llama3.icr"}, {"columns": {"prompt": "input"}}, "llama3"),
        ({"type": "llama3.ultra"}, {}, "llama3"),
        ({"type": "llama3.argilla_chat"}, {}, "llama3"),
        (
            {
                "type": "chat_template.default",
                "field_messages": "conversation",
                "field_chosen": "good",
                "field_rejected": "rejected",
                "message_property_mappings": {"role": "role", "content": "content"},
                "roles": {"user": ["user"], "assistant": ["helper"]},
            },
            {"roles": {"helper": "assistant"}, "columns": {"messages": "conversation", "chosen": "good"}},
            "auto",
        ),
        ({"type": "chat_template.argilla_chat"}, {}, "auto"),
        ({"type": "chat_template.default", "chat_template": "chatml"}, {}, "chatml"),
        ({"type": "passthrough"}, {}, "auto"),
        ({}, {}, "auto"),
        ({"type": "chatml.ultra", "split": "train[:1%]"}, {"first": 0.01}, "chatml"),
    ],
)
def test_rows_of_axolotl(data_set: dict[str, Any], source: dict[str, Any], template: str, tmp_path: Path) -> None:
    found = axolotl(tmp_path, rl="dpo", datasets=[{"path": "c/d", **data_set}])
    assert found.tree["data"]["train"] == [{"path": "c/d", "format": "auto", **source}]
    assert found.tree["data"]["template"] == template
    whole(found, tmp_path)


@pytest.mark.parametrize(
    ("name", "prompt", "answer"),
    [
        (
            "chatml",
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n",
            "a<|im_end|>",
        ),
        (
            "llama3",
            "<|start_header_id|>system<|end_header_id|>\n\ns<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
            "q<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
            "a<|eot_id|>",
        ),
    ],
)
def test_built_in_templates_have_the_text_of_axolotl_s_types(name: str, prompt: str, answer: str) -> None:
    from jinja2 import Template

    from tonnage.data.text import choice

    text = (Path(choice.__file__).parent / "templates" / f"{name}.jinja").read_text()
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert Template(text).render(messages=asked, add_generation_prompt=True) == prompt
    whole_text = Template(text).render(messages=[*asked, {"role": "assistant", "content": "a"}])
    assert whole_text.rstrip("\n") == prompt + answer


def test_types_with_a_template_of_their_own_leave_chat_template_to_later(tmp_path: Path) -> None:
    found = axolotl(tmp_path, rl="dpo", chat_template="tokenizer_default")
    assert found.tree["data"]["template"] == "chatml"
    whole(found, tmp_path)


@pytest.mark.parametrize("is_old", [False, True])
def test_formats_that_axolotl_s_configuration_writes_out(is_old: bool, tmp_path: Path) -> None:
    from jinja2 import Template

    parts = {
        "field_prompt": "question",
        "prompt_format": "[S]{system}[/S][U]{prompt}[/U]",
        "chosen_format": "{chosen}[E]",
        "rejected_format": "{rejected}[E]",
    }
    data_set = {"type": "user_defined.default", **parts} if is_old else {"type": parts}
    found = axolotl(tmp_path, rl="dpo", datasets=[{"path": "c/d", **data_set}])
    config = whole(found, tmp_path)
    assert found.tree["data"]["train"] == [{"path": "c/d", "format": "auto", "columns": {"prompt": "question"}}]
    assert config.data.control_tokens == "keep"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    template = Template(config.data.template)
    assert template.render(messages=messages, eos_token="</s>") == "[S][/S][U]a[/U]b[E]"
    system = [{"role": "system", "content": "s"}, *messages]
    assert template.render(messages=system, eos_token="</s>") == "[S]s[/S][U]a[/U]b[E]"


def test_texts_without_formats_are_shown_as_they_are(tmp_path: Path) -> None:
    from jinja2 import Template

    found = axolotl(tmp_path, rl="dpo", datasets=[{"path": "c/d", "type": {"field_prompt": "prompt"}}])
    config = whole(found, tmp_path)
    assert config.data.train[0].system == "drop"
    messages = [{"role": "user", "content": "a "}, {"role": "assistant", "content": "b"}]
    assert Template(config.data.template).render(messages=messages, eos_token="</s>") == "a b</s>"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"kind": "dpo", "beta": 0.1}),
        ({"pref_loss": "sigmoid", "pref_beta": 0.2}, {"kind": "dpo", "beta": 0.2}),
        ({"dpo_label_smoothing": 0.1}, {"kind": "dpo", "beta": 0.1, "label_smoothing": 0.1}),
        ({"pref_loss": "hinge"}, {"kind": "hinge", "beta": 0.1}),
        ({"pref_loss": "ipo"}, {"kind": "ipo", "beta": 0.1}),
        ({"pref_loss": "orpo"}, {"kind": "orpo", "beta": 0.1}),
        (
            {"pref_loss": "simpo", "pref_beta": 2.0, "simpo_gamma": 1.2},
            {"kind": "simpo", "beta": 2.0, "margin": 1.2},
        ),
        ({"pref_loss": "simpo"}, {"kind": "simpo", "beta": 0.1, "margin": 0.5}),
        ({"pref_ftx": 0.5}, {"kind": "dpo", "beta": 0.1, "supervised": 0.5}),
        ({"ref_model": FACTORY["model_name_or_path"]}, {"kind": "dpo", "beta": 0.1}),
        ({"ref_model": "other/model"}, {"kind": "dpo", "beta": 0.1, "reference": "other/model"}),
        ({"simpo_gamma": 0.5, "pref_bco_weight": 0.0, "kto_chosen_weight": 2.0}, {"kind": "dpo", "beta": 0.1}),
        ({"packing": False, "train_on_prompt": False}, {"kind": "dpo", "beta": 0.1}),
    ],
)
def test_losses_of_llama_factory(keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    found = factory(tmp_path, **keys)
    assert found.tree["objective"] == expected
    config = whole(found, tmp_path)
    assert (config.packs_per_step, config.data.max_length, config.data.over_length) == (8, 2000, "drop")
    assert (config.data.pack, config.optimizer.lr) == (False, 5e-5)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"pref_loss": "kto_pair"}, "pref_loss"),
        ({"pref_loss": "bco_pair"}, "pref_loss"),
        ({"pref_bco_weight": 1.0}, "pref_bco_weight"),
        ({"pref_loss": "orpo", "pref_ftx": 0.5}, "pref_ftx"),
        ({"ref_model_adapters": "saves/x"}, "ref_model_adapters"),
        ({"ld_alpha": 0.5}, "ld_alpha"),
        ({"beta": 0.5}, "beta"),
        ({"stage": "ppo"}, "stage"),
        ({"stage": "kto"}, "dataset"),
    ],
)
def test_what_llama_factory_does_with_pairs_and_is_not_there_is_refused_by_name(
    keys: dict[str, Any], name: str, tmp_path: Path
) -> None:
    assert name in lost(factory(tmp_path, **keys))


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        ({"hf_hub_url": "c/d"}, {"format": "auto", "between": "\n"}),
        (
            {"hf_hub_url": "c/d", "columns": {"prompt": "question", "chosen": "good", "rejected": "rejected"}},
            {"format": "auto", "between": "\n", "columns": {"instruction": "question", "chosen": "good"}},
        ),
        (
            {
                "hf_hub_url": "c/d",
                "subset": "en",
                "formatting": "sharegpt",
                "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "bad"},
            },
            {"format": "auto", "columns": {"rejected": "bad"}, "name": "en"},
        ),
        (
            {"hf_hub_url": "c/d", "formatting": "sharegpt", "columns": {"messages": "talk"}, "tags": {"user_tag": "q"}},
            {"format": "auto", "columns": {"messages": "talk"}, "roles": {"q": "user"}},
        ),
        ({"hf_hub_url": "c/d", "columns": {"images": "images"}}, None),
        ({"hf_hub_url": "c/d", "columns": {"kto_tag": "label"}}, None),
        ({"hf_hub_url": "c/d", "ranking": False}, None),
    ],
)
def test_entries_of_dataset_info(entry: dict[str, Any], source: dict[str, Any] | None, tmp_path: Path) -> None:
    found = factory(tmp_path, {"rows": {"ranking": True, **entry}})
    if source is None:
        assert set(lost(found)) == {"dataset"}
    else:
        assert found.tree["data"]["train"] == [{"path": "c/d", **source}]
        whole(found, tmp_path)


def test_pairs_are_not_trained_on_as_supervised_rows(tmp_path: Path) -> None:
    assert "stage dpo" in lost(factory(tmp_path, stage="sft"))["dataset"]


def test_keys_of_preferences_mean_nothing_where_a_file_asks_for_none(tmp_path: Path) -> None:
    info = {"rows": {"hf_hub_url": "c/d"}}
    supervised = factory(tmp_path, info, stage="sft", pref_beta=0.2, pref_loss="ipo", ld_alpha=0.5)
    assert not supervised.lost
    assert "objective" not in supervised.tree
    chat = [{"path": "c/d", "type": "chat_template"}]
    for keys in ({"rl_beta": 0.2, "dpo_loss_type": ["robust"]}, {"rl": None, "simpo_gamma": 1.0}):
        found = axolotl(tmp_path, datasets=chat, **keys)
        assert not found.lost
        assert "objective" not in found.tree


@pytest.mark.parametrize(
    ("table", "method", "word"),
    [
        *((TRAINER, "trl", word) for word in ("dpo", "orpo", "kto", "reward")),
        *((AXOLOTL_KEYS, "rl", word) for word in ("simpo", "kto")),
        (AXOLOTL_KEYS, "reward_model", True),
        *((LLAMA_FACTORY, "stage", word) for word in ("dpo", "kto", "rm")),
    ],
    ids=lambda value: value.title if isinstance(value, Table) else str(value),
)
@pytest.mark.parametrize("value", ["1", "no", None, 2])
def test_every_key_beside_pairs_is_in_the_account(table: Table, method: str, word: Any, value: Any) -> None:
    names = [key.name for key in table.keys if key.name not in (method, "script")]
    settings = [ForeignSetting(table, method, word, "file", RANK_ARGUMENTS)]
    settings += [
        ForeignSetting(table, name, value, "file", RANK_ARGUMENTS, number=at + 1) for at, name in enumerate(names)
    ]
    found = convert(Files(tuple(settings), ("file",), ()))
    assert len(found.entries) == len(settings)
    for entry in found.entries:
        assert entry.note.endswith((".", "?")), entry
        assert entry.note != NOT_TAKEN, entry


@pytest.mark.parametrize(
    ("words", "command", "note"),
    [
        ("", "dpo", "twice the length of TRL"),
        ("", "dpo", "no conversation is made"),
        ("--label_smoothing 0.1", "dpo", "TRL 1 ignores it"),
        ("--loss_type sigmoid sft", "dpo", "mean over the tokens of a micro-batch"),
        ("--loss_type sigmoid sft --loss_weights 2 1", "dpo", "had the weight 2"),
        ("", "orpo", "also of its prompt"),
        ("--max_prompt_length 512", "dpo", "cuts prompts"),
    ],
)
def test_differences_are_told(words: str, command: str, note: str) -> None:
    assert any(note in told for told in trl(words, command).notes)
    assert not any("completion alone" in told for told in trl(words, command).notes)


def test_what_differs_in_the_other_programs_is_told(tmp_path: Path) -> None:
    notes = axolotl(tmp_path, rl="dpo", excess_length_strategy="truncate").notes
    assert any("closes an answer" in note for note in notes)
    assert any("left out whole" in note for note in notes)
    notes = factory(tmp_path).notes
    assert any("line break" in note for note in notes)
    assert not any("in proportion" in note for note in notes)
    assert axolotl(tmp_path, rl="dpo", excess_length_strategy="raise").tree["data"]["over_length"] == "error"


@pytest.mark.parametrize(
    ("keys", "objective"),
    [
        ({}, {"kind": "dpo", "beta": 0.1}),
        ({"pref_beta": 0.3, "dpo_label_smoothing": 0.1, "pref_ftx": 0.5}, None),
        ({"pref_loss": "orpo"}, {"kind": "orpo", "beta": 0.1}),
        ({"pref_loss": "simpo", "simpo_gamma": 0.7}, {"kind": "simpo", "beta": 0.1, "margin": 0.7}),
    ],
)
def test_pairs_of_version_1_of_llama_factory(
    keys: dict[str, Any], objective: dict[str, Any] | None, tmp_path: Path
) -> None:
    (tmp_path / "sets.yaml").write_text("a: {path: o/pairs, converter: pair, split: train_prefs}\n")
    run = {"model": "a/b", "train_dataset": "sets.yaml", "micro_batch_size": 2, "max_steps": 9, "learning_rate": 1e-5}
    lora = {"peft_config": {"name": "lora", "r": 8, "lora_alpha": 16, "lora_dropout": 0.05}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run | lora | keys))
    account = import_files([tmp_path / "run.yaml"])
    assert account.is_whole
    assert not account.needs
    usual = {"kind": "dpo", "beta": 0.3, "label_smoothing": 0.1, "supervised": 0.5}
    assert account.tree["objective"] == (objective or usual)
    assert account.tree["data"]["train"] == [{"path": "o/pairs", "format": "auto", "split": "train_prefs"}]
    assert account.tree["adapter"]["dropout"] == 0.05


def test_pairs_of_version_1_beside_other_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "sets.yaml").write_text("a: {path: o/pairs, converter: pair}\nb: {path: o/talk, converter: sharegpt}\n")
    run = {"model": "a/b", "train_dataset": "sets.yaml", "micro_batch_size": 2, "max_steps": 9, "learning_rate": 1e-5}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    (entry,) = import_files([tmp_path / "run.yaml"]).lost
    assert entry.setting.name == "train_dataset"
    assert "b: its rows are no pairs" in entry.note
