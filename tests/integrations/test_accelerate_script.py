"""A script of Accelerate's kind, and the same with three changed lines: what both print, lose, save and resume."""

from __future__ import annotations

import difflib
import importlib
import json
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate_ranks import forget
from processes import KeptRanks
from safetensors.torch import load_file
from torchrun import launched

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate"
PLAIN, SHARDED = "paraphrase", "paraphrase_sharded"
#: 20 steps in two epochs.
SHORT = ["--cpu", "--examples", "160", "--epochs", "2"]

RANKS = KeptRanks()


def test_the_scripts_differ_in_three_lines() -> None:
    plain, sharded = ((EXAMPLE / f"{name}.py").read_text(encoding="utf-8").splitlines() for name in (PLAIN, SHARDED))
    changes = list(difflib.unified_diff(plain, sharded, n=0, lineterm=""))[2:]
    assert len([line for line in changes if line.startswith("+")]) <= 3
    assert len([line for line in changes if line.startswith("-")]) == 1
    words = re.findall(r"\w+", " ".join(line for line in changes if line[0] in "+-"))
    assert {"polyshard", "ShardConfig", "Accelerator"} <= set(words)


def run_main(name: str, arguments: list[str], folder: Path) -> None:
    """Run the script's ``main`` here."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning, module="transformers")
            importlib.import_module(name).main([*SHORT, *arguments, "--output_dir", str(folder)])
    finally:
        sys.path.remove(str(EXAMPLE))


def losses_in(folder: Path) -> list[float]:
    """What the main process wrote; for others once they have met it."""
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


def train_unsharded(rank: int, arguments: list[str], folder: Path) -> list[float] | None:
    size = dist.get_world_size()
    # A group would be ended with the script, and this one is of ranks that are kept.
    dist.destroy_process_group()
    if rank == 0:
        run_main(PLAIN, arguments, folder)
    forget()
    join(rank, size, folder)
    return losses_in(folder) if rank == 0 else None


def train_sharded(rank: int, arguments: list[str], folder: Path) -> list[float]:
    size = dist.get_world_size()
    with launched(rank, size):
        run_main(SHARDED, arguments, folder)
    forget()
    assert not dist.is_initialized()
    join(rank, size, folder)
    return losses_in(folder)


def join(rank: int, size: int, folder: Path) -> None:
    """Make a group of these ranks again."""
    folder.mkdir(exist_ok=True)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "within"),
    [
        (["--gradient_accumulation_steps", "3"], 1e-5),
        # Autocast computes some things in fp32 that polyshard computes in bf16, and the other way round.
        pytest.param(["--mixed_precision", "bf16"], 2.0**-6, marks=pytest.mark.nightly),
    ],
    ids=["accumulation", "bf16"],
)
def test_twenty_losses_are_those_of_the_plain_script(tmp_path: Path, arguments: list[str], within: float) -> None:
    expected = RANKS.run(2, train_unsharded, arguments, tmp_path / "plain")[0]
    found, _ = RANKS.run(2, train_sharded, arguments, tmp_path / "sharded")
    assert expected is not None
    assert len(found) == len(expected) == 20
    assert found == pytest.approx(expected, rel=within)
    plain, sharded = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("plain", "sharded"))
    torch.testing.assert_close(sharded, plain, rtol=0.0, atol=1e-3 if "bf16" not in arguments else 5e-2)
