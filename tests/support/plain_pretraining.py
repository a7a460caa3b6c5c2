"""A run of the pretraining example in one process: Transformers' own model and plain torch, which ranks are held to."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional


class Curves(NamedTuple):
    """Of all ranks, by step."""

    losses: list[float]
    balances: list[float]
    norms: list[float]
    held_out: list[float]
    """Behind each evaluation."""


class Plain(NamedTuple):
    """A run of Transformers' own model in one process, with whole batches."""

    curves: Curves
    counts: list[list[int]]
    """Tokens of each expert, by step and block."""
    model: Any


def plain_run(settings: Any, tokens: Any, steps: int, evaluates: int) -> Plain:
    """``steps`` of the example's ``settings`` and ``tokens``, evaluated at every so many.

    To be called where the example can be imported. Rates rise to 0.01 over two steps, and fall to a tenth.
    """
    from loader import Share
    from model import Initializer, model_config
    from transformers import LlamaForCausalLM, MixtralForCausalLM

    config = model_config(settings, 300, tokens.end_of_text)
    model = (MixtralForCausalLM if settings.model.num_local_experts else LlamaForCausalLM)(config)
    initialise = Initializer(model, 0)
    for module in model.modules():
        initialise(module)
    context = settings.training.context

    def rows_of(text: list[int]) -> torch.Tensor:
        return torch.tensor([text[at : at + context + 1] for at in range(0, len(text) - context, context)])

    rows, held_out = rows_of(tokens.train.map().tolist()), rows_of(tokens.held_out.map().tolist())
    groups = [
        {"params": [each for each in model.parameters() if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in model.parameters() if each.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=settings.optimizer.eps)
    batches = iter(Share(len(rows), settings.training.batch, 0, 1, seed=0))
    curves, counts = Curves([], [], [], []), []
    coefficient = settings.model.router_aux_loss_coef if settings.model.num_local_experts else 0.0
    asked = {"output_router_logits": True} if coefficient else {}
    for step in range(steps):
        done = (step - 2) / (steps - 2)
        rate = 0.005 if step == 0 else 0.001 + 0.0045 * (1 + math.cos(math.pi * max(0.0, done)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = rows[next(batches)]
        made = model(input_ids=batch[:, :-1], use_cache=False, **asked)
        loss = functional.cross_entropy(made.logits.flatten(0, 1), batch[:, 1:].flatten())
        balance = made.aux_loss if asked else torch.zeros(())
        (loss + coefficient * balance).backward()
        curves.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optimizer.clip)))
        optimizer.step()
        optimizer.zero_grad()
        curves.losses.append(loss.item())
        curves.balances.append(balance.item())
        for logits in made.router_logits if asked else ():
            counts.append(torch.bincount(logits.topk(2).indices.flatten(), minlength=9).tolist())
        if (step + 1) % evaluates == 0:
            with torch.no_grad():
                logits = model(input_ids=held_out[:, :-1], use_cache=False).logits
            curves.held_out.append(functional.cross_entropy(logits.flatten(0, 1), held_out[:, 1:].flatten()).item())
    return Plain(curves, counts, model)
