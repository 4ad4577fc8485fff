"""How wide and how deep a draft goes, and every rule about it."""

import dataclasses

from jspec.config import MAX_VERIFY_WIDTH


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleSizes:
    """Sizes of a draft chain (`topk` 1) or tree.

    Raises:
        ValueError: naming the field, its value, the rule.
    """

    num_steps: int = 3
    """`S`: deepest draft."""
    topk: int = 1
    """`K`: children a node is given, and nodes of a level that are expanded."""
    num_draft_tokens: int | None = None
    """`W`: tokens one verify checks, the pending one included. None: `num_steps + 1` for a chain; for a tree all of it, at most 8."""
    depths: tuple[int, ...] = ()
    """Depths a chain may be run at, ascending, ending with `num_steps`: chosen step by step where drafting is adaptive. 0 drafts nothing. (): `num_steps`."""
    min_draft_prob: float = 0.0
    """A chain ends before the first draft that the draft model finds less likely than this, and a step in which no row drafts is a plain step: for devices
    where a wider verify costs more. 0: it never ends early. (Assisted generation's confidence threshold in Hugging Face transformers; `--draft-p-min` of
    llama.cpp; AdaEDL, arXiv 2410.18351.)"""

    def __post_init__(self):
        if self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps} must be at least 1: use algorithm 'plain' to draft nothing")
        if self.topk < 1:
            raise ValueError(f"topk={self.topk} must be at least 1; 1 drafts a chain")
        most = 1 + self.topk + (self.num_steps - 1) * self.topk**2 if self.topk > 1 else self.num_steps + 1
        width = (most if self.topk == 1 else min(most, 8)) if self.num_draft_tokens is None else self.num_draft_tokens
        object.__setattr__(self, "num_draft_tokens", width)
        if self.topk == 1 and width != most:
            raise ValueError(
                f"num_draft_tokens={width} must be num_steps + 1 = {most} for a chain (topk=1): leave it out, or raise topk"
            )
        if not 2 <= width <= min(most, MAX_VERIFY_WIDTH):
            raise ValueError(
                f"num_draft_tokens={width} must lie in [2, {min(most, MAX_VERIFY_WIDTH)}]: a tree of num_steps={self.num_steps} and "
                f"topk={self.topk} has {most} nodes with the pending one, and at most {MAX_VERIFY_WIDTH} can be verified"
            )
        if (self.num_steps - 1) * self.topk > MAX_VERIFY_WIDTH:
            raise ValueError(
                f"(num_steps - 1) * topk = {(self.num_steps - 1) * self.topk} exceeds {MAX_VERIFY_WIDTH}, the nodes whose ancestors fit one word: lower one"
            )
        if not 0 <= self.min_draft_prob <= 1:
            raise ValueError(
                f"min_draft_prob={self.min_draft_prob} must lie in [0, 1]; 0 always drafts to the full depth"
            )
        if self.min_draft_prob and self.topk > 1:
            raise ValueError(
                f"min_draft_prob={self.min_draft_prob} needs topk=1, got topk={self.topk}: only a chain ends early"
            )
        object.__setattr__(self, "depths", tuple(self.depths) or (self.num_steps,))
        if self.depths[-1] != self.num_steps or list(self.depths) != sorted(set(self.depths)) or self.depths[0] < 0:
            raise ValueError(f"depths={self.depths} must ascend from at least 0 to num_steps={self.num_steps}")
        if self.topk > 1 and len(self.depths) > 1:
            raise ValueError(f"depths={self.depths} needs topk=1, got topk={self.topk}: only a chain changes its depth")

    @property
    def verify_width(self) -> int:
        """`W`."""
        return self.num_draft_tokens or 0

    @property
    def alloc_len(self) -> int:
        """1 + the highest offset past the frontier that a step writes: the verify's rows, and the draft's nodes."""
        return max(self.verify_width, (self.num_steps - 1) * self.topk)
