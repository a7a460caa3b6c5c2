"""Models with 4-bit layers of bitsandbytes under adapters of PEFT. Both are imported when something is called."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from parity import seed_all
from torch import nn
from torch.nn.functional import cross_entropy

WORDS = 50


def linear4bit() -> Any:
    """The class of bitsandbytes' layers; what it warns of when it is imported is its own affair."""
    with warnings.catch_warnings(action="ignore"):
        from bitsandbytes.nn import Linear4bit
    return Linear4bit


class Block(nn.Module):
    """Two layers in NF4 with double quantisation. ``packed``: the dtype in which their bytes are kept."""

    def __init__(self, packed: torch.dtype, width: int = 64, hidden: int = 192) -> None:
        super().__init__()
        settings: dict[str, Any] = {"bias": False, "quant_type": "nf4", "compute_dtype": torch.float32}
        self.up = linear4bit()(width, hidden, quant_storage=packed, **settings)
        self.down = linear4bit()(hidden, width, quant_storage=packed, **settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A language model without attention."""

    # PEFT chooses its own 4-bit layers by this.
    is_loaded_in_4bit = True

    def __init__(self, packed: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 64)
        self.blocks = nn.ModuleList(Block(packed) for _ in range(2))
        self.head = nn.Linear(64, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def base(packed: torch.dtype = torch.uint8, device: torch.device | str = "cpu") -> Net:
    """The same at every call, quantized by the move to ``device``."""
    seed_all(0)
    return Net(packed).to(device)


def adapted(packed: torch.dtype = torch.uint8, device: torch.device | str = "cpu") -> Any:
    """``base`` with adapters that do something from the first step on."""
    import peft

    made = base(packed, device)
    seed_all(1)
    settings = peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
    return peft.get_peft_model(made, settings)


def loss_of(model: nn.Module, turn: int, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The loss of a batch of its own for each turn and rank."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    tokens = torch.randint(0, WORDS, (2, 9), generator=generator).to(device)
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Over the adapters."""
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def train(model: nn.Module, ranks: list[int], steps: int = 20, device: torch.device | str = "cpu") -> list[list[float]]:
    """Losses of each step and rank: one of each sharded model, of an unsharded one those of all ranks, averaged."""
    optimizer, found = adamw(model), []
    for turn in range(steps):
        losses = [loss_of(model, turn, rank, device) for rank in ranks]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item() for loss in losses])
    return found


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor``, which may be of any dtype and class."""
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).clone()


def base_bytes(model: nn.Module) -> dict[str, torch.Tensor]:
    """The bytes of all 4-bit weights and of what these mean, by name."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, linear4bit()):
            found[name] = bytes_of(module.weight)
            state: Any = module.weight.quant_state
            found |= {f"{name}.{key}": bytes_of(value) for key, value in state.as_dict(packed=True).items()}
    return found


def on_meta(model: nn.Module) -> nn.Module:
    """``model``, made on the meta device, with 4-bit weights that are quantized: one after the other on the host."""
    for module in model.modules():
        if isinstance(module, linear4bit()):
            weight: Any = module.weight
            with torch.device("cpu"):
                made = type(weight)(
                    torch.zeros(module.out_features, module.in_features),
                    quant_type=weight.quant_type,
                    quant_storage=weight.quant_storage,
                    module=module,
                ).to("cpu")
            module.weight = made.to("meta")
    return model
