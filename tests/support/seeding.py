"""Seeding as ``torch.manual_seed`` does, without what it costs where there is a CPU alone."""

from __future__ import annotations

import torch


def seed_all(number: int) -> None:
    """Seed the generators of the devices that are there.

    For every kind of device that is not in use, ``torch.manual_seed`` writes down where it was called: three stacks,
    which take longer than a layer's forward.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)
