"""What the commands take. Without torch, so that help and errors do not wait for its import."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torchopt_ext.cli.terminal import CommandError, Parser, number, positive

NAMED = "gpt2"
ALIKE = 1024
"""The number of matrices that a number of parameters stands for."""
FLOATS = ("float32", "bfloat16", "float16", "float64")
MOMENTS = ("float32", "bfloat16", "int8")
AVERAGES = ("float32", "bfloat16")
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
MASTERS = ("fp32", "remainder", "remainder8")
ALGORITHMS = ("adam", "lion", "sgd", "muon", "adamw", "normuon")
OF_MATRICES = ("muon", "normuon")
SHARDINGS = {
    "ddp": "every rank holds everything, as a single process does",
    "zero1": "ZeroRedundancyOptimizer, whole tensors (greedy)",
    "balanced": 'partition="balanced", with reduce_scatter_hook',
    "zero2": 'partition="balanced", sharded_gradients=True',
    "fsdp": "fully_shard: weights are sharded, too, and gathered when they are used",
}
MOST_RANKS = 1_000_000


def add_source(parser: Parser) -> None:
    """Adds the options that select a model's tensors."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns a torch.nn.Module; it is called on the "
        "meta device, where tensors take no memory",
    )
    source.add_argument(
        "--params",
        type=number,
        metavar="N",
        help=f"number of parameters, such as 8e9 or 7B, in {ALIKE} matrices of equal size",
    )
    source.add_argument(
        "--shapes",
        metavar="SHAPES",
        help=f"{NAMED} (124 M parameters), or COUNTxSIZE[xSIZE], such as 2000x1000 for 2,000 "
        "vectors of 1,000; several with commas",
    )
    add_dtype(parser, "--dtype", FLOATS, "dtype of the parameters, instead of their own")


def add_dtype(parser: Parser, flag: str, choices: Iterable[str], what: str) -> None:
    """Adds an option that takes torch's names of dtypes, and short names such as bf16."""
    long = {short: name for name, short in SHORT.items()}
    parser.add_argument(
        flag,
        type=lambda text: long.get(text, text),
        choices=tuple(choices),
        metavar="DTYPE",
        help=f"{what}: {', '.join(choices)}; short: bf16, fp32 and so on",
    )


def expect_paths(*paths: str | Path | None) -> None:
    """Rejects paths at which nothing is, before torch's import takes its time."""
    for path in paths:
        if path is not None and not Path(path).exists():
            raise CommandError(f"there is no {path}")


def file_or_count(text: str) -> int | Path:
    """Parses a path that exists, or a number of parameters such as 7B."""
    path = Path(text)
    if path.exists():
        return path
    try:
        return number(text)
    except (ValueError, argparse.ArgumentTypeError):
        raise CommandError(
            f"there is no file or folder {text}, and it is no number of parameters such as 7B or "
            f"8e9; see --help for models that are not in files"
        ) from None


def plan(args: list[str]) -> argparse.Namespace:
    command = Parser(
        "plan",
        "Shows what each rank holds and moves with a fused optimizer, without activations and "
        "communication buffers; or, with --gpu-memory, which settings fit. MODEL is a number of "
        "parameters such as 7B; a safetensors file, the index of several, or a folder of them, of "
        "which only headers are read; or a config.json of Hugging Face or a folder with one, which "
        "needs transformers.",
        """
        7B --world-size 8 --gpu-memory 24
        8e9 --world-size 8 --dtype bfloat16 --master-weights fp32
        Llama-3-8B/config.json --sharding fsdp
        --model examples.model:build --sharding zero2 --bandwidth 200
        model.safetensors.index.json --world-size 64 --plot plan.png
        --shapes gpt2 --algorithm muon --rest lion
        """,
        "\n".join(f"{name:9} {means}" for name, means in SHARDINGS.items()),
        "[MODEL]",
    )
    command.add_argument("file", nargs="?", type=file_or_count, metavar="MODEL", help="see above")
    add_source(command)
    command.add_argument("--world-size", type=number, default=8, metavar="W", help="ranks (8)")
    command.choice(
        "--sharding",
        SHARDINGS,
        "plan whose ranks are listed (zero1); with --gpu-memory the only one",
    )
    add_dtype(command, "--grad-dtype", FLOATS, "dtype of gradients (their parameters')")
    command.choice("--master-weights", MASTERS, "FusedAdamW's master_weights (none)")
    add_dtype(command, "--state-dtype", MOMENTS, "dtype of the moments")
    command.names(
        "--fp32-moments",
        'parameters that keep fp32 moments with int8: "embedding", or patterns of names; "" '
        "for none (embedding)",
    )
    command.add_argument(
        "--ema-decay",
        type=float,
        metavar="D",
        help="keep averages of the weights (none); what moves counts a GPU's pass over them",
    )
    add_dtype(command, "--ema-dtype", AVERAGES, "dtype of the averages")
    command.choice(
        "--algorithm",
        ALGORITHMS,
        "of the step (adamw); muon and normuon step the matrices that muon_groups chooses",
        default="adamw",
    )
    rest = [name for name in ALGORITHMS if name not in OF_MATRICES]
    command.choice("--rest", rest, "algorithm beside Muon (adamw)")
    command.names(
        "--not-muon", "patterns of the names of further parameters that Muon does not step"
    )
    command.switch("--amsgrad", "include Adam's third moment")
    command.switch("--momentum", "include SGD's momentum")
    command.switch("--no-norm", "gradients are neither clipped nor checked")
    command.choice("--state-device", ("cpu",), "hold masters and moments in memory of the host")
    for option, metavar, text in (
        ("--state-fraction", "F", "the part of them that is held there (1)"),
        ("--bandwidth", "GB/S", "bandwidth of memory; adds the step's time"),
        ("--network", "GB/S", "network bandwidth of a rank; adds the time to send"),
        ("--link", "GB/S", "between GPU and host, in each direction"),
        ("--host-bandwidth", "GB/S", "of the host's memory for each GPU, with --link: adds the "
         "time of a step by the CPU"),
        ("--gpu-memory", "GB", "of a GPU: lists the settings that fit, fastest first, of those "
         "that the other options leave open; states lie on the host where less than 10%% of this "
         "were left"),
        ("--host-memory", "GB", "of the host for each GPU, with --gpu-memory: leaves out what "
         "needs more there"),
    ):  # fmt: skip
        command.add_argument(option, type=positive, metavar=metavar, help=text)
    command.switch("--json", "print everything as JSON")
    command.file("--plot", "draw bars, such as plan.png")
    return _checked_plan(command.parse_args(args))


def _checked_plan(options: argparse.Namespace) -> argparse.Namespace:
    """Returns the options of plan, or raises for those that do not go together."""
    if isinstance(options.file, int):
        if options.params is not None:
            raise CommandError("give one of MODEL, --model, --params and --shapes")
        options.file, options.params = None, options.file
    chosen = (options.file, options.model, options.params, options.shapes)
    if sum(source is not None for source in chosen) != 1:
        raise CommandError("give one of MODEL, --model, --params and --shapes")
    on_host, muon = options.state_device, options.algorithm in OF_MATRICES
    for option, needed, is_there in (
        ("state_fraction", "--state-device cpu", on_host),
        ("link", "--state-device cpu or --gpu-memory", on_host or options.gpu_memory),
        ("host_bandwidth", "--link", options.link),
        ("ema_dtype", "--ema-decay", options.ema_decay is not None),
        ("host_memory", "--gpu-memory", options.gpu_memory),
        ("rest", "--algorithm muon", muon),
        ("not_muon", "--algorithm muon", muon),
        ("fp32_moments", "--state-dtype int8", options.state_dtype == "int8"),
    ):
        if getattr(options, option) is not None and not is_there:
            raise CommandError(f"--{option.replace('_', '-')} needs {needed}")
    if options.gpu_memory and options.plot:
        raise CommandError("--plot shows what is held, not what fits: leave out --gpu-memory")
    if options.world_size > MOST_RANKS:
        raise CommandError(f"--world-size {options.world_size:,}: expected {MOST_RANKS:,} at most")
    return options


MOST_STEPS = 10_000_000
"""Limit of the steps, because every step's rate is computed."""


def several(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Returns a parser of comma-separated values."""
    return functools.wraps(read)(lambda text: [read(part.strip()) for part in text.split(",")])


def generation(text: str) -> int:
    return ["1", "2"].index(text) + 1


def whole(text: str) -> int:
    """Parses a whole number, also in the form 1e3."""
    value = float(text)
    if not value.is_integer() or abs(value) >= 2**62:
        raise ValueError
    return int(value)


CHOICES: dict[str, tuple[Any, Callable[[str], Any], str, str]] = {
    "lr": (1.0, positive, "LR", "learning rate, which the factor multiplies (1)"),
    "warmup": (0, whole, "N", "whole steps of warmup (0)"),
    "decay_ratio": (
        *(None, float, "SHARE"),
        "share of the steps in which the rate decays (all steps after the warmup)",
    ),
    "decay": ("linear", str, "KIND", "linear, sqrt or cosine (linear)"),
    "min_factor": (0.0, float, "SHARE", "final rate as a share of LR (0)"),
    "generation": (
        *(2, generation, "1|2"),
        "1: torchtitan's formula before 0.1, which the Trainer uses; 2: the later formula (2)",
    ),
}
"""The options that need --steps: default, parser of one value, placeholder and help."""


def schedule(args: list[str]) -> argparse.Namespace:
    command = Parser(
        "schedule",
        "Shows learning rates of the warmup-stable-decay family, as the Trainer and the "
        "containers compute them. Where an option has several values with commas between "
        "them, each combination is a curve.",
        """
        --steps 1000 --warmup 100 --lr 3e-4
        --steps 1000 --warmup 100 --decay linear,sqrt,cosine --plot lr.png
        --config examples/demo.toml --config other.toml --csv lr.csv
        """,
    )
    command.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="TOML",
        help="the file of a Trainer job; repeatable",
    )
    command.add_argument("--steps", type=number, metavar="N", help="steps of training")
    for name, (_, read, metavar, text) in CHOICES.items():
        option = f"--{name.replace('_', '-')}"
        command.add_argument(option, type=several(read), metavar=metavar, help=text)
    command.add_argument(
        "--rows", type=number, default=11, metavar="N", help="rows of the table (11)"
    )
    command.add_argument(
        "--csv", metavar="FILE", help="write every step as CSV; - prints the CSV and nothing else"
    )
    command.file("--plot", "draw the curves, such as lr.png")
    options = command.parse_args(args)
    if options.steps is not None and options.steps > MOST_STEPS:
        raise CommandError(f"--steps is {options.steps:,}, expected {MOST_STEPS:,} at most")
    asked = [name for name in CHOICES if getattr(options, name) is not None]
    if options.steps is None and asked and options.config:
        option = min(asked).replace("_", "-")
        raise CommandError(f"--{option} needs --steps; a job's schedule is in its file")
    if options.steps is None and not options.config:
        raise CommandError("give --steps, or a job by --config")
    expect_paths(*options.config)
    return options


def bench(args: list[str]) -> argparse.Namespace:
    command = Parser(
        "bench",
        "Times clipping and one AdamW step: this package's, torch's, and those of bitsandbytes, "
        "apex and torchao where they are installed. All step the same parameters and gradients "
        "in turn. The roofline is a += b over large tensors on the same threads, also in turn. "
        "With --algorithm muon it times FusedMuon and torch's two optimizers.",
        """
        --shapes gpt2
        --shapes gpt2 --algorithm muon
        --model examples.model:build --seconds 10
        --shapes 2000x1000 --markdown bench.md --plot bench.png
        --params 1e8 --dtype bfloat16 --master-weights fp32 --json
        --params 1B --dtype bf16 --master-weights remainder8 --state-dtype int8 --offload
        """,
    )
    add_source(command)
    command.choice(
        "--algorithm",
        ("adamw", "muon"),
        "of the step (adamw); muon steps the matrices that muon_groups chooses, and AdamW "
        "the rest, convolutions and stacks of matrices too, which torch's Muon does not take",
        default="adamw",
    )
    command.choice(
        "--master-weights",
        MASTERS,
        "masters of 16-bit parameters; torch is then timed on fp32 copies, with the casts",
    )
    command.switch(
        "--offload",
        "measure instead what states in host memory cost: the link, the host, the steps",
    )
    add_dtype(command, "--state-dtype", MOMENTS, "with --offload, dtype of the moments")
    command.add_argument(
        "--device", help="cpu, cuda or such as cuda:1 (cpu; with --offload a GPU if there is one)"
    )
    command.add_argument("--threads", type=number, metavar="N", help="CPU threads (torch's number)")
    command.add_argument("--seconds", type=positive, default=12.0, help="how long to time (12)")
    command.switch("--json", "print everything as JSON")
    command.file("--markdown", "write a Markdown table")
    command.file("--plot", "draw a bar chart, such as bench.png")
    return command.parse_args(args)


# ---- checkpoints ---------------------------------------------------------------------------------


FORMATS = ("torch", "dcp")


def inspect(args: list[str]) -> argparse.Namespace:
    command = Parser(
        "inspect",
        "Shows what a checkpoint holds: a file of torch.save or safetensors, a Lightning .ckpt, "
        "a folder of torch.distributed.checkpoint, of Hugging Face's Trainer or of Accelerate. "
        "It may be of this package's optimizers, of torch's, or of a model. One tensor at a time "
        "is in memory, and no code of the files runs. The hash is SHA-256 over all tensors in "
        "the order of their keys: key, dtype, shape, elements. It is the same in both formats.",
        """
        optimizer.pt
        output/checkpoint-500
        outputs/checkpoint/step-1000 --tensors
        optimizer.pt --no-hash --json
        """,
        takes="CHECKPOINT",
    )
    command.add_argument("checkpoint", type=Path)
    command.switch("--tensors", "list every tensor")
    command.switch("--no-hash", "compute no hash, so that elements are not read")
    command.switch("--json", "print everything as JSON")
    options = command.parse_args(args)
    expect_paths(options.checkpoint)
    return options


def convert(args: list[str]) -> argparse.Namespace:
    command = Parser(
        "convert",
        "Rewrites a checkpoint, of all kinds that inspect reads: as a file of torch.save or a "
        "folder of torch.distributed.checkpoint, with other master weights or moments. A folder is "
        "written one tensor at a time; for a file, what changes is in memory. Nothing is at "
        "OUTPUT before all of it is written. Layouts (by index, by name) stay as they are.",
        """
        ours.pt torch.pt --to-torch --save-weights fp32_weights.pt
        torch.pt ours.pt --master-weights remainder --weights fp32_model.pt
        checkpoint-500 ours.pt --master-weights remainder --weights checkpoint-500
        step-1000 step-1000-small --state-dtype int8
        optimizer.pt folder --format dcp
        """,
        takes="INPUT OUTPUT",
    )
    command.add_argument("input", type=Path)
    command.add_argument("output", type=Path)
    command.choice("--format", FORMATS, "format of OUTPUT (torch for .pt and .pth, else INPUT's)")
    command.switch(
        "--to-torch",
        "write the state of torch.optim.AdamW over fp32 weights: fp32 moments, no master "
        "weights, no entries of this package",
    )
    command.choice("--master-weights", ("none", *MASTERS), "kind of master weights in OUTPUT")
    add_dtype(command, "--state-dtype", MOMENTS, "dtype of the moments")
    command.names(
        "--fp32-moments",
        "patterns of the names of parameters that keep fp32 moments, such as embeddings, "
        "which a checkpoint does not mark",
    )
    command.file(
        "--weights",
        "the model's checkpoint: bf16 weights turn remainders into master weights; fp32 "
        "weights provide missing master weights or remainders; found by name, and for a state "
        "without names by order and shape, where that is clear",
        metavar="CHECKPOINT",
    )
    command.file(
        "--save-weights", "also write the exact master weights, by name; *.safetensors as such"
    )
    command.switch("--force", "replace existing files")
    options = command.parse_args(args)
    if options.to_torch:
        floats = options.state_dtype in (None, "float32")
        if options.master_weights not in (None, "none") or not floats:
            raise CommandError("--to-torch keeps no master weights, and fp32 moments")
        options.master_weights, options.state_dtype = "none", "float32"
    if options.fp32_moments and options.state_dtype != "int8":
        raise CommandError("--fp32-moments are exceptions from --state-dtype int8")
    if options.output.suffix == ".safetensors":
        raise CommandError(
            f"{options.output}: safetensors hold no param groups; name the output such as "
            f"{options.output.with_suffix('.pt')}"
        )
    expect_paths(options.input, options.weights)
    return options


def info(args: list[str]) -> argparse.Namespace:
    command = Parser(
        "info",
        "Shows what is installed, what the library was built for and what it uses here, and "
        "compares three steps on each device with float64. Exit code 1 if one is wrong.",
        """
        --json
        """,
    )
    command.switch("--json", "print everything as JSON")
    return command.parse_args(args)


PARSERS = {parser.__name__: parser for parser in (info, plan, schedule, bench, inspect, convert)}
"""Functions that check a command's arguments and return its options."""
