"""Logits and hidden states of tiny random models equal those of transformers, through every way into the forward."""

import itertools

import numpy as np
import pytest
from models.paging import PagedRows

from jspec.models.loading import load_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
BAMBA = {
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 4,
}
DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
}
CASES = {
    "llama": ("Llama", {}),
    "llama_tied_mha": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "num_hidden_layers": 1}),
    "llama3_rope": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 16, "num_hidden_layers": 1}),
    "linear_rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}, "num_hidden_layers": 1},
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16, "num_hidden_layers": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "bamba": ("Bamba", BAMBA),
    "qwen3_next": ("Qwen3Next", DELTA | {"num_experts": 0}),
    "qwen3_5_tied": ("Qwen3_5", DELTA | {"tie_word_embeddings": True}),
}
DECODING = ("llama", "bamba", "qwen3_next")


def make(name: str):
    """A model whose every parameter matters: biases and norms are random too."""
    family, changes = CASES[name]
    kind = "Qwen3_5TextConfig" if family == "Qwen3_5" else f"{family}Config"
    config = getattr(transformers, kind)(**SIZES | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            is_norm = "norm" in parameter_name
            parameter.normal_(1.0 if is_norm else 0.0, 0.3)
    return model


@pytest.mark.parametrize("name", CASES)
def test_prefill_decode_and_verify_equal_transformers(name, tmp_path):
    model = make(name)
    model.save_pretrained(tmp_path)
    target = load_model(tmp_path).target
    assert target.facts.eos_token_ids == (2,)

    last = target.facts.num_layers - 1
    rng = np.random.default_rng(1)
    # per row: a ragged prompt, then verifies of up to 3 tokens, the last row's shorter than its 3 slots; some also decode
    lens = [[7, 1, 3], [1, 1, 3], [5, 1, 2]] if name in DECODING else [[7, 3], [1, 3], [5, 2]]
    widths = (None, 1, 3) if name in DECODING else (None, 3)
    chunks = [[rng.integers(0, 97, n).tolist() for n in row] for row in lens]
    rows = PagedRows(target, 3)
    calls = [
        rows.forward([c[i] for c in chunks], width=width, capture_layers=(last, 0)) for i, width in enumerate(widths)
    ]

    for b, row in enumerate(chunks):
        with torch.no_grad():
            want = model(torch.tensor([[*itertools.chain(*row)]]), output_hidden_states=True)
        logits, captured, hidden = (np.concatenate([call[kind][b] for call in calls]) for kind in range(3))
        np.testing.assert_allclose(logits, want.logits[0].numpy(), atol=1e-4)
        np.testing.assert_allclose(hidden, want.hidden_states[-1][0].numpy(), atol=1e-4)
        if last > 0:
            np.testing.assert_allclose(captured[:, 1], want.hidden_states[1][0].numpy(), atol=1e-4)


@pytest.mark.slow
def test_smollm2_gguf_equals_transformers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from jspec.models.loading import find_smollm2

    file = find_smollm2()
    loaded = load_model("smollm2", dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32
    ).eval()
    ids = loaded.tokenizer.chat(
        "Write a Python function that returns the n-th Fibonacci number, then explain it in 3 sentences."
    )
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].numpy()
    rows = PagedRows(loaded.target, 1, pages_per_row=64)
    parts = [
        rows.forward([ids[:-5]])[0][0],
        rows.forward([ids[-5:-1]], width=4)[0][0],
        rows.forward([ids[-1:]], width=1)[0][0],
    ]
    got = np.concatenate(parts)
    np.testing.assert_allclose(got, want, atol=5e-4)
    assert (got.argmax(-1) == want.argmax(-1)).all()
