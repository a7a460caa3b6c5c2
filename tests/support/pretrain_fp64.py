"""``examples/pretrain/train.py`` in fp64: its losses go to ``losses.jsonl`` in the output folder, exactly."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "pretrain"))
import train
import training


class Recorded(training.Training):
    """Writes down what its reports have."""

    def _trained(self, *args: Any) -> Any:
        found = super()._trained(*args)
        if self._ranks.is_first:
            with Path(self._settings.output.folder, "losses.jsonl").open("a") as file:
                file.write(json.dumps([found.step, found.losses]) + "\n")
        return found


def normalised(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    """As the norm of Transformers, which computes in fp32."""
    return nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As the example's, which computes in fp32."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    LlamaRMSNorm.forward = normalised
    training.summed_loss = summed_loss
    train.Training = Recorded  # type: ignore[misc]
    sys.exit(train.main())
