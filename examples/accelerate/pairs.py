"""Made-up pairs of sentences, of which half say the same in other words, and a BERT that is small enough for a CPU."""

from __future__ import annotations

import random

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

#: Each row is one meaning: any of its words may stand for any other.
MEANINGS = (
    ("big", "large", "huge"),
    ("small", "little", "tiny"),
    ("dog", "hound", "puppy"),
    ("cat", "kitten", "tomcat"),
    ("runs", "races", "dashes"),
    ("sleeps", "rests", "naps"),
    ("house", "home", "cottage"),
    ("road", "street", "lane"),
    ("near", "beside", "by"),
    ("quickly", "fast", "swiftly"),
)
PADDING, FIRST, SEPARATOR = range(3)
WORDS = {word: 3 + number for number, word in enumerate(word for row in MEANINGS for word in row)}

Example = tuple[list[int], list[int], int]


def examples(count: int, seed: int) -> list[Example]:
    """Token ids of two sentences, and 1 where they mean the same."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        meanings = draw.sample(MEANINGS, draw.randint(3, 6))
        other = meanings if number % 2 else draw.sample(MEANINGS, draw.randint(3, 6))
        first, second = ([WORDS[draw.choice(row)] for row in rows] for rows in (meanings, other))
        found.append((first, second, number % 2))
    return found


def collate(batch: list[Example]) -> dict[str, torch.Tensor]:
    """The model's inputs, padded to the longest of ``batch``."""
    rows = [[FIRST, *first, SEPARATOR, *second, SEPARATOR] for first, second, _ in batch]
    kinds = [[0] * (len(first) + 2) + [1] * (len(second) + 1) for first, second, _ in batch]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [PADDING] * (longest - len(row)) for row in rows])
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != PADDING).long(),
        "token_type_ids": torch.tensor([row + [0] * (longest - len(row)) for row in kinds]),
        "labels": torch.tensor([label for _, _, label in batch]),
    }


def loaders(count: int, batch_size: int) -> tuple[DataLoader[Example], DataLoader[Example]]:
    """Batches of ``count`` examples to train on, in another order in each epoch, and of others to evaluate with."""
    # Beginning to iterate draws from it. From the default generator it would change what a run draws that resumes in
    # the middle of an epoch.
    order = torch.Generator().manual_seed(1)
    return (
        DataLoader(examples(count, seed=1), batch_size, shuffle=True, collate_fn=collate, generator=order),
        DataLoader(examples(202, seed=2), 2 * batch_size, collate_fn=collate, generator=order),
    )


def small_bert(dropout: float) -> BertForSequenceClassification:
    """With random weights."""
    config = BertConfig(
        vocab_size=3 + len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=2,
    )
    return BertForSequenceClassification(config)
