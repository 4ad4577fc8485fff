"""What to train, on what, and where to put it."""

import dataclasses
import pathlib

from jspec.bench.prompts import PROMPT_SETS
from jspec.config import MAX_VERIFY_WIDTH
from jspec.models.block_draft import KINDS as BLOCK_KINDS
from jspec.models.eagle_draft import KINDS as EAGLE_KINDS
from jspec.models.frozen_kv_draft import FrozenKVConfig
from jspec.models.tensor_files import check_storage
from jspec.training.options import TrainOptions
from jspec.training.text import TextOptions

FROZEN_KV, UNO = FrozenKVConfig.kind, "uno"
_OWN_LAYERS = (*EAGLE_KINDS, *BLOCK_KINDS, FROZEN_KV)
KINDS = (*_OWN_LAYERS, UNO)
"""Kinds of draft that can be trained."""
ONLY_FOR = {
    "draft_vocab_size": _OWN_LAYERS,
    "intermediate_size": _OWN_LAYERS,
    "capture_layers": ("eagle3", *BLOCK_KINDS),
    "num_modules": ("multi-layer",),
    "chained": ("multi-layer",),
    "num_layers": (*BLOCK_KINDS, FROZEN_KV),
    "hidden_size": (FROZEN_KV,),
    "block_size": (*BLOCK_KINDS, UNO),
    "mask_token_id": BLOCK_KINDS,
    "window": BLOCK_KINDS,
    "markov_rank": ("dspark",),
    "markov_head": ("dspark",),
    "rank": (UNO,),
    "alpha": (UNO,),
}
"""Fields of `TrainJob` that shape only some kinds of draft."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainJob:
    """What to train, on what, and where to put it.

    Raises:
        ValueError: naming the field, its value and the rule.
    """

    kind: str
    """One of `KINDS`: see `EagleConfig`, `BlockDraftConfig`, `FrozenKVConfig` and, of "uno", `LoraConfig`."""
    work_dir: pathlib.Path
    out: pathlib.Path | None = None
    """Directory of the draft; by default `draft` in `work_dir`."""
    text: TextOptions = dataclasses.field(default_factory=TextOptions)
    text_files: tuple[str, ...] = ()
    features: pathlib.Path | None = None
    """Shards that exist already: then no text is made and the target is not run."""
    unseen: tuple[str, ...] | None = None
    """Prompt sets that training must not see. None: every one that is installed."""
    capture_layers: tuple[int, ...] | None = None
    """Of "eagle3", "dflash" and "dspark"; by default `default_capture_layers`."""
    draft_vocab_size: int = 8192
    """At most the target's vocabulary is used."""
    intermediate_size: int | None = None
    """By default the target's."""
    num_modules: int = 3
    """Of "multi-layer"."""
    chained: bool = False
    """Of "multi-layer"."""
    num_layers: int = 2
    """Of "dflash", "dspark" and "frozen-kv-mtp"."""
    hidden_size: int = 256
    """Of "frozen-kv-mtp"."""
    block_size: int = 8
    """Of "dflash" and "uno", the pending token among them, and of "dspark", which proposes so many."""
    mask_token_id: int = 0
    """Of "dflash" and "dspark": a token that no text holds."""
    window: int | None = None
    """Of "dflash" and "dspark": positions that a row sees, see `BlockDraftConfig.window`. None: all."""
    markov_rank: int = 32
    """Of "dspark"."""
    markov_head: str = "vanilla"
    """Of "dspark"."""
    rank: int = 16
    """Of "uno"."""
    alpha: float = 32.0
    """Of "uno": what its adapter adds is multiplied by `alpha / rank`."""
    init: pathlib.Path | None = None
    """A draft to start from instead of the target's own layer: same sizes and vocabulary."""
    storage: str = "float32"
    options: TrainOptions = dataclasses.field(default_factory=TrainOptions)

    def __post_init__(self):
        check_storage(self.storage)
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} must be one of {', '.join(KINDS)}")
        if self.features is not None and self.text_files:
            raise ValueError(
                f"features={str(self.features)!r} and text_files={self.text_files} both say what to train on: give one of them"
            )
        if self.kind == UNO:
            for name, low in (("rank", 1), ("block_size", 2)):
                if getattr(self, name) < low:
                    raise ValueError(f"{name}={getattr(self, name)} must be at least {low} for an adapter of UNO")
            if self.block_size > MAX_VERIFY_WIDTH:
                raise ValueError(
                    f"block_size={self.block_size} must be at most {MAX_VERIFY_WIDTH} for UNO: no more can be verified"
                )
            if not self.alpha > 0:
                raise ValueError(f"alpha={self.alpha} must be positive: an adapter without it changes nothing")
        if self.options.copy_heads and self.kind not in EAGLE_KINDS:
            raise ValueError(
                f"copy_heads={self.options.copy_heads} must be 0 for {self.kind!r}: its heads are not taught so"
            )
        for name in self.unseen or ():
            if name not in PROMPT_SETS:
                raise ValueError(f"unseen={name!r} is unknown: choose among {', '.join(PROMPT_SETS)}")
