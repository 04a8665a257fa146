"""log_to writes the values that the test computes separately."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torchopt_ext import (
    FSDPadaptOptimizer,
    FusedAdamW,
    FusedMuon,
    FusedOptimizer,
    ZeroRedundancyOptimizer,
    log_to,
    param_groups,
)
from torchopt_ext.containers import OptimizersContainer
from torchopt_ext.optim import step_log

GRADIENTS = [(3.0, 4.0), (0.3, 0.4), (float("inf"), 0.0), (30.0, 40.0)]
"""The norms are 5, 0.5, infinite and 50."""


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([6.0, 8.0]))


def run(optimizer: torch.optim.Optimizer, *params: torch.nn.Parameter) -> None:
    for gradient in GRADIENTS:
        parts = torch.tensor(gradient).chunk(len(params))
        for param, part in zip(params, parts, strict=True):
            param.grad = part.view_as(param)
        optimizer.step()


@pytest.mark.parametrize("kind", ["AdamW", "Muon and AdamW"])
def test_values(kind: str) -> None:
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0, "max_grad_norm": 1.0,
                               "skip_nonfinite": True, "track": ("norms",)}  # fmt: skip
    params = [weight()]
    groups: list[dict[str, Any]] = [{"params": params}]
    if kind == "AdamW":
        optimizer: FusedOptimizer = FusedAdamW(groups, **options)
    else:
        params = [torch.nn.Parameter(torch.tensor(value)) for value in ([[6.0]], [8.0])]
        groups = [{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}]
        optimizer = FusedMuon(groups, **options)
    written: list[dict[str, float]] = []
    log = log_to(written.append, optimizer, every=2, first_step=100)

    def weights() -> torch.Tensor:
        return torch.cat([param.detach().flatten() for param in params])

    before: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: before.append(weights()))
    after: list[torch.Tensor] = []
    optimizer.register_step_post_hook(lambda *_: after.append(weights()))
    run(optimizer, *params)
    assert [values["optimizer/step"] for values in written] == [102, 104]
    # The factor of clip_grad_norm_: 1 / (norm + 1e-6), at most 1.
    expected = [(0.5, 1.0, 0.5, 0), (50.0, 1 / 50, 0.5, 1)]
    for values, (norm, factor, share, skipped), i in zip(written, expected, (1, 3), strict=True):
        assert values["optimizer/grad_norm"] == pytest.approx(norm)
        assert values["optimizer/clip_factor"] == pytest.approx(factor, rel=1e-5)
        assert values["optimizer/clipped_share"] == share
        assert values["optimizer/skipped_steps"] == skipped
        assert values["optimizer/loss_scale"] == 1
        rates = [value for name, value in values.items() if name.startswith("optimizer/lr")]
        assert rates == [0.1] * len(optimizer.param_groups)
        ratio = float((after[i] - before[i]).norm() / after[i].norm())
        assert values["optimizer/update_to_weight"] == pytest.approx(ratio, rel=1e-4)
    log.remove()
    run(optimizer, *params)
    assert len(written) == 2
    log_to(written.append, optimizer, every=3)
    run(optimizer, *params)  # the third step is skipped, so no update is logged
    assert written[2]["optimizer/skipped_steps"] == 3
    assert "optimizer/update_to_weight" not in written[2]


def test_unmeasured_norm_is_left_out_and_groups_have_their_learning_rates() -> None:
    model = torch.nn.Linear(2, 2)
    groups = param_groups(model, lr=0.5, lr_multipliers={"weight": 0.5})
    optimizer = FusedAdamW(groups)
    written: list[dict[str, float]] = []
    log_to(written.append, optimizer, every=1, prefix="")
    optimizer.set_schedule(warmup_steps=4, stable_steps=4, decay_steps=0)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    factor = optimizer.control.lr_factor.item()
    assert 0 < factor < 1
    assert written[0]["lr/decay, lr * 0.5"] == 0.25 * factor
    assert written[0]["lr/no_decay"] == 0.5 * factor
    assert "grad_norm" not in written[0] and "update_to_weight" not in written[0]
    assert written[0]["clipped_share"] == 0


def test_loss_scale_and_container() -> None:
    model = torch.nn.Linear(2, 2)
    container = OptimizersContainer([model], FusedAdamW, {"lr": 0.1, "max_grad_norm": 1.0})
    container.optimizers[0].set_loss_scale(8.0, growth_interval=1)
    written: list[dict[str, float]] = []
    log_to(written.append, container, every=1)
    (model(torch.ones(2)).sum() * 8).backward()
    container.step()
    assert written[0]["optimizer/loss_scale"] == 8
    assert written[0]["optimizer/grad_norm"] == pytest.approx(6**0.5)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("partition", ["greedy", "balanced"])
def test_sharded_optimizers(partition: str) -> None:
    param = weight()
    optimizer = ZeroRedundancyOptimizer(
        [param], FusedAdamW, partition=partition, lr=0.1, max_grad_norm=1.0, skip_nonfinite=True
    )
    written: list[dict[str, float]] = []
    log_to(written.append, optimizer, every=4, prefix="")
    run(optimizer, param)
    (values,) = written
    assert values["grad_norm"] == pytest.approx(50.0)
    assert (values["clipped_share"], values["skipped_steps"], values["lr"]) == (0.5, 1, 0.1)


@pytest.mark.parametrize("base", [FusedAdamW, torch.optim.AdamW])
def test_mixed_precision_around_any_optimizer(base: type[torch.optim.Optimizer]) -> None:
    param = torch.nn.Parameter(weight().bfloat16())
    config = {"initial_scale": 8.0}
    optimizer = FSDPadaptOptimizer(base([param], lr=0.1), grad_scal_cfg=config, clip_grad_norm=1.0)
    written: list[dict[str, float]] = []
    log_to(written.append, optimizer, every=1, prefix="")
    for gradient in GRADIENTS[:3]:
        optimizer.backward((param * torch.tensor(gradient)).sum())
        optimizer.step()
    assert [values["grad_norm"] for values in written[:2]] == pytest.approx([5, 0.5], rel=1e-2)
    assert [values["clipped_share"] for values in written] == [1, 0, 0]
    assert [values["skipped_steps"] for values in written] == [0, 0, 1]
    assert [values["loss_scale"] for values in written[:2]] == [8, 8]
    assert written[0]["lr"] == 0.1


def test_flush_writes_what_replays_of_a_captured_step_did(monkeypatch: pytest.MonkeyPatch) -> None:
    param = weight()
    optimizer = FusedAdamW([param], max_grad_norm=1.0)
    written: list[dict[str, float]] = []
    log = log_to(written.append, optimizer, every=5, prefix="", digest_every=5)
    monkeypatch.setattr(step_log, "is_captured", lambda: True)  # each step as a replay makes it
    run(optimizer, param)
    assert written == []
    log.flush()
    log.flush()
    (values,) = written
    assert (values["step"], values["grad_norm"]) == (4, 50.0)
    assert values["clipped_share"] == 0.75  # the norms 5, infinite and 50
    assert "digest" not in values
    run(optimizer, param)
    monkeypatch.undo()
    run(optimizer, param)
    log.remove()
    assert written[1]["step"] == 12 and "digest" in written[1]


def test_tensorboard(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is an extra")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    param = weight()
    optimizer = FusedAdamW([param], lr=0.1, max_grad_norm=1.0)
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        log_to(writer, optimizer, every=2)
        run(optimizer, param)
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [e.step for e in events.Scalars("optimizer/lr")] == [2, 4]
    assert events.Scalars("optimizer/grad_norm")[0].value == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("writer", "optimizer", "every", "error"),
    [
        (print, FusedAdamW([weight()]), 0, ValueError),
        (3, FusedAdamW([weight()]), 1, TypeError),
        (print, torch.optim.AdamW([weight()]), 1, TypeError),
    ],
)
def test_refusals(
    writer: object, optimizer: torch.optim.Optimizer, every: int, error: type
) -> None:
    with pytest.raises(error):
        log_to(writer, optimizer, every=every)
