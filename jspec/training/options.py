"""How a draft is trained."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Sizes, schedule and intervals of one training run.

    Raises:
        ValueError: naming the field, its value and the rule.
    """

    steps: int = 1000
    batch_size: int = 8
    """Rows of a batch; a multiple of the number of devices."""
    seq_len: int = 128
    """Tokens of a row; longer sequences are cut."""
    learning_rate: float = 3e-4
    """At its highest: it rises over `warmup_steps`, then falls along a cosine to a tenth."""
    warmup_steps: int = 50
    weight_decay: float = 0.01
    """Of matrices; norms and biases are left alone."""
    clip_norm: float = 1.0
    """Longest gradient."""
    unroll_schedule: tuple[tuple[int, int], ...] = ((0, 3),)
    """(first step, depths of the chain): a longer chain costs more and teaches more. Not for "multi-layer", where every module is a depth."""
    decay: float = 0.9
    """Weight of depth k is decay ** k."""
    max_starts: int | None = None
    """Chains a batch trains on at most; None: one from each row. Prompts and padding start none, so fewer than all rows cost less and lose little."""
    copy_heads: int = 0
    """Query heads, the first ones, that are taught to copy (`jspec.training.copying`); whole groups of one key-value head."""
    copy_weight: float = 0.3
    """Weight of that lesson beside the loss of the tokens."""
    kl_weight: float = 0.0
    """Of "uno": weight of the KL divergence from the target's distribution beside the total variation, whose gradient is small while the two hardly meet."""
    include_prompt: bool = False
    """Train on the rows of prompts too."""
    held_out_every: int = 20
    """Every n-th different prompt is held out."""
    eval_batches: int = 8
    """Held-out batches of an evaluation while training; the last one takes them all."""
    log_every: int = 10
    eval_every: int = 200
    checkpoint_every: int = 200
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "unroll_schedule", tuple((int(a), int(b)) for a, b in self.unroll_schedule))
        at_least_1 = ("steps", "batch_size", "eval_batches", "log_every", "eval_every", "checkpoint_every")
        for name, low in (
            *((name, 1) for name in at_least_1),
            ("seq_len", 3),
            ("warmup_steps", 0),
            ("seed", 0),
            ("copy_heads", 0),
            ("copy_weight", 0),
            ("kl_weight", 0),
        ):
            if getattr(self, name) < low:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {low}")
        if self.max_starts is not None and self.max_starts < 1:
            raise ValueError(f"max_starts={self.max_starts} must be at least 1, or None for every row")
        for name in ("learning_rate", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay={self.weight_decay} must not be negative")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay} must lie in (0, 1]")
        if self.held_out_every < 2:
            raise ValueError(
                f"held_out_every={self.held_out_every} must be at least 2: something must be left to train on"
            )
        starts = [start for start, _ in self.unroll_schedule]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)) or any(n < 1 for _, n in self.unroll_schedule):
            raise ValueError(
                f"unroll_schedule={self.unroll_schedule} must be pairs of an ascending first step, from 0, and a depth of at least 1"
            )

    def unroll_at(self, step: int) -> int:
        """Depths of the chain at `step`."""
        return [depth for start, depth in self.unroll_schedule if start <= step][-1]

    @property
    def max_unroll(self) -> int:
        return max(depth for _, depth in self.unroll_schedule)


def parse_unroll_schedule(text: str) -> tuple[tuple[int, int], ...]:
    """`"3"` is three depths from the start; `"0:1,500:3"` one, and three from step 500 on.

    Raises:
        ValueError: it is neither.
    """
    try:
        if ":" not in text:
            return ((0, int(text)),)
        pairs = (part.split(":") for part in text.split(","))
        return tuple((int(start), int(depth)) for start, depth in pairs)
    except ValueError:
        raise ValueError(
            f'unroll={text!r} must be a depth, as "3", or first steps and depths, as "0:1,500:3"'
        ) from None
