"""Steps that end during the next forward: same bits, and nothing reads memory before its step.

A simulated stream (tests/support/late_stream.py) writes as late as a GPU's may, and the memory of
parameters stands for a GPU's. In `make test-host-cuda` the CUDA back end makes the steps.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdamW, FusedMuon, GradScaler, digest
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.optim import forward_overlap
from torchopt_ext.state.host_memory import is_on_host

from ...support.compare import assert_same, assert_same_bits, bits, contents, snapshot
from ...support.late_stream import LateStreams, stand_for_a_gpu
from ...support.problems import clip_skip_or_leave_out, make_params, set_gradients, train
from ...support.ways import BF16, WAYS, each_kind_and_way

SHAPES = ((3, 4), (7,), (130, 65), (2, 1031), (0, 2), (), (1, 33_003))
MODULES = ((5, 2), (0, 3), (4, 1))
"""The parameters of each module; the last parameter is in none."""
OPTIONS: dict[str, Any] = {
    "lr": 0.02, "max_grad_norm": 3.0, "skip_nonfinite": True, "rounding_seed": 5, "ema_decay": 0.9,
}  # fmt: skip


class Layer(nn.Module):
    """Returns the bits of its weights, which a forward would read."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(params)

    def forward(self) -> list[bytes]:
        return [bits(weight) for weight in self.weights]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateStreams:
    streams = LateStreams()
    stand_for_a_gpu(monkeypatch, streams)
    return streams


def layers_of(params: list[nn.Parameter]) -> nn.ModuleList:
    return nn.ModuleList(
        Layer([params[i] for i in places if i < len(params)])
        for places in MODULES
        if any(i < len(params) for i in places)
    )


Built = tuple[list[nn.Parameter], Any, nn.ModuleList]


def built(
    late: LateStreams | None, way: str = "bf16, master", kind: str = "AdamW", **options: Any
) -> Built:
    """Returns parameters, their optimizer, and modules that it overlaps with if ``late``."""
    params, optimizer = WAYS[way].build(kind, shapes=SHAPES, **OPTIONS | options)
    layers = layers_of(params)
    if late is not None:
        late.optimizers.append(optimizer)
        optimizer.overlap_forward(*layers)
    return params, optimizer, layers


def step(params: list[nn.Parameter], optimizer: Any, _: Any = None, *, seed: int) -> None:
    clip_skip_or_leave_out(params, optimizer, seed)


@pytest.mark.parametrize(
    "options", [{}, {"state_device": "cpu"}, {"state_device": "cpu", "state_fraction": 0.4}]
)
@each_kind_and_way
def test_same_bits(kind: str, way: str, options: dict[str, Any], late: LateStreams) -> None:
    late._early = 0.3
    usual, overlapped = built(None, way, kind), built(late, way, kind, **options)
    begun = 0
    for seed in range(5):
        step(*usual, seed=seed)
        step(*overlapped, seed=seed)
        begun += len(late.running)
        # The order of forward need not be that of the modules.
        for number in (0, 1, 2) if seed % 2 else (2, 0, 1):
            if number < len(usual[2]):
                assert overlapped[2][number]() == usual[2][number]()
    step(*usual, seed=5)
    step(*overlapped, seed=5)
    overlapped[1].wait_for_params()
    assert not late.running
    assert snapshot(overlapped[1]) == snapshot(usual[1])
    assert overlapped[1].control.grad_norm == usual[1].control.grad_norm
    assert overlapped[1].control.skipped_steps == 1
    assert (begun > 0) != kind.startswith("Muon")


def saved(optimizer: Any, *_: Any) -> Any:
    return contents(optimizer.state_dict())


def after(act: Callable[[Any, list[nn.Parameter]], Any]) -> Callable[..., Any]:
    """Returns a reader of the optimizer's memory after it has done something."""

    def read(optimizer: Any, params: list[nn.Parameter], *_: Any) -> Any:
        act(optimizer, params)
        return snapshot(optimizer)

    return read


def loads(optimizer: Any, params: list[nn.Parameter]) -> None:
    other = built(None, track=True)[1]
    train(other, range(3))
    optimizer.load_state_dict(other.state_dict())


def grows(optimizer: Any, params: list[nn.Parameter]) -> None:
    optimizer.add_param_group({"params": make_params([(4, 4)], BF16)})
    optimizer.init_state()


def steps_again(optimizer: Any, params: list[nn.Parameter]) -> None:
    step(params, optimizer, seed=7)
    optimizer.wait_for_params()


READERS: dict[str, Callable[..., Any]] = {
    "state_dict": saved,
    "digest": lambda optimizer, *_: digest(optimizer).tolist(),
    "telemetry": lambda optimizer, *_: optimizer.telemetry.update_norms.tolist(),
    "deepcopy": lambda optimizer, *_: snapshot(copy.deepcopy(optimizer)),
    "pickle": lambda optimizer, *_: snapshot(pickle.loads(pickle.dumps(optimizer))),
    "refresh_masters": after(lambda optimizer, _: optimizer.refresh_masters()),
    "scale_": after(lambda o, params: o.scale_(params[2], torch.tensor([0.5, 2.0]))),
    "move_state": after(lambda optimizer, _: optimizer.move_state("cuda")),
    "load_state_dict": after(loads),
    "init_state": after(grows),
    "zero_grad": after(lambda optimizer, _: optimizer.zero_grad(set_to_none=False)),
    "the next step": after(steps_again),
    "a modules' state_dict": lambda _o, _p, layers: contents(layers.state_dict()),
    "a module's load_state_dict": lambda optimizer, _, layers: (
        layers[2].load_state_dict(layers[2].state_dict()), snapshot(optimizer),
    )[1],
    "overlap_forward": after(lambda optimizer, _: optimizer.overlap_forward()),
    "wait_for_params": after(lambda optimizer, _: optimizer.wait_for_params()),
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("options", [{}, {"state_device": "cpu"}], ids=["beside", "on the host"])
def test_what_reads_memory_waits(reader: str, options: dict[str, Any], late: LateStreams) -> None:
    found = []
    for streams in (None, late):
        params, optimizer, layers = built(streams, track=True, **options)
        for seed in range(2):
            step(params, optimizer, seed=seed)
        assert len(late.running) == (0 if streams is None else 3)
        found.append(READERS[reader](optimizer, params, layers))
    assert not late.running
    assert_same(found[0], found[1])


def test_a_forward_waits_for_its_module(late: LateStreams) -> None:
    params, optimizer, layers = built(late)
    _, usual, reference = built(None)
    for one in (optimizer, usual):
        step([p for g in one.param_groups for p in g["params"]], one, seed=0)
    new = [layer() for layer in reference]
    # The simulated stream is late: a forward that does not wait reads old weights.
    assert layers[0].forward()[1] != new[0][1]
    assert layers[0]() == new[0]
    assert len(late.running) == 2 and layers[1].forward() != new[1]
    assert layers[1]() == new[1]
    assert len(late.running) == 1
    # The parameter of no module was stepped at once.
    assert bits(params[-1]) == bits(usual.param_groups[0]["params"][-1])


def test_the_wait_comes_before_other_hooks(late: LateStreams) -> None:
    """A pre-hook of the user's may read weights, too."""
    _, optimizer, layers = built(None)
    seen: list[list[bytes]] = []
    layers[0].register_forward_pre_hook(lambda module, _: seen.append(module.forward()))
    late.optimizers.append(optimizer)
    optimizer.overlap_forward(*layers)
    step(*built_params(optimizer), seed=0)
    assert layers[0]() == seen[0]


def built_params(optimizer: Any) -> tuple[list[nn.Parameter], Any]:
    return [p for group in optimizer.param_groups for p in group["params"]], optimizer


def test_gradients_are_kept_until_the_step_has_read_them(late: LateStreams) -> None:
    params, optimizer, layers = built(late)
    set_gradients(params)
    matrix = params[2]
    matrix.grad = matrix.grad.t().contiguous().t()  # type: ignore[union-attr]
    optimizer.step()
    assert optimizer.gradients_copied == 1
    expected = [params[i].grad for places in MODULES for i in sorted(places)]
    assert_same_bits(late.reads, expected)  # type: ignore[arg-type]
    own = {g.data_ptr() for g in expected if g is not None and g.numel()}
    assert len({g.data_ptr() for g in late.reads if g.numel()} - own) == 1  # the copy
    optimizer.zero_grad()
    assert len(late.running) == 3  # memory of gradients that are dropped is kept, so none waits
    params[0].grad = torch.ones_like(params[0])
    late.reads[1].data.zero_()
    with pytest.raises(AssertionError, match="a gradient was written before"):
        optimizer.wait_for_params()
    del layers


def test_a_learning_rate_on_the_device_is_read_at_once(late: LateStreams) -> None:
    usual, overlapped = built(None), built(late, lr=torch.tensor(0.02))
    for run in (usual, overlapped):
        step(*run, seed=0)
        assert not late.running
        for group in run[1].param_groups:
            group["lr"] = torch.zeros_like(torch.as_tensor(group["lr"]))
    assert snapshot(usual[1]) == snapshot(overlapped[1])


def test_the_first_modules_stay_resident(late: LateStreams) -> None:
    """In the order of forward, after what is stepped before them."""
    params = make_params([(100, 10)] * 10)
    layers = nn.ModuleList(Layer([param]) for param in reversed(params[:9]))
    optimizer = FusedAdamW(params, state_device="cpu", state_fraction=0.65)
    late.optimizers.append(optimizer)
    optimizer.overlap_forward(*layers)
    for seed in range(2):
        step(params, optimizer, seed=seed)
    optimizer.wait_for_params()
    on_host = [is_on_host(optimizer.state[p]["exp_avg"]) for p in params]
    assert on_host == [True] * 7 + [False] * 3
    optimizer.overlap_forward()
    step(params, optimizer, seed=3)
    on_host = [is_on_host(optimizer.state[p]["exp_avg"]) for p in params]
    assert on_host == [False] * 3 + [True] * 7


def test_matrices_of_muon_are_stepped_before(late: LateStreams) -> None:
    snapshots = []
    for streams in (None, late):
        params = make_params([(8, 80), (64,), (80, 8), (16, 64)])
        groups = [
            {"params": params[::2]},
            {"params": params[1::2], "algorithm": "adamw"},
        ]
        optimizer = FusedMuon(groups, max_grad_norm=1.0, state_device="cpu")
        layers = nn.ModuleList([Layer(params[:2]), Layer(params[2:])])
        if streams is not None:
            late.optimizers.append(optimizer)
            optimizer.overlap_forward(*layers)
        for seed in range(3):
            step([*params], optimizer, seed=seed)
            # The others are a part of the plan for each module.
            assert len(late.running) == (0 if streams is None else 2)
            matrices = [bits(params[0]), bits(params[2])]
        optimizer.wait_for_params()
        assert matrices == [bits(params[0]), bits(params[2])]
        snapshots.append(snapshot(optimizer))
    assert snapshots[0] == snapshots[1]


def test_a_parameter_of_several_modules_is_stepped_with_the_first(late: LateStreams) -> None:
    params = make_params([(3, 4), (7,)])
    tied = nn.ModuleList([Layer(params[1:]), Layer(params), Layer(params[1:])])
    optimizer = FusedAdamW(params, lr=0.1)
    late.optimizers.append(optimizer)
    optimizer.overlap_forward(*tied)
    step(params, optimizer, seed=0)
    assert len(late.running) == 2
    old = bits(params[1])
    assert tied[2]() != [old]
    assert tied[2]() == tied[0]()


def test_with_scaler_and_container(late: LateStreams) -> None:
    """One norm and one decision for several optimizers, unscaled; an overflow skips all."""
    runs = []
    for streams in (None, late):
        models: list[nn.Module] = [layers_of(make_params(SHAPES, seed=seed)) for seed in range(2)]
        models[1] = nn.ModuleDict({"second": models[1]})
        container = OptimizersContainer(models, FusedAdamW, {"lr": 0.1, "max_grad_norm": 0.5})
        for optimizer, model in zip(container.optimizers, models, strict=True):
            if streams is not None:
                late.optimizers.append(optimizer)
                optimizer.overlap_forward(*(m for m in model.modules() if isinstance(m, Layer)))
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.zeros(()))
        for seed in range(4):
            params = [p for model in models for p in model.parameters()]
            set_gradients(params, seed=seed, scale=float("inf") if seed == 2 else 8.0)
            scaler.step(container)
            scaler.update()
            assert len(late.running) == (0 if streams is None else 6)
            container.zero_grad()
        runs.append((contents(container.state_dict()), scaler.get_scale()))
        assert not late.running
    assert_same(runs[0], runs[1])
    assert runs[0][1] == 4.0


def test_modules_that_are_gone(late: LateStreams) -> None:
    """The optimizer keeps none alive. Their parameters may be in other modules: at once."""
    params, optimizer, layers = built(late)
    step(params, optimizer, seed=0)
    optimizer.wait_for_params()
    ref = weakref.ref(layers[1])
    del layers[1]
    gc.collect()
    assert ref() is None
    before = [bits(params[i]) for i in (0, 3)]
    step(params, optimizer, seed=1)
    assert len(late.running) == 2
    assert all(now != was for now, was in zip([bits(params[0]), bits(params[3])], before,
                                              strict=True))  # fmt: skip


def test_memory_of_a_dropped_optimizer(late: LateStreams) -> None:
    params, optimizer, layers = built(late)
    step(params, optimizer, seed=0)
    late.optimizers.clear()
    assert late.running and layers[0]._forward_pre_hooks
    del optimizer
    gc.collect()
    assert not late.running
    assert not layers[0]._forward_pre_hooks
    assert not next(layers[0].children())._state_dict_pre_hooks


def test_copies_do_not_overlap(late: LateStreams) -> None:
    params, optimizer, layers = built(late)
    step(params, optimizer, seed=0)
    twin, model = copy.deepcopy((optimizer, layers))
    assert optimizer.overlaps and not twin.overlaps
    train(twin, range(1))
    assert not late.running
    for layer in model:
        layer()


def test_in_a_compiled_module(late: LateStreams) -> None:
    """Also if it was compiled before."""
    found = []
    for streams in (None, late):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = FusedAdamW(model.parameters(), lr=0.1)
        compiled = torch.compile(model, backend="eager")
        for number in range(4):
            if streams is not None and number == 1:
                late.optimizers.append(optimizer)
                optimizer.overlap_forward(*model)
            loss = compiled(torch.ones(2, 4)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert found[:4] == found[4:] and len(late.running) == 2


def test_without_a_gpu_steps_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same script runs."""
    monkeypatch.setattr(forward_overlap, "SideStream", None)
    usual, overlapped = built(None), built(LateStreams(), state_device="cpu")
    for seed in range(3):
        step(*usual, seed=seed)
        step(*overlapped, seed=seed)
        assert snapshot(usual[1]) == snapshot(overlapped[1])
    assert not overlapped[1].overlaps


def test_graphs_capture_no_overlap(late: LateStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer, layers = built(late)
    step(params, optimizer, seed=0)
    for module in ("optim.forward_overlap", "optim.overlapped"):
        monkeypatch.setattr(f"torchopt_ext.{module}.is_captured", lambda: True)
    with pytest.raises(RuntimeError, match=r"call optimizer\.wait_for_params"):
        layers[0]()
    with pytest.raises(RuntimeError, match="a graph is captured: call overlap_forward"):
        optimizer.overlap_forward()
    monkeypatch.setattr("torchopt_ext.optim.forward_overlap.is_captured", lambda: False)
    optimizer.wait_for_params()
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="a graph cannot capture a step that ends during"):
        optimizer.step()
    assert snapshot(optimizer) == before
    monkeypatch.setattr("torchopt_ext.optim.overlapped.is_captured", lambda: False)
    optimizer.overlap_forward()
    monkeypatch.setattr("torchopt_ext.optim.overlapped.is_captured", lambda: True)
    optimizer.step()
    assert snapshot(optimizer) != before


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.weight._fsdp_flattened = True  # type: ignore[attr-defined]

    def forward(self) -> None: ...


OTHER = nn.Linear(2, 2)
FLAT = Flat()


@pytest.mark.parametrize(
    ("modules", "options", "error", "text"),
    [
        (lambda layers: [layers[0], layers[1], layers[0]], {}, ValueError,
         "module 2 (a Layer) is module 0, too"),
        (lambda layers: [layers], {}, ValueError, "module 0 (a ModuleList) has no forward"),
        (lambda layers: [layers[0], OTHER], {}, ValueError,
         "module 1 (a Linear) has no parameter of this optimizer, which has 8"),
        (lambda _: [FLAT], {}, ValueError, "module 0 (a Flat) has sharded parameters"),
        (lambda layers: [*layers[0].parameters()], {}, TypeError, "module 0 is Parameter"),
        (list, {"write_back_gradients": True}, ValueError, "write_back_gradients=True"),
    ],
)  # fmt: skip
def test_rejected(
    modules: Callable[[Any], list[Any]], options: Any, error: type[Exception], text: str,
    late: LateStreams,
) -> None:  # fmt: skip
    params, optimizer, layers = built(None, "fp32", **options)
    optimizer.add_param_group({"params": [FLAT.weight]})
    with pytest.raises(error, match=re.escape(text)):
        optimizer.overlap_forward(*modules(layers))
    assert not optimizer.overlaps and not layers[0]._forward_pre_hooks
    step(params, optimizer, seed=0)


def test_streams_of_a_gpu_are_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the real stream does, by its calls: no GPU runs here."""
    calls: list[str] = []

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = "side" if isinstance(name, torch.device) else name

        def wait_stream(self, other: Any) -> None:
            calls.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: str) -> None:
            calls.append(f"{self.name} waits for {event}")

        def record_event(self) -> str:
            calls.append(f"event on {self.name}")
            return "event"

        def record_stream(self, stream: Any) -> None:
            calls.append(f"memory is kept for {stream.name}")

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        calls.append(f"on {stream.name}")
        yield
        calls.append("back")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    side = forward_overlap.SideStream(torch.device("cuda", 0))
    gradient: Any = Stream("gradient")
    side.wait(side.run(partial(calls.append, "step"), [gradient]))
    assert calls == [
        "side waits for main", "on side", "step", "back", "memory is kept for side",
        "event on side", "main waits for event",
    ]  # fmt: skip
