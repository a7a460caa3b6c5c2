"""The plugin that the README shows, held to the contract that `polyshard new` tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from polyshard.interfaces import WrapPolicy
from polyshard_testing import PolicySuite, plugin_context

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


class TestWideLinear(PolicySuite):
    def make(self) -> WrapPolicy:
        (shown,) = [
            text for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class WideLinear" in text
        ]
        names: dict[str, Any] = {"__name__": "shown"}
        exec(shown, names)
        made: WrapPolicy = names["WideLinear"](plugin_context())
        return made
