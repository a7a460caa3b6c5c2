"""Muon over sharded parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from .. import _torch_private
from ..errors import ConfigError, ConfigTypeError
from .whole_tensors import Parameters, WholeTensorOptimizer, own_values

#: Of the quintic that Muon's authors tuned for its slope at zero (Jordan et al. 2024, "Muon: An optimizer for hidden
#: layers in neural networks"); torch.optim.Muon has the same.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)

#: Dtypes in which Triton computes half of a symmetric product.
_HALVES = (torch.bfloat16, torch.float16)
_ADJUSTMENTS = (None, "original", "match_rms_adamw")


class Muon(WholeTensorOptimizer):
    """Muon (Jordan et al. 2024), exact for every strategy: what ``torch.optim.Muon`` does on whole matrices.

    The momentum of each matrix is brought to one rank, orthogonalised there once, and what that gives goes back. Ranks
    share the work of all matrices, those of hybrid replicas and of tensor parallelism included. The momentum itself
    stays sharded.

    A parameter of three dimensions is a stack: each of its matrices, along dimension 0, is orthogonalised by itself, as
    that of an expert. For filters of one-dimensional convolutions that is not what is wanted; filters of more
    dimensions are refused.

    Args:
        params: matrices and stacks of them; what else the model has goes to another optimizer (``for_matrices``).
        lr: learning rate; a number, or a 0-dim tensor.
        weight_decay: decoupled.
        momentum: of the running mean of gradients.
        nesterov: whether the gradient is mixed with the mean before it is orthogonalised.
        ns_coefficients: of the Newton-Schulz iteration.
        eps: smallest norm that a matrix is divided by.
        ns_steps: Newton-Schulz iterations.
        adjust_lr_fn: how the learning rate follows from the shape: ``"original"`` (None) multiplies it by
            ``sqrt(max(1, rows / columns))``, ``"match_rms_adamw"`` by ``0.2 sqrt(max(rows, columns))``.
        dtype: in which momentum travels and is orthogonalised; torch.optim.Muon orthogonalises in bf16.

    Raises:
        ConfigError: a parameter that is no matrix and no stack of them, or a setting that is none.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigTypeError(f"dtype of Muon must be a floating-point torch.dtype, not {dtype!r}.")
        defaults: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults, dtype)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As for every optimizer of torch.

        Raises ConfigError: a parameter that is no matrix, or a setting that is none.
        """
        super().add_param_group(param_group)
        try:
            _refuse_bad_settings(self.param_groups[-1])
            _refuse_no_matrices(self.param_groups[-1]["params"])
        except ConfigError:
            self.param_groups.pop()
            raise

    @override
    def contribute(
        self,
        group: Mapping[str, Any],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
    ) -> None:
        """The momentum, mixed with the gradient where that is asked for."""
        means = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
            means.append(own_values(state["momentum_buffer"]))
        own = [own_values(each) for each in gradients], [own_values(each) for each in places]
        mix(means, *own, group["momentum"], group["nesterov"])

    @override
    def transform(
        self, group: Mapping[str, Any], wholes: torch.Tensor, states: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        # A stack's are of one shape, as those of one kind are.
        matrices = wholes.reshape(-1, *wholes.shape[-2:])
        return newton_schulz(matrices, group["ns_steps"], group["ns_coefficients"], group["eps"]).view_as(wholes)

    @override
    def is_stack(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
        """Of three dimensions, the matrices of the last two."""
        return len(shape) == 3

    @override
    def update(
        self,
        group: Mapping[str, Any],
        shape: tuple[int, ...],
        parameters: Sequence[nn.Parameter],
        results: Sequence[torch.Tensor],
    ) -> None:
        ratio = _ratio(group["adjust_lr_fn"], shape)
        own = [own_values(each) for each in parameters], [own_values(each) for each in results]
        go_along(*own, group["lr"], ratio, group["weight_decay"])

    @override
    def work(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> float:
        """Floating-point operations of its orthogonalisation."""
        *stack, rows, columns = shape
        return math.prod(stack) * newton_schulz_flops(rows, columns, group["ns_steps"])


def _ratio(adjustment: str | None, shape: tuple[int, ...]) -> float:
    """What the learning rate of a matrix is multiplied by, as torch.optim.Muon documents it."""
    rows, columns = shape[-2:]
    if adjustment == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _refuse_bad_settings(group: Mapping[str, Any]) -> None:
    lr, steps, coefficients = group["lr"], group["ns_steps"], group["ns_coefficients"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ConfigError(f"Tensor lr must be 1-element, but has shape {tuple(lr.shape)}. Give a 0-dim tensor.")
    for name in ("lr", "momentum", "weight_decay"):
        # A tensor on a device is not waited for.
        if isinstance(group[name], torch.Tensor):
            continue
        if not isinstance(group[name], int | float) or not group[name] >= 0.0:
            raise ConfigError(f"{name} of Muon should be a number >= 0 but is {group[name]!r}.")
    if group["adjust_lr_fn"] not in _ADJUSTMENTS:
        raise ConfigError(
            f"Adjust learning rate function {group['adjust_lr_fn']!r} is not supported. There are: "
            f"{', '.join(map(repr, _ADJUSTMENTS))}."
        )
    if not isinstance(steps, int) or not 0 <= steps < 100 or len(coefficients) != 3:
        raise ConfigError(
            f"Muon takes fewer than 100 ns_steps and three ns_coefficients, not {steps!r} and {coefficients!r}."
        )


def _refuse_no_matrices(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.ndim not in (2, 3) or parameter.is_complex():
            raise ConfigError(
                "Muon only supports 2D parameters, and 3D parameters as stacks of them, whereas we found a parameter "
                f"with size: {tuple(parameter.shape)} of {parameter.dtype}. Give it matrices alone "
                "(polyshard.optim.for_matrices), and the rest to another optimizer."
            )


def newton_schulz(
    matrices: torch.Tensor, steps: int = 5, coefficients: tuple[float, float, float] = COEFFICIENTS, eps: float = 1e-7
) -> torch.Tensor:
    """``U S' V^T`` of each matrix ``U S V^T``, with all of ``S'`` near 1 (between about 0.7 and 1.2 after five steps).

    With ``Y`` the matrix over its Frobenius norm, the longer side first, each step is ``Y <- Y (a I + b A + c A A)``
    where ``A = Y^T Y``. That is torch.optim.Muon's iteration, transposed. Torch's function for it is private and takes
    one matrix in bf16; this one takes many of one shape at once, in any dtype.

    Args:
        matrices: ``[count, rows, columns]``, computed with in their own dtype; left as they are.
        steps: iterations.
        coefficients: ``a, b, c``.
        eps: smallest norm that a matrix is divided by.
    """
    a, b, c = coefficients
    wide = matrices.size(-2) <= matrices.size(-1)
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp(min=eps)
    # The longer side first in memory: the products below take 0.93 of the time that they take the other way round.
    tall = matrices.mT if wide else matrices
    y = torch.div(tall, norms, out=torch.empty(tall.shape, dtype=tall.dtype, device=tall.device))
    halves = _kernels(y, _HALVES)
    for _ in range(steps):
        if halves is not None:
            y = y @ halves.quadratic(halves.gram(y.mT), a, b, c)
        else:
            gram = y.mT @ y
            y = torch.baddbmm(y, y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), beta=a)
    return y.mT if wide else y


def newton_schulz_flops(rows: int, columns: int, steps: int = 5) -> float:
    """Floating-point operations of one matrix's iterations: three products a step."""
    short, long = sorted((rows, columns))
    return steps * (4.0 * short * short * long + 2.0 * short**3)


def mix(
    means: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    places: Sequence[torch.Tensor],
    momentum: float,
    nesterov: bool,
) -> None:
    """Move each mean towards its gradient by ``1 - momentum``; into each place goes the mean, or Nesterov's mixture.

    That is the gradient moved by ``momentum`` towards the new mean. On CUDA one Triton kernel a tensor does it: built
    of torch's operations it would move more than twice as much memory.
    """
    kernels = _kernels(means[0]) if means else None
    if kernels is not None and all(map(_dense, means, gradients, places)):
        for mean, gradient, place in zip(means, gradients, places, strict=True):
            kernels.mix(mean, gradient, place, momentum, nesterov)
        return
    held, given = list(means), list(gradients)
    _torch_private.foreach_lerp_(held, given, 1 - momentum)
    mixed = list(_torch_private.foreach_lerp(given, held, momentum)) if nesterov else held
    _torch_private.foreach_copy_(list(places), mixed)


def go_along(
    parameters: Sequence[torch.Tensor],
    directions: Sequence[torch.Tensor],
    lr: float | torch.Tensor,
    ratio: float,
    weight_decay: float,
) -> None:
    """``parameter <- parameter (1 - lr weight_decay) - lr ratio direction`` for each."""
    kernels = _kernels(parameters[0]) if parameters else None
    if kernels is not None and not isinstance(lr, torch.Tensor) and all(map(_dense, parameters, directions)):
        for parameter, direction in zip(parameters, directions, strict=True):
            kernels.go_along(parameter, direction, 1 - lr * weight_decay, -lr * ratio)
        return
    _torch_private.foreach_mul_(list(parameters), 1 - lr * weight_decay)
    for parameter, direction in zip(parameters, directions, strict=True):
        if isinstance(lr, torch.Tensor):
            parameter.addcmul_(direction, lr.to(direction.device), value=-ratio)
        else:
            parameter.add_(direction, alpha=-lr * ratio)


def _dense(first: torch.Tensor, *others: torch.Tensor) -> bool:
    return first.is_contiguous() and all(each.is_cuda and each.stride() == first.stride() for each in others)


def _kernels(tensor: torch.Tensor, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> ModuleType | None:
    """The Triton kernels, where ``tensor`` is on CUDA, in one of ``dtypes``, and this build of torch has Triton."""
    if not tensor.is_cuda or tensor.dtype not in dtypes:
        return None
    try:
        from . import kernels
    except ImportError:
        return None
    return kernels
