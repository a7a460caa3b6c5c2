"""Tokens of the text, made once and then mapped into memory."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from documents import Files, documents
from polyshard.errors import ConfigError
from settings import Data
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

#: Stands between documents, where a tokenizer is trained here.
END_OF_TEXT = "<|end_of_text|>"
#: Names under which other tokenizers have such a token.
_ENDS = (END_OF_TEXT, "<|endoftext|>", "</s>", "<eos>", "[EOS]")
#: Pieces of text that the tokenizer's threads share.
_TOGETHER = 32
_PARTS = ("train", "held_out")
_MANIFEST = "manifest.json"
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class TokenFile:
    """One part of the tokens, on disk: each document, and the end-of-text token behind it."""

    path: Path
    dtype: str
    """uint16 or uint32."""

    def map(self) -> np.memmap[Any, np.dtype[Any]]:
        """``[tokens]``; read from disk as it is looked at."""
        return np.memmap(self.path, self.dtype, mode="r")


@dataclass(frozen=True)
class Tokens:
    train: TokenFile
    held_out: TokenFile
    """From other files."""
    tokenizer: Tokenizer
    end_of_text: int
    digest: str
    """Says whether two have the same tokens."""

    @classmethod
    def read(cls, folder: Path) -> Tokens:
        """What ``prepare`` left in ``folder``. Raises ``ConfigError`` where this host does not see it."""
        if not (folder / _MANIFEST).is_file():
            raise ConfigError(f"{folder} is not there on this host. Put data.cache on a file system of all hosts.")
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        train, held_out = (TokenFile(folder / f"{part}.bin", manifest["dtype"]) for part in _PARTS)
        tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER))
        return cls(train, held_out, tokenizer, manifest["end_of_text"], manifest["digest"])

    @property
    def vocabulary(self) -> int:
        return int(self.tokenizer.get_vocab_size())


def prepare(data: Data) -> Path:
    """Tokenise the files of ``data`` where that was not done yet; returns the folder. One process calls it.

    Raises ``ConfigError`` where files or tokenizer cannot serve.
    """
    files = Files.find(data)
    given = Path(data.tokenizer) if data.tokenizer else None
    if given is not None and not given.is_file():
        raise ConfigError(f"data.tokenizer {data.tokenizer!r} is no file. Name a tokenizer.json, or leave it empty.")
    made_by = data.vocabulary if given is None else hashlib.sha256(given.read_bytes()).hexdigest()
    folder = Path(data.cache) / files.fingerprint(made_by)
    if (folder / _MANIFEST).is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Under its name only once it is whole, whatever ends this process.
    temporary = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    try:
        tokenizer = _train(files, data.vocabulary) if given is None else _load(given)
        _write(temporary, files, tokenizer, given)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _train(files: Files, vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chain.from_iterable(documents(files.train)), trainer)
    return tokenizer


def _load(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # The package raises nothing narrower.
        raise ConfigError(f"data.tokenizer {path} cannot be read: {error}.") from error


def _end_of_text(tokenizer: Tokenizer, given: Path | None) -> int:
    for name in _ENDS:
        token = tokenizer.token_to_id(name)
        if token is not None:
            return int(token)
    raise ConfigError(f"data.tokenizer {given} has no token that ends a text. Known names: {', '.join(_ENDS)}.")


def _write(folder: Path, files: Files, tokenizer: Tokenizer, given: Path | None) -> None:
    end = _end_of_text(tokenizer, given)
    dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32)
    digest = hashlib.sha256()
    counts = {}
    for part, paths in zip(_PARTS, (files.train, files.held_out), strict=True):
        counts[part] = 0
        with (folder / f"{part}.bin").open("wb") as file:
            for tokens in _encoded(documents(paths), tokenizer, end):
                written = np.asarray(tokens, dtype).tobytes()
                file.write(written)
                digest.update(written)
                counts[part] += len(tokens)
        digest.update(part.encode())
    tokenizer.save(str(folder / _TOKENIZER))
    manifest = {"dtype": dtype.name, "end_of_text": end, "digest": digest.hexdigest(), "tokens": counts}
    (folder / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def _encoded(texts: Iterable[Iterable[str]], tokenizer: Tokenizer, end: int) -> Iterator[list[int]]:
    # None is the end of a document.
    pieces = (piece for text in texts for piece in chain(text, [None]))
    while batch := list(islice(pieces, _TOGETHER)):
        written = [piece for piece in batch if piece is not None]
        encoded = iter(tokenizer.encode_batch_fast(written, add_special_tokens=False))
        for piece in batch:
            yield [end] if piece is None else next(encoded).ids
