"""Who may import whom: the layers of the package as a table, and every import of every module held against it."""

import ast
import functools
import sys
from pathlib import Path

import pytest

import jspec

ROOT = Path(jspec.__file__).parent

MAY_IMPORT = {
    "config": set(),
    "pallas_kernels": set(),
    "corpus": set(),
    "state": {"config"},
    "future_map": {"state", "config"},
    "scheduler": {"state", "config"},
    "sim": {"scheduler", "state", "config"},
    "models": {"pallas_kernels", "state", "config"},
    "spec_workers": {"state", "future_map", "models", "pallas_kernels", "config", "corpus"},
}
"""By folder or top-level module: the others it may import. It may always import itself."""

ANYTHING = {"__init__", "cli", "engine", "bench", "explore", "tpu_report", "trace", "training"}
"""These may import all of the above and each other; a module named `cli_...` is part of the command."""

KERNELS_NEED = {"jax", "numpy"}
"""Beside the standard library, all that `pallas_kernels` may use."""

SHARED_BY_WORKERS = {
    *("__init__", "accept", "adjust", "base", "block", "chain", "draft_cache", "draft_sampling", "dspark_budget"),
    *("dspark_layout", "eagle_sizes", "featured", "forward", "grafting", "logprobs", "lookup", "prompt", "registry"),
    *("run_if", "sampling", "tree", "upload"),
}
"""Every other file of `spec_workers` is a worker, and no worker imports another. A new file that workers share is named here."""


@functools.cache
def sources():
    """`{module name: source}`; a package is named as its `__init__`."""
    files = sorted(ROOT.rglob("*.py"))
    return {".".join(("jspec", *path.relative_to(ROOT).with_suffix("").parts)): path.read_text() for path in files}


def is_module(name, known):
    return name in known or f"{name}.__init__" in known


def imports_of(module, source, known):
    """Absolute names of the modules that `source` imports, wherever in it, by statement or by name."""
    package = module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield name if is_module(name, known) else base
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            named = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            if called in ("import_module", "__import__"):
                yield from named


def unit(module):
    """The folder or top-level module that a module of jspec belongs to."""
    part = module.split(".")[1] if "." in module else "__init__"
    return "cli" if part.startswith("cli_") else part


def violations(modules):
    """`(module, imported)` pairs that the table forbids."""
    found, known = [], {**sources(), **modules}
    for module, source in modules.items():
        home = unit(module)
        assert home in MAY_IMPORT or home in ANYTHING, f"{module}: say in the table what {home!r} may import"
        for name in imports_of(module, source, known):
            inside = name.split(".")[0] == "jspec"
            if home == "pallas_kernels" and not inside:
                allowed = name.split(".")[0] in KERNELS_NEED | sys.stdlib_module_names
            elif home in ANYTHING or not inside:
                allowed = True
            else:
                allowed = unit(name) == home or unit(name) in MAY_IMPORT[home]
            if home == "spec_workers" and unit(name) == home:
                this, other = module.split(".")[2], [*name.split("."), "__init__"][2]
                worker = other not in SHARED_BY_WORKERS
                allowed = not worker or other == this or this in ("__init__", "registry")
            if not allowed:
                found.append((module, name))
    return found


def test_every_import_is_in_the_table():
    assert violations(sources()) == []


def test_the_walk_sees_the_package():
    modules = sources()
    assert {unit(module) for module in modules} >= set(MAY_IMPORT) | {"engine", "bench"}
    assert "jspec.state.ledger" in set(
        imports_of("jspec.scheduler.reserve", modules["jspec.scheduler.reserve"], modules)
    )
    workers = {m.split(".")[2] for m in modules if unit(m) == "spec_workers"} - SHARED_BY_WORKERS
    assert workers >= {"plain", "ngram"}


@pytest.mark.parametrize(
    ("module", "line", "imported"),
    [
        ("jspec.scheduler.reserve", "from jspec.spec_workers.ngram import lookup", "jspec.spec_workers.ngram"),
        ("jspec.scheduler.reserve", "from jspec.future_map import publish", "jspec.future_map"),
        ("jspec.scheduler.reserve", "from jspec import Engine", "jspec"),
        ("jspec.scheduler.reserve", "import jspec", "jspec"),
        ("jspec.scheduler.reserve", "from ..models import target", "jspec.models.target"),
        ("jspec.scheduler.reserve", "def f():\n    import jspec.engine.engine as e", "jspec.engine.engine"),
        ("jspec.scheduler.reserve", "__import__('jspec.engine')", "jspec.engine"),
        ("jspec.scheduler.prefix_cache", "from jspec.engine.logs import Request", "jspec.engine.logs"),
        ("jspec.scheduler.retract", "from jspec.spec_workers.upload import pack_extend", "jspec.spec_workers.upload"),
        ("jspec.state.ledger", "from jspec.scheduler import plan", "jspec.scheduler.plan"),
        ("jspec.state.prefix_cache", "from ..scheduler.prefix_cache import evict", "jspec.scheduler.prefix_cache"),
        ("jspec.state.__init__", "from ..scheduler.plan import plan", "jspec.scheduler.plan"),
        ("jspec.config", "from jspec.state import Limits", "jspec.state"),
        ("jspec.future_map.relay", "from jspec.spec_workers.base import DeviceState", "jspec.spec_workers.base"),
        ("jspec.models.target", "from jspec.spec_workers import sampling", "jspec.spec_workers.sampling"),
        ("jspec.pallas_kernels.__init__", "from jspec.config import EngineConfig", "jspec.config"),
        ("jspec.pallas_kernels.__init__", "import flax.linen as nn", "flax.linen"),
        ("jspec.pallas_kernels.__init__", "from chex import Array", "chex"),
        ("jspec.spec_workers.ngram", "from jspec.spec_workers.plain import plain", "jspec.spec_workers.plain"),
        ("jspec.spec_workers.ngram", "from jspec.spec_workers import plain", "jspec.spec_workers.plain"),
        ("jspec.spec_workers.ngram", "from . import plain", "jspec.spec_workers.plain"),
        ("jspec.spec_workers.ngram", "from jspec.scheduler.reserve import reserve", "jspec.scheduler.reserve"),
        ("jspec.spec_workers.accept", "from jspec.spec_workers.ngram import lookup", "jspec.spec_workers.ngram"),
        ("jspec.spec_workers.adjust", "from .ngram import lookup", "jspec.spec_workers.ngram"),
        ("jspec.spec_workers.logprobs", "from jspec.engine.logprobs import TokenLogprob", "jspec.engine.logprobs"),
        ("jspec.spec_workers.prompt", "import jspec.scheduler.retract", "jspec.scheduler.retract"),
        ("jspec.spec_workers.plain", "from jspec.engine import Engine", "jspec.engine"),
    ],
)
def test_a_forbidden_import_is_found(module, line, imported):
    assert violations({module: f"{sources()[module]}\n{line}\n"}) == [(module, imported)]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("jspec.scheduler.reserve", "import numpy as np\nfrom jspec.config import EngineConfig\nfrom . import settle"),
        ("jspec.spec_workers.ngram", "from jspec.spec_workers.accept import accept_chain\nimport jspec.models.target"),
        ("jspec.pallas_kernels.__init__", "import functools\nfrom jax.experimental import pallas\nfrom . import pages"),
        ("jspec.engine.engine", "from jspec.spec_workers.ngram import lookup\nfrom jspec.scheduler import plan"),
        ("jspec.cli", "import jspec.bench.stub\nimport jspec"),
        ("jspec.spec_workers.__init__", "from jspec.spec_workers.plain import plain"),
    ],
)
def test_an_allowed_import_is_not(module, line):
    assert violations({module: f"{sources().get(module, '')}\n{line}\n"}) == []


def test_a_folder_that_the_table_does_not_know_is_found():
    with pytest.raises(AssertionError, match="'helpers'"):
        violations({"jspec.helpers.things": ""})
