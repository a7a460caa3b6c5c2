"""What PyTorch's FSDP tests ask beside their larger documents; every body compares with a model without FSDP."""

from __future__ import annotations

import pytest
from fsdp_parity import misc
from fsdp_parity.ranks import Pools
from polyshard_fsdp import BackwardPrefetch
from polyshard_fsdp._common_utils import HandleTrainingState


class TestUnusedUnits:
    """Units whose outputs a loss does not use."""

    def test_unused_everywhere(self, ranks: Pools) -> None:
        assert ranks.run(2, misc.unused_output_has_no_gradient) == [12, 12]

    def test_used_on_some_ranks(self, ranks: Pools) -> None:
        assert ranks.run(2, misc.output_used_on_some_ranks) == [6, 6]


class TestOptimizerInBackward:
    """Parameters with optimizers of their own."""

    def test_numbers(self, ranks: Pools) -> None:
        assert ranks.run(2, misc.optimizer_in_backward) == [12, 12]

    def test_flat_parameters_are_refused(self, ranks: Pools) -> None:
        ranks.run(2, misc.optimizer_in_backward_needs_original_parameters)


class TestSettings:
    """What an instance looks at when it is built, or first used."""

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_setattr_overrides(self, ranks: Pools, world_size: int) -> None:
        ranks.run(world_size, misc.setattr_overrides)

    def test_homogeneous_attributes(self, ranks: Pools) -> None:
        ranks.run(2, misc.homogeneous_attributes)

    def test_cpu_training(self, ranks: Pools) -> None:
        assert ranks.run(2, misc.cpu_is_a_device) == [6, 6]


class TestBackwardPrefetch:
    """What is gathered ahead in backward, from the first iteration on."""

    @pytest.mark.parametrize(
        ("prefetch", "state", "expected"),
        [
            (BackwardPrefetch.BACKWARD_PRE, HandleTrainingState.BACKWARD_PRE, "321"),
            (BackwardPrefetch.BACKWARD_POST, HandleTrainingState.BACKWARD_POST, "321"),
            (None, HandleTrainingState.BACKWARD_PRE, ""),
        ],
    )
    def test_order(
        self, ranks: Pools, prefetch: BackwardPrefetch | None, state: HandleTrainingState, expected: str
    ) -> None:
        follows = {"3": "2", "2": "1", "1": "0"}
        order = [(current, follows[current]) for current in expected]
        one = [*order, ("0", None)] if order else []
        assert ranks.run(2, misc.prefetched, prefetch, state) == [[one, one]] * 2


class TestUnusualTraining:
    """Numbers of models that are run in unusual ways."""

    def test_checkpointing(self, ranks: Pools) -> None:
        assert ranks.run(2, misc.checkpointing) == [32, 32]

    def test_freezing_between_steps(self, ranks: Pools) -> None:
        assert ranks.run(2, misc.freezing_between_steps) == [6, 6]

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_shapes_of_models(self, ranks: Pools, world_size: int) -> None:
        assert ranks.run(world_size, misc.shapes_of_models) == [18] * world_size

    def test_after_exceptions(self, ranks: Pools) -> None:
        assert ranks.run(2, misc.after_exceptions) == [12, 12]
