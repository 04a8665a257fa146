"""Accelerate, transformers and Lightning train like a manual loop, to the bit.

This includes clipping in the step, skipped steps, for which schedules wait, and resumed runs.
"""

import copy
import math
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.optim.lr_scheduler import LambdaLR

from torchopt_ext import (
    FSDPadaptOptimizer,
    FusedAdamW,
    FusedMuon,
    GradScaler,
    ZeroRedundancyOptimizer,
    log_to,
    muon_groups,
    param_groups,
)
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer

from ...support.compare import assert_same

STEPS, SKIPPED = 6, 2
WITHOUT = "the frameworks are installed with torch 2.15"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x, labels):
        return {"loss": (self.layers(x) - labels).square().mean()}


def batches(broken=None):
    generator = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(3, 4, generator=generator), torch.randn(3, 2, generator=generator))
        for _ in range(STEPS)
    ]
    if broken is not None:
        made[broken][0][0, 0] = torch.inf
    return made


def new_model():
    torch.manual_seed(0)
    return Model()


def new_optimizer(model, max_grad_norm=None, skips=True, muon=False):
    options = {"lr": 0.1, "skip_nonfinite": skips, "max_grad_norm": max_grad_norm}
    return muon_of(model, **options) if muon else FusedAdamW(param_groups(model), **options)


def muon_of(model, **options):
    """Returns Muon for a hidden matrix, with AdamW for the rest in the same object."""
    return FusedMuon(muon_groups(model, quiet=True), adjust_lr_fn="match_rms_adamw", **options)


def new_schedule(optimizer):
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def trained(model, optimizer, norms, lrs, before=None):
    """Returns weights, moments and logged values, after those of the first half of a run."""
    norms = [norm if math.isfinite(norm) else math.inf for norm in norms]
    return {
        "weights": {k: v.detach().clone() for k, v in model.state_dict().items()},
        "moments": [
            value.clone()
            for state in optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        ],
        "skipped": optimizer.control.skipped_steps.item(),
        "orthogonalized": optimizer.control.orthogonalized.item(),
        "norms": (before["norms"] if before else []) + norms,
        "lrs": (before["lrs"] if before else []) + lrs,
    }


def by_hand(max_grad_norm, broken=None, scaler=None, dtype=None, muon=False):
    model = new_model()
    optimizer = new_optimizer(model, max_grad_norm, skips=scaler is None, muon=muon)
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
    assert optimizer.control.orthogonalized == muon
    return trained(model, optimizer, norms, lrs)


CASES = [
    pytest.param(0.3, None, False, id="clipped"),
    pytest.param(torch.inf, None, False, id="measured"),
    pytest.param(0.3, SKIPPED, False, id="skipped"),
    pytest.param(0.3, SKIPPED, True, id="Muon, skipped"),
]
each_case = pytest.mark.parametrize(("max_grad_norm", "broken", "muon"), CASES)
each_optimizer = pytest.mark.parametrize("muon", [False, True], ids=["AdamW", "Muon"])


# ---- Accelerate ---------------------------------------------------------------------------------
@pytest.fixture
def accelerator():
    module = pytest.importorskip("torchopt_ext.integrations.accelerate", reason=WITHOUT)
    made = module.Accelerator(cpu=True)
    yield made
    made.free_memory()


@pytest.fixture
def stock():
    made = pytest.importorskip("accelerate", reason=WITHOUT).Accelerator(cpu=True)
    yield made
    made.free_memory()


def accelerated(
    accelerator, max_grad_norm, broken=None, muon=False, save_at=None, before=None, folder=""
):
    model = new_model()
    optimizer = new_optimizer(model, skips=accelerator.scaler is None, muon=muon)
    schedule = new_schedule(optimizer)
    model, prepared, schedule = accelerator.prepare(model, optimizer, schedule)
    if before:
        accelerator.load_state(folder)
    norms, lrs, first = [], [], save_at if before else 0
    for i, (x, labels) in enumerate(batches(broken)[first:], first):
        prepared.zero_grad()
        accelerator.backward(model(x, labels)["loss"])
        norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
        grads = [p.grad.clone() for p in model.parameters()]
        prepared.step()
        assert_same([p.grad for p in model.parameters()], grads)
        assert prepared.max_grad_norm == max_grad_norm
        assert norm.equal(prepared.control.grad_norm) or not norm.isfinite()
        assert prepared.step_was_skipped is accelerator.optimizer_step_was_skipped is (i == broken)
        norms.append(norm)
        lrs.append(optimizer.param_groups[0]["lr"])
        schedule.step()
        if i + 1 == save_at and not before:
            accelerator.save_state(folder)
    return trained(model, optimizer, [norm.item() for norm in norms], lrs, before)


@each_case
def test_accelerate(accelerator, max_grad_norm, broken, muon):
    found = accelerated(accelerator, max_grad_norm, broken, muon)
    assert_same(found, by_hand(max_grad_norm, broken, muon=muon))


def test_accelerate_with_a_scaler(accelerator):
    """Only the scaler skips steps here, which also hold the schedule back."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    found = accelerated(accelerator, 0.3, SKIPPED)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=2)
    assert_same(found, by_hand(0.3, SKIPPED, scaler))
    assert type(accelerator.scaler) is GradScaler
    assert accelerator.scaler.get_scale() == scaler.get_scale() != 4.0


@pytest.mark.parametrize("scaled", [False, True])
def test_stock_accelerate_steps_and_knows_what_its_scaler_skips(stock, scaled):
    """Its wrapper replaces ``step`` and looks whether the scaler calls it."""
    if scaled:
        stock.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, prepared = stock.prepare(model := new_model(), new_optimizer(model))
    prepared.optimizer.max_grad_norm = 0.3
    for step, batch in enumerate(batches(SKIPPED)):
        prepared.zero_grad()
        stock.backward(model(*batch)["loss"])
        prepared.step()
        control = prepared.optimizer.control
        assert prepared.step_was_skipped == (scaled and step == SKIPPED)
        assert scaled or control.skip == (step == SKIPPED)
        assert step == SKIPPED or (control.clip_factor < 1) == (control.grad_norm > 0.3)


def test_what_is_set_on_stock_accelerates_wrapper_stays_there(stock):
    """As the page says: the optimizer in it has the attributes."""
    model, prepared = stock.prepare(model := new_model(), FusedAdamW(model.parameters()))
    prepared.max_grad_norm = 1e-3
    assert prepared.optimizer.max_grad_norm is None
    for number, threshold in enumerate((None, 1e-3)):
        prepared.optimizer.max_grad_norm = threshold
        stock.backward(model(*batches()[number])["loss"])
        prepared.step()
        prepared.zero_grad()
        assert (prepared.optimizer.control.clip_factor < 1) == (threshold is not None)


def test_accelerate_scales_for_optimizers_prepared_earlier(accelerator):
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    models = [torch.nn.Linear(2, 2) for _ in range(2)]
    theirs = torch.optim.SGD(models[0].parameters(), lr=0.5)
    both = accelerator.prepare(theirs, FusedAdamW(models[1].parameters()))
    accelerator.backward(sum(model(torch.ones(1, 2)).sum() for model in models))
    before = models[0].weight.detach().clone()
    for optimizer in both:
        optimizer.step()
    assert torch.equal(models[0].weight, before - 0.5)


@each_optimizer
def test_accelerate_resumes(accelerator, tmp_path, muon):
    settings = {"muon": muon, "save_at": 3, "folder": str(tmp_path)}
    whole = accelerated(accelerator, 0.3, **settings)
    accelerator.free_memory()
    half = {name: whole[name][:3] for name in ("norms", "lrs")}
    assert_same(accelerated(accelerator, 0.3, before=half, **settings), whole)


@pytest.mark.parametrize("own", [None, 7.0])
def test_accelerate_clips_in_the_steps_that_are_asked_to(accelerator, own):
    """Steps clip only on request; otherwise the optimizer's own threshold applies, if any."""
    model, prepared = accelerator.prepare(model := new_model(), FusedAdamW(model.parameters()))
    prepared.max_grad_norm = own
    logged = []
    log_to(logged.append, prepared, every=1, prefix="")

    def threshold_of_step(*asked):
        accelerator.backward(model(*batches()[0])["loss"])
        norms = [accelerator.clip_grad_norm_(model.parameters(), norm) for norm in asked]
        prepared.step()
        for norm in norms:
            assert norm.isnan() == (prepared.max_grad_norm is None)
        assert ("grad_norm" in logged[-1]) == (prepared.max_grad_norm is not None)
        return prepared.max_grad_norm

    for asked in (True, False, False, True, True, False):
        assert threshold_of_step(*[0.3] * asked) == (0.3 if asked else own)
        assert not asked or (logged[-1]["grad_norm"] > 0.3 and logged[-1]["clip_factor"] < 1)
    threshold_of_step(0.3)
    prepared.optimizer.max_grad_norm = 5.0  # set on the optimizer itself
    assert threshold_of_step() == 5.0
    assert threshold_of_step(0) is None  # without clipping
    assert threshold_of_step() == 5.0
    with pytest.raises(ValueError, match="norm_type=1 and 1 optimizers"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)


@pytest.mark.parametrize("complete", [True, False])
def test_accelerate_forgets_a_request_for_gradients_that_are_dropped(accelerator, complete):
    """While gradients accumulate, zero_grad drops nothing, and the request stays."""
    model, prepared = accelerator.prepare(model := new_model(), new_optimizer(model))
    accelerator.backward(model(*batches()[0])["loss"])
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.3)
    prepared.gradient_state._set_sync_gradients(complete)
    prepared.zero_grad()
    prepared.gradient_state._set_sync_gradients(True)
    accelerator.backward(model(*batches()[0])["loss"])
    prepared.step()
    assert prepared.max_grad_norm == (None if complete else 0.3)
    assert norm.isnan() == complete


def test_accelerate_leaves_other_optimizers_alone(accelerator):
    model = new_model()
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    assert type(optimizer).__name__ == "AcceleratedOptimizer"
    model(*batches()[0])["loss"].backward()
    accelerator.clip_grad_norm_(model.parameters(), 0.01)
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert total.item() == pytest.approx(0.01, rel=1e-3)
    adapted = FSDPadaptOptimizer(new_optimizer(new_model()))
    with pytest.raises(TypeError, match="FSDPadaptOptimizer scales losses and clips by itself"):
        accelerator.prepare(adapted)


@pytest.mark.parametrize(("own", "backwards"), [(None, 1), (0.3, 1), (0.3, None)])
def test_accelerate_clips_in_backward_only_by_the_containers_own_threshold(
    accelerator, own, backwards
):
    model, options = new_model(), {"lr": 0.1, "max_grad_norm": own}
    container = OptimizersInBackwardContainer(
        [model], FusedAdamW, options, backwards_per_step=backwards
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


# ---- Accelerate's FSDP2, which replaces the parameters in the groups -----------------------------
@pytest.fixture
def fsdp2(one_rank):
    accelerate = pytest.importorskip("accelerate", reason=WITHOUT)
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


def whole(model):
    return [p.full_tensor().clone() for p in model.parameters()]


CLIPPED = {"lr": 0.1, "max_grad_norm": 0.3}
REPLACED = {
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
def test_accelerates_fsdp2_trains_as_torch_does(fsdp2, kind, prepared_before):
    """No unsharded weight or moment stays alive."""
    new, threshold = REPLACED[kind]
    model, reference = new_model(), new_model()
    for either in (model, reference):
        either.layers[1].requires_grad_(False)
    params = [p for p in reference.parameters() if p.requires_grad]
    theirs = torch.optim.AdamW(params, lr=0.1)
    optimizer = new(model)
    if prepared_before:  # state of step 0
        if kind == "FusedAdamW":
            optimizer.init_state()
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
        nn.utils.clip_grad_norm_(params, threshold)
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(whole(model), [*reference.parameters()], rtol=1e-6, atol=1e-6)
    assert all(param() is None for param in replaced)
    assert len(optimizer.state) == len(params)
    if isinstance(optimizer, OptimizersContainer):
        assert any(key.endswith("3.weight.exp_avg") for key in optimizer.state_dict())


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.head(self.embedding(x)).square().mean()


def adamw(kind, model, settings):
    return (
        kind([model], FusedAdamW, settings)
        if kind
        else FusedAdamW(model.named_parameters(), **settings)
    )


@pytest.mark.parametrize("chosen", [["embedding"], ["embed"], torch.Tensor])
@pytest.mark.parametrize("kind", [None, OptimizersContainer, OptimizersInBackwardContainer])
def test_accelerates_fsdp2_keeps_the_choice_of_fp32_moments(fsdp2, kind, chosen):
    model = Tokens()
    settings = {"lr": 0.1, "state_dtype": "int8", "fp32_moments": chosen}
    if chosen is torch.Tensor:
        settings["fp32_moments"] = [model.embedding.weight]
    optimizer = adamw(kind, model, settings)
    del settings
    replaced = [weakref.ref(p) for p in model.parameters()]
    model, prepared = fsdp2.prepare(model, optimizer)
    assert all(param() is None for param in replaced)
    fsdp2.backward(model(torch.arange(9)))
    prepared.step()
    coded = {p: "exp_avg_codes" in state for p, state in optimizer.state.items()}
    assert (coded[model.embedding.weight], coded[model.head.weight]) == (False, True)


@pytest.mark.parametrize("kind", [None, OptimizersContainer, OptimizersInBackwardContainer])
@pytest.mark.parametrize("master_weights", ["fp32", "remainder"])
def test_accelerates_fsdp2_does_not_lose_masters_that_were_set(fsdp2, kind, master_weights):
    model, exact = new_model().bfloat16(), new_model()
    plain = copy.deepcopy(model)
    optimizer = adamw(kind, model, {"lr": 0.1, "master_weights": master_weights})
    weights = {name: p.detach().clone() for name, p in exact.named_parameters()}
    optimizer.refresh_masters(from_=weights)
    model, prepared = fsdp2.prepare(model, optimizer)
    x, labels = (t.bfloat16() for t in batches()[0])
    before = whole(model)

    def train():  # a container in backward raises in backward
        fsdp2.backward(model(x, labels)["loss"])
        prepared.step()

    with pytest.raises(RuntimeError, match=r"refresh_masters.* call it again"):
        train()
    assert_same(whole(model), before)
    prepared.zero_grad()
    optimizer.refresh_masters(from_=weights)
    theirs = torch.optim.AdamW(exact.parameters(), lr=0.1)
    plain(x, labels)["loss"].backward()
    for param, rounded in zip(exact.parameters(), plain.parameters(), strict=True):
        param.grad = rounded.grad.float()
    train()
    theirs.step()
    assert_same(whole(model), [p.detach().bfloat16() for p in exact.parameters()])
    assert len(optimizer.state) == len(before)


@pytest.mark.parametrize("kind", ["ZeroRedundancyOptimizer", "balanced", "FSDPadaptOptimizer"])
def test_accelerates_fsdp2_ends_where_replaced_parameters_cannot_be_followed(fsdp2, kind):
    model = new_model()
    if kind == "FSDPadaptOptimizer":
        optimizer = FSDPadaptOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        optimizer.state_dict = optimizer.optim.state_dict  # Accelerate asks when it prepares
        optimizer.load_state_dict = optimizer.optim.load_state_dict
    else:
        settings = {"partition": "balanced"} if kind == "balanced" else {}
        optimizer = ZeroRedundancyOptimizer(model.parameters(), FusedAdamW, lr=0.1, **settings)
    model, prepared = fsdp2.prepare(model, optimizer)
    fsdp2.backward(model(*batches()[0])["loss"])
    before = whole(model)
    with pytest.raises(RuntimeError, match=r"replaced in the (base's )?groups"):
        prepared.step()
    assert_same(whole(model), before)


def test_torchs_function_says_how_it_takes_a_containers_state(fsdp2):
    container = OptimizersContainer([model := new_model()], FusedAdamW, {"lr": 0.1})
    model, prepared = fsdp2.prepare(model, container)
    fsdp2.backward(model(*batches()[0])["loss"])
    prepared.step()
    for wrapper in (container, prepared):  # Accelerate's save_state gives its wrapper
        with pytest.raises(TypeError, match=r"\[\*container.optimizers\]"):
            get_optimizer_state_dict(model, wrapper)
    found = get_optimizer_state_dict(model, [*container.optimizers])
    assert found["state"].keys() == dict(model.named_parameters()).keys()


# ---- transformers -------------------------------------------------------------------------------
@pytest.fixture
def hugging_face(tmp_path):
    """Returns transformers' Trainer with FusedStep, and arguments for it."""
    transformers = pytest.importorskip("transformers", reason=WITHOUT)
    pytest.importorskip("accelerate", reason=WITHOUT)
    from torchopt_ext.integrations.huggingface import FusedStep

    class Trainer(FusedStep, transformers.Trainer):
        def evaluate(self, *_, **__):
            return {"eval_loss": self.state.global_step}

    with pytest.raises(TypeError, match="has Trainer before FusedStep, which then does nothing"):
        type("Wrong", (transformers.Trainer, FusedStep), {})

    def arguments(**settings):
        return transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, **settings
        )

    return Trainer, arguments


class Rows(torch.utils.data.IterableDataset):
    def __init__(self, broken):
        self.data = batches(broken)

    def __iter__(self):
        for x, labels in self.data:
            yield from ({"x": a, "labels": b} for a, b in zip(x, labels, strict=True))


def trained_by_hugging_face(
    hugging_face, max_grad_norm, broken=None, muon=False, resume=None, model=None, save="steps"
):
    trainer_class, arguments = hugging_face
    model = model or new_model()
    optimizer = new_optimizer(model, muon=muon)
    settings = arguments(
        max_steps=STEPS, per_device_train_batch_size=3, logging_steps=1, save_steps=3,
        max_grad_norm=0 if max_grad_norm == torch.inf else max_grad_norm, save_strategy=save,
    )  # fmt: skip
    optimizers = optimizer, new_schedule(optimizer)
    trainer = trainer_class(model, settings, train_dataset=Rows(broken), optimizers=optimizers)
    trainer.train(resume_from_checkpoint=resume and f"{settings.output_dir}/checkpoint-{resume}")
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    assert trainer.optimizer.max_grad_norm == max_grad_norm
    # The Trainer logs the learning rate before the schedule's step.
    logged = ([log[name] for log in logs] for name in ("grad_norm", "learning_rate"))
    return trained(model, optimizer, *logged)


@each_case
def test_hugging_face(hugging_face, max_grad_norm, broken, muon):
    found = trained_by_hugging_face(hugging_face, max_grad_norm, broken, muon)
    assert_same(found, by_hand(max_grad_norm, broken, muon=muon))


@each_optimizer
def test_hugging_face_resumes(hugging_face, muon):
    whole = trained_by_hugging_face(hugging_face, 0.3, muon=muon)
    assert_same(trained_by_hugging_face(hugging_face, 0.3, muon=muon, resume=3), whole)


@pytest.mark.parametrize("way", ["factory", "optim_args"])
def test_hugging_face_builds_muon_of_the_model(hugging_face, way):
    """The Trainer calls what a factory returns. It reads ``optim_args`` for its own optimizers
    only, so that a Trainer that wants them there passes them on.
    """
    trainer_class, arguments = hugging_face
    settings = {"lr": 0.1, "momentum": 0.9, "ns_steps": 4}
    more = {"optimizer_cls_and_kwargs": (lambda: muon_of, settings)}
    text = None
    if way == "optim_args":
        more, text = {}, "momentum=0.9,ns_steps=4"

        class OfArguments(trainer_class):
            def create_optimizer(self, model=None):
                pairs = (pair.split("=") for pair in self.args.optim_args.split(","))
                values = {key: float(value) if "." in value else int(value) for key, value in pairs}
                self.optimizer = muon_of(self.model, lr=self.args.learning_rate, **values)
                return self.optimizer

        trainer_class = OfArguments
    model, same = new_model(), new_model()
    chosen = arguments(
        max_steps=STEPS, per_device_train_batch_size=3, max_grad_norm=0.3, learning_rate=0.1,
        lr_scheduler_type="constant", save_strategy="no", optim_args=text,
    )  # fmt: skip
    trainer = trainer_class(model, chosen, train_dataset=Rows(None), **more)
    trainer.train()
    optimizer = muon_of(same, max_grad_norm=0.3, **settings)
    for batch in batches():
        same(*batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert trainer.optimizer.control.orthogonalized == 1
    assert_same([*model.parameters()], [*same.parameters()])


@pytest.mark.parametrize("way", ["class", "optim_args"])
def test_hugging_face_holds_states_on_the_host(hugging_face, way, params_on_gpu):
    """Resumed from a checkpoint, too. ``optim_args`` are passed on as above."""
    trainer_class, arguments = hugging_face

    class OfArguments(trainer_class):
        def create_optimizer(self, model=None):
            if way == "class":
                return super().create_optimizer(*(() if model is None else (model,)))
            text = dict(pair.split("=") for pair in self.args.optim_args.split(","))
            settings = text | {"state_fraction": float(text["state_fraction"])}
            self.optimizer = FusedAdamW(self.model.parameters(), **settings)
            return self.optimizer

    def trained_model(fraction, resume=None):
        model = new_model()
        placed = {"state_device": "cpu" if fraction else "cuda", "state_fraction": fraction or 1.0}
        more = {"optimizer_cls_and_kwargs": (FusedAdamW, placed)} if way == "class" else {}
        settings = arguments(
            max_steps=STEPS, per_device_train_batch_size=3, max_grad_norm=0.3, save_steps=3,
            optim_args=",".join(f"{name}={value}" for name, value in placed.items()),
        )  # fmt: skip
        trainer = OfArguments(model, settings, train_dataset=Rows(None), **more)
        trainer.train(
            resume_from_checkpoint=resume and f"{settings.output_dir}/checkpoint-{resume}"
        )
        held = 8 * sum(param.numel() for param in model.parameters())
        assert fraction <= trainer.optimizer.optimizer.host_bytes / held <= fraction + 0.2
        return [*model.parameters()]

    beside = trained_model(0.0)
    assert_same(trained_model(1.0), beside)
    assert_same(trained_model(0.5, resume=3), beside)


def test_hugging_face_trains_on_from_the_best_model(hugging_face):
    """The Trainer loads weights alone. Masters of the last step would undo that."""
    trainer_class, arguments = hugging_face
    model = new_model().bfloat16()
    rows = [{"x": torch.ones(4).bfloat16(), "labels": torch.zeros(2).bfloat16()}]
    optimizer = FusedAdamW(model.parameters(), lr=0.1, master_weights="fp32")
    settings = arguments(
        max_steps=3, eval_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=True
    )
    data = {"train_dataset": rows, "eval_dataset": rows}
    trainer = trainer_class(model, settings, optimizers=(optimizer, None), **data)
    trainer.train()
    assert trainer.state.best_model_checkpoint == f"{settings.output_dir}/checkpoint-1"
    for param in model.parameters():
        assert torch.equal(optimizer.state[param]["master_weight"], param)


@pytest.mark.usefixtures("one_rank")
def test_hugging_face_clips_gradients_of_several_meshes_in_the_step(hugging_face, monkeypatch):
    """For several meshes, as FSDP with tensor parallelism has, Trainer has its own function."""

    def to_dtensors(_, inputs, mesh):
        return tuple(DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim) for x in inputs)

    def to_plain(_, output, mesh):
        return output.to_local()

    def fail(*_):
        raise AssertionError("the Trainer clips by itself")

    model = new_model()
    for layer, mesh in ((0, (1,)), (3, (1, 1))):
        devices = init_device_mesh("cpu", mesh)
        distribute_module(model.layers[layer], devices, None, to_dtensors, to_plain)
    monkeypatch.setattr(hugging_face[0], "_mixed_mesh_grad_norm", fail)
    found = trained_by_hugging_face(hugging_face, 0.3, model=model, save="no")  # not DTensors
    assert found["norms"] == by_hand(0.3)["norms"]


# ---- Lightning ----------------------------------------------------------------------------------
@pytest.fixture
def lightning(tmp_path):
    pl = pytest.importorskip("lightning", reason=WITHOUT)
    from torchopt_ext.integrations.lightning import FusedStep

    with pytest.raises(TypeError, match="has LightningModule before FusedStep"):
        type("Wrong", (pl.LightningModule, FusedStep), {})

    class Module(FusedStep, pl.LightningModule):
        def __init__(self, skips, muon):
            super().__init__()
            self.model, self.norms, self.lrs = new_model(), [], []
            self.options = {"skips": skips, "muon": muon}

        def training_step(self, batch, _):
            return self.model(*batch)["loss"]

        def configure_optimizers(self):
            optimizer = new_optimizer(self.model, **self.options)
            schedule = {"scheduler": new_schedule(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

        def lr_scheduler_step(self, scheduler, metric):
            self.lrs.append(scheduler.get_last_lr()[0])
            super().lr_scheduler_step(scheduler, metric)

        def on_train_batch_end(self, *_):
            self.norms.append(self.trainer.optimizers[0].control.grad_norm.item())

    def train(
        max_grad_norm, broken=None, muon=False, save=None, before=None, epoch=STEPS, **settings
    ):
        module = Module("plugins" not in settings, muon)
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=save or STEPS, logger=False, enable_progress_bar=False,
            enable_checkpointing=False, enable_model_summary=False,
            gradient_clip_val=0 if max_grad_norm == torch.inf else max_grad_norm, **settings,
        )  # fmt: skip
        path = str(tmp_path / "saved.ckpt")
        with warnings.catch_warnings(action="ignore"):
            loader = torch.utils.data.DataLoader(batches(broken)[:epoch], batch_size=None)
            trainer.fit(module, loader, ckpt_path=path if before else None)
        if save:
            trainer.save_checkpoint(path)
        return trained(module.model, trainer.optimizers[0], module.norms, module.lrs, before)

    return train


@each_case
def test_lightning(lightning, max_grad_norm, broken, muon):
    found = lightning(max_grad_norm, broken, muon)
    assert_same(found, by_hand(max_grad_norm, broken, muon=muon))


def test_lightning_bf16(lightning):
    assert_same(lightning(0.3, precision="bf16-mixed"), by_hand(0.3, dtype=torch.bfloat16))


@pytest.mark.parametrize("scaler", [GradScaler, torch.amp.GradScaler])
def test_lightning_fp16(lightning, scaler):
    """Only the scaler skips steps here, which also hold the schedule back."""
    from lightning.pytorch.plugins import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", scaler("cpu", init_scale=8.0))
    found = lightning(0.3, SKIPPED, plugins=[plugin])
    expected = by_hand(0.3, SKIPPED, GradScaler("cpu", init_scale=8.0), torch.float16)
    assert_same(found, expected)


def test_lightning_resumes(lightning):
    # One batch per epoch: within an epoch, Lightning repeats batches of a loader without state.
    whole = lightning(0.3, epoch=1)
    half = lightning(0.3, save=3, epoch=1)
    assert_same(lightning(0.3, before=half, epoch=1), whole)


def test_lightning_refuses_to_clip_by_value(lightning):
    with pytest.raises(ValueError, match="clips by the norm"):
        lightning(0.3, gradient_clip_algorithm="value")


# ---- wrappers -----------------------------------------------------------------------------------
def test_fabrics_wrapper_is_rejected_where_it_would_lose_the_scale():
    """The wrapper passes isinstance checks, but what is set on it does not reach the optimizer."""
    model = new_model()
    wrapper = fabrics(FusedAdamW(model.parameters()))
    scaler = GradScaler("cpu")
    scaler.scale(model(*batches()[0])["loss"]).backward()
    with pytest.raises(TypeError, match="a FabricFusedAdamW hands attributes of another"):
        scaler.step(wrapper)
    with pytest.raises(TypeError, match="the FabricFusedAdamW is a framework's wrapper"):
        FSDPadaptOptimizer(wrapper)


class Proxy:
    """A wrapper as programs write it, which hands on what it lacks."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


class AttributeProxy(Proxy):
    def __getattribute__(self, name):
        own = name == "__class__" or name in object.__getattribute__(self, "__dict__")
        read = object.__getattribute__
        return read(self, name) if own else getattr(read(self, "optimizer"), name)


class HelperProxy(Proxy):
    """Hands on by a function of another name."""

    def __getattr__(self, name):
        return self._of_inner(name)

    def _of_inner(self, name):
        return getattr(self.optimizer, name)


class LambdaProxy(Proxy):
    __getattr__ = lambda self, name: getattr(self.optimizer, name)  # noqa: E731


class PropertyProxy:
    """Hands on what it names."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, *args):
        return self.optimizer.step(*args)


def proxy_of_a_proxy(optimizer):
    return Proxy(Proxy(optimizer))


def fabrics(optimizer):
    module = pytest.importorskip("lightning.fabric", reason=WITHOUT)
    return module.Fabric(accelerator="cpu", devices=1).setup_optimizers(optimizer)


class Copying:
    """Takes the class's place with a copy of the attributes, as Lightning 2.1's wrappers do."""

    def __init__(self, optimizer):
        self.__dict__ = {
            k: v for k, v in vars(optimizer).items() if k not in ("state_dict", "step")
        }
        self.__class__ = type("Copying", (type(self), type(optimizer)), {})
        self._optimizer = optimizer

    optimizer = property(lambda self: self._optimizer)

    def step(self, *args):
        return self.optimizer.step(*args)


def lightnings(optimizer):
    module = pytest.importorskip("lightning.pytorch.core.optimizer", reason=WITHOUT)
    wrapper = module.LightningOptimizer(optimizer)
    wrapper.__dict__["step"] = optimizer.step  # without a strategy, which a Trainer sets
    return wrapper


OURS = {
    "FusedAdamW": lambda model: FusedAdamW(model.parameters(), **CLIPPED),
    "container": lambda model: OptimizersContainer([*model.layers], FusedAdamW, CLIPPED),
    "FSDPadaptOptimizer": lambda model: FSDPadaptOptimizer(
        FusedAdamW(model.parameters(), lr=0.1), clip_grad_norm=0.3
    ),
}
WRAPPERS: list[Any] = [Proxy, AttributeProxy, HelperProxy, LambdaProxy, PropertyProxy, Copying]


@pytest.mark.parametrize("wrap", [*WRAPPERS, proxy_of_a_proxy, fabrics, lightnings])
@pytest.mark.parametrize("kind", OURS)
def test_torchs_scaler_around_a_wrapper_trains_as_torch_does(wrap, kind):
    """The overflow is skipped, and the clipped gradients are unscaled."""
    model, reference = new_model(), new_model()
    optimizer, theirs = OURS[kind](model), torch.optim.AdamW(reference.parameters(), lr=0.1)
    wrapper = wrap(optimizer)
    scaler, expected = (torch.amp.GradScaler("cpu", init_scale=2.0**16) for _ in range(2))
    for batch in batches(SKIPPED):
        for net, its in ((model, scaler), (reference, expected)):
            net.zero_grad()
            its.scale(net(*batch)["loss"]).backward()
        scaler.step(wrapper)
        expected.unscale_(theirs)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
        expected.step(theirs)
        scaler.update()
        expected.update()
        assert scaler.get_scale() == expected.get_scale()
        torch.testing.assert_close([*model.parameters()], [*reference.parameters()])


@pytest.mark.parametrize("wrap", [fabrics, lightnings, Copying])
def test_what_is_set_on_an_imitating_wrapper_reaches_the_optimizer(wrap):
    model, same = new_model(), new_model()
    wrapper = wrap(FusedAdamW(model.parameters(), lr=0.1, track=["norms"]))
    direct = FusedAdamW(same.parameters(), lr=0.1, track=["norms"])
    for either in (wrapper, direct):
        either.set_schedule(warmup_steps=2, stable_steps=1, decay_steps=2)
        either.set_loss_scale(4.0)
        either.max_grad_norm = 0.3
    for batch in batches(SKIPPED):
        for either, net in ((wrapper, model), (direct, same)):
            net.zero_grad()
            (net(*batch)["loss"] * either.control.loss_scale).backward()
            either.step()
    assert_same([*model.parameters()], [*same.parameters()])
    assert wrapper.control.skipped_steps == 1
    assert wrapper.telemetry.grad_norms.equal(direct.telemetry.grad_norms)
    assert wrapper.optimizer.state_dict()["state"][0]["torchopt_ext.control"]["steps"] == STEPS


# ---- peft and torchao ---------------------------------------------------------------------------
@pytest.mark.parametrize("quantized", [False, True])
def test_lora_steps_adapters_only_and_resumes(quantized):
    peft = pytest.importorskip("peft", reason=WITHOUT)

    def new():
        model = new_model().requires_grad_(False)
        if quantized:
            torchao = pytest.importorskip("torchao.quantization", reason=WITHOUT)
            torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
        torch.manual_seed(2)
        lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0", "3"]))
        return lora, new_optimizer(lora, 0.3)

    def train(model, optimizer, data):
        for batch in data:
            optimizer.zero_grad()
            model(*batch)["loss"].backward()
            optimizer.step()
        return {k: v.detach().clone() for k, v in peft.get_peft_model_state_dict(model).items()}

    model, optimizer = new()
    adapters = train(model, optimizer, batches()[:3])
    names = {name for group in optimizer.param_groups for name in group["param_names"]}
    assert len(names) == len(adapters) == 4 and all("lora_" in name for name in names)
    state = copy.deepcopy(optimizer.state_dict())
    whole = train(model, optimizer, batches()[3:])
    model, optimizer = new()
    peft.set_peft_model_state_dict(model, adapters)
    optimizer.load_state_dict(state)
    assert_same(train(model, optimizer, batches()[3:]), whole)
    assert not any(torch.equal(adapters[name], whole[name]) for name in whole)
