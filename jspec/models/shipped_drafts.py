"""Drafts that come with jspec."""

import pathlib

from jspec.models.loading import SMOLLM2

FOLDER = pathlib.Path(__file__).parent.parent / "drafts"
SHIPPED = {
    (SMOLLM2, "eagle3"): "smollm2-eagle3",
    (SMOLLM2, "multi-layer-eagle"): "smollm2-multi-layer",
    (SMOLLM2, "dflash"): "smollm2-dflash",
    (SMOLLM2, "dspark"): "smollm2-dspark",
    (SMOLLM2, "frozen-kv-mtp"): "smollm2-frozen-kv",
    (SMOLLM2, "uno"): "smollm2-uno",
}
"""(model, algorithm) -> folder. Each holds a licence and a record of its training."""


def best_algorithm(model: str) -> str:
    """What decodes `model` fastest with nothing else given: "eagle3" where a draft comes with jspec, else "ngram"."""
    return "eagle3" if (model, "eagle3") in SHIPPED else "ngram"


def find_draft(algorithm: str, model: str) -> pathlib.Path:
    """The directory of the draft that comes with jspec for this model.

    Raises:
      ValueError: there is none.
    """
    name = SHIPPED.get((model, algorithm))
    if name is None:
        have = ", ".join(f"{m} with {a}" for m, a in SHIPPED)
        raise ValueError(
            f"draft=None, but no draft comes with jspec for model={model!r} and algorithm={algorithm!r} (there is one for {have}): "
            "give the directory of one, or train it with `jspec train`"
        )
    return FOLDER / name
