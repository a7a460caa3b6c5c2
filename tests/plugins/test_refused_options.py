"""Options of built-in plugins that say nothing right: refused by name, and the model stays whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from polyshard.errors import ConfigError
from torch import nn

#: Name of the plugin, its options, and words of the error. A folder that is not given is there.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("trace", {"steps": "last"}, r"'last' says nothing, in steps of listener 'trace'\. Write 'first', 'every'"),
    ("trace", {"steps": []}, r"steps of listener 'trace' is empty.*leave the listener out"),
    ("trace", {"steps": [3, 0]}, r"0 is no whole number of at least 1, in steps of listener 'trace'"),
    ("trace", {"steps": True}, r"True is no whole number of at least 1, in steps"),
    ("trace", {"steps": [2.5]}, r"2\.5 is no whole number"),
    ("trace", {"steps": None}, r"None says nothing, in steps"),
    ("trace", {"ranks": "every"}, r"'every' says nothing, in ranks of listener 'trace'\. Write 'all'"),
    ("trace", {"ranks": [-1]}, r"-1 is no whole number of at least 0, in ranks"),
    ("trace", {"rank": "0"}, r"takes int \| None for rank, not '0'"),
    ("trace", {"picture": "jpg"}, r"'jpg' is no kind of picture, in picture of listener 'trace'.*'png', 'svg', 'none'"),
    ("trace", {"folder": 7}, r"7 is no folder, in folder of listener 'trace'"),
    ("trace", {"folder": ""}, r"'' is no folder"),
    ("trace", {"folder": __file__}, r"folder of listener 'trace' is .*test_refused_options\.py', which is a file"),
    ("trace", {"step": 3}, r"does not take the option 'step'.*Did you mean 'steps'"),
    ("int8", {"block": 100}, r"100 is no size of a block, in block of precision 'int8'\. Give a power of two from 16"),
    ("int8", {"block": 8}, "8 is no whole number of at least 16, in block"),
    ("int8", {"block": 2048}, "2048 is no size of a block"),
    ("int8", {"block": "128"}, r"plugin 'int8' of .* takes int for block, not '128'"),
    ("int8", {"block": True}, "takes int for block, not True"),
    ("int8", {"min_numel": -1}, "-1 is no whole number of at least 0, in min_numel"),
    ("int8", {"min_numel": 0.5}, r"takes int for min_numel, not 0\.5"),
    ("int8", {"compute": "bf17"}, r"'bf17', in compute of precision 'int8'\. Did you mean 'bf16'"),
    ("int8", {"compute": "int8"}, "no dtype has the name 'int8', in compute"),
    ("int8", {"reduce": "bf16", "communication": "fp32"}, "cannot hold gradients that travel in torch.float32"),
    ("int8", {"cast_inputs": "yes"}, "takes bool for cast_inputs, not 'yes'"),
    ("int8", {"leave_alone": "LayerNorm"}, "'LayerNorm' does not name an object, in leave_alone"),
    ("int8", {"blok": 64}, "Did you mean 'block'"),
    ("fp8_linear", {"weight_gradient": "fp16"}, "weight_gradient of precision 'fp8_linear' must be 'compute' or 'fp8'"),
    ("fp8_linear", {"leave_out": (3,)}, "leave_out of precision 'fp8_linear' must be patterns"),
    ("fp8_linear", {"fast_gradients": "yes"}, "takes bool for fast_gradients, not 'yes'"),
    ("fp8_linear", {"compute": "fp9"}, "no dtype has the name 'fp9', in compute"),
    ("mixed", {"param": "bfloat61"}, r"'bfloat61', in param of precision 'mixed'. Did you mean 'bfloat16'"),
    ("mixed", {"param": torch.int8}, r"torch.int8 is not a dtype to compute or reduce in, in param"),
    ("mixed", {"param": 16}, r"a int is not a dtype, in param"),
    (
        "mixed",
        {"reduce": "bf16", "communication": "fp32"},
        r"torch.bfloat16 cannot hold gradients that travel in torch.float32",
    ),
    ("mixed", {"cast_inputs": "false"}, "takes bool for cast_inputs, not 'false'"),
    ("mixed", {"leave_alone": "torch.nn:LayerNrom"}, r"no 'LayerNrom'.*Did you mean 'LayerNorm'"),
    ("mixed", {"leave_alone": 3}, r"3 is a int and not a class"),
    ("mixed", {"overrides": {"a": {"parm": "fp32"}}}, r"'parm', in overrides\['a'\].*Did you mean 'param'"),
    ("mixed", {"overrides": {"a": "fp32"}}, r"overrides\['a'\] of precision 'mixed' is a str"),
    ("mixed", {"overrides": {"a": {"reduce": "fp16", "communication": "fp32"}}}, r"in overrides\['a'\]"),
    ("mixed", {"overrides": {3: {}}}, r"3 is a int and not a class, in overrides\[3\]"),
    ("mixed", {"overrides": ["a"]}, r"Give a table of tables"),
    ("compressed", {"number": "int4"}, "number of collectives 'compressed' must be 'int8' or 'fp8', not 'int4'"),
    ("compressed", {"block": 100}, "multiple of 16 elements, not 100"),
    ("compressed", {"block": 0}, "0 is no whole number of at least 16, in block of collectives 'compressed'"),
    ("compressed", {"block": 64.0}, r"takes int for block, not 64\.0"),
    ("compressed", {"min_numel": -1}, "-1 is no whole number of at least 0, in min_numel"),
    ("compressed", {"slices": "no"}, "takes bool for slices, not 'no'"),
    ("compressed", {"slices": False, "replicas": False}, "neither slices nor replicas"),
    ("finite", {"action": "stop"}, r"is no action, in action of listener 'finite'\. Write 'raise' or 'warn'"),
    ("cpu", {"pin_memory": "no"}, "takes bool for pin_memory, not 'no'"),
]
#: The setting that names it, where that is not the precision.
SETTINGS = {"trace": "listeners", "finite": "listeners", "compressed": "collectives", "cpu": "offload"}


@pytest.mark.parametrize(("name", "options", "words"), REFUSED, ids=str)
def test_a_wrong_option_is_refused_by_name(name: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    pretended = {"name": "fake", "world_size": 2}
    given = {"trace": {"folder": str(tmp_path)}, "compressed": {"inner": pretended}}.get(name, {})
    setting, choice = SETTINGS.get(name, "precision"), {"name": name, **given, **options}
    chosen: dict[str, Any] = {"collectives": pretended, setting: [choice] if setting == "listeners" else choice}
    model = nn.Linear(8, 8)
    with pytest.raises(ConfigError, match=words):
        polyshard.shard(model, polyshard.ShardConfig(**chosen))
    polyshard.shard(model, polyshard.ShardConfig(collectives=pretended))
    assert model(torch.ones(2, 8)).shape == (2, 8)
