"""``fully_shard`` trains as torch's does, number by number, both on gloo and in fp64 unless a test says otherwise."""

from __future__ import annotations

import contextlib
import functools
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp2_models import (
    FACES,
    OURS,
    WIDTH,
    Block,
    as_whole,
    batches,
    both,
    cpu_mesh,
    loss_of,
    make,
    same,
    shard_all,
    train,
    wholes,
)
from processes import KeptRanks
from torch import nn
from torch.utils.checkpoint import checkpoint


def _trains(rank: int, settings: dict[str, Any]) -> None:
    def run(face: ModuleType) -> Any:
        model = shard_all(face, make(), **settings)
        return train(model), wholes(model)

    both(run)


@pytest.mark.parametrize(("world_size", "releases"), [(3, None), (2, True), (2, False), (2, 1)])
def test_parity_with_torch(ranks: KeptRanks, world_size: int, releases: bool | int | None) -> None:
    ranks.run(world_size, _trains, {"reshard_after_forward": releases} if releases is not None else {})


def _one_rank(rank: int) -> None:
    def run(face: ModuleType) -> Any:
        model = shard_all(face, make())
        return train(model), wholes(model)

    both(run)


def test_one_rank(ranks: KeptRanks) -> None:
    ranks.run(1, _one_rank)


def _unsharded_reference(rank: int) -> None:
    sharded, plain = shard_all(OURS, make()), make()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (sharded, plain)]
    for words in batches(3):
        loss_of(sharded, words).backward()
        loss_of(plain, words).backward()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(wholes(sharded), dict(plain.state_dict()), rtol=0, atol=1e-12)


def test_parity_with_the_unsharded_model(ranks: KeptRanks) -> None:
    ranks.run(3, _unsharded_reference)


def _hybrid(rank: int) -> None:
    def run(face: ModuleType) -> Any:
        model = shard_all(face, make(), cpu_mesh(2, 2))
        return train(model), wholes(model)

    both(run)


def test_replicas_of_shards(ranks: KeptRanks) -> None:
    ranks.run(4, _hybrid)


def _accumulates(rank: int, mesh_shape: tuple[int, ...], setter: str) -> None:
    def run(face: ModuleType) -> Any:
        model: Any = shard_all(face, make(), cpu_mesh(*mesh_shape))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        told = []
        for start in (0, 10):
            for number, words in enumerate(batches(3, seed=start)):
                last = number == 2
                model.set_is_last_backward(last)
                getattr(model, setter)(last)
                loss = loss_of(model, words)
                loss.backward()
                told.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return told, wholes(model)

    both(run)


def test_accumulating_without_communication(ranks: KeptRanks) -> None:
    ranks.run(2, _accumulates, (), "set_requires_gradient_sync")


def test_accumulating_without_all_reduce(ranks: KeptRanks) -> None:
    ranks.run(2, _accumulates, (2, 1), "set_requires_all_reduce")


def test_accumulating_with_parameters_kept(ranks: KeptRanks) -> None:
    ranks.run(2, _accumulates, (), "set_reshard_after_backward")


def _hides_waiting_gradients(rank: int) -> None:
    model: Any = shard_all(OURS, make())
    model.set_requires_gradient_sync(False)
    loss_of(model, next(batches(1))).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="root FSDP module"):
        model.blocks[0].set_requires_gradient_sync(True)
    with pytest.raises(NotImplementedError, match="recurse=False"):
        model.set_requires_gradient_sync(True, recurse=False)
    model.set_requires_gradient_sync(True)
    loss_of(model, next(batches(1))).backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.numel())


def test_gradient_sync_is_of_the_whole_model(ranks: KeptRanks) -> None:
    ranks.run(2, _hides_waiting_gradients)


def _frozen(rank: int) -> None:
    def run(face: ModuleType) -> Any:
        model = make()
        model.embedding.requires_grad_(False)
        for block in model.blocks:
            assert isinstance(block, Block)
            block.up.requires_grad_(False)
        shard_all(face, model)
        told = train(model)
        model.blocks[1].requires_grad_(False)
        return told + train(model), wholes(model)

    both(run)


def test_frozen_parameters(ranks: KeptRanks) -> None:
    ranks.run(2, _frozen)


def _tied(rank: int, listed: bool) -> None:
    def run(face: ModuleType) -> Any:
        model, mesh = make(tied=True), cpu_mesh()
        for block in model.blocks:
            face.fully_shard(block, mesh=mesh)
        if listed:
            pair = face.fully_shard([model.embedding, model.head], mesh=mesh)
            assert all(isinstance(each, face.FSDPModule) for each in pair)
        face.fully_shard(model, mesh=mesh)
        return train(model), wholes(model)

    both(run)


@pytest.mark.parametrize("listed", [False, True])
def test_tied_weights(ranks: KeptRanks, listed: bool) -> None:
    ranks.run(2, _tied, listed)


def _left_alone(rank: int) -> None:
    model = make(tied=True)
    OURS.fully_shard([model.embedding, model.head], mesh=cpu_mesh())
    with pytest.raises(RuntimeError, match="module around both"):
        model(next(batches(1)))
    OURS.fully_shard(model, mesh=cpu_mesh())
    loss_of(model, next(batches(1))).backward()


def test_tied_weights_that_nothing_shards_are_refused(ranks: KeptRanks) -> None:
    ranks.run(2, _left_alone)


def _list(rank: int) -> None:
    def run(face: ModuleType) -> Any:
        model, mesh = make(), cpu_mesh()
        face.fully_shard(list(model.blocks), mesh=mesh)
        face.fully_shard([model.norm, model.head], mesh=mesh)
        face.fully_shard(model, mesh=mesh)
        return train(model), wholes(model)

    both(run)


def test_list_of_modules(ranks: KeptRanks) -> None:
    ranks.run(2, _list)


def _roots(rank: int) -> None:
    def run(face: ModuleType) -> Any:
        model, mesh = make(), cpu_mesh()
        ignored = set(model.norm.parameters()) | set(model.embedding.parameters()) | set(model.head.parameters())
        for block in model.blocks:
            face.fully_shard(block, mesh=mesh)
        trained = [parameter for parameter in model.parameters() if parameter not in ignored]
        optimizer, told = torch.optim.SGD(trained, lr=0.1), []
        for words in batches(3):
            loss = loss_of(model, words)
            loss.backward()
            optimizer.step()
            model.zero_grad()
            told.append(loss.item())
        return told, wholes(model)

    both(run)


def test_several_roots(ranks: KeptRanks) -> None:
    ranks.run(2, _roots)


def _checkpointed(rank: int) -> None:
    def run(face: ModuleType) -> Any:
        model = make()
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
        shard_all(face, model)
        return train(model), wholes(model)

    both(run)


def test_activation_checkpointing(ranks: KeptRanks) -> None:
    ranks.run(2, _checkpointed)


def _mixed(rank: int, policy: dict[str, Any], tolerance: float) -> None:
    def run(face: ModuleType) -> Any:
        seen: list[torch.dtype] = []
        model = make(dtype=torch.float32)
        model.blocks[0].up.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
        inner = {key: value for key, value in policy.items() if key != "output_dtype"}
        for block in model.blocks:
            face.fully_shard(block, mesh=cpu_mesh(), mp_policy=face.MixedPrecisionPolicy(**inner))
        face.fully_shard(model, mesh=cpu_mesh(), mp_policy=face.MixedPrecisionPolicy(**policy))
        told = train(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        seen.append(model(next(batches(1))).dtype)
        kinds.append(seen)
        return told, wholes(model)

    kinds: list[list[torch.dtype]] = []
    both(run, rtol=tolerance, atol=tolerance)
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [
        ({"param_dtype": torch.bfloat16}, 2e-2),
        ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "output_dtype": torch.float32}, 2e-3),
        ({"reduce_dtype": torch.bfloat16}, 2e-2),
    ],
)
def test_mixed_precision(ranks: KeptRanks, policy: dict[str, Any], tolerance: float) -> None:
    ranks.run(2, _mixed, policy, tolerance)


def _without_casts(rank: int) -> None:
    for face in FACES:
        layer = nn.Linear(4, 4)
        policy = face.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
        face.fully_shard(layer, mesh=cpu_mesh(), mp_policy=policy)
        with pytest.raises(RuntimeError, match="dtype"):
            layer(torch.randn(2, 4))


def test_inputs_that_are_not_cast(ranks: KeptRanks) -> None:
    ranks.run(2, _without_casts)


def _factor(rank: int, factor: float) -> None:
    def run(face: ModuleType) -> Any:
        model: Any = shard_all(face, make())
        for module in model.modules():
            if isinstance(module, face.FSDPModule):
                module.set_gradient_divide_factor(factor)
        told = train(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
        model.blocks[0].set_gradient_divide_factor(dist.get_world_size())
        loss_of(model, next(batches(1))).backward()
        loss_of(model, next(batches(1))).backward()
        grads = [parameter.grad for parameter in model.parameters()]
        # Rows of the same ranks, and so the same pieces.
        pieces = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
        return told, {**wholes(model), **{str(index): piece for index, piece in enumerate(pieces) if piece is not None}}

    both(run)


def test_gradient_divide_factor(ranks: KeptRanks) -> None:
    ranks.run(2, _factor, 5.0)


def _offloaded(rank: int) -> None:
    def run(face: ModuleType) -> Any:
        model = shard_all(face, make(), offload_policy=face.CPUOffloadPolicy(pin_memory=False))
        return train(model), wholes(model)

    both(run)


def test_cpu_offload(ranks: KeptRanks) -> None:
    ranks.run(2, _offloaded)


def _ignored(rank: int) -> None:
    def run(face: ModuleType) -> Any:
        model = make()
        ignored = {model.head.weight, *model.blocks[0].parameters()}
        shapes = [parameter.shape for parameter in ignored]
        shard_all(face, model, ignored_params=ignored)
        assert [parameter.shape for parameter in ignored] == shapes
        others = [parameter for parameter in model.parameters() if parameter not in ignored]
        for words in batches(2):
            loss_of(model, words).backward()
        told = [as_whole(parameter.grad).norm().item() for parameter in ignored if parameter.grad is not None]
        torch.optim.SGD(others, lr=0.1).step()
        return sorted(told), wholes(model)

    both(run)


def test_ignored_parameters(ranks: KeptRanks) -> None:
    ranks.run(2, _ignored)


class _TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 6).double(), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.narrow(self.wide(x).float())
        return out


def _two_dtypes(rank: int) -> None:
    torch.manual_seed(0)
    model, plain = _TwoDtypes(), _TwoDtypes()
    plain.load_state_dict(model.state_dict())
    OURS.fully_shard(model, mesh=cpu_mesh())
    x = torch.ones(1, 4, dtype=torch.float64)
    for each in (model, plain):
        each(x).sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    same(wholes(model), dict(plain.state_dict()))


def test_parameters_of_several_dtypes(ranks: KeptRanks) -> None:
    ranks.run(2, _two_dtypes)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.mine = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        out: torch.Tensor = self.used(x)
        return out + self.mine(x) if both else out


def _unused(rank: int) -> None:
    torch.manual_seed(0)
    model: Any = _Branches()
    OURS.fully_shard(model, mesh=cpu_mesh())
    model(torch.ones(2, 4), both=rank == 0).sum().backward()
    assert model.unused.weight.grad is None
    # Rank 1 did not use it, and rank 0's gradient of ones is halved all the same.
    same(model.mine.weight.grad, torch.ones(2, 4))


def test_parameters_without_gradients(ranks: KeptRanks) -> None:
    ranks.run(2, _unused)


def _scaled(rank: int) -> None:
    def run(face: ModuleType) -> Any:
        model = make(dtype=torch.float32)
        shard_all(face, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        told = []
        for number, words in enumerate(batches(3)):
            loss = loss_of(model, words)
            scaler.scale(loss).backward()
            if number == 1 and dist.get_rank() == 0:
                # An overflow that one rank alone sees.
                first = next(parameter for parameter in model.parameters() if parameter.grad is not None)
                grad: Any = first.grad
                (grad.to_local() if hasattr(grad, "to_local") else grad).fill_(float("inf"))
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            told.append(scaler.get_scale())
        return told, wholes(model)

    both(run, rtol=1e-5, atol=1e-6)


def test_gradient_scaler(ranks: KeptRanks) -> None:
    ranks.run(2, _scaled)


def _methods(rank: int) -> None:
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    expected = make().blocks[0].doubled(x)
    for face in FACES:
        model: Any = shard_all(face, make())
        face.register_fsdp_forward_method(model.blocks[0], "doubled")
        face.register_fsdp_forward_method(nn.Linear(1, 1), "nothing of ours")
        same(model.blocks[0].doubled(x), expected)
        with pytest.raises(ValueError, match="does not have a method"):
            face.register_fsdp_forward_method(model, "encode")


def test_forward_methods(ranks: KeptRanks) -> None:
    ranks.run(2, _methods)


def _unshards(rank: int, asynchronous: bool) -> None:
    model: Any = shard_all(OURS, make())
    plain = make()
    words = next(batches(1))
    for _ in range(2):
        block = model.blocks[0]
        handle = block.unshard(async_op=asynchronous)
        assert (handle is None) is not asynchronous
        if handle is not None:
            handle.wait()
        same(block.up.weight, plain.blocks[0].up.weight)
        assert model.blocks[1].up.weight.shape != plain.blocks[1].up.weight.shape
        same(model(words), plain(words))
        block.unshard()
        block.reshard()
        assert block.up.weight.shape == (25, 12) if rank == 0 else (24, 12)
        same(loss_of(model, words), loss_of(plain, words))
    # What a forward uses is what was gathered.
    block = model.blocks[0]
    before = model(words)
    block.unshard()
    pieces = [parameter for name, parameter in model.named_parameters() if name.startswith("blocks.0")]
    del pieces
    block.reshard()
    block.unshard(async_op=True)
    with torch.no_grad():
        block.up.weight.zero_()
    same(model(words), before)
    assert not torch.equal(model(words), before)
    train(model, 2)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_unshard_and_reshard(ranks: KeptRanks, asynchronous: bool) -> None:
    ranks.run(2, _unshards, asynchronous)


def _failed(rank: int) -> None:
    def run(face: ModuleType) -> Any:
        model: Any = shard_all(face, make())

        def fails(*_: object) -> None:
            raise ValueError("of the user")

        hook = model.blocks[1].down.register_forward_hook(fails)
        with pytest.raises(ValueError, match="of the user"):
            model(next(batches(1)))
        hook.remove()
        model.reset_iter_state()
        with contextlib.suppress(RuntimeError):
            model.blocks[0].reset_iter_state()
            raise AssertionError("an inner module has nothing to reset")
        return train(model), wholes(model)

    both(run)


@pytest.mark.skipif(not hasattr(FACES[0].FSDPModule, "reset_iter_state"), reason="torch 2.11 has no such method")
def test_recovery_from_an_exception(ranks: KeptRanks) -> None:
    ranks.run(2, _failed)


def _hints(rank: int) -> None:
    def run(face: ModuleType) -> Any:
        model: Any = shard_all(face, make())
        blocks = list(model.blocks)
        model.set_modules_to_forward_prefetch(blocks)
        blocks[1].set_modules_to_backward_prefetch([blocks[0]])
        model.set_reshard_after_forward(True)
        model.set_reshard_after_backward(True)
        blocks[0].set_force_sum_reduction_for_comms(True)
        model.embedding.set_unshard_in_backward(False)
        if hasattr(model, "set_reduce_scatter_unused_params"):
            model.set_reduce_scatter_unused_params(True)
        for wrong in (model.set_modules_to_forward_prefetch, model.set_modules_to_backward_prefetch):
            with pytest.raises(ValueError, match="Expects FSDPModule"):
                wrong([nn.Linear(1, 1)])
        with pytest.raises(ValueError, match="should be a bool"):
            model.set_reshard_after_forward(1)
        return train(model), wholes(model)

    both(run)


def test_hints_change_no_number(ranks: KeptRanks) -> None:
    ranks.run(2, _hints)


def _ours_alone(rank: int) -> None:
    model: Any = shard_all(OURS, make())
    words = next(batches(1))
    expected = model(words)
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_separate_reduce_scatter_group()
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_symm_mem_for_comm()
    model.set_reduce_scatter_divide_factor(dist.get_world_size())
    OURS.share_comm_ctx([model])
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"):
        with pytest.raises(NotImplementedError, match=f"{name}: what moves bytes is a plugin"):
            getattr(model, name)(None)
    with pytest.raises(TypeError, match="max_input_buffers must be an int"):
        model.set_reduce_scatter_max_input_buffers(True)
    with pytest.raises(ValueError, match="positive int"):
        model.set_reduce_scatter_max_input_buffers(0)
    with pytest.raises(ValueError, match="above 0"):
        model.set_gradient_divide_factor(0)
    with pytest.raises(ValueError, match="FSDPModules"):
        OURS.share_comm_ctx([nn.Linear(1, 1)])  # type: ignore[list-item]
    same(model(words), expected)


def test_what_the_engine_decides_and_what_is_refused(ranks: KeptRanks) -> None:
    ranks.run(2, _ours_alone)


def _one_rank_divides(rank: int) -> None:
    model: Any = shard_all(OURS, make())
    model.set_gradient_divide_factor(1.0)
    with pytest.raises(NotImplementedError, match="Divide the loss instead"):
        model.set_gradient_divide_factor(2.0)
    words = next(batches(1))
    loss_of(model, words).backward()
    plain = make()
    loss_of(plain, words).backward()
    same([each.grad for each in model.parameters()], [each.grad for each in plain.parameters()])


def test_one_rank_has_nothing_to_divide(ranks: KeptRanks) -> None:
    ranks.run(1, _one_rank_divides)


class _Event:
    """Stands for an event of a GPU, which this machine may not have."""

    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1


def _event(rank: int) -> None:
    model: Any = shard_all(OURS, make())
    event = _Event()
    model.set_post_optim_event(event)
    assert event.waited == 1
    train(model, 1)


def test_event_behind_the_optimizer(ranks: KeptRanks) -> None:
    ranks.run(1, _event)


def _compiled(rank: int) -> None:
    # Importing the compiler does this in some versions.
    warnings.filterwarnings("ignore", message="`torch.jit.script_method` is deprecated")
    # The compiler looks at .grad of the tensors that a frame takes in.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    model: Any = make()
    expected = [loss_of(model, words).item() for words in batches(2)]
    for block in model.blocks:
        block.compile(backend="eager")
    shard_all(OURS, model)
    same([loss_of(model, words).item() for words in batches(2)], expected)
    train(model, 1)


def test_compiled_blocks(ranks: KeptRanks) -> None:
    ranks.run(2, _compiled)


def _pieces(rank: int, releases: bool) -> None:
    model = shard_all(OURS, make(), reshard_after_forward=releases)
    optimizer = torch.optim.AdamW(model.parameters())
    # As torch cuts them: ranks of ceil(rows / ranks).
    shapes = [tuple(torch.chunk(each, 2)[rank].shape) for each in make().parameters() if each.shape[0] > 1]
    whole: list[bool] = []
    model.blocks[0].up.register_forward_hook(lambda up, args, out: whole.append(up.weight.shape == (49, 12)))
    for words in batches(2):
        for now in (None, loss_of(model, words)):
            assert [tuple(parameter.shape) for parameter in model.parameters()] == shapes
            if now is not None:
                now.backward()
                gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
                assert [tuple(gradient.shape) for gradient in gradients] == shapes
        optimizer.step()
        assert [tuple(optimizer.state[parameter]["exp_avg"].shape) for parameter in model.parameters()] == shapes
        optimizer.zero_grad()
    assert whole == [True, True]


@pytest.mark.parametrize("releases", [True, False])
def test_parameters_are_pieces_outside_of_forward(ranks: KeptRanks, releases: bool) -> None:
    ranks.run(2, _pieces, releases)
