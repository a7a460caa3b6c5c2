"""``polyshard plan`` and ``polyshard bench-links`` as they are typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from polyshard_tools.cli import main
from processes import run_script

MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)

    def forward(self, x):
        return x + self.up(x)[..., : x.shape[-1]]

class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(4))

    def forward(self, x, scale=1.0):
        for layer in self.layers:
            x = layer(x)
        return (x * scale).square().mean()

class Logits(Net):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

class Pair(Logits):
    def forward(self, x):
        x = super().forward(x)
        return x, x.square().mean()

class Loss(Pair):
    def forward(self, x):
        return super().forward(x)[1]

def batch(samples):
    return {"x": torch.ones(samples, 64), "scale": 2.0}

def fails(samples):
    raise RuntimeError("no data here")

def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

def fused(parameters):
    return torch.optim.AdamW(parameters, fused=True)
"""
RUN = """
[shard]
precision = "bf16"
policy = { name = "module_class", classes = ["plan_cli_net:Layer"] }
"""
#: 4 layers of 64 * 256.
NUMEL = 4 * 64 * 256


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model and a configuration."""
    (tmp_path / "plan_cli_net.py").write_text(MODEL)
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    # Modules of one name stay from test to test.
    monkeypatch.delitem(sys.modules, "plan_cli_net", raising=False)
    return tmp_path


def planned(*words: str) -> int:
    return main(["plan", "run.toml", "--model", "plan_cli_net:Net", *words])


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.usefixtures("folder")
def test_a_table_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned("--world-size", "4", "--batch", "float32[8,64]", "--device", "h200") == 0
    text = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert text.startswith(f"Net on 4 ranks: {NUMEL:,} parameters in 4 units, 0 elements of padding")
    # 4 and 8 bytes an element over 4 ranks.
    assert rows["parameters"] == ["0.06", "0.06"]
    assert rows["optimizer"] == ["0.12", "0.12"]
    # Gathered in bf16 for forward and backward, reduced in bf16: three quarters of each come from others.
    assert rows["all_gather"][0] == rows["reduce_scatter"][0] == "4"
    assert "ms a step on h200: forward" in text
    assert "It fits:" in text


@pytest.mark.usefixtures("folder")
def test_a_model_that_returns_logits_is_planned_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for name in ("Logits", "Pair", "Loss"):
        asked = ["plan", "run.toml", "--model", f"plan_cli_net:{name}", "--world-size", "4", "--batch", "float32[8,64]"]
        assert main([*asked, "--json"]) == 0
        found[name] = told(capsys)
        assert main([*asked, "--device-memory", "1 GiB"]) == 0
        shown = capsys.readouterr().out
        assert ("\nNote: The forward of Logits returned no loss, but a tensor of 2 dimensions" in shown) == (
            name == "Logits"
        )
    (note,) = found["Logits"]["notes"]
    assert note.endswith("memory and time, is beyond this plan. Plan a module whose forward returns the loss.")
    # The loss behind logits, as many models return them, is that of the model that returns it alone.
    assert found["Pair"]["notes"] == found["Loss"]["notes"] == []
    assert found["Pair"]["saved_nbytes"] == found["Loss"]["saved_nbytes"] > found["Logits"]["saved_nbytes"]


def test_units_over_dimensions_of_a_mesh(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.toml").write_text(RUN + 'shard = "dp"\n')
    assert planned("--mesh", "dp=4,tp=2", "--batch", "float32[8,64]") == 0
    text = capsys.readouterr().out
    assert text.startswith(
        f"Net on 8 ranks: {NUMEL:,} parameters in 4 units, 0 elements of padding\n\nover dp: layers.0"
    )
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    # Gathered and reduced among four ranks; what the other dimension does is the model's own.
    assert rows["all_gather"][:2] == rows["reduce_scatter"][:2] == ["dp", "4"]
    assert "Note: What the model itself sends along tp, activations or tokens, is not counted." in text
    # In KiB: of four units, 4 bytes an element over four ranks, as much for gradients, twice for states, bf16 gathered.
    assert rows["dp"] == ["-", "4", "64.00", "64.00", "128.00", "128.00"]
    assert planned("--world-size", "8") == 2
    assert "shard of [shard] in run.toml names 'dp', of which --world-size says no sizes" in capsys.readouterr().err


STAGE = """

class Stage(nn.Module):
    def __init__(self, number, stages, width=64):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.ends = number == stages - 1

    def forward(self, x, scale=1.0):
        for layer in self.layers:
            x = layer(x)
        return (x * scale).square().mean() if self.ends else x
"""


@pytest.mark.slow
def test_stages_of_a_pipeline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "plan_cli_net.py").write_text(MODEL + STAGE)
    asked = ["plan", "run.toml", "--model", "plan_cli_net:Stage", "--batch", "float32[8,64]", "--microbatches", "8"]
    assert main([*asked, "--world-size", "16", "--pp", "4", "--schedule", "1f1b"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("4 stages over 4 ranks, 1f1b, 8 microbatches: ranks wait 27.3% of a step")
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    # Stage 0 of rank 0 has as many microbatches in flight as there are stages.
    assert rows["0"][1:4] == ["0", "4", f"{NUMEL // 2:,}"]
    assert rows["1"][:6] == ["1", "to", "2", "1,", "...", "3"]
    assert rows["3"][1:3] == ["3", "1"]
    (folder / "run.toml").write_text(RUN + 'shard = "dp"\n')
    interleaved = ["--pp-stages", "2", "--schedule", "interleaved_1f1b", "--json", "--device-memory", "1 GiB"]
    assert main([*asked, "--mesh", "pp=2,dp=4,tp=2", *interleaved]) == 0
    found = told(capsys)
    assert (found["stages"], found["bubble"]) == (4, pytest.approx(1 / 17))
    assert [each["stages"] for each in found["ranks"]] == [[0, 2], [1, 3]]
    assert found["ranks"][0]["world_size"] == 16
    assert found["ranks"][1]["over"] == {"dp": [f"{stage}: layers.{layer}" for stage in (1, 3) for layer in (0, 1)]}
    assert {(row["over"], row["ranks"]) for row in found["ranks"][0]["traffic"]} == {("dp", 4), ("pp", 2)}
    assert min(each["largest_samples"] for each in found["ranks"]) > 1000
    for words, message in (
        (["--world-size", "16", "--pp", "4"], "--pp is of no use without --schedule"),
        (["--mesh", "dp=4,tp=2", "--pp", "4", "--schedule", "1f1b"], "first in --mesh"),
        (["--world-size", "6", "--pp", "4", "--schedule", "1f1b"], "--world-size 6 is no multiple of --pp 4"),
        (["--world-size", "32", "--pp", "16", "--schedule", "1f1b"], "'1f1b' needs as many microbatches as stages"),
    ):
        assert main([*asked, *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_what_does_not_fit_exits_with_three(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--world-size", "2", "--batch", "plan_cli_net:batch", "--json")
    assert planned(*words, "--batch-size", "4096") == 0
    peak = told(capsys)["peak_nbytes"]
    assert planned(*words, "--batch-size", "4096", "--device-memory", str(peak)) == 0
    found = told(capsys)
    assert (found["fits"], found["largest_samples"]) == (True, 4096)
    assert planned(*words, "--batch-size", "4097", "--device-memory", str(peak)) == 3
    found = told(capsys)
    assert (found["fits"], found["largest_samples"]) == (False, 4096)
    assert planned(*words, "--device-memory", "1 KiB") == 3
    assert told(capsys)["largest_samples"] == 0


@pytest.mark.usefixtures("folder")
def test_without_a_batch_only_what_stands_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned("--world-size", "2", "--json", "--device-memory", f"{16 * NUMEL // 2}") == 0
    found = told(capsys)
    assert found["peak_nbytes"] == 16 * NUMEL // 2
    assert (found["fits"], found["time"], found["samples"]) == (None, None, None)
    assert planned("--world-size", "2", "--device-memory", f"{16 * NUMEL // 2 - 1}") == 3
    assert "It does not fit" in capsys.readouterr().out
    assert planned("--world-size", "2", "--device-memory", "1 GiB") == 0
    printed = capsys.readouterr().out
    assert "Note: No batch, so no forward was run" in printed
    assert "Without activations it takes 512.00 KiB of 1.00 GiB." in printed


@pytest.mark.usefixtures("folder")
def test_optimizers_by_name_and_by_function(capsys: pytest.CaptureFixture[str]) -> None:
    states = {}
    for name in ("adamw", "none", "plan_cli_net:momentum"):
        assert planned("--world-size", "1", "--batch", "float32[8,64]", "--json", "--optimizer", name) == 0
        states[name] = told(capsys)["peak"]["optimizer"] / NUMEL
    assert states == {"adamw": 8, "none": 0, "plan_cli_net:momentum": 4}


@pytest.mark.slow
def test_a_picture_is_drawn(folder: Path) -> None:
    words = ("--world-size", "2", "--batch", "float32[8,64]")
    assert planned(*words, "--device", "h200", "--picture", "plan.svg") == 0
    assert "<svg" in (folder / "plan.svg").read_text()
    assert planned(*words, "--picture", "memory.png") == 0
    assert (folder / "memory.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--world-size", "0"), "world_size is 0"),
        (("--world-size", "2", "--device", "h20"), "No device is called 'h20'"),
        (("--world-size", "2", "--device-memory", "much"), "--device-memory must be bytes above 0"),
        (("--world-size", "2", "--optimizer", "adam"), "No optimizer is called 'adam'"),
        (("--world-size", "2", "--links", "h200-nvlink"), "--links is of no use without --device"),
        (("--world-size", "2", "--batch-size", "4"), "--batch-size is of no use without --batch"),
        (("--world-size", "2", "--microbatches", "4"), "--microbatches is of no use without --batch"),
        (("--world-size", "2", "--batch", "float32[8,64]", "--microbatches", "0"), "microbatches is 0"),
        (("--world-size", "2", "--batch", "8x64"), "'8x64' is no tensor of a batch"),
        (("--world-size", "2", "--batch", "float[8] int64[4]"), "first sizes, which count samples, are [4, 8]"),
        (("--world-size", "2", "--batch", "plan_cli_net:batches"), "has no batches. Did you mean 'batch'?"),
        (("--world-size", "2", "--batch", "absent_module:batch"), "importing absent_module raised ModuleNotFoundError"),
        (("--world-size", "2", "--batch", "plan_cli_net:fails"), "raised RuntimeError: no data here"),
        (("--world-size", "2", "--batch", "float32[8,7]"), "the forward of Net cannot run on the meta device"),
        (("--world-size", "2", "--batch", "float32[8,64]", "--batch-size", "0"), "samples is 0"),
        (
            ("--world-size", "2", "--batch", "float32[8,64]", "--optimizer", "plan_cli_net:fused"),
            "leave out fused=True",
        ),
        (("--world-size", "2", "--picture", "plan.svg"), "has no step to draw"),
        (("--world-size", "2", "--batch", "float32[8,64]", "--picture", "plan.xyz"), "cannot write the picture"),
        (
            ("--world-size", "16", "--batch", "float32[8,64]", "--device", "h200", "--links", "h200-nvlink"),
            "say nothing of all_gather among 2 hosts of 8 ranks",
        ),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_is_wrong_is_named(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(*words) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_bench_links_alone_says_how_to_start_it(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench-links"]) == 2
    assert "torchrun --standalone --nproc-per-node 2 -m polyshard bench-links" in capsys.readouterr().err
    assert main(["bench-links", "--sizes", "1 MiB"]) == 2
    assert "two sizes or more" in capsys.readouterr().err


@pytest.mark.nightly
def test_what_real_processes_measure_is_planned_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = folder / "time_links.py"
    script.write_text(
        "import sys\nfrom polyshard_tools.cli import main\nsys.exit(main(['bench-links', *sys.argv[1:]]))\n"
    )
    # So far apart that the larger takes longer on a busy machine, too, where either waits its turn for milliseconds.
    arguments = ["--sizes", "16 KiB,16 MiB", "--rounds", "5", "--device", "cpu", "--out", "links.json"]
    done = run_script(2, script, arguments)
    assert done.codes == [0, 0], done.errors
    # From rank 0 alone.
    assert done.output.count("reduce_scatter") == 1
    links = json.loads((folder / "links.json").read_text())
    assert {(each["operation"], each["ranks"]) for each in links["inside"]} == {
        ("all_gather", 2),
        ("reduce_scatter", 2),
    }
    assert all(each["latency_s"] >= 0 and each["bandwidth"] > 0 for each in links["inside"])
    words = ("--world-size", "2", "--batch", "float32[8,64]", "--device", "h200", "--json")
    assert planned(*words, "--links", "links.json") == 0
    assert told(capsys)["links"].startswith("measured: bench-links: 2 ranks, collectives 'auto', CPU")
    # What the clock said here is not known beforehand. Links by which everything takes a second are.
    for each in links["inside"]:
        each.update(latency_s=1.0, bandwidth=1e15)
    (folder / "links.json").write_text(json.dumps(links))
    assert planned(*words, "--links", "links.json") == 0
    slow = told(capsys)["time"]["device_s"]
    assert planned(*words) == 0
    assert slow > 1.0 > told(capsys)["time"]["device_s"]
