"""Text to train on: made once, gone on with after a kill, kept apart from what must stay unseen."""

import dataclasses
import json

import numpy as np
import pytest
from tiny_checkpoint import write_checkpoint
from training import kit

from jspec.bench.prompts import encode_prompt
from jspec.models.loading import load_model
from jspec.training import prompts
from jspec.training.prompts import training_prompts, word_runs
from jspec.training.text import TextOptions, read_answers, text_chunks, write_answers

OPTIONS = TextOptions(num_prompts=10, max_new_tokens=6, max_len=128, max_running=4)


@pytest.fixture(scope="module", autouse=True)
def _few_functions():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "stdlib_functions", kit.few_functions)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    file = tmp_path_factory.mktemp("work") / "answers.jsonl"
    write_answers(file, model.target, model.tokenizer, OPTIONS)
    return file


def same(a, b):
    return len(a) == len(b) and all(
        np.array_equal(x.tokens, y.tokens) and x.prompt_len == y.prompt_len for x, y in zip(a, b, strict=True)
    )


def test_every_answer_follows_its_prompt(model, made):
    found = read_answers(made, model.tokenizer, OPTIONS)
    assert len(found) >= 5
    asked = [encode_prompt(model.tokenizer, text) for _, text in zip(range(40), training_prompts(0), strict=False)]
    for tokens, prompt_len in found:
        assert tokens[:prompt_len].tolist() in asked
        assert 1 <= len(tokens) - prompt_len <= OPTIONS.max_new_tokens


def test_a_killed_run_goes_on_where_it_stopped(model, made, tmp_path):
    text, file = made.read_text(), tmp_path / "answers.jsonl"
    lines = text.splitlines(keepends=True)
    file.write_text("".join(lines[:3]) + lines[3][:20])
    asked = []
    write_answers(
        file, model.target, model.tokenizer, OPTIONS, progress=lambda items, total: (asked.append(total), items)[1]
    )
    assert asked == [len(lines) - 3]
    assert same(read_answers(file, model.tokenizer, OPTIONS), read_answers(made, model.tokenizer, OPTIONS))
    before = file.read_text()
    write_answers(file, model.target, model.tokenizer, OPTIONS)
    assert file.read_text() == before


def test_fewer_prompts_are_the_first_ones(model, made):
    few = read_answers(made, model.tokenizer, dataclasses.replace(OPTIONS, num_prompts=3))
    assert 0 < len(few) <= 3 and same(few, read_answers(made, model.tokenizer, OPTIONS)[: len(few)])


@pytest.mark.parametrize("change", [{"max_new_tokens": 7}, {"seed": 1}, {"temperature": 0.5}])
def test_answers_of_other_options_are_refused(model, made, change):
    (name,) = change
    with pytest.raises(ValueError, match=f"{name}=.*was made with {name}="):
        write_answers(made, model.target, model.tokenizer, dataclasses.replace(OPTIONS, **change))


def test_a_damaged_line_is_named(model, made, tmp_path):
    file = tmp_path / "answers.jsonl"
    lines = made.read_text().splitlines()
    file.write_text("\n".join([lines[0], "{oops", *lines[1:]]) + "\n")
    with pytest.raises(ValueError, match=r"answers\.jsonl:2: not valid JSON"):
        write_answers(file, model.target, model.tokenizer, OPTIONS)


def test_what_must_stay_unseen_is_neither_asked_nor_kept(model, made, tmp_path):
    _, second = (text for _, text in zip(range(2), training_prompts(0), strict=False))
    unseen = word_runs([second])
    answers = read_answers(made, model.tokenizer, OPTIONS)
    kept = read_answers(made, model.tokenizer, OPTIONS, unseen=unseen)
    assert len(kept) == len(answers) - 1
    file = tmp_path / "answers.jsonl"
    write_answers(file, model.target, model.tokenizer, OPTIONS, unseen=unseen)
    numbers_and_prompts = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    tokens = encode_prompt(model.tokenizer, second)
    assert numbers_and_prompts and not [r for r in numbers_and_prompts if r["tokens"][: len(tokens)] == tokens]


def test_plain_text_comes_in_chunks(model, tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 30 + "ab")
    chunks = text_chunks([tmp_path / "a.txt"], model.tokenizer, OPTIONS)
    assert [len(c.tokens) for c in chunks] == [128, 128, 46] and {c.prompt_len for c in chunks} == {0}
    words = " ".join(f"word{i}" for i in range(40))
    (tmp_path / "b.txt").write_text(words)
    assert len(text_chunks([tmp_path / "b.txt"], model.tokenizer, OPTIONS)) == 3
    assert len(text_chunks([tmp_path / "b.txt"], model.tokenizer, OPTIONS, unseen=word_runs([words[:60]]))) == 2


@pytest.mark.parametrize(("content", "rule"), [(b"ab", "at least 4"), (b"abc\xff", "not UTF-8")])
def test_a_bad_text_file_is_named(model, tmp_path, content, rule):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.txt: .*{rule}"):
        text_chunks([tmp_path / "a.txt"], model.tokenizer, OPTIONS)


@pytest.mark.parametrize(
    ("field", "value"), [("num_prompts", -1), ("max_new_tokens", 0), ("temperature", 0.0), ("max_len", 3)]
)
def test_bad_options_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}={value} must"):
        TextOptions(**{field: value})
