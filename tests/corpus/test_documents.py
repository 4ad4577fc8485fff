"""A corpus in a file: what is read, and what is refused with file, line, rule and the way out."""

import pytest

from jspec.corpus import read_documents


def encode(text):
    return [ord(c) - ord("a") for c in text]


def read(tmp_path, name, content, encode=encode):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_documents(str(path), vocab_size=26, encode=encode)


def test_a_line_a_document(tmp_path):
    assert read(tmp_path, "a.txt", "abc\n\n  \nz\n") == ((0, 1, 2), (25,))
    assert read(tmp_path, "a.jsonl", "[0, 25]\n\n[3]", encode=None) == ((0, 25), (3,))
    assert read(tmp_path, "a.jsonl", "[]\n[3]") == ((3,),)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "", ["holds no tokens", "leave corpus out"]),
        ("a.txt", " \n\n", ["holds no tokens"]),
        ("a.jsonl", "[]\n", ["holds no tokens"]),
        ("a.txt", b"ab\xff", ["is not UTF-8"]),
        ("a.txt", "abc\na{", ["line 2", "id 26 must lie in [0, 26)"]),
        ("a.jsonl", "[1]\n[-1]", ["line 2", "id -1 must lie in [0, 26)"]),
        ("a.jsonl", "[1]\n\n[1, 26]", ["line 3", "id 26 must lie in [0, 26)", "tokenizer"]),
        ("a.jsonl", "[1", ["line 1", "not valid JSON"]),
        ("a.jsonl", '{"a": 1}', ["line 1", "array of token ids"]),
        ("a.jsonl", "[1.0]", ["line 1", "array of token ids"]),
        ("a.jsonl", "[true]", ["line 1", "array of token ids"]),
        ("a.jsonl", '"abc"', ["line 1", "array of token ids"]),
    ],
)
def test_what_is_refused(tmp_path, name, content, words):
    with pytest.raises(ValueError) as error:
        read(tmp_path, name, content)
    assert all(word in str(error.value) for word in ["corpus=", name, *words]), str(error.value)


def test_text_needs_a_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"is text, but there is no tokenizer: give a \.jsonl"):
        read(tmp_path, "a.txt", "abc", encode=None)


def test_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr("jspec.corpus.documents.MAX_TOKENS", 5)
    assert len(read(tmp_path, "a.txt", "abc\nde\n")) == 2
    with pytest.raises(ValueError, match="more than 5 tokens, up to line 2: cut it"):
        read(tmp_path, "a.txt", "abc\ndef\n")


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"corpus='.*none.txt' is no file"):
        read_documents(str(tmp_path / "none.txt"), vocab_size=26, encode=encode)
