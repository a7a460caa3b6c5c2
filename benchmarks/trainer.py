"""A Transformers Llama by ``PolyshardTrainer`` beside ``Trainer`` with FSDP2 through Accelerate: tokens/s and memory.

    python benchmarks/trainer.py --ranks 2 --out benchmarks/results/trainer.json
    python benchmarks/trainer.py --ranks 2 --peers polyshard,symmetric,fsdp2 --sequences 2048
    python benchmarks/trainer.py --ranks 2 --device cpu --model tiny --sequences 64 --tokens 128 --rounds 1

Starts its ranks by itself, one process a device, and anew for each peer: what a library keeps for a whole process is
nobody else's. In a round every peer trains every case once, in an order that turns from round to round. All begin with
the same weights (``--model 1b`` is the shape of Llama 3.2 1B, tied embeddings, random values), see the same random
tokens, and train in bf16 with fused AdamW, clipping at 1.0, and ``TrainingArguments`` that differ in the engine alone.

A step's time lies between two ``on_step_end``, with the device synchronised in each, after ``--warmup`` steps, and is
the slowest rank's. Memory is the largest over ranks, from the end of the warm-up on. With ``checkpointing``, polyshard
recomputes by ``TrainingArguments.activation_checkpointing`` and FSDP2 by its own ``fsdp_config`` setting, which
Transformers recommends. Accelerate's FSDP2 reduces gradients in bf16; polyshard sends bf16, too, and adds up in fp32.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import output_of, spread, turned, write

_GIB = 2**30
#: Transformers' settings by size of the model.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
PEERS = ("polyshard", "symmetric", "fsdp2")


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    sequence: int
    """Tokens of a sample."""
    batch: int
    """Samples a rank and step."""
    checkpointing: bool
    """Whether blocks are recomputed in backward."""

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.sequence}{', checkpointing' if self.checkpointing else ''}"


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One peer's training of one case: what its ranks are told."""

    peer: str
    case: Case
    model: str
    device: str
    warmup: int
    steps: int
    hang_s: float
    untied: bool
    result: str
    """The file that rank 0 writes what it found into."""

    @classmethod
    def read(cls, text: str) -> Turn:
        told = json.loads(text)
        return cls(**{**told, "case": Case(**told["case"])})


def train(turn: Turn) -> dict[str, Any]:
    """Train as one of the ranks that the environment names; what all of them found."""
    import torch
    import torch.distributed as dist
    import transformers

    on_cuda = turn.device == "cuda"
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    transformers.utils.logging.set_verbosity_error()

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        """Times steps behind the warm-up."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if on_cuda:
                torch.cuda.synchronize()
            if state.global_step == turn.warmup and on_cuda:
                torch.cuda.reset_peak_memory_stats()
            if state.global_step >= turn.warmup:
                self.ends.append(time.perf_counter())

    class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        """Random tokens, the same in every process."""

        def __init__(self, count: int, vocabulary: int) -> None:
            made = torch.Generator().manual_seed(1)
            self._rows = torch.randint(vocabulary, (count, turn.case.sequence), generator=made)

        def __len__(self) -> int:
            return len(self._rows)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input_ids": self._rows[index], "labels": self._rows[index]}

    settings = dict(MODELS[turn.model])
    if turn.untied:
        settings["tie_word_embeddings"] = False
    torch.manual_seed(0)
    with device:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, use_cache=False))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = _arguments(turn, folder)
        ranks = arguments.world_size
        steps = turn.warmup + turn.steps
        data = Tokens(steps * turn.case.batch * ranks, settings["vocab_size"])
        trainer = _trainer(turn, model=model, args=arguments, train_dataset=data, callbacks=[clock])
        outcome = trainer.train()
    times = [(end - began) * 1e3 for began, end in zip(clock.ends, clock.ends[1:], strict=False)]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    memory = [0.0, 0.0]
    if on_cuda:
        memory = [torch.cuda.max_memory_allocated() / _GIB, torch.cuda.max_memory_reserved() / _GIB]
    # The slowest rank's steps, and the fullest one's memory.
    worst = torch.tensor([*times, *memory], dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    *times, allocated, reserved = worst.tolist()
    tokens = turn.case.batch * turn.case.sequence * ranks
    found = {
        "ms": {**spread(times), "steps": [round(value, 3) for value in times]},
        "tokens_per_s": round(tokens / statistics.median(times) * 1e3, 1),
        "peak_gib": round(allocated, 3) if on_cuda else None,
        "reserved_gib": round(reserved, 3) if on_cuda else None,
        "loss": round(outcome.training_loss, 5),
        "grad_norm": round(norms[-1], 4) if norms else None,
        "engine": type(trainer.model_wrapped).__name__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if on_cuda else "CPU",
    }
    if turn.peer != "fsdp2":
        import polyshard

        polyshard.close(trainer.model)
    dist.destroy_process_group()
    return found


def _arguments(turn: Turn, folder: str) -> Any:
    from transformers import TrainingArguments

    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    given: dict[str, Any] = {
        "output_dir": folder, "max_steps": turn.warmup + turn.steps, "per_device_train_batch_size": turn.case.batch,
        "logging_steps": turn.warmup + turn.steps, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        "learning_rate": 1e-4, "bf16": True, "max_grad_norm": 1.0, "optim": "adamw_torch_fused", "seed": 0,
    }  # fmt: skip
    if turn.device == "cpu":
        given |= {"use_cpu": True, "ddp_backend": "gloo", "dataloader_pin_memory": False}
    if turn.peer == "fsdp2":
        given["fsdp"] = True
        given["fsdp_config"] = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": True,
            "activation_checkpointing": turn.case.checkpointing,
        }
    elif turn.case.checkpointing:
        # The older name until transformers 5.2x.
        name = "activation_checkpointing"
        given[name if name in known else "gradient_checkpointing"] = True
    return TrainingArguments(**given)


def _trainer(turn: Turn, **given: Any) -> Any:
    from transformers import Trainer

    if turn.peer == "fsdp2":
        return (Trainer if turn.device == "cuda" else _fsdp2_on_cpu())(**given)
    import polyshard
    from polyshard_transformers import PolyshardTrainer

    collectives = "symmetric" if turn.peer == "symmetric" else "auto"
    return PolyshardTrainer(shard=polyshard.ShardConfig(policy="transformers", collectives=collectives), **given)


def _fsdp2_on_cpu() -> type[Any]:
    """A ``Trainer`` that is told on a CPU what Accelerate tells it on GPUs alone: for runs that try the benchmark."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from transformers import Trainer

    class OnCpu(Trainer):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            plugin.set_mixed_precision("bf16")
            shared = self.accelerator.state._shared_state
            shared |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
            self.is_fsdp_enabled = True

    return OnCpu


# The parent


def launch(turn: Turn, ranks: int) -> dict[str, Any]:
    """Run ``turn`` on new processes, one a rank; what they found, or why they did not."""
    with tempfile.TemporaryDirectory() as folder:
        turn = dataclasses.replace(turn, result=str(Path(folder, "found.json")))
        variables = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
        try:
            done = subprocess.run(
                [sys.executable, "-m", *command, "--turn", json.dumps(dataclasses.asdict(turn))],
                env=os.environ | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=turn.hang_s + 30,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            done = subprocess.CompletedProcess(command, 1, str(late.output or ""))
        result = Path(turn.result)
        if done.returncode == 0 and result.exists():
            found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return found
        print(done.stdout[-6000:], file=sys.stderr, flush=True)
        raised = [
            line for line in done.stdout.splitlines() if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b", line)
        ]
        return {"error": raised[0][:600] if raised else f"no answer within {turn.hang_s:g} s, or a rank died"}


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each case and peer: medians over rounds, and FSDP2's time over its, within a round."""
    summary = []
    for case in dict.fromkeys(row["case"] for row in rows):
        for peer in dict.fromkeys(row["peer"] for row in rows):
            own = [row for row in rows if (row["case"], row["peer"]) == (case, peer)]
            good = [row for row in own if "error" not in row]
            entry: dict[str, Any] = {"case": case, "peer": peer, "rounds": len(good)}
            if not good:
                entry["error"] = own[-1]["error"] if own else "not run"
            else:
                theirs = {
                    row["round"]: row["ms"]["median"]
                    for row in rows
                    if row["case"] == case and row["peer"] == "fsdp2" and "error" not in row
                }
                ratios = [theirs[row["round"]] / row["ms"]["median"] for row in good if row["round"] in theirs]
                entry |= {
                    "ms": statistics.median(row["ms"]["median"] for row in good),
                    "tokens_per_s": statistics.median(row["tokens_per_s"] for row in good),
                    "fsdp2_over_it": statistics.median(ratios) if ratios else None,
                    "peak_gib": _largest(row["peak_gib"] for row in good),
                    "reserved_gib": _largest(row["reserved_gib"] for row in good),
                    "loss": statistics.median(row["loss"] for row in good),
                }
            summary.append(entry)
    return summary


def _largest(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def table(summary: Sequence[Mapping[str, Any]]) -> str:
    columns = ("case", "peer", "rounds", "ms a step", "tokens/s", "FSDP2 / it", "peak GiB", "reserved GiB", "loss")
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for entry in summary:
        if "error" in entry:
            lines.append(f"| {entry['case']} | {entry['peer']} | {entry['error'][:200]} |" + " |" * (len(columns) - 3))
            continue
        figures = [
            (entry["ms"], ".1f"), (entry["tokens_per_s"], ",.0f"), (entry["fsdp2_over_it"], ".3f"),
            (entry["peak_gib"], ".2f"), (entry["reserved_gib"], ".2f"), (entry["loss"], ".4f"),
        ]  # fmt: skip
        told = ["-" if value is None else format(value, form) for value, form in figures]
        lines.append(f"| {entry['case']} | {entry['peer']} | {entry['rounds']} | " + " | ".join(told) + " |")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=tuple(MODELS), default="1b")
    parser.add_argument("--untied", action="store_true", help="an output embedding of its own")
    parser.add_argument("--peers", default="polyshard,fsdp2", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--sequences", default="1024,2048", help="lengths, with commas")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens a rank and step")
    parser.add_argument("--checkpointing", choices=("both", "on", "off"), default="both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hang-timeout", type=float, default=240.0, help="seconds for one peer and case")
    parser.add_argument("--deadline", type=float, default=None, help="seconds after which no peer begins")
    parser.add_argument("--commit", default=None, help="what is measured, where the machine has no history")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file")
    parser.add_argument("--turn", default=None, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    given = make_parser().parse_args(arguments)
    if given.turn is not None:
        turn = Turn.read(given.turn)
        faulthandler.dump_traceback_later(turn.hang_s, exit=True)
        found = train(turn)
        if os.environ["RANK"] == "0":
            Path(turn.result).write_text(json.dumps(found), encoding="utf-8")
        return 0
    peers = given.peers.split(",")
    unknown = sorted(set(peers) - set(PEERS))
    if unknown:
        print(f"no peer is called {', '.join(unknown)}; there are {', '.join(PEERS)}", file=sys.stderr)
        return 2
    recomputes = {"both": (False, True), "on": (True,), "off": (False,)}[given.checkpointing]
    lengths = [int(length) for length in given.sequences.split(",")]
    cases = [Case(length, max(1, given.tokens // length), each) for length in lengths for each in recomputes]
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        "command": "python benchmarks/trainer.py " + " ".join(sys.argv[1:] if arguments is None else arguments),
        "commit": given.commit or output_of("git", "rev-parse", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "world_size": given.ranks,
        "rows": rows,
    }
    for number in range(given.rounds):
        for case in cases:
            for peer in turned(peers, number):
                late = given.deadline is not None and time.monotonic() - began > given.deadline
                paces = given.warmup, given.steps, given.hang_timeout
                turn = Turn(peer, case, given.model, given.device, *paces, given.untied, "")
                found = {"error": "skipped: the deadline was reached"} if late else launch(turn, given.ranks)
                rows.append({"case": case.name, "peer": peer, "round": number, **found})
                ms: Any = found.get("ms")
                told = found.get("error") or f"{ms['median']:.1f} ms, {found['tokens_per_s']:,.0f} tokens/s"
                elapsed = time.monotonic() - began
                print(f"{elapsed:5.0f} s  round {number}  {case.name:26} {peer:10} {told}", file=sys.stderr, flush=True)
                report["summary"] = summarise(rows)
                write(report, given.out)
    print(table(report["summary"]), flush=True)
    return 1 if all("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
