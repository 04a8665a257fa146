"""Cases of steps that track or that a digest follows, and of the same steps alone."""

from __future__ import annotations

import torch
from cases import BYTES, CLIP, MAX_NORM, OURS, gradients_of, params_with
from group import Case, Group
from shapes import Shapes

from torchopt_ext import FusedAdamW, digest

TRACKED = {
    OURS: (),
    f"{OURS}, norms": ("norms",),
    f"{OURS}, lost updates": ("lost_updates",),
    f"{OURS}, both": ("norms", "lost_updates"),
}


def build_tracked(name: str, shapes: Shapes, device: str = "cpu") -> Group:
    """Builds float32 cases with their own parameters and state, and shared gradients."""
    gradients = gradients_of(shapes, torch.float32, device)
    cases = []
    for implementation, track in TRACKED.items():
        optimizer = FusedAdamW(params_with(gradients), max_grad_norm=MAX_NORM, track=track)
        cases.append(Case(implementation, CLIP, optimizer.step, BYTES[OURS, CLIP]))
    optimizer = FusedAdamW(params_with(gradients), max_grad_norm=MAX_NORM)

    def step_and_digest() -> None:
        optimizer.step()
        digest(optimizer)

    cases.append(Case(f"{OURS}, then a digest", CLIP, step_and_digest, BYTES[OURS, CLIP] + 12))
    return Group(name, shapes, cases, baseline=OURS)
