"""Saved command lines: what a shell would make of them, found without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tonnage.errors import UserError
from tonnage.migration.command import read_command


def given(text: str) -> dict[str, Any]:
    return {setting.name: setting.value for setting in read_command(text, "train.sh").settings}


@pytest.mark.parametrize(
    ("text", "launcher", "expected"),
    [
        ("torchrun --nproc-per-node=4 t.py --bf16 True", "torchrun", {"nproc_per_node": "4", "bf16": "True"}),
        ("python -m torch.distributed.run --standalone t.py --seed 1", "torchrun", {"standalone": True, "seed": "1"}),
        ("python -u -m pkg.train --seed 1", "python", {"script": "pkg.train", "seed": "1"}),
        ("/opt/bin/python3.11 t.py --seed=1", "python", {"script": "t.py", "seed": "1"}),
        ("accelerate launch --multi_gpu --debug t.py --seed 1", "accelerate", {"multi_gpu": True, "seed": "1"}),
        ("accelerate launch -m pkg.train --seed 1", "accelerate", {"module": True, "script": "pkg.train"}),
        ("deepspeed --include h:0,1 t.py --deepspeed d.json", "deepspeed", {"include": "h:0,1", "deepspeed": "d.json"}),
        ("trl sft --config a.yaml --num_processes 2 --packing", "trl", {"num_processes": "2", "packing": True}),
        ("--seed 1\n", "arguments", {"seed": "1"}),
        ("CUDA_VISIBLE_DEVICES=0,1 python t.py --seed 1", "python", {"CUDA_VISIBLE_DEVICES": "0,1"}),
        ("export CUDA_VISIBLE_DEVICES=2\npython t.py --seed 1", "python", {"CUDA_VISIBLE_DEVICES": "2"}),
        ("M=a/b\npython t.py --model_name_or_path $M", "python", {"model_name_or_path": "a/b"}),
        ("python t.py --output_dir out/${NAME:-x}", "python", {"output_dir": "out/x"}),
        ("python t.py --output_dir $UNSET/x", "python", {"output_dir": "$UNSET/x"}),
        ('A="--seed 1 --bf16"\npython t.py $A', "python", {"seed": "1", "bf16": True}),
        ("cd /x && srun --gpus 4 torchrun t.py --seed 1 > log 2>&1 &", "torchrun", {"script": "t.py", "seed": "1"}),
        ("A=(\n  --seed 1  # one\n  --bf16\n)\npython t.py \"${A[@]}\"", "python", {"seed": "1", "bf16": True}),
        ("A=(--seed 1)\nA+=(--x 'a b')\npython t.py \"${A[@]}\"", "python", {"seed": "1", "x": "a b"}),
        ('A="--seed 1"\nA+=" --bf16"\npython t.py $A', "python", {"seed": "1", "bf16": True}),
        ("python prepare.py --rows 9\ntorchrun t.py --seed 1", "torchrun", {"script": "t.py", "seed": "1"}),
        ("python t.py --output_dir a#b --seed 1 # don't", "python", {"output_dir": "a#b", "seed": "1"}),
        ("# it's commented\npython t.py --seed 1 # done", "python", {"seed": "1"}),
        ("nohup python t.py --seed 1 | tee log", "python", {"seed": "1"}),
        ("python t.py \\\n  --seed 1 \\\n  --bf16 # half\n", "python", {"seed": "1", "bf16": True}),
        ("python t.py --fsdp 'full_shard auto_wrap'", "python", {"fsdp": "full_shard auto_wrap"}),
        ("python t.py --report_to tensorboard wandb", "python", {"report_to": ["tensorboard", "wandb"]}),
        ("for r in 1e-5 2e-5; do python t.py --seed 1 --learning_rate $r; done", "python", {"learning_rate": "$r"}),
        ("if [ -d x ]; then torchrun t.py --seed 1; fi", "torchrun", {"seed": "1"}),
        ("python t.py --max_steps -1", "python", {"max_steps": "-1"}),
        ("torchrun --nnodes $(nvidia-smi -L | wc -l) t.py --seed 1", "torchrun", {"script": "t.py", "seed": "1"}),
        ("torchrun --nnodes=`nvidia-smi -L | wc -l` t.py --seed 1", "torchrun", {"script": "t.py", "seed": "1"}),
        ("N=$(nvidia-smi -L | wc -l); python t.py --seed 1 --output_dir $(date +%Y)", "python", {"seed": "1"}),
        ("python t.py --text '$(' --seed 1; echo 'a `'", "python", {"text": "$(", "seed": "1"}),
        ("python t.py --run_name '' --seed 1", "python", {"run_name": "", "seed": "1"}),
        ('accelerate launch t.py --run_name "" --seed 1', "accelerate", {"run_name": "", "seed": "1"}),
        ('A=""\npython t.py $A --seed 1 $A', "python", {"seed": "1", "word": None}),
        ("python t.py --no_remove_unused_columns", "python", {"remove_unused_columns": False}),
        ('python t.py --lr_scheduler_kwargs \'{"min_lr": 1e-6}\'', "python", {"lr_scheduler_kwargs.min_lr": 1e-6}),
        ("python t.py config.yaml --seed 1", "python", {"config": "config.yaml", "seed": "1"}),
        ("#!/bin/bash\nset -e\necho 'python x'\npython t.py --text 'two\nlines'", "python", {"text": "two\nlines"}),
        ("python t.py --output_dir <your path> --seed 1", "python", {"seed": "1"}),
        ("python t.py --eos_token ';' --seed 1", "python", {"eos_token": ";", "seed": "1"}),
        ('python t.py --sep "||" --text a\\;b --seed 1 && echo', "python", {"sep": "||", "text": "a;b", "seed": "1"}),
        ("python t.py --stop \\; --seed 1; echo '#'", "python", {"stop": ";", "seed": "1"}),
    ],
)  # fmt: skip
def test_commands(text: str, launcher: str, expected: dict[str, Any]) -> None:
    assert read_command(text, "train.sh").launcher == launcher
    found = given(text)
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ls -l\n", "no command that trains"),
        ("", "no command that trains"),
        ("python a.py --seed 1\npython b.py --seed 2\n", "2 commands"),
        ("python a.py --x 'open\n", "not closed"),
        ("accelerate config\ntrl env\n", "no command that trains"),
    ],
)
def test_what_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_command(text, "train.sh")


def test_files_that_are_none_of_ours_are_refused_together(tmp_path: Path) -> None:
    from tonnage.migration import import_files

    (tmp_path / "rows.json").write_text('[{"instruction": "x"}]')
    (tmp_path / "other.yaml").write_text("apiVersion: v1\nkind: Pod\n")
    (tmp_path / "broken.json").write_text('{"bf16": {"enabled": true,}}')
    (tmp_path / "twice.json").write_text('{"train_batch_size": 1, "train_batch_size": 2}')
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x02\xff\xfe")
    names = ["rows.json", "other.yaml", "broken.json", "twice.json", "training_args.bin", "missing.json"]
    with pytest.raises(UserError) as caught:
        import_files([tmp_path / name for name in names])
    assert [Path(problem.where.partition(".json:")[0]).stem for problem in caught.value.problems] == [
        Path(name).stem for name in names
    ]


@pytest.mark.parametrize(
    ("branch", "rate"),
    [
        ('if [ "$BIG" = yes ]; then\n  LR=2\nfi', "$LR"),
        ('[ "$BIG" = yes ] && LR=2', "$LR"),
        ('case "$BIG" in\n  yes)\n    LR=2\n    ;;\nesac', "$LR"),
        ("if true; then LR=1; fi", "1"),
        ("if true; then OTHER=2; fi; LR=3", "3"),
        ("if true; then LR=2; fi; LR=3", "3"),
        ("cd there && true; LR=2", "2"),
    ],
)
def test_a_variable_that_a_branch_may_change_is_left_open(branch: str, rate: str) -> None:
    """Whether the branch is taken nobody knows but who runs the script."""
    assert given(f"LR=1\n{branch}\npython train.py --learning_rate $LR")["learning_rate"] == rate
