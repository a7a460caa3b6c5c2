"""The arguments of the command ``polyshard`` and of all its commands.

[Note: what is imported when]
Help, the version and completion of words in a shell need this file alone, which imports neither torch nor what does
the work: torch takes longer than a user waits. So names that other files have tables of stand here once more.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from polyshard._version import __version__
from polyshard.errors import did_you_mean
from typing_extensions import override

if TYPE_CHECKING:
    #: The result of ``ArgumentParser.add_subparsers``.
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = Any

#: As ``polyshard_tools.forecast`` has them.
DEVICES, LINKS = ("h100", "h200"), ("h200-ndr", "h200-nvlink")
OPTIMIZERS = ("adamw", "adamw-foreach", "sgd", "none")
ORDERS, GATHERS = ("gpipe", "1f1b", "interleaved_1f1b"), ("schedule", "microbatch")
SIZES, ROUNDS = "1 MiB,4 MiB,16 MiB,64 MiB,256 MiB", 10
#: As ``polyshard_tools.scaffold`` has them.
KINDS = ("collectives", "backend", "precision", "offload", "policy", "listener")
#: As ``polyshard_tools.doctor`` has it.
LIMIT_S = 120.0

LAUNCH = "torchrun --standalone --nproc-per-node 2 -m polyshard bench-links --out links.json"
_NEW = """\
Write a small plugin that works, its test and its entry point, for you to change. A FOLDER that is not there becomes a
package of that name; a package that is there gets one plugin more. Without --into, the package that you are in does, if
it has plugins of polyshard; otherwise a new folder polyshard-NAME is made. "collectives" are a decorator around others,
"backend" is one that sends by itself."""


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, without the usage: that has dozens of lines, and scrolls the error away."""

    @override
    def error(self, message: str) -> NoReturn:
        stop = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: {message.removesuffix('.')}{stop} See {self.prog} --help.\n")

    @override
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Before what is missing is told of: that may be what was misspelt.
        for word in args:
            option = word.partition("=")[0]
            if option == "--" or (self._subparsers is not None and not option.startswith("-")):
                break
            if option.startswith("--") and not any(known.startswith(option) for known in self._option_string_actions):
                self._refuse([option])
        # By the command's own parser, whose name the error has.
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return found, unknown

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        near = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
        self.error(f"unrecognized arguments: {' '.join(unknown)}.{near}")

    @override
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += f".{did_you_mean(str(value), map(str, action.choices or ()))}"
            raise


def command_line() -> argparse.ArgumentParser:
    """All commands; ``arguments.command`` names the one that was given."""
    parser: argparse.ArgumentParser = Parser(
        prog="polyshard", description="What is installed, what a configuration means, and what it would cost."
    )
    parser.add_argument("--version", action="version", version=f"polyshard {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (add_plugins, add_config, add_explain, add_plan, add_bench_links, add_doctor, add_trace, add_new):
        add(commands)
    return parser


def add_file_options(parser: argparse.ArgumentParser) -> None:
    """Add ``FILE`` and ``--table``, for ``ShardConfig.from_toml``."""
    parser.add_argument("file", metavar="FILE", help="the TOML file")
    parser.add_argument("--table", default="shard", help="the table in it (default: %(default)s)")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--model`` and ``--model-args``, which ``model_of`` reads."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="PKG:FACTORY",
        help="the class of the model, or a function that returns it; found from the working directory",
    )
    parser.add_argument(
        "--model-args", metavar="JSON", help="its arguments: an object of keywords, or a list (default: none)"
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text; errors, too")


def add_ranks_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--world-size`` and ``--mesh``, which ``config_of`` reads."""
    ranks = parser.add_mutually_exclusive_group(required=True)
    ranks.add_argument("--world-size", type=int, metavar="N", help="number of ranks")
    ranks.add_argument(
        "--mesh",
        metavar="NAME=N,...",
        help="their mesh instead: sizes of its dimensions, as dp=4,tp=2, outermost first",
    )


def add_plugins(commands: Commands) -> None:
    plugins = commands.add_parser("plugins", help="list the installed plugins and whether they can be used; check one")
    verbs = plugins.add_subparsers(dest="verb")
    plugins.set_defaults(group=None, json=False)
    listing = verbs.add_parser("list", help="list them")
    listing.add_argument("group", nargs="?", metavar="GROUP", help="one group only, for example collectives")
    _add_json(listing)
    _add_check(verbs)


def _add_check(verbs: Commands) -> None:
    check = verbs.add_parser(
        "check",
        help="run the tests of its contract on one",
        description="Runs the conformance suite of its group on an installed plugin, on the CPU and, where there is "
        "one, a CUDA device. Exit code: 0 where every rule holds, 1 where one does not, 2 where the plugin "
        "cannot be used.",
    )
    check.add_argument("name", metavar="NAME", help='its name, or "distribution:name"')
    check.add_argument("--group", help="its group, for example offload, where several have the name")
    check.add_argument("--options", default="{}", metavar="TABLE", help="its options, for example '{folder = \".\"}'")
    check.add_argument(
        "--suite",
        default="{}",
        metavar="TABLE",
        help="attributes of the suite, for example '{encoding_tolerance = 0.01}'",
    )
    check.add_argument("--model", default="", metavar="PKG:FACTORY", help="builds the model that a policy is to plan")
    check.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds until the suite must have ended"
    )
    _add_json(check)


def add_config(commands: Commands) -> None:
    config = commands.add_parser("config", help="show the settings that a TOML file and the environment give")
    add_file_options(config)
    _add_json(config)


def add_explain(commands: Commands) -> None:
    parser = commands.add_parser(
        "explain", help="say which plugins serve a model, who chose them, and what its units are; needs no GPU"
    )
    add_file_options(parser)
    add_model_options(parser)
    add_ranks_options(parser)
    parser.add_argument("--device", help="where ranks compute, for example cuda (default: as FILE says)")
    parser.add_argument("--all", action="store_true", help="a line for each unit, equal ones too")
    _add_json(parser)
    parser.add_argument("--picture", metavar="FILE", help="draw units, sizes and ranks, as .svg, .png or .pdf")


def add_plan(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="what a training step would take: memory, bytes between ranks, time",
        description=(
            "Run one step of the model on the meta device, which needs neither a GPU nor memory, and say what rank 0 "
            "would hold, send and wait for. Exits with 3 where it does not fit."
        ),
    )
    parser.add_argument("file", metavar="CONFIG", help="the TOML file")
    parser.add_argument("--table", default="shard", help="the table in it (default: %(default)s)")
    add_model_options(parser)
    add_ranks_options(parser)
    _add_pipeline_options(parser)
    parser.add_argument(
        "--batch",
        metavar="SHAPES|PKG:FUNCTION",
        help="what the forward takes: tensors as 'int64[8,1024] labels=int64[8,1024]', whose first sizes count "
        "samples, or a function of the number of samples; without it activations are not counted",
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="samples of one rank (default: as in the shapes, or 1)"
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        default=1,
        metavar="N",
        help="forwards and backwards of a step (default: %(default)s)",
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        metavar="NAME|PKG:FUNCTION",
        help=f"{', '.join(OPTIMIZERS)}, or a function of a list of parameters (default: %(default)s, which is fused)",
    )
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--device", metavar="NAME", help=f"its memory and rates: {', '.join(DEVICES)}")
    device.add_argument("--device-memory", metavar="BYTES", help="its memory alone, such as '80 GiB'; nothing is timed")
    parser.add_argument(
        "--links",
        metavar="NAME|FILE",
        help=f"{', '.join(LINKS)}, or what bench-links wrote (default: the device's)",
    )
    _add_json(parser)
    parser.add_argument(
        "--picture", metavar="FILE", help="draw memory and streams over the step, as .svg, .png or .pdf"
    )


def _add_pipeline_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "pipelines",
        "The factory of the model is called with the number of a stage and how many there are, and then with "
        "--model-args. --batch is one microbatch; its keywords are the last stage's.",
    )
    group.add_argument("--schedule", choices=ORDERS, help="of stages over several ranks")
    group.add_argument("--pp", type=int, metavar="N", help="so many; or 'pp=N' in --mesh, outermost")
    group.add_argument("--pp-stages", type=int, default=1, metavar="N", help="stages of a rank (default: %(default)s)")
    group.add_argument(
        "--gathers",
        choices=GATHERS,
        default=GATHERS[0],
        help="how often parameters are gathered (default: once a %(default)s)",
    )


def add_bench_links(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench-links",
        help="measure latency and bandwidth of gathers and reductions, for plan",
        description=f"Every rank runs it: {LAUNCH}",
    )
    parser.add_argument("--out", metavar="FILE", help="write the links there, from rank 0")
    parser.add_argument("--collectives", default="auto", metavar="NAME", help="which to time (default: %(default)s)")
    parser.add_argument(
        "--sizes",
        default=SIZES,
        metavar="BYTES,...",
        help="of whole buffers, such as '1 MiB,16 MiB' (default: 1 MiB to 256 MiB)",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each size (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--name", default="measured", help="what to call them (default: %(default)s)")
    _add_json(parser)


def add_doctor(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="look for what keeps polyshard from working, or from working fast, on this machine",
        description="Versions, devices, links, environment variables, plugins, limits, and a short training run. The "
        "exit code is 1 where there is a problem.",
    )
    _add_json(parser)
    parser.add_argument("--no-trial", action="store_true", help="leave out the training run, which starts processes")
    parser.add_argument(
        "--limit",
        type=_seconds,
        default=LIMIT_S,
        metavar="SECONDS",
        help="end the training run after so long (default: %(default)g)",
    )


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 1 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number of 1 or more, not {text!r}")


def add_trace(commands: Commands) -> None:
    parser = commands.add_parser(
        "trace",
        help="say what a device's time in a profiled step goes to, and what to change first",
        description="Reads a file of torch.profiler's export_chrome_trace(), of one step with ProfilerActivity.CUDA, "
        "and prints the time of its kernels by what they compute. Times add up: where several kernels run, the first "
        "kind counts.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the trace, .json or .json.gz")
    _add_json(parser)


def add_new(commands: Commands) -> None:
    parser = commands.add_parser(
        "new",
        help="write a package with a plugin of your own",
        description=_NEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help=f"what the plugin is for: {', '.join(KINDS)}")
    parser.add_argument("name", metavar="NAME", help="what a configuration calls it: lower-case words and underscores")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="the package's folder")
    parser.add_argument("--author", default="", metavar="NAME", help="of a new package: 'Name' or 'Name <mail>'")
    parser.add_argument("--license", default="", metavar="SPDX", help="of a new package, for example Apache-2.0")
    _add_json(parser)
