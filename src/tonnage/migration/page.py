"""The tables as documentation: ``python -m tonnage.migration.page`` prints ``docs/importing.md``.

A test compares the file with what this prints, so the page and the account of an import are one text.
"""

from __future__ import annotations

from typing import Any

from tonnage.migration.command import read_command
from tonnage.migration.convert import convert
from tonnage.migration.keys import ARGUMENTS, LLAMA_FACTORY, TABLES, Key
from tonnage.migration.programs import DECIDED, PROGRAMS, in_numbers
from tonnage.migration.reading import Files

EXAMPLE = """\
torchrun --nproc_per_node=4 train.py --model_name_or_path models/7b --data_path rows.json --bf16 True \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --learning_rate 2e-5 --warmup_ratio 0.03 \\
    --num_train_epochs 3 --save_strategy no --fsdp "full_shard auto_wrap" --model_max_length 512 --output_dir runs/7b
"""

OPENING = """\
# Importing a configuration

```
tonnage import axolotl.yaml
tonnage import "llamafactory-cli train sft.yaml" --workers 8 --output config.yaml
tonnage import train.sh ds_config.json --output config.yaml
tonnage import fsdp.yaml sft.yaml --json
```

reads what other programs were told, says whose it is, and writes the config of the same run. It may be:

* a YAML of Axolotl;
* a YAML of LLaMA-Factory, with the `dataset_info.json` that it names (version 1: with its YAML of data sets);
* arguments of transformers' Trainer or of TRL's supervised fine-tuning as YAML or JSON (`trl sft --config`), and
  alignment-handbook's recipes of it;
* an Accelerate YAML, with FSDP, DeepSpeed or plain data parallelism;
* a DeepSpeed JSON;
* a saved command line, in a text, a shell script or in quotes, that starts with `accelerate launch`, `torchrun`,
  `deepspeed`, `python`, `trl sft`, `axolotl train` or `llamafactory-cli train`, also behind `uv run`, `env`, `srun` and
  the like. It is read and never run; variables and arrays that the text sets itself are filled in.

Whose a file is follows from its keys, not from its name; one that has too few keys of anybody, or keys of several, is
refused. Axolotl's and LLaMA-Factory's are told by keys that they alone have (`base_model`; `finetuning_type`,
`cutoff_len`, or `dataset` with `template`): a few arguments of the Trainer are the Trainer's. A file has at most 256 KB
and all files together at most 1,000 keys; more is in no configuration of these programs. What a file names
(`deepspeed: zero3.json`) is read as well where it is found, from here, beside it or above it; else give together what
was used together.

From a word to the other program's, see [coming from Axolotl, LLaMA-Factory, TRL or DeepSpeed](coming-from.md).

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
| not applicable | the same run needs no such key here; a sentence says why |
| not supported | it is not carried over; a sentence says what it would need, or which key of ours does it |
| unknown | no program we know has it; the nearest known key is named |

A key that **decides what is computed** (model, data, lengths, steps, learning rate, precision, adapter, objective, loss
mask, number of workers) and is not supported makes the exit status 2, and nothing is written: without it the run is
another one. An unknown key with a value counts as one that decides. `--partial` writes the rest. Keys that say where
bytes rest or what is shown do not stop an import;
with `--strict` the exit status is 2 for them too, and the config is written all the same. In a script
`tonnage import axolotl.yaml --strict --output config.yaml || exit` goes on only where no key was lost.

| | nothing is lost | only keys that decide nothing | a key that decides what is computed |
|---|---|---|---|
| `tonnage import FILE` | 0, written | 0, written | 2, not written |
| `--strict` | 0, written | 2, written | 2, not written |
| `--partial` | 0, written | 0, written | 0, written |
| `--partial --strict` | 0, written | 2, written | 2, written |

Besides, it lists what follows from **defaults of the other program** (below), **conflicts** between files and what was
taken, **differences** that no single key brings about, and what is **needed**.

## What is taken together

* `batch.sequences` is what one worker holds x accumulation x workers, or `train_batch_size`. The number of workers
  comes from the launcher. Axolotl and LLaMA-Factory take every GPU that they find, which no file says: one worker is
  written unless `--workers N` says more; for the other programs the batch is left open.
* Several machines become `launch.with: slurm` with `launch.nodes` and `launch.gpus_per_node`; for Ray write
  `launch.with: ray`.
* Where arguments are silent, the defaults of whose they are hold, not ours. The first line of the config says which
  version's ([below](#versions-and-defaults)).
* TRL's scripts take one another's arguments, so a script is told by its name: those for preferences, rewards,
  distillation and images are refused by it, and so is a script whose name does not say that it trains (`sft`, `train`,
  `finetune`, ...). `trl dpo` and the like are refused as well.
* TRL adds the loss of a mixture's routers since 1.7: with a weight of 0.001 up to 1.13, and since 1.14 with the one in
  the model's `config.json`. An import goes by the latter (`router_loss: model`).
* A `fraction` of TRL's `datasets` is a share of the mixture's rows, of which none says how many there are: it is
  refused, while alignment-handbook's `weight` is a part of a data set's own rows, as here. Its templates are texts and
  go into `data.template`. Rows that are held out by number (`test_split_size: 1000`) are left open.
* `auto` in a DeepSpeed JSON is what the Trainer fills in from its arguments; without them it stays ours.
* Where two files say different things, DeepSpeed's own file counts for what DeepSpeed does, words of a command before
  a file of arguments, and the launcher's words before Accelerate's YAML. DeepSpeed's scheduler takes the place of the
  Trainer's.
* `constant`, `linear`, `cosine` and `cosine_with_min_lr` are schedules here. Warm-up is linear unless
  Axolotl's is quadratic (`optimizer.warmup_shape`), and with the Trainer's it begins at zero (`optimizer.warmup_from`);
  ours by default begins with a first rate above it.
* A prompt around columns (Axolotl's `alpaca:chat`, `jeopardy`, or a `type` that is written out) is written into
  `data.template`. It has no place for tools.
* Tokens that are added (`tokens`, `special_tokens.eos_token`, `add_special_tokens`) are `data.added_tokens` and
  `data.eos_token`; rows of new ones begin as the mean of the others.
* Early stopping is `evaluate.patience`, counted from the first evaluation after steps as transformers counts, and
  Axolotl's also exports the best step (`checkpoint.best`).
* bf16 means weights in bf16 with an exact fp32 master, as with DeepSpeed. The Trainer by itself keeps fp32 weights and
  computes in bf16 where it may.
* ZeRO stages are ours. FSDP's `FULL_SHARD` is 3, `SHARD_GRAD_OP` 2, `NO_SHARD` and DDP 0; hybrid ones need the number
  of nodes.
* `nvme` is `disk` and `cpu` is `host`, where states may rest ([offload](offload.md)). For the optimizer it becomes
  `memory.optimizer_tier`; where gradients rest (`memory.gradient_tier`) is left to the plan. With
  several workers, parameters rest elsewhere with ZeRO 3 alone, as with DeepSpeed. Axolotl's `offload_params`
  is the optimizer's state in host memory.
* LoRA is `adapter`: 4 bits are NF4, with scales in 8 bits where the other program does so by default; regular
  expressions over names of layers become patterns, and are refused where patterns cannot say the same.
* Chat templates by name are the model's own where that has the same text, else one of ours that has it, else their text
  is written into `data.template`, without a place for tools; those whose text we do not have are refused until it is
  written there, or `data.template: auto` for the model's own.
* An epoch of the Trainer ends with a step that may be smaller than the others; here the last step goes on into the
  next epoch, so runs of several epochs may have fewer steps, by less than one an epoch.
* What closes a turn is trained. LLaMA-Factory also trains the line break that templates such as ChatML write after it,
  which comes when a model has stopped: here it is context.
* Of a turn that is too long LLaMA-Factory cuts prompt and answer each in proportion to its length; here the end of the
  conversation is cut. Its version 1 decays norms and biases too, and after 0.9.5 makes a sample of each answer.
* Axolotl's warm-up by default is 3% of all steps and at most 100. Where no key says how many steps there are, the
  account says when to write 100.
* A model whose weights are quantised (AWQ, GPTQ, AQLM, bitsandbytes, ...) is refused, as its `config.json` says if it
  is here, and else its name; mxfp4 and fp8 are read as bf16.
* Seeds do not carry over: the order of rows is another one.

What the training script itself does, how it renders a prompt for instance, is in no configuration: compare with
`tonnage inspect`.

<!-- Written by `python -m tonnage.migration.page > docs/importing.md`; change src/tonnage/migration. -->
"""


def render() -> str:
    """The page, as Markdown: what an import is, and a table for each kind of configuration."""
    parts = [OPENING.replace("EXAMPLE", EXAMPLE).replace("CONFIG", _config_of_the_example()), _defaults()]
    for table in TABLES:
        title = table.title[0].upper() + table.title[1:]
        parts += [f"## {title}\n", "| key | becomes | |\n|---|---|---|"]
        if table is LLAMA_FACTORY:
            parts.insert(-1, "Besides, all arguments of transformers above that are not told otherwise here.\n")
            parts += [_row(key) for key in table.keys if key not in ARGUMENTS.keys]
        else:
            parts += map(_row, table.keys)
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _config_of_the_example() -> str:
    command = read_command(EXAMPLE, "train.sh", 0)
    return convert(Files(tuple(command.givens), ("train.sh",), (command.launcher,))).text


def _defaults() -> str:
    """What each program does where its files are silent, and which versions were read."""
    programs = [program for program in PROGRAMS if program.defaults]
    lines = ["## Versions and defaults\n"]
    lines += [f"{'; '.join(f'{one.name} {one.versions}' for one in PROGRAMS)}.\n"]
    lines += [
        "What holds where a file is silent (-: our own default, or it must be said):\n",
        f"| | {' | '.join(one.name for one in programs)} |",
    ]
    lines += [f"|---|{'---|' * len(programs)}"]
    for name, words in DECIDED.items():
        cells = [_default(program.defaults.get(name)) for program in programs]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _default(found: tuple[str, Any] | None) -> str:
    """The value, with the name that the program has for it, if it has one."""
    if found is None:
        return "-"
    name, value = found
    said = (
        {True: "yes", False: "no", None: name}.get(value, value)
        if isinstance(value, bool | None)
        else in_numbers(value)
    )
    return f"{said} (`{name}`)" if name.replace("_", "").isalnum() else str(said)


def _row(key: Key) -> str:
    becomes = ", ".join(f"`{name}`" for name in key.to) if key.verdict == "mapped" else key.verdict
    return f"| `{key.name}` | {becomes or 'another file'} | {key.reason} |"


if __name__ == "__main__":
    print(render(), end="")
