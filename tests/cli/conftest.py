"""What commands are tried on."""

from data.conftest import tokenizer as tokenizer
