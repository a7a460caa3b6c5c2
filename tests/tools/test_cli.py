from __future__ import annotations

import importlib.metadata
import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

import polyshard
import pytest
from fake_distribution import install
from polyshard.interfaces import bytes_of
from polyshard.pipelining import Gathers
from polyshard_tools import forecast, scaffold
from polyshard_tools.cli import main, parser
from polyshard_tools.doctor import trial
from polyshard_tools.forecast import bench

POLICY_SOURCE = """
from polyshard.interfaces import WrapPolicy

class Blocks(WrapPolicy):
    api_version = 1

    def __init__(self, context):
        pass

    def plan(self, root, context):
        return {}
"""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with one policy that works and one listener that does not."""
    site = tmp_path / "site"
    install(
        site,
        "acme-cli",
        "4.2",
        [("polyshard.policies", "acme_blocks", "acme_cli:Blocks"), ("polyshard.plugins", "acme_bad", "acme_cli_bad:x")],
        {"acme_cli": POLICY_SOURCE, "acme_cli_bad": "import a_library_that_is_absent"},
    )
    monkeypatch.syspath_prepend(site)


@pytest.mark.usefixtures("acme")
def test_plugins_are_listed_with_origin_and_state(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["group", "name", "distribution", "version", "value", "state"]
    assert ["polyshard.policies", "acme_blocks", "acme-cli", "4.2", "acme_cli:Blocks", "ready"] in lines
    assert ["polyshard.plugins", "acme_bad", "acme-cli", "4.2", "acme_cli_bad:x", "broken"] in lines
    groups = {line[0] for line in lines if len(line) == 6 and line[0].startswith("polyshard.")}
    assert groups >= {"polyshard.collectives", "polyshard.precision", "polyshard.offload", "polyshard.policies"}


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize("group", ["plugins", "polyshard.plugins"])
def test_one_group_as_json(capsys: pytest.CaptureFixture[str], group: str) -> None:
    assert main(["plugins", "list", "--json", group]) == 0
    records = json.loads(capsys.readouterr().out)
    assert {record["group"] for record in records} == {"polyshard.plugins"}
    (bad,) = [record for record in records if record["name"] == "acme_bad"]
    assert (bad["state"], bad["distribution"], bad["version"]) == ("broken", "acme-cli", "4.2")
    assert "a_library_that_is_absent" in bad["error"]


@pytest.mark.usefixtures("acme")
def test_config_shows_settings_and_where_plugins_come_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[shard]\npolicy = "acme_blocks"\ncollectives = {name = "fake", world_size = 4}\n')
    monkeypatch.setenv("POLYSHARD_COLLECTIVES__WORLD_SIZE", "1024")
    assert main(["config", str(file)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    version = importlib.metadata.version("polyshard")
    assert f"policy acme_blocks [shard] of {file} acme_cli:Blocks (acme-cli 4.2)" in lines
    assert (
        f"collectives fake (world_size=1024) [shard] of {file}; world_size: POLYSHARD_COLLECTIVES__WORLD_SIZE "
        f"polyshard_backends.fake:FakeCollectives (polyshard {version})"
    ) in lines
    assert "strategy full_shard default" in lines
    assert main(["config", str(file), "--json"]) == 0
    rows = {row["setting"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["collectives"] == {
        "setting": "collectives",
        "value": {"name": "fake", "world_size": 1024},
        "set by": f"[shard] of {file}; world_size: POLYSHARD_COLLECTIVES__WORLD_SIZE",
        "found in": f"polyshard_backends.fake:FakeCollectives (polyshard {version})",
    }
    assert rows["strategy"] == {"setting": "strategy", "value": "full_shard", "set by": "default", "found in": ""}
    assert [rows[name]["value"] for name in ("mesh", "listeners", "timeout_s")] == [None, [], 600.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[shard]\nstrateg = "no_shard"\n', "unknown setting 'strateg'. Did you mean 'strategy'?"),
        ('[shard]\ncollectives = "fakee"\n', "no installed plugin of polyshard.collectives is named 'fakee'"),
        (
            '[shard]\ncollectives = { name = "fake", world_size = 0 }\n',
            "give a world_size of at least 1",
        ),
        ("[shard]\ntimeout_s = 1e26\n", "timeout_s must be a finite number of seconds above 0"),
    ],
)
def test_a_wrong_config_exits_with_two(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert main(["config", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err


@pytest.mark.slow
def test_the_module_runs_as_a_command_for_which_a_reader_that_has_enough_is_no_error() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "polyshard", "plugins"]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        # A required option that was misspelt is not told of as missing.
        (
            ["plan", "run.toml", "--modle", "net:Net", "--world-size", "2"],
            "polyshard plan: unrecognized arguments: --modle. Did you mean '--model'?",
        ),
        (["plan", "run.toml", "--batch=x"], "polyshard plan: the following arguments are required: --model."),
        (
            ["config", "run.toml", "--tabel", "train"],
            "polyshard config: unrecognized arguments: --tabel. Did you mean '--table'?",
        ),
        (["config", "run.toml", "two.toml"], "polyshard config: unrecognized arguments: two.toml."),
        (["explian"], "'trace', 'new'). Did you mean 'explain'? See polyshard --help."),
        (
            ["plugins", "lsit"],
            "polyshard plugins: argument verb: invalid choice: 'lsit' (choose from 'list', 'check').",
        ),
        (["plugins", "chek", "x"], "Did you mean 'check'?"),
        (["new", "polcy", "x"], "Did you mean 'policy'?"),
        (["--versoin"], "polyshard: unrecognized arguments: --versoin. Did you mean '--version'?"),
        ([], "polyshard: the following arguments are required: command."),
        (["explain", "run.toml", "--model", "a:B", "--world-size", "two"], "--world-size: invalid int value: 'two'."),
    ],
)
def test_wrong_arguments_are_told_of_in_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert line in captured.err
    assert captured.err.count("\n") == 1


def test_an_error_is_a_document_too_where_one_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["config", str(tmp_path / "run.toml"), "--json"]) == 2
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert error["type"] == "ConfigError"
    assert captured.err == f"polyshard: {error['message']}\n"


@pytest.mark.parametrize(
    ("settings", "shows"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_a_terminal_gets_colour_unless_it_asks_for_none(
    settings: dict[str, str], shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    reads, writes = pty.openpty()
    with open(writes, "w") as terminal, redirect_stderr(terminal):
        assert main(["plugins", "list", "nothing"]) == 2
    written = os.read(reads, 1000).decode()
    os.close(reads)
    assert "no plugin group is named 'nothing'" in written
    assert written.startswith("\x1b[31mpolyshard:\x1b[0m " if shows else "polyshard: ")


#: One for each command, and for those of the commands that have some.
HELP = (
    *(["--version"], ["--help"], ["plugins", "--help"], ["plugins", "list", "--help"], ["plugins", "check", "--help"]),
    *([command, "--help"] for command in ("config", "explain", "plan", "bench-links", "doctor", "trace", "new")),
)


def test_help_and_the_version_wait_for_no_import_of_torch() -> None:
    code = (
        "import json, sys\nfrom polyshard_tools.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    try: main(words)\n    except SystemExit as ended: assert not ended.code\n"
        "print(sorted(set(sys.modules) & {'torch', 'numpy', 'stevedore', 'pluggy', 'polyshard.config'}))"
    )
    command = [sys.executable, "-c", code, json.dumps(HELP)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("\n[]\n")
    version, _, told = done.stdout.partition("\n")
    assert version == f"polyshard {importlib.metadata.version('polyshard')}" == f"polyshard {polyshard.__version__}"
    # Behind those of polyshard and of plugins, which only name commands.
    commands = told.split("usage: polyshard")[3:]
    assert len(commands) == len(HELP) - 3
    assert all("--json" in each for each in commands)


def test_help_names_what_there_is() -> None:
    # They stand twice, since those that are looked up are beside what imports torch.
    assert sorted(parser.DEVICES) == sorted(forecast.DEVICES)
    assert sorted(parser.LINKS) == sorted(forecast.LINKS)
    assert parser.OPTIMIZERS == forecast.OPTIMIZERS
    assert tuple(each.value for each in forecast.Order) == parser.ORDERS
    assert tuple(each.value for each in Gathers) == parser.GATHERS
    assert tuple(each.value for each in scaffold.Kind) == parser.KINDS
    assert parser.LIMIT_S == trial.LIMIT_S
    assert parser.ROUNDS == bench.ROUNDS
    assert tuple(map(bytes_of, parser.SIZES.split(","))) == bench.SIZES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("polyshard pl", "plugins plan"),
        ("polyshard explain run.toml --wor", "--world-size "),
        ("polyshard plan run.toml --schedule ", "gpipe 1f1b interleaved_1f1b"),
        ("polyshard new pol", "policy "),
        ("polyshard config run", "run.toml "),
    ],
)
def test_a_shell_completes_words(line: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[shard]\n")
    out = tmp_path / "words"
    # As the function of the shell asks that register-python-argcomplete prints.
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": " ", "_ARGCOMPLETE_STDOUT_FILENAME": f"{out}"}
    environ = os.environ | asked | {"COMP_LINE": line, "COMP_POINT": f"{len(line)}", "COMP_TYPE": "9"}
    # Where an import of torch would fail, so none is tried.
    (tmp_path / "torch.py").write_text("raise RuntimeError('imported')")
    environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "polyshard"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert out.read_text() == words
