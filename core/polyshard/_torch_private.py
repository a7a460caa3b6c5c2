"""Every private torch name that the engine uses, with the reason. The test suite ran on torch 2.11 to 2.15."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from operator import attrgetter, methodcaller
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed.checkpoint.filesystem
import torch.utils.checkpoint
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable, forward_ad

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_P = ParamSpec("_P")
_T = TypeVar("_T")


#: The number of the backward that the calling thread executes, ``NO_BACKWARD`` outside of any.
#:
#: Activation checkpointing runs forwards inside backward; no public call tells that from a forward after a backward
#: that raised.
backward_number: Callable[[], int] = torch._C._current_graph_task_id
NO_BACKWARD = -1


def in_backward() -> bool:
    """Whether the calling thread is executing a backward. Modules ask ``backward_number`` itself, without a call."""
    return backward_number() != NO_BACKWARD


#: What ``.metadata`` of a DCP directory has for the place of an item: stock torch writes and reads it, and gives it no
#: public name. (torch 2.11 to 2.15)
StorageInfo = torch.distributed.checkpoint.filesystem._StorageInfo


class CheckpointCall(NamedTuple):
    """A call of ``torch.utils.checkpoint.checkpoint`` whose function runs."""

    key: object
    """Torch's own object for it, the same when a backward runs the function again."""
    reentrant: bool
    again: bool
    """Whether a backward runs the function."""
    recorded: bool | None
    """Whether a backward may: whether gradients were on at the call. None where that cannot be told."""


#: With True: the hooks around what is saved for backward, as a checkpoint puts there; None for none.
hooks_of_saved_tensors: Callable[[bool], object] = torch._C._autograd._top_saved_tensors_default_hooks
#: Whether differentiation in forward mode is on: it is off in the forward of an autograd function.
forward_mode_enabled: Callable[[], bool] = torch._C._is_fwd_grad_enabled


def may_be_checkpointed() -> bool:
    """Whether ``calls_of_checkpoints`` may find any that a backward comes back to, at a fraction of its cost.

    A checkpoint puts hooks around what is saved; a re-entrant one is an autograd function; and a backward calls both
    again. Modules in a forward ask both themselves, without a call. (torch 2.11 to 2.15)
    """
    if backward_number() != NO_BACKWARD or hooks_of_saved_tensors(True) is not None:
        return True
    return not (forward_mode_enabled() or torch.is_inference_mode_enabled())


def calls_of_checkpoints() -> list[CheckpointCall]:
    """The calls of ``torch.utils.checkpoint.checkpoint`` around the caller in this thread, the innermost first.

    A module cannot see that its forward runs under a checkpoint, and ranks have to know ([Note: recomputation]). No
    public call tells; the callers' frames do. (torch 2.11 to 2.15)
    """
    found = []
    frame = sys._getframe(1)
    theirs = vars(torch.utils.checkpoint)
    while frame is not None:
        if frame.f_globals is theirs:
            name, given = frame.f_code.co_name, frame.f_locals
            if "gen" in given:
                # Not re-entrant: its generator waits, where gradients are on inside of the hooks.
                hooked = hooks_of_saved_tensors(True) is not None
                found.append(CheckpointCall(given["gen"].gi_frame.f_locals["new_frame"], False, False, hooked))
            elif name == "unpack_hook" and "frame" in given:
                found.append(CheckpointCall(given["frame"], False, True, True))
            elif name in ("forward", "backward") and "ctx" in given:
                ctx = given["ctx"]
                # Torch keeps no mode of the caller's; a graph alone, where an input needs one.
                graph = bool(ctx.next_functions) if any(ctx.needs_input_grad) else None
                found.append(CheckpointCall(ctx, True, name == "backward", graph))
        frame = frame.f_back  # type: ignore[assignment]
    return found


def sees_checkpoints() -> bool:
    """Whether ``calls_of_checkpoints`` finds what this torch's checkpoints do: its frames have no promise."""
    found: list[tuple[bool, bool]] = []

    def look(value: torch.Tensor) -> torch.Tensor:
        found.extend((each.reentrant, each.again) for each in calls_of_checkpoints() if may_be_checkpointed())
        return value * value

    with torch.inference_mode(False), torch.enable_grad():
        for reentrant in (False, True):
            given = torch.ones((), device="cpu", requires_grad=True)
            checkpointed: Any = torch.utils.checkpoint.checkpoint
            torch.autograd.backward(checkpointed(look, given, use_reentrant=reentrant, preserve_rng_state=False))
    return found == [(False, False), (False, True), (True, False), (True, True)]


#: The number of dispatch modes, which see every operation, as selective activation checkpointing does. Its public
#: names ask for a mode of one class. (torch 2.11 and 2.13)
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def will_accumulate(leaf: torch.Tensor) -> bool:
    """Whether the backward that runs now adds to ``leaf.grad``; to be called inside of one.

    Under ``autograd.grad`` and ``backward(inputs=...)`` it may not, and no public call tells.
    """
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as error:
        # It does not answer for a leaf whose own gradient ``autograd.grad`` was asked for (seen in torch 2.13).
        if "autograd.grad()" not in str(error):
            raise
        return False


def may_recompute_reentrantly() -> bool:
    """Whether the backward that runs now may go through a re-entrant checkpoint: not where inputs were given.

    Its gradients come from a backward of its own, which adds to all leaves.
    """
    return bool(torch.autograd._is_checkpoint_valid())  # type: ignore[no-untyped-call]


#: Whether torch.func transforms what runs: ``Function.apply`` is then another one.
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def direct(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for where no transform is active, and ``function.backward`` called by autograd itself.

    What lies between in Python looks for torch.func and for ``vjp``: eight calls a unit in a step.
    """
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def queue_after_backward(
    callback: Callable[[], None], given_up: Callable[[weakref.ref[Any]], None]
) -> weakref.ref[Any]:
    """Run ``callback`` when the current backward has ended, on the thread that called it.

    Returns a reference that gives None once it cannot run any more: autograd lets go of it when the backward has ended,
    and also when that raises, in which case nothing is called. Then ``given_up`` gets the reference.

    No public hook fires once per backward after all gradients have been accumulated.
    """
    once = partial(callback)
    Variable._execution_engine.queue_callback(once)
    return weakref.ref(once, given_up)


def when_backward_raises(callback: Callable[[BaseException], None]) -> bool:
    """Call ``callback`` with what the backward raises that autograd is giving up, as soon as Python has it.

    A trace function, on the frame that called it and until then, as a debugger puts one there: no hook of torch's tells
    of errors. Returns whether this thread called it. (torch 2.11 to 2.15)
    """
    frame = sys._getframe(1)
    while frame.f_code.co_name != "_engine_run_backward" or frame.f_globals.get("__name__") != "torch.autograd.graph":
        if frame.f_back is None:
            return False
        frame = frame.f_back
    before, its = sys.gettrace(), frame.f_trace

    def trace(raising: FrameType, event: str, what: Any) -> Any:
        if event == "exception":
            sys.settrace(before)
            raising.f_trace = its
            callback(what[1].with_traceback(what[2]))
        return trace

    frame.f_trace = trace
    sys.settrace(lambda *_: None)
    return True


def in_transform() -> bool:
    """Whether the caller runs under ``torch.func`` (vmap, grad, jvp), which plain autograd functions refuse.

    No public call tells.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def transforms_leave_graph() -> bool:
    """Whether a later backward may go through what the active transforms compute: a ``jvp``, and ``vmap``.

    Others differentiate by graphs of their own. (torch 2.11 to 2.15)
    """
    kinds = torch._C._functorch.TransformType
    keys = [each.key() for each in torch._C._functorch.get_interpreter_stack() or ()]
    return keys.count(kinds.Jvp) <= 1 and set(keys) <= {kinds.Jvp, kinds.Vmap}


#: The level of forward-mode differentiation that is open, of ``torch.func.jvp`` too; -1 where none is. The public
#: functions of ``forward_ad`` enter and leave it. (torch 2.11 to 2.15)
forward_mode_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level")


def transformed_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """``tensor``, and its tangent if it has one, as the tensors that a later backward goes through.

    Transforms put wrappers around both, whose ``grad_fn`` is theirs. (torch 2.11 to 2.15)
    """
    functorch: Any = torch._C._functorch
    tangent = forward_ad.unpack_dual(tensor).tangent if forward_mode_level() >= 0 else None  # type: ignore[no-untyped-call]
    parts = [tensor] if tangent is None else [tensor, tangent]
    for index, part in enumerate(parts):
        while functorch.is_functorch_wrapped_tensor(part):
            part = functorch.get_unwrapped(part)
        parts[index] = part
    return parts


@contextmanager
def outside_of_transforms() -> Iterator[None]:
    """Inside, operations on plain tensors are no part of what is transformed. (torch 2.11 to 2.15)"""
    # Imported with the first transform.
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack(), forward_ad._set_fwd_grad_enabled(False):
        yield


#: Copies each tensor of the second list into that of the first, casting on the way, by one fused launch; these and the
#: following have no public name.
foreach_copy_: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_copy_
#: Adds each tensor of the second list to that of the first.
foreach_add_: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_add_
#: Zeroes all tensors.
foreach_zero_: Callable[[list[torch.Tensor]], object] = torch._foreach_zero_
#: Multiplies all tensors by a number, or by a scalar tensor without reading it on the host.
foreach_mul_: Callable[[list[torch.Tensor], torch.Tensor | float], object] = torch._foreach_mul_
#: Moves each tensor of the first list towards that of the second by a part of the way; in place, and as new tensors.
foreach_lerp_: Callable[[list[torch.Tensor], list[torch.Tensor], float], object] = torch._foreach_lerp_
foreach_lerp: Callable[[list[torch.Tensor], list[torch.Tensor], float], Sequence[torch.Tensor]] = torch._foreach_lerp


def foreach_norm(tensors: list[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The vector norm of each tensor, by one fused launch, accumulated in ``dtype``."""
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def tensor_hooks(parameter: torch.Tensor) -> int:
    """Number of hooks that ``Tensor.register_hook`` put on ``parameter``."""
    return len(parameter._backward_hooks or ())


#: The hooks of ``register_post_accumulate_grad_hook``, or None: asked of many parameters at once.
hooks_after_accumulation: Callable[[torch.Tensor], object] = attrgetter("_post_accumulate_grad_hooks")


def post_accumulate_grad_hooks(parameter: torch.Tensor) -> Sequence[Callable[[torch.Tensor], Any]]:
    """The hooks of ``register_post_accumulate_grad_hook``: on a sharded parameter they do not fire by themselves."""
    hooks = parameter._post_accumulate_grad_hooks
    return tuple(hooks.values()) if hooks else ()


def share_post_accumulate_grad_hooks(before: torch.Tensor, placed: torch.Tensor) -> None:
    """Let ``placed`` have the hooks of ``before``, whose handles remove them from both."""
    placed._post_accumulate_grad_hooks = before._post_accumulate_grad_hooks


def rnn_weights(module: nn.RNNBase, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes by which an RNN module computes from ``tensors`` (by parameter name), and no others.

    It computes from a list beside ``_parameters``. Where that list's weak references are not those of its parameters,
    it takes them for changed and, on CUDA, moves them into memory of its own, from where no gather reaches them.
    """
    names = [name for layer in module._all_weights for name in layer]
    weights = [tensors.get(name, old) for name, old in zip(names, module._flat_weights, strict=True)]
    references = [None if weight is None else weakref.ref(weight) for weight in weights]
    return {"_flat_weights": weights, "_flat_weight_refs": references}


def hidden_from_compile(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function``, which torch.compile calls without looking inside.

    The public ``torch.compiler.disable`` imports the compiler when it decorates, which takes over a second; this one
    when the function is first called.
    """
    return _disable_dynamo(function)


def uncompiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function``, which runs as it is, with all that it calls, where the compiler meets it outside of a graph.

    ``nn.Module.compile`` and ``torch.compile(module)`` let hooks run before and behind the graph of ``forward``, and
    make a graph of each hook as well unless something forbids it. The public ``torch.compiler.disable`` does, but
    imports the compiler, and puts Python around every call of eager steps; a mark on the code costs these nothing.
    (torch 2.11 and 2.13)
    """
    return _marked(function, callees=True)


def uncompiled_alone(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function``, which runs as it is where the compiler meets it outside of a graph; what it calls is compiled."""
    return _marked(function, callees=False)


def _marked(function: Callable[_P, _T], *, callees: bool) -> Callable[_P, _T]:
    frames: Any = torch._C._dynamo.eval_frame
    action, code = frames._FrameAction, getattr(function, "__code__")  # noqa: B009
    strategy = frames._FrameExecStrategy(action.SKIP, action.SKIP if callees else action.DEFAULT)
    frames.set_code_exec_strategy(code, strategy)
    return function


def may_compile() -> bool:
    """Whether torch.compile may be at work: its module takes a second to import, and nothing else needs it."""
    return "torch._dynamo" in sys.modules


#: Makes a context inside which tensor subclasses are treated as plain tensors.
without_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass


def swap_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]


#: Gives a tensor back, with a node of autograd's behind the one that it had. Around it in Python it takes longer.
lift: Callable[[torch.Tensor], torch.Tensor] = torch.ops.aten.lift.default._op
#: The number that the next node of autograd's in this thread gets, and that of a node. (torch 2.11 to 2.15)
next_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
sequence_nr: Callable[[Any], int] = methodcaller("_sequence_nr")


#: Lets autograd take tensors for changed by in-place operations as often as numbers say, one for each. It refuses a
#: backward that reads another version than was saved; no public call sets one. (torch 2.11 to 2.15)
set_versions: Callable[[Any, Any], None] = torch._C._autograd._unsafe_set_version_counter


def unchanged_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Inside, operations that only seem to write to ``tensor`` do not count as changes of it.

    No public call lets a tensor have another history without a new version (torch 2.11 and 2.13).
    """
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined, no-untyped-call, no-any-return, unused-ignore]


def current_stream_key(device_index: int) -> tuple[int, int, int]:
    """The current CUDA stream of a device as (stream id, device index, device type), equal for equal streams.

    ``torch.cuda.current_stream`` makes an object for the same three numbers, which takes several times as long.
    """
    key: tuple[int, int, int] = torch._C._cuda_getCurrentStream(device_index)
    return key


def abandon_capture_pool(device: int, pool: tuple[int, int]) -> None:
    """Let the allocator forget the memory pool of a capture that failed.

    ``CUDAGraph.capture_end`` raises before it does that itself. The allocator would go on taking a capture for under
    way, and keep what it cached even where memory runs out.
    """
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)
    with suppress(RuntimeError):
        torch._C._cuda_releasePool(device, pool)


def mesh_slices(mesh: Any) -> torch.Tensor:
    """The ranks of a ``DeviceMesh`` and of the other slices of its root: ``[slices, *mesh.shape]``.

    The public ``mesh.mesh`` has this rank's slice alone, but all ranks make the groups of all slices together. (torch
    2.11 and 2.13)
    """
    slices: torch.Tensor = mesh._layout.remap_to_tensor(mesh._rank_map)
    return slices


def default_store() -> Any | None:
    """The store of the default process group, through which ranks can talk before any communicator exists."""
    from torch.distributed import distributed_c10d

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return distributed_c10d._get_default_store()


def divided_batch(stage: object) -> tuple[Any, list[Any], int, list[tuple[Any, Any]]] | None:
    """What a schedule divides in the step that calls this for ``stage``, the last of its stages; None for others.

    All ranks pass there before they communicate, and nowhere else it is known whether a batch can be divided: a stage
    sees one microbatch after another. No public call tells a stage of its schedule. (torch 2.11 to 2.15)

    Returns:
        The schedule, its stages, how many microbatches there must be, and the arguments of each that there is.
    """
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    frame = sys._getframe(1)
    while not (frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), _PipelineSchedule)):
        if frame.f_back is None:
            return None
        frame = frame.f_back
    given = frame.f_locals
    schedule: Any = given["self"]
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    if stage is not stages[-1]:
        return None
    number = schedule._n_microbatches
    # Torch 2.15 takes batches that the caller divided as well.
    args, kwargs, target = (given.get(name) for name in ("arg_mbs", "kwarg_mbs", "target_mbs"))
    if args is None and kwargs is None and target is None:
        args, kwargs = schedule._split_inputs(given["args"], given["kwargs"])
    args, kwargs = [()] * number if args is None else args, [{}] * number if kwargs is None else kwargs
    return schedule, stages, number, list(zip(args, kwargs, strict=False))


def finalizes(schedule: Any) -> bool:
    """Whether the step of ``schedule`` that runs reduces gradients at its end: ``step(finalize_gradients=...)``.

    Torch 2.15 has the argument. It calls no method of the stages where they shall wait for another step.
    """
    return bool(getattr(schedule, "_finalize_gradients", True))


def in_functional_call() -> bool:
    """Whether torch puts tensors in the place of a module's parameters for the length of one call.

    ``torch.func.functional_call`` and its older names have this module in common; nothing in the module tells.
    """
    return called_from("torch.nn.utils.stateless")


def stepping_scaler() -> torch.amp.GradScaler | None:
    """The ``torch.amp.GradScaler`` that steps the optimizer whose hook asks; None for none, or one that is disabled."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            scaler: Any = frame.f_locals.get("self")
            return scaler if scaler is not None and scaler.is_enabled() else None
        frame = frame.f_back  # type: ignore[assignment]
    return None


def called_from(module: str) -> bool:
    """Whether a function of ``module`` is among the callers."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def may_host(store: Any) -> bool:
    """Whether ``store`` may end with this process: one over TCP, which rank 0 hosts where no launcher does.

    No public call tells who hosts it.
    """
    distributed: Any = torch.distributed
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return isinstance(store, distributed.TCPStore) and distributed.get_rank() == 0 and not launched


def mesh_over(
    kind: Any, groups: Sequence[Any], device_type: str, ranks: torch.Tensor, rank: int, names: tuple[str, ...] | None
) -> Any:
    """A mesh of class ``kind`` of ``ranks``, a dimension for each of ``groups``: ``ProcessGroup``, not all of torch's.

    The public ``DeviceMesh.from_group`` asks torch's default group for the rank. (torch 2.11 to 2.15)
    """
    mesh: Any = kind(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
    mesh._dim_group_names = [group.group_name for group in groups]
    mesh._pg_registry.update({group.group_name: group for group in groups})
    return mesh


def remember_group(group: Any) -> None:
    """Let torch's operations, which look a group up by its name, find ``group``, which torch did not make."""
    from torch._C import _distributed_c10d as c10d

    c10d._register_process_group(group.group_name, group)


def forget_group(name: str) -> None:
    """Let nobody find the group ``name`` of ``remember_group`` any more."""
    from torch._C import _distributed_c10d as c10d

    c10d._unregister_process_group(name)  # type: ignore[arg-type, unused-ignore]


def joined_mesh(meshes: Sequence[Any]) -> Any:
    """The mesh with the dimensions of all ``meshes``, ``DeviceMesh`` that are slices of one; None where they are not.

    No public call takes slices together, and equal meshes are what ``DTensor`` computes over. (torch 2.11 to 2.15)
    """
    if any(mesh.mesh_dim_names is None for mesh in meshes):
        return None
    try:
        return type(meshes[0])._concatenate(list(meshes))
    except RuntimeError:
        return None


def strided_shard(dim: int, split_factor: int) -> Any:
    """``Shard(dim)`` of what dimensions of the mesh to the right have cut into ``split_factor`` parts before."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def dtensor_spec(
    mesh: Any, placements: Sequence[Any], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Any:
    """What a ``DTensor`` is besides its local tensor: made once, for many of them."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), dtype))


#: The local tensor of a ``DTensor`` itself, of which ``to_local`` gives views: assigned, the ``DTensor`` has another.
local_tensor: Callable[[Any], torch.Tensor] = attrgetter("_local_tensor")


def use_local_tensor(placed: torch.Tensor, local: torch.Tensor) -> None:
    """Let ``placed``, a ``DTensor``, lie in the memory of ``local``: no public call changes what one is made of."""
    placed._local_tensor = local  # type: ignore[attr-defined]


def over_own_storage(view: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of ``view``, which is dense, whose storage is that and nothing around it.

    Torch pickles and copies whole storages. It fails to copy a ``DTensor`` whose local tensor does not begin its
    storage: it looks for memory of the ``DTensor`` itself there.
    """
    if view.is_meta:
        return view
    start = view.storage_offset() * view.itemsize
    storage = view.untyped_storage()[start : start + view.nbytes]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.shape, view.stride())


def dtensor_maker() -> Callable[[torch.Tensor, Any], DTensor]:
    """What makes a ``DTensor`` over a local tensor, of a ``DTensorSpec`` that is made once.

    ``DTensor.from_local`` takes fifty times as long, for every gradient. ``DTensor()`` takes four times as long: its
    ``__init__``, which does nothing, is kept from being compiled at each call. (torch 2.11 to 2.15)
    """
    from torch.distributed.tensor import DTensor

    make: Any = DTensor.__new__
    return partial(make, DTensor, requires_grad=False)


def dtensor_parameter(local: torch.Tensor, spec: Any, *, requires_grad: bool) -> nn.Parameter:
    """A parameter over ``local``, as ``nn.Parameter`` of a ``DTensor`` is, which would compute on it to make one."""
    made: Any = dtensor_maker()(local, spec)
    made._is_param = True
    made.requires_grad_(requires_grad)
    return made  # type: ignore[no-any-return]
