"""Runs that learn from answers with a label (KTO), and reward models: what is carried over, refused or different."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from imported import WORDS, axolotl, factory, lost, trl, whole
from tonnage.config.schema import Adapter
from tonnage.forms.formats import Form
from tonnage.forms.reader import Reader
from tonnage.migration import import_files
from tonnage.migration.keys import ARGUMENTS as TRAINER

TAGGED: dict[str, Any] = {"rows": {"hf_hub_url": "c/d", "columns": {"kto_tag": "label"}}}
SCORED: dict[str, Any] = {
    "reward_model": True,
    "model_type": "AutoModelForSequenceClassification",
    "num_labels": 1,
    "datasets": [{"path": "c/d", "type": "bradley_terry.chat_template", "split": "train[:10%]"}],
}
LORA = "--use_peft --lora_r 16 --lora_alpha 16 --lora_target_modules all-linear"
OF_TRL = """\
    learning_rate train_sampling_strategy model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout
    dataset_num_proc max_length pad_to_multiple_of precompute_ref_log_probs precompute_ref_batch_size loss_type beta
    desirable_weight undesirable_weight activation_offloading sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
    chat_template_path eos_token center_rewards_coefficient pad_token max_prompt_length
"""
"""Fields of KTOConfig and RewardConfig of TRL 1.16, and the last one of earlier versions."""


def test_every_field_of_trl_s_configurations_is_known() -> None:
    assert [name for name in OF_TRL.split() if TRAINER.find(name) is None and not TRAINER.has_section(name)] == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"kind": "kto", "beta": 0.1}),
        ("--loss_type kto --beta 0.05", {"kind": "kto", "beta": 0.05}),
        (
            "--desirable_weight 1.33 --undesirable_weight 0.8",
            {"kind": "kto", "beta": 0.1, "desirable": 1.33, "undesirable": 0.8},
        ),
        ("--precompute_ref_log_probs --ref_model a/b --sync_ref_model False", {"kind": "kto", "beta": 0.1}),
        ("--ref_model other/model", {"kind": "kto", "beta": 0.1, "reference": "other/model"}),
    ],
)
def test_kto_of_trl(words: str, expected: dict[str, Any], tmp_path: Path) -> None:
    account = trl(words, "kto")
    assert account.tree["objective"] == expected
    whole(account, tmp_path)


def test_defaults_are_those_of_trl_s_kto(tmp_path: Path) -> None:
    config = whole(trl("", "kto"), tmp_path)
    assert (config.optimizer.lr, config.objective.beta, config.epochs, config.packs_per_step) == (1e-6, 0.1, 3, 8)
    assert (config.data.max_length, config.data.over_length, config.data.pack) == (2048, "drop", False)
    assert (config.data.order, config.precision, config.memory.recompute) == ("given", "bf16", "full")
    assert config.router_loss == "model"
    shuffled = whole(trl("--train_sampling_strategy random", "sft"), tmp_path)
    assert shuffled.data.order == "shuffled"


@pytest.mark.parametrize(
    ("command", "words", "name"),
    [
        ("kto", "--loss_type apo_zero_unpaired", "loss_type"),
        ("kto", "--loss_type sigmoid", "loss_type"),
        ("kto", "--sync_ref_model", "sync_ref_model"),
        ("kto", "--rpo_alpha 0.5", "rpo_alpha"),
        ("kto", "--desirable_weight 0", "desirable_weight"),
        ("kto", "--desirable_wieght 2", "desirable_wieght"),
        ("kto", "--num_generations 4", "num_generations"),
        ("kto", f"{LORA} --lora_task_type SEQ_CLS", "lora_task_type"),
        ("reward", "--loss_type sigmoid", "loss_type"),
        ("reward", "--center_rewards_coefficient -1", "center_rewards_coefficient"),
        ("reward", f"{LORA} --lora_task_type TOKEN_CLS", "lora_task_type"),
        ("reward", f"{LORA} --lora_modules_to_save q_proj", "lora_modules_to_save"),
        ("reward", "--reward_funcs f", "reward_funcs"),
    ],
)
def test_what_trl_does_and_is_not_there_is_refused_by_name(command: str, words: str, name: str) -> None:
    refused = lost(trl(words, command))
    assert name in refused
    assert refused[name].endswith((".", "?"))


def test_apo_zero_is_refused_with_what_there_is() -> None:
    account = trl("--loss_type apo_zero_unpaired", "kto")
    assert "APO-zero" in lost(account)["loss_type"]
    assert [need.key for need in account.needs] == ["objective.kind"]


def test_a_reward_model_of_trl(tmp_path: Path) -> None:
    account = trl("--center_rewards_coefficient 0.01 --beta 0.2 --disable_dropout True", "reward")
    assert account.tree["objective"] == {"kind": "reward", "center": 0.01}
    config = whole(account, tmp_path)
    assert (config.optimizer.lr, config.data.max_length, config.data.over_length) == (1e-4, 2048, "drop")
    assert (config.data.order, config.router_loss) == ("shuffled", 0.0)


@pytest.mark.parametrize(
    ("words", "is_noted"),
    [
        (LORA, True),
        (f"{LORA} --lora_task_type CAUSAL_LM", True),
        (f"{LORA} --lora_task_type SEQ_CLS", False),
        (f"{LORA} --lora_modules_to_save score", False),
        ("", False),
    ],
)
def test_the_head_of_trl_s_reward_model_beside_an_adapter(words: str, is_noted: bool, tmp_path: Path) -> None:
    account = trl(words, "reward")
    adapter = whole(account, tmp_path).adapter
    assert any("lora_task_type" in note for note in account.notes) == is_noted
    if words:
        assert isinstance(adapter, Adapter)
        assert (adapter.also, adapter.dropout) == ((), 0.0)


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("python trl/scripts/kto.py", "kto"),
        ("accelerate launch --num_processes 1 examples/scripts/kto.py", "kto"),
        ("python examples/scripts/reward_modeling.py", "reward"),
        ("torchrun --nproc_per_node 1 -m trl.scripts.reward", "reward"),
        ("uv run train_rm.py", "reward"),
    ],
)
def test_scripts_are_recognised_by_name(command: str, kind: str, tmp_path: Path) -> None:
    account = import_files([f"{command} --model_name_or_path a/b --dataset_name c/d --output_dir out"], workers=1)
    assert whole(account, tmp_path).objective.kind == kind
    assert account.program.startswith("TRL")


def test_arguments_by_themselves_do_not_say_what_is_trained(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model_name_or_path: a/b\ndataset_name: c/d\nmax_length: 512\ndesirable_weight: 1.2\n"
        "center_rewards_coefficient: 0.01\noutput_dir: out\n"
    )
    refused = lost(import_files([tmp_path / "run.yaml"], workers=1))
    assert set(refused) == {"desirable_weight", "center_rewards_coefficient"}
    assert "kto, reward" in refused["desirable_weight"]
    config = whole(import_files([f"trl reward --config {tmp_path / 'run.yaml'} --num_processes 1"]), tmp_path)
    assert (config.objective.kind, config.objective.center) == ("reward", 0.01)


@pytest.mark.parametrize(
    ("kind", "source", "template"),
    [
        ("chatml.argilla", {"columns": {"prompt": "instruction"}}, "chatml"),
        ("chatml.argilla_chat", {}, "chatml"),
        ("chatml.intel", {"columns": {"prompt": "question"}}, "chatml"),
        ("chatml.prompt_pairs", {}, "chatml"),
        ("chatml.ultra", {}, "chatml"),
        ("llama3.argilla", {"columns": {"prompt": "instruction"}}, "llama3"),
        ("llama3.argilla_chat", {}, "llama3"),
        ("llama3.intel", {"columns": {"prompt": "question"}}, "llama3"),
        ("llama3.ultra", {}, "llama3"),
        (None, {}, "auto"),
    ],
)
def test_kto_of_axolotl(kind: str | None, source: dict[str, Any], template: str, tmp_path: Path) -> None:
    keys = {"rl": "kto", "rl_beta": 0.2, "kto_desirable_weight": 0.3, "max_prompt_len": 512, "dpo_loss_type": ["ipo"]}
    account = axolotl(tmp_path, datasets=[{"path": "c/d", **({"type": kind} if kind else {})}], **keys)
    assert account.tree["objective"] == {"kind": "kto", "beta": 0.2, "desirable": 0.3}
    assert account.tree["data"]["train"] == [{"path": "c/d", "format": "auto", **source}]
    assert account.tree["data"]["template"] == template
    config = whole(account, tmp_path)
    assert (config.packs_per_step, config.data.max_length, config.data.over_length) == (8, 2000, "drop")
    assert (config.data.pack, config.data.order) == (False, "shuffled")


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ({"prompt": "instruction"}, {"system": "s", "instruction": "q", "completion": "a", "label": True}),
        ({"prompt": "question"}, {"system": "s", "question": "q", "completion": "a", "label": True}),
        ({}, {"system": "s", "prompt": "q", "completion": "a", "label": True}),
    ],
)
def test_rows_of_those_types_are_read(columns: dict[str, str], row: dict[str, Any]) -> None:
    (conversation,) = Reader(Form("labelled", columns=columns)).read(row)
    assert [(turn.role, turn.message["content"]) for turn in conversation.turns] == [
        ("system", "s"),
        ("user", "q"),
        ("assistant", "a"),
    ]


def test_formats_of_kto_that_axolotl_s_configuration_writes_out(tmp_path: Path) -> None:
    from jinja2 import Template

    parts = {
        "field_prompt": "question",
        "field_label": "good",
        "prompt_format": "[U]{prompt}[/U]",
        "completion_format": "{completion}[E]",
    }
    for data_set in ({"type": parts}, {"type": "user_defined.default", **parts}):
        account = axolotl(tmp_path, rl="kto", datasets=[{"path": "c/d", **data_set}])
        config = whole(account, tmp_path)
        (source,) = account.tree["data"]["train"]
        assert source == {
            "path": "c/d",
            "format": "auto",
            "columns": {"prompt": "question", "label": "good"},
            "system": "drop",
        }
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        assert Template(config.data.template).render(messages=messages, eos_token="</s>") == "[U]a[/U]b[E]"


def test_a_reward_model_of_axolotl(tmp_path: Path) -> None:
    adapter = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_linear": True}
    beside = {"lora_modules_to_save": ["embed_tokens", "lm_head"], "remove_unused_columns": False}
    account = axolotl(tmp_path, chat_template="chatml", center_rewards_coefficient=0.01, **SCORED, **adapter, **beside)
    assert account.tree["objective"] == {"kind": "reward", "center": 0.01}
    assert account.tree["data"]["train"] == [
        {"path": "c/d", "format": "auto", "columns": {"prompt": "input"}, "first": 0.1}
    ]
    config = whole(account, tmp_path)
    assert (config.data.template, config.data.max_length) == ("chatml", 2000)
    assert isinstance(config.adapter, Adapter)
    assert (config.adapter.also, config.adapter.dropout) == (("embeddings",), 0.0)
    assert any("number margin" in note for note in account.notes)
    data_set = {"path": "c/d", "type": "bradley_terry.llama3.icr"}
    assert axolotl(tmp_path, **SCORED | {"datasets": [data_set]}).tree["data"]["template"] == "llama3"


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"rl": "kto", "datasets": [{"path": "c/d", "type": "chat_template.default"}]}, "datasets.0.type"),
        ({"rl": "kto", "datasets": [{"path": "c/d", "type": {"field_chosen": "x"}}]}, "datasets.0.type.field_chosen"),
        (
            {"rl": "kto", "datasets": [{"path": "c/d", "type": "chatml.ultra", "field_chosen": "x"}]},
            "datasets.0.field_chosen",
        ),
        (
            {"rl": "kto", "datasets": [{"path": "c/d", "type": {"completion_format": "{completion}{x}"}}]},
            "datasets.0.type.completion_format",
        ),
        ({"rl": "kto", "kto_undesirable_weight": -1}, "kto_undesirable_weight"),
        ({**SCORED, "rl": "kto"}, "reward_model"),
        ({**SCORED, "num_labels": 2}, "num_labels"),
        ({**SCORED, "model_type": "AutoModelForTokenClassification"}, "model_type"),
        ({**SCORED, "process_reward_model": True}, "process_reward_model"),
        ({**SCORED, "datasets": [{"path": "c/d", "type": "chat_template"}]}, "datasets.0.type"),
        ({**SCORED, "datasets": [{"path": "c/d"}]}, "datasets.0.path"),
        ({**SCORED, "datasets": [{"path": "c/d", "type": {"field_prompt": "x"}}]}, "datasets.0.type.field_prompt"),
        ({**SCORED, "reward_model": False}, "model_type"),
        ({**SCORED, "reward_model": False}, "num_labels"),
    ],
)
def test_what_axolotl_does_and_is_not_there_is_refused_by_name(keys: dict[str, Any], name: str, tmp_path: Path) -> None:
    assert name in lost(axolotl(tmp_path, **keys))


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        ({"columns": {"kto_tag": "label"}}, {"between": "\n"}),
        ({"columns": {"kto_tag": "kto_tag"}}, {"between": "\n"}),
        (
            {"columns": {"prompt": "question", "response": "answer", "kto_tag": "liked"}},
            {"between": "\n", "columns": {"instruction": "question", "output": "answer", "kto_tag": "liked"}},
        ),
        ({"formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"}}, {}),
        (
            {
                "formatting": "sharegpt",
                "columns": {"messages": "talk", "kto_tag": "liked"},
                "tags": {"user_tag": "visitor"},
            },
            {"columns": {"messages": "talk", "kto_tag": "liked"}, "roles": {"visitor": "user"}},
        ),
        ({"columns": {"prompt": "instruction"}}, None),
        ({"ranking": True}, None),
        ({"columns": {"kto_tag": "label", "images": "images"}}, None),
    ],
)
def test_rows_with_tags_of_llama_factory(entry: dict[str, Any], source: dict[str, Any] | None, tmp_path: Path) -> None:
    account = factory(tmp_path, {"rows": {"hf_hub_url": "c/d", **entry}}, stage="kto")
    if source is None:
        assert set(lost(account)) == {"dataset"}
    else:
        assert account.tree["data"]["train"] == [{"path": "c/d", "format": "auto", **source}]
        whole(account, tmp_path)


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ({}, {"instruction": "q", "input": "i", "output": "a", "kto_tag": False}),
        ({"output": "answer", "kto_tag": "liked"}, {"instruction": "q", "input": "i", "answer": "a", "liked": False}),
        (
            {},
            {"messages": [{"role": "user", "content": "q\ni"}, {"role": "assistant", "content": "a"}], "label": False},
        ),
    ],
)
def test_such_rows_are_read(columns: dict[str, str], row: dict[str, Any]) -> None:
    (conversation,) = Reader(Form("labelled", columns=columns, between="\n")).read(row)
    assert [turn.message["content"] for turn in conversation.turns] == ["q\ni", "a"]
    assert conversation.carried == (0.0,)


def test_kto_of_llama_factory(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "pref_beta": 0.2,
        "kto_chosen_weight": 1.5,
        "kto_rejected_weight": 0.5,
        "pref_loss": "sigmoid",
    }
    account = factory(tmp_path, TAGGED, stage="kto", **keys)
    assert account.tree["objective"] == {"kind": "kto", "beta": 0.2, "desirable": 1.5, "undesirable": 0.5}
    config = whole(account, tmp_path)
    assert (config.optimizer.lr, config.data.max_length, config.data.order) == (5e-5, 2000, "shuffled")
    assert factory(tmp_path, TAGGED, stage="kto").tree["objective"] == {"kind": "kto", "beta": 0.1}
    assert "pref_ftx" in lost(factory(tmp_path, TAGGED, stage="kto", pref_ftx=0.5))
    other = factory(tmp_path, TAGGED, stage="kto", ref_model="other/model")
    assert other.tree["objective"] == {"kind": "kto", "beta": 0.1, "reference": "other/model"}
    assert "stage kto" in lost(factory(tmp_path, TAGGED, stage="dpo"))["dataset"]


def test_a_reward_model_of_llama_factory(tmp_path: Path) -> None:
    adapter: dict[str, Any] = {"finetuning_type": "lora", "lora_rank": 8, "lora_target": "all", "lora_dropout": 0.1}
    keys: dict[str, Any] = {"trust_remote_code": True, "pref_beta": 0.2, "learning_rate": 1e-4}
    account = factory(tmp_path, stage="rm", **adapter, **keys)
    assert account.tree["objective"] == {"kind": "reward"}
    config = whole(account, tmp_path)
    assert (config.data.max_length, config.data.over_length, config.trust_remote_code) == (2000, "drop", False)
    assert isinstance(config.adapter, Adapter)
    assert config.adapter.dropout == 0.1
    assert sum("value head" in note for note in account.notes) == 1
    assert "dpo or rm" in lost(factory(tmp_path, stage="kto"))["dataset"]


@pytest.mark.parametrize(
    ("command", "note"),
    [
        ("kto", "one estimate a step"),
        ("kto", "answer and that of another row"),
        ("kto", "no conversation is made"),
        ("kto", "write two rows"),
        ("reward", "prompt with both its answers"),
        ("reward", "no conversation is made"),
    ],
)
def test_differences_are_noted(command: str, note: str) -> None:
    assert any(note in sentence for sentence in trl("", command).notes)


@pytest.mark.parametrize("command", ["grpo", "rloo", "ppo"])
def test_methods_with_answers_of_the_model_stay_refused(command: str) -> None:
    assert "tonnage.Session" in lost(import_files([f"trl {command} {WORDS}"]))["trl"]
