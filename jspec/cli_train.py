"""`jspec train`: a draft for a target. JAX is imported when it runs, so that `--help` is quick."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from jspec.cli_errors import usage_errors

Kind = Annotated[
    str,
    typer.Argument(
        help='"eagle3", "eagle", "multi-layer", "dflash", "dspark", "frozen-kv-mtp" or "uno".', show_default=False
    ),
]
Model = Annotated[str, typer.Option(help='The target: a GGUF file, a Hugging Face directory, or "smollm2".')]
WorkDir = Annotated[
    Path, typer.Option(help="Keeps text, features, checkpoints and figures; a killed run goes on there.")
]
Out = Annotated[Path | None, typer.Option(help="Directory of the draft; by default `draft` in the work directory.")]
NumPrompts = Annotated[int, typer.Option(help="Prompts that the target answers.")]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens of an answer.")]
Text = Annotated[list[str] | None, typer.Option(help="A text file to train on, too; repeatable.")]
Features = Annotated[Path | None, typer.Option(help="Shards of features that exist already, instead of making text.")]
Unseen = Annotated[
    list[str] | None, typer.Option(help="A prompt set that training must not see; repeatable. Default: all installed.")
]
DraftVocabSize = Annotated[
    int | None, typer.Option(help="All but uno: tokens that the draft can propose; by default 8192.")
]
IntermediateSize = Annotated[
    int | None, typer.Option(help="All but uno: width of the draft's MLP; by default the target's.")
]
Init = Annotated[Path | None, typer.Option(help="A draft to go on from, instead of the target's own layer.")]
CaptureLayers = Annotated[
    str | None,
    typer.Option(help='eagle3, dflash, dspark: target layers to read, as "1,14,26"; by default low, middle and high.'),
]
NumModules = Annotated[int | None, typer.Option(help="multi-layer: modules, one a token ahead; by default 3.")]
Chained = Annotated[
    bool | None,
    typer.Option("--chained", help="multi-layer: each module reads the one before it instead of the target."),
]
NumLayers = Annotated[
    int | None, typer.Option(help="dflash, dspark, frozen-kv-mtp: layers of the draft; by default 2.")
]
HiddenSize = Annotated[int | None, typer.Option(help="frozen-kv-mtp: width of the assistant; by default 256.")]
BlockSize = Annotated[
    int | None,
    typer.Option(help="dflash, uno: rows of a block; dspark: tokens that one proposes; by default 8."),
]
MaskTokenId = Annotated[
    int | None, typer.Option(help="dflash, dspark: stands for what is to be proposed; by default 0.")
]
Window = Annotated[
    int | None, typer.Option(help="dflash, dspark: positions that a row of a block sees; by default all there are.")
]
MarkovRank = Annotated[int | None, typer.Option(help="dspark: rank of the Markov head; by default 32.")]
MarkovHead = Annotated[str | None, typer.Option(help='dspark: "vanilla", "gated" or "rnn"; by default "vanilla".')]
Rank = Annotated[int | None, typer.Option(help="uno: rank of the adapter; by default 16.")]
Alpha = Annotated[
    float | None, typer.Option(help="uno: over the rank, what the adapter's product is multiplied by; by default 32.")
]
KlWeight = Annotated[
    float | None,
    typer.Option(
        help="uno: weight of the KL divergence beside the total variation, for an adapter's first steps; by default 0."
    ),
]
Unroll = Annotated[
    str | None,
    typer.Option(
        help='eagle3, eagle, frozen-kv-mtp: depths of the trained chain, "3", or by first step, "0:1,500:3"; by default 3.'
    ),
]
Steps = Annotated[int, typer.Option(help="Optimizer steps; of a run that goes on, all together.")]
BatchSize = Annotated[int, typer.Option(help="Rows of a batch, a multiple of the number of devices.")]
SeqLen = Annotated[int, typer.Option(help="Tokens of a row.")]
LearningRate = Annotated[float, typer.Option(help="At its highest.")]
WarmupSteps = Annotated[int, typer.Option(help="Steps over which the learning rate rises.")]
MaxStarts = Annotated[int | None, typer.Option(help="Chains a batch trains on at most: fewer than its rows cost less.")]
CopyHeads = Annotated[
    int, typer.Option(help="Query heads taught to find where the text last ended as it does now, and to copy.")
]
CopyWeight = Annotated[float, typer.Option(help="Weight of that lesson beside the loss of the tokens.")]
HeldOutEvery = Annotated[int, typer.Option(help="Every n-th prompt is held out of training.")]
EvalEvery = Annotated[int, typer.Option(help="Steps between evaluations.")]
CheckpointEvery = Annotated[int, typer.Option(help="Steps between checkpoints.")]
IncludePrompt = Annotated[bool, typer.Option("--include-prompt", help="Train on the tokens of prompts too.")]
Seed = Annotated[int, typer.Option(help="Fixes prompts, order and start.")]
Storage = Annotated[str, typer.Option(help='How matrices are stored: "float32", "bfloat16" or "int8".')]
Resume = Annotated[bool, typer.Option(help="Go on from the newest checkpoint; --no-resume starts training anew.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else there.")]


def train(
    kind: Kind,
    work_dir: WorkDir,
    model: Model = "smollm2",
    out: Out = None,
    num_prompts: NumPrompts = 1000,
    max_new_tokens: MaxNewTokens = 128,
    text: Text = None,
    features: Features = None,
    unseen: Unseen = None,
    draft_vocab_size: DraftVocabSize = None,
    intermediate_size: IntermediateSize = None,
    init: Init = None,
    capture_layers: CaptureLayers = None,
    num_modules: NumModules = None,
    chained: Chained = None,
    num_layers: NumLayers = None,
    hidden_size: HiddenSize = None,
    block_size: BlockSize = None,
    mask_token_id: MaskTokenId = None,
    window: Window = None,
    markov_rank: MarkovRank = None,
    markov_head: MarkovHead = None,
    rank: Rank = None,
    alpha: Alpha = None,
    steps: Steps = 1000,
    batch_size: BatchSize = 8,
    seq_len: SeqLen = 128,
    learning_rate: LearningRate = 3e-4,
    warmup_steps: WarmupSteps = 50,
    unroll: Unroll = None,
    max_starts: MaxStarts = None,
    copy_heads: CopyHeads = 0,
    copy_weight: CopyWeight = 0.3,
    kl_weight: KlWeight = None,
    held_out_every: HeldOutEvery = 20,
    eval_every: EvalEvery = 200,
    checkpoint_every: CheckpointEvery = 200,
    include_prompt: IncludePrompt = False,
    seed: Seed = 0,
    storage: Storage = "float32",
    resume: Resume = True,
    as_json: Json = False,
) -> None:
    """Train a draft for a target.

    eagle3: one layer over three of the target's hidden states, with a head of its own. eagle: one layer over the last hidden state, with the target's head.
    multi-layer: a module for every token ahead, with the target's head. dflash: layers that fill in a block of tokens at once. dspark: the same with a head that
    knows the token before, and one that knows how sure to be. frozen-kv-mtp: an assistant that asks the KV of the target's last layer. uno: an adapter by which
    the target itself reads noise as what comes next.
    """
    given = locals()
    with usage_errors():
        from jspec.training.train_job import KINDS, ONLY_FOR

        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} must be one of {', '.join(KINDS)}")
        others = {"unroll": ("eagle3", "eagle", "frozen-kv-mtp"), "kl_weight": ("uno",)}
        for name, kinds in {**ONLY_FOR, **others}.items():
            if given[name] is not None and kind not in kinds:
                raise ValueError(
                    f"{name}={given[name]} means nothing to a draft of kind {kind!r}: it is for {' and '.join(kinds)}"
                )
    _run({**given, "capture_layers": _as_layers(capture_layers)})


def _as_layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f'{text!r} must be layer numbers, as "1,14,26"', param_hint="--capture-layers"
        ) from None


def _run(given: dict[str, Any]) -> None:
    """Train as the options say."""
    import shutil

    from jspec.models.loading import load_model
    from jspec.training.job import run_job
    from jspec.training.options import TrainOptions, parse_unroll_schedule
    from jspec.training.text import TextOptions
    from jspec.training.train_job import ONLY_FOR, TrainJob

    sizes = ("steps", "batch_size", "seq_len", "learning_rate", "warmup_steps")
    shared = (*sizes, "max_starts", "copy_heads", "copy_weight", "held_out_every", "eval_every")
    own = ("kind", "out", "features", "init", "storage", "work_dir")
    shape = tuple(ONLY_FOR)
    with usage_errors():
        options = TrainOptions(
            **{name: given[name] for name in (*shared, "checkpoint_every", "include_prompt", "seed")},
            kl_weight=given["kl_weight"] or 0.0,
            unroll_schedule=parse_unroll_schedule("3" if given["unroll"] is None else given["unroll"]),
        )
        text = TextOptions(**{name: given[name] for name in ("num_prompts", "max_new_tokens", "seed")})
        job = TrainJob(
            text=text,
            text_files=tuple(given["text"] or ()),
            unseen=None if given["unseen"] is None else tuple(given["unseen"]),
            options=options,
            **{name: given[name] for name in own},
            **{name: given[name] for name in shape if given[name] is not None},
        )
        if not given["resume"]:
            shutil.rmtree(job.work_dir / "checkpoints", ignore_errors=True)
        result = run_job(job, load_model(given["model"]), progress=_bar)
    held_out = result.record["held_out"]
    if given["as_json"]:
        typer.echo(json.dumps({"out": str(result.out), **held_out}))
        return
    agree = " ".join(f"{share:.3f}" for share in held_out["agree"])
    typer.echo(
        f"{result.out}: accept length {held_out['accept_len']:.3f} on {held_out['sequences']} held-out sequences"
    )
    typer.echo(f"foreseen by depth: {agree}; figures and curves in {job.work_dir}")


def _bar(what: str) -> Callable[..., Iterable]:
    """A bar on standard error; nothing where that is not a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    hidden = not console.is_terminal
    return lambda items, total: track(items, what, total=total, console=console, transient=True, disable=hidden)
