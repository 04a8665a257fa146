"""python -m torchopt_ext bench, on tensors small enough to take no time."""

import json
from types import SimpleNamespace

import pytest
import torch

from torchopt_ext.cli import bench
from torchopt_ext.cli.model_files import from_options

SMALL = ("bench", "--shapes", "20x100,2x30x40", "--seconds", "0.02")


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    """Has a small roofline, and runs eagerly: torchao's step would compile for half a minute."""
    monkeypatch.setattr(bench, "ELEMENTS", 2**18)
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize(
    ("options", "moved"),
    [
        ([], 32),
        (["--dtype", "bfloat16"], 16),
        (["--dtype", "bfloat16", "--master-weights", "fp32"], 30),
        (["--dtype", "bfloat16", "--master-weights", "remainder"], 28),
    ],
)
def test_bench_times_ours_beside_torchs(run, options, moved):
    found = json.loads(run(*SMALL, *options, "--json"))
    assert found["parameters"] == 4400
    assert found["bytes_moved"] == moved * 4400
    assert found["rounds"] >= 3
    assert found["roofline_bytes_per_second"] > 0
    assert {bench.OURS, bench.FUSED} <= found["steps"].keys()
    for step in found["steps"].values():
        assert 0 < step["q25"] <= step["median"] <= step["q75"]
    assert found["steps"][bench.OURS]["times_ours"] == 1
    for label in bench.OTHERS:
        assert (label in found["steps"]) != (label in found["missing"])


@pytest.mark.parametrize("options", [[], ["--dtype", "bfloat16", "--master-weights", "fp32"]])
def test_bench_times_muon_beside_torchs_two_optimizers(run, options):
    found = json.loads(run(*SMALL, "--algorithm", "muon", *options, "--json"))
    assert [*found["steps"]] == [bench.OUR_MUON, bench.MUON]
    assert found["steps"][bench.OUR_MUON]["times_ours"] == 1
    assert found["bytes_moved"] > 0
    assert found["missing"] == []


def test_muon_steps_what_muon_groups_chooses():
    """Both step the hidden matrices by Muon, and the embeddings and vectors by AdamW."""
    source = from_options(SimpleNamespace(model=None, params=None, shapes="gpt2", dtype=None))
    chosen = bench.matrices_of(source, source.entries)
    assert {source.entries[i].name.split(".")[0] for i in chosen} == {"h"}
    assert len(chosen) == 48
    params = [torch.randn(6, 4).requires_grad_(), torch.randn(6, 4).requires_grad_()]
    for param in params:
        param.grad = torch.randn(6, 4)
    start = [param.detach().clone().requires_grad_() for param in params]
    for other, param in zip(start, params, strict=True):
        other.grad = param.grad
    bench.torchs_muon(params, {1})()
    torch.optim.AdamW([start[0]], fused=True).step()
    torch.optim.Muon([start[1]]).step()
    assert all(map(torch.equal, params, start))


def test_the_others_steps_are_the_same_training():
    """Peers for 16-bit parameters take torch's fp32 step on masters and round the result."""
    params = [torch.randn(50).bfloat16().requires_grad_()]
    params[0].grad = torch.randn(50).bfloat16()
    start = params[0].detach().float().requires_grad_()
    start.grad = params[0].grad.float()
    bench.clip_then([start], torch.optim.AdamW([start], fused=True).step)
    steps, _ = bench.peers(params, "fp32")
    steps[bench.FUSED]()
    assert torch.equal(params[0], start.bfloat16())


def test_a_clock_waits_for_its_device(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", calls.append)
    device = torch.device("cuda", 1)
    assert bench.seconds_of(lambda: calls.append("step"), device) > 0
    assert calls == [device, "step", device]


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        (
            {"slow": (20, 1.9, 2.1), "slower": (30, 2.9, 3.1)},
            "You would gain 50% of the time of slow: a step takes 10.0 ms instead of 20.0 ms, "
            "which saves 10.0 s in 1,000 steps.",
        ),
        (
            {"slow": (20, 1.9, 2.1), "alike": (10.5, 0.98, 1.1)},
            "You would gain no time here: ours and alike take the same within their spread.",
        ),
        (
            {"fast": (5, 0.49, 0.51)},
            "You would gain no time here: fast takes 5.00 ms a step, ours 10.0 ms.",
        ),
    ],
)
def test_bench_says_what_is_gained(others, sentence):
    """The quartiles are those of the ratios of each round, which a slow machine does not widen."""
    measured = {
        label: {"median": ms / 1e3, "times_ours": ms / 10, "times_ours_q25": least,
                "times_ours_q75": most}
        for label, (ms, least, most) in {"ours": (10, 1, 1), **others}.items()
    }  # fmt: skip
    assert bench.gain({"steps": measured}) == sentence


class Broken(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("no compiler")


def test_bench_writes_what_it_shows_and_leaves_out_others_that_fail(run, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "OTHERS", {"Broken": (__name__, "Broken")})
    page, picture = tmp_path / "bench.md", tmp_path / "bench.png"
    shown = run(*SMALL, "--markdown", page, "--plot", picture)
    assert bench.OURS in shown and "not usable here: Broken" in shown
    assert shown.rpartition("\n\n")[2].startswith("You would gain ")
    assert f"| {bench.FUSED} |" in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_rejects(fails, tmp_path, monkeypatch):
    half = ["--dtype", "float16", "--master-weights", "remainder"]
    for args, problem in (
        (["--shapes", "0x3"], "names no shapes"),
        (["--shapes", "2x3", "--device", "abacus"], "--device abacus"),
        (["--shapes", "2x3", "--markdown", tmp_path], "is a folder: not replaced"),
        (["--shapes", "2x3", "--device", "meta"], "--device is meta, expected cpu or cuda"),
        (["--shapes", "2x3", "--threads", "1e6"], "--threads is 1000000; this machine has"),
        (["--shapes", "2x3", "--seconds", "-1"], "-1 is not a number above 0"),
        (["--shapes", "2x3", *half], "bfloat16 only"),
        (["--shapes", "2x3", "--master-weights", "remainder"], "and 2x3 has none"),
        (["--shapes", "2x3", "--algorithm", "muon"], "2x3 has no matrices for Muon"),
        (["--params", "1e15"], "--params 1000000000000000 is too large: weights"),
    ):
        assert problem in fails("bench", *args)

    def full(*_):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(bench, "filled", full)
    assert "2x3 is too large: CUDA out of memory" in fails("bench", "--shapes", "2x3")
