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

from migration.strict import check
from tonnage.config import read_config
from tonnage.config.keys import all_keys
from tonnage.migration import import_files, page, yaml_files
from tonnage.migration.convert import convert
from tonnage.migration.draft import NOT_TAKEN
from tonnage.migration.keys import ARGUMENTS, AXOLOTL, LLAMA_FACTORY, QUANTITIES, TABLES, VERSION_1, Table
from tonnage.migration.programs import TRL
from tonnage.migration.reading import TRAINERS, Files
from tonnage.migration.settings import ForeignSetting

OWN_TABLES = Path(yaml_files.__file__).parent / "tables"
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
"""Of SFTConfig, ModelConfig, ScriptArguments and DatasetMixtureConfig, TRL 1.16."""


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
    assert [name for name in TRL.signs if not is_known(ARGUMENTS, name)] == []


AXOLOTL_FIELDS = """\
    accelerator_config activation_offloading adam_beta1 adam_beta2 adam_beta3 adam_epsilon adam_epsilon2 adapter
    added_tokens_overrides attn_implementation auto_find_batch_size auto_resume_from_checkpoints
    axolotl_config_path base_model base_model_config batch_flattening batch_size bench_dataset bench_split bf16
    bfloat16 bnb_config_kwargs center_rewards_coefficient chat_template chat_template_jinja chat_template_kwargs
    chunked_cross_entropy chunked_cross_entropy_num_chunks cls_model_config comet_api_key comet_experiment_config
    comet_experiment_key comet_mode comet_online comet_project_name comet_workspace context_parallel_size
    cosine_constant_lr_ratio cosine_min_lr_ratio cpo_alpha curriculum_sampling cut_cross_entropy
    dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor
    dataset_exact_deduplication dataset_keep_in_memory dataset_num_proc dataset_prepared_path dataset_processes
    dataset_shard_idx dataset_shard_num datasets ddp ddp_broadcast_buffers ddp_bucket_cap_mb
    ddp_find_unused_parameters ddp_timeout deepcompile deepspeed default_system_message dense_mixer device
    device_map diffusion dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of do_bench_eval
    do_causal_lm_eval dp_replicate_size dp_shard_size dpo_beta dpo_generate_during_eval dpo_label_smoothing
    dpo_loss_type dpo_loss_weights dpo_norm_loss dpo_padding_free dpo_use_liger_kernel dpo_use_logits_to_keep
    dpo_use_weighting dsv4_bf16_all dsv4_fp4_grouped_mode dsv4_fp8_lora_kernel dsv4_fp8_nonexpert_mode
    dsv4_shared_mlp_lora_kernel dynamic_checkpoint eaft_alpha eaft_k eager_attention early_stopping_patience ebft
    embedding_lr embedding_lr_scale embeddings_skip_upcast eot_tokens eval_batch_size eval_causal_lm_metrics
    eval_max_new_tokens eval_sample_packing eval_sequence_len eval_steps eval_strategy eval_table_size
    evals_per_epoch evaluation_strategy excess_length_strategy experimental_skip_move_to_device expert_backend
    expert_parallel_backend expert_parallel_fallback_on_unsupported expert_parallel_num_nvl_bytes
    expert_parallel_num_rdma_bytes expert_parallel_size expert_parallel_token_capacity experts_implementation
    fix_untrained_tokens flash_attention flash_attn_cross_entropy flash_attn_d512 flash_attn_fuse_mlp
    flash_attn_rms_norm flash_optimum flex_attention flex_attn_compile_kwargs float16 float32 fp16
    fp32_norm_classes fp32_norms fp8 fp8_config fp8_enable_fsdp_float8_all_gather freeze_mm_modules fsdp fsdp_config
    fsdp_final_state_dict_type fsdp_version fused_attn_kernel gc_collect_steps gc_steps gemma4_fp8_nonexpert
    gemma4_hybrid_attn_impl gemma4_nf4_nonexpert generation_do_sample generation_max_new_tokens
    generation_prompt_ratio generation_top_k generation_top_p gptq gpu_memory_limit gradient_accumulation_steps
    gradient_checkpointing gradient_checkpointing_kwargs gradio_max_new_tokens gradio_server_name
    gradio_server_port gradio_share gradio_temperature gradio_title greater_is_better grokfast_alpha grokfast_lamb
    group_by_length heads_k_stride hf_mlflow_log_artifacts hf_use_auth_token hub_model_id hub_revision
    hub_strategy image_resize_algorithm image_size include_tkps include_tokens_per_second is_falcon_derived_model
    is_llama_derived_model is_mistral_derived_model is_preprocess is_qwen_derived_model
    jagged_restart_anneal_steps jagged_restart_steps jagged_restart_warmup_steps kd_alpha kd_beta kd_ce_alpha
    kd_normalize_topk kd_online_server kd_online_server_base_url kd_online_timeout kd_online_topk kd_temperature
    kd_temperature_min kd_trainer kto_desirable_weight kto_undesirable_weight large_head_attention
    layer_offloading learning_rate liger_cross_entropy liger_fused_linear_cross_entropy liger_glu_activation
    liger_kernel_impl liger_layer_norm liger_rms_norm liger_rms_norm_gated liger_rope liger_swiglu
    liger_use_token_scaling lisa_layers_attribute lisa_n_layers lisa_step_interval llama4_linearized_experts
    llmcompressor lm_eval_batch_size lm_eval_model lm_eval_post_train lm_eval_tasks load_best_model_at_end load_in_4bit
    load_in_8bit local_rank logging_steps lora_alpha lora_alpha_pattern lora_dropout lora_embedding_kernel
    lora_fan_in_fan_out lora_mlp_kernel lora_model_dir lora_modules_to_save lora_o_kernel lora_on_cpu
    lora_qkv_kernel lora_r lora_rank_pattern lora_target_linear lora_target_modules lora_target_parameters
    loraplus_lr_embedding loraplus_lr_ratio loss_watchdog_patience loss_watchdog_threshold low_cpu_mem_usage
    lr_div_factor lr_groups lr_quadratic_warmup lr_scheduler lr_scheduler_kwargs max_grad_norm max_memory
    max_packed_sequence_len max_prompt_len max_steps mean_resizing_embeddings merge_lora merge_method
    metric_for_best_model micro_batch_size min_sample_len mlflow_experiment_name mlflow_run_name
    mlflow_tracking_uri model_quantization_config model_quantization_config_kwargs moe_bnb_fast
    moe_dequant_chunk_size moe_grouped_backend mora multipack_real_batches neftune_noise_alpha
    noisy_embedding_alpha nonexpert_quantization num_dataset_shards_to_save num_epochs num_labels
    nvfp4_merge_aware nvfp4_merge_aware_start_step optim_args optim_target_modules optimizer orpo_alpha
    otel_metrics_host otel_metrics_port output_dir overrides_of_model_config overrides_of_model_kwargs
    pad_to_multiple_of pad_to_sequence_len peft peft_autocast_adapter_dtype peft_ensure_weight_tying
    peft_init_lora_weights peft_layer_replication peft_layers_pattern peft_layers_to_transform
    peft_trainable_token_indices peft_use_dora peft_use_rslora ple_cpu_offload plugins
    pose_max_context_len pose_num_chunks pose_split_on_token_ids precompute_ref_log_probs preprocess_iterable
    pretrain_multipack_attn pretrain_multipack_buffer_size pretraining_dataset pretraining_sample_concatenation
    process_reward_model processor_kwargs processor_type profiler_steps profiler_steps_start push_dataset_to_hub qat
    qgalore_cos_threshold qgalore_gamma_proj qgalore_proj_bits qgalore_proj_group_size qgalore_proj_quant
    qgalore_proj_type qgalore_queue_size qgalore_rank qgalore_scale qgalore_update_proj_gap
    qlora_sharded_model_loading quantization quantize_moe_experts ray_num_workers ray_run_name reinit_weights
    relora relora_cpu_offload relora_prune_method relora_prune_ratio remove_unused_columns
    resize_token_embeddings_to_32x resources_per_worker resume_from_checkpoint revision_of_model reward_model
    ring_attn_func rl rl_beta role_boundaries rope_scaling rpo_alpha s2_attention sage_attention sample_packing
    sample_packing_bin_size sample_packing_eff_est sample_packing_group_size sample_packing_mp_start_method
    sample_packing_sequentially save_first_step save_only_model save_safetensors save_steps save_strategy
    save_total_limit saves_per_epoch scaling_softmax scaling_softmax_bias scaling_softmax_factor sdp_attention
    sdpa_varlen seed selective_checkpointing sequence_len sequence_parallel_degree shrink_embeddings
    shuffle_before_merging_datasets shuffle_merged_datasets simpo_gamma skip_prepare_dataset special_tokens
    spectrum_model_name spectrum_top_fraction streaming streaming_multipack_buffer_size strict swanlab_api_host
    swanlab_api_key swanlab_completion_log_interval swanlab_completion_max_buffer swanlab_description
    swanlab_experiment_name swanlab_lark_secret swanlab_lark_webhook_url swanlab_log_completions swanlab_log_model
    swanlab_mode swanlab_project swanlab_web_host swanlab_workspace tensor_parallel_size test_datasets tf32
    tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp tokenizer_config tokenizer_legacy
    tokenizer_save_jinja_files tokenizer_type tokenizer_use_fast tokenizer_use_mistral_common tokens torch_compile
    torch_compile_backend torch_compile_mode torch_compile_options torch_empty_cache_steps torchdistx_path
    total_num_tokens total_supervised_tokens trackio_project_name trackio_run_name trackio_space_id
    train_on_inputs trainer_cls trl trust_remote_code type_of_model unfrozen_parameters use_comet use_dsv4_kernels
    use_eaft use_glm_dsa_kernels use_kernels use_mlflow use_onebitllms use_otel_metrics use_pose use_ray
    use_scattermoe use_sonicmoe use_swanlab use_tensorboard use_trackio use_wandb val_set_size vllm wandb_entity
    wandb_log_model wandb_mode wandb_name wandb_project wandb_run_id wandb_watch warmup_ratio warmup_steps
    weight_decay world_size xformers_attention
"""
"""Of the schemas of Axolotl 0.19 and of the plug-ins that it brings along, at the top of a file."""
LLAMA_FACTORY_FIELDS = """\
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split adapter_folder adapter_name_or_path
    add_special_tokens add_tokens additional_target apollo_layerwise apollo_proj apollo_proj_type apollo_rank
    apollo_scale apollo_scale_front apollo_scale_type apollo_target apollo_update_interval apply_rope_fusion
    asft_alpha audio_sampling_rate badam_mask_mode badam_mode badam_start_block badam_switch_interval
    badam_switch_mode badam_update_ratio badam_verbose bias_activation_fusion block_diag_attn buffer_size
    cache_dir calculate_per_token_loss compute_accuracy compute_dtype context_parallel_size create_new_adapter
    crop_to_patches cross_entropy_loss_fusion cutoff_len data_shared_file_system dataset dataset_dir
    default_system device_map disable_gradient_checkpointing disable_shuffling do_sample double_quantization
    dpo_label_smoothing eaft_alpha early_stopping_steps enable_liger_kernel enable_thinking enable_torch_profiler
    eval_dataset eval_num_beams eval_on_each_dataset expert_model_parallel_size export_device export_dir
    export_hf_on_finish export_hub_model_id export_legacy_format export_quantization_bit
    export_quantization_dataset export_quantization_maxlen export_quantization_nsamples export_size extra_config
    finetuning_type flash_attn fp8 fp8_backend fp8_enable_fsdp_float8_all_gather freeze_extra_modules
    freeze_language_model freeze_multi_modal_projector freeze_trainable_layers freeze_trainable_modules
    freeze_vision_tower galore_layerwise galore_proj_type galore_rank galore_scale galore_target
    galore_update_interval hf_hub_token hyper_parallel_args hyper_parallel_cp_size ignore_pad_token_for_loss
    image_do_pan_and_scan image_max_pixels image_min_pixels include_effective_tokens_per_second infer_backend
    infer_dtype init_special_tokens interleave_probs kt_cpu_activation kt_expert_checkpoint_path
    kt_lora_expert_intermediate_size kt_lora_expert_num kt_non_expert_weight_path kt_use_lora_experts
    kt_weight_path kto_chosen_weight kto_rejected_weight ld_alpha length_penalty lora_alpha lora_dropout lora_rank
    lora_target loraplus_lr_embedding loraplus_lr_ratio low_cpu_mem_usage mask_history masked_softmax_fusion
    master_addr master_port max_length max_new_tokens max_samples media_dir megatron_pretrained_checkpoint
    mix_strategy mixed_precision mixture_of_depths model_max_length model_name_or_path model_revision
    module_dropout moe_aux_loss_coef moe_grouped_gemm moe_token_dispatcher_type ms_hub_token neat_packing
    new_special_tokens_config num_beams offload_folder oft_block_size oft_rank oft_target om_hub_token
    overlap_grad_reduce overlap_param_gather overwrite_cache overwrite_output_dir packing
    pipeline_model_parallel_size pissa_convert pissa_init pissa_iter plot_loss ppo_buffer_size ppo_epochs
    ppo_score_norm ppo_target ppo_whiten_rewards pref_bco_weight pref_beta pref_ftx pref_loss
    preprocessing_batch_size preprocessing_num_workers preserve_thinking print_param_status profile_modules
    profiler_active_steps profiler_output_dir profiler_profile_memory profiler_record_shapes profiler_repeat
    profiler_wait_steps profiler_warmup_steps profiler_with_stack pure_bf16 quantization_bit
    quantization_device_map quantization_method quantization_type ray_init_kwargs ray_num_workers
    recompute_granularity recompute_method recompute_num_layers ref_model ref_model_adapters
    ref_model_quantization_bit repetition_penalty resize_vocab reward_model reward_model_adapters
    reward_model_quantization_bit reward_model_type rope_scaling sequence_parallel sglang_config
    sglang_lora_backend sglang_maxlen sglang_mem_fraction sglang_tp_size shift_attn simpo_gamma
    skip_special_tokens split_special_tokens stage streaming swanlab_api_key swanlab_lark_secret
    swanlab_lark_webhook_url swanlab_logdir swanlab_mode swanlab_project swanlab_run_name swanlab_workspace
    temperature template tensor_model_parallel_size tokenized_path tool_format top_k top_p train_from_scratch
    train_on_prompt trust_remote_code upcast_layernorm upcast_lmhead_output use_adam_mini use_apollo use_asft_loss
    use_audio_in_video use_badam use_dft_loss use_distributed_optimizer use_dora use_eaft_loss use_fast_tokenizer
    use_galore use_hyper_parallel use_kt use_kv_cache use_llama_pro use_mca use_megatron_bridge use_muon
    use_packed_sequences use_reentrant_gc use_rslora use_swanlab use_unsloth use_unsloth_gc use_v1_kernels
    val_size video_fps video_max_pixels video_maxlen video_min_pixels virtual_pipeline_model_parallel_size
    vllm_config vllm_enforce_eager vllm_gpu_util vllm_max_lora_rank vllm_maxlen
"""
"""Of the argument classes of LLaMA-Factory 0.9.5, besides those of transformers."""
VERSION_1_FIELDS = """\
    batching_strategy batching_workers bf16 cp_mode cp_size custom_chat_template cutoff_len dist_config
    dist_timeout dp_size dpo_label_smoothing enable_activation_checkpointing eval_dataset flash_attn
    full_determinism global_batch_size init_config kernel_config ld_alpha learning_rate logging_steps
    lr_scheduler_config max_grad_norm max_new_tokens max_steps micro_batch_size model model_class
    mp_replicate_size mp_shard_size num_train_epochs optim_config output_dir peft_config pref_beta pref_ftx
    pref_loss quant_config resume_from_checkpoint sample_backend save_ckpt_as_hf save_epochs save_steps
    save_total_limit seed simpo_gamma train_dataset trust_remote_code
"""
"""Of its version 1."""


@pytest.mark.parametrize(
    ("table", "fields"),
    [(AXOLOTL, AXOLOTL_FIELDS), (LLAMA_FACTORY, LLAMA_FACTORY_FIELDS), (VERSION_1, VERSION_1_FIELDS)],
    ids=["axolotl", "llama-factory", "llama-factory 1"],
)
def test_every_field_of_these_programs_is_known(table: Table, fields: str) -> None:
    assert [name for name in fields.split() if not is_known(table, name)] == []


def test_every_argument_of_transformers_is_one_of_llama_factory() -> None:
    names = [name for name in training_arguments() if not is_known(LLAMA_FACTORY, name)]
    assert names == []


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


def test_what_several_programs_tell_is_told_by_one_table() -> None:
    told = [key for table in TABLES for key in table.keys if key.verdict == "mapped"]
    for quantity, (to, _) in QUANTITIES.items():
        assert {key.to for key in told if key.quantity == quantity} == {tuple(to.split())}, quantity


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("title: a\nkeys: {lr: {tells: optimizer.lr, whi: x}}", "whi"),
        ("title: a\nkeys: {lr: {not supported: x, because: y}}", "because"),
        ("title: a\nkeys: {lr: {}}", "nothing"),
        ("title: a\nkeys: {lr: {of: x}}", "not supported"),
        ("title: a\nkey: {lr: optimizer.lr}", "known: title"),
        ("title: a\nkeys: {lr: optimizer.lr, lr: epochs}", "twice"),
        ("title: a\nkeys: {lr: optimizer.lr, a lr: epochs}", "twice"),
        ("title: a\nkeys: {lr: optimizer.lr, b_: {include: fsdp, without: nothing}}", "nothing"),
    ],
)
def test_a_table_with_a_mistake_is_refused(
    content: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "mistaken.yaml").write_text(content)
    (tmp_path / "tables" / "fsdp.yaml").write_text("keys: {fsdp: sharding}")
    monkeypatch.setattr(yaml_files, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match=message):
        check(tmp_path / "tables" / "mistaken.yaml")


@pytest.mark.parametrize("path", sorted(OWN_TABLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_tables_are_without_mistakes(path: Path) -> None:
    check(path)


def test_the_page_is_up_to_date() -> None:
    written = (Path(__file__).parents[2] / "docs" / "importing.md").read_text()
    assert page.BELOW in written
    assert written == page.render(written), "run: python -m tonnage.migration.page docs/importing.md"


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
    settings_given = tuple(
        ForeignSetting(table, name, value, f"file{number % 2}", number % 5, number=number)
        for number, ((table, name), value) in enumerate(pairs)
    )
    found = convert(Files(settings_given, ("file0", "file1"), (launcher,) if launcher else ()))
    trainers = {table.title for (table, _), _ in pairs if table in TRAINERS}
    several = len(trainers) > 1  # which is refused where files are read
    assert [entry.setting.number for entry in found.entries] == list(range(len(settings_given)))
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


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
@pytest.mark.parametrize(
    "value", ["1", *(pytest.param(value, marks=pytest.mark.matrix) for value in ("auto", None, "no", True))]
)
def test_each_key_by_itself(table: Table, value: Any, tmp_path: Path) -> None:
    for key in table.keys:
        account([((table, key.name), value)], "", tmp_path)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_all_keys_together(table: Table, tmp_path: Path) -> None:
    for value in ("1", "no", "steps", "2"):
        account([((table, key.name), value) for key in table.keys], "torchrun", tmp_path)
