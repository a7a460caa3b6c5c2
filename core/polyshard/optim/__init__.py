"""Optimizers that need whole tensors, exact over sharded parameters: Muon, and the base class for others.

Beside them averaged weights, and steps in the backward.
"""

from .averages import AveragedWeights
from .backward_steps import step_in_backward
from .groups import MatrixSplit, for_matrices
from .muon import Muon
from .whole_tensors import WholeTensorOptimizer

__all__ = ["AveragedWeights", "MatrixSplit", "Muon", "WholeTensorOptimizer", "for_matrices", "step_in_backward"]
