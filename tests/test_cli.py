"""The `jspec` command: what it prints, where, and with which exit code."""

import json
import subprocess
import sys

import pytest
from tiny_checkpoint import CONTEXT_LEN, VOCAB_SIZE, write_checkpoint
from typer.testing import CliRunner

from jspec.cli import app
from jspec.cli_generate import SUMMARY_KEYS, InTurn
from jspec.models.eagle_files import save_draft
from jspec.models.loading import load_model
from jspec.models.tiny import random_target
from jspec.models.tiny_draft import random_draft

REQUEST_KEYS = {"rid", "prompt_token_ids", "token_ids", "text", "finish_reason", "accept_lens", "lossy", "algorithm"}
REQUEST_KEYS |= {"index", "cached_tokens", "retractions"}


TWO_PROMPTS = ("--prompt", "abcabc", "--prompt", "xyz")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "chat": str(write_checkpoint(root / "chat")),
        "raw": str(write_checkpoint(root / "raw", chat=False)),
        "mute": str(write_checkpoint(root / "mute", tokenizer=False)),
    }


@pytest.fixture(scope="module")
def both(models):
    """Two prompts, decoded greedily, as JSON."""
    return generate(models["chat"], *TWO_PROMPTS, "--json")


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def generate(model, *args, context_len=64):
    """One context length for most tests: they share compiled programs."""
    context = ["--context-len", context_len] if context_len else []
    return run("generate", "--model", model, "--max-new-tokens", 6, "--ignore-eos", *context, *args)


def records(result):
    """Every line of standard output is an object; the last is the summary."""
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert set(lines[-1]) == {"summary"}
    return lines[:-1], lines[-1]["summary"]


def assert_usage_error(result, *pieces):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for piece in pieces:
        assert str(piece) in line


# --- output -------------------------------------------------------------------------------------------------------------


def test_json_is_one_object_a_request_and_a_summary(both):
    assert both.exit_code == 0, both.output
    (first, second), summary = records(both)
    for record, rid, length in ((first, "r1", 7), (second, "r2", 4)):  # bytes, then the assistant's mark
        assert set(record) == REQUEST_KEYS
        assert record["rid"] == rid and record["algorithm"] == "ngram" and record["finish_reason"] == "length"
        assert len(record["prompt_token_ids"]) == length and record["prompt_token_ids"][-1] == VOCAB_SIZE - 1
        assert len(record["token_ids"]) == 6 == 1 + sum(record["accept_lens"])
        assert isinstance(record["text"], str)
    assert tuple(summary) == SUMMARY_KEYS
    assert summary["tokens"] == 12 and summary["compiles_after_warmup"] == 0
    assert summary["verifies"] == len(first["accept_lens"]) + len(second["accept_lens"])
    assert summary["accept_length"] == pytest.approx(10 / summary["verifies"])


@pytest.mark.parametrize("options", [["--algorithm", "plain"], ["--no-overlap"], ["--checked"]])
def test_how_it_is_decoded_leaves_the_tokens_alone(models, both, options):
    expected, _ = records(both)
    found, _ = records(generate(models["chat"], *TWO_PROMPTS, "--json", *options))
    assert [r["token_ids"] for r in found] == [r["token_ids"] for r in expected]


def test_a_seed_fixes_the_tokens_whoever_runs_beside(models):
    drawn = {}
    for seed, prompts in ((5, ["abcabc", "zz"]), (5, ["q", "abcabc"]), (6, ["abcabc", "q"])):
        args = [piece for prompt in prompts for piece in ("--prompt", prompt)]
        found, _ = records(generate(models["chat"], *args, "--json", "--temperature", 1, "--seed", seed))
        drawn.setdefault(seed, []).append(found[prompts.index("abcabc")]["token_ids"])
    assert drawn[5][0] == drawn[5][1] != drawn[6][0]


def test_raw_encodes_the_prompt_as_it_is(models, both):
    raw, _ = records(generate(models["chat"], *TWO_PROMPTS, "--json", "--raw"))
    for chat_record, raw_record in zip(records(both)[0], raw, strict=True):
        assert chat_record["prompt_token_ids"] == [*raw_record["prompt_token_ids"], VOCAB_SIZE - 1]


@pytest.mark.parametrize("options", [["--stream"], []])
def test_each_text_is_printed_under_its_heading(models, both, options):
    (first, second), _ = records(both)
    result = generate(models["chat"], *TWO_PROMPTS, *options)
    assert result.exit_code == 0
    assert result.stdout == f"--- r1: abcabc\n{first['text']}\n--- r2: xyz\n{second['text']}\n"
    assert "accept length" in result.stderr


def test_one_prompt_is_printed_without_heading_in_the_smallest_context(models, both):
    result = generate(models["chat"], "--prompt", "abcabc", context_len=None)
    assert result.stdout == records(both)[0][0]["text"] + "\n"


def test_logs_are_json_on_standard_error(models, both):
    """One object an event, each with its request's name; standard output is what it is without them, and the next command logs nothing."""
    result = generate(models["chat"], *TWO_PROMPTS, "--json", "--log-json")
    assert [r["token_ids"] for r in records(result)[0]] == [r["token_ids"] for r in records(both)[0]]
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    for rid in ("r1", "r2"):
        assert [line["event"] for line in lines if line["rid"] == rid] == ["submitted", "started", "finished"]
    assert len(lines) == 6 and both.stderr == ""
    debug = generate(models["chat"], *TWO_PROMPTS, "--json", "--log-json", "--log-level", "debug").stderr.splitlines()
    modes = [json.loads(line)["mode"] for line in debug if json.loads(line)["event"] == "launched"]
    assert modes[0] == "extend" and set(modes[1:]) == {"decode"}
    assert generate(models["chat"], *TWO_PROMPTS, "--json").stderr == ""


def test_logs_are_lines_of_text_without_json(models):
    result = generate(models["chat"], "--prompt", "abcabc", "--json", "--log-level", "info")
    assert "INFO jspec.engine: finished rid='r1' finish_reason='length' tokens=6 " in result.stderr
    assert len(result.stderr.splitlines()) == 3


def test_where_metrics_are_served_is_said(models):
    result = generate(models["chat"], *TWO_PROMPTS, "--json", "--metrics-port", 0)
    assert result.exit_code == 0 and len(records(result)[0]) == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("metrics at http://localhost:") and line.endswith("/metrics")


def test_texts_in_turn(capsys):
    out = InTurn({"a": None, "b": None})
    out.write("b", "2")
    out.write("a", "1")
    assert capsys.readouterr().out == "1"
    out.close("b")
    out.write("a", "1")
    assert capsys.readouterr().out == "1"
    out.close("a")
    assert capsys.readouterr().out == "\n2\n"


def test_version_and_help():
    assert run("--version").stdout.startswith("jspec ")
    for command in ((), ("generate",), ("bench", "host"), ("bench", "decode"), ("demo",)):
        assert run(*command, "--help").exit_code == 0


def test_help_does_not_wait_for_jax():
    code = "import sys, jspec.cli; sys.exit('jax' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- prompts --------------------------------------------------------------------------------------------------------------


def test_a_refused_prompt_lets_the_others_run(models, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text(f"abc\n\n{'x' * 64}\nxyz\n")
    result = generate(models["chat"], "--prompt-file", file, "--json")
    assert result.exit_code == 1
    found, summary = records(result)
    assert [r["finish_reason"] for r in found] == ["length", "refused", "refused", "length"]
    assert [r["rid"] for r in found] == ["r1", "r2", "r3", "r4"]
    assert f"{file}:2: prompt is empty" in found[1]["error"]
    assert f"{file}:3: prompt has 65 tokens, but context_len=64" in found[2]["error"]
    for record in found[1:3]:
        assert set(record) == REQUEST_KEYS | {"error"}
        assert record["token_ids"] == [] and record["accept_lens"] == []
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["error", "error"]
    assert summary["tokens"] == 12


def test_nothing_but_refusals(models):
    result = generate(models["raw"], "--prompt", "", "--prompt", "x" * CONTEXT_LEN, "--json", context_len=None)
    assert result.exit_code == 1
    found, summary = records(result)
    assert [r["finish_reason"] for r in found] == ["refused", "refused"] and summary["tokens"] == 0
    first, second = result.stderr.splitlines()
    assert first == "error: r1: prompt is empty: a request needs at least one token"
    assert second.startswith(f"error: r2: prompt has {CONTEXT_LEN} tokens, but context_len={CONTEXT_LEN} must hold it")


def test_the_engine_refuses_what_its_limits_do_not_hold(models):
    args = [
        "--prompt",
        "abc",
        "--prompt",
        "a" * 70,
        "--prompt",
        "a" * 50,
        "--kv-tokens",
        64,
        "--page-size",
        16,
        "--json",
    ]
    found, _ = records(generate(models["chat"], *args))
    assert [r["finish_reason"] for r in found] == ["length", "refused", "refused"]
    assert "context_len=64" in found[1]["error"] and "needs 80 KV tokens" in found[2]["error"]


def test_a_stop_token_outside_the_vocabulary_is_refused(models):
    result = generate(models["chat"], *TWO_PROMPTS, "--stop-token-id", VOCAB_SIZE)
    assert result.exit_code == 1
    assert result.stderr.count(f"stop_token_ids holds {VOCAB_SIZE}") == 2


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts"])
def test_jsonl_prompts(models, tmp_path, name):
    file = tmp_path / name
    file.write_text('{"prompt": "abc", "id": 7}\n{"prompt": "line\\nbreak"}\n')
    found, _ = records(generate(models["raw"], "--prompt-file", file, "--json"))
    assert [len(r["prompt_token_ids"]) for r in found] == [3, 10]


# --- bad usage --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        (["--temperature", "-1"], ["temperature=-1.0", "at least 0"]),
        (["--temperature", "nan"], ["temperature=nan", "finite"]),
        (["--top-k", "-2"], ["top_k=-2", "0 keeps every token"]),
        (["--top-p", "0"], ["top_p=0.0", "(0, 1]"]),
        (["--min-p", "1.5"], ["min_p=1.5", "[0, 1]"]),
        (["--seed", "-1"], ["seed=-1"]),
        (["--max-new-tokens", "0"], ["max_new_tokens=0", "at least 1"]),
        (["--stop-token-id", "-3"], ["stop_token_ids=-3"]),
        (["--page-size", "0"], ["page_size=0", "[1, 256]"]),
        (["--max-running", "0"], ["max_running=0", "[1, 4096]"]),
        (["--kv-tokens", "1"], ["kv_tokens=1"]),
        (["--context-len", "513"], ["context_len=513", "512"]),
        (["--context-len", "1"], ["context_len=1", "at least 2"]),
        (["--num-draft-tokens", "1"], ["num_draft_tokens=1", "at least 2"]),
        (["--kernels", "cuda"], ["kernels='cuda'", "xla"]),
        (["--metrics-port", "65536"], ["metrics_port=65536", "[0, 65535]"]),
        (["--log-level", "loud"], ["log_level='loud'", "debug, info"]),
        (["--algorithm", "eagle9"], ["algorithm='eagle9'", "ngram"]),
        (["--algorithm", "eagle3"], ["draft=None", "jspec train"]),
        (["--algorithm", "eagle3", "--draft", "no/such/draft"], ["draft='no/such/draft'"]),
        (["--draft", "no/such/draft"], ["draft=no/such/draft", "'ngram'", "'eagle3'"]),
        (["--topk", "0"], ["topk=0", "[1, 32]"]),
        (["--adaptive-steps", "1;2"], ["adaptive_steps='1;2'", "1:1,3,5"]),
        (["--adaptive-steps", "1:3,1"], ["adaptive_steps=", "ascend"]),
        (["--model", "no/such/model"], ["no/such/model"]),
        (["--prompt-file", "no/such/file"], ["no/such/file"]),
    ],
)
def test_a_bad_option_is_one_line(models, options, pieces):
    assert_usage_error(run("generate", "--model", models["raw"], "--prompt", "abc", *options), *pieces)


@pytest.mark.parametrize(
    ("name", "content", "pieces"),
    [
        ("p.jsonl", '{"prompt": "abc"}\n{"prompt": \n', [":2", "not valid JSON"]),
        ("p.jsonl", '{"prompt": "abc"}\n{"text": "abc"}\n', [":2", '"prompt"']),
        ("p.jsonl", '{"prompt": 3}\n', [":1", '"prompt"']),
        ("p.txt", "", ["no prompt"]),
    ],
)
def test_a_bad_prompt_file_is_one_line(models, tmp_path, name, content, pieces):
    file = tmp_path / name
    file.write_text(content)
    assert_usage_error(generate(models["raw"], "--prompt-file", file), file, *pieces)


def test_prompts_that_nobody_can_read(models, tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    assert_usage_error(generate(models["raw"], "--prompt-file", tmp_path / "latin"), "not UTF-8")
    assert_usage_error(generate(models["raw"]), "--prompt")
    assert_usage_error(generate(models["mute"], "--prompt", "abc"), "no tokenizer")
    assert_usage_error(generate(models["raw"], "--prompt", "abc", "--chat"), "no chat template")


def test_a_draft_of_ones_own(models, tmp_path):
    """The text is plain's with every kind of draft; a draft of another model is refused in one line."""
    target = load_model(models["raw"]).target
    for kind in ("eagle3", "eagle", "multi-layer"):
        save_draft(tmp_path / kind, random_draft(target, 0, kind=kind))
    plain, _ = records(generate(models["raw"], *TWO_PROMPTS, "--json", "--algorithm", "plain"))
    for algorithm, kind, options in (
        ("eagle3", "eagle3", ["--num-steps", 2]),
        ("eagle3", "eagle3", ["--num-steps", 3, "--topk", 2, "--num-draft-tokens", 6]),
        ("eagle", "eagle", ["--adaptive-steps", "1:1,2"]),
        ("multi-layer-eagle", "multi-layer", ["--rejection-sampling"]),
    ):
        draft = ["--algorithm", algorithm, "--draft", tmp_path / kind]
        drafted, _ = records(generate(models["raw"], *TWO_PROMPTS, "--json", *draft, *options))
        assert [r["token_ids"] for r in drafted] == [r["token_ids"] for r in plain]
        assert {r["algorithm"] for r in drafted} == {algorithm}
    hot = ["--lossy-threshold", 0.5, "--temperature", 1.0]
    lossy, _ = records(generate(models["raw"], *TWO_PROMPTS, "--json", *draft, *hot))
    assert all(r["lossy"] for r in lossy) and not any(r["lossy"] for r in drafted)
    other = random_draft(random_target(0), 0)
    save_draft(tmp_path / "other", other)
    result = generate(models["raw"], "--prompt", "abc", "--algorithm", "eagle3", "--draft", tmp_path / "other")
    assert_usage_error(result, "config.json", "vocab_size=64", "258")


# --- bench ------------------------------------------------------------------------------------------------------------------


def test_bench_host_json():
    result = run("bench", "host", "--rows", 2, "--context-len", 1024, "--iterations", 10, "--json")
    assert result.exit_code == 0, result.output
    (cost,) = json.loads(result.stdout)["rows"]
    assert cost["rows"] == 2 and cost["context_len"] == 1024 and cost["short_context_len"] == 256
    assert set(cost["host_ms"]) == {"median", "p10", "p90"}
    assert {"plan_ms", "dispatch_ms", "settle_ms", "cpu_ms", "goal_ms", "traffic", "traffic_short_context"} <= set(cost)


def test_bench_host_refuses_what_does_not_fit():
    args = ["bench", "host", "--rows", 2, "--context-len", 1024, "--iterations", 1000]
    assert_usage_error(run(*args), "iterations=", "context_len=1024")


def test_bench_decode_compares_with_plain(models):
    args = ["bench", "decode", "--model", models["chat"], "--num-prompts", 1, "--max-new-tokens", 8, "--no-curve"]
    result = run(*args, "--ignore-eos", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [c["algorithm"] for c in found["contenders"]] == ["bare loop", "plain", "ngram"]
    for contender in found["contenders"]:
        assert contender["tokens"] == 7 and contender["identical"] == contender["outputs"] == 1
        assert contender["compiles_after_warmup"] == 0
    bare, plain, ngram = found["contenders"]
    assert (bare["k"], plain["k"], ngram["k"]) == (0, 0, 7)
    assert plain["accept_length"] == 1.0 and plain["speedup"] == 1.0
    assert found["lossless"] and found["verify_costs"] == []
    assert "bundled (1)" in found["prompts"][0] and "chat template" in found["prompts"][0]


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        (["--prompts", "gsm8k"], ["prompts='gsm8k'", "mt-bench"]),
        (["--repeat", "0"], ["repeat=0"]),
        (["--num-prompts", "0"], ["num_prompts=0"]),
        (["--batch", "0"], ["max_running=0"]),
        (["--algorithms", "plain,eagle9"], ["algorithms: 'eagle9'", "ngram"]),
    ],
)
def test_bench_decode_bad_options(models, options, pieces):
    assert_usage_error(run("bench", "decode", "--model", models["chat"], *options), *pieces)


def test_demo(models):
    result = run("demo", "--model", models["chat"], "--num-prompts", 1, "--max-new-tokens", 8)
    assert result.exit_code == 0, result.output
    assert "identical output: yes" in result.stdout
    for figure in ("tokens/s", "accept length", "verifies", "exposed host time", "run-ahead"):
        assert figure in result.stdout


def test_what_a_request_may_ask_of_its_tokens(models):
    """Each option reaches the engine: it changes the output, or is told in the record."""
    plainly, _ = records(generate(models["chat"], *TWO_PROMPTS, "--json"))
    token = plainly[0]["token_ids"][0]
    for options in (["--logit-bias", f"{token}=-100"], ["--repetition-penalty", "5"], ["--presence-penalty", "50"]):
        found, _ = records(generate(models["chat"], *TWO_PROMPTS, "--json", *options))
        assert [r["token_ids"] for r in found] != [r["token_ids"] for r in plainly], options
    found, _ = records(generate(models["chat"], *TWO_PROMPTS, "--json", "--logprobs", "2", "--prompt-logprobs", "0"))
    for record in found:
        assert [x["token_id"] for x in record["logprobs"]] == record["token_ids"]
        assert all(len(x["top"]) == 2 for x in record["logprobs"])
        assert record["prompt_logprobs"][0] is None and len(record["prompt_logprobs"]) == len(
            record["prompt_token_ids"]
        )


def test_several_answers_in_order(models):
    result = generate(models["chat"], *TWO_PROMPTS, "--n", "2", "--temperature", "1", "--seed", "3")
    headings = [line.split(":")[0] for line in result.stdout.splitlines() if line.startswith("---")]
    assert headings == ["--- r1 #0", "--- r1 #1", "--- r2 #0", "--- r2 #1"]
    found, summary = records(generate(models["chat"], *TWO_PROMPTS, "--n", "2", "--temperature", "1", "--json"))
    assert [(r["rid"], r["index"]) for r in found] == [("r1", 0), ("r1", 1), ("r2", 0), ("r2", 1)]
    assert summary["tokens"] == 24


def test_chunks_and_shared_prefixes_change_no_text(models):
    plainly, _ = records(generate(models["chat"], *TWO_PROMPTS, "--json"))
    options = ["--max-prefill-tokens", "8", "--page-size", "4", "--no-mixed-batches", "--policy", "longest-prefix"]
    found, _ = records(generate(models["chat"], *TWO_PROMPTS, "--json", *options))
    assert [r["token_ids"] for r in found] == [r["token_ids"] for r in plainly]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--logit-bias", "a=b"], "logit_bias=['a=b'] must read like"),
        (["--policy", "best"], "policy='best' must be one of fcfs, longest-prefix"),
        (["--regex", "[", "--ebnf", "x"], "ebnf and regex are given"),
        (["--n", "0"], "n=0 must lie in [1, 128]"),
        (["--max-prefill-tokens", "3", "--page-size", "4"], "max_prefill_tokens=3 must be at least 4"),
    ],
)
def test_wrong_options_say_what_is_wrong(models, options, message):
    result = generate(models["chat"], "--prompt", "abc", *options)
    assert result.exit_code == 2
    assert message.replace("ebnf and regex", "regex and ebnf") in " ".join(result.stderr.split())
