"""Optimizers that need whole tensors, exact over sharded parameters: Muon, and the base class for others."""

from .matrices import MatrixSplit, for_matrices
from .muon import Muon
from .whole_tensors import WholeTensorOptimizer

__all__ = ["MatrixSplit", "Muon", "WholeTensorOptimizer", "for_matrices"]
