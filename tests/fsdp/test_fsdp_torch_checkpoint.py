"""The functions of ``torch.distributed.checkpoint.state_dict``, which know torch's wrappers alone."""

from __future__ import annotations

from fsdp_parity import checkpoint_functions as bodies
from fsdp_parity.ranks import Pools


def test_models_are_whole(ranks: Pools) -> None:
    ranks.run(2, bodies.models)


def test_pieces_are_refused_by_name(ranks: Pools) -> None:
    ranks.run(2, bodies.refusals)


def test_optimizers_of_other_parameters_are_served(ranks: Pools) -> None:
    ranks.run(2, bodies.unsharded_optimizers)


def test_what_the_refusal_advises_works(ranks: Pools) -> None:
    ranks.run(2, bodies.advice)
