"""Sizes from which on the engine takes one way rather than another, each with what speaks for it.

What they gain is in docs/performance.md.
"""

from __future__ import annotations

#: Elements from which a part is made: 4 MiB in a 16-bit dtype. Gathers of less take as long as their latency, so that
#: dividing them would only add one (benchmarks/figures.md, "Gathers and reductions alone").
SMALLEST_SPLIT = 1 << 21
#: The most module states that are gathered together. Fewer launches than one for so many save the host little.
LARGEST_BATCH = 16
#: Bytes merged at most. Longer reductions gain little from each other, and hold all of their memory while they wait;
#: the last one of a backward has nothing left to run beside.
MERGED_NBYTES = 16 * 2**20
#: A unit is merged with others if at least so many inputs of its size fit. Larger ones gain less than the second copy
#: costs.
FEWEST_MERGED = 4
#: Bytes that go in one launch at most.
GROUPED_NBYTES = 128 * 2**20
#: Bytes of a unit up to which it waits for others. A larger one computes for longer than launching takes.
LARGEST_GROUPED = 32 * 2**20
#: Buckets that wait at once, each of other ranks or another dtype: dense and expert units, in two dtypes. Each may hold
#: ``GROUPED_NBYTES`` of gradients.
OPEN_BUCKETS = 4
#: Bytes of each divided unit up to which one communication reduces all of their segments, behind one copy more. The
#: host pays for each segment otherwise, and for its sum over ranks. Larger ones are copied by copy engines where these
#: are (``polyshard_backends/auto.py``), and compute for longer than that takes.
SIDE_BY_SIDE_NBYTES = 64 * 2**20
#: Bytes of gradients up to which they are held until they were reduced. More are copied where they were computed, and
#: give their memory back at once, as do those of units that are not sharded, of which any number may be on their way.
HELD_NBYTES = 64 * 2**20
#: Elements of a weight from which on its gradient is computed in the reduction's input. Copying fewer costs less than
#: Python in their forward and backward.
DIRECT_NUMEL = 1 << 22
#: Elements at whose multiples each unit begins among merged ones: optimizers and NCCL read in wide accesses there.
MERGED_ALIGNMENT = 128
