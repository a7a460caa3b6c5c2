"""Mixed precision by parts: modules with settings of their own, and full precision in eval mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fsdp_parity.mixed_models import (
    BUFFER_DTYPE,
    MP_ALL,
    Buffered,
    CastReference,
    ExpectsDtype,
    MakesAnInput,
    ModelWithIgnoredModule,
    assert_all_near,
    assert_near,
    checked_reduce_scatter,
    full_precision_in_eval,
    nested_model,
    whole_gradients,
)
from fsdp_parity.models import (
    CUDAInitMode,
    FSDPInitMode,
    SaveForwardInputsModel,
    TransformerWithSharedParams,
    wrap_fsdp,
)
from fsdp_parity.ranks import Ranks, across
from fsdp_parity.subtests import subtests
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import MixedPrecision
from torch import nn
from torch.nn import functional


@across(2)
@subtests(full=(True, False))
def test_inputs_of_a_root_without_parameters(ranks: Ranks, full: bool) -> None:
    """In eval mode a root that has no parameters casts its inputs, unless eval is in full precision."""
    with full_precision_in_eval(full):
        torch.manual_seed(0)
        model = ExpectsDtype().to(ranks.device)
        reference = CastReference(model, MP_ALL)
        model.a = wrap_fsdp(model.a, mixed_precision=MP_ALL)
        sharded = wrap_fsdp(model, mixed_precision=MP_ALL)
        sharded.eval()
        # On the CPU: the root moves it.
        x = torch.randn(5, 5, generator=torch.Generator().manual_seed(1 + ranks.rank))
        output = sharded(x, full)
        output.sum().backward()
        expected = reference(x.to(ranks.device), full, low=not full)
        expected.sum().backward()
        assert output.dtype == expected.dtype
        dtype = torch.float32 if full else torch.float16
        assert_near(output, expected, dtype, "output")
        gradients = reference.gradients(ranks)
        assert_all_near(whole_gradients(sharded), gradients, dtype, "gradients")


def _transformer(ranks: Ranks, mixed_precision: MixedPrecision) -> tuple[Any, nn.Module]:
    """A sharded transformer, and an equal one that is not."""
    torch.manual_seed(0)
    plain = TransformerWithSharedParams.init(
        ranks.group, FSDPInitMode.NO_FSDP, CUDAInitMode.CUDA_BEFORE, device=ranks.device
    )
    torch.manual_seed(0)
    model = TransformerWithSharedParams.init(
        ranks.group,
        FSDPInitMode.RECURSIVE,
        CUDAInitMode.CUDA_BEFORE,
        {"mixed_precision": mixed_precision},
        device=ranks.device,
    )
    return model, plain


@across(2)
@subtests(cast_forward_inputs=(True, False), full=(True, False))
def test_full_precision_buffers_in_eval(ranks: Ranks, cast_forward_inputs: bool, full: bool) -> None:
    """Buffers are in their own dtype during an eval in full precision, and in the low one in training."""
    with full_precision_in_eval(full):
        mixed_precision = MixedPrecision(
            param_dtype=torch.float16,
            reduce_dtype=torch.float16,
            buffer_dtype=torch.float16,
            cast_forward_inputs=cast_forward_inputs,
        )
        torch.manual_seed(0)
        linears = [Buffered(torch.float32, f"buffer{i}") for i in range(2)]
        originals = {linear.buffer_name: getattr(linear, linear.buffer_name).clone() for linear in linears}
        reference = CastReference(nn.Sequential(*(linear.lin for linear in linears)), mixed_precision)
        reference.module.to(ranks.device)
        model: Any = nested_model(linears, ranks.device, mixed_precision=mixed_precision)
        x = torch.randn(3, 10, generator=torch.Generator().manual_seed(1 + ranks.rank)).to(ranks.device)

        output = model(x)
        assert _buffer_dtypes(model) == {torch.float16}
        assert_near(output, reference(x), torch.float16, "output in training")

        eval_dtype = BUFFER_DTYPE if full else torch.float16
        in_forward: list[set[torch.dtype]] = []
        note = partial(_note_buffer_dtypes, in_forward)
        hooks = [
            (child.module if isinstance(child, FSDP) else child).register_forward_pre_hook(note)
            for child in (model[0], model[1])
        ]
        model.eval()
        output = model(x)
        assert in_forward == [{eval_dtype}, {eval_dtype}]
        assert _buffer_dtypes(model) == {eval_dtype}
        expected = reference(x, low=not full)
        assert output.dtype == expected.dtype
        assert_near(output, expected, torch.float32 if full else torch.float16, "output in eval")
        for name, buffer in model.named_buffers():
            # In training it went through fp16, so that is how near it is, whatever its dtype now.
            assert_near(buffer, originals[name.rpartition(".")[2]], torch.float16, name, ulps=1)
        for hook in hooks:
            hook.remove()

        model.train()
        output = model(x)
        assert _buffer_dtypes(model) == {torch.float16}
        assert_near(output, reference(x), torch.float16, "output in training again")


def _buffer_dtypes(module: nn.Module) -> set[torch.dtype]:
    return {buffer.dtype for buffer in module.buffers()}


def _note_buffer_dtypes(notes: list[set[torch.dtype]], module: nn.Module, _: Any) -> None:
    notes.append(_buffer_dtypes(module))


@across(2)
@subtests(cast_forward_inputs=(True, False), full=(True, False))
def test_full_precision_reduction_in_eval(ranks: Ranks, cast_forward_inputs: bool, full: bool) -> None:
    """A backward in eval mode reduces in fp32 if eval is in full precision, else in the reduction's dtype."""
    with full_precision_in_eval(full):
        mixed_precision = MixedPrecision(
            param_dtype=torch.float32,
            reduce_dtype=torch.float16,
            buffer_dtype=torch.float32,
            cast_forward_inputs=cast_forward_inputs,
            # A batch norm apart would have no mixed precision, and so reduce in another dtype than the rest.
            _module_classes_to_ignore=[],
        )
        model, plain = _transformer(ranks, mixed_precision)
        reference = CastReference(plain, mixed_precision)
        model.eval()
        reference.module.eval()
        with checked_reduce_scatter(mixed_precision, torch.float32, low=not full) as log:
            x = model.get_input(ranks.device)
            loss = model.get_loss(x, model(*x))
            loss.backward()
        # Two encoder layers, two decoder layers, and the root.
        assert log.calls == 5
        expected = model.get_loss(x, reference(*x, low=not full))
        assert_near(loss, expected, torch.float32, "loss")
        expected.backward()
        dtype = torch.float32 if full else torch.float16
        gradients = reference.gradients(ranks)
        assert_all_near(whole_gradients(model), gradients, dtype, "gradients", ulps=64 if full else 4)


@across(1)
def test_mixed_precision_with_ignored_module(ranks: Ranks) -> None:
    """Nothing is cast for an ignored module, whose parameters keep their dtype."""
    half = MixedPrecision(param_dtype=torch.float16)
    x = torch.ones(2, 100, device=ranks.device)
    torch.manual_seed(0)
    model = ModelWithIgnoredModule().to(ranks.device)
    sharded = wrap_fsdp(model, ignored_modules=[model.ignored], mixed_precision=half)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        sharded(x).sum().backward()

    model = ModelWithIgnoredModule(casts=True).to(ranks.device)
    plain = copy.deepcopy(model)
    sharded = wrap_fsdp(model, ignored_modules=[model.ignored], mixed_precision=half)
    output = sharded(x)
    hidden = functional.linear(x.half(), plain.l1.weight.half(), plain.l1.bias.half())
    hidden = plain.ignored.l(hidden.float()).half()
    expected = functional.linear(hidden, plain.l2.weight.half(), plain.l2.bias.half())
    assert output.dtype == torch.float16
    assert_near(output, expected, torch.float16, "output")
    assert model.ignored.l.weight.dtype == torch.float32
    assert model.ignored.l.weight.shape == (100, 100)


def _two_modules(
    ranks: Ranks,
    *,
    cast_themselves: bool,
    c1: MixedPrecision | None = None,
    c2: MixedPrecision | None = None,
    root: MixedPrecision | None = None,
) -> tuple[FSDP, Callable[[], list[torch.dtype]], nn.Sequential]:
    """A wrapped model of two layers, what its root and layers were last given, and an equal plain model."""
    given: dict[nn.Module, torch.Tensor] = {}
    torch.manual_seed(0)
    model = SaveForwardInputsModel(given, cast_forward_inputs=cast_themselves).to(ranks.device)
    plain = nn.Sequential(copy.deepcopy(model.c1.l), copy.deepcopy(model.c2.l))
    modules: tuple[Any, ...] = (model, model.c1, model.c2)
    holder: Any = model
    if c1 is not None:
        holder.c1 = wrap_fsdp(model.c1, mixed_precision=c1)
    if c2 is not None:
        holder.c2 = wrap_fsdp(model.c2, mixed_precision=c2)
    return wrap_fsdp(model, mixed_precision=root), lambda: [given[module].dtype for module in modules], plain


def _check_two_modules(
    ranks: Ranks,
    sharded: FSDP,
    dtypes: Callable[[], list[torch.dtype]],
    plain: nn.Sequential,
    expected: list[torch.dtype],
    second: torch.dtype,
) -> None:
    """Inputs of root, ``c1`` and ``c2`` have these dtypes, and ``c2`` computes in ``second``."""
    sharded(torch.zeros(2, 100, device=ranks.device)).sum().backward()
    assert dtypes() == expected
    sharded.zero_grad()
    x = torch.randn(2, 100, generator=torch.Generator().manual_seed(1 + ranks.rank)).to(ranks.device)
    output = sharded(x)
    output.sum().backward()
    assert dtypes() == expected
    hidden = plain[0](x)
    wanted = CastReference(plain[1], MixedPrecision(param_dtype=second))
    result = wanted(hidden)
    assert output.dtype == result.dtype == second
    assert_near(output, result, second, "output")
    result.sum().backward()
    gradients = whole_gradients(sharded)
    for key, value in wanted.gradients(ranks).items():
        assert_near(gradients[f"c2.l.{key}"], value, second, f"gradient of c2's {key}")


SINGLE = MixedPrecision(param_dtype=torch.float32, cast_forward_inputs=True)
HALF = MixedPrecision(param_dtype=torch.float16, cast_forward_inputs=True)
HALF_AS_GIVEN = MixedPrecision(param_dtype=torch.float16, cast_forward_inputs=False)


@across(2)
@subtests(
    case=(
        # A unit in fp16 that casts its inputs, under a root in fp32 that casts them too, or does not.
        ({"c2": HALF}, False, torch.float16),
        ({"c2": HALF, "root": SINGLE}, False, torch.float16),
        # One that is asked not to cast its inputs sees them as they are.
        ({"c2": HALF_AS_GIVEN}, True, torch.float32),
    )
)
def test_half_in_one_submodule(ranks: Ranks, case: tuple[dict[str, MixedPrecision], bool, torch.dtype]) -> None:
    """Inputs of a unit in fp16 are cast where it casts them, and the rest stays in fp32."""
    precisions, cast_themselves, second = case
    model = _two_modules(ranks, cast_themselves=cast_themselves, **precisions)
    _check_two_modules(ranks, *model, [torch.float32, torch.float32, second], torch.float16)


@across(2)
@subtests(
    case=(
        ({"c2": HALF_AS_GIVEN}, [torch.float32, torch.float32, torch.float32]),
        # A root in fp32 casts what it is given, and not what a child in fp16 hands to the root's own layer.
        ({"c1": HALF, "root": SINGLE}, [torch.float32, torch.float16, torch.float16]),
    )
)
def test_precisions_that_do_not_fit(ranks: Ranks, case: tuple[dict[str, MixedPrecision], list[torch.dtype]]) -> None:
    """Where nobody casts, the layer refuses its input."""
    precisions, expected = case
    sharded, dtypes, _ = _two_modules(ranks, cast_themselves=False, **precisions)
    with pytest.raises(RuntimeError, match="mat1 and mat2 must have the same dtype"):
        sharded(torch.zeros(2, 100, device=ranks.device)).sum().backward()
    assert dtypes() == expected


@across(2)
def test_inputs_from_outside(ranks: Ranks) -> None:
    """By default the root alone casts: a tensor made inside the forward keeps its dtype."""
    seen: dict[str, torch.Tensor] = {}
    half = MixedPrecision(param_dtype=torch.float16)
    torch.manual_seed(0)
    model = MakesAnInput(seen).to(ranks.device)
    reference = CastReference(model, half)
    model.l2 = wrap_fsdp(model.l2, mixed_precision=half)
    sharded = wrap_fsdp(model, mixed_precision=half)
    sharded(torch.zeros(2, 100, device=ranks.device)).sum().backward()
    assert {name: tensor.dtype for name, tensor in seen.items()} == {
        "x": torch.float16,
        "l2_x": torch.float16,
        "l2_y": torch.float32,
    }
    sharded.zero_grad()
    x = torch.randn(2, 100, generator=torch.Generator().manual_seed(1 + ranks.rank)).to(ranks.device)
    output, expected = sharded(x), reference(x)
    assert_near(output, expected, torch.float16, "output")
    output.sum().backward()
    expected.sum().backward()
    gradients = reference.gradients(ranks)
    assert_all_near(whole_gradients(sharded), gradients, torch.float16, "gradients")
