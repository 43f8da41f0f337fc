"""The tables as documentation: ``python -m tonnage.migration.page`` prints ``docs/importing.md``.

A test compares the file with what this prints, so the page and the account of an import are one text.
"""

from __future__ import annotations

from tonnage.migration.accelerate import ACCELERATE
from tonnage.migration.arguments import ARGUMENTS
from tonnage.migration.axolotl import AXOLOTL
from tonnage.migration.command import read_command
from tonnage.migration.convert import convert
from tonnage.migration.deepspeed import DEEPSPEED
from tonnage.migration.keys import Key
from tonnage.migration.launchers import DEEPSPEED_LAUNCHER, PYTHON, TORCHRUN
from tonnage.migration.llama_factory import LLAMA_FACTORY, VERSION_1
from tonnage.migration.programs import DECIDED, PROGRAMS
from tonnage.migration.reading import Files

TABLES = (
    DEEPSPEED,
    ACCELERATE,
    ARGUMENTS,
    TORCHRUN,
    DEEPSPEED_LAUNCHER,
    PYTHON,
    AXOLOTL,
    LLAMA_FACTORY,
    VERSION_1,
)

EXAMPLE = """\
torchrun --nproc_per_node=4 train.py --model_name_or_path models/7b --data_path rows.json --bf16 True \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --learning_rate 2e-5 --warmup_ratio 0.03 \\
    --num_train_epochs 3 --save_strategy no --fsdp "full_shard auto_wrap" --model_max_length 512 --output_dir runs/7b
"""

OPENING = """\
# Importing a configuration

```
tonnage import ds_config.json
tonnage import train.sh ds_config.json --output config.yaml
tonnage import fsdp.yaml sft.yaml --json
```

reads what other programs were told and writes the config of the same run. A file may be:

* a DeepSpeed JSON;
* an Accelerate YAML, with FSDP, DeepSpeed or plain data parallelism;
* arguments of transformers' Trainer or of TRL's supervised fine-tuning as YAML or JSON (`trl sft --config`);
* a saved command line, in a text or a shell script, that starts with `accelerate launch`, `torchrun`, `deepspeed`,
  `python` or `trl sft`. It is read and never run; variables and arrays that the text sets itself are filled in.

A file has at most 256 KB and all files together at most 1,000 keys; more is in no configuration of these programs.

Give together what was used together: a command and the DeepSpeed JSON it names. What a file is follows from its keys.

A command such as

```
EXAMPLE```

becomes

```yaml
CONFIG```

The config goes to standard output or to `--output`, which is never overwritten; each line says where it comes from.
What is still needed, a model for instance that a DeepSpeed JSON does not name, stands at its place as a comment with
the word NEEDED. The account goes to standard error. Each key that was given is in one of four lists:

| list | means |
|---|---|
| mapped | it decides a key of the config; a sentence says how the meaning shifts |
| not applicable | the same run needs no such key here |
| not supported | without it the run is another one than was asked for |
| unknown | no program we know has it; the nearest known key is named |

Besides, it lists what follows from **defaults of the other program** (transformers' schedule is linear, its
`adam_beta2` 0.999), **conflicts** between files and what was taken, **differences** that no single key brings about,
and what is **needed**. With `--strict` the exit status is 2 if a key is unknown or not supported; otherwise it is 0.

## What is taken together

* `batch.sequences` is `per_device_train_batch_size` x `gradient_accumulation_steps` x workers, or `train_batch_size`.
  The number of workers comes from the launcher; if no file says it, the batch is left open.
* With arguments of the Trainer, what they leave out has the Trainer's default (TRL's, if an argument is TRL's), not
  ours.
* `auto` in a DeepSpeed JSON is what the Trainer fills in from its arguments; without them it stays ours.
* Where two files say different things, DeepSpeed's own file counts for what DeepSpeed does, words of a command before
  a file of arguments, and the launcher's words before Accelerate's YAML. DeepSpeed's scheduler takes the place of the
  Trainer's.
* `constant`, `linear`, `cosine` and `cosine_with_min_lr` are schedules here. Warm-up is linear and does not begin at
  zero: the first step has a learning rate.
* bf16 means weights in bf16 with an exact fp32 master, as with DeepSpeed. The Trainer by itself keeps fp32 weights and
  computes in bf16 where it may.
* ZeRO stages are ours. FSDP's `FULL_SHARD` is 3, `SHARD_GRAD_OP` 2, `NO_SHARD` and DDP 0; hybrid ones need the number
  of nodes.
* `nvme` is `disk` and `cpu` is `host`, where optimizer state and gradients may rest ([offload](offload.md)); parameters
  have no place in host memory yet, so `cpu` for them is not supported.
* Seeds do not carry over: the order of rows is another one.

What the training script itself does, how it renders a prompt for instance, is in no configuration: compare with
`tonnage inspect`.

Versions: DeepSpeed 0.19, Accelerate 1.15, transformers 5 (and names of 4), TRL 1 (and names before).

<!-- Written by `python -m tonnage.migration.page > docs/importing.md`; change src/tonnage/migration. -->
"""


def render() -> str:
    """The page, as Markdown: what an import is, and a table for each kind of configuration."""
    parts = [OPENING.replace("EXAMPLE", EXAMPLE).replace("CONFIG", _config_of_the_example())]
    for table in TABLES:
        title = table.title[0].upper() + table.title[1:]
        parts += [f"## {title}\n", "| key | becomes | |\n|---|---|---|"]
        parts += map(_row, table.keys)
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _config_of_the_example() -> str:
    command = read_command(EXAMPLE, "train.sh", 0)
    return convert(Files(tuple(command.givens), ("train.sh",), (command.launcher,))).text


def _row(key: Key) -> str:
    becomes = ", ".join(f"`{name}`" for name in key.to) if key.verdict == "mapped" else key.verdict
    return f"| `{key.name}` | {becomes or 'another file'} | {key.reason} |"


if __name__ == "__main__":
    print(render(), end="")
