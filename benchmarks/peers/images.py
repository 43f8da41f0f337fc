"""Rows with images on this machine: tonnage beside TRL's SFTTrainer, two epochs of the same rows in the same steps.

    python -m benchmarks.peers.images [--shape llava-170m] [--rows 64] [--together 8] [--only NAME ...]
                                      [--output FILE]

One image of 224 x 224 a row, a question of 60 to 160 tokens, an answer of 60 to 140. The tower and the projector are
frozen for both. Both keep fp32 masters and moments of the model of text and compute in bf16. Whatever ours does before
its first step, to build the model and to compute all features, is charged to it; of TRL only steps are timed. TRL in
two ways: as it comes, with gradient checkpointing, and without.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.peers.contest import Contestant, compete, largest_difference, machine, our_command, write_result
from benchmarks.peers.inputs import write_our_run
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tonnage.data import PackedDataset
from tonnage.decide.decision import Decision
from tonnage.host.threads import usable_cores

LR, BETA2, IMAGE, VOCABULARY, STEP = 1e-5, 0.999, 258, 50304, 16
MICRO_BATCH = 2
"""Rows of ours; eight are no faster."""
PEERS: dict[str, dict[str, Any]] = {
    "TRL, defaults": {"gradient_checkpointing": True},
    "TRL, no checkpointing": {"gradient_checkpointing": False},
}
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 4096,
    "eos_token_id": 256,
    "bos_token_id": 256,
    "pad_token_id": 257,
    "tie_word_embeddings": True,
}


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One of bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    names = ("<|end|>", "<|pad|>", "<image>", "<|user|>", "<|assistant|>")
    bytewise.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens={"image_token": "<image>"},
        chat_template=TEMPLATE,
    )


def _llava() -> tuple[Any, Any]:
    """A CLIP tower of 12 layers, 256 tokens an image, and the text model of SmolLM2-135M's shape."""
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "image_size": 224,
        "patch_size": 14,
    }
    config = transformers.LlavaConfig(  # type: ignore[call-arg]
        text_config=TEXT | {"model_type": "llama"},
        vision_config=vision,
        image_token_id=IMAGE,
        tie_word_embeddings=True,
        architectures=["LlavaForConditionalGeneration"],
    )
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224})
    told = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return config, transformers.LlavaProcessor(images, _tokenizer(), chat_template=TEMPLATE, **told)


def _qwen() -> tuple[Any, Any]:
    """A tower of windows as Qwen2.5-VL has it, 64 tokens an image, positions of three dimensions."""
    rope = {"rope_type": "default", "mrope_section": [16, 8, 8], "rope_theta": 10000.0}
    vision = {
        "depth": 12,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_heads": 8,
        "out_hidden_size": 576,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [5, 11],
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": rope},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=300,
        vision_start_token_id=301,
        tie_word_embeddings=True,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )
    images = transformers.Qwen2VLImageProcessorPil(min_pixels=224 * 224, max_pixels=224 * 224)
    # Its own processor needs torchvision, for videos; this one does the same with images.
    return config, transformers.PaddleOCRVLProcessor(images, _tokenizer(), chat_template=TEMPLATE)


SHAPES: dict[str, Callable[[], tuple[Any, Any]]] = {"llava-170m": _llava, "qwen-170m": _qwen}


def write_model(folder: Path, shape: str) -> Path:
    """A model with random weights in bf16, and its processor."""
    config, processor = SHAPES[shape]()
    torch.manual_seed(0)
    model = getattr(transformers, config.architectures[0])(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    return folder


def write_rows(folder: Path, number: int) -> Path:
    """Rows of which a byte is a token, with an image each."""
    chance = random.Random(0)

    def text(least: int, most: int) -> str:
        return "".join(chance.choices("abcdefghijklmnopqrstuvwxyz ", k=chance.randint(least, most))).strip() + "."

    with (folder / "rows.jsonl").open("w") as rows:
        for row in range(number):
            noise = Image.effect_noise((224, 224), chance.randint(20, 90)).convert("RGB")
            noise.save(folder / f"{row}.png")
            content = [{"type": "image", "path": f"{row}.png"}, {"type": "text", "text": text(60, 160)}]
            answer = [{"type": "text", "text": text(60, 140)}]
            turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
            rows.write(json.dumps({"messages": turns}) + "\n")
    return folder / "rows.jsonl"


def rows_of_steps(decision: Decision, num_steps: int) -> tuple[list[list[int]], list[int]]:
    """The rows of every step of a run, in its order, by their number in the file; and tokens of each step."""
    plan, source = decision.plan, decision.prepared.train.source
    data = PackedDataset.open(plan.data.train_path)
    steps, tokens = [], []
    for step in range(num_steps):
        positions = range(step * plan.packs_per_step, (step + 1) * plan.packs_per_step)
        packs = [data.pack_at(position, decision.config.seed) for position in positions]
        documents = [int(document) for pack in packs for document in data.documents(pack)]
        steps.append([source.where(document)[1] - 1 for document in documents])
        tokens.append(sum(len(source.tokens(document)) for document in documents))
    return steps, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llava-170m")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--together", type=int, default=8, help="rows of a micro-batch of TRL's")
    parser.add_argument("--only", nargs="*", choices=PEERS, default=[*PEERS])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    num_steps = 2 * arguments.rows // STEP
    with tempfile.TemporaryDirectory() as made:
        contestants = _contestants(Path(made), arguments, num_steps)
        others = compete(contestants, num_steps - 1, 1)
    results = {contestant.name: contestant.result() for contestant in contestants}
    for contestant in contestants:
        seconds = contestant.result()["step_seconds_median"] * num_steps + contestant.facts.get("build_seconds", 0.0)
        results[contestant.name]["rows_per_second_of_two_epochs"] = 2 * arguments.rows / seconds
    ours, mine = contestants[0], results[contestants[0].name]
    for theirs in contestants[1:]:
        other = results[theirs.name]
        other["compared"] = {
            "rows_per_second": mine["rows_per_second_of_two_epochs"] / other["rows_per_second_of_two_epochs"],
            "memory": mine["peak_bytes"] / other["peak_bytes"],
            "largest_difference_of_losses": largest_difference(ours.losses, theirs.losses),
        }
    result = {
        "benchmark": "peers/images",
        "machine": machine(),
        "share_of_cpu_that_others_had": others,
        "shape": arguments.shape,
        "data": "an image of noise, a question and an answer a row, made by the benchmark",
        "rows": arguments.rows,
        "rows_per_step": STEP,
        "contestants": results,
    }
    write_result(arguments.output, result)


def _contestants(folder: Path, arguments: argparse.Namespace, num_steps: int) -> list[Contestant]:
    model, rows = write_model(folder / "model", arguments.shape), write_rows(folder, arguments.rows)
    config = {
        "model": str(model),
        "data": {"train": str(rows), "max_length": 1024, "pack": False, "cache": str(folder / "cache")},
        "batch": {"sequences": STEP},
        "steps": num_steps + 1,  # the answer about a step is given where the next begins
        "precision": "bf16",
        "memory": {"micro_batch": MICRO_BATCH},
        "optimizer": {"lr": LR, "betas": (0.9, BETA2), "schedule": "constant", "warmup": 0, "weight_decay": 0.0},
    }
    decision = write_our_run(folder / "run", config)
    order, tokens = rows_of_steps(decision, num_steps)
    spec = {"model": str(model), "rows": str(rows), "order": order, "tokens": tokens, "lr": LR, "beta2": BETA2}
    commands = {"tonnage": our_command("benchmarks.peers.ours", str(folder / "run"))}
    for number, name in enumerate(arguments.only):
        path = folder / f"spec-{number}.json"
        path.write_text(json.dumps(spec | {"documents": arguments.together, "arguments": PEERS[name]}))
        commands[name] = our_command("benchmarks.peers.images_worker", str(path))
    return [
        Contestant(name, command, folder / f"{name}.log", threads=usable_cores()) for name, command in commands.items()
    ]


if __name__ == "__main__":
    main()
