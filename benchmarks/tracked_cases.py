"""Cases of steps that track, and of the same steps without tracking."""

from __future__ import annotations

import torch
from bf16_cases import BYTES as BF16_BYTES
from bf16_cases import OPTIONS as BF16_OPTIONS
from cases import BYTES, CLIP, MAX_NORM, OURS, gradients_of, params_with
from group import Case, Group
from shapes import Shapes

from torchopt_ext import FusedAdamW

TRACKED = {
    OURS: (),
    f"{OURS}, norms": ("norms",),
    f"{OURS}, lost updates": ("lost_updates",),
    f"{OURS}, digest": ("digest",),
    f"{OURS}, all three": ("norms", "lost_updates", "digest"),
}


def build_tracked(name: str, shapes: Shapes, device: str = "cpu") -> Group:
    """Builds float32 cases with their own parameters and state, and shared gradients."""
    gradients = gradients_of(shapes, torch.float32, device)
    cases = []
    for implementation, track in TRACKED.items():
        optimizer = FusedAdamW(params_with(gradients), max_grad_norm=MAX_NORM, track=track)
        cases.append(Case(implementation, CLIP, optimizer.step, BYTES[OURS, CLIP]))
    return Group(name, shapes, cases, baseline=OURS)


def build_digests(implementation: str, name: str, shapes: Shapes) -> Group:
    """Builds bfloat16 cases with and without a digest for a key of bf16_cases.OPTIONS."""
    gradients = gradients_of(shapes, torch.bfloat16, "cpu")
    cases = []
    for case, track in ((implementation, ()), (f"{implementation}, digest", ("digest",))):
        settings = BF16_OPTIONS[implementation]
        params = params_with(gradients)
        optimizer = FusedAdamW(params, max_grad_norm=MAX_NORM, track=track, **settings)
        cases.append(Case(case, CLIP, optimizer.step, BF16_BYTES[implementation]))
    return Group(name, shapes, cases, baseline=implementation)
