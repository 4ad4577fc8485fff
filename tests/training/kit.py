"""A target whose text is a table, text that it would write, and its features on disk."""

import functools

import numpy as np

from jspec.models.eagle_draft import EagleConfig
from jspec.models.tiny import markov_target
from jspec.training.features import write_features
from jspec.training.options import TrainOptions
from jspec.training.shards import Sequences, open_shards
from jspec.training.text import TextSequence

VOCAB = 16
CAPTURES = (0, 1)
PROMPT_LEN = 3


@functools.cache
def table() -> tuple[int, ...]:
    return tuple(np.random.default_rng(0).permutation(VOCAB).tolist())


@functools.cache
def target():
    return markov_target(table(), num_layers=2)


def answers(count: int, *, length: int = 20, seed: int = 0) -> list[TextSequence]:
    """A random prompt, then what `target` says."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        tokens = rng.integers(0, VOCAB, PROMPT_LEN).tolist()
        while len(tokens) < length:
            tokens.append(table()[tokens[-1]])
        found.append(TextSequence(np.array(tokens, np.int32), PROMPT_LEN))
    return found


def store(folder, sequences, **options) -> Sequences:
    """Features of `sequences`, written and read back."""
    write_features(folder, target(), sequences, model="markov", capture_layers=CAPTURES, forward_tokens=128, **options)
    return reopen(folder)


def reopen(folder, **changes) -> Sequences:
    expected = {"model": "markov", "capture_layers": CAPTURES, "hidden_size": VOCAB, "vocab_size": VOCAB}
    return open_shards(folder, **{**expected, **changes})


def draft_config(kind: str = "eagle3", **changes) -> EagleConfig:
    own = {"capture_layers": CAPTURES} if kind == "eagle3" else {"num_modules": 2} if kind == "multi-layer" else {}
    sizes = {"vocab_size": VOCAB, "draft_vocab_size": VOCAB, "hidden_size": VOCAB, "intermediate_size": 8}
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "context_len": 64}
    return EagleConfig(kind=kind, **{**sizes, **heads, **own, **changes})


def train_options(**changes) -> TrainOptions:
    defaults = {"steps": 40, "batch_size": 8, "seq_len": 20, "learning_rate": 1e-2, "warmup_steps": 4}
    intervals = {"held_out_every": 5, "eval_every": 1000, "checkpoint_every": 1000, "log_every": 1}
    return TrainOptions(**{**defaults, **intervals, "unroll_schedule": ((0, 2),), **changes})


def few_functions() -> tuple[str, ...]:
    """In place of `stdlib_functions`, which takes ten seconds to find thousands."""
    return tuple(f'def f{i}(x):\n    """Return what is {i} more than x."""' for i in range(20))
