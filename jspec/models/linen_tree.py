"""Parameters of linen modules that declare them all in a method `declare`, in place of a forward."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn


def declared_params(module: nn.Module, key: Any) -> Any:
    """Random parameters, each by its own initialiser."""
    return module.init(key, method="declare")["params"]


def declared_shapes(module: nn.Module) -> Any:
    """The parameters as shapes and dtypes; allocates nothing."""
    return jax.eval_shape(lambda key: declared_params(module, key), jax.random.key(0))


def check_params(params: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise ValueError for the first leaf of `params` that is missing, unknown or shaped other than `expected` says."""
    found = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    wanted = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(expected)}
    for name in sorted(set(found) ^ set(wanted)):
        what = "is not a parameter of this config" if name in found else "is missing"
        raise ValueError(f"params{name} {what}: build params with llama_weights.fuse and the same config")
    for name, leaf in wanted.items():
        have = found[name]
        if have.shape != leaf.shape or have.dtype != leaf.dtype:
            raise ValueError(
                f"params{name} is {have.dtype}{list(have.shape)}; this config and dtype want {leaf.dtype}{list(leaf.shape)}"
            )
