"""The page's table of padding is what the layouts leave now, and what a sharded model reports."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import polyshard
import pytest
import torch
from polyshard.interfaces import PluginContext
from polyshard_backends.fake import FakeCollectives

ROOT = Path(__file__).parents[2]


@pytest.fixture
def padding(benchmarks: Path) -> ModuleType:
    import padding

    return padding


@pytest.mark.slow
def test_the_page_has_the_table_of_this_code(padding: ModuleType) -> None:
    page = (ROOT / "docs" / "figures-parts.md").read_text(encoding="utf-8")
    assert f"{padding.BEGIN}\n\n{padding.table()}\n\n{padding.END}" in page


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["rows", "blocks"])
def test_padding_is_a_few_per_cent(padding: ModuleType, layout: str) -> None:
    for name in padding.NAMES:
        for ranks in padding.RANKS:
            spare, total, _ = padding.padding(padding.LAYOUTS[layout], name, ranks)
            # 2.5 rows of 256 a rank: see the page.
            most = 0.06 if ranks > 64 else 0.02
            assert 0 <= spare <= (0.2 if (name, ranks) == ("host", 1024) else most) * total, (name, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["flat", "rows", "blocks"])
def test_a_sharded_model_reports_it(padding: ModuleType, layout: str) -> None:
    from workloads import WORKLOADS, Block, LanguageModel

    with torch.device("meta"):
        model = LanguageModel(WORKLOADS["host"])
    config = polyshard.ShardConfig(
        collectives=FakeCollectives(PluginContext("fake", torch.device("cpu")), 5, 64),
        policy={"name": "module_class", "classes": [Block, type(model.tail), type(model.embedding)]},
        precision="bf16",
        layout=layout,
        device="cpu",
    )
    polyshard.shard(model, config)
    report = polyshard.report(model)
    spare, total, _ = padding.padding(padding.LAYOUTS[layout], "host", 64)
    assert (report.padding, report.parameters) == (spare, total)
