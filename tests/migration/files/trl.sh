#!/usr/bin/env bash
#SBATCH --gres=gpu:4
set -euo pipefail
MODEL=Qwen/Qwen2.5-0.5B
export WANDB_PROJECT=chat
cd "$HOME/runs"

CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch --config_file accelerate_fsdp.yaml sft.py \
    --model_name_or_path $MODEL \
    --dataset_name trl-lib/Capybara \
    --learning_rate 2.0e-5 \
    --num_train_epochs 1 \
    --packing \
    --max_length 2048 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --gradient_checkpointing \
    --assistant_only_loss \
    --lr_scheduler_type cosine_with_min_lr \
    --lr_scheduler_kwargs '{"min_lr_rate": 0.1}' \
    --warmup_steps 20 \
    --optim adamw_bnb_8bit \
    --eval_strategy steps \
    --eval_steps 100 \
    --attn_implementation flash_attention_2 \
    --report_to tensorboard \
    --seed 7 \
    --output_dir Qwen2-0.5B-SFT 2>&1 | tee log.txt
