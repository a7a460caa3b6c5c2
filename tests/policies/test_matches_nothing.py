"""A policy that names what the model does not have, and a file that does, are found out."""

from __future__ import annotations

import warnings
from typing import Any

import polyshard
import pytest
import torch
from polyshard import ShardConfig, errors
from refusal import Tower, refused, silent
from torch import nn

BLOCKS = """
import torch

class Block(torch.nn.Linear):
    pass

class Decoder(torch.nn.Linear):
    pass

def shape_of(module):
    return False
"""


class Attention(nn.Linear):
    """A module of the model's own."""


class Atention(nn.Linear):
    """One that is nowhere."""


class Elsewhere:
    """Where another class of the same name is."""

    class Attention(nn.Linear):
        """The other one."""


def tower() -> nn.Module:
    torch.manual_seed(0)
    return Tower(Attention(4, 4))


@pytest.mark.parametrize("option", ["transformer", "module_class"])
@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (
            [nn.TransformerEncoderLayer],
            ("torch.nn.modules.transformer:TransformerEncoderLayer", "Name a class that it has: Attention, Tower."),
        ),
        ([Atention], (":Atention", "Did you mean", ":Attention?")),
        ([Elsewhere.Attention], (":Elsewhere.Attention", "Its Attention is another class", "name that")),
        ([nn.Linear, Elsewhere.Attention], (":Elsewhere.Attention", "Its Attention is another class")),
        ("torch.nn:LSTM", ("torch.nn.modules.rnn:LSTM",)),
    ],
    ids=["far", "near", "the same name", "the same name beside another", "in text"],
)
def test_a_class_of_which_the_model_has_no_module(option: str, classes: Any, words: tuple[str, ...]) -> None:
    key = {"transformer": "layers", "module_class": "classes"}[option]
    config = silent(policy={"name": option, key: classes})
    words = ("Tower has no module of the class", f"{key} of policy {option!r}", *words)
    refused(tower(), config, errors.ConfigError, *words, twin=tower())


def test_inside_or_as_well() -> None:
    config = silent(policy={"name": "or", "policies": [[nn.LSTM], Attention]})
    refused(tower(), config, errors.ConfigError, "Tower has no module of the class", "LSTM", twin=tower())


def units(model: nn.Module, **settings: Any) -> int:
    config = ShardConfig(collectives={"name": "fake", "world_size": 4}, split_root=False, **settings)
    return polyshard.report(polyshard.shard(model, config)).units


def test_the_root_and_what_is_ignored_are_there() -> None:
    assert units(Attention(4, 4), policy={"name": "transformer", "layers": Attention}) == 1
    model = tower()
    config = ShardConfig(
        collectives={"name": "fake", "world_size": 4}, policy={"name": "module_class", "classes": [Attention]}
    )
    polyshard.shard(model, config, ignored_modules=[model.inner])
    assert polyshard.report(model).units == 1


def test_a_list_may_have_more_than_one_model_has() -> None:
    assert units(tower(), policy={"name": "transformer", "layers": [Attention, nn.LSTM]}) == 2


def test_a_base_class_is_matched_by_what_derives_from_it() -> None:
    assert units(Tower(Attention(4, 4)), policy={"name": "module_class", "classes": [nn.Linear]}) == 3


@pytest.mark.parametrize("policy", [lambda module: False, {"name": "lambda", "fn": lambda module: False}])
def test_a_function_that_chooses_nothing_is_warned_of(policy: Any) -> None:
    with pytest.warns(UserWarning, match="chose no module inside this Tower, so that the whole model is one unit"):
        assert units(Tower(), policy=policy) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert units(Tower(), policy=lambda module: isinstance(module, nn.Linear)) == 3


@pytest.mark.parametrize(("action", "times"), [("default", 1), ("always", 3)])
def test_one_text_is_said_once_a_process_by_rank_0_unless_a_filter_wants_it_always(action: Any, times: int) -> None:
    class Once(Tower):
        """Of a name that no other test has."""

    Once.__name__ += action
    # As many functions and policies: the same is wrong with each of them.
    nothing = [lambda module: False, lambda module: not module, lambda module: module is None]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore")
        units(Once(), policy=lambda module: False)
        warnings.simplefilter(action)
        for each in nothing:
            assert units(Once(), policy=each) == 1
        for rank in (1, 2):
            config = ShardConfig(
                collectives={"name": "fake", "world_size": 4, "rank": rank}, policy=lambda module: False
            )
            polyshard.shard(Once(), config)
    assert [each.filename for each in told] == [__file__] * times
