"""The trained model in the files of Transformers."""

from __future__ import annotations

from pathlib import Path

import polyshard_huggingface
from model import Model
from ranks import Ranks
from tokens import Tokens
from transformers import PreTrainedTokenizerFast


def export(model: Model, tokens: Tokens, folder: Path, ranks: Ranks) -> None:
    """Write weights, configuration and tokenizer so that ``from_pretrained(folder)`` reads them. All ranks call it."""
    polyshard_huggingface.save(model, folder)
    if ranks.is_first:
        end = tokens.tokenizer.id_to_token(tokens.end_of_text)
        PreTrainedTokenizerFast(tokenizer_object=tokens.tokenizer, eos_token=end, bos_token=end).save_pretrained(folder)
