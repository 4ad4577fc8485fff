"""Models from a Hugging Face directory: config.json, *.safetensors, tokenizer.json."""

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import safetensors
import tokenizers
from jax.sharding import Mesh

from jspec.models import llama_weights
from jspec.models.huggingface_config import ARCHITECTURES, HYBRIDS, architecture_of, config_from_huggingface
from jspec.models.hybrid import HybridConfig
from jspec.models.hybrid_files import IGNORED, fuse_hybrid, hybrid_config, hybrid_tensors
from jspec.models.json_files import read_json
from jspec.models.llama import LlamaConfig
from jspec.models.parallel import num_devices, num_ranks
from jspec.models.tokenizer import Tokenizer

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F32", "F16", "BF16")


def load_huggingface(
    path: str | os.PathLike[str], dtype: Any, mesh: Mesh | None = None
) -> tuple[LlamaConfig | HybridConfig, dict[str, Any], Tokenizer | None]:
    """(config, params of `Llama(config, dtype)` or of `Hybrid(config, dtype)`, tokenizer or None where the directory has none).

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or the model asks for something that is not implemented; no weights were read by then.
    """
    folder = pathlib.Path(path)
    source, raw = str(folder / "config.json"), _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json", optional=True)
    eos = generation.get("eos_token_id")
    eos_token_ids = _as_ids(raw.get("eos_token_id") if eos is None else eos)
    architecture = architecture_of(source, raw, (*ARCHITECTURES, *HYBRIDS))
    if architecture in HYBRIDS:
        _refuse_mesh(architecture, mesh)
        hybrid = hybrid_config(source, raw, eos_token_ids)
        where = _locate_tensors(folder)
        expected = hybrid_tensors(architecture, hybrid)
        llama_weights.check_shapes(
            str(folder), _shapes(where, tied=hybrid.base.tie_embeddings, ignored=IGNORED), expected
        )
        tokenizer = tokenizer_from_huggingface(folder, eos_token_ids)
        return hybrid, fuse_hybrid(architecture, hybrid, _reader(where), dtype), tokenizer

    config = config_from_huggingface(source, raw, eos_token_ids)
    where = _locate_tensors(folder)
    llama_weights.check_tensors(str(folder), _shapes(where, tied=config.tie_embeddings), config)
    tokenizer = tokenizer_from_huggingface(folder, eos_token_ids)
    return config, llama_weights.fuse(config, _reader(where), dtype, mesh), tokenizer


def _reader(where: Mapping[str, pathlib.Path]) -> Callable[[str], np.ndarray]:
    def read(name: str) -> np.ndarray:
        with _open(where[name]) as tensors:
            return np.asarray(tensors.get_tensor(name))

    return read


def _refuse_mesh(architecture: str, mesh: Mesh | None) -> None:
    for field, count in (("tensor_parallel", num_devices(mesh)), ("data_parallel", num_ranks(mesh))):
        if count > 1:
            raise ValueError(
                f"{field}={count} is not implemented for {architecture}, which has recurrent layers: leave it out"
            )


def tokenizer_from_huggingface(folder: pathlib.Path, eos_token_ids: tuple[int, ...]) -> Tokenizer | None:
    """The tokenizer with its chat template, or None where there is no tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} is damaged: {error}; download it again") from error
    settings = _read_json(folder / "tokenizer_config.json", optional=True)
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text("utf-8") if template_file.exists() else settings.get("chat_template")
    if isinstance(template, list):  # named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return Tokenizer(
        backend=backend,
        eos_token_ids=eos_token_ids,
        chat_template=template,
        bos_token=_token_text(settings.get("bos_token")),
        eos_token=_token_text(settings.get("eos_token")),
    )


def _locate_tensors(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Tensor name -> the safetensors file that holds it."""
    index, single = folder / _INDEX, folder / _SINGLE
    if index.exists():
        files = sorted({folder / file for file in _read_json(index).get("weight_map", {}).values()})
    elif single.exists():
        files = [single]
    else:
        raise FileNotFoundError(
            f"{folder} has neither {_SINGLE} nor {_INDEX}: weights must be safetensors; convert other formats with transformers' save_pretrained"
        )
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"{file} is missing, but {index} names it: complete the download")
    return {name: file for file in files for name in _names(file)}


def _names(file: pathlib.Path) -> list[str]:
    with _open(file) as tensors:
        return list(tensors.keys())


def _shapes(
    where: Mapping[str, pathlib.Path], *, tied: bool, ignored: tuple[str, ...] = ()
) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for file in sorted(set(where.values())):
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                if name.endswith("rotary_emb.inv_freq") or name.startswith(ignored):  # old exports; computed here
                    continue
                if name == llama_weights.HEAD and tied:  # some exports store the tied head a second time
                    continue
                tensor = tensors.get_slice(name)
                if tensor.get_dtype() not in _FLOATS:
                    raise ValueError(
                        f"{file}: tensor {name!r} has dtype {tensor.get_dtype()}; it must be one of {_FLOATS}: use the unquantised model"
                    )
                shapes[name] = tuple(tensor.get_shape())
    return shapes


def _open(file: pathlib.Path):
    try:
        return safetensors.safe_open(str(file), framework="numpy")
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{file} is truncated or damaged ({error}): it has {file.stat().st_size} bytes; download it again"
        ) from error


def _read_json(file: pathlib.Path, *, optional: bool = False) -> dict[str, Any]:
    if not file.exists():
        if optional:
            return {}
        raise FileNotFoundError(
            f"{file} is missing: a model directory must have it; give the directory of a complete download"
        )
    return read_json(file)


def _as_ids(eos: int | list[int] | None) -> tuple[int, ...]:
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _token_text(token: str | Mapping[str, Any] | None) -> str:
    if token is None:
        return ""
    return token if isinstance(token, str) else token["content"]
