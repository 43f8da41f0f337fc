"""ms-swift's commands: what its names come to, and its defaults that depend on other arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tonnage.config import read_config
from tonnage.data.text.rendering import ChatTemplate
from tonnage.errors import UserError
from tonnage.migration import Import, import_files
from tonnage.migration.command import read_command
from tonnage.migration.keys import SWIFT

QWEN = "swift sft --model Qwen/Qwen2.5-7B-Instruct --dataset rows.jsonl"


FIELDS = """\
    acc_strategy adalora_beta1 adalora_beta2 adalora_deltaT adalora_init_r adalora_orth_reg_weight adalora_target_r
    adalora_tfinal adalora_tinit adam_beta2 adapter_act adapter_length adapters add_non_thinking_prefix add_version
    advantage_estimator advantage_reweight agent_template aligner_lr async_generate attn_impl beta bf16
    bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant boft_block_num
    boft_block_size boft_dropout boft_n_butterfly_factor cached_dataset cached_val_dataset callbacks
    center_rewards_coefficient check_model chord_enable_phi_function chord_mu_decay_steps chord_mu_peak
    chord_mu_valley chord_mu_warmup_steps chord_sft_dataset chord_sft_per_device_train_batch_size cliprange
    cliprange_value columns completion_length_limit_scope cosine_max_len cosine_max_len_value_correct
    cosine_max_len_value_wrong cosine_min_len_value_correct cosine_min_len_value_wrong cpo_alpha
    create_checkpoint_symlink custom_dataset_info custom_register_path data_seed dataloader_num_workers
    dataloader_persistent_workers dataloader_prefetch_factor dataset dataset_num_proc dataset_shuffle ddp_backend
    ddp_timeout deepspeed_autotp_size delta desirable_weight device_map disable_auto_column_mapping
    disable_ignore_empty_think discopop_tau download_mode ds3_gather_for_generation dynamic_sample
    early_stop_interval enable_channel_loss enable_dft_loss enable_flattened_weight_sync enable_npu_model_patch
    enable_thinking epsilon epsilon_high eval_dataset eval_dataset_args eval_generation_config eval_limit
    eval_metric eval_strategy eval_use_evalscope experts_impl external_plugins extra_eval_args fipo_clip_high_only
    fipo_clip_range fipo_decay_rate fipo_safety_threshold fourier_n_frequency fourier_scaling fp16 freeze_aligner
    freeze_llm freeze_parameters freeze_parameters_ratio freeze_parameters_regex freeze_vit fsdp
    galore_cos_threshold galore_gamma_proj galore_optim_per_parameter galore_proj_bits galore_proj_group_size
    galore_proj_quant galore_proj_type galore_quantization galore_queue_size galore_rank galore_scale
    galore_target_modules galore_update_proj_gap galore_with_embedding gamma generation_batch_size gkd_logits_topk
    gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs group_by_length gym_env
    hqq_axis hub_token ignore_args_error importance_sampling_level init_strategy init_weights interleave_prob
    is_binary_loss_scale kl_coef kl_in_reward label_smoothing lam lazy_tokenize ld_alpha learning_rate
    lisa_activated_layers lisa_step_interval llamapro_num_groups llamapro_num_new_blocks lmbda load_args
    load_data_args load_from_cache_file local_repo_path local_rollout_forward_batch_size log_completions log_entropy
    log_rollout_offpolicy_metrics logging_dir logging_first_step logging_steps logprobs lora_alpha lora_bias
    lora_dropout lora_dtype lora_ga_batch_size lora_ga_direction lora_ga_iters lora_ga_max_length lora_ga_scale
    lora_ga_stable_gamma lora_rank lorap_lr_ratio loss_scale loss_type loss_weights lr_scheduler_kwargs
    lr_scheduler_type max_completion_length max_epochs max_length max_memory max_model_len max_new_tokens max_pixels
    max_resample_times max_shard_size max_turns min_p missing_eos_penalty model model_author model_kwargs model_name
    model_revision model_type modules_to_save move_model_batches mrl_dims multi_turn_scheduler new_special_tokens
    norm_bbox num_beams num_generations num_generations_eval num_iterations num_labels num_mini_batches
    num_ppo_epochs num_sample_generations off_policy_sequence_mask_delta offload_model offload_optimizer
    offload_teacher_model optimizer output_dir overlong_filter packing packing_length packing_num_proc
    packing_strategy padding_free padding_side per_device_eval_batch_size per_device_train_batch_size
    preserve_thinking problem_type quant_bits quant_method real_tau ref_adapters ref_model ref_model_mixup_alpha
    ref_model_revision ref_model_sync_steps ref_model_type reft_args reft_intervention_type reft_layer_key
    reft_layers reft_rank remove_unused_columns repetition_max_penalty repetition_n_grams repetition_penalty
    report_to response_length response_prefix resume_only_model reward_adapters reward_funcs reward_model
    reward_model_plugin reward_model_revision reward_model_type reward_template reward_weights rlhf_type rlsd_lambda
    rlsd_lambda_decay_steps rlsd_lambda_warmup_steps rlsd_negative_only rlsd_reweight_clip_range
    rollout_importance_sampling_mode rollout_importance_sampling_threshold rope_scaling router_aux_loss_coef
    rpo_alpha safe_serialization scale_rewards sdar_gate_beta sdar_loss_coef seed seq_kd sequence_parallel_size
    sft_alpha shuffle_buffer_size simpo_gamma sleep_level soft_cache_length soft_max_length split_dataset_ratio
    steps_per_generation stop_words stopping_strategy stream streaming strict structured_outputs_regex
    swanlab_email_language swanlab_exp_name swanlab_mode swanlab_notification_method swanlab_project
    swanlab_receiver_email swanlab_secret swanlab_sender_email swanlab_smtp_port swanlab_smtp_server swanlab_token
    swanlab_webhook_url swanlab_workspace sync_ref_model system target_modules target_parameters target_regex
    task_type tau_neg tau_pos teacher_adapters teacher_deepspeed teacher_kl_coef teacher_model
    teacher_model_revision teacher_model_server teacher_model_type teacher_tag_key temperature template
    template_backend top_entropy_quantile top_k top_logprobs top_p torch_dtype train_dataloader_shuffle
    trainable_parameters trainable_parameters_regex truncation_strategy tuner_backend tuner_type undesirable_weight
    use_chat_template use_dora use_flash_ckpt use_galore use_gym_env use_hf use_liger_kernel use_logits_to_keep
    use_rslora use_swift_lora use_vllm val_dataset val_dataset_shuffle vera_d_initial vera_dropout
    vera_projection_prng_key vera_rank vf_coef vit_gradient_checkpointing vit_lr vllm_data_parallel_size
    vllm_disable_cascade_attn vllm_disable_custom_all_reduce vllm_enable_expert_parallel vllm_enable_lora
    vllm_enable_prefix_caching vllm_enforce_eager vllm_engine_kwargs vllm_gpu_memory_utilization
    vllm_limit_mm_per_prompt vllm_max_lora_rank vllm_max_model_len vllm_max_num_seqs vllm_mm_processor_cache_gb
    vllm_mode vllm_pipeline_parallel_size vllm_quantization vllm_reasoning_parser vllm_server_base_url
    vllm_server_group_port vllm_server_host vllm_server_pass_dataset vllm_server_port vllm_server_timeout
    vllm_speculative_config vllm_tensor_parallel_size vllm_use_async_engine wandb_log_unique_prompts warmup_ratio
    weight_decay whiten_rewards zero_hpz_partition_size
"""
"""Of the argument classes of ms-swift 4.6, besides those of transformers and TRL."""


def test_every_argument_is_known() -> None:
    assert [name for name in FIELDS.split() if SWIFT.find(name) is None and not SWIFT.has_section(name)] == []


def lost(found: Import) -> list[str]:
    return [entry.setting.shown for entry in found.entries if entry.verdict in ("not supported", "unknown")]


def test_an_adapter_comes_over_whole(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(
        """nproc_per_node=2
CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=$nproc_per_node MASTER_PORT=29501 \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --torch_dtype bfloat16 \\
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' own/rows.jsonl \\
    --split_dataset_ratio 0.01 --num_train_epochs 1 --per_device_train_batch_size 2 --learning_rate 1e-4 \\
    --lora_rank 16 --target_modules all-linear --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\
    --eval_steps 50 --save_steps 100 --save_total_limit 2 --max_length 4096 --truncation_strategy right \\
    --warmup_ratio 0.05 --packing true --deepspeed zero3_offload --quant_bits 4 --quant_method bnb \\
    --system 'Be brief.' --attn_impl flash_attn --gradient_checkpointing_kwargs '{"use_reentrant": false}'
swift infer --adapters output
"""
    )
    found = import_files([tmp_path / "train.sh"])
    assert found.is_whole, lost(found)
    assert found.needs == ()
    (tmp_path / "config.yaml").write_text(found.text)
    read_config(tmp_path / "config.yaml", check_files=False)
    tree = found.tree
    assert tree["data"]["train"] == [
        {"path": "llm-wizard/alpaca-gpt4-data-zh", "between": "\n", "format": "alpaca", "first": 500},
        {"path": "own/rows.jsonl", "between": "\n"},
    ]
    data = {name: tree["data"][name] for name in ("validation", "max_length", "over_length", "pack", "train_on")}
    assert data == {
        "validation": 0.01,
        "max_length": 4096,
        "over_length": "truncate",
        "pack": True,
        "train_on": "assistant",
    }
    assert tree["batch"] == {"sequences": 32}
    assert tree["launch"] == {"workers": 2}
    assert tree["adapter"] == {
        "rank": 16,
        "alpha": 32,
        "targets": "all-linear",
        "dropout": 0.05,
        "quantize": "nf4-double",
    }
    optimizer = tree["optimizer"]
    assert (optimizer["weight_decay"], optimizer["betas"]) == (0.1, [0.9, 0.95])
    assert (optimizer["schedule"], optimizer["warmup"], optimizer["clip"]) == ("cosine", 0.05, 1.0)
    memory = tree["memory"]
    assert (memory["zero"], memory["optimizer_tier"], memory["parameter_tier"]) == (3, "host", "host")
    assert (tree["evaluate"]["every"], tree["checkpoint"]) == (50, {"every": 100, "keep": 2})
    said = ChatTemplate(tree["data"]["template"], {}, {}).render([{"role": "user", "content": "Hi"}], opened=True)
    assert said == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", {"optimizer.lr": 1e-4, "batch.sequences": 16, "launch.workers": 1, "adapter.rank": 8}),
        ("--tuner_type full", {"optimizer.lr": 1e-5, "adapter": None}),
        ("--tuner_type full --learning_rate 3e-5", {"optimizer.lr": 3e-5}),
        ("--per_device_train_batch_size 3", {"batch.sequences": 18}),
        ("--gradient_accumulation_steps 4", {"batch.sequences": 4}),
        ("--adam_beta1 0.8", {"optimizer.betas": [0.8, 0.95]}),
        ("--loss_scale last_round", {"data.train_on": "last"}),
        ("--use_chat_template false", {"data.template": "plain"}),
        ("--dataset_shuffle false --train_dataloader_shuffle false", {"data.order": "given"}),
        ("--fsdp fsdp2 --gradient_checkpointing false", {"memory.zero": 3, "memory.recompute": "full"}),
        (
            "--val_dataset test.jsonl",
            {"data.validation": [{"path": "test.jsonl", "between": "\n"}], "evaluate.every": 500},
        ),
        ("--eval_steps 10", {"evaluate": None}),
        ("--use_dora true --lora_dropout 0", {"adapter.kind": "dora"}),
        ("--init_weights pissa_niter_8", {"adapter.init": "pissa", "adapter.rounds": 8}),
        ("--lorap_lr_ratio 16", {"optimizer.groups": [{"match": "*lora_B", "lr": 1.6e-3}]}),
    ],
)
def test_arguments_and_defaults(more: str, expected: dict[str, Any]) -> None:
    found = import_files([f"{QWEN} {more}"])
    assert found.is_whole, lost(found)
    for key, value in expected.items():
        section, _, name = key.partition(".")
        assert (found.tree.get(section, {}).get(name) if name else found.tree.get(key)) == value, key


@pytest.mark.parametrize(
    ("arguments", "objective"),
    [
        ("--rlhf_type dpo", {"kind": "dpo", "beta": 0.1}),
        ("--rlhf_type dpo --beta 0.5 --rpo_alpha 0.1", {"kind": "dpo", "beta": 0.5, "supervised": 0.1}),
        ("--rlhf_type simpo", {"kind": "simpo", "beta": 2.0, "margin": 1.0, "supervised": 1.0}),
        ("--rlhf_type orpo", {"kind": "orpo", "beta": 0.1}),
        ("--rlhf_type kto --desirable_weight 0.5", {"kind": "kto", "beta": 0.1, "desirable": 0.5}),
        ("--rlhf_type rm --center_rewards_coefficient 0.01", {"kind": "reward", "center": 0.01}),
    ],
)
def test_preferences_become_an_objective(arguments: str, objective: dict[str, Any]) -> None:
    found = import_files([f"swift rlhf --model a/b --dataset pairs.jsonl --max_length 1024 {arguments}"])
    assert found.is_whole, lost(found)
    assert found.tree["objective"] == objective
    assert (found.tree["data"]["max_length"], found.tree["data"]["over_length"]) == (2048, "drop")
    assert found.tree["adapter"].get("dropout", 0.0) == 0.0


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        ("swift rlhf --model a/b --dataset r.jsonl --rlhf_type grpo --num_generations 8", ["--rlhf_type"]),
        ("swift rlhf --model a/b --dataset r.jsonl --rlhf_type gkd --teacher_model c/d", ["--rlhf_type"]),
        (f"{QWEN} --tuner_type adalora", ["--tuner_type"]),
        (f"{QWEN} --task_type seq_cls --num_labels 2", ["--task_type"]),
        (f"{QWEN} --loss_type infonce", ["--loss_type"]),
        (f"{QWEN} --loss_scale react", ["--loss_scale"]),
        (f"{QWEN} --use_dora true", ["--use_dora"]),  # its dropout is 0.05
        (f"{QWEN} --init_weights olora", ["--init_weights"]),
        (f"{QWEN} --optimizer muon", ["--optimizer"]),
        (f"{QWEN} --streaming true", ["--streaming"]),
        (f"{QWEN} --truncation_strategy left", ["--truncation_strategy"]),
        (f"{QWEN} --freeze_vit false", ["--freeze_vit"]),
        ("swift sft --model org/other --dataset rows.jsonl --system Hi", ["--system"]),
        (f"{QWEN} --lora_rnk 8", ["--lora_rnk"]),
    ],
)
def test_what_is_not_there_is_refused_by_name(command: str, keys: list[str]) -> None:
    assert lost(import_files([command])) == keys


def test_rows_that_swift_makes_have_to_be_written() -> None:
    data_sets = "swift/self-cognition#100 AI-ModelScope/alpaca-gpt4-data-en#50"
    found = import_files([f"swift sft --model a/b --dataset {data_sets} --model_name me --model_author us"])
    assert found.is_whole
    assert [need.key for need in found.needs] == ["data.train"]
    assert "train" not in found.tree["data"]
    assert "self-cognition" in found.needs[0].sentence
    assert "vicgalle/alpaca-gpt4" in found.text


def test_subsets_are_sources_of_their_own() -> None:
    found = import_files(["swift sft --model a/b --use_hf true --dataset HF::c/d:one/two#7"])
    shared = {"path": "c/d", "between": "\n", "first": 7}
    assert found.tree["data"]["train"] == [shared | {"name": "one"}, shared | {"name": "two"}]


def test_pretraining_is_of_every_token() -> None:
    found = import_files(["swift pt --model a/b --dataset rows.jsonl --packing true"])
    assert found.is_whole
    assert (found.tree["data"]["template"], found.tree["data"]["train_on"]) == ("plain", "all")


def test_a_yaml_of_arguments_and_a_script_of_torchrun(tmp_path: Path) -> None:
    arguments = {"model": "a/b", "tuner_type": "lora", "dataset": ["rows.jsonl#10"], "deepspeed": "zero2"}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(arguments))
    alone = import_files([tmp_path / "sft.yaml"])
    assert (alone.program, alone.is_whole) == ("ms-swift", True)
    (tmp_path / "run.sh").write_text("torchrun --nproc_per_node 4 swift/cli/sft.py --config sft.yaml --lora_rank 4")
    started = import_files([tmp_path / "run.sh"])
    assert started.is_whole, lost(started)
    assert (started.tree["adapter"]["rank"], started.tree["memory"]["zero"]) == (4, 2)
    assert (started.tree["launch"]["workers"], started.tree["batch"]["sequences"]) == (4, 16)


@pytest.mark.parametrize("command", ["swift infer --model a/b", "swift deploy --model a/b", "swift export --model a/b"])
def test_commands_that_do_not_train(command: str) -> None:
    with pytest.raises(UserError, match="no command that trains"):
        import_files([command])


def test_the_megatron_engine_is_refused() -> None:
    with pytest.raises(UserError, match="Megatron-SWIFT"):
        import_files(["megatron sft --model a/b --dataset rows.jsonl"])


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("$(expr 16 / $n)", "8"),
        ("$((16 / n))", "8"),
        ("`expr 32 / $n / 4`", "4"),
        ("$((2 * n + 1))", "$((2*2+1))"),
        ("$((16 / zero))", "$((16/0))"),
        ("$((16 / $unset))", "$((16/$unset))"),
    ],
)
def test_whole_numbers_are_computed_from_left_to_right(written: str, value: str) -> None:
    command = f"n=2\nzero=0\nswift sft --model a/b --gradient_accumulation_steps {written}"
    settings = {setting.name: setting.value for setting in read_command(command, "train.sh").settings}
    assert settings["gradient_accumulation_steps"].replace("zero", "0").replace("n+", "2+") == value
