"""bench --offload, on buffers small enough to take no time."""

import contextlib
import json
from typing import ClassVar

import pytest
import torch

from torchopt_ext import FusedAdamW
from torchopt_ext.cli import bench_offload, bench_runs

SMALL = ("bench", "--offload", "--shapes", "20x100,2x30x640", "--seconds", "0.02")
ELEMENTS = 20 * 100 + 2 * 30 * 640


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(bench_offload, "ELEMENTS", 2**12)


@pytest.fixture
def gpu(monkeypatch, params_on_gpu):
    """Lets the CPU stand for a GPU, which needs no streams. Returns the streams that were used."""
    used = []
    monkeypatch.setattr(bench_offload, "has_link", lambda device: True)
    monkeypatch.setattr(bench_offload, "as_seen_by", lambda device, host: host)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(
        torch.cuda, "stream", lambda stream: used.append(stream) or contextlib.nullcontext()
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(bench_offload, "FusedAdamW", Mapped)
    Mapped.built, Mapped.asked = [], []
    return used


class Mapped(FusedAdamW):
    """Notes which paths it is asked for, and steps mapped."""

    built: ClassVar[list[FusedAdamW]]
    asked: ClassVar[list[str]]
    offload_step = property(lambda self: "mapped", lambda self, path: self.asked.append(path))

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.built.append(self)


HELD = pytest.mark.parametrize(
    ("options", "element"),
    [
        ([], 8),
        (["--dtype", "bf16", "--master-weights", "fp32"], 12),
        (["--dtype", "bf16", "--master-weights", "remainder", "--state-dtype", "bf16"], 6),
    ],
)


@HELD
def test_without_a_gpu_it_says_what_needs_one(run, options, element):
    found = json.loads(run(*SMALL, *options, "--json"))
    assert found["parameters"] == ELEMENTS
    assert found["bytes_on_host"] == element * ELEMENTS
    assert [*found["bytes_per_second"]] == [bench_offload.HOST]
    assert [*found["steps"]] == [bench_offload.ON_CPU]
    assert found["rounds"] >= 3
    shown = " ".join(run(*SMALL, *options).split())
    assert bench_offload.NEEDS_GPU in shown
    least = f"{1e3 * element * ELEMENTS / 55e9:.3f}"
    assert shown.endswith(f"{least} ms at 55 GB/s (PCIe 5), which is arithmetic and not measured.")


@HELD
def test_with_a_gpu_it_measures_link_host_and_all_steps(run, gpu, options, element):
    found = json.loads(run(*SMALL, *options, "--json"))
    assert found["bytes_on_host"] == element * ELEMENTS
    assert [*found["bytes_per_second"]] == [
        bench_offload.UP,
        bench_offload.DOWN,
        bench_offload.BOTH,
        bench_offload.READ,
        bench_offload.WRITE,
        bench_offload.READ_WRITE,
        bench_offload.HOST,
        bench_offload.BESIDE,
    ]
    assert all(rate > 0 for rate in found["bytes_per_second"].values())
    assert [*found["steps"]] == [bench_offload.ON_GPU, *bench_offload.PATHS.values()]
    assert len(set(gpu)) == 2  # one stream a direction
    shown = " ".join(run(*SMALL, *options).split())
    assert bench_offload.NEEDS_GPU not in shown


def test_each_path_steps_the_states_on_the_host(gpu):
    like = [torch.empty(30, device="meta")]
    steps = bench_offload.steps_of(like, torch.device("cpu"), {})
    assert all(step() > 0 for step in steps.values())
    assert [optimizer.host_bytes for optimizer in Mapped.built] == [0, 240]
    assert Mapped.asked == [*bench_offload.PATHS] == ["mapped", "staged", "host"]
    assert [optimizer.control.steps for optimizer in Mapped.built] == [1, 6]


def test_bytes_are_counted_once_for_each_direction(gpu):
    _, moved = bench_offload.transfers(torch.device("cpu"))
    count = 4 * 2**12
    assert moved[bench_offload.UP] == moved[bench_offload.READ] == count
    assert moved[bench_offload.BOTH] == moved[bench_offload.READ_WRITE] == 2 * count
    assert moved[bench_offload.HOST] == moved[bench_offload.BESIDE] == 3 * count


def test_copies_go_both_ways(gpu, monkeypatch):
    """Their buffers differ, so that the values tell which copies were made."""
    ones, zeros = [], []
    make = torch.ones, torch.zeros
    monkeypatch.setattr(torch, "ones", lambda *a, **k: ones.append(make[0](*a, **k)) or ones[-1])
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: zeros.append(make[1](*a, **k)) or zeros[-1])
    measures, _ = bench_offload.transfers(torch.device("cpu"))
    there, back = zeros
    measures[bench_offload.WRITE]()
    measures[bench_offload.UP]()
    assert there.eq(1).all()
    measures[bench_offload.READ_WRITE]()
    measures[bench_offload.BOTH]()
    assert there.eq(2).all()
    assert back.eq(0).all()  # copied from, never to


def test_one_sentence_says_what_a_user_gains_and_pays():
    for times, path in (((57.25e-3, 60e-3, 81e-3), "mapped"), ((90e-3, 57.25e-3, 81e-3), "staged")):
        steps = {bench_offload.ON_GPU: {"median": 5.1e-3}}
        for label, median in zip(bench_offload.PATHS.values(), times, strict=True):
            steps[label] = {"median": median}
        assert bench_offload.verdict({"steps": steps, "bytes_on_host": 3e9}) == (
            "state_device='cpu' takes 3.00 GB out of the GPU's memory, and clipping and a step "
            f"then take 57.2 ms with offload_step='{path}' instead of 5.10 ms."
        )


def test_rejected(fails, monkeypatch):
    for args, problem in (
        (["--offload", "--algorithm", "muon"], "--offload measures AdamW: --algorithm is muon"),
        (["--offload", "--plot", "a.png"], "--plot does not go with --offload"),
        (["--offload", "--markdown", "a.md"], "--markdown does not go with --offload"),
        (["--state-dtype", "bf16"], "--state-dtype needs --offload"),
        (["--offload", "--device", "meta"], "--device is meta, expected cpu or cuda"),
        (["--offload", "--device", "abacus"], "--device abacus"),
    ):
        assert problem in fails("bench", "--shapes", "2x3", *args)

    def full(*_):
        raise RuntimeError("cannot lock 24 bytes of host memory")

    monkeypatch.setattr(bench_runs, "filled", full)
    assert "2x3 on cpu: cannot lock 24 bytes" in fails("bench", "--offload", "--shapes", "2x3")
