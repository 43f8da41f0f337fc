"""A tokenizer and a small Llama made for the demo's tasks.

The tokenizer knows the words that instructions are phrased in as whole tokens and spells everything else byte by
byte, so any text can be encoded and a word in quotes reaches the model as its letters, which is what most tasks
are about. It is a byte-level BPE with an empty list of merges: a piece of text is either in the vocabulary as it
stands or falls apart into bytes. The chat template marks what the assistant says, so that the mask of supervised
tokens comes from the template itself.

The model is a directory with a ``config.json`` and the tokenizer, and no weights: training starts from random ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.demo.tasks import DAYS, HABITS, NAMES, OPPOSITES, ORDINALS, THINGS

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerFast

MAX_POSITIONS = 256

SYSTEM, USER, ASSISTANT, END, PAD = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"

_PHRASING = (
    "Reverse the word Write backwards in capital letters Change to capitals How many are Count of What is Give number "
    "comes after on from Sort these numbers Put order day next Say opposite The"
)
WHOLE_WORDS = sorted({*_PHRASING.split(), *DAYS, *NAMES, *HABITS, *THINGS, *OPPOSITES, *ORDINALS})
"""Words of the instructions' wording, and the answers that are whole words: one token each."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The demo's tokenizer, with its chat template; takes milliseconds."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    # A word within a sentence comes with its space; those that also open a text stand for themselves as well.
    for word in WHOLE_WORDS:
        pieces.append(f"Ġ{word}")
        if word[0].isupper() or word in THINGS:
            pieces.append(word)
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (SYSTEM, USER, ASSISTANT, END, PAD)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """A Llama of about 0.7 million parameters, for random weights.

    Weights are drawn wider than usual (0.06 instead of 0.02): at this width, and with a few hundred steps, the
    model otherwise spends most of the run finding out that letters can be copied at all.
    """
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


def write_model(directory: Path) -> None:
    """Write the tokenizer and the configuration, no weights."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(directory)
    model_config(tokenizer).save_pretrained(directory)
