"""What ``polyshard plan`` runs of a TOML file that examples/pretrain trains from: ``llama_8b.md``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "pretrain"))

from activations import checkpoint_blocks  # noqa: E402
from model import build_on_meta, model_config  # noqa: E402
from settings import load_settings  # noqa: E402

SETTINGS = load_settings(HERE / "llama_8b.toml")


def model(vocabulary: int = 128256) -> nn.Module:
    """The model of the file, whose blocks compute activations again as it asks."""
    llama = build_on_meta(model_config(SETTINGS, vocabulary, 0))
    llama.config.use_cache = False
    checkpoint_blocks(llama.model.layers, SETTINGS.activation_checkpointing)
    made: nn.Module = llama
    return made


def batch(sequences: int) -> dict[str, torch.Tensor]:
    """What one rank's forward takes; the model computes the loss from ``labels``."""
    tokens = torch.zeros(sequences, SETTINGS.training.context, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}
