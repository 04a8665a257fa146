"""Steps that the CPU back end makes for states on the host: same bits as by the GPU's kernels.

The memory of parameters stands for a GPU's, and simulated streams (tests/support/late_stream.py)
copy as late as a GPU's may. In `make test-host-cuda` the CUDA back end makes both kinds of steps.
"""

from __future__ import annotations

import copy
import logging
import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdamW, FusedMuon
from torchopt_ext.optim import bandwidths as bandwidths_module
from torchopt_ext.optim import host_steps
from torchopt_ext.optim.bandwidths import (
    Bandwidths,
    Crossing,
    stepped_on_host,
    streamed,
    warn_of_slow_link,
)
from torchopt_ext.optim.host_step import HostStep

from ...support.compare import assert_same_bits, bits, snapshot
from ...support.late_stream import LateStreams, stand_for_a_gpu
from ...support.problems import (
    clip_skip_or_leave_out,
    make_params,
    train,
)
from ...support.ways import WAYS, each_kind_and_way

SHAPES = ((3, 4), (7,), (130, 65), (2, 1031), (0, 2), (), (1, 33_003))
OPTIONS: dict[str, Any] = {
    "lr": 0.02, "max_grad_norm": 3.0, "skip_nonfinite": True, "rounding_seed": 5, "ema_decay": 0.9,
}  # fmt: skip


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> LateStreams:
    streams = LateStreams(early=0.3)
    stand_for_a_gpu(monkeypatch, streams)
    monkeypatch.setattr(host_steps, "_BUCKET", 30_000)  # several buckets
    return streams


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list with an entry for each bucket that was stepped on the host."""
    counted: list[int] = []
    step = HostStep.step

    def counting(self: HostStep, *args: Any) -> None:
        counted.append(len(self._weights))
        step(self, *args)

    monkeypatch.setattr(HostStep, "step", counting)
    return counted


def built(late: LateStreams, way: str, kind: str = "AdamW", **options: Any) -> Any:
    params, optimizer = WAYS[way].build(kind, shapes=SHAPES, **OPTIONS | options)
    late.optimizers.append(optimizer)
    return params, optimizer


def step(params: list[nn.Parameter], optimizer: Any, *, seed: int) -> None:
    clip_skip_or_leave_out(params, optimizer, seed)


@pytest.mark.parametrize("fraction", [1.0, 0.3])
@each_kind_and_way
def test_same_bits_by_paths_that_change(
    kind: str, way: str, fraction: float, late: LateStreams, stepped: list[int]
) -> None:
    """Resident, mapped, staged, or on the host with one or two threads, at random."""
    usual = WAYS[way].build(kind, shapes=SHAPES, **OPTIONS)
    moving = built(late, way, kind, state_device="cpu", state_fraction=fraction)
    draw, threads = random.Random(f"{kind}{way}{fraction}"), torch.get_num_threads()
    paths = ["host", "host", "host", "mapped", "staged", "staged", "resident", "auto"]
    draw.shuffle(paths)
    expected = False
    try:
        for seed, path in enumerate(paths):
            moving[1].move_state("cuda" if path == "resident" else "cpu")
            moving[1].offload_step = "mapped" if path == "resident" else path
            torch.set_num_threads(draw.choice([1, 2]))
            before = len(stepped)
            step(*usual, seed=seed)
            step(*moving, seed=seed)
            assert snapshot(moving[1]) == snapshot(usual[1]), path
            if path == "host":
                assert (moving[1].offload_path == "host") == (moving[1].host_bytes > 0)
                expected = moving[1].host_bytes > 0 and not kind.startswith("Muon")
                assert (len(stepped) > before) == expected
            elif path != "auto":
                assert len(stepped) == before
    finally:
        torch.set_num_threads(threads)
    assert moving[1].control.grad_norm == usual[1].control.grad_norm
    assert moving[1].control.skipped_steps == 1


@pytest.mark.parametrize("path", ["host", "staged"])
def test_with_overlap_and_muon(path: str, late: LateStreams, stepped: list[int]) -> None:
    """What is stepped on the host is stepped at once, everything else during forward."""
    snapshots = []
    for options in ({}, {"state_device": "cpu", "offload_step": path, "state_fraction": 0.6}):
        params = make_params([(8, 80), (64,), (80, 8), (16, 64), (16, 64), (16, 64)])
        groups = [{"params": params[:2:2]}, {"params": params[1:], "algorithm": "adamw"}]
        optimizer = FusedMuon(groups, max_grad_norm=1.0, **options)
        late.optimizers.append(optimizer)
        module = nn.Module()
        module.forward = lambda: None  # type: ignore[method-assign, assignment]
        module.weights = nn.ParameterList(params)
        if options:
            optimizer.overlap_forward(module)
        for seed in range(3):
            step(params, optimizer, seed=seed)
        optimizer.wait_for_params()
        snapshots.append(snapshot(optimizer))
    assert snapshots[0] == snapshots[1] and bool(stepped) == (path == "host")


@pytest.mark.parametrize("path", ["host", "staged"])
def test_masters_follow_weights_written_between_steps(path: str, late: LateStreams) -> None:
    for way in ("bf16, master", "bf16, remainder"):
        usual = WAYS[way].build(shapes=SHAPES, **OPTIONS)
        hosted = built(late, way, state_device="cpu", offload_step=path)
        for params, optimizer in (usual, hosted):
            step(params, optimizer, seed=0)
            with torch.no_grad():
                params[0].mul_(1.5)
            step(params, optimizer, seed=1)
            optimizer.scale_(params[2], torch.tensor([0.5, 2.0]))
            step(params, optimizer, seed=4)
        assert snapshot(usual[1]) == snapshot(hosted[1])
        # Weights that came back do not count as written.
        for mark in hosted[1]._built.plan.weight_marks().items():
            param = next(p for p in hosted[0] if id(p) == mark[0])
            assert not mark[1].renew([param], [param])


def test_an_optimizer_without_overlap_returns_when_weights_are_under_way(late: LateStreams) -> None:
    """The current stream waits for the copies, so no reader has to."""
    params, optimizer = built(late, "fp32", state_device="cpu", offload_step="host")
    before = [bits(p) for p in params]
    step(params, optimizer, seed=0)
    assert not late.running
    assert [bits(p) != was for p, was in zip(params, before, strict=True)] == [
        p.numel() > 0 for p in params
    ]


# Bytes each way, of gradient and weight, and of the host's memory if the CPU steps weights that it
# keeps a copy of; and ms of 1e9 elements, streamed and stepped by the CPU, by GB/s of that memory.
TIMES: dict[float, dict[tuple[float, float, float], dict[int, tuple[int, int]]]] = {
    25: {
        (12, 2, 32): {50: (480, 640), 77: (480, 416), 200: (480, 160), 500: (480, 80)},
        (10, 2, 30): {50: (400, 600), 77: (400, 390), 200: (400, 150), 500: (400, 80)},
        (3.125, 2, 16.25): {50: (125, 325), 77: (125, 211), 200: (125, 81), 500: (125, 80)},
        (2.125, 4, 24.25): {50: (85, 485), 77: (85, 315), 200: (85, 160), 500: (85, 160)},
    },
    55: {
        (12, 2, 32): {50: (480, 640), 77: (312, 416), 200: (218, 160), 500: (218, 64)},
        (10, 2, 30): {50: (400, 600), 77: (260, 390), 200: (182, 150), 500: (182, 60)},
        (8, 4, 36): {50: (320, 720), 77: (208, 468), 200: (145, 180), 500: (145, 73)},
        (3.125, 2, 16.25): {50: (125, 325), 77: (81, 211), 200: (57, 81), 500: (57, 36)},
        (2.125, 4, 24.25): {50: (85, 485), 77: (55, 315), 200: (39, 121), 500: (39, 73)},
    },
    450: {
        (12, 2, 32): {50: (480, 640), 77: (312, 416), 200: (120, 160), 500: (48, 64)},
        (10, 2, 30): {50: (400, 600), 77: (260, 390), 200: (100, 150), 500: (40, 60)},
        (3.125, 2, 16.25): {50: (125, 325), 77: (81, 211), 200: (31, 81)},
    },
}


def test_seconds_of_both_paths() -> None:
    for link, layouts in TIMES.items():
        for (states, gradient, memory), times in layouts.items():
            for host, expected in times.items():
                rates = Bandwidths(link, host)
                on_host = Crossing(gradient, gradient, memory, 0)
                found = (rates.seconds(streamed(states)), rates.seconds(on_host))
                assert [1e12 * s for s in found] == pytest.approx(expected, abs=0.6)
    # This package's steps bring the weights over with the gradients, if they have no fp32 master.
    assert stepped_on_host(12, 2, 2, read=False) == (2, 2, 32, 4)
    assert stepped_on_host(10, 2, 2, read=True) == (4, 2, 30 + 2, 4)
    assert stepped_on_host(8, 4, 4, read=True) == (8, 4, 36 + 4, 8)
    # Scales stay on the GPU, so the 0.125 bytes of theirs cross, too.
    assert stepped_on_host(3, 2, 2, read=True, scales=0.125) == (4.125, 2.125, 18.5, 4.125)


@pytest.mark.parametrize(
    ("link", "host", "layout", "faster"),
    [
        # docs/offload_step.md's crossings: 147 GB/s for fp32 masters on PCIe 5
        (55.0, 140.0, (12.0, 2.0, 2.0, False), False),
        (55.0, 155.0, (12.0, 2.0, 2.0, False), True),
        (55.0, 200.0, (3.125, 2.0, 2.0, True), False),
        (297.0, 450.0, (12.0, 2.0, 2.0, False), False),
        (25.0, 500.0, (2.125, 4.0, 4.0, True), False),
    ],
)
def test_the_faster_path(
    link: float, host: float, layout: tuple[float, float, float, bool], faster: bool
) -> None:
    *sizes, read = layout
    assert Bandwidths(link, host).step_on_host(*sizes, read=read) == faster


@pytest.mark.parametrize(("host", "path"), [(100.0, "mapped"), (500.0, "host")])
def test_auto_says_what_it_chose(
    host: float, path: str, late: LateStreams, stepped: list[int],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    asked: list[torch.device] = []

    def measured(device: torch.device) -> Bandwidths:
        asked.append(device)
        return Bandwidths(55.0, host)

    monkeypatch.setattr(host_steps, "bandwidths", measured)
    caplog.set_level(logging.INFO)
    params, optimizer = built(late, "bf16, master", state_device="cpu", offload_step="auto")
    for seed in range(2):
        step(params, optimizer, seed=seed)
    assert asked == [params[0].device] and optimizer.offload_path == path
    assert bool(stepped) == (path == "host")
    assert f"chose '{path}': the link moves 55.0 GB/s, the host's memory {host}" in caplog.text
    optimizer.move_state("cuda")
    assert optimizer.offload_path is None


def test_auto_is_mapped_where_it_cannot_measure(
    late: LateStreams, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The measurement takes memory of both sides, of which there may be none."""
    usual = WAYS["fp32"].build(shapes=SHAPES, **OPTIONS)
    params, optimizer = built(late, "fp32", state_device="cpu", offload_step="auto")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("cannot lock 134217728 bytes")

    bandwidths_module.bandwidths.cache_clear()
    monkeypatch.setattr(bandwidths_module._C, "carve", fail)
    for seed in range(2):
        step(*usual, seed=seed)
        step(params, optimizer, seed=seed)
    assert optimizer.offload_path == "mapped" and snapshot(optimizer) == snapshot(usual[1])
    (record,) = caplog.records
    assert "'mapped', as it cannot measure: cannot lock 134217728 bytes" in record.message


def test_auto_chooses_anew_when_a_group_is_added(
    late: LateStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_steps, "bandwidths", lambda _: Bandwidths(1.0, 1000.0))
    options = {"lr": 0.1, "master_weights": "fp32"}
    first, second = make_params([(9, 9)]), make_params([(40, 40)], torch.bfloat16)
    usual = FusedAdamW([*copy.deepcopy(first), *copy.deepcopy(second)], **options)
    optimizer = FusedAdamW(first, state_device="cpu", offload_step="auto", **options)
    late.optimizers.append(optimizer)
    train(optimizer, range(1), params=first)
    assert optimizer.offload_path == "mapped"  # 8 bytes a parameter by either path
    optimizer.add_param_group({"params": second})
    assert optimizer.offload_path == "host"
    train(usual, range(1), params=usual.param_groups[0]["params"][:1])
    train(optimizer, range(1, 3), params=[*first, *second])
    train(usual, range(1, 3))
    assert_same_bits(usual.param_groups[0]["params"], [*first, *second])


def test_bandwidths_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidths_module, "_BYTES", 1 << 20)
    bandwidths_module.bandwidths.cache_clear()
    first = bandwidths_module.bandwidths(torch.device("cpu"))
    assert min(first) > 0.01 and bandwidths_module.bandwidths(torch.device("cpu")) is first
    bandwidths_module.bandwidths.cache_clear()


def write(folder: Path, **values: str) -> None:
    for name, value in values.items():
        (folder / name).write_text(f"{value}\n")


def test_a_slow_link_is_told(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_slow_link(1.0, tmp_path)  # no PCI device, such as of Grace
        write(tmp_path, max_link_speed="32.0 GT/s PCIe", max_link_width="16")
        write(tmp_path, current_link_width="8", current_link_speed="Unknown")
        warn_of_slow_link(1.0, tmp_path)
        write(tmp_path, current_link_speed="16.0 GT/s PCIe")
        warn_of_slow_link(32.0, tmp_path)  # of 63
    with pytest.warns(UserWarning, match="31.0 GB/s, .* 8 of 16 lanes, at 16 of 32 GT/s"):
        warn_of_slow_link(31.0, tmp_path)


@pytest.mark.parametrize("calls", ["build", "move"])
def test_a_far_gpu_is_told_once(
    calls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: LateStreams
) -> None:
    """Also where the path does not depend on it. An idle GPU's link is slow: its lanes count."""
    bandwidths_module.warn_of_distance.cache_clear()
    monkeypatch.setattr(bandwidths_module, "_pci_folder", lambda _: tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 3, 9})

    def texts() -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            optimizer = built(late, "fp32", state_device="cpu" if calls == "build" else None)[1]
            late.optimizers.clear()
            if calls == "move":
                optimizer.move_state("cpu")
        return [str(each.message) for each in seen]

    assert texts() == []  # nothing is known
    for near, lanes in (("0-2,4-8", "16"), ("4-8,10", "9"), ("", "16")):
        bandwidths_module.warn_of_distance.cache_clear()
        write(tmp_path, numa_node="1", local_cpulist=near)
        write(tmp_path, max_link_speed="32.0 GT/s PCIe", current_link_speed="2.5 GT/s PCIe")
        write(tmp_path, max_link_width="16", current_link_width=lanes)
        assert ["may not run on NUMA node 1" in text for text in texts()] == [True] * (
            near == "4-8,10"
        )
    bandwidths_module.warn_of_distance.cache_clear()
    write(tmp_path, numa_node="-1", local_cpulist="0-1", current_link_width="8")
    (text,) = texts()
    assert "31.5 GB/s, at most half of the 63.0 GB/s of its PCIe: it has 8 of 16 lanes" in text
    assert texts() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_slow_link(20.0, tmp_path)  # as measured later
    bandwidths_module.warn_of_distance.cache_clear()


@pytest.mark.parametrize(
    ("threads", "cores", "path", "warned"),
    [
        (1, 8, "host", ["one of 8 cores steps the states on the host: set OMP_NUM_THREADS"]),
        (2, 8, "host", []),
        (1, 1, "host", []),
        (1, 8, "mapped", []),
    ],
)
def test_one_thread_on_many_cores_is_named_once(
    threads: int, cores: int, path: str, warned: list[str], late: LateStreams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    host_steps._warn_of_one_thread.cache_clear()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    torch.set_num_threads(threads)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer = built(late, "fp32", state_device="cpu", offload_step=path)[1]
            train(optimizer, range(2))
    found = [str(each.message) for each in seen if "one of" in str(each.message)]
    assert [text.partition(",")[0] for text in found] == warned


@pytest.mark.parametrize("value", ["host", "auto"])
def test_without_a_gpu_it_has_no_effect(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(host_steps, "bandwidths", None)
    optimizer = FusedAdamW(make_params(SHAPES), state_device="cpu", offload_step=value)
    train(optimizer, range(1))
    assert optimizer.offload_path is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"offload_step": "paged"},
         "Invalid offload_step: 'paged', expected one of ('mapped', 'staged', 'host', 'auto')"),
        ({"offload_step": "staged", "track": True}, "'staged' is not supported with track"),
        ({"offload_step": "host", "track": True}, "'host' is not supported with track"),
        ({"offload_step": "host", "write_back_gradients": True}, "with write_back_gradients"),
    ],
)  # fmt: skip
def test_rejected(options: dict[str, Any], text: str, late: LateStreams) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        built(late, "fp32", state_device="cpu", **options)
    late.optimizers.clear()
    optimizer = built(late, "fp32", **{k: v for k, v in options.items() if k != "offload_step"})[1]
    with pytest.raises(ValueError, match=re.escape(text)):
        optimizer.offload_step = options["offload_step"]
    assert optimizer.offload_step == "mapped"


def test_auto_with_telemetry_is_mapped(late: LateStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_steps, "bandwidths", lambda _: Bandwidths(1.0, 1000.0))
    _, optimizer = built(late, "fp32", state_device="cpu", offload_step="auto", track=True)
    assert optimizer.offload_path == "mapped"


@pytest.mark.parametrize("path", ["host", "staged"])
def test_graphs_capture_no_copies(
    path: str, late: LateStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, optimizer = built(late, "fp32", state_device="cpu", offload_step=path)
    step(params, optimizer, seed=0)
    before = snapshot(optimizer)
    monkeypatch.setattr(host_steps, "is_captured", lambda: True)
    with pytest.raises(RuntimeError, match=r"set optimizer\.offload_step = 'mapped'"):
        optimizer.step()
    assert snapshot(optimizer) == before
    optimizer.offload_step = "mapped"
    optimizer.step()
    assert snapshot(optimizer) != before
