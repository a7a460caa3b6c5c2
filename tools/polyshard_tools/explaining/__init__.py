"""Explains a configuration for a model: which plugins, from whom; which units, and why."""

from __future__ import annotations

from .explain import explain
from .explanation import ExplainedParameter, ExplainedPlugin, ExplainedUnit, Explanation, Value

__all__ = ["ExplainedParameter", "ExplainedPlugin", "ExplainedUnit", "Explanation", "Value", "explain"]
