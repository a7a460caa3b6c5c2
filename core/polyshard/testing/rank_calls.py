"""What travels between a test and the processes that are its ranks: calls there, answers back."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import io
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigError, RankFailedError


@dataclass(frozen=True)
class Joined:
    """What a process knows once it has joined the others."""

    rank: int
    world_size: int
    device: torch.device
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext)


class _NotingPickler(pickle.Pickler):
    """Notes the files of the modules whose functions and classes are pickled by name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: dict[str, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        name = getattr(obj, "__module__", None)
        module = sys.modules.get(name) if isinstance(name, str) else None
        file = getattr(module, "__file__", None)
        if module is not None and file is not None:
            self.modules[module.__name__] = file
        return NotImplemented


@dataclass(frozen=True)
class Call:
    """A function, and where the modules are that it needs: pytest gives test modules names that no path leads to."""

    modules: Mapping[str, str]
    fn: bytes

    @property
    def pickled(self) -> bytes:
        return pickle.dumps(self)

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> Call:
        """Raises ``ConfigError`` for what cannot be pickled."""
        file = io.BytesIO()
        pickler = _NotingPickler(file)
        try:
            pickler.dump(fn)
        # Whatever the __reduce__ of some object raises.
        except Exception as error:
            raise ConfigError(
                f"a process cannot be sent what it is to call: {type(error).__name__}: {error}. Take a function that "
                "stands in a module, or functools.partial of one with arguments that can be pickled; threads take any."
            ) from error
        return cls(pickler.modules, file.getvalue())

    def load(self) -> Callable[[Joined], Any]:
        for name, file in self.modules.items():
            _make_known(name, file)
        fn: Callable[[Joined], Any] = pickle.loads(self.fn)
        return fn


def _make_known(name: str, file: str) -> None:
    if name in sys.modules:
        return
    try:
        known = importlib.util.find_spec(name)
    # Also for a package that is there in parts, or has no spec.
    except (ImportError, ValueError, AttributeError):
        known = None
    if known is not None:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    gc.freeze()


@dataclass(frozen=True)
class Answer:
    """What a rank returned or raised."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""

    def pickled(self, rank: int) -> bytes:
        try:
            sent = pickle.dumps(self)
            pickle.loads(sent)
        except Exception as error:
            return pickle.dumps(self._told(rank, error))
        return sent

    def _told(self, rank: int, error: Exception) -> Answer:
        if self.error is not None:
            told = f"rank {rank} raised {type(self.error).__name__}: {self.error}"
        else:
            told = (
                f"what rank {rank} returned, a {type(self.result).__name__}, cannot be sent to another process: "
                f"{type(error).__name__}: {error}. Return numbers, text or tensors."
            )
        return Answer(error=RankFailedError(told), trace=self.trace)

    @classmethod
    def unpickled(cls, sent: bytes, rank: int) -> Answer:
        try:
            answer = pickle.loads(sent)
        # A class that is known there alone.
        except Exception as error:
            return cls(error=RankFailedError(f"what rank {rank} sent cannot be read: {type(error).__name__}: {error}"))
        assert isinstance(answer, cls)
        return answer


def serve(
    rank: int,
    world_size: int,
    device_type: str,
    folder: str,
    environ: dict[str, str],
    startup_s: float,
    connection: Connection,
) -> None:
    """Body of one process: join the group, then call what arrives until there is nothing more."""
    with prepared(rank, folder, environ):
        cuda = device_type == "cuda"
        if cuda:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            init_method=store_in(folder),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=startup_s),
        )
        device = torch.device("cuda", rank) if cuda else torch.device("cpu")
        answer_calls(Joined(rank, world_size, device), connection)
        dist.destroy_process_group()


@contextmanager
def prepared(rank: int, folder: str, environ: Mapping[str, str]) -> Iterator[None]:
    """Give this process the variables ``environ`` alone, one thread, and a file in ``folder`` for its stacks."""
    # A server that forks has the variables of its own start.
    os.environ.clear()
    os.environ.update(environ)
    with Path(folder, f"stacks{rank}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        yield
        faulthandler.unregister(signal.SIGUSR1)


def store_in(folder: str) -> str:
    """Where the processes of ``folder`` meet, for ``init_process_group``."""
    return f"file://{Path(folder, 'store')}"


def answer_calls(joined: Joined, connection: Connection) -> None:
    """Call what arrives, and send back what comes of it, until the other end is closed."""
    # What is imported stays, and a full collection would walk through all of torch.
    gc.freeze()
    while True:
        try:
            sent = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            call = pickle.loads(sent)
            answer = Answer(result=call.load()(joined))
        except (SystemExit, KeyboardInterrupt) as error:
            # Raised anew in the test, it would end that, too.
            told = RankFailedError(f"rank {joined.rank} raised {type(error).__name__}: {error}")
            answer = Answer(error=told, trace=traceback.format_exc())
        # pytest's own exceptions, too: whatever ends the function is its answer.
        except BaseException as error:
            answer = Answer(error=error, trace=traceback.format_exc())
        connection.send_bytes(answer.pickled(joined.rank))
