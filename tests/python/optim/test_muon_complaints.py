"""What users of other packages missed in their Muon, as small programs in one process.

Complaints that a test of a function already answers are named there: test_muon.py,
test_muon_hybrid.py, test_muon_groups.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchopt_ext import (
    FusedAdamW,
    FusedMuon,
    FusedOptimizer,
    GradScaler,
    muon_groups,
    orthogonalize,
)
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.integrations.lightning import FusedStep
from torchopt_ext.statedict.several import rerouted
from torchopt_ext.zero import ZeroRedundancyOptimizer

from ...support.compare import assert_same_bits, snapshot, unchanged
from ...support.problems import copy_params, make_params, through_file, train

WIDTH, VOCAB, LR = 12, 20, 0.02
OPTIONS: dict[str, Any] = {"lr": LR, "weight_decay": 0.0, "ns_coefficients": "polar_express"}
CLOSE: dict[str, Any] = {**OPTIONS, "ns_steps": 8, "momentum": 0.0}
"""So many iterations bring also small singular values to 1."""


def new_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Returns an embedding, two hidden matrices and a head."""
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, WIDTH))
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *layers, nn.Linear(WIDTH, VOCAB)).to(dtype)


def hidden(model: nn.Module) -> list[nn.Parameter]:
    return [model.get_parameter(name) for name in ("1.weight", "3.weight")]


def batch(seed: int, count: int = 8) -> Tensor:
    return torch.randint(VOCAB, (count, 6), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return nn.functional.cross_entropy(logits.float(), tokens[:, 1:].flatten())


def epoch(model: nn.Module, optimizer: Any, seeds: range) -> None:
    for seed in seeds:
        loss_of(model, batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()


def grouped(model: nn.Module, **options: Any) -> FusedMuon:
    return FusedMuon(muon_groups(model, 0.0, quiet=True), **{**OPTIONS, **options})


# ---- is Muon what runs? --------------------------------------------------------------------------


def stepped_by(kind: str, model: nn.Module, optimizer: Any) -> Callable[[], None]:
    """Returns a training step as a program writes it."""
    scaler: Any = {"scaler": GradScaler, "torch's scaler": torch.amp.GradScaler}.get(kind)
    if scaler is not None:
        scaler = scaler("cpu", init_scale=2.0**10)

    def step() -> None:
        loss = loss_of(model, batch(0))
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return torch.compile(step, backend="eager") if kind == "compiled" else step


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "kind", ["scaler", "torch's scaler", "compiled", "container", "in backward", "ZeRO", "bf16"]
)
def test_a_wrapped_muon_is_no_sgd(kind: str) -> None:
    """deepspeedai/DeepSpeed#8441: with the default wrapper, no matrix was orthogonalized.

    The loss fell nevertheless. ``control.orthogonalized`` and the weights tell.
    """
    model = new_model(torch.bfloat16 if kind == "bf16" else torch.float32)
    optimizer: Any
    if kind in ("container", "in backward"):
        cls = OptimizersContainer if kind == "container" else OptimizersInBackwardContainer
        optimizer = cls([model], FusedMuon, CLOSE)
    elif kind == "ZeRO":
        optimizer = ZeroRedundancyOptimizer(muon_groups(model, 0.0, quiet=True), FusedMuon, **CLOSE)
    else:
        more = {"master_weights": "fp32"} if kind == "bf16" else {}
        optimizer = grouped(model, **CLOSE, **more)
    before = [p.detach().float() for p in hidden(model)]
    before = [b.clone() for b in before]
    stepped_by(kind, model, optimizer)()
    assert float(optimizer.control.orthogonalized) == 2
    for p, was in zip(hidden(model), before, strict=True):
        weight = optimizer.state[p]["master_weight"] if kind == "bf16" else p.detach()
        scale = max(1, p.shape[0] / p.shape[1]) ** 0.5
        values = torch.linalg.svdvals((was - weight) / LR / scale)
        torch.testing.assert_close(values, torch.ones(WIDTH), rtol=0, atol=0.05)


@pytest.mark.parametrize("in_backward", [False, True])
def test_accumulated_micro_batches_train_as_one_batch(in_backward: bool) -> None:
    """deepspeedai/DeepSpeed#8443: orthogonalized per micro-batch, weights differed by 10 %."""
    models = [new_model(), new_model()]
    whole = grouped(models[0])
    cls: Any = OptimizersInBackwardContainer if in_backward else OptimizersContainer
    more = {"backwards_per_step": 4} if in_backward else {}
    parts = cls([models[1]], FusedMuon, OPTIONS, no_decay=(), **more)
    for seed in range(3):
        epoch(models[0], whole, range(seed, seed + 1))
        for micro_batch in batch(seed).split(2):
            (loss_of(models[1], micro_batch) / 4).backward()
        parts.step()
        parts.zero_grad()
        assert float(parts.control.orthogonalized) == 2
    for p, q in zip(hidden(models[0]), hidden(models[1]), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-3 * LR)


def test_a_compiled_program_trains_as_without() -> None:
    """KellerJordan/Muon#40: Adam has ``capturable=True`` for torch.compile, and Muon has not."""
    models = [new_model(), new_model()]
    for model, compiled in zip(models, (False, True), strict=True):
        optimizer = grouped(model, lr=torch.tensor(LR), max_grad_norm=0.1)

        def training(tokens: Tensor, model: nn.Module = model, of: Any = optimizer) -> Tensor:
            loss = loss_of(model, tokens)
            loss.backward()
            of.step()
            of.zero_grad()
            return loss.detach() + 1

        run = torch.compile(training, backend="eager") if compiled else training
        losses = [float(run(batch(0))) for _ in range(3)]
        assert losses[-1] < losses[0]
    assert_same_bits(models[0].parameters(), models[1].parameters())


# ---- 16 bits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_with", [None, "fp32"])
@pytest.mark.parametrize("loaded_with", [None, "fp32", "remainder"])
def test_bf16_training_resumes(saved_with: Any, loaded_with: Any) -> None:
    """deepspeedai/DeepSpeed#7746: a loaded float32 momentum met gradients of bf16, and crashed."""
    models = [new_model(torch.bfloat16), new_model(torch.bfloat16)]
    optimizers = [
        grouped(model, master_weights=masters)
        for model, masters in zip(models, (saved_with, loaded_with), strict=True)
    ]
    epoch(models[0], optimizers[0], range(3))
    models[1].load_state_dict(copy.deepcopy(models[0].state_dict()))
    optimizers[1].load_state_dict(through_file(optimizers[0].state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        epoch(model, optimizer, range(3, 5))
    if saved_with == loaded_with:
        assert snapshot(optimizers[0]) == snapshot(optimizers[1])
    for p, q in zip(hidden(models[0]), hidden(models[1]), strict=True):
        dtype = torch.float32 if loaded_with else torch.bfloat16
        assert optimizers[1].state[q]["momentum_buffer"].dtype == dtype
        torch.testing.assert_close(p, q, rtol=2**-6, atol=LR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_momentum_stays_the_average_of_gradients(dtype: torch.dtype, nesterov: bool) -> None:
    """pytorch/pytorch#194664: without Nesterov, the iterations normalized momentum of bf16."""
    (param,) = make_params([(8, 5)], dtype)
    optimizer = FusedMuon([param], momentum=0.5, nesterov=nesterov)
    average = torch.zeros(8, 5, dtype=torch.float64)
    for seed in range(3):
        train(optimizer, [seed])
        average = (average + param.grad.double()) / 2
    momentum = optimizer.state[param]["momentum_buffer"]
    tolerance = 3 * torch.finfo(dtype).eps
    torch.testing.assert_close(momentum.double(), average, rtol=tolerance, atol=tolerance)


def test_bf16_weights_do_not_mean_bf16_products_on_cpus() -> None:
    """pytorch/pytorch#146508: bf16 products take up to 499 times as long there, and round."""
    updates = []
    for dtype in (torch.float32, torch.bfloat16):
        (param,) = (nn.Parameter(p.to(dtype)) for p in make_params([(24, 40)]))
        more = {"master_weights": "fp32"} if dtype == torch.bfloat16 else {}
        optimizer = FusedMuon([param], **OPTIONS, **more)
        before = param.detach().float().clone()
        gradient = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
        param.grad = gradient.bfloat16().to(dtype)
        optimizer.step()
        weight = optimizer.state[param]["master_weight"] if more else param.detach()
        updates.append((before - weight) / LR)
    torch.testing.assert_close(*updates, rtol=0, atol=1e-4)  # products of bf16 differ by 1e-2


# ---- many matrices -------------------------------------------------------------------------------


def test_equal_matrices_are_orthogonalized_in_one_call() -> None:
    """ultralytics/ultralytics#23271 and #23297, MoonshotAI/Moonlight#33: up to twice as slow as
    SGD, by calls for each of many small matrices.
    """
    batches: list[tuple[int, ...]] = []

    def counted(matrices: Tensor) -> Tensor:
        batches.append(tuple(matrices.shape))
        return orthogonalize(matrices)

    params = make_params([(8, 12), (7, 5)] * 40)
    others = copy_params(params)
    optimizer = FusedMuon(params, **OPTIONS | {"ns_coefficients": "jordan"}, orthogonalize=counted)
    plain = FusedMuon(others, **OPTIONS | {"ns_coefficients": "jordan"})
    for each in (optimizer, plain):
        train(each, [0])
    assert sorted(batches) == [(40, 7, 5), (40, 8, 12)]
    assert float(optimizer.control.orthogonalized) == 80
    assert_same_bits(params, others)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("partition", ["greedy", "balanced"])
def test_zero_8_bits_and_clipped_heads_go_together(partition: str) -> None:
    """modelscope/ms-swift#6953, huggingface/transformers#39495, hiyouga/LLaMA-Factory#8653 and
    bitsandbytes#1973: no Muon beside ZeRO, no MuonClip, and no 8-bit Muon.
    """
    torch.manual_seed(0)
    layers = (nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Linear(64, VOCAB))
    model = nn.Sequential(nn.Embedding(VOCAB, 64), *layers).bfloat16()
    heads = model.get_parameter("1.weight")
    groups = muon_groups(model, 0.0, quiet=True, muon_options={"1.weight": {"num_heads": 4}})
    zero: Any = ZeroRedundancyOptimizer(
        groups, FusedMuon, partition=partition, lr=LR, master_weights="remainder8",
        state_dtype="int8", adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    losses = []
    for _ in range(20):
        loss = loss_of(model, batch(0))
        losses.append(float(loss.detach()))
        loss.backward()
        zero.step()
        zero.zero_grad()
        assert float(zero.control.orthogonalized) == 4 + 1
        norms = heads.detach().float().view(4, -1).norm(dim=1)
        zero.scale_(heads, (6.0 / norms).clamp(max=1.0))
        assert float(heads.detach().float().view(4, -1).norm(dim=1).max()) < 6.0 * (1 + 2**-8)
    assert losses[-1] < losses[0] / 2
    state = zero.optim.state[zero.optim.param_groups[0]["params"][0]]
    assert state["momentum_buffer_codes"].dtype == state["remainder8"].dtype == torch.int8


# ---- which parameters, which learning rate -------------------------------------------------------


class Mixed(nn.Module):
    """Kernels, a LayerScale and experts, as in vision models and mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.gamma = nn.Parameter(torch.ones(8, 1, 1))
        self.experts = nn.Parameter(torch.randn(4, 8, 6) / 3)
        self.classifier = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = (self.stem(x) * self.gamma).tanh().mean((2, 3))
        return self.classifier(torch.einsum("bi,eio->beo", x, self.experts).flatten(1).tanh())


def test_kernels_layer_scales_and_experts_train() -> None:
    """MoonshotAI/Moonlight#37, pytorch/pytorch#166209, ultralytics/ultralytics#25447 and #25846.

    Such shapes raised an error, or the factor of a kernel's learning rate was that of its window.
    """
    model = Mixed()
    optimizer = FusedMuon(muon_groups(model, 0.0, quiet=True), lr=LR,
                          adjust_lr_fn="match_rms_adamw")  # fmt: skip
    x = torch.randn(16, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    before, losses = model.stem.weight.detach().clone(), []
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(x), torch.arange(16) % 5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if len(losses) == 1:
            update = (model.stem.weight.detach() - before).reshape(8, 27) / LR
            assert 0.6 < float(torch.linalg.svdvals(update)[0]) / (0.2 * 27**0.5) < 1.3
    assert float(optimizer.control.orthogonalized) == 5
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("shape", [(64, 64), (32, 256), (256, 32)])
def test_adamws_learning_rate_moves_weights_as_far_as_adamw(shape: tuple[int, int]) -> None:
    """KellerJordan/Muon#49, MoonshotAI/Moonlight#36: which learning rate?"""
    lengths = []
    for optimizer_of, options in (
        (FusedMuon, {"adjust_lr_fn": "match_rms_adamw"}),
        (FusedAdamW, {"betas": (0.9, 0.95)}),
    ):
        (param,) = make_params([shape])
        optimizer: FusedOptimizer = optimizer_of([param], lr=1e-3, weight_decay=0.0, **options)
        train(optimizer, range(30))
        before = param.detach().clone()
        train(optimizer, [30])
        lengths.append(float((param.detach() - before).norm()))
    assert 0.6 < lengths[0] / lengths[1] < 1.4


# ---- two optimizers become one -------------------------------------------------------------------


def test_two_lines_replace_torchs_two_optimizers() -> None:
    """The loop of docs/migration.md. Weights differ by the bf16 of torch's products."""
    models = [new_model() for _ in range(3)]
    before = dict(models.pop().named_parameters())
    matrices = hidden(models[0])
    rest = [p for p in models[0].parameters() if all(p is not matrix for matrix in matrices)]
    options: dict[str, Any] = {"lr": LR, "weight_decay": 0.1}
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options)
    adamw = torch.optim.AdamW(rest, **options)
    groups = muon_groups(models[1], no_decay=(), quiet=True)
    one = FusedMuon(groups, adjust_lr_fn="match_rms_adamw", max_grad_norm=0.2, **options)
    for seed in range(3):
        for model, optimizers in zip(models, ([muon, adamw], [one]), strict=True):
            loss_of(model, batch(seed)).backward()
            if one not in optimizers:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert norm > 0.2
        assert float(one.control.grad_norm) == pytest.approx(float(norm), rel=1e-2)
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        tolerance = 0.05 if any(p is matrix for matrix in matrices) else 2e-3
        difference, update = (float((p - other).detach().norm()) for other in (q, before[name]))
        assert difference < tolerance * update, name


# ---- one optimizer in frameworks that expect one -------------------------------------------------


@pytest.mark.parametrize("trained", ["head", "hidden"])
def test_a_scaler_steps_while_a_part_of_the_model_has_no_gradient(trained: str) -> None:
    """Lightning-AI/pytorch-lightning#20116: "No inf checks were recorded" for one of two."""
    model = new_model()
    optimizer = grouped(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(loss_of(model, batch(0))).backward()
    for name, p in model.named_parameters():
        if (name in ("1.weight", "3.weight")) != (trained == "hidden"):
            p.grad = None
    scaler.step(optimizer)
    scaler.update()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert ("3.weight" in moved) == (trained == "hidden")
    assert ("4.weight" in moved) == (trained == "head")
    assert scaler.get_scale() == 2.0**10


def test_lightning_optimizes_automatically() -> None:
    """Lightning-AI/pytorch-lightning#6660: two optimizers need manual optimization."""
    pl = pytest.importorskip("lightning")

    class Module(FusedStep, pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = new_model()

        def training_step(self, tokens: Tensor) -> Tensor:
            return loss_of(self.model, tokens)

        def configure_optimizers(self) -> FusedMuon:
            return grouped(self.model)

    module, by_hand = Module(), new_model()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing"), False)
    trainer = pl.Trainer(accelerator="cpu", max_steps=3, enable_model_summary=False, **quiet,
                         gradient_clip_val=0.1)  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader([*map(batch, range(3))], batch_size=None))
    epoch(by_hand, grouped(by_hand, max_grad_norm=0.1), range(3))
    assert_same_bits(module.model.parameters(), by_hand.parameters())


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["AdamW", "patterns"])
@pytest.mark.parametrize("masters", [None, "fp32", "remainder"])
def test_a_checkpoint_resumes_after_the_routing_has_changed(before: str, masters: Any) -> None:
    """vllm-project/speculators#1066, deepspeedai/DeepSpeed#8278: old checkpoints did not load.

    As they are, they are rejected as a whole. What did not move continues, the rest begins anew.
    """
    models = [new_model(torch.bfloat16 if masters else torch.float32) for _ in range(2)]
    options, hold = {"lr": LR, "weight_decay": 0.0}, {"master_weights": masters}
    old: Any = (
        OptimizersContainer(models[:1], FusedAdamW, options | hold)
        if before == "AdamW"
        else OptimizersContainer(models[:1], FusedMuon, options | hold, adamw=["^3"])
    )
    epoch(models[0], old, range(3))
    saved = through_file(old.state_dict())
    new = OptimizersContainer(models[1:], FusedMuon, options | hold)
    own = new.state_dict()
    models[1].load_state_dict(models[0].state_dict())
    with unchanged(new), pytest.raises(ValueError, match="is of adam, expected muon"):
        new.load_state_dict(saved)
    new.load_state_dict(rerouted(saved, own))
    moved = {"3.weight"} | ({"1.weight"} if before == "AdamW" else set())
    for key, value in new.state_dict().items():
        kind, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        if kind == "state" and name in moved and entry in ("step", "momentum_buffer"):
            assert not value.any()
        elif kind == "state":
            assert_same_bits([value], [saved[key]])
    epoch(models[1], new, range(3, 5))


@pytest.mark.parametrize(
    "group",
    [{"algorithm": "muno"}, {"algorithm": ["muon"]}, {"params": [None]}, {"params": 3}, {}],
    ids=str,
)
def test_a_group_that_no_step_takes_leaves_the_ranks_to_tell(group: dict[str, Any]) -> None:
    """Other ranks wait for this rank's rejection: only the step may raise."""
    optimizer = FusedMuon([nn.Parameter(torch.ones(3, 4))])
    optimizer.step()
    optimizer._forget_plan()
    groups = optimizer._exchange_groups
    optimizer.param_groups[0] = optimizer.param_groups[0] | group if group else {}
    assert optimizer._exchange_groups == groups
    with pytest.raises((AttributeError, LookupError, TypeError, ValueError)):
        optimizer.step()
