"""The second example: its settings, text, batches, rates and figures, each by itself."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from polyshard.errors import ConfigError
from processes import importing_from
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain"
CONFIG = EXAMPLE / "llama_toy.toml"
TINY = (
    "model.hidden_size=16",
    "model.intermediate_size=24",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "training.context=8",
)


@pytest.fixture(scope="module", autouse=True)
def scripts_on_path() -> Iterator[None]:
    with importing_from(EXAMPLE):
        yield


def part(name: str) -> ModuleType:
    """The example's module ``name``."""
    return importlib.import_module(name)


def settings_of(*overrides: str) -> Any:
    """The toy's settings, changed."""
    return part("settings").load_settings(CONFIG, overrides, environ={})


def plain_llama(settings: Any, vocabulary: int) -> Any:
    """The model as a run begins with it, whole and on the CPU."""
    model = part("model")
    config = model.model_config(settings, vocabulary, 0)
    net = (model.MixtralForCausalLM if settings.model.num_local_experts else model.LlamaForCausalLM)(config)
    initialise = model.Initializer(net, settings.training.seed)
    # Another order than a sharded model's.
    for module in reversed(list(net.modules())):
        initialise(module)
    return net


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with text."""
    monkeypatch.chdir(tmp_path)
    for name, words in (("a", "one two three\r\n"), ("b", "four\n"), ("held", "only here: ünïcode\n")):
        (tmp_path / f"{name}.txt").write_bytes(words.encode() * 30)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "first row"}) + "\n\n" + json.dumps({"text": "second"}))
    return tmp_path


def data_of(**changes: Any) -> Any:
    """Settings for what ``texts`` made."""
    given = {"files": ("*.txt", "*.jsonl"), "held_out": ("held.txt",), "vocabulary": 270, "cache": "cache", **changes}
    return part("settings").Data(**given)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.step=3", r"\[training\]: unknown setting 'step'. Did you mean 'steps'"),
        ("trainig.steps=3", "unknown table 'trainig'. Did you mean 'training'"),
        ("shard.strateggy=no_shard", "Did you mean 'strategy'"),
        ("steps=3", "Write TABLE.NAME=VALUE"),
        ("training.steps=many", "training.steps is 'many'. Give an integer"),
        ("training.steps=0", "Give at least 1"),
        ("optimizer.lr=high", "Give a number"),
        ("compile.blocks=1", "Give true or false"),
        ("data.files=[1]", "Give a list of texts"),
        ("data.files=[]", "data.files is empty"),
        ("data.vocabulary=256", "at least 257"),
        ("schedule.shape=linear", "There are: cosine, wsd, constant"),
        ("activation_checkpointing.mode=some", "There are: none, full, selective"),
        ("model.num_key_value_heads=3", "not divisible by model.num_key_value_heads 3"),
        ("model.num_attention_heads=3", "even multiple of model.num_attention_heads 3"),
        ("model.num_local_experts=1", "model.num_experts_per_tok is 2, of 1"),
        ("parallel.dp_shard=0", "parallel.dp_shard is 0. Give at least 1"),
        ("parallel.dp_replicate=2", "strategy is 'full_shard' and parallel.dp_replicate 2"),
        ("shard.strategy=hybrid_shard", "strategy is 'hybrid_shard' and parallel.dp_replicate 1"),
        ("parallel.ep=2", "parallel.ep is 2, but model.num_local_experts is 0"),
        ("parallel.cp=3", "parallel.cp 3 times parallel.tp 1 does not divide training.context"),
        ("parallel.tp=4", "parallel.tp 4 does not divide model.num_key_value_heads 2"),
        ("parallel.pp_schedule=zbv", "There are: gpipe, 1f1b, interleaved_1f1b"),
        ("parallel.pp_stages=2", "parallel.pp_stages is 2, parallel.pp 1 and parallel.pp_schedule '1f1b'"),
        ("parallel.pp=8", "are 8 stages, of 4 model.num_hidden_layers"),
        ("parallel.pp=2", "parallel.pp is 2 and output.export true"),
    ],
)
def test_a_wrong_setting_is_named(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings_of(override)


def test_every_setting_of_the_example_stands_in_its_file_with_its_default() -> None:
    module = part("settings")
    loaded, default = module.load_settings(CONFIG, environ={}), module.Settings()
    text = CONFIG.read_text()
    for table in dataclasses.fields(module.Settings):
        if table.name in ("shard", "data"):
            continue
        assert getattr(loaded, table.name) == getattr(default, table.name)
        for each in dataclasses.fields(getattr(default, table.name)):
            assert f"\n{each.name} = " in text


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    training = settings_of("training.batch=16", "training.microbatch=4").training
    assert [training.accumulation(ranks) for ranks in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(ConfigError, match=r"training.batch 16 is no multiple of 12, .* on 3 rank"):
        training.accumulation(3)


def test_what_a_pipeline_cannot_be_is_refused() -> None:
    settings, several = part("settings"), settings_of("checkpoint.asynchronous=false", "output.export=false")

    def over(schedule: str, stages: int = 1, **changes: Any) -> Any:
        parallel = settings.Parallel(pp=2, pp_schedule=schedule, pp_stages=stages)
        return dataclasses.replace(several, parallel=parallel, **changes)

    # Of 16 sequences four a microbatch.
    assert [over("1f1b").microbatches(ranks) for ranks in (2, 4)] == [4, 2]
    assert over("gpipe").microbatches(8) == 1
    for wrong, ranks in ((over("1f1b"), 8), (over("interleaved_1f1b", 2), 8)):
        with pytest.raises(ConfigError, match=r"16 is 1 microbatch.* on each of 4 rank.* for parallel.pp 2"):
            wrong.microbatches(ranks)
    for words, changes in (
        ("router_aux_loss_coef 0.01", {"model": settings.Model(num_local_experts=4)}),
        ("output.export true", {"output": settings.Output()}),
    ):
        with pytest.raises(ConfigError, match=words):
            over("1f1b", **changes)


def test_ranks_lie_along_the_dimensions_that_were_asked_for_or_are_refused() -> None:
    parallel = part("settings").Parallel
    assert parallel(tp=2, ep=2).sizes(8) == {"dp_replicate": 1, "edp": 2, "ep": 2, "cp": 1, "tp": 2}
    asked = parallel(dp_replicate=2, dp_shard=4, tp=2, ep=4)
    assert asked.sizes(16) == {"dp_replicate": 2, "edp": 1, "ep": 4, "cp": 1, "tp": 2}
    assert parallel(cp=2, tp=2).data_ranks(8) == 2
    assert asked.data_ranks(16) == 8
    piped = parallel(pp=2, tp=2)
    assert piped.sizes(8) == {"pp": 2, "dp_replicate": 1, "edp": 2, "ep": 1, "cp": 1, "tp": 2}
    assert piped.data_ranks(8) == 2
    for wrong, ranks, words in (
        (asked, 8, "parallel.dp_shard 4 does not make 8 rank"),
        (parallel(tp=2), 5, "parallel.tp 2 does not make 5 rank"),
        (parallel(tp=2), 1, "does not make 1 rank"),
        (piped, 6, "parallel.tp 2 times parallel.pp 2 does not make 6 rank"),
        (parallel(ep=3), 4, "parallel.ep 3 does not divide parallel.dp_shard 4"),
    ):
        with pytest.raises(ConfigError, match=words):
            wrong.sizes(ranks)


def test_rates_rise_over_the_warm_up_and_fall_as_their_shape_says() -> None:
    rate, schedule = part("schedule").rate, part("settings").Schedule

    def rates(shape: str) -> list[float]:
        wanted = schedule(shape=shape, warmup=10, cooldown=0.25, final=0.1)
        return [rate(step, 110, wanted) for step in range(111)]

    for shape in ("cosine", "wsd", "constant"):
        assert rates(shape)[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    cosine, wsd = rates("cosine"), rates("wsd")
    assert [cosine[step] for step in (10, 60, 110)] == pytest.approx([1.0, 0.55, 0.1])
    assert cosine[10:] == sorted(cosine[10:], reverse=True)
    # A quarter of 110 steps, 28 rounded, is the way down.
    assert wsd[9:83] == [1.0] * 74
    assert [wsd[step] for step in (96, 110)] == pytest.approx([0.55, 0.1])
    assert rates("constant")[9:] == [1.0] * 102


def test_tokens_are_the_documents_with_an_end_behind_each_and_none_is_held_out_as_well(texts: Path) -> None:
    tokens = part("tokens")
    found = tokens.Tokens.read(tokens.prepare(data_of()))
    assert found.vocabulary == 270
    ends = f"{tokens.END_OF_TEXT}"
    train = found.tokenizer.decode(found.train.map().tolist(), skip_special_tokens=False)
    assert train.split(ends) == ["one two three\r\n" * 30, "four\n" * 30, "first row", "second", ""]
    held_out = found.tokenizer.decode(found.held_out.map().tolist(), skip_special_tokens=False)
    assert held_out.split(ends) == ["only here: ünïcode\n" * 30, ""]


def test_tokens_are_made_once_until_text_or_tokenizer_change(texts: Path) -> None:
    tokens = part("tokens")
    first = tokens.prepare(data_of())
    written = (first / "train.bin").stat().st_mtime_ns
    assert tokens.prepare(data_of()) == first
    assert (first / "train.bin").stat().st_mtime_ns == written
    # The tokenizer that was trained there, as a file: the same tokens, made by something else.
    given = tokens.prepare(data_of(tokenizer=str(first / "tokenizer.json")))
    assert given != first
    assert tokens.Tokens.read(given).digest == tokens.Tokens.read(first).digest
    (texts / "b.txt").write_text("five\n")
    changed = tokens.prepare(data_of())
    assert changed not in (first, given)
    assert tokens.Tokens.read(changed).digest != tokens.Tokens.read(first).digest
    assert sorted(path.name for path in (texts / "cache").iterdir()) == sorted(
        path.name for path in (first, given, changed)
    )


def test_text_that_cannot_serve_is_named(texts: Path) -> None:
    tokens, loader = part("tokens"), part("loader")
    (texts / "latin.txt").write_bytes(b"caf\xe9")
    (texts / "bad.jsonl").write_text('{"text": "a"}\n{"words": "b"}\n')
    for changes, words in (
        ({"files": ("*.md",)}, r"data.files: no file matches '\*.md' in "),
        ({"files": ("held.txt",)}, "data.held_out takes all of data.files away"),
        ({"files": ("latin.txt",)}, "latin.txt is no UTF-8 text"),
        ({"files": ("bad.jsonl",)}, "bad.jsonl, line 2 has no text"),
        ({"tokenizer": "none.json"}, "'none.json' is no file"),
        ({"tokenizer": "bad.jsonl"}, "bad.jsonl cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words):
            tokens.prepare(data_of(**changes))
    # Nothing half-made is taken for tokens later.
    assert not list((texts / "cache").iterdir())
    short = tokens.Tokens.read(tokens.prepare(data_of(files=("b.txt",))))
    with pytest.raises(ConfigError, match=r"fewer than one sequence of training\.context 4096"):
        loader.Sequences(short.train, 4096, "data.files")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_what_a_step_is_trained_on_depends_on_no_number_of_ranks(world_size: int) -> None:
    share = part("loader").Share
    places = [iter(share(10, 8 // world_size, rank, world_size, seed=3)) for rank in range(world_size)]
    steps = [[index for place in places for index in next(place)] for _ in range(5)]
    flat = [index for step in steps for index in step]
    # Four passes over ten sequences, each of them once in a pass, in another order.
    passes = [flat[begin : begin + 10] for begin in range(0, 40, 10)]
    assert all(sorted(each) == list(range(10)) for each in passes)
    assert len({tuple(each) for each in passes}) == 4
    alone = iter(share(10, 8, 0, 1, seed=3))
    assert steps == [next(alone) for _ in range(5)]
    behind = iter(share(10, 8 // world_size, 0, world_size, seed=3, start=24))
    assert next(behind) == steps[3][: 8 // world_size]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_restored_loader_goes_on_with_the_very_next_sequences(texts: Path, workers: int) -> None:
    tokens, loader = part("tokens"), part("loader")
    found = tokens.Tokens.read(tokens.prepare(data_of()))
    settings = settings_of("training.context=4", "training.microbatch=2", f"data.workers={workers}")

    def made() -> Any:
        return loader.make_loader(found, settings, rank=1, world_size=2, start=0, pinned=False)

    first, second = made(), made()
    batches = iter(first)
    for _ in range(7):
        next(batches)
    second.load_state_dict(first.state_dict())
    again = iter(second)
    text = found.train.map().tolist()
    for _ in range(30):
        expected, restored = next(batches), next(again)
        assert torch.equal(expected, restored)
        assert restored.shape == (2, 5)
        # Each row stands in the text as it is, from the beginning of a sequence.
        assert all(any(row == text[at : at + 5] for at in range(0, len(text), 4)) for row in restored.tolist())


def test_other_settings_text_or_ranks_are_refused_by_name_and_tell_whether_the_order_stays() -> None:
    checkpointing, ranks = part("checkpointing"), part("ranks")
    saved = settings_of()
    two, three = (ranks.Ranks(0, count, torch.device("cpu")) for count in (2, 3))
    progress = checkpointing.Progress(4, 64, [{}, {}], saved.deciding(), "digest")
    free = settings_of("output.report_every=1", "checkpoint.every=3", "shard.strategy=no_shard")
    assert progress.changes(free, two, "digest") == {}
    checkpointing.require_same({}, Path("step-4"))
    changes = progress.changes(settings_of("optimizer.lr=1.0"), three, "digest")
    with pytest.raises(ConfigError, match=r"step-4 .* optimizer.lr was 0.003 and is 1.0; there were 2 ranks and are 3"):
        checkpointing.require_same(changes, Path("step-4"))
    assert checkpointing.keeps_order(changes)
    for overrides, digest in ((["training.context=64"], "digest"), (["training.seed=1"], "digest"), ([], "other")):
        found = progress.changes(settings_of(*overrides), two, digest)
        assert len(found) == 1
        assert not checkpointing.keeps_order(found)


@pytest.mark.parametrize("experts", [0, 4])
def test_flops_are_those_that_torch_counts_in_a_forward_and_its_backward(experts: int) -> None:
    settings = settings_of(*TINY, f"model.num_local_experts={experts}")
    net = plain_llama(settings, 300)
    # Without a fused kernel every product is counted, masked or not.
    net.set_attn_implementation("eager")
    net.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counted:
        net(torch.randint(300, (3, 8)), use_cache=False).logits.sum().backward()
    assert counted.get_total_flops() == part("metrics").flops_per_token(net.config, 8) * 3 * 8


@pytest.mark.slow
# Of torch 2.15: what is selected is kept outside of these hooks.
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
def test_checkpointing_keeps_less_the_more_it_computes_again_and_changes_no_gradient() -> None:
    activations, settings = part("activations"), settings_of(*TINY, "model.num_hidden_layers=4")
    inputs = torch.randint(300, (3, 8), generator=torch.Generator().manual_seed(0))
    kept: dict[str, int] = {}
    flops: dict[str, int] = {}
    gradients: dict[str, list[torch.Tensor]] = {}
    for mode, every in (("none", 1), ("selective", 1), ("full", 2), ("full", 1)):
        net = plain_llama(settings, 300)
        net.set_attn_implementation("eager")
        wanted = part("settings").ActivationCheckpointing(mode=mode, every=every)
        activations.checkpoint_blocks(net.model.layers, wanted)
        name = f"{mode} {every}"
        kept[name] = 0

        def count(tensor: torch.Tensor, name: str = name) -> torch.Tensor:
            kept[name] += tensor.numel()
            return tensor

        with FlopCounterMode(display=False) as counted:
            with saved_tensors_hooks(count, lambda tensor: tensor):
                loss = net(inputs, labels=inputs, use_cache=False).loss
            loss.backward()
        flops[name] = counted.get_total_flops()
        gradients[name] = [parameter.grad for parameter in net.parameters()]
    assert kept["none 1"] > kept["full 2"] > kept["full 1"]
    # What is selected are the products, all of them.
    assert flops["none 1"] == flops["selective 1"] < flops["full 2"] < flops["full 1"]
    for each in gradients.values():
        for one, other in zip(each, gradients["none 1"], strict=True):
            assert torch.equal(one, other)


@pytest.mark.slow
def test_a_dry_run_says_what_a_rank_of_many_needs_and_what_does_not_fit(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = part("train").main
    asked = ["--config", str(CONFIG)]
    for each in (*TINY, "data.vocabulary=300", "data.files=*.txt", "data.held_out=held.txt", "training.batch=64"):
        asked += ["--set", each]
    assert main([*asked, "--dry-run", "16"]) == 0
    said = capsys.readouterr().out
    count = sum(parameter.numel() for parameter in plain_llama(settings_of(*TINY), 300).parameters())
    assert f"{count:,} parameters in 3 units" in said
    assert "2 files to learn from, 1 held out" in said
    piped = ["parallel.pp=2", "checkpoint.asynchronous=false", "output.export=false"]
    assert main([*asked, *(word for each in piped for word in ("--set", each)), "--dry-run", "16"]) == 0
    said = capsys.readouterr().out
    # The root of each stage is a unit beside its block.
    assert f"{count:,} parameters in 4 units" in said
    assert "16 rank(s) (pp 2 x edp 8)" in said
    assert main([*asked, "--dry-run", "3"]) == 2
    assert "training.batch 64 is no multiple of 12" in capsys.readouterr().err
    assert main([*asked, "--set", "data.files=*.md", "--dry-run", "16"]) == 2
    assert "no file matches '*.md'" in capsys.readouterr().err
