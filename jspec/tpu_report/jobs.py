"""What the report compiles: every kernel at shapes of real models, and JAX's public kernel at the same ones."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads of a model's attention."""

    name: str
    num_kv_heads: int
    group: int
    head_dim: int


SHAPES = {shape.name: shape for shape in (Shape("Llama-3.1-8B, Qwen3-8B", 8, 4, 128), Shape("SmolLM2-135M", 3, 3, 64))}

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


def step_jobs(*, quick: bool) -> list[StepJob]:
    """Every worker on every model; `quick`: one of each."""
    if quick:
        return [StepJob("SmolLM2-135M", "eagle3, tree of 8")]
    models = ("SmolLM2-135M", "Llama-3.1-8B", "Qwen3-8B")
    workers = ("plain", "ngram", "eagle3, chain of 3", "eagle3, tree of 8", "multi-layer")
    return [StepJob(model, worker) for model in models for worker in workers]


def kernel_jobs(*, quick: bool) -> list[KernelJob]:
    """All kernels; `quick`: each once."""
    eight, small = SHAPES
    if quick:
        return [
            KernelJob(VERIFY, eight, 8),
            KernelJob(VERIFY, small, 5, tree=True, dtype="float32", page_size=16),
            KernelJob(PREFILL, eight, 256),
            KernelJob(WRITE, eight, 8),
            KernelJob(MOVE, eight, 4),
        ]
    jobs = [KernelJob(VERIFY, eight, width) for width in (1, 4, 8, 16, 32)]
    jobs += [KernelJob(VERIFY, eight, width, page_size=64) for width in (8, 16)]
    jobs += [
        KernelJob(VERIFY, eight, 8, tree=True),
        KernelJob(VERIFY, eight, 8, window=1024),
        KernelJob(VERIFY, eight, 8, soft_cap=30.0),
        KernelJob(VERIFY, eight, 8, page_size=16),
        KernelJob(VERIFY, eight, 8, page_size=256),
    ]
    jobs += [KernelJob(VERIFY, small, width) for width in (1, 8, 16)]
    jobs += [KernelJob(VERIFY, small, 8, dtype="float32")]
    jobs += [KernelJob(PEER, eight, width) for width in (1, 4, 8, 16)]
    jobs += [KernelJob(PEER, eight, 8, page_size=64), KernelJob(PEER, small, 8)]
    for shape in (eight, small):
        jobs += [KernelJob(PREFILL, shape, 256), KernelJob(WRITE, shape, 8), KernelJob(MOVE, shape, 4)]
    return jobs
