"""What the report compiles: every kernel at shapes of real models, and JAX's public kernel at the same ones."""

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads of a model's attention."""

    name: str
    num_kv_heads: int
    group: int
    head_dim: int


EIGHT, SMALL = "Llama-3.1-8B, Qwen3-8B", "SmolLM2-135M"

SHAPES = {
    shape.name: shape
    for shape in (
        Shape(EIGHT, 8, 4, 128),
        Shape(SMALL, 3, 3, 64),
        *(Shape(f"{EIGHT} over {n} devices", 8 // n, 4, 128) for n in (2, 4, 8)),
    )
}

VERIFY, PEER, PREFILL, WRITE, MOVE = (
    "verify_attention",
    "jax ragged_paged_attention",
    "prefill_attention",
    "paged_kv_write",
    "kv_move",
)


@dataclasses.dataclass(frozen=True)
class KernelJob:
    """One kernel to compile: 64 rows of 4096 positions."""

    kernel: str
    shape: str
    width: int
    """Query tokens a row; of `paged_kv_write` and `kv_move` the tokens a row writes or moves."""
    page_size: int = 128
    dtype: str = "bfloat16"
    tree: bool = False
    window: int | None = None
    soft_cap: float | None = None
    block_len: int | None = None
    """Tokens of a block; None: what the kernel's table says."""
    heads_at_once: int | None = None
    batch: int = 64
    context: int = 4096

    @property
    def label(self) -> str:
        marks = [f"W={self.width}", f"page {self.page_size}"]
        marks += ["tree"] * self.tree + [f"window {self.window}"] * bool(self.window)
        marks += ["soft cap"] * bool(self.soft_cap) + [self.dtype] * (self.dtype != "bfloat16")
        return ", ".join(marks)


@dataclasses.dataclass(frozen=True)
class StepJob:
    """All programs of one worker on one model: 16 rows of 4096 positions."""

    model: str
    worker: str
    batch: int = 16
    context: int = 4096
    page_size: int = 128
    prefill_tokens: int = 1024


VERIFIES = {"plain": 1, "verify of 8": 8}
"""Workers that verify so many given tokens and do nothing else: what a verify costs."""


RANKS = {"ngram on 4 ranks": 4}
"""Workers on so many devices with requests, and a KV pool, of their own each; `batch` is that of one."""


def shape_of(model: str, devices: int) -> str:
    """The name of the heads that one device has of a model."""
    whole = SMALL if model == SMALL else EIGHT
    return whole if devices == 1 else f"{whole} over {devices} devices"


STEP_MODELS = (SMALL, "Llama-3.1-8B", "Qwen3-8B")

STEP_WORKERS = (
    *(
        *VERIFIES,
        "ngram",
        "ngram-corpus",
        "eagle3 chain of 3",
        "eagle3 tree of 8",
        "multi-layer",
        "dflash",
        "dspark compact",
    ),
    *("frozen-kv tree of 8", "uno of 4"),
    *RANKS,
)


def step_jobs(models: str = "", workers: str = "") -> list[StepJob]:
    """Every worker of a list such as "plain,ngram" on every model of another; "" is all of them.

    Raises:
      ValueError: a name is unknown.
    """
    chosen = (_named("models", models, STEP_MODELS), _named("workers", workers, STEP_WORKERS))
    return [StepJob(model, worker) for model, worker in itertools.product(*chosen)]


def _named(option: str, names: str, known: tuple[str, ...]) -> list[str]:
    chosen = [name.strip() for name in names.split(",") if name.strip()] or list(known)
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"{option}={unknown[0]!r} is unknown: choose from {', '.join(known)}")
    return chosen


def kernel_jobs(*, quick: bool) -> list[KernelJob]:
    """All kernels; `quick`: each once."""
    if quick:
        return [
            KernelJob(VERIFY, EIGHT, 8),
            KernelJob(VERIFY, SMALL, 5, tree=True, dtype="float32", page_size=16),
            KernelJob(PREFILL, EIGHT, 256),
            KernelJob(WRITE, EIGHT, 8),
            KernelJob(MOVE, EIGHT, 4),
        ]
    jobs = [KernelJob(VERIFY, EIGHT, width) for width in (1, 4, 8, 16, 32)]
    jobs += [KernelJob(VERIFY, EIGHT, width, page_size=64) for width in (8, 16)]
    jobs += [
        KernelJob(VERIFY, EIGHT, 8, tree=True),
        KernelJob(VERIFY, EIGHT, 8, window=1024),
        KernelJob(VERIFY, EIGHT, 8, soft_cap=30.0),
        KernelJob(VERIFY, EIGHT, 8, page_size=16),
        KernelJob(VERIFY, EIGHT, 8, page_size=256),
    ]
    jobs += [KernelJob(VERIFY, SMALL, width) for width in (1, 8, 16)]
    jobs += [KernelJob(VERIFY, SMALL, 8, dtype="float32")]
    jobs += [KernelJob(PEER, EIGHT, width) for width in (1, 4, 8, 16)]
    jobs += [KernelJob(PEER, EIGHT, 8, page_size=64), KernelJob(PEER, SMALL, 8)]
    for shape in (EIGHT, SMALL):
        jobs += [KernelJob(PREFILL, shape, 256), KernelJob(WRITE, shape, 8), KernelJob(MOVE, shape, 4)]
    return jobs
