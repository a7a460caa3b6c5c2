"""The inputs of several units as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _torch_private, thresholds
from ..planning.layout import round_up
from .reduction_input import Copies, ReductionInput, together


class Merged:
    """Memory in which ``inputs`` stand next to each other, rank by rank; made once for units that go together.

    ``ranks``: among how many the units are sharded. ``clean``: whether what lies between the units is zero.
    """

    def __init__(self, inputs: Sequence[ReductionInput], ranks: int, *, clean: bool) -> None:
        self.inputs = inputs
        self._columns = columns_of(inputs)
        #: Elements of the result.
        self.numel = sum(self._columns)
        self._buffers = [each.buffer for each in inputs]
        # Memory without bytes has no rows.
        bare = [each for each in self._buffers if not each.attached]
        for each in bare:
            each.attach()
        with torch.inference_mode(False):
            self.flat = torch.empty(ranks * self.numel, dtype=inputs[0].dtype, device=inputs[0].device)
            rows = self.flat.view(ranks, self.numel)
            columns = torch.split(rows, self._columns, dim=1)
            places = [each[:, : of.layout.shard_numel] for each, of in zip(columns, inputs, strict=True)]
            parts = [each.flat.view(ranks, -1) for each in self._buffers]
            # An operation more, which only those pay that need it.
            gaps = [each[:, of.layout.shard_numel :] for each, of in zip(columns, inputs, strict=True)] if clean else []
            self._gaps = [gap for gap in gaps if gap.numel()]
            if ranks <= thresholds.ROWS_TOGETHER:
                # Row by row both sides are contiguous, which is what one launch for all of them needs.
                places = [row for place in places for row in place.unbind()]
                parts = [row for part in parts for row in part.unbind()]
            self._places, self._parts = places, parts
        self._storage = self.flat.untyped_storage()
        self._nbytes = self._storage.nbytes()
        for each in bare:
            each.release()
        self.release()

    @property
    def travels(self) -> bool:
        """Whether a reduction is reading the memory."""
        return self._storage.nbytes() > 0

    def release(self) -> None:
        """Take the memory away, wherever it came from."""
        self._storage.resize_(0)

    def collect(self) -> Copies:
        """What is still to be written into the inputs."""
        copies = together([each.collect(buffer) for each, buffer in zip(self.inputs, self._buffers, strict=True)])
        # Those that a gradient was computed in.
        copies.spent.extend(each for each in self._buffers if each.attached)
        return copies

    def fill(self, copies: Copies) -> None:
        """Run ``copies``, and bring the inputs together, on the current stream and in memory from its pool."""
        # The inputs' goes back there as soon as everything is issued.
        bare = [each for each in self._buffers if not each.attached]
        for each in bare:
            each.attach()
        copies.run()
        self._storage.resize_(self._nbytes)
        _torch_private.foreach_copy_(self._places, self._parts)
        if self._gaps:
            _torch_private.foreach_zero_(self._gaps)
        for each in bare:
            each.release()

    def cut(self, result: torch.Tensor) -> list[torch.Tensor]:
        """The units' gradient shards in ``result`` (``[numel]``)."""
        return cut(result, self.inputs, self._columns)


def columns_of(inputs: Sequence[ReductionInput]) -> list[int]:
    """Elements that each of ``inputs`` takes of a rank's part, where they stand next to each other."""
    return [round_up(each.layout.shard_numel, thresholds.MERGED_ALIGNMENT) for each in inputs]


def cut(result: torch.Tensor, inputs: Sequence[ReductionInput], columns: Sequence[int]) -> list[torch.Tensor]:
    """The shard of each of ``inputs`` in ``result`` (``[sum(columns)]``)."""
    parts = torch.split(result, list(columns))
    return [part[: each.layout.shard_numel] for part, each in zip(parts, inputs, strict=True)]
