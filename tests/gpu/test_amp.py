"""A step on the GPU under torch.amp's autocast and gradient scaler."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torchopt_ext import FusedAdamW

from .support import bits, marks

pytestmark = marks

STEPS, OVERFLOW = 6, 3


def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: bool) -> list[float]:
    """Steps under autocast and torch's scaler, with one overflow, and returns the scales."""
    generator = torch.Generator().manual_seed(1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=2)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        data = torch.randn(16, 33, generator=generator).to("cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(data).float().square().mean()
        scaler.scale(loss).backward()
        if step == OVERFLOW:
            first = next(model.parameters()).grad
            assert first is not None
            first[0, 0] = float("inf")
        before = [bits(p) for p in model.parameters()]
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        changed = [bits(p) for p in model.parameters()] != before
        assert changed == (step != OVERFLOW)
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped by torch"])
def test_torchs_scaler_steps_as_with_torchs_optimizer(clip: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 3)).to("cuda")
    twin = copy.deepcopy(model)
    ours = train(model, FusedAdamW(model.parameters(), lr=1e-2), clip)
    theirs = train(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True), clip)
    assert ours == theirs
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
