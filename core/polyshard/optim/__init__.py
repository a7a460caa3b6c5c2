"""Optimizers that need whole tensors, exact over sharded parameters: Muon, and the base class for others.

Beside them averaged weights.
"""

from .averages import AveragedWeights
from .groups import MatrixSplit, for_matrices
from .muon import Muon
from .whole_tensors import WholeTensorOptimizer

__all__ = ["AveragedWeights", "MatrixSplit", "Muon", "WholeTensorOptimizer", "for_matrices"]
