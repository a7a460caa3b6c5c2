"""What PyTorch's FSDP tests assert about mixed precision in eval mode."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import MixedPrecision
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .mixed_models import (
    BUFFER_DTYPE,
    MP_ALL,
    CastReference,
    ExpectsDtype,
    ForwardChecks,
    LinearMixedPrecision,
    assert_all_near,
    assert_near,
    checked_reduce_scatter,
    full_precision_in_eval,
    nested_model,
    whole_gradients,
)
from .models import (
    CUDAInitMode,
    FSDPInitMode,
    TransformerWithSharedParams,
    wrap_fsdp,
)
from .ranks import Ranks
from .subtests import subtests


@subtests(full=(True, False))
def inputs_of_a_root_without_parameters(ranks: Ranks, full: bool) -> None:
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


@subtests(cast_forward_inputs=(True, False), full=(True, False))
def full_precision_losses_in_eval(ranks: Ranks, cast_forward_inputs: bool, full: bool) -> None:
    """Training computes in fp16, and eval in fp32 if the environment says so; gradients end in fp32."""
    with full_precision_in_eval(full):
        mixed_precision = MixedPrecision(
            param_dtype=torch.float16,
            reduce_dtype=torch.float16,
            buffer_dtype=torch.float16,
            cast_forward_inputs=cast_forward_inputs,
        )
        model, plain = _transformer(ranks, mixed_precision)
        reference = CastReference(plain, mixed_precision, kept=(_BatchNorm,))
        x = model.get_input(ranks.device)
        torch.manual_seed(7)
        loss = model.get_loss(x, model(*x))
        assert loss.dtype == torch.float16
        torch.manual_seed(7)
        expected = model.get_loss(x, reference(*x))
        assert_near(loss, expected, torch.float16, "training loss")
        model.run_backward(loss)
        expected.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert gradients
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
        model.eval()
        reference.module.eval()
        x = model.get_input(ranks.device)
        loss = model.get_loss(x, model(*x))
        expected = model.get_loss(x, reference(*x, low=not full))
        dtype = torch.float32 if full else torch.float16
        assert loss.dtype == dtype
        # The batch norm has seen fp16 activations, whichever precision eval has.
        assert_near(loss, expected, dtype, "eval loss", ulps=64 if full else 16)


@subtests(cast_forward_inputs=(True, False), full=(True, False))
def full_precision_buffers_in_eval(ranks: Ranks, cast_forward_inputs: bool, full: bool) -> None:
    """Buffers are in their own dtype during an eval in full precision, and in the low one in training."""
    with full_precision_in_eval(full):
        mixed_precision = MixedPrecision(
            param_dtype=torch.float16,
            reduce_dtype=torch.float16,
            buffer_dtype=torch.float16,
            cast_forward_inputs=cast_forward_inputs,
        )
        torch.manual_seed(0)
        linears = [LinearMixedPrecision(torch.float32, f"buffer{i}", run_checks=False) for i in range(2)]
        originals = {linear.buffer_name: getattr(linear, linear.buffer_name).clone() for linear in linears}
        reference = CastReference(nn.Sequential(*(linear.lin for linear in linears)), mixed_precision)
        reference.module.to(ranks.device)
        model: Any = nested_model(linears, ranks.device, mixed_precision=mixed_precision)
        x = torch.randn(3, 10, generator=torch.Generator().manual_seed(1 + ranks.rank)).to(ranks.device)
        packed = (x, ForwardChecks(ranks.world_size), model, mixed_precision, torch.float32)

        output, *_ = model(packed)
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
        output, *_ = model(packed)
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
        output, *_ = model(packed)
        assert _buffer_dtypes(model) == {torch.float16}
        assert_near(output, reference(x), torch.float16, "output in training again")


def _buffer_dtypes(module: nn.Module) -> set[torch.dtype]:
    return {buffer.dtype for buffer in module.buffers()}


def _note_buffer_dtypes(notes: list[set[torch.dtype]], module: nn.Module, _: Any) -> None:
    notes.append(_buffer_dtypes(module))


@subtests(cast_forward_inputs=(True, False), full=(True, False))
def full_precision_reduction_in_eval(ranks: Ranks, cast_forward_inputs: bool, full: bool) -> None:
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
            model.run_backward(loss)
        # Two encoder layers, two decoder layers, and the root.
        assert log.calls == 5
        expected = model.get_loss(x, reference(*x, low=not full))
        assert_near(loss, expected, torch.float32, "loss")
        expected.backward()
        dtype = torch.float32 if full else torch.float16
        gradients = reference.gradients(ranks)
        assert_all_near(whole_gradients(model), gradients, dtype, "gradients", ulps=64 if full else 4)
