"""Does transformers 4.57 read our exports as transformers 5 does? Logits, tokens, templates and decoding, compared.

    python scripts/check_transformers_4.py [--python PYTHON] [--out benchmarks/results/transformers_4.json]

A tiny model of every dense family is made from random weights, with rope settings and sizes that are no defaults,
trained by nobody and exported by ``tonnage.checkpoint.export``. Both versions then load the export in fp32, each in a
process of its own, and say what they find. Tokenizers of several kinds are exported and compared beside them.

Without ``--python``, a virtual environment with transformers 4.57.6 is made by pip, in a temporary directory. It takes
torch from this environment, so that both versions compute with the same one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

WANTED = "transformers==4.57.6"
LARGEST_DIFFERENCE = 1e-5
PROBE = "The quick brown fox:\n  jumps over 13 lazy dogs, naïvely! <|im_end|> <tool> Ünïcödé 漢字\n"
TALK = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi."}]
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 16}
WINDOW = {"sliding_window": 16}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 54321.0}}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 54321.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 54321.0,
    "short_factor": [1.1] * 8,
    "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0],
    "original_max_position_embeddings": 16,
}
GEMMA3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 4321.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 54321.0, "factor": 4.0},
}
OLMO3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 54321.0},
    "full_attention": YARN | {"attention_factor": 1.2},
}
# 4.57 takes the base of full attention for both, whatever a file says; in those that are published they are equal.
MODERNBERT = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 54321.0},
    "full_attention": {"rope_type": "default", "rope_theta": 54321.0},
}
BY_TYPE = {"layer_types": ["sliding_attention", "full_attention"]}


def part(share: float) -> dict[str, Any]:
    """Rope for a share of every head."""
    return {"rope_parameters": ROPE["rope_parameters"] | {"partial_rotary_factor": share}}


FAMILIES: dict[str, Callable[[Any], Any]] = {
    "apertus": lambda t: t.ApertusConfig(**GROUPED, rope_parameters=LLAMA3),
    "arcee": lambda t: t.ArceeConfig(**HEADS, **ROPE),
    "bitnet": lambda t: t.BitNetConfig(**GROUPED, **ROPE),
    "cohere": lambda t: t.CohereConfig(**GROUPED, **ROPE, logit_scale=0.5),
    "cohere2": lambda t: t.Cohere2Config(**GROUPED, **ROPE, **WINDOW, **BY_TYPE, logit_scale=0.5),
    "cwm": lambda t: t.CwmConfig(**HEADS, **WINDOW, **BY_TYPE, rope_parameters=LLAMA3),
    "diffllama": lambda t: t.DiffLlamaConfig(**GROUPED, **ROPE),
    "doge": lambda t: t.DogeConfig(**GROUPED, **ROPE),
    "ernie4_5": lambda t: t.Ernie4_5Config(**HEADS, **ROPE),
    "exaone4": lambda t: t.Exaone4Config(**GROUPED, **ROPE, **WINDOW, **BY_TYPE),
    "gemma": lambda t: t.GemmaConfig(**HEADS, **ROPE),
    "gemma2": lambda t: t.Gemma2Config(**HEADS, **ROPE, **WINDOW, query_pre_attn_scalar=16),
    "gemma3_text": lambda t: t.Gemma3TextConfig(
        **HEADS, **WINDOW, **BY_TYPE, rope_parameters=GEMMA3, query_pre_attn_scalar=16
    ),
    "glm": lambda t: t.GlmConfig(**HEADS, **part(0.5)),
    "glm4": lambda t: t.Glm4Config(**HEADS, **part(0.5)),
    "gpt2": lambda t: t.GPT2Config(
        vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=512, bos_token_id=0, eos_token_id=0
    ),
    "gpt_bigcode": lambda t: t.GPTBigCodeConfig(vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=512),
    "gpt_neox": lambda t: t.GPTNeoXConfig(**SIZES, **part(0.5)),
    "granite": lambda t: t.GraniteConfig(
        **GROUPED, **ROPE, logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5
    ),
    "helium": lambda t: t.HeliumConfig(**HEADS, **ROPE),
    "hunyuan_v1_dense": lambda t: t.HunYuanDenseV1Config(**HEADS, **ROPE),
    "lfm2": lambda t: t.Lfm2Config(**GROUPED, **ROPE, layer_types=["conv", "full_attention"]),
    "llama": lambda t: t.LlamaConfig(**HEADS, **ROPE),
    "llama, tied": lambda t: t.LlamaConfig(**HEADS, **ROPE, tie_word_embeddings=True),
    "llama, llama3 rope": lambda t: t.LlamaConfig(**HEADS, rope_parameters=LLAMA3),
    "llama, yarn rope": lambda t: t.LlamaConfig(**HEADS, rope_parameters=YARN),
    "llama, linear rope": lambda t: t.LlamaConfig(
        **HEADS, rope_parameters={"rope_type": "linear", "rope_theta": 54321.0, "factor": 4.0}
    ),
    "llama, dynamic rope": lambda t: t.LlamaConfig(
        **HEADS, rope_parameters={"rope_type": "dynamic", "rope_theta": 54321.0, "factor": 4.0}
    ),
    "ministral": lambda t: t.MinistralConfig(**HEADS, **ROPE, **WINDOW, **BY_TYPE),
    "mistral": lambda t: t.MistralConfig(**HEADS, **ROPE, **WINDOW),
    "modernbert-decoder": lambda t: t.ModernBertDecoderConfig(
        **SIZES, **BY_TYPE, local_attention=16, rope_parameters=MODERNBERT
    ),
    "nemotron": lambda t: t.NemotronConfig(**HEADS, **part(0.5)),
    "olmo": lambda t: t.OlmoConfig(**GROUPED, **ROPE, clip_qkv=3.0),
    "olmo2": lambda t: t.Olmo2Config(**GROUPED, **ROPE),
    "olmo3": lambda t: t.Olmo3Config(**GROUPED, **WINDOW, **BY_TYPE, rope_parameters=OLMO3),
    "opt": lambda t: t.OPTConfig(
        vocab_size=512,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=64,
        max_position_embeddings=512,
    ),
    "persimmon": lambda t: t.PersimmonConfig(**SIZES, **part(0.5)),
    "phi": lambda t: t.PhiConfig(**GROUPED, **part(0.25)),
    "phi3": lambda t: t.Phi3Config(**GROUPED, **ROPE, **WINDOW),
    "phi3, long rope": lambda t: t.Phi3Config(**GROUPED, rope_parameters=LONG, original_max_position_embeddings=16),
    "qwen2": lambda t: t.Qwen2Config(**GROUPED, **ROPE, **WINDOW, use_sliding_window=True, max_window_layers=1),
    "qwen3": lambda t: t.Qwen3Config(**HEADS, rope_parameters=YARN),
    "seed_oss": lambda t: t.SeedOssConfig(**HEADS, **ROPE),
    "smollm3": lambda t: t.SmolLM3Config(**GROUPED, **ROPE, no_rope_layers=[1, 0]),
    "stablelm": lambda t: t.StableLmConfig(**GROUPED, **part(0.5)),
    "starcoder2": lambda t: t.Starcoder2Config(**GROUPED, **ROPE, **WINDOW),
    "vaultgemma": lambda t: t.VaultGemmaConfig(**HEADS, **ROPE, **WINDOW, query_pre_attn_scalar=16),
}
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOLS = "{{ bos_token or '' }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"


def tokenizers(transformers: Any) -> dict[str, Callable[[], Any]]:
    """Small tokenizers of several kinds, as the classes of transformers 5 make them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    lines = [PROBE, "the cat sat on the mat while answering questions about water", "user assistant Hello Hi there"]
    more = ["<|im_start|>", "<|im_end|>"]

    def byte_level(*, first: bool) -> Any:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        specials = ["<|endoftext|>", "<|pad|>", *more]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(
            lines * 3, trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet)
        )
        if first:
            made.post_processor = processors.TemplateProcessing(
                single="<|endoftext|> $A", pair="<|endoftext|> $A $B", special_tokens=[("<|endoftext|>", 0)]
            )
        ends = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
        return transformers.PreTrainedTokenizerFast(tokenizer_object=made, extra_special_tokens=more, **ends)

    def sentencepiece(**how: Any) -> Any:
        made = Tokenizer(models.BPE(byte_fallback=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        made.train_from_iterator(lines * 3, trainers.BpeTrainer(vocab_size=500, special_tokens=specials))
        model = json.loads(made.to_str())["model"]
        merges = [tuple(merge) for merge in model["merges"]]
        return transformers.LlamaTokenizer(vocab=model["vocab"], merges=merges, **how)

    def templated(tokenizer: Any, template: Any) -> Any:
        tokenizer.chat_template = template
        return tokenizer

    return {
        "byte-level, more special tokens": lambda: templated(byte_level(first=False), TEMPLATE),
        "byte-level, first token added, two templates": lambda: templated(
            byte_level(first=True), {"default": TEMPLATE, "tool_use": TOOLS}
        ),
        "sentencepiece": lambda: templated(sentencepiece(), TOOLS),
        "sentencepiece, no first token": lambda: templated(sentencepiece(add_bos_token=False), TOOLS),
        "sentencepiece, first and last token": lambda: sentencepiece(add_bos_token=True, add_eos_token=True),
    }


def export_all(folder: Path, only: list[str]) -> dict[str, str]:
    """Export every family and tokenizer to a directory of its own; what cannot be, and why."""
    import torch
    import transformers

    from tonnage.checkpoint.description import ExportForm
    from tonnage.checkpoint.export import Start, export
    from tonnage.checkpoint.save import Cursor, Saver, checkpoint_path
    from tonnage.model.anatomy import dissect
    from tonnage.model.build import allocate, build_on_meta, initialise_randomly
    from tonnage.model.files import find_model, read_tokenizer
    from tonnage.parallel.world import join_world

    transformers.logging.set_verbosity_error()
    kinds = tokenizers(transformers)
    usual = next(iter(kinds))
    cases = {name: (config, usual) for name, config in FAMILIES.items() if not only or name in only}
    cases |= {f"tokenizer: {name}": (FAMILIES["llama"], name) for name in kinds if not only or name in only}
    refused = {}
    with join_world() as world:
        for number, (name, (make, kind)) in enumerate(cases.items()):
            place = folder / f"{number:02d}"
            try:
                config = make(transformers)
                model = build_on_meta(config, torch.float32)
                dissect(model)
                allocate(model, torch.device("cpu"))
                initialise_randomly(model, seed=0)
            except Exception as error:
                refused[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                continue
            torch.manual_seed(0)
            named = dict(model.named_parameters())
            with torch.no_grad():
                for value in named.values():  # norms and biases are no ones and zeros
                    value.add_(torch.randn_like(value) * 0.1)
            low = {f"{one}.low": torch.zeros(value.shape, dtype=torch.int16) for one, value in named.items()}
            Saver(place / "checkpoints", 1, world).save(Cursor(1, 4, 1), named, low, {}, wait=True)
            origin = place / "origin"
            config.save_pretrained(origin)
            kinds[kind]().save_pretrained(origin)
            files = find_model(str(origin), random_weights=True)
            read_tokenizer(files).save_pretrained(place / "tokenizer")  # of the class that the family asks for
            own = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [0, 7]}
            (origin / "generation_config.json").write_text(json.dumps(own))
            export(
                checkpoint_path(place / "checkpoints", 1),
                place / "export",
                ExportForm(config, place / "tokenizer", [0, 3], torch.float32),
                Start(origin),
            )
            (place / "name").write_text(name)
    return refused


def look(folder: Path, out: Path) -> None:
    """What the transformers of this process finds in every export; in JSON, and logits in files of torch."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found: dict[str, Any] = {"transformers": transformers.__version__, "torch": torch.__version__, "exports": {}}
    ids = torch.arange(48).mul(37).remainder(389).add(5).unsqueeze(0)
    for place in sorted(folder.glob("*/export")):
        seen: dict[str, Any] = {}
        found["exports"][(place.parent / "name").read_text()] = seen
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                place, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            with torch.no_grad():
                logits = model(ids, use_cache=False).logits
            torch.save(logits, out.with_name(f"{out.stem}-{place.parent.name}.pt"))
            tokenizer = transformers.AutoTokenizer.from_pretrained(place)
            seen["class"] = type(tokenizer).__name__
            seen["tokens"] = tokenizer(PROBE)["input_ids"]
            seen["inputs"] = sorted(tokenizer(PROBE))
            seen["text"] = tokenizer.decode(seen["tokens"])
            seen["special"] = sorted(tokenizer.all_special_tokens)
            templates = tokenizer.chat_template
            names = sorted(templates) if isinstance(templates, dict) else ["one"] if templates else []
            seen["templates"] = {
                name: tokenizer.apply_chat_template(
                    TALK, tokenize=False, add_generation_prompt=True, chat_template=None if name == "one" else name
                )
                for name in names
            }
            decoding = transformers.GenerationConfig.from_pretrained(place).to_diff_dict()
            seen["decoding"] = {k: v for k, v in decoding.items() if k not in ("transformers_version",)}
            seen["stops"] = model.config.eos_token_id
        except Exception as error:
            seen["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
    out.write_text(json.dumps(found))


def environment(folder: Path) -> str:
    """A Python with transformers 4.57.6, and torch from this one."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    packages = [WANTED, "huggingface-hub<1.0", "numpy", "safetensors", "jinja2", "sentencepiece"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    (Path(site.stdout.strip()) / "torch-of-another.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def compare(folder: Path, new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """For every export: how far logits are apart, and what else differs."""
    import torch

    found = {}
    for place in sorted(folder.glob("*/export")):
        name = (place.parent / "name").read_text()
        ours, theirs = new["exports"][name], old["exports"][name]
        if "error" in ours or "error" in theirs:
            found[name] = {"equal": False, "5": ours.get("error"), "4.57": theirs.get("error")}
            continue
        logits = [torch.load(folder / f"{which}-{place.parent.name}.pt") for which in ("new", "old")]
        difference = float((logits[0] - logits[1]).abs().max())
        differs = {key: [ours[key], theirs[key]] for key in ours if key != "class" and ours[key] != theirs[key]}
        found[name] = {
            "equal": difference <= LARGEST_DIFFERENCE and not differs,
            "largest_difference_of_logits": difference,
            "largest_logit": float(logits[0].abs().max()),
            **({"differs": differs} if differs else {}),
        }
    return found


def main() -> int:
    """Make the exports, have both versions look, compare; 0 if all is equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="a Python that has transformers 4.57 and torch")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    parser.add_argument("--only", action="append", default=[], help="a family or tokenizer; may be given again")
    parser.add_argument("--look", type=Path, nargs=2, metavar=("FOLDER", "OUT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.look:
        look(*given.look)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "exports"
        folder.mkdir()
        python = given.python or environment(Path(temporary) / "transformers-4")
        refused = export_all(folder, given.only)
        seen = {}
        for which, interpreter in (("new", sys.executable), ("old", python)):
            out = folder / f"{which}.json"
            subprocess.run([interpreter, str(Path(__file__).resolve()), "--look", str(folder), str(out)], check=True)
            seen[which] = json.loads(out.read_text())
        compared = compare(folder, seen["new"], seen["old"])
    unknown = [name for name, one in compared.items() if "does not recognize this architecture" in str(one.get("4.57"))]
    result = {
        "date": datetime.date.today().isoformat(),
        "tonnage": version("tonnage"),
        "python": platform.python_version(),
        "torch": seen["new"]["torch"],
        "transformers": [seen["new"]["transformers"], seen["old"]["transformers"]],
        "allowed_difference_of_logits": LARGEST_DIFFERENCE,
        "not_trained_by_tonnage": refused,
        "unknown_to_transformers_4": unknown,
        "exports": {name: one for name, one in compared.items() if name not in unknown},
    }
    if given.out:
        given.out.write_text(json.dumps(result, indent=2) + "\n")
    wrong = {name: one for name, one in result["exports"].items() if not one["equal"]}
    print(
        f"{len(result['exports'])} exports, {len(wrong)} read differently; {len(unknown)} of families unknown to 4.57"
    )
    print(json.dumps({"refused": refused, "unknown": unknown, "wrong": wrong}, indent=2, ensure_ascii=False)[:20000])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
