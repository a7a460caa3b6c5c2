"""Directories that plain torch wrote, read by sharded models; what is of another model is refused by name."""

from __future__ import annotations

import copyreg
import enum
import io
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from parity import on_ranks
from plain_states import State, adamw, differing, made, odd, plain_state, state_of, train
from polyshard import checkpoint
from polyshard import state as states
from polyshard.checkpoint import DcpKeys, archive
from polyshard.errors import CheckpointDamagedError, ConfigError, RankMismatchError, StateError
from polyshard_backends.threaded import ThreadedWorld
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.utils.serialization import config

FULL = states.StateOptions(form="full")


def write(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        # That one process saves is what no_dist asks for.
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def flattened() -> State:
    model = odd()
    optimizer = adamw(model)
    train(model, optimizer, 2)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "keys"),
    [
        (lambda plain: plain, None),
        (lambda plain: flattened(), None),
        (lambda plain: {"m": plain["model"], "optim": plain["optimizer"]}, DcpKeys("m", "optim")),
        (lambda plain: {"app": plain, "step": 7}, DcpKeys(("app", "model"), ("app", "optimizer"))),
        (lambda plain: {**plain["model"], "optimizer": plain["optimizer"]}, DcpKeys(model=())),
    ],
    ids=["as torch", "flattened", "other keys", "nested", "no key"],
)
def test_what_plain_torch_wrote_is_read(shape: Any, keys: DcpKeys | None, tmp_path: Path) -> None:
    plain = plain_state()
    folder = write(tmp_path, shape(plain))

    def body(rank: int, world: ThreadedWorld) -> State:
        model, optimizer = made(rank, world, seed=1)
        checkpoint.load_dcp(folder, model, optimizer, keys=keys)
        found = state_of(model, optimizer)
        train(model, optimizer, 1)
        return found

    for found in on_ranks(3, body):
        assert not differing(plain, found)


class Others(pickle.Pickler):
    """Pickles as Python 3.11.2 does members of enums, and torch 2.15 what is known of tensors."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, enum.Enum):
            return getattr, (type(obj), obj.name)
        if isinstance(obj, TensorProperties):
            return copyreg.__newobj__, (TensorProperties,), (*obj.__getstate__()[:5], (1,))  # type: ignore[attr-defined]
        return NotImplemented


@pytest.mark.slow
def test_what_other_versions_of_python_and_torch_put_into_metadata_is_read(tmp_path: Path) -> None:
    plain = plain_state()
    path = write(tmp_path, plain) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    with path.open("wb") as file:
        Others(file, protocol=2).dump(metadata)
    # Python 3.13.0 has paths there.
    path.write_bytes(path.read_bytes().replace(b"cpathlib\n", b"cpathlib._local\n"))

    def body(rank: int, world: ThreadedWorld) -> None:
        model, optimizer = made(rank, world, seed=1)
        checkpoint.load_dcp(tmp_path, model, optimizer)
        assert not differing(plain, state_of(model, optimizer))

    on_ranks(2, body)


@pytest.mark.slow
def test_what_is_of_another_model_is_refused_at_once(tmp_path: Path) -> None:
    plain = plain_state()
    other = dict(plain["model"])
    del other["norm.bias"]
    other.update({"parts.1.gate": torch.zeros(3, 5, 8), "other": torch.zeros(2), "scale": torch.zeros(1).double()})
    raw = torch.optim.AdamW(odd().parameters())
    train(odd(), raw, 0)
    for parameter in raw.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    raw.step()
    write(tmp_path / "model", {"model": other, "optimizer": plain["optimizer"]})
    write(tmp_path / "raw", {"model": plain["model"], "optimizer": raw.state_dict()})
    write(tmp_path / "alone", {"model": plain["model"], "optim": plain["optimizer"]})
    one_group = {**flattened(), "model": plain["model"]}
    name = next(key for key in one_group["optimizer"] if key.endswith(".weight_decay") and "gate" in key)
    one_group["optimizer"][name] = 0.7
    write(tmp_path / "groups", one_group)
    (tmp_path / "empty").mkdir()
    cases = [
        (
            "model",
            None,
            ConfigError,
            (r"has no 'norm\.bias'", "has 'other', which the model lacks", r"\(3, 5, 8\)", "float64"),
        ),
        ("raw", None, ConfigError, (r"by numbers .*get_optimizer_state_dict",)),
        ("alone", None, ConfigError, (r"has no optimizer at 'optimizer'; at the top it has 'model', 'optim'",)),
        ("alone", DcpKeys("net", "optim"), ConfigError, (r"has no model at 'net'",)),
        ("groups", None, ConfigError, (r"0\.7.*one group",)),
        ("empty", None, StateError, (r"no file '\.metadata'",)),
    ]

    def body(rank: int, world: ThreadedWorld) -> None:
        model, optimizer = made(rank, world, seed=1)
        before = states.get_model_state_dict(model, FULL)
        for folder, keys, error, words in cases:
            with pytest.raises(error) as caught:
                checkpoint.load_dcp(tmp_path / folder, model, optimizer, keys=keys)
            for word in words:
                caught.match(f"(?s){word}")
        with pytest.raises(RankMismatchError, match="different checkpoints"):
            checkpoint.load_dcp(tmp_path / ("alone", "raw")[rank], model)
        with pytest.raises(StateError, match="is no complete checkpoint"):
            checkpoint.load(tmp_path / "alone", model)
        assert not differing(before, states.get_model_state_dict(model, FULL))
        assert not optimizer.state
        checkpoint.load_dcp(tmp_path / "alone", model, optimizer, keys=DcpKeys(optimizer="optim"))
        train(model, optimizer, 1)

    on_ranks(2, body)


@pytest.mark.slow
def test_where_one_rank_finds_damage_no_rank_has_changed_anything(tmp_path: Path) -> None:
    plain = plain_state()
    folders = [write(tmp_path / "whole", plain), Path(shutil.copytree(tmp_path / "whole", tmp_path / "cut"))]
    data = tmp_path / "cut" / "__0_0.distcp"
    os.truncate(data, data.stat().st_size // 2)

    def body(rank: int, world: ThreadedWorld) -> None:
        model, optimizer = made(rank, world, seed=1)
        before = states.get_model_state_dict(model, FULL)
        with pytest.raises(CheckpointDamagedError, match=r"cut is damaged: '__0_0\.distcp' has no .* the file has"):
            checkpoint.load_dcp(folders[rank], model, optimizer)
        assert not differing(before, states.get_model_state_dict(model, FULL))
        assert not optimizer.state
        checkpoint.load_dcp(folders[0], model, optimizer)
        assert not differing(plain, state_of(model, optimizer))

    on_ranks(2, body)


@pytest.mark.parametrize("alignment", [16, 4096])
def test_torch_loads_a_tensors_archive_whatever_a_program_sets_for_its_own_files(alignment: int) -> None:
    value = torch.arange(35, dtype=torch.float32).view(5, 7)
    with config.patch({"save.storage_alignment": alignment}):
        head, tail = archive.around.__wrapped__(value.dtype, tuple(value.shape))
    assert len(head) % 64 == 0
    assert len(head + tail) < 2048
    assert torch.equal(torch.load(io.BytesIO(head + value.numpy().tobytes() + tail)), value)
