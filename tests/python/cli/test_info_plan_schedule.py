"""python -m torchopt_ext info, plan and schedule."""

import cProfile
import importlib
import json
import math
import pstats
import re
import struct
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import torchopt_ext
from torchopt_ext import muon_groups
from torchopt_ext.__main__ import COMMANDS, main
from torchopt_ext.cli import info
from torchopt_ext.cli.terminal import figures, size
from torchopt_ext.ops import lr_factor
from torchopt_ext.optim.estimate import SHARDINGS, RankBytes, estimate
from torchopt_ext.statedict.safetensors import DTYPES

ROOT = Path(__file__).parents[3]
BF16 = torch.bfloat16

# ---- all commands --------------------------------------------------------------------------------


def test_the_installed_script_is_the_module():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["torchopt-ext"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "train"])
def test_help_has_examples_and_unknown_options_are_said_in_a_sentence(command, capsys, fails):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"examples:\n  python -m torchopt_ext {command}" in shown
    assert max(map(len, shown.splitlines())) <= 80
    needed = {"inspect": ["x"], "convert": ["x", "y"]}.get(command, [])
    assert "--colour" in fails(command, *needed, "--colour")


def test_version_and_interruption(run, monkeypatch):
    assert run("--version") == f"{torchopt_ext.__version__}\n"

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "main", interrupt)
    assert main(["info"]) == 130


def test_numbers_for_people():
    for value, text in ((0, "0"), (0.0123, "0.012"), (0.5, "0.500"), (1.234, "1.23"),
                        (12.34, "12.3"), (1234.5, "1,234"), (99.96, "100")):  # fmt: skip
        assert figures(value) == text
    for count, text in ((0, "0 B"), (999, "999 B"), (1500, "1.50 kB"), (2.5e12, "2.50 TB")):
        assert size(count) == text


@pytest.mark.parametrize("command", [["plan", "--shapes", "gpt2"], ["schedule", "--steps", "50"]])
def test_pictures_are_made_or_name_the_extra(run, fails, tmp_path, monkeypatch, command):
    pytest.importorskip("matplotlib")
    file = tmp_path / "a.png"
    run(*command, "--plot", file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert [*tmp_path.iterdir()] == [file]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'torchopt_ext[cli]'" in fails(*command, "--plot", "x.png")


# ---- info ----------------------------------------------------------------------------------------


def test_info(run, monkeypatch, capsys):
    found = json.loads(run("info", "--json"))
    assert found["versions"]["torchopt_ext"] == torchopt_ext.__version__
    assert found["cuda"]["built"] == torchopt_ext.cuda_built()
    assert found["cpu"]["threads"] == torch.get_num_threads()
    assert found["self_test"]["cpu"]["passed"]
    assert 0 < found["self_test"]["cpu"]["largest_error"] < info.TOLERANCE
    text = run("info")
    assert "passed" in text
    assert found["cpu"]["instruction_set"] in text
    monkeypatch.setattr(info, "TOLERANCE", 1e-12)
    assert main(["info"]) == 1
    assert "failed" in capsys.readouterr().out


# ---- plan ----------------------------------------------------------------------------------------

# Balanced: tensors start at multiples of 64 in one bucket, cut 192 elements into the second. A rank
# holds 1,000 + 192 elements, 1,216 with padding; the bucket is twice that.
PLAN = """\
2x1000,3x10x10
2,300 parameters in 5 tensors, float32

2 ranks; kB on the rank that holds most:

          weights  grads  masters  moments  held  moved  sent
--------  -------  -----  -------  -------  ----  -----  ----
ddp          9.20   9.20        0     18.4  36.8   73.6  9.20
zero1        9.20   9.20        0     9.60  28.0   38.4  13.8
balanced     9.73   14.1        0     9.54  33.3   38.1  9.20
zero2        9.73   4.86        0     9.54  24.1   38.1  9.20
fsdp         4.60   4.60        0     9.20  18.4   36.8  13.8
"""


def test_plan_prints_its_tables(run):
    shown = run("plan", "--shapes", "2x1000,3x10x10", "--world-size", "2")
    assert shown.startswith(PLAN)
    assert "\ngreedy    1,100  1,200         +4.3%\n" in shown
    assert shown.endswith(
        "rank  weights  grads  masters  moments  held  moved  sent\n"
        "----  -------  -----  -------  -------  ----  -----  ----\n"
        "0        9.20   9.20        0     9.60  28.0   38.4  13.8\n"
        "1        9.20   9.20        0     8.80  27.2   35.2  13.8\n"
    )


def test_plan_shows_averages(run):
    args = ["--shapes", "2x1000", "--world-size", "1", "--ema-decay", "0.999"]
    header, ddp = (run("plan", *args).splitlines()[n].split() for n in (5, 7))
    shown = dict(zip(header, ddp[1:], strict=True))
    assert (shown["EMA"], shown["held"], shown["moved"]) == ("8.00", "40.0", "88.0")


@pytest.mark.parametrize("command", ["plan", "schedule"])
def test_the_page_shows_what_is_printed(command, run):
    page = (ROOT / "docs/cli.md").read_text()
    shown = re.search(rf"-m torchopt_ext ({command} [^`]+)```\n+```text\n(.+?)```", page, re.S)
    assert shown
    assert run(*shown[1].replace("\\\n", " ").split()) == shown[2]


def test_plan_of_a_count(run):
    args = ["plan", "--world-size", "64", "--bandwidth", "200", "--network", "1", "--params"]
    shown = run(*args, f"{2**43}")
    assert "8,796,093,022,208 parameters in 1,024 tensors" in shown
    assert "TB on the rank that holds most, times in s:" in shown
    assert "\n0-63 " in shown
    ddp = json.loads(run(*args, "8e9", "--json"))["shardings"]["ddp"]
    assert run(*args, "8e9") == run(*args, "8B") == run(*args, "8000M")
    assert ddp["ranks"][0]["held"] == pytest.approx(8e9 * 16, rel=1e-5)
    assert ddp["step_seconds"] == pytest.approx(8e9 * 32 / 200e9)
    assert ddp["send_seconds"] == ddp["ranks"][0]["sent"] / 1e9


def test_plan_of_very_many_ranks(run):
    """Takes a few calls for each rank, also with 1,024 buckets."""
    profile = cProfile.Profile()
    shown = profile.runcall(run, "plan", "--params", "1e15", "--world-size", "100000")
    assert pstats.Stats(profile).total_calls < 30 * 100_000
    assert re.search(r"\nbalanced +9,\d{3},\d{3},\d{3} +10,0\d\d,\d{3},\d{3} +\+0\.\d%\n", shown)


def as_printed(rank: RankBytes) -> dict[str, Any]:
    added = {"held": rank.held, "on_device": rank.on_device}
    return asdict(rank) | added | {"host_step": rank.host_step._asdict()}


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ("--world-size 3", {"world_size": 3}),
        ("--grad-dtype fp16", {"grad_dtype": torch.float16}),
        ("--grad-dtype fp32", {"grad_dtype": torch.float32}),
        ("--grad-dtype fp64", {"grad_dtype": torch.float64}),
        ("--master-weights remainder8", {"master_weights": "remainder8"}),
        ("--state-dtype bf16", {"state_dtype": BF16}),
        ("--state-dtype int8", {"state_dtype": "int8"}),
        ("--amsgrad", {"amsgrad": True}),
        ("--algorithm lion", {"algorithm": "lion"}),
        ("--algorithm sgd --momentum", {"algorithm": "sgd", "momentum": 0.9}),
        ("--no-norm", {"norm": False}),
        ("--ema-decay 0.999", {"ema_decay": 0.999}),
        ("--ema-decay 0 --ema-dtype bf16", {"ema_decay": 0.0, "ema_dtype": "bfloat16"}),
        ("--state-device cpu", {"state_device": "cpu"}),
        (
            "--state-device cpu --state-fraction 0.25 --master-weights fp32",
            {"state_device": "cpu", "state_fraction": 0.25, "master_weights": "fp32"},
        ),
    ],
)
def test_plan_estimates_what_its_options_say(run, options, arguments):
    shapes = [(100, 64)] * 2 + [(50,)] * 3
    params = [torch.empty(s, dtype=BF16, device="meta", requires_grad=True) for s in shapes]
    args = ["--shapes", "2x100x64,3x50", "--dtype", "bf16", "--world-size", "2", "--json"]
    found = json.loads(run("plan", *args, *options.split()))["shardings"]
    for sharding, plan in found.items():
        ranks = estimate(params, sharding=sharding, **{"world_size": 2} | arguments)
        assert plan["ranks"] == [*map(as_printed, ranks)]


def test_plan_of_8_bits_beside_embeddings(run, tmp_path):
    """An embedding's elements have 8 bytes of moments; each group of other rows has 128 + 8."""

    def moments(*source):
        found = json.loads(run("plan", *source, "--state-dtype", "int8", "--json"))
        return int(found["shardings"]["ddp"]["ranks"][0]["moments"])

    tables, rows = (50257 + 1024) * 768, 12 * 12 * 768 * 768
    vectors = 124_439_808 - tables - rows
    assert moments("--shapes", "gpt2") == 8 * (tables + vectors) + rows * 136 // 64
    assert moments("--shapes", "gpt2", "--fp32-moments", "") == (
        8 * vectors + (tables + rows) * 136 // 64
    )
    shapes = {"emb": ("BF16", [100, 64]), "fc": ("BF16", [10, 64])}
    file = safetensors(tmp_path / "a.safetensors", shapes)
    assert moments(file) == 110 * 136
    assert moments(file, "--fp32-moments", "embedding,^emb") == 100 * 64 * 8 + 10 * 136


def test_plan_of_a_model(run, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)
    from examples.model import build

    model = build()
    args = ["plan", "--model", "examples.model:build", "--json"]
    assert json.loads(run(*args))["parameters"] == sum(p.numel() for p in model.parameters())
    for chosen in (["embedding"], ["output", "wq"], []):
        options = ["--state-dtype", "int8", "--fp32-moments", ",".join(chosen)]
        found = json.loads(run(*args, *options))
        (rank,) = estimate(model.named_parameters(), state_dtype="int8", fp32_moments=chosen)
        assert found["shardings"]["ddp"]["ranks"][0]["moments"] == rank.moments


GPT2_MATRICES = [(768, 2304), (768, 768), (768, 3072), (768, 3072)] * 12


def test_plan_of_muon(run):
    """GPT-2's hidden matrices go to Muon. Each of the figures is that of the formula."""
    args = ["plan", "--shapes", "gpt2", "--algorithm", "muon"]
    flops = sum(5 * s * s * (4 * long + 2 * s) for s, long in GPT2_MATRICES)
    assert flops == pytest.approx(1.52e12, rel=2e-3)
    found = json.loads(run(*args, "--json"))
    elements = sum(s * long for s, long in GPT2_MATRICES)
    assert found["algorithms"] == {
        "muon": {"tensors": 48, "elements": elements},
        "adamw": {"tensors": 100, "elements": 124_439_808 - elements},
    }
    assert found["shardings"].keys() == {*SHARDINGS}
    for rank in found["shardings"]["ddp"]["ranks"]:
        assert rank["newton_schulz_flops"] == flops
        assert rank["moments"] == 8 * (124_439_808 - elements) + 4 * elements
    by_plan = {plan: its["ranks"] for plan, its in found["shardings"].items() if plan != "ddp"}
    sums = {sum(rank["newton_schulz_flops"] for rank in ranks) for ranks in by_plan.values()}
    assert sums == {flops}
    most, owned = (max(r["newton_schulz_flops"] for r in by_plan[plan]) / 1e9
                   for plan in ("zero1", "fsdp"))  # fmt: skip
    assert owned <= 1.05 * flops / 8e9
    assert most <= 1.2 * flops / 8e9  # one rank has the embedding, too
    shown = run(*args)
    assert f"\nmuon: {elements:,} elements in 48 tensors\nadamw: " in shown
    assert (
        f" Newton-Schulz: 1.52 TFLOP a step; on the rank with most, {most:.0f} GFLOP with zero1 "
        f"({most * 8e9 / flops:.2f} times the mean), "
        + ", ".join(
            f"{owned:.0f} GFLOP with {plan} ({owned * 8e9 / flops:.2f} times the mean)"
            for plan in ("balanced", "zero2", "fsdp")
        )
    ) in shown.replace("\n", " ")
    assert run(*args, "--world-size", "1").endswith("\n\nNewton-Schulz: 1.52 TFLOP a step\n")
    assert "Newton-Schulz" not in run(*args[:-2])


def llama():
    """The layers of Llama-3 8B, between an embedding and a head."""
    sizes = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)]
    sizes += [(4096, 14336), (4096, 14336), (14336, 4096)]
    layer = [torch.nn.Linear(*size, bias=False) for size in sizes * 32]
    ends = torch.nn.Embedding(128256, 4096), torch.nn.Linear(4096, 128256, bias=False)
    return torch.nn.Sequential(ends[0], *layer, ends[1])


@pytest.mark.parametrize(("ranks", "most"), [(8, 1.01), (32, 1.01), (64, 1.07), (128, 1.07)])
def test_plan_of_muon_for_llama(run, ranks, most):
    args = ["plan", "--model", f"{__name__}:llama", "--algorithm", "muon", "--world-size", ranks]
    of_plan = json.loads(run(*args, "--json"))["shardings"]["fsdp"]["ranks"]
    work = [rank["newton_schulz_flops"] for rank in of_plan]
    uneven = max(work) * ranks / sum(work)
    assert 1 <= uneven <= most
    assert f" with fsdp ({uneven:.2f} times the mean)" in run(*args).replace("\n", " ")


def test_plan_of_muon_beside_another_algorithm(run):
    args = ["plan", "--shapes", "gpt2", "--algorithm", "normuon", "--world-size", "1", "--json"]
    elements, rows = sum(s * n for s, n in GPT2_MATRICES), 12 * (3 * 768 + 3072)
    for options, states in (("--rest lion", 1), ("--rest sgd", 0), ("--rest adam --amsgrad", 3),
                            ("--rest sgd --momentum", 1)):  # fmt: skip
        rank = json.loads(run(*args, *options.split()))["shardings"]["ddp"]["ranks"][0]
        rest = 124_439_808 - elements
        assert rank["moments"] == 4 * (elements + rows + states * rest)


LAYOUTS = {  # options of 1e9 elements; GB each way, and down, up, memory, buffers of a host step
    "fp32 masters": ("bf16 --master-weights fp32", 12, (2, 2, 32, 4)),
    "remainder": ("bf16 --master-weights remainder", 10, (4, 2, 32, 4)),
    "8 bits": (
        *("bf16 --master-weights remainder8 --state-dtype int8", 3),
        (4.125, 2.125, 18.5, 4.125),
    ),
    "fp32": ("fp32", 8, (8, 4, 40, 8)),
    "fp32, 8 bits": ("fp32 --state-dtype int8", 2, (8.125, 4.125, 28.5, 8.125)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("link", "host"), [(25, 500), (55, 77), (55, 200)])
def test_plan_of_paths_for_states_on_the_host(run, layout, link, host):
    """Formula by formula: what moves over the link and in the host's memory, and the slower."""
    options, each_way, step = LAYOUTS[layout]
    args = ["--params", "1e9", "--world-size", "1", "--dtype", *options.split()]
    args += ["--state-device", "cpu", "--link", str(link), "--host-bandwidth", str(host)]
    for fraction in (1, 0.25):
        of = ["--state-fraction", str(fraction)]
        found = json.loads(run("plan", *args, *of, "--json"))["shardings"]["ddp"]
        (rank,) = found["ranks"]
        # The last tensor is of one dimension, and keeps fp32 moments.
        assert rank["host"] == pytest.approx(each_way * 1e9 * fraction, rel=1e-5)
        down, up, memory, _ = step
        assert [*rank["host_step"]] == ["down", "up", "memory", "buffers"]
        assert [*rank["host_step"].values()] == pytest.approx(
            [part * 1e9 * fraction for part in step], rel=1e-5
        )
        streamed = fraction * max(each_way / link, 2 * each_way / host)
        by_cpu = fraction * max(max(down, up) / link, memory / host)
        assert found["offload_seconds"] == pytest.approx(
            {"mapped": streamed, "staged": streamed, "host": by_cpu}, rel=1e-5
        )
        assert found["fastest"] == ("host" if by_cpu < streamed else "mapped")


def test_plan_shows_the_paths(run):
    args = ["plan", "1B", "--world-size", "1", "--dtype", "bf16", "--master-weights", "fp32"]
    args += ["--state-device", "cpu"]

    def cells(*options):
        shown = run(*args, *options)
        return shown[shown.index("States on the host") :].split("ddp")[1].splitlines()[0].split()

    held = ["12.0", "4.00", "2.00", "2.00", "4.00"]
    assert cells() == held
    assert cells("--link", "55") == [*held, "218"]
    assert cells("--link", "55", "--host-bandwidth", "200") == [*held, "218", "160", "host"]
    assert cells("--link", "55", "--host-bandwidth", "77") == [*held, "312", "416", "mapped"]


def test_steps_on_the_host_leave_muons_matrices_mapped(run):
    args = ["plan", "--shapes", "gpt2", "--world-size", "1", "--state-device", "cpu", "--json"]
    elements = sum(s * n for s, n in GPT2_MATRICES)
    rest = 124_439_808 - elements
    for options, momentum in (((), 4), (("--state-dtype", "int8", "--fp32-moments", ""), 1)):
        found = json.loads(run(*args, "--algorithm", "muon", *options))
        step = found["shardings"]["ddp"]["ranks"][0]["host_step"]
        if not options:
            assert step["memory"] == 2 * momentum * elements + 2 * (8 + 12) * rest
        assert step["down"] >= momentum * elements + 8 * rest
        assert step["down"] <= momentum * elements + 8.125 * rest
        assert step["buffers"] <= 8.125 * rest


def test_plan_of_muon_for_a_model(run, monkeypatch):
    """The model's groups are those of muon_groups, and frozen parameters are held beside them."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)
    import examples.model as module

    def build():
        model = module.build()
        model.layers["0"].attention.wq.weight.requires_grad_(False)
        return model

    monkeypatch.setattr(module, "frozen_in_part", build, raising=False)
    args = ["plan", "--model", "examples.model:frozen_in_part", "--json", "--world-size", "3"]
    args += ["--dtype", "bf16", "--master-weights", "remainder8", "--state-dtype", "int8"]
    model = build().bfloat16()
    frozen = [param for param in model.parameters() if not param.requires_grad]
    for options, adamw in (([], ()), (["--not-muon", "wk,w1"], ("wk", "w1"))):
        found = json.loads(run(*args, "--algorithm", "muon", *options))["shardings"]
        groups = muon_groups(model, adamw=adamw, quiet=True)
        for sharding, plan in found.items():
            ranks = estimate(
                [*groups, {"params": frozen}], sharding=sharding, world_size=3,
                master_weights="remainder8", state_dtype="int8",
            )  # fmt: skip
            assert plan["ranks"] == [*map(as_printed, ranks)]


def test_plan_of_muon_for_a_file(run, fails, tmp_path):
    """A file's embeddings are not known, its output layer is by its name."""
    shapes = {
        "model.embed_tokens.weight": [1000, 64],
        "model.layers.0.self_attn.q_proj.weight": [64, 64],
        "model.layers.0.mlp.experts": [4, 64, 96],
        "model.norm.weight": [64],
        "lm_head.weight": [1000, 64],
    }
    file = safetensors(tmp_path / "a.safetensors", {n: ("BF16", s) for n, s in shapes.items()})
    args = ["plan", file, "--algorithm", "muon"]
    assert "name them, such as --not-muon embed_tokens" in fails(*args)
    found = json.loads(run(*args, "--not-muon", "embed_tokens", "--json"))
    assert found["algorithms"]["muon"] == {"tensors": 2, "elements": 64 * 64 + 4 * 64 * 96}
    (flops,) = {rank["newton_schulz_flops"] for rank in found["shardings"]["ddp"]["ranks"]}
    assert flops == 5 * 64 * 64 * (4 * 64 + 2 * 64) + 4 * 5 * 64 * 64 * (4 * 96 + 2 * 64)
    found = json.loads(run(*args, "--not-muon", "", "--json"))
    assert found["algorithms"]["muon"]["tensors"] == 3


def safetensors(path, tensors):
    header, offset = {}, 0
    for name, (kind, shape) in tensors.items():
        end = offset + math.prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)  # only the header is read
    return path


def test_plan_of_safetensors_headers(run, tmp_path):
    one = safetensors(tmp_path / "a.safetensors", {"w": ("BF16", [100, 7]), "ids": ("I64", [9])})
    safetensors(tmp_path / "b.safetensors", {"v": ("F32", [50])})
    found = json.loads(run("plan", one, "--json"))
    assert (found["parameters"], found["trainable"]) == (709, 700)
    index = tmp_path / "model.safetensors.index.json"
    files = {"w": "a.safetensors", "v": "b.safetensors"}
    index.write_text(json.dumps({"weight_map": files}))
    assert "750 parameters in 2 tensors, bfloat16, float32" in run("plan", index)
    files["u"] = safetensors(tmp_path / "c.safetensors", {"u": ("F16", [7])}).name
    index.write_text(json.dumps({"weight_map": files}))
    said, command = "master_weights does not apply to parameters of float16", ["plan", index]
    command += ["--master-weights", "remainder"]
    assert said in run(*command)
    found = json.loads(run(*command, "--json"))
    assert said in found["passed_over"]
    assert found["shardings"]["ddp"]["ranks"][0]["masters"] == 2 * 700


def test_plan_reads_what_safetensors_writes(run, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = {name: torch.zeros(3, dtype=dtype) for name, dtype in DTYPES.items()}
    save_file(tensors, tmp_path / "w.safetensors")
    rank = json.loads(run("plan", tmp_path / "w.safetensors", "--json"))["shardings"]["ddp"]
    assert rank["ranks"][0]["weights"] == sum(tensor.nbytes for tensor in tensors.values())
    assert rank["ranks"][0]["elements"] == 3 * 5  # integers and 8-bit types are not trained


def test_plan_rejects(fails, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, content in {
        "long.safetensors": struct.pack("<Q", 1000) + b"{",
        "text.safetensors": b"hello, world",
        "broken.safetensors": struct.pack("<Q", 8) + b'{"w": 1}',
        "deep.safetensors": struct.pack("<Q", 50_000) + b"[" * 50_000,
        "deep.json": b"[" * 50_000,
        "index.json": b'{"weight_map": {"w": "gone.safetensors"}}',
        "other.json": b"[]",
        "odd.json": b'{"weight_map": {"w": 5}}',
        "no_python.py": b"def",
        "broken_model.py": b"import torch\ndef f(): return torch.zeros(1).item()\n"
        b"def g(): return 3\ndef lazy(): return torch.nn.LazyLinear(3)\n"
        b"def leave(): raise SystemExit(3)\n",
    }.items():
        Path(name).write_bytes(content)
    for name, kind, shape in (
        ("wide", "F32", [2**61]), ("flat", "F32", [2**70, 0]), ("small", "F6_E2M3", [4])
    ):  # fmt: skip
        safetensors(Path(f"{name}.safetensors"), {"w": (kind, shape)})
    for text, problem in (
        ("", "one of MODEL"),
        ("long.safetensors --params 3", "one of MODEL"),
        ("7B --params 3", "one of MODEL"),
        ("gone.safetensors", "there is no file or folder gone.safetensors"),
        ("long.safetensors", "ends in its header, after 1 of 1000"),
        ("text.safetensors", "is not a safetensors file: it begins with b'hello, w'"),
        ("broken.safetensors", "damaged header"),
        ("deep.safetensors", "damaged header"),
        ("deep.json", "deep.json cannot be read as JSON"),
        ("wide.safetensors", "w has the shape [2305843009213693952]"),
        ("flat.safetensors", "w has the shape"),
        ("small.safetensors", "w has the dtype F6_E2M3, expected F64, F32"),
        ("index.json", "names gone.safetensors"),
        ("other.json", "weight_map"),
        ("odd.json", "weight_map"),
        ("--model no_python:f", "cannot be imported: SyntaxError"),
        ("--model gone:f", "No module named 'gone'"),
        ("--model broken_model:h", "has no attribute 'h'"),
        ("--model broken_model:f", "fails on the meta device"),
        ("--model broken_model:lazy", "uninitialized parameter"),
        ("--model broken_model:leave", "SystemExit: 3"),
        ("--model broken_model:g", "returns int, expected"),
        ("--params many", "invalid number value: 'many'"),
        ("--params 1.5", "1.5 is not a whole number"),
        ("--params 3 --dtype int8", "'int8'"),
        ("--params 9 --world-size 1e7", "expected 1,000,000 at most"),
        ("--shapes 2000", "'2000' names no shapes"),
        ("--shapes 2x99999999999999999999", "too large"),
        ("--shapes 2x2 --master-weights fp32", "completes 16-bit parameters"),
        ("--shapes 2x2 --dtype float16 --master-weights remainder", "float16"),
        ("--shapes 2x64x64 --state-dtype int8 --fp32-moments wte", "have no names"),
        ("--shapes 2x2 --fp32-moments=", "--fp32-moments needs --state-dtype int8"),
        ("--shapes 2x2 --plot gone/x.png", "cannot write"),
        ("--params 8e9 --algorithm muon", "by names and modules, which --params 8000000000 does"),
        ("--shapes gpt2,2x64x64 --algorithm normuon", "by names and modules, which gpt2,2x64x64"),
        ("--shapes gpt2,gpt2 --algorithm muon", "by names and modules, which gpt2,gpt2"),
        ("--shapes gpt2 --algorithm muon --not-muon h.12", "no parameter has a name with"),
        ("--shapes gpt2 --algorithm muon --rest lion --amsgrad", "has no argument 'amsgrad'"),
        ("--shapes gpt2 --algorithm muon --rest normuon", "invalid choice: 'normuon'"),
        ("7B --link 55", "--link needs --state-device cpu or --gpu-memory"),
        ("7B --host-memory 64", "--host-memory needs --gpu-memory"),
        ("7B --state-device cpu --host-bandwidth 64", "--host-bandwidth needs --link"),
        ("7B --ema-dtype bf16", "--ema-dtype needs --ema-decay"),
        ("7B --ema-decay 2", "Invalid ema_decay: 2.0"),
        ("7B --gpu-memory 24 --plot x.png", "leave out --gpu-memory"),
        ("--shapes gpt2 --rest lion", "--rest needs --algorithm muon"),
        ("--shapes gpt2 --not-muon wte", "--not-muon needs --algorithm muon"),
    ):
        assert problem in fails("plan", *text.split())


# ---- schedule ------------------------------------------------------------------------------------


def test_schedule_is_what_the_containers_have(run, tmp_path):
    args = ["schedule", "--steps", "100", "--warmup", "10", "--min-factor", "0.1", "--lr", "3e-4"]
    file = tmp_path / "lr.csv"
    run(*args, "--decay", "linear,cosine", "--generation", "1,2", "--csv", file)
    header, *rows = [line.split(",") for line in file.read_text().splitlines()]
    names = [f"{kind} generation={n}" for kind in ("linear", "cosine") for n in (1, 2)]
    assert header == ["step", *names]
    assert [row[0] for row in rows] == [str(step) for step in range(100)]
    lengths = {"warmup_steps": 10, "decay_steps": 90, "min_factor": 0.1}
    for column, name in enumerate(names, 1):
        kind, _, n = name.partition(" generation=")
        form = {"decay_type": kind, "generation": int(n), "stable_steps": int(n) - 1}
        for step in (0, 9, 10, 50, 99):
            expected = 3e-4 * lr_factor(step, **lengths, **form)
            assert float(rows[step][column]) == pytest.approx(expected, rel=1e-12)


def test_schedule_prints_lines_and_tables(run):
    shown = run("schedule", "--steps", "10", "--warmup", "5", "--decay", "linear,sqrt", "--rows", 3)
    assert shown == (
        "10 steps; highest 1\n\n"
        "linear\n  ▂▄▅▇██▇▅▄▂\nsqrt\n  ▂▄▅▇██▅▃▂▁\n\n"
        "step  linear    sqrt\n----  ------  ------\n"
        "0        0.2     0.2\n4          1       1\n9        0.2  0.1056\n"
    )
    assert "highest 1.7e+308" in run("schedule", "--steps", "500", "--lr", "1.7e308")


def test_schedule_of_jobs(run, tmp_path):
    pytest.importorskip("tyro")
    job = tmp_path / "short.toml"
    job.write_text(
        "[optimizer]\nlr = 2e-3\n[lr_scheduler]\nwarmup_steps = 4\n[training]\nsteps = 8\n"
    )
    shown = run("schedule", "--config", job, "--steps", 12, "--rows", 2, "--csv", "-")
    rows = [line.split(",") for line in shown.splitlines()]
    assert rows[0] == ["step", "short", "lr"]
    assert len(rows) == 13
    expected = lr_factor(3, warmup_steps=4, stable_steps=0, decay_steps=4, generation=1)
    assert float(rows[4][1]) == pytest.approx(2e-3 * expected)
    assert rows[-1][1] == ""
    job.write_text(job.read_text().replace("steps = 4", "steps = 4\ntotal_steps = 6"))
    assert len(run("schedule", "--config", job, "--csv", "-").splitlines()) == 7
    for name, rate in (("AdamW", "0.0007999"), ("Lion", "9.999e-05")):  # without optimizer.lr
        job.write_text(f"[optimizer]\nname = '{name}'\n")
        assert f"highest {rate}" in run("schedule", "--config", job)


def test_schedule_rejects(fails):
    other = " needs --steps; a job's schedule is in its file"
    for text, problem in (
        ("", "give --steps"),
        ("--steps 1e15", "expected 10,000,000 at most"),
        ("--steps 10 --decay steep", "'steep'"),
        ("--steps 10 --min-factor 2", "min_lr_factor is 2"),
        ("--steps 10 --warmup ten", "invalid whole value: 'ten'"),
        ("--steps 10 --warmup 3.7", "invalid whole value: '3.7'"),
        ("--steps 10 --warmup 1e30 --generation 1", "invalid whole value: '1e30'"),
        ("--steps 10 --generation 3", "--generation: invalid generation value: '3'"),
        ("--config gone.toml", "gone.toml"),
        ("--config gone.toml --lr 1", f"--lr{other}"),
        ("--config gone.toml --warmup 50", f"--warmup{other}"),
        ("--config gone.toml --decay-ratio 0.5", f"--decay-ratio{other}"),
    ):
        assert problem in fails("schedule", *text.split())


@pytest.mark.parametrize(
    ("job", "problem"),
    [
        ("[optimizer]\nlr = nan", "optimizer.lr is nan in job.toml"),
        ("[optimizer]\nlr = -1.0", "optimizer.lr is -1.0 in job.toml"),
        ("[optimizer]\nname = 'Lyon'", "there is no algorithm 'lyon'"),
        ("[training]\nsteps = 0", "job.toml has 0 steps"),
        ("[training]\nsteps = 100000000000", "expected 1 to 10,000,000"),
    ],
)
def test_schedule_rejects_jobs(fails, tmp_path, monkeypatch, job, problem):
    pytest.importorskip("tyro")
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(job)
    assert problem in fails("schedule", "--config", "job.toml")
