"""What one run is asked to do: a TOML file, then the environment, then the command line."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polyshard
from polyshard.errors import ConfigError
from tables import read_table, require_known, toml_value

#: How activations are kept for the backward.
CHECKPOINTING_MODES = ("none", "full", "selective")
#: Shapes of the learning rate.
SCHEDULES = ("cosine", "wsd", "constant")
#: Schedules of a pipeline.
PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")
#: Bytes, and the token between documents.
SMALLEST_VOCABULARY = 257


@dataclass(frozen=True)
class Model:
    """``[model]``: a Llama, in the names of Transformers' ``LlamaConfig``; with experts a Mixtral, in those of its."""

    hidden_size: int = 128
    intermediate_size: int = 352
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    num_local_experts: int = 0
    num_experts_per_tok: int = 2
    router_aux_loss_coef: float = 0.01

    def __post_init__(self) -> None:
        _at_least_one("model", self, besides=("num_local_experts",))
        if self.num_local_experts and not self.num_experts_per_tok <= self.num_local_experts:
            raise ConfigError(
                f"model.num_experts_per_tok is {self.num_experts_per_tok}, of {self.num_local_experts} "
                "model.num_local_experts. Give no more than there are; 0 experts are a Llama without any."
            )
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ConfigError(
                f"model.hidden_size {self.hidden_size} is no even multiple of model.num_attention_heads "
                f"{self.num_attention_heads}, which rotary embeddings need. Change one of them."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"model.num_attention_heads {self.num_attention_heads} is not divisible by model.num_key_value_heads "
                f"{self.num_key_value_heads}. Change one of them."
            )


@dataclass(frozen=True)
class Data:
    """``[data]``: local text."""

    files: tuple[str, ...] = ("docs/*.md",)
    held_out: tuple[str, ...] = ("docs/tutorial.md",)
    tokenizer: str = ""
    vocabulary: int = 1024
    cache: str = "runs/tokens"
    workers: int = 0

    def __post_init__(self) -> None:
        if self.vocabulary < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"data.vocabulary is {self.vocabulary}. Give at least {SMALLEST_VOCABULARY}: every byte, and the token "
                "between documents."
            )
        if self.workers < 0:
            raise ConfigError(f"data.workers is {self.workers}. Give 0 to read in the training process, or more.")
        for name in ("files", "held_out"):
            if not getattr(self, name):
                raise ConfigError(f"data.{name} is empty. Give at least one pattern, such as 'text/**/*.txt'.")


@dataclass(frozen=True)
class Training:
    steps: int = 200
    context: int = 128
    batch: int = 16
    microbatch: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least_one("training", self, besides=("seed",))

    def accumulation(self, world_size: int) -> int:
        """Microbatches that each of ``world_size`` ranks with other data computes a step.

        Raises ``ConfigError`` where none fits.
        """
        together = self.microbatch * world_size
        if self.batch % together:
            raise ConfigError(
                f"training.batch {self.batch} is no multiple of {together}, which is training.microbatch "
                f"{self.microbatch} on {world_size} rank(s). Change training.batch, training.microbatch or the ranks."
            )
        return self.batch // together

    def fitting_microbatch(self, world_size: int) -> int:
        """The largest of ``microbatch`` sequences at most in which ``world_size`` ranks share ``batch``.

        Raises ``ConfigError`` where ranks cannot have equal parts of it.
        """
        part, rest = divmod(self.batch, world_size)
        if rest:
            raise ConfigError(
                f"training.batch {self.batch} is no multiple of {world_size} rank(s) with other sequences. Start a "
                "number of ranks that divides it."
            )
        return max(size for size in range(1, self.microbatch + 1) if part % size == 0)

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks together."""
        return self.batch * self.context


@dataclass(frozen=True)
class Parallel:
    """``[parallel]``: along which dimensions ranks share the batch, parameters, experts, sequences and blocks."""

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    pp_schedule: str = "1f1b"
    pp_stages: int = 1

    def __post_init__(self) -> None:
        _at_least_one("parallel", self, besides=("dp_shard",) if self.dp_shard == -1 else ())
        _one_of("parallel.pp_schedule", self.pp_schedule, PIPELINE_SCHEDULES)
        several = self.pp > 1 and self.pp_schedule == "interleaved_1f1b"
        if several != (self.pp_stages > 1):
            raise ConfigError(
                f"parallel.pp_stages is {self.pp_stages}, parallel.pp {self.pp} and parallel.pp_schedule "
                f"{self.pp_schedule!r}: 'interleaved_1f1b' over two ranks or more, and no other, has several stages a "
                "rank. Change one of them."
            )

    def sizes(self, world_size: int) -> dict[str, int]:
        """The mesh of ``world_size`` ranks; those along the last dimension are neighbours. Raises ``ConfigError``."""
        others = self.dp_replicate * self.cp * self.tp * self.pp
        dp_shard = world_size // others if self.dp_shard == -1 else self.dp_shard
        if not dp_shard or dp_shard * others != world_size:
            asked = "" if self.pp == 1 else f" times parallel.pp {self.pp}"
            asked += "" if self.dp_shard == -1 else f" times parallel.dp_shard {self.dp_shard}"
            raise ConfigError(
                f"parallel.dp_replicate {self.dp_replicate} times parallel.cp {self.cp} times parallel.tp {self.tp}"
                f"{asked} does not make {world_size} rank(s). Change one of them or the ranks; dp_shard = -1 is what "
                "the others leave."
            )
        if dp_shard % self.ep:
            raise ConfigError(
                f"parallel.ep {self.ep} does not divide parallel.dp_shard {dp_shard}, among whose ranks experts are "
                "shared. Change one of them."
            )
        edp = dp_shard // self.ep
        inner = {"dp_replicate": self.dp_replicate, "edp": edp, "ep": self.ep, "cp": self.cp, "tp": self.tp}
        return {"pp": self.pp, **inner} if self.pp > 1 else inner

    def data_ranks(self, world_size: int) -> int:
        """How many of ``world_size`` ranks have other sequences. Raises ``ConfigError`` as ``sizes`` does."""
        sizes = self.sizes(world_size)
        return world_size // (sizes["cp"] * sizes["tp"] * self.pp)


@dataclass(frozen=True)
class Optimizer:
    """``[optimizer]``: AdamW. Vectors do not decay."""

    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0


@dataclass(frozen=True)
class Schedule:
    """``[schedule]``: the learning rate over the steps."""

    shape: str = "cosine"
    warmup: int = 20
    cooldown: float = 0.2
    final: float = 0.1

    def __post_init__(self) -> None:
        _one_of("schedule.shape", self.shape, SCHEDULES)
        if self.warmup < 0 or not 0 <= self.cooldown <= 1 or not 0 <= self.final <= 1:
            raise ConfigError(
                f"schedule.warmup is {self.warmup}, schedule.cooldown {self.cooldown} and schedule.final {self.final}. "
                "Give a warm-up of at least 0 steps, and shares from 0 to 1."
            )


@dataclass(frozen=True)
class ActivationCheckpointing:
    mode: str = "none"
    every: int = 1

    def __post_init__(self) -> None:
        _one_of("activation_checkpointing.mode", self.mode, CHECKPOINTING_MODES)
        _at_least_one("activation_checkpointing", self)


@dataclass(frozen=True)
class Compile:
    blocks: bool = False
    loss: bool = False
    backend: str = "inductor"


@dataclass(frozen=True)
class Evaluation:
    every: int = 50
    batches: int = 8

    def __post_init__(self) -> None:
        _at_least_one("evaluation", self)


@dataclass(frozen=True)
class Checkpoint:
    every: int = 50
    keep: int = 2
    asynchronous: bool = True
    any_ranks: bool = False

    def __post_init__(self) -> None:
        _at_least_one("checkpoint", self)


@dataclass(frozen=True)
class Output:
    folder: str = "runs/pretrain"
    report_every: int = 10
    tensorboard: bool = True
    wandb: bool = False
    export: bool = True
    peak_tflops: float = 0.0

    def __post_init__(self) -> None:
        _at_least_one("output", self)


@dataclass(frozen=True)
class Settings:
    """Everything that a run was asked: a table of the file each. The file says what each setting means."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    parallel: Parallel = field(default_factory=Parallel)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    activation_checkpointing: ActivationCheckpointing = field(default_factory=ActivationCheckpointing)
    compile: Compile = field(default_factory=Compile)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    output: Output = field(default_factory=Output)
    shard: polyshard.ShardConfig = field(default_factory=polyshard.ShardConfig)

    def __post_init__(self) -> None:
        model, parallel, strategy = self.model, self.parallel, self.shard.strategy
        if strategy.hybrid != (parallel.dp_replicate > 1):
            raise ConfigError(
                f"shard.strategy is {strategy.value!r} and parallel.dp_replicate {parallel.dp_replicate}: a hybrid "
                "strategy, and no other, replicates over two ranks or more. Change one of them."
            )
        if parallel.ep > 1 and not model.num_local_experts:
            raise ConfigError(f"parallel.ep is {parallel.ep}, but model.num_local_experts is 0. Change one of them.")
        # Heads, features and tokens of which each rank computes as many.
        for name, whole in (
            ("model.num_key_value_heads", model.num_key_value_heads),
            ("model.intermediate_size", model.intermediate_size),
            ("training.context", self.training.context),
        ):
            if whole % parallel.tp:
                raise ConfigError(f"parallel.tp {parallel.tp} does not divide {name} {whole}. Change one of them.")
        if self.training.context % (parallel.cp * parallel.tp):
            raise ConfigError(
                f"parallel.cp {parallel.cp} times parallel.tp {parallel.tp} does not divide training.context "
                f"{self.training.context}. Change one of them."
            )

        if parallel.pp > 1:
            self._require_pipeline()
        if self.elastic and (parallel.pp > 1 or self.data.workers):
            raise ConfigError(
                f"parallel.pp is {parallel.pp} and data.workers {self.data.workers}: jobs over torchft take batches in "
                "turn, and over one model. Set parallel.pp to 1 and data.workers to 0."
            )

    @property
    def elastic(self) -> bool:
        """Whether other jobs train the same model, and may come and go."""
        choice = self.shard.collectives
        return isinstance(choice, Mapping) and choice.get("name") == "torchft"

    def _require_pipeline(self) -> None:
        model, parallel = self.model, self.parallel
        stages = parallel.pp * parallel.pp_stages
        if model.num_local_experts and model.router_aux_loss_coef:
            raise ConfigError(
                f"parallel.pp is {parallel.pp} and model.router_aux_loss_coef {model.router_aux_loss_coef}: the "
                "load-balancing loss is one of all blocks, which no stage has. Set it to 0, or parallel.pp to 1."
            )
        if stages > model.num_hidden_layers:
            raise ConfigError(
                f"parallel.pp {parallel.pp} times parallel.pp_stages {parallel.pp_stages} are {stages} stages, of "
                f"{model.num_hidden_layers} model.num_hidden_layers. Give each stage one block or more."
            )
        if self.output.export:
            raise ConfigError(
                f"parallel.pp is {parallel.pp} and output.export true: no rank has all of the model. Set it to false; "
                "at the end, the same run with parallel.pp=1, output.export=true and --accept-changes exports it."
            )

    def at(self, world_size: int) -> Settings:
        """These for ``world_size`` ranks: where ``checkpoint.any_ranks``, with a microbatch that fits the batch.

        Raises ``ConfigError`` where none does.
        """
        if not self.checkpoint.any_ranks:
            return self
        microbatch = self.training.fitting_microbatch(self.parallel.data_ranks(world_size))
        return dataclasses.replace(self, training=dataclasses.replace(self.training, microbatch=microbatch))

    def microbatches(self, world_size: int) -> int:
        """How many a rank of ``world_size`` computes a step. Raises ``ConfigError`` where none fit."""
        parallel = self.parallel
        number = self.training.accumulation(parallel.data_ranks(world_size))
        wrong = {
            "gpipe": False,
            "1f1b": number < parallel.pp,
            "interleaved_1f1b": number % parallel.pp != 0,
        }[parallel.pp_schedule]
        if wrong:
            raise ConfigError(
                f"training.batch {self.training.batch} is {number} microbatch(es) of training.microbatch "
                f"{self.training.microbatch} on each of {parallel.data_ranks(world_size)} rank(s) with other "
                f"sequences, for parallel.pp {parallel.pp}. Schedule '1f1b' needs as many as parallel.pp or more, "
                "'interleaved_1f1b' a multiple of it: change training.batch or training.microbatch."
            )
        return number

    def deciding(self) -> dict[str, Any]:
        """The settings on which the numbers of a step depend, by ``table.name``; text and ranks aside."""
        tables = ("model", "training", "parallel", "optimizer", "schedule")
        found = {
            f"{table}.{name}": value
            for table in tables
            for name, value in dataclasses.asdict(getattr(self, table)).items()
        }
        # The number of ranks tells what it comes to.
        del found["parallel.dp_shard"]
        return {**found, "shard.precision": str(self.shard.precision)}


_TABLES: Mapping[str, type[Any]] = {
    "model": Model,
    "data": Data,
    "training": Training,
    "parallel": Parallel,
    "optimizer": Optimizer,
    "schedule": Schedule,
    "activation_checkpointing": ActivationCheckpointing,
    "compile": Compile,
    "evaluation": Evaluation,
    "checkpoint": Checkpoint,
    "output": Output,
}


def load_settings(path: Path, overrides: Iterable[str] = (), *, environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings in the file ``path``, overridden by ``environ`` (for ``[shard]``) and then by ``overrides``.

    ``overrides``: texts such as ``"training.steps=10"`` or ``"shard.strategy=no_shard"``. Raises ``ConfigError``.
    """
    document = _read(path)
    require_known(document, [*_TABLES, "shard"], f"{path}", "table")
    changed: dict[str, dict[str, Any]] = {}
    variables: dict[str, str] = {}
    for override in overrides:
        table, key, text = _split(override)
        if table == "shard":
            names = [each.name for each in dataclasses.fields(polyshard.ShardConfig)]
            require_known([key.partition(".")[0]], names, "the command line, [shard]")
            variables["POLYSHARD_" + key.upper().replace(".", "__")] = text
        else:
            changed.setdefault(table, {})[key] = toml_value(text)
    made: dict[str, Any] = {"shard": polyshard.ShardConfig.from_toml(path, environ={**environ, **variables})}
    for name, kind in _TABLES.items():
        values = read_table(kind, document.get(name, {}), name, f"{path}")
        values.update(read_table(kind, changed.get(name, {}), name, "the command line"))
        made[name] = kind(**values)
    return Settings(**made)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Name a TOML file with --config.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}.") from error


def _split(override: str) -> tuple[str, str, str]:
    name, equals, text = override.partition("=")
    table, dot, key = name.strip().partition(".")
    if not (equals and dot and key):
        raise ConfigError(f"{override!r} sets nothing. Write TABLE.NAME=VALUE, such as training.steps=100.")
    require_known([table], [*_TABLES, "shard"], "the command line", "table")
    return table, key, text.strip()


def _one_of(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} {value!r} does not exist. There are: {', '.join(choices)}.")


def _at_least_one(table: str, settings: Any, besides: Iterable[str] = ()) -> None:
    for name, value in dataclasses.asdict(settings).items():
        if type(value) is int and value < 1 and name not in besides:
            raise ConfigError(f"{table}.{name} is {value}. Give at least 1.")
