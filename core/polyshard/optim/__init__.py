"""Optimizers that need whole tensors, exact over sharded parameters: Muon, and the base class for others.

Beside them what trainings ask of optimizers: averaged weights, and parameter groups by whole shapes.
"""

from .averages import AveragedWeights
from .groups import MatrixSplit, decay_groups, for_matrices
from .muon import Muon
from .whole_tensors import WholeTensorOptimizer

__all__ = ["AveragedWeights", "MatrixSplit", "Muon", "WholeTensorOptimizer", "decay_groups", "for_matrices"]
