"""``--model``: what a command makes of a factory's name, and what it refuses."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from polyshard.errors import ConfigError
from polyshard_tools.cli.parser import add_model_options
from polyshard_tools.cli.shared import importing_beside, model_from, model_of
from torch import nn

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8, depth=2):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

built = nn.Linear(2, 2)

def chats():
    print("building")
    return Net()

def reads():
    layer = nn.Linear(4, 4)
    print(float(layer.weight.sum()))
    return layer

def ends():
    raise SystemExit(3)

def nothing():
    nn.Linear(2, 2)

def wants(config):
    return Net(config)

class Zoo:
    small = Net
"""


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "models_of_a_user.py").write_text(SOURCE)
    (tmp_path / "models_that_end.py").write_text("raise SystemExit('no weights')")
    monkeypatch.chdir(tmp_path)
    with importing_beside("run.toml"):
        yield
    sys.modules.pop("models_of_a_user", None)


@pytest.mark.parametrize(("reference", "elements"), [("Net", 2 * 72), ("Zoo.small", 2 * 72)])
def test_parameters_have_shapes_and_no_memory(reference: str, elements: int) -> None:
    model = model_from(f"models_of_a_user:{reference}")
    assert isinstance(model, nn.Module)
    assert sum(parameter.numel() for parameter in model.parameters()) == elements
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not torch.zeros(1).is_meta


def test_what_a_factory_prints_stays_out_of_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    model_of(argparse.Namespace(model="models_of_a_user:chats", model_args=None))
    assert capsys.readouterr() == ("", "building\n")


@pytest.mark.parametrize("text", ['{"width": 4, "depth": 3}', "[4, 3]"])
def test_arguments_are_json(text: str) -> None:
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    arguments = parser.parse_args(["--model", "models_of_a_user:Net", "--model-args", text])
    assert sum(parameter.numel() for parameter in model_of(arguments).parameters()) == 3 * (4 * 4 + 4)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("models_of_a_user", "--model 'models_of_a_user' names no function. Write it as package.module:name"),
        (":Net", "names no function"),
        ("a/models_of_a_user.py:Net", "names a file. Write its module: a.models_of_a_user:Net."),
        ("models_of_nobody:Net", "importing models_of_nobody raised ModuleNotFoundError.*looked for in /.*installed"),
        ("models_that_end:Net", "importing models_that_end raised SystemExit: no weights"),
        ("models_of_a_user:Nett", "models_of_a_user has no Nett. Did you mean 'Net'?"),
        ("models_of_a_user:Zoo.smal", r"models_of_a_user has no Zoo\.smal\. Did you mean 'small'\?"),
        ("models_of_a_user:built", "is a Linear that was built already"),
        ("models_of_a_user:__name__", "is of class str, which cannot be called"),
        ("models_of_a_user:reads", "'models_of_a_user:reads' raised .*meta.*called on the meta device"),
        ("models_of_a_user:ends", "raised SystemExit: 3"),
        ("models_of_a_user:nothing", "returned None. Name the model's class"),
        ("models_of_a_user:wants", "cannot be called with no arguments: missing .*'config'.*--model-args"),
    ],
)
def test_what_makes_no_model_is_refused_by_name(reference: str, words: str) -> None:
    before = list(sys.path)
    with pytest.raises(ConfigError, match=words):
        model_from(reference)
    assert sys.path == before
    # The next one works, and is not on the meta device by accident of the failure.
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("width=4", "is not JSON"),
        ("4", "neither an object nor a list"),
        ('{"breadth": 4}', """cannot be called with {"breadth": 4}: got an unexpected keyword argument 'breadth'"""),
    ],
)
def test_wrong_arguments_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model_of(argparse.Namespace(model="models_of_a_user:Net", model_args=text))
