"""The peers of ``peers.py``: how each wraps the model, makes its optimizer, and takes a step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from switches import SWITCHES
from torch import nn
from workloads import Block, LanguageModel, Workload, initial_value, initializer, meta_model, whole_model


class NotServedError(Exception):
    """A peer cannot take part in this run; the message says why, and is the same on every rank."""


class Step(Protocol):
    """One training step: forward, backward, optimizer, gradients set to None."""

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Tokens and next tokens, ``[batch, seq]``, to the loss; the next call may overwrite it."""
        ...

    def close(self) -> None:
        """Let go of what outlives its last use."""
        ...


@dataclass(frozen=True, slots=True)
class Site:
    """Where a peer is built, and what it trains."""

    workload: Workload
    device: torch.device
    rank: int
    world_size: int
    compiled: bool
    """Whether every block goes through ``torch.compile``."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A peer as it is named in the results."""

    name: str
    compiled: bool
    captured: bool
    """Whether its step is one CUDA graph."""
    build: Callable[[Site], Step]
    switch: Callable[[], AbstractContextManager[Any]] = nullcontext
    """A context for building it and for each of its steps."""


class EagerStep:
    """A step as a training loop writes it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        context: AbstractContextManager[Any] | None = None,
        clip: Callable[[nn.Module], object] | None = None,
    ) -> None:
        """``context``: of the forward; ``clip``: called with the model behind the backward."""
        self.model = model
        self.optimizer = optimizer
        self.context = context
        self.clip = clip

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor
        if self.context is None:
            loss = self.model(tokens, targets)
        else:
            with self.context:
                loss = self.model(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.clip is not None:
            self.clip(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def close(self) -> None:
        """Nothing to do."""


class DeepSpeedStep:
    """A step of DeepSpeed's engine, which has the optimizer."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._engine(tokens, targets)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    def close(self) -> None:
        """Let go of the hooks that it has on the model."""
        self._engine.destroy()


class LocalStep:
    """Compute of one rank alone: gradients are dropped, and the optimizer updates memory of a shard's size.

    The model does not learn.
    """

    def __init__(self, model: nn.Module, shard: nn.Parameter, *, capturable: bool = False) -> None:
        self.model = model
        self.parameters = list(model.parameters())
        shard.grad = torch.full_like(shard, 1e-3)
        self.optimizer = adamw([shard], capturable=capturable)

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        return loss.detach()

    def close(self) -> None:
        """Nothing to do."""


class GraphStep:
    """A few eager steps on a side stream, then the same step captured once and replayed, without an engine's help."""

    EAGER_STEPS = 2

    def __init__(self, step: Step, site: Site) -> None:
        self.step = step
        size = (site.workload.batch, site.workload.seq)
        self.tokens, self.targets = (torch.zeros(size, dtype=torch.int64, device=site.device) for _ in range(2))
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.loss = torch.zeros((), device=site.device)
        self.taken = 0

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.tokens.copy_(tokens)
        self.targets.copy_(targets)
        if self.taken < self.EAGER_STEPS:
            self.taken += 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                loss = self.step(self.tokens, self.targets)
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss
        if self.graph is None:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog asks for the state of its events meanwhile, from another thread.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.loss = self.step(self.tokens, self.targets)
        self.graph.replay()
        return self.loss

    def close(self) -> None:
        """Drop the graph: communicators that it uses cannot be destroyed before."""
        torch.cuda.synchronize()
        if self.graph is not None:
            self.graph.reset()


class CapturedPolyshard:
    """polyshard's own captured step: as many eager steps as ``GraphStep`` takes, then replays."""

    def __init__(self, model: nn.Module, step: EagerStep) -> None:
        import polyshard

        self.captured = polyshard.CapturedStep(
            model, step.optimizer, step.__call__, warmup=GraphStep.EAGER_STEPS, fallback="refuse"
        )

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.captured(tokens, targets)

    def close(self) -> None:
        """Drop the graph."""
        self.captured.reset()


def contender(name: str, compiled: bool = False) -> Contender:
    """The peer called ``name``.

    ``+compile`` at its end, or ``compiled``, compiles its blocks, and ``+compile-model`` the whole of the model.
    ``:without=NAME`` switches a mechanism of polyshard's off, one of ``switches.py``.

    Raises ``ValueError`` for a name that means none, naming those that there are.
    """
    family, _, compiles = name.partition("+")
    if compiles not in ("", "compile", "compile-model"):
        raise ValueError(f"peer {name!r}: '+{compiles}' compiles nothing. There are: +compile, +compile-model.")
    compiles = compiles or ("compile" if compiled else "")
    base, _, rest = family.partition(":")
    build: Callable[[Site], Step]
    switch: Callable[[], AbstractContextManager[Any]] = nullcontext
    if base in _POLYSHARD:
        overrides = _overrides(name, rest)
        without = overrides.pop("POLYSHARD_WITHOUT", "nothing")
        if without not in SWITCHES:
            raise ValueError(f"peer {name!r}: no mechanism is called {without!r}. There are: {', '.join(SWITCHES)}.")
        build, switch = partial(_polyshard, kind=base, overrides=overrides), SWITCHES[without]
    elif base in _PEERS and not rest:
        build = _PEERS[base]
    else:
        raise ValueError(f"no peer is called {name!r}. Peers: {', '.join(peer_names())}.")
    if compiles and base == "ddp":
        # torch.compile splits graphs at DDP's buckets by itself, which is another measurement.
        raise ValueError(f"peer {name!r}: ddp is timed without torch.compile only.")
    if compiles == "compile-model":
        build = partial(_compiled_model, build)
    return Contender("+".join(filter(None, (family, compiles))), bool(compiles), "captured" in base, build, switch)


def peer_names() -> list[str]:
    return [*_PEERS, *_POLYSHARD]


def _meta_model(site: Site) -> LanguageModel:
    return _compiled(meta_model(site.workload), site)


def _whole(site: Site, dtype: torch.dtype = torch.float32) -> LanguageModel:
    return _compiled(whole_model(site.workload, site.device, dtype), site)


def _compiled(model: LanguageModel, site: Site) -> LanguageModel:
    if site.compiled:
        for block in model.blocks:
            block.compile()
    return model


def _compiled_model(build: Callable[[Site], Step], site: Site) -> Step:
    """A peer whose model is compiled as one, when it is sharded: the graph breaks where the sharder lets it."""
    step = build(replace(site, compiled=False))
    if not isinstance(step, EagerStep | LocalStep):
        raise NotServedError("no step of this peer is one model's")
    step.model.compile()
    return step


def adamw(parameters: Iterable[Any], *, capturable: bool = False) -> torch.optim.AdamW:
    """The optimizer of all peers, over parameters or groups of them."""
    return torch.optim.AdamW(
        list(parameters), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=capturable
    )


def _refuse_replicas(site: Site, bytes_per_parameter: int, what: str) -> None:
    """Refuse a model that would nearly fill the device before its activations."""
    if site.device.type != "cuda":
        return
    needed = site.workload.parameter_count * bytes_per_parameter / 2**30
    there = torch.cuda.get_device_properties(site.device).total_memory / 2**30
    if needed > 0.7 * there:
        raise NotServedError(
            f"{what} take {needed:.0f} GiB on every rank, of {there:.0f} GiB, before activations and buckets"
        )


def _refuse_without_cuda(site: Site, what: str) -> None:
    if site.device.type != "cuda":
        raise NotServedError(f"{what} needs CUDA")


def _local(site: Site, *, captured: bool = False) -> Step:
    if captured:
        _refuse_without_cuda(site, "a captured step")
    _refuse_replicas(site, 4, "bf16 parameters and gradients")
    model = _whole(site, torch.bfloat16)
    numel = -(-site.workload.parameter_count // site.world_size)
    step = LocalStep(model, nn.Parameter(torch.zeros(numel, device=site.device)), capturable=captured)
    return GraphStep(step, site) if captured else step


def _ddp(site: Site) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    _refuse_replicas(site, 16, "fp32 parameters, gradients and two optimizer states")
    ids = [site.device.index] if site.device.type == "cuda" else None
    model = DistributedDataParallel(_whole(site), device_ids=ids, gradient_as_bucket_view=True)
    autocast = torch.autocast(site.device.type, torch.bfloat16)
    return EagerStep(model, adamw(model.parameters()), autocast)


def _fsdp1(site: Site) -> Step:
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    _refuse_without_cuda(site, "FSDP1 with bf16 compute and fp32 reduction")
    model = _meta_model(site)
    initialize = initializer(model)

    def fill(module: nn.Module) -> None:
        module.to_empty(device=site.device, recurse=False)
        initialize(module)

    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        use_orig_params=True,
        device_id=site.device,
        param_init_fn=fill,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    )
    return EagerStep(wrapped, adamw(wrapped.parameters()))


def _half_of(site: Site) -> int:
    """Ranks of each of two groups that hold whole models."""
    if site.world_size < 4 or site.world_size % 2:
        raise NotServedError(f"two groups of at least two ranks need 4, 6, 8 … ranks, not {site.world_size}")
    return site.world_size // 2


def _fsdp2(
    site: Site,
    *,
    keep: bool = False,
    tuned: bool = False,
    hybrid: bool = False,
    drop_in: bool = False,
    offload: bool = False,
    fp8: str | None = None,
) -> Step:
    """Blocks and root.

    ``keep``: nothing is released after forward. ``tuned``: more units, and prefetch by hand. ``hybrid``: sharded over
    half of the ranks, replicated over the halves. ``drop_in``: polyshard's FSDP2. ``offload``: ``CPUOffloadPolicy``.
    ``fp8``: torchao's recipe by which the linear layers of blocks compute; weights are gathered in fp8 where it is
    ``"tensorwise"``.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy

    fully_shard: Callable[..., Any] = importlib.import_module(
        "polyshard_fsdp2" if drop_in else "torch.distributed.fsdp"
    ).fully_shard
    shards = _half_of(site) if hybrid else site.world_size
    dimensions = {"replicate": 2, "shard": shards} if hybrid else {"shard": shards}
    mesh = init_device_mesh(site.device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _meta_model(site)
    if fp8 is not None:
        _compute_in_fp8(model, fp8, site)
    offload_policy = CPUOffloadPolicy(pin_memory=site.device.type == "cuda") if offload else OffloadPolicy()
    policies = {"mp_policy": precision, "offload_policy": offload_policy}
    for unit in [model.embedding, *model.blocks] if tuned else model.blocks:
        fully_shard(unit, mesh=mesh, **policies, reshard_after_forward=not keep)
    if tuned:
        # Backward begins with it.
        fully_shard(model.tail, mesh=mesh, **policies, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, **policies, reshard_after_forward=False if keep else None)
    if tuned:
        units = cast("list[FSDPModule]", model.units)
        for position, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[position + 1 : position + 3])
            unit.set_modules_to_backward_prefetch(units[max(0, position - 2) : position][::-1])
        for setter, value in (("set_separate_reduce_scatter_group", True), ("set_reduce_scatter_max_input_buffers", 2)):
            # Newer than the oldest torch that is supported.
            if hasattr(model, setter):
                getattr(model, setter)(value)
    fill_shards(model, site, shards, torch.device("cpu") if offload else None)
    optimizer = adamw(model.parameters())
    if fp8 == "tensorwise":
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        # The weights' scales, by one reduction for all of them.
        precompute_float8_dynamic_scale_for_fsdp(model)
        optimizer.register_step_post_hook(lambda *_: precompute_float8_dynamic_scale_for_fsdp(model))
    return EagerStep(model, optimizer)


def fill_shards(model: nn.Module, site: Site, shards: int, device: torch.device | None = None) -> None:
    """Put a meta model of ``DTensor`` cut over ``shards`` ranks on ``device`` (the site's), with its first values."""
    model.to_empty(device=device or site.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            pieces = initial_value(name, parameter.shape, site.device).chunk(shards)
            if site.rank % shards < len(pieces):
                cast("Any", parameter).to_local().copy_(pieces[site.rank % shards])


def _compute_in_fp8(model: LanguageModel, recipe: str, site: Site) -> None:
    """torchao's ``Float8Linear`` in blocks, for linear layers whose dimensions its kernels take."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise NotServedError(f"torchao cannot be imported: {error}") from error
    config = Float8LinearConfig.from_recipe_name(recipe)
    if recipe == "tensorwise":
        config = replace(config, enable_fsdp_float8_all_gather=True, force_recompute_fp8_weight_in_bwd=False)
    if site.device.type != "cuda":
        config = replace(config, emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name.startswith("blocks."))


def _megatron(site: Site, *, strategy: int, double_buffers: bool = False) -> Step:
    """Megatron-FSDP, of stage ``strategy`` of ZeRO. ``double_buffers``: units are gathered into two fixed buffers."""
    from torch.distributed.device_mesh import init_device_mesh

    _refuse_without_cuda(site, "Megatron-FSDP")
    fsdp = _installed("megatron_fsdp", "megatron-fsdp")
    mesh = init_device_mesh("cuda", (site.world_size, 1), mesh_dim_names=("dp", "tp"))
    precision = fsdp.MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=torch.float32
    )
    model = fsdp.fully_shard_model(
        _whole(site, torch.bfloat16),
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        device=site.device,
        mixed_precision_policy=precision,
        fsdp_double_buffer=double_buffers,
    )
    return EagerStep(model, fsdp.fully_shard_optimizer(adamw(model.parameters())))


def _deepspeed(site: Site) -> Step:
    """ZeRO-3 in bf16, with masters, states and sums of gradients in fp32."""
    _refuse_without_cuda(site, "DeepSpeed")
    deepspeed = _installed("deepspeed", "deepspeed")
    model = _whole(site)
    bucket = 200_000_000
    settings = {
        "train_micro_batch_size_per_gpu": site.workload.batch,
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_param_persistence_threshold": 100_000,
        },
        "steps_per_print": 1_000_000_000,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=settings)
    return DeepSpeedStep(engine)


def _installed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotServedError(f"{package} is not installed, or not for this torch: {error}") from error


def _drop_in_over(site: Site, *, flat: bool) -> Step:
    """The optimizer is over plain parameters, or over one a unit where ``flat``."""
    import polyshard

    step = _fsdp2(site, drop_in=True)
    assert isinstance(step, EagerStep)
    given = polyshard.flat_parameters(step.model) if flat else step.model.parameters()
    return EagerStep(step.model, adamw(given))


#: What each of polyshard's peers sets beside precision, policy and device.
_POLYSHARD: dict[str, dict[str, Any]] = {
    "polyshard": {},
    "polyshard-keep": {"strategy": "shard_grad_op"},
    "polyshard-auto": {"reshard_after_forward": "auto"},
    "polyshard-captured": {},
    "polyshard-captured-keep": {"strategy": "shard_grad_op"},
    "polyshard-no-shard": {"strategy": "no_shard"},
    "polyshard-hybrid": {"strategy": "hybrid_shard"},
    "polyshard-fp8": {"precision": "fp8_linear"},
    "polyshard-fp8-all": {"precision": {"name": "fp8_linear", "weight_gradient": "fp8"}},
    "polyshard-captured-fp8": {"precision": "fp8_linear"},
    "polyshard-in-backward": {"offload": "optimizer"},
    "polyshard-clipped": {"offload": "optimizer"},
    "polyshard-in-backward-clipped": {"offload": "optimizer"},
    "polyshard-in-backward-taken-back": {"offload": "optimizer"},
}


def _overrides(name: str, rest: str) -> dict[str, str]:
    """``forward_prefetch=2:collectives__registered=true`` as polyshard's environment variables would say it."""
    overrides = {}
    for setting in filter(None, rest.split(":")):
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"peer {name!r}: {setting!r} is no setting. Write polyshard:forward_prefetch=2.")
        overrides[f"POLYSHARD_{key.upper()}"] = value
    return overrides


def _polyshard(site: Site, *, kind: str, overrides: dict[str, str]) -> Step:
    import polyshard

    settings = dict(_POLYSHARD[kind])
    if "captured" in kind:
        _refuse_without_cuda(site, "a captured step")
    if kind == "polyshard-no-shard":
        _refuse_replicas(site, 18, "fp32 parameters, gradients, two optimizer states and bf16 parameters")
    if kind == "polyshard-hybrid":
        settings["shard_size"] = _half_of(site)
    policy = {"name": "module_class", "classes": [Block]}
    settings = {"precision": "bf16", **settings}
    config = polyshard.ShardConfig(policy=policy, device=site.device, **settings).with_environment(overrides)
    model = _meta_model(site)
    polyshard.shard(model, config, initializer=initializer(model))
    captured = "captured" in kind
    optimizer = adamw(polyshard.flat_parameters(model), capturable=captured)
    # Norms are below the one, and above the other.
    most = {"clipped": 1e9, "back": 1e-9}.get(kind.rpartition("-")[2])
    clip = None if most is None else partial(polyshard.clip_grad_norm_, max_norm=most)
    if "in-backward" in kind:
        from polyshard.optim import step_in_backward

        step_in_backward(model, optimizer, keeps_former=clip is not None)
    step = EagerStep(model, optimizer, clip=clip)
    return CapturedPolyshard(model, step) if captured else step


_PEERS: dict[str, Callable[[Site], Step]] = {
    "local": _local,
    "local-captured": partial(_local, captured=True),
    "ddp": _ddp,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "fsdp2-tuned": partial(_fsdp2, tuned=True),
    "fsdp2-keep": partial(_fsdp2, keep=True),
    "fsdp2-hybrid": partial(_fsdp2, hybrid=True),
    "fsdp2-offload": partial(_fsdp2, offload=True),
    "fsdp2-fp8-tensorwise": partial(_fsdp2, fp8="tensorwise"),
    "fsdp2-fp8-rowwise": partial(_fsdp2, fp8="rowwise"),
    "fsdp2-fp8-rowwise-gw-hp": partial(_fsdp2, fp8="rowwise_with_gw_hp"),
    "megatron-optim": partial(_megatron, strategy=1),
    "megatron-optim-grads": partial(_megatron, strategy=2),
    "megatron": partial(_megatron, strategy=3),
    "megatron-double-buffers": partial(_megatron, strategy=3, double_buffers=True),
    "deepspeed": _deepspeed,
    "drop-in": partial(_fsdp2, drop_in=True),
    "drop-in-local": partial(_drop_in_over, flat=False),
    "drop-in-flat": partial(_drop_in_over, flat=True),
    "drop-in-fp8-tensorwise": partial(_fsdp2, drop_in=True, fp8="tensorwise"),
}
