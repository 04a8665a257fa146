"""Accelerate, transformers and Lightning train like a manual loop, to the bit.

This includes clipping in the step, skipped steps, for which schedules wait, and resumed runs.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.optim.lr_scheduler import LambdaLR

from torchopt_ext import (
    FSDPadaptOptimizer,
    FusedAdamW,
    GradScaler,
    ZeroRedundancyOptimizer,
    log_to,
    param_groups,
)
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer

STEPS, SKIPPED = 6, 2
WITHOUT = "the frameworks are installed with torch 2.15"
Batch = tuple[Tensor, Tensor]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x) - labels).square().mean()}


def batches(broken: int | None = None) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(3, 4, generator=generator), torch.randn(3, 2, generator=generator))
        for _ in range(STEPS)
    ]
    if broken is not None:
        made[broken][0][0, 0] = torch.inf
    return made


def new_model() -> Model:
    torch.manual_seed(0)
    return Model()


def new_optimizer(model: nn.Module, max_grad_norm: float | None = None) -> FusedAdamW:
    return FusedAdamW(param_groups(model), lr=0.1, skip_nonfinite=True, max_grad_norm=max_grad_norm)


def new_schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


class Trained:
    """Weights, moments and logged values, compared to the bit."""

    def __init__(
        self, model: nn.Module, optimizer: Any, norms: list[float], lrs: list[float]
    ) -> None:
        self.weights = {k: v.detach().clone() for k, v in model.state_dict().items()}
        self.moments = [s["exp_avg_sq"].clone() for s in optimizer.state.values()]
        self.norms, self.lrs = norms, lrs
        self.skipped = optimizer.control.skipped_steps.item()

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Trained)
        assert self.skipped == other.skipped
        for name, weight in self.weights.items():
            assert torch.equal(weight, other.weights[name]), name
        assert all(map(torch.equal, self.moments, other.moments))
        return self.norms == other.norms and self.lrs == other.lrs


def by_hand(
    max_grad_norm: float, broken: int | None = None, scaler: GradScaler | None = None,
    dtype: torch.dtype | None = None,
) -> Trained:  # fmt: skip
    model = new_model()
    optimizer = new_optimizer(model, max_grad_norm)
    schedule = new_schedule(optimizer)
    norms, lrs = [], []
    for x, labels in batches(broken):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False):
            loss = model(x, labels)["loss"]
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        norms.append(optimizer.control.grad_norm.item())
        lrs.append(optimizer.param_groups[0]["lr"])
        if not optimizer.control.skip:
            schedule.step()
    assert min(norms) < max_grad_norm or max_grad_norm < 1
    return Trained(model, optimizer, norms, lrs)


CASES = [pytest.param(0.3, None, id="clipped"), pytest.param(torch.inf, None, id="measured"),
         pytest.param(0.3, SKIPPED, id="skipped")]  # fmt: skip
each_case = pytest.mark.parametrize(("max_grad_norm", "broken"), CASES)


def equal(found: Trained, expected: Trained) -> None:
    norms = zip(found.norms, expected.norms, strict=True)
    assert all(a == b or not torch.tensor(a + b).isfinite() for a, b in norms)
    found.norms = expected.norms
    assert found == expected


# ---- Accelerate ---------------------------------------------------------------------------------
@pytest.fixture
def accelerator() -> Iterator[Any]:
    module = pytest.importorskip("torchopt_ext.integrations.accelerate", reason=WITHOUT)
    made = module.Accelerator(cpu=True)
    yield made
    made.free_memory()


def accelerated(
    accelerator: Any, max_grad_norm: float, broken: int | None = None, save_at: int | None = None,
    load: bool = False, folder: str = "",
) -> Trained:  # fmt: skip
    model = new_model()
    optimizer = new_optimizer(model)
    schedule = new_schedule(optimizer)
    model, prepared, schedule = accelerator.prepare(model, optimizer, schedule)
    data = batches(broken)
    if load:
        accelerator.load_state(folder)
        data = data[save_at:]
    norms, lrs = [], []
    for i, (x, labels) in enumerate(data):
        prepared.zero_grad()
        accelerator.backward(model(x, labels)["loss"])
        norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
        before = [p.grad.clone() for p in model.parameters()]
        prepared.step()
        after = [p.grad for p in model.parameters()]
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
        assert prepared.max_grad_norm == max_grad_norm
        assert norm.equal(prepared.control.grad_norm) or not norm.isfinite()
        assert prepared.step_was_skipped is accelerator.optimizer_step_was_skipped is (i == broken)
        norms.append(norm)
        lrs.append(optimizer.param_groups[0]["lr"])
        schedule.step()
        if i + 1 == save_at and not load:
            accelerator.save_state(folder)
    return Trained(model, optimizer, [norm.item() for norm in norms], lrs)


@each_case
def test_accelerate(accelerator: Any, max_grad_norm: float, broken: int | None) -> None:
    equal(accelerated(accelerator, max_grad_norm, broken), by_hand(max_grad_norm, broken))


def test_accelerate_with_a_scaler(accelerator: Any) -> None:
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    found = accelerated(accelerator, 0.3, SKIPPED)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=2)
    equal(found, by_hand(0.3, SKIPPED, scaler))
    assert type(accelerator.scaler) is GradScaler
    assert accelerator.scaler.get_scale() == scaler.get_scale() != 4.0


def test_stock_accelerate_knows_the_steps_that_its_scaler_skips() -> None:
    """Its wrapper replaces ``step`` and looks whether the scaler calls it."""
    stock = pytest.importorskip("accelerate", reason=WITHOUT).Accelerator(cpu=True)
    stock.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, prepared = stock.prepare(model := new_model(), new_optimizer(model))
    skipped = []
    for batch in batches(SKIPPED):
        prepared.zero_grad()
        stock.backward(model(*batch)["loss"])
        prepared.step()
        skipped.append(prepared.step_was_skipped)
    stock.free_memory()
    assert skipped == [step == SKIPPED for step in range(STEPS)]


def test_in_stock_accelerates_wrapper_is_the_optimizer_that_clips_and_skips() -> None:
    stock = pytest.importorskip("accelerate", reason=WITHOUT).Accelerator(cpu=True)
    model, prepared = stock.prepare(model := new_model(), new_optimizer(model))
    prepared.optimizer.max_grad_norm = 0.3
    for step, batch in enumerate(batches(SKIPPED)):
        prepared.zero_grad()
        stock.backward(model(*batch)["loss"])
        prepared.step()
        control = prepared.optimizer.control
        assert control.skip == (step == SKIPPED) and not prepared.step_was_skipped
        assert step == SKIPPED or (control.clip_factor < 1) == (control.grad_norm > 0.3)
    stock.free_memory()


def test_accelerate_scales_for_optimizers_prepared_earlier(accelerator: Any) -> None:
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    models = [torch.nn.Linear(2, 2) for _ in range(2)]
    theirs = torch.optim.SGD(models[0].parameters(), lr=0.5)
    both = accelerator.prepare(theirs, FusedAdamW(models[1].parameters()))
    accelerator.backward(sum(model(torch.ones(1, 2)).sum() for model in models))
    before = models[0].weight.detach().clone()
    for optimizer in both:
        optimizer.step()
    assert torch.equal(models[0].weight, before - 0.5)


def test_accelerate_resumes(accelerator: Any, tmp_path: Path) -> None:
    whole = accelerated(accelerator, 0.3, save_at=3, folder=str(tmp_path))
    accelerator.free_memory()
    resumed = accelerated(accelerator, 0.3, save_at=3, load=True, folder=str(tmp_path))
    resumed.norms, resumed.lrs = whole.norms[:3] + resumed.norms, whole.lrs[:3] + resumed.lrs
    assert resumed == whole


def test_accelerate_clips_in_the_steps_that_are_asked_to(accelerator: Any) -> None:
    """Steps clip only on request; otherwise the optimizer's own threshold applies, if any."""
    for own in (None, 7.0):
        model, prepared = accelerator.prepare(model := new_model(), new_optimizer(model))
        prepared.max_grad_norm = own
        seen = []
        for asked in (True, False, False, True, True, False):
            accelerator.backward(model(*batches()[0])["loss"])
            if asked:
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
            prepared.step()
            seen.append(prepared.max_grad_norm)
        assert seen == [0.3, own, own, 0.3, 0.3, own]
        accelerator.clip_grad_norm_(model.parameters(), 0.3)
        prepared.step()
        prepared.optimizer.max_grad_norm = 5.0  # set on the optimizer itself
        prepared.step()
        assert prepared.max_grad_norm == 5.0
        accelerator.clip_grad_norm_(model.parameters(), 0)  # without clipping
        prepared.step()
        assert prepared.max_grad_norm is None
        prepared.step()
        assert prepared.max_grad_norm == 5.0
        accelerator.free_memory()


def test_accelerate_reports_norms_that_were_measured(accelerator: Any) -> None:
    model, prepared = accelerator.prepare(model := new_model(), FusedAdamW(model.parameters()))
    logged: list[dict[str, float]] = []
    log_to(logged.append, prepared, every=1, prefix="")
    for threshold in (0.3, None):
        accelerator.backward(model(*batches()[0])["loss"])
        norm = accelerator.clip_grad_norm_(model.parameters(), threshold)
        prepared.step()
        assert norm.isnan() == (threshold is None)
    assert logged[0]["grad_norm"] > 0.3 and logged[0]["clip_factor"] < 1
    assert "grad_norm" not in logged[1]


def test_accelerate_leaves_other_optimizers_alone(accelerator: Any) -> None:
    model = new_model()
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    assert type(optimizer).__name__ == "AcceleratedOptimizer"
    model(*batches()[0])["loss"].backward()
    accelerator.clip_grad_norm_(model.parameters(), 0.01)
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert total.item() == pytest.approx(0.01, rel=1e-3)


def test_accelerate_refuses_an_optimizer_with_a_threshold_of_its_own(accelerator: Any) -> None:
    optimizer = FSDPadaptOptimizer(new_optimizer(new_model()))
    with pytest.raises(TypeError, match="FSDPadaptOptimizer scales losses and clips by itself"):
        accelerator.prepare(optimizer)


def test_accelerate_clips_in_backward_only_by_the_containers_own_threshold(
    accelerator: Any,
) -> None:
    for own, backwards in ((None, 1), (0.3, 1), (0.3, None)):
        model, given = new_model(), {"lr": 0.1, "max_grad_norm": own}
        container = OptimizersInBackwardContainer(
            [model], FusedAdamW, given, backwards_per_step=backwards
        )
        model, prepared = accelerator.prepare(model, container)
        for x, labels in batches():
            accelerator.backward(model(x, labels)["loss"])
            if backwards is None:
                accelerator.clip_grad_norm_(model.parameters(), 0.2)
            else:
                with pytest.raises(ValueError, match=f"with max_grad_norm={own}: pass"):
                    accelerator.clip_grad_norm_(model.parameters(), 0.2)
                accelerator.clip_grad_norm_(model.parameters(), own or 0)
            prepared.step()
        assert backwards is None or container.max_grad_norm == own
        accelerator.free_memory()


def test_accelerate_forgets_a_request_for_gradients_that_are_dropped(accelerator: Any) -> None:
    model, prepared = accelerator.prepare(model := new_model(), new_optimizer(model))
    accelerator.backward(model(*batches()[0])["loss"])
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.3)
    prepared.zero_grad()
    accelerator.backward(model(*batches()[0])["loss"])
    prepared.step()
    assert prepared.max_grad_norm is None
    assert norm.isnan()


def test_accelerate_refuses_what_the_step_cannot_clip(accelerator: Any) -> None:
    model = new_model()
    accelerator.prepare(new_optimizer(model))
    with pytest.raises(ValueError, match="norm_type=1 and 1 optimizers"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)


# ---- Accelerate's FSDP2, which replaces the parameters in the groups -----------------------------
@pytest.fixture
def fsdp2() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate", reason=WITHOUT)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="NO_WRAP", cpu_ram_efficient_loading=False
    )
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    # It takes FSDP only with an accelerator.
    fsdp = accelerate.DistributedType.FSDP
    accelerator.state.__dict__.update(distributed_type=fsdp, fsdp_plugin=plugin)
    assert accelerator.is_fsdp2
    yield accelerator
    accelerator.free_memory()
    accelerate.state.AcceleratorState._reset_state(True)
    dist.destroy_process_group()


CLIPPED = {"lr": 0.1, "max_grad_norm": 0.3}
REPLACED: dict[str, tuple[Callable[[nn.Module], Any], float]] = {
    "FusedAdamW": (lambda model: FusedAdamW(model.parameters(), **CLIPPED), 0.3),
    "one part": (lambda model: OptimizersContainer([model], FusedAdamW, CLIPPED), 0.3),
    "two parts": (
        lambda model: OptimizersContainer(
            [nn.ModuleDict({key: model.layers[int(key)]}) for key in "03"], FusedAdamW, CLIPPED
        ),
        0.3,
    ),
    "torch's": (lambda m: OptimizersContainer([m], torch.optim.AdamW, {"lr": 0.1}), torch.inf),
    "in backward": (
        lambda model: OptimizersInBackwardContainer([model], FusedAdamW, {"lr": 0.1}),
        torch.inf,
    ),
    "in backward, clipped": (
        lambda model: OptimizersInBackwardContainer([model], FusedAdamW, CLIPPED),
        0.3,
    ),
}


@pytest.mark.parametrize("prepared_before", [False, True])
@pytest.mark.parametrize("kind", REPLACED)
def test_accelerates_fsdp2_trains_as_torch_does(
    fsdp2: Any, kind: str, prepared_before: bool
) -> None:
    """No unsharded weight or moment stays alive."""
    new, threshold = REPLACED[kind]
    model, reference = new_model(), new_model()
    for own in (model, reference):
        own.layers[1].requires_grad_(False)
    own = [p for p in reference.parameters() if p.requires_grad]
    theirs = torch.optim.AdamW(own, lr=0.1)
    optimizer = new(model)
    if prepared_before:  # state of step 0
        optimizer.init_state() if kind == "FusedAdamW" else optimizer.state_dict()
        if kind == "FusedAdamW":
            optimizer.state_dict()
    replaced = [weakref.ref(p) for p in model.parameters() if p.requires_grad]
    model, prepared = fsdp2.prepare(model, optimizer)
    if not (kind == "FusedAdamW" and prepared_before):  # nothing tells it before the first step
        assert all(param() is None for param in replaced) and not optimizer.state
    for batch in batches():
        fsdp2.backward(model(*batch)["loss"])
        prepared.step()
        prepared.zero_grad()
        reference(*batch)["loss"].backward()
        nn.utils.clip_grad_norm_(own, threshold)
        theirs.step()
        theirs.zero_grad()
        found = [p.full_tensor() for p in model.parameters()]
        torch.testing.assert_close(found, [*reference.parameters()], rtol=1e-6, atol=1e-6)
    assert all(param() is None for param in replaced)
    assert len(optimizer.state) == len(own)
    if isinstance(optimizer, OptimizersContainer):
        assert any(key.endswith("3.weight.exp_avg") for key in optimizer.state_dict())


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x)).square().mean()


@pytest.mark.parametrize("chosen", ["embedding", "pattern", "tensor"])
@pytest.mark.parametrize("kind", [None, OptimizersContainer, OptimizersInBackwardContainer])
def test_accelerates_fsdp2_keeps_the_choice_of_fp32_moments(
    fsdp2: Any, kind: Any, chosen: str
) -> None:
    model = Tokens()
    given = {"embedding": ["embedding"], "pattern": [r"embed"], "tensor": [model.embedding.weight]}
    settings: Any = {"lr": 0.1, "state_dtype": "int8", "fp32_moments": given[chosen]}
    optimizer = (
        kind([model], FusedAdamW, settings)
        if kind
        else FusedAdamW(model.named_parameters(), **settings)
    )
    del settings, given
    replaced = [weakref.ref(p) for p in model.parameters()]
    model, prepared = fsdp2.prepare(model, optimizer)
    assert all(param() is None for param in replaced)
    fsdp2.backward(model(torch.arange(9)))
    prepared.step()
    coded = {p: "exp_avg_codes" in state for p, state in optimizer.state.items()}
    assert not coded[model.embedding.weight]
    assert coded[model.head.weight]


@pytest.mark.parametrize("container", [False, True])
@pytest.mark.parametrize("master_weights", ["fp32", "remainder"])
def test_accelerates_fsdp2_does_not_lose_masters_that_were_set(
    fsdp2: Any, container: bool, master_weights: str
) -> None:
    model, exact = new_model().bfloat16(), new_model()
    settings: Any = {"lr": 0.1, "master_weights": master_weights}
    optimizer: Any = (
        OptimizersContainer([model], FusedAdamW, settings)
        if container
        else FusedAdamW(model.named_parameters(), **settings)
    )
    weights = {name: p.detach().clone() for name, p in exact.named_parameters()}
    optimizer.refresh_masters(from_=weights)
    model, prepared = fsdp2.prepare(model, optimizer)
    x, labels = (t.bfloat16() for t in batches()[0])
    fsdp2.backward(model(x, labels)["loss"])
    before = [p.full_tensor().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"refresh_masters.* call it again"):
        prepared.step()
    assert all(map(torch.equal, before, [p.full_tensor() for p in model.parameters()]))
    optimizer.refresh_masters(from_=weights)
    theirs = torch.optim.AdamW(exact.parameters(), lr=0.1)
    for param, own in zip(exact.parameters(), model.parameters(), strict=True):
        param.grad = own.grad.full_tensor().float()
    prepared.step()
    theirs.step()
    found = [p.full_tensor() for p in model.parameters()]
    expected = [p.detach().bfloat16() for p in exact.parameters()]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(optimizer.state) == len(found)


@pytest.mark.parametrize("kind", ["ZeroRedundancyOptimizer", "balanced", "FSDPadaptOptimizer"])
def test_accelerates_fsdp2_ends_where_replaced_parameters_cannot_be_followed(
    fsdp2: Any, kind: str
) -> None:
    model = new_model()
    optimizer: Any
    if kind == "FSDPadaptOptimizer":
        optimizer = FSDPadaptOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        optimizer.state_dict = optimizer.optim.state_dict  # Accelerate asks when it prepares
        optimizer.load_state_dict = optimizer.optim.load_state_dict
    else:
        settings = {"partition": "balanced"} if kind == "balanced" else {}
        optimizer = ZeroRedundancyOptimizer(model.parameters(), FusedAdamW, lr=0.1, **settings)
    model, prepared = fsdp2.prepare(model, optimizer)
    fsdp2.backward(model(*batches()[0])["loss"])
    before = [p.full_tensor().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"replaced in the (base's )?groups"):
        prepared.step()
    assert all(map(torch.equal, before, [p.full_tensor() for p in model.parameters()]))


def test_torchs_function_says_how_it_takes_a_containers_state(fsdp2: Any) -> None:
    container = OptimizersContainer([model := new_model()], FusedAdamW, {"lr": 0.1})
    model, prepared = fsdp2.prepare(model, container)
    fsdp2.backward(model(*batches()[0])["loss"])
    prepared.step()
    for given in (container, prepared):  # Accelerate's save_state gives its wrapper
        with pytest.raises(TypeError, match=r"\[\*container.optimizers\]"):
            get_optimizer_state_dict(model, given)
    found = get_optimizer_state_dict(model, [*container.optimizers])
    assert found["state"].keys() == dict(model.named_parameters()).keys()


# ---- transformers -------------------------------------------------------------------------------
@pytest.fixture
def hugging_face(tmp_path: Path) -> Callable[..., Trained]:
    transformers = pytest.importorskip("transformers", reason=WITHOUT)
    pytest.importorskip("accelerate", reason=WITHOUT)
    from torchopt_ext.integrations.huggingface import FusedStep

    class Trainer(FusedStep, transformers.Trainer):
        pass

    with pytest.raises(TypeError, match="has Trainer before FusedStep, which then does nothing"):
        type("Wrong", (transformers.Trainer, FusedStep), {})

    class Rows(torch.utils.data.IterableDataset[Any]):
        def __init__(self, broken: int | None) -> None:
            self.data = batches(broken)

        def __iter__(self) -> Iterator[Any]:
            for x, labels in self.data:
                yield from ({"x": a, "labels": b} for a, b in zip(x, labels, strict=True))

    def train(
        max_grad_norm: float, broken: int | None = None, resume: int | None = None,
        new_model: Callable[[], nn.Module] = new_model, save: str = "steps",
    ) -> Trained:  # fmt: skip
        model = new_model()
        optimizer = new_optimizer(model)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=STEPS, per_device_train_batch_size=3, use_cpu=True,
            max_grad_norm=0 if max_grad_norm == torch.inf else max_grad_norm, logging_steps=1,
            save_steps=3, save_strategy=save, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        optimizers = optimizer, new_schedule(optimizer)
        trainer = Trainer(model, arguments, train_dataset=Rows(broken), optimizers=optimizers)
        trainer.train(
            resume_from_checkpoint=str(tmp_path / f"checkpoint-{resume}") if resume else None
        )
        logs = [log for log in trainer.state.log_history if "grad_norm" in log]
        assert trainer.optimizer.max_grad_norm == max_grad_norm
        # The Trainer logs the learning rate before the schedule's step.
        return Trained(
            model,
            optimizer,
            [log["grad_norm"] for log in logs],
            [log["learning_rate"] for log in logs],
        )

    return train


@each_case
def test_hugging_face(
    hugging_face: Callable[..., Trained], max_grad_norm: float, broken: int | None
) -> None:
    equal(hugging_face(max_grad_norm, broken), by_hand(max_grad_norm, broken))


def test_hugging_face_resumes(hugging_face: Callable[..., Trained]) -> None:
    whole = hugging_face(0.3)
    resumed = hugging_face(0.3, resume=3)
    assert resumed == whole


def test_hugging_face_trains_on_from_the_best_model(tmp_path: Path) -> None:
    """The Trainer loads weights alone. Masters of the last step would undo that."""
    transformers = pytest.importorskip("transformers", reason=WITHOUT)
    pytest.importorskip("accelerate", reason=WITHOUT)
    from torchopt_ext.integrations.huggingface import FusedStep

    class Trainer(FusedStep, transformers.Trainer):
        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            return {"eval_loss": self.state.global_step}

    model = new_model().bfloat16()
    rows = [{"x": torch.ones(4).bfloat16(), "labels": torch.zeros(2).bfloat16()}]
    optimizer = FusedAdamW(model.parameters(), lr=0.1, master_weights="fp32")
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, eval_strategy="steps", eval_steps=1, save_steps=1, use_cpu=True,
        load_best_model_at_end=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    data = {"train_dataset": rows, "eval_dataset": rows}
    trainer = Trainer(model, arguments, optimizers=(optimizer, None), **data)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    for param in model.parameters():
        assert torch.equal(optimizer.state[param]["master_weight"], param)


@pytest.mark.usefixtures("one_rank")
def test_hugging_face_clips_gradients_of_several_meshes_in_the_step(
    hugging_face: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For several meshes, as FSDP with tensor parallelism has, Trainer has its own function."""
    import transformers

    def on_two_meshes() -> nn.Module:
        model = new_model()
        for layer, mesh in ((0, (1,)), (3, (1, 1))):
            devices = init_device_mesh("cpu", mesh)
            distribute_module(model.layers[layer], devices, None, to_dtensors, to_plain)
        return model

    def to_dtensors(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim) for x in inputs)

    def to_plain(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.to_local()

    def fail(*_: object) -> None:
        raise AssertionError("the Trainer clips by itself")

    monkeypatch.setattr(transformers.Trainer, "_mixed_mesh_grad_norm", fail)
    found = hugging_face(0.3, new_model=on_two_meshes, save="no")  # save cannot handle DTensors
    assert found.norms == by_hand(0.3).norms


# ---- Lightning ----------------------------------------------------------------------------------
@pytest.fixture
def lightning(tmp_path: Path) -> Callable[..., Trained]:
    pl = pytest.importorskip("lightning", reason=WITHOUT)
    from torchopt_ext.integrations.lightning import FusedStep

    with pytest.raises(TypeError, match="has LightningModule before FusedStep"):
        type("Wrong", (pl.LightningModule, FusedStep), {})

    class Module(FusedStep, pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = new_model()
            self.norms: list[float] = []
            self.lrs: list[float] = []

        def training_step(self, batch: Batch, _: int) -> Tensor:
            return self.model(*batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = new_optimizer(self.model)
            schedule = {"scheduler": new_schedule(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            self.lrs.append(scheduler.get_last_lr()[0])
            super().lr_scheduler_step(scheduler, metric)

        def on_train_batch_end(self, *_: Any) -> None:
            self.norms.append(self.trainer.optimizers[0].control.grad_norm.item())

    def train(
        max_grad_norm: float, broken: int | None = None, save: int | None = None,
        resume: bool = False, epoch: int = STEPS, **settings: Any,
    ) -> Trained:  # fmt: skip
        module = Module()
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=save or STEPS, logger=False, enable_progress_bar=False,
            enable_checkpointing=False, enable_model_summary=False,
            gradient_clip_val=0 if max_grad_norm == torch.inf else max_grad_norm, **settings,
        )  # fmt: skip
        path = str(tmp_path / "saved.ckpt")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader = torch.utils.data.DataLoader(batches(broken)[:epoch], batch_size=None)
            trainer.fit(module, loader, ckpt_path=path if resume else None)
        if save:
            trainer.save_checkpoint(path)
        return Trained(module.model, trainer.optimizers[0], module.norms, module.lrs)

    return train


@each_case
def test_lightning(
    lightning: Callable[..., Trained], max_grad_norm: float, broken: int | None
) -> None:
    equal(lightning(max_grad_norm, broken), by_hand(max_grad_norm, broken))


def test_lightning_bf16(lightning: Callable[..., Trained]) -> None:
    equal(lightning(0.3, precision="bf16-mixed"), by_hand(0.3, dtype=torch.bfloat16))


@pytest.mark.parametrize("scaler", [GradScaler, torch.amp.GradScaler])
def test_lightning_fp16(lightning: Callable[..., Trained], scaler: type) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", scaler("cpu", init_scale=8.0))
    found = lightning(0.3, SKIPPED, plugins=[plugin])
    equal(found, by_hand(0.3, SKIPPED, GradScaler("cpu", init_scale=8.0), torch.float16))


def test_lightning_resumes(lightning: Callable[..., Trained]) -> None:
    # One batch per epoch: within an epoch, Lightning repeats batches of a loader without state.
    whole = lightning(0.3, epoch=1)
    half = lightning(0.3, save=3, epoch=1)
    resumed = lightning(0.3, resume=True, epoch=1)
    resumed.norms, resumed.lrs = half.norms + resumed.norms, half.lrs + resumed.lrs
    assert resumed == whole


def test_lightning_refuses_to_clip_by_value(lightning: Callable[..., Trained]) -> None:
    with pytest.raises(ValueError, match="clips by the norm"):
        lightning(0.3, gradient_clip_algorithm="value")


def test_fabrics_wrapper_is_rejected_where_it_would_lose_the_scale() -> None:
    """The wrapper passes isinstance checks, but what is set on it does not reach the optimizer."""
    module = pytest.importorskip("lightning.fabric", reason=WITHOUT)
    model = new_model()
    optimizer = FusedAdamW(model.parameters())
    _, wrapper = module.Fabric(accelerator="cpu", devices=1).setup(model, optimizer)
    scaler = GradScaler("cpu")
    scaler.scale(model(*batches()[0])["loss"]).backward()
    with pytest.raises(TypeError, match="a FabricFusedAdamW hands attributes of another"):
        scaler.step(wrapper)
    with pytest.raises(TypeError, match="the FabricFusedAdamW is a framework's wrapper"):
        FSDPadaptOptimizer(wrapper)


class Proxy:
    """A wrapper as programs write it, which hands on what it lacks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class AttributeProxy(Proxy):
    def __getattribute__(self, name: str) -> Any:
        own = name == "__class__" or name in object.__getattribute__(self, "__dict__")
        read = object.__getattribute__
        return read(self, name) if own else getattr(read(self, "optimizer"), name)


class HelperProxy(Proxy):
    """Hands on by a function of another name."""

    def __getattr__(self, name: str) -> Any:
        return self._of_inner(name)

    def _of_inner(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class LambdaProxy(Proxy):
    __getattr__ = lambda self, name: getattr(self.optimizer, name)  # noqa: E731


class PropertyProxy:
    """Hands on what it names."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, *args: Any) -> Any:
        return self.optimizer.step(*args)


def proxy_of_a_proxy(optimizer: Any) -> Any:
    return Proxy(Proxy(optimizer))


def fabrics(optimizer: torch.optim.Optimizer) -> Any:
    module = pytest.importorskip("lightning.fabric", reason=WITHOUT)
    return module.Fabric(accelerator="cpu", devices=1).setup_optimizers(optimizer)


def lightnings(optimizer: torch.optim.Optimizer) -> Any:
    module = pytest.importorskip("lightning.pytorch.core.optimizer", reason=WITHOUT)
    wrapper = module.LightningOptimizer(optimizer)
    wrapper.__dict__["step"] = optimizer.step  # without a strategy, which a Trainer sets
    return wrapper


OURS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "FusedAdamW": lambda model: FusedAdamW(model.parameters(), lr=0.1, max_grad_norm=0.3),
    "container": lambda model: OptimizersContainer(
        [*model.layers],
        FusedAdamW,
        {"lr": 0.1, "max_grad_norm": 0.3},
    ),
    "FSDPadaptOptimizer": lambda model: FSDPadaptOptimizer(
        FusedAdamW(model.parameters(), lr=0.1), clip_grad_norm=0.3
    ),
}


WRAPPERS: list[Any] = [Proxy, AttributeProxy, HelperProxy, LambdaProxy, PropertyProxy]


@pytest.mark.parametrize("wrap", [*WRAPPERS, proxy_of_a_proxy, fabrics, lightnings])
@pytest.mark.parametrize("kind", OURS)
def test_torchs_scaler_around_a_wrapper_trains_as_torch_does(
    wrap: Callable[[Any], Any], kind: str
) -> None:
    """The overflow is skipped, and the clipped gradients are unscaled."""
    model, reference = new_model(), new_model()
    optimizer, theirs = OURS[kind](model), torch.optim.AdamW(reference.parameters(), lr=0.1)
    wrapper = wrap(optimizer)
    scaler, expected = (torch.amp.GradScaler("cpu", init_scale=2.0**16) for _ in range(2))
    for batch in batches(SKIPPED):
        for own, its in ((model, scaler), (reference, expected)):
            own.zero_grad()
            its.scale(own(*batch)["loss"]).backward()
        scaler.step(wrapper)
        expected.unscale_(theirs)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
        expected.step(theirs)
        scaler.update()
        expected.update()
        assert scaler.get_scale() == expected.get_scale()
        torch.testing.assert_close([*model.parameters()], [*reference.parameters()])


@pytest.mark.parametrize("wrap", [fabrics, lightnings])
def test_what_is_set_on_an_imitating_wrapper_reaches_the_optimizer(
    wrap: Callable[[Any], Any],
) -> None:
    model, same = new_model(), new_model()
    wrapper = wrap(FusedAdamW(model.parameters(), lr=0.1, track=["norms"]))
    direct = FusedAdamW(same.parameters(), lr=0.1, track=["norms"])
    for own in (wrapper, direct):
        own.set_schedule(warmup_steps=2, stable_steps=1, decay_steps=2)
        own.set_loss_scale(4.0)
        own.max_grad_norm = 0.3
    for batch in batches(SKIPPED):
        for own, net in ((wrapper, model), (direct, same)):
            net.zero_grad()
            (net(*batch)["loss"] * own.control.loss_scale).backward()
            own.step()
    torch.testing.assert_close([*model.parameters()], [*same.parameters()], rtol=0, atol=0)
    assert wrapper.control.skipped_steps == 1
    assert wrapper.telemetry.grad_norms.equal(direct.telemetry.grad_norms)
    assert wrapper.optimizer.state_dict()["state"][0]["torchopt_ext.control"]["steps"] == STEPS


# ---- peft and torchao ---------------------------------------------------------------------------
@pytest.mark.parametrize("quantized", [False, True])
def test_lora_steps_adapters_only_and_resumes(quantized: bool) -> None:
    peft = pytest.importorskip("peft", reason=WITHOUT)

    def new() -> tuple[nn.Module, FusedAdamW]:
        model = new_model().requires_grad_(False)
        if quantized:
            torchao = pytest.importorskip("torchao.quantization", reason=WITHOUT)
            torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
        torch.manual_seed(2)
        lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0", "3"]))
        return lora, new_optimizer(lora, 0.3)

    def train(model: nn.Module, optimizer: FusedAdamW, data: list[Batch]) -> dict[str, Tensor]:
        for batch in data:
            optimizer.zero_grad()
            model(*batch)["loss"].backward()
            optimizer.step()
        return {k: v.detach().clone() for k, v in peft.get_peft_model_state_dict(model).items()}

    model, optimizer = new()
    adapters = train(model, optimizer, batches()[:3])
    names = {name for group in optimizer.param_groups for name in group["param_names"]}
    assert len(names) == len(adapters) == 4 and all("lora_" in name for name in names)
    state = optimizer.state_dict()
    state = {
        **state,
        "state": {k: {n: v.clone() for n, v in s.items()} for k, s in state["state"].items()},
    }
    whole = train(model, optimizer, batches()[3:])
    model, optimizer = new()
    peft.set_peft_model_state_dict(model, adapters)
    optimizer.load_state_dict(state)
    resumed = train(model, optimizer, batches()[3:])
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert not any(torch.equal(adapters[name], whole[name]) for name in whole)
