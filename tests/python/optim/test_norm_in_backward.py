"""Norms measured in backward have an ordinary step's bits, or are measured again in the step."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdamW, GradScaler
from torchopt_ext.containers import (
    OptimizersInBackwardContainer,
    build_optimizers,
)
from torchopt_ext.optim import norm_in_backward as subject

from .subject import bits, snapshot, through_file

# 2 MB, below and above the size that gets a hook, a long row, and a small parameter.
SHAPES = [(512, 1024), (100, 30), (130, 200), (1, 70_000), (16,)]
OPTIONS: dict[str, Any] = {"lr": 0.01, "max_grad_norm": 0.5, "skip_nonfinite": True}


class Model(nn.Module):
    """A model whose gradients are known."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(s, generator=generator) for s in SHAPES)

    def backward(self, seed: int, *, without: int | None = None, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        terms = [
            (p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum()
            for p in self.weights
            if p.requires_grad
        ]
        chosen = [term for i, term in enumerate(terms) if i != without]
        (torch.stack(chosen).sum() * scale).backward()


Run = Callable[[Model, Any], None]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the gradients of each step that the norm does not read again."""
    counts: list[int] = []
    last: dict[Any, int] = {}
    original = subject.NormInBackward.known, subject.NormInBackward.end_step

    def known(self: Any, positions: Any) -> Any:
        found = original[0](self, positions)
        last[self] = len(found.positions)
        return found

    def end_step(self: Any, measured_norm: bool) -> None:
        counts.extend([last.pop(self)] if self in last else [])
        original[1](self, measured_norm)

    monkeypatch.setattr(subject.NormInBackward, "known", known)
    monkeypatch.setattr(subject.NormInBackward, "end_step", end_step)
    monkeypatch.setattr(subject, "MEASURED_BYTES", 1 << 16)
    monkeypatch.setitem(subject.CACHED_BYTES, "cpu", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield counts


def content(run: Run, prepare: Callable[[Model], object], **options: Any) -> list[bytes]:
    model = Model()
    prepare(model)
    optimizer = FusedAdamW(model.parameters(), **OPTIONS | options)
    norms: list[bytes] = []
    optimizer.register_step_post_hook(lambda o, *_: norms.append(bits(o.control.grad_norm)))
    run(model, optimizer)
    assert norms
    return norms + snapshot(optimizer)


def assert_same_run(
    run: Run, prepare: Callable[[Model], object] = lambda model: None, **options: Any
) -> None:
    """Norms, parameters and state have the bits of a run without norm_in_backward."""
    early = content(run, prepare, norm_in_backward=True, **options)
    assert early == content(run, prepare, **options)


def steps(model: Model, optimizer: Any, count: int = 3, each: Any = None, **kwargs: Any) -> None:
    for step in range(count):
        model.backward(step, **kwargs)
        if each is not None:
            each(model, step)
        optimizer.step()
        optimizer.zero_grad()


LARGE = 3  # shapes that get a hook


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"amsgrad": True, "track": True},
        {"write_back_gradients": True},
        {"max_grad_norm": float("inf"), "skip_nonfinite": False},
    ],
)
def test_large_gradients_are_read_once(measured: list[int], options: dict[str, Any]) -> None:
    assert_same_run(steps, **options)
    assert measured == [LARGE] * 3


@pytest.mark.parametrize("limit", [1 << 18, 1 << 30])
def test_small_ones_wait_for_others_or_the_end(
    measured: list[int], monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setitem(subject.CACHED_BYTES, "cpu", limit)
    assert_same_run(steps)
    assert measured == [LARGE] * 3


def test_a_gradient_that_changes_while_it_waits(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting gradient counts with its final value, or not at all if it was removed."""
    monkeypatch.setitem(subject.CACHED_BYTES, "cpu", 1 << 30)

    def run(model: Model, optimizer: Any) -> None:
        def halve(param: Any) -> None:
            param.grad.mul_(0.5)

        def take_away(param: Any) -> None:
            param.grad = None

        for i, hook in enumerate((halve, take_away)):
            param: Any = model.weights[i * 2]
            param.register_post_accumulate_grad_hook(hook)
        steps(model, optimizer)

    assert_same_run(run)
    assert measured == [LARGE - 1] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(measured: list[int], dtype: torch.dtype) -> None:
    assert_same_run(steps, lambda model: model.to(dtype))
    assert measured and min(measured) > 0


def test_channels_last_and_gradients_with_other_strides(measured: list[int]) -> None:
    def prepare(model: Model) -> None:
        shape = (64, 4, 16, 16)
        last = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        model.weights.append(nn.Parameter(last.to(memory_format=torch.channels_last)))

    def transposed(model: Model, step: int) -> None:
        model.weights[0].grad = model.weights[0].grad.t().contiguous().t()

    assert_same_run(steps, prepare)
    assert min(measured) >= LARGE
    with pytest.warns(UserWarning, match="norm_in_backward saves nothing"):
        assert_same_run(lambda m, o: steps(m, o, each=transposed), prepare)


def test_the_last_of_several_gradients_counts(measured: list[int]) -> None:
    def run(model: Model, optimizer: Any) -> None:
        for step, backwards in enumerate((3, 3, 3, 2, 2, 1, 1)):
            for i in range(backwards):
                model.backward(10 * step + i)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)

    assert_same_run(run)
    assert measured == [0, LARGE, LARGE, 0, LARGE, 0, LARGE]


def test_parameters_that_come_and_go(measured: list[int]) -> None:
    def run(model: Model, optimizer: Any) -> None:
        steps(model, optimizer, 2, without=0)
        model.weights[2].requires_grad_(False)
        steps(model, optimizer, 2)
        model.weights[2].requires_grad_(True)
        steps(model, optimizer, 2)

    assert_same_run(run, lambda model: model.weights[3].requires_grad_(False))
    assert measured == [1, 1, 1, 1, 2, 2]

    def unfrozen(model: Model, optimizer: Any) -> None:
        model.weights[3].requires_grad_(True)
        steps(model, optimizer)

    measured.clear()
    assert_same_run(unfrozen, lambda model: model.weights[3].requires_grad_(False))
    assert measured == [2, 3, 3]

    def dropped(model: Model, optimizer: Any) -> None:
        steps(model, optimizer, 1)
        del optimizer.state[optimizer.param_groups[0]["params"].pop(0)]
        model.weights.append(nn.Parameter(torch.ones(300, 300)))
        optimizer.add_param_group({"params": [model.weights[-1]]})
        steps(model, optimizer)

    measured.clear()
    assert_same_run(dropped)
    assert measured == [LARGE, 0, LARGE, LARGE]


def test_a_parameter_with_the_id_of_a_freed_one(measured: list[int]) -> None:
    weight = torch.ones(300, 300)
    made = [nn.Parameter(weight)]
    optimizer = FusedAdamW(made, **OPTIONS, norm_in_backward=True)
    optimizer.param_groups.clear()
    freed = id(made.pop())
    made.append(nn.Parameter(weight))
    while id(made[-1]) != freed and len(made) < 1000:
        made.append(nn.Parameter(weight))
    optimizer.add_param_group({"params": made[-1:]})
    made[-1].sum().backward()
    optimizer.step()
    assert measured == [1]


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda p: p.grad.mul_(2.0),
    "by list": lambda p: torch.nn.utils.clip_grad_norm_([p], 0.1),
    "replaced": lambda p: setattr(p, "grad", p.grad * 2),
    "other memory": lambda p: setattr(p.grad, "data", p.grad * 2),
    "a view": lambda p: setattr(p, "grad", p.grad[:1].expand_as(p)),
    "dropped": lambda p: setattr(p, "grad", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_gradients_are_read_again(measured: list[int], change: str) -> None:
    """Every changed gradient is read again, even one at the address of a freed gradient."""
    with pytest.warns(UserWarning, match="norm_in_backward saves nothing") as caught:
        assert_same_run(lambda m, o: steps(m, o, each=lambda m, _: CHANGES[change](m.weights[0])))
    assert measured == [0] * 3
    assert len(caught) == 1


def test_a_hook_that_changes_gradients_later(measured: list[int]) -> None:
    def run(model: Model, optimizer: Any) -> None:
        def halve(param: Any) -> None:
            param.grad.mul_(0.5)

        handle: Any = model.weights[0].register_post_accumulate_grad_hook(halve)
        steps(model, optimizer)
        handle.remove()
        steps(model, optimizer)

    with pytest.warns(UserWarning, match="norm_in_backward saves nothing"):
        assert_same_run(run)
    assert measured == [0, 0, 0, LARGE, LARGE, LARGE]


def test_gradients_that_are_cleared_without_a_step(measured: list[int]) -> None:
    def run(model: Model, optimizer: Any) -> None:
        for clear in (optimizer, model):
            model.backward(7)
            clear.zero_grad()
            steps(model, optimizer)

    assert_same_run(run)
    # The model does not report zero_grad(): its next gradients count as a second micro-batch.
    assert measured == [LARGE, LARGE, LARGE, 0, 0, LARGE]


def test_two_steps_with_the_same_gradients(measured: list[int]) -> None:
    def run(model: Model, optimizer: Any) -> None:
        model.backward(0)
        optimizer.step()
        optimizer.step()

    assert_same_run(run)
    assert measured == [LARGE, 0]


def test_closures(measured: list[int]) -> None:
    def run(model: Model, optimizer: Any) -> None:
        def closure() -> None:
            optimizer.zero_grad()
            model.backward(3)

        optimizer.step(closure)
        optimizer.step(closure)

    assert_same_run(run)
    assert measured == [LARGE, LARGE]


@pytest.mark.parametrize("unscaled_before", [False, True])
@pytest.mark.parametrize("make", [GradScaler, torch.amp.GradScaler])
def test_scalers(measured: list[int], make: Any, unscaled_before: bool) -> None:
    """Scalers work, although unscale_() marks gradients only by the scaler's flag."""

    def run(model: Model, optimizer: Any) -> None:
        scaler = make("cpu", init_scale=2.0**10)
        for step in range(4):
            scaler.scale(torch.ones(()))
            model.backward(step, scale=float("inf") if step == 2 else float(scaler.get_scale()))
            if unscaled_before:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 2.0**9

    assert_same_run(run)
    assert measured == [0 if unscaled_before else LARGE] * 4


def test_nonfinite_gradients_skip(measured: list[int]) -> None:
    def run(model: Model, optimizer: Any) -> None:
        steps(model, optimizer)
        before = [bits(p) for p in model.parameters()]
        steps(model, optimizer, 1, scale=float("nan"))
        assert [bits(p) for p in model.parameters()] == before

    assert_same_run(run)
    assert measured == [LARGE] * 4


def test_loaded_and_replaced_state(measured: list[int]) -> None:
    def run(model: Model, optimizer: Any) -> None:
        steps(model, optimizer, 1)
        model.backward(5)
        optimizer.load_state_dict(through_file(optimizer.state_dict()))
        optimizer.step()
        optimizer.zero_grad()
        model.backward(6)
        optimizer.state.clear()
        optimizer.step()

    assert_same_run(run)
    assert measured[-1] == LARGE and max(measured) == LARGE


def test_groups_that_are_added(measured: list[int]) -> None:
    def run(model: Model, optimizer: Any) -> None:
        steps(model, optimizer)
        model.weights.append(nn.Parameter(torch.ones(300, 300)))
        optimizer.add_param_group({"params": [model.weights[-1]]})
        steps(model, optimizer)

    assert_same_run(run)
    assert measured == [LARGE] * 3 + [LARGE + 1] * 3


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_measure_by_themselves(measured: list[int], way: str) -> None:
    model = Model()
    optimizer = FusedAdamW(model.parameters(), **OPTIONS, norm_in_backward=True)
    steps(model, optimizer, 1)
    pair = (model, optimizer)
    copied, other = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    steps(model, optimizer)
    steps(copied, other)
    assert snapshot(other) == snapshot(optimizer)
    assert measured == [LARGE] * 7


def test_no_norm_no_sums(measured: list[int]) -> None:
    assert_same_run(steps, max_grad_norm=None, skip_nonfinite=False)
    assert measured == []


def parts() -> list[nn.Module]:
    return [Model(), Model()]


@pytest.mark.parametrize("deferred", [False, True])
def test_containers(measured: list[int], deferred: bool) -> None:
    """Two optimizers of a container decide jointly, in the step or in the clip() call before it."""
    from types import SimpleNamespace

    config = SimpleNamespace(
        name="AdamW", lr=0.01, eps=1e-8, implementation="fused", early_step_in_backward=False,
        deferred_clipping=deferred, max_grad_norm=None if deferred else 0.5,
    )  # fmt: skip
    dims = SimpleNamespace(pp_enabled=False, ep_enabled=False)
    found = []
    for early in (True, False):
        models = parts()
        config.norm_in_backward = early
        container = build_optimizers(models, config, dims)
        for step in range(3):
            for i, model in enumerate(models):
                model.backward(2 * step + i)
            if deferred:
                container.deferred_clipping.clip(0.5)
            container.step()
            container.zero_grad()
        norm = bits(container.control.grad_norm)
        found.append([norm, *(s for optimizer in container for s in snapshot(optimizer))])
    assert found[0] == found[1]
    assert measured == [LARGE] * 6


def test_a_container_in_backward_rejects_it() -> None:
    with pytest.raises(ValueError, match="measures gradients as they come"):
        OptimizersInBackwardContainer(
            [Model()], FusedAdamW, {"max_grad_norm": 1.0, "norm_in_backward": True}
        )


def test_two_threads_run_backward(measured: list[int]) -> None:
    """The sums include the gradients of both threads."""
    from concurrent.futures import ThreadPoolExecutor

    def run(model: Model, optimizer: Any) -> None:
        pool = ThreadPoolExecutor(2)
        for step in range(3):
            losses = [
                sum((p * (i + step + 1)).sum() for p in list(model.weights)[i::2]) for i in (0, 1)
            ]
            list(pool.map(lambda loss: loss.backward(), losses))
            optimizer.step()
            optimizer.zero_grad()

    assert_same_run(run)
    assert measured == [LARGE] * 3


def test_hooks_go_with_the_optimizer() -> None:
    model = Model()
    optimizer = FusedAdamW(model.parameters(), **OPTIONS, norm_in_backward=True)
    hooks: Any = model.weights[0]._post_accumulate_grad_hooks
    assert len(hooks) == 1
    del optimizer
    assert not hooks
