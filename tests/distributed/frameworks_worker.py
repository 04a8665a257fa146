"""Trains with Accelerate, transformers and Lightning on two ranks, and with plain DDP."""

import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_cases
from torchopt_ext import FusedAdamW, FusedMuon, ZeroRedundancyOptimizer, muon_groups
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer

STEPS, CLIP = 4, 0.3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x, labels):
        return {"loss": (self.layers(x) - labels).square().mean()}


def batches():
    """Returns this rank's batches, one row per step."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    sizes = {"x": 4, "labels": 2}
    return [
        {name: torch.randn(1, size, generator=generator) for name, size in sizes.items()}
        for _ in range(STEPS)
    ]


def new_model():
    torch.manual_seed(0)
    return Model()


def result(model, norms, control):
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return {
        "weights": [weight.tolist() for weight in whole],
        "norms": norms,
        "orthogonalized": float(control.orthogonalized),
    }


def adamw(model, **options):
    return FusedAdamW(model.parameters(), lr=0.1, **options)


def muon(model, **options):
    """The ranks have equal parameters and divide the matrices."""
    more = {"lr": 0.1, "adjust_lr_fn": "match_rms_adamw", "orthogonalize_over": dist.group.WORLD}
    return FusedMuon(muon_groups(model, quiet=True), **more, **options)


def muon_over_shards(model, **options):
    options = {"lr": 0.1, "adjust_lr_fn": "match_rms_adamw"} | options
    return FusedMuon(muon_groups(model, quiet=True), **options)


def by_hand(build):
    model = new_model()
    ddp = DistributedDataParallel(model)
    optimizer = build(model, max_grad_norm=CLIP)
    norms = []
    for batch in batches():
        optimizer.zero_grad()
        ddp(**batch)["loss"].backward()
        optimizer.step()
        norms.append(optimizer.control.grad_norm.item())
    return result(model, norms, optimizer.control)


def accelerated(build):
    from torchopt_ext.integrations.accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), new_model()
    optimizer = build(model)
    ddp, prepared = accelerator.prepare(model, optimizer)
    assert isinstance(ddp, DistributedDataParallel)
    norms = []
    for batch in batches():
        prepared.zero_grad()
        accelerator.backward(ddp(**batch)["loss"])
        norm = accelerator.clip_grad_norm_(ddp.parameters(), CLIP)
        prepared.step()
        norms.append(norm.item())
    accelerator.free_memory()
    return result(model, norms, optimizer.control)


def hugging_face(build):
    import transformers

    from torchopt_ext.integrations.huggingface import FusedStep

    class Trainer(FusedStep, transformers.Trainer):
        def get_train_dataloader(self):
            return batches()

    model = new_model()
    arguments = transformers.TrainingArguments(
        str(Path(sys.argv[1]) / "out"), max_steps=STEPS, use_cpu=True, ddp_backend="gloo",
        max_grad_norm=CLIP, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=[0], optimizers=(build(model), None))
    trainer.train()
    logs = trainer.state.log_history
    norms = [log["grad_norm"] for log in logs if "grad_norm" in log]
    return result(model, norms, trainer.optimizer.control)


def lightning(build):
    return fitted(lightning_module(build)(), "ddp")


def lightning_module(build):
    import lightning as pl

    from torchopt_ext.integrations.lightning import FusedStep

    class Module(FusedStep, pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.norms = new_model(), []

        def training_step(self, batch, _):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return build(self.model)

        def on_train_batch_end(self, *_):
            self.norms.append(self.trainer.optimizers[0].control.grad_norm.item())

    return Module


def fitted(module, strategy):
    import lightning as pl

    # torchrun sets these variables. With them Lightning starts no processes.
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=STEPS, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
        gradient_clip_val=CLIP, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    return result(module.model, module.norms, trainer.optimizers[0].control)


def lightning_fsdp2(build):
    """Its ModelParallelStrategy: the module cuts its parameters when the mesh exists."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Module(lightning_module(build)):
        def configure_model(self):
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return fitted(Module(), strategy)


def fsdp2(new):
    """Accelerate's FSDP2 replaces the parameters in the optimizer's groups by shards."""
    import accelerate

    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="NO_WRAP", cpu_ram_efficient_loading=False
    )
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    # It takes FSDP only with an accelerator.
    fsdp = accelerate.DistributedType.FSDP
    accelerator.state.__dict__.update(distributed_type=fsdp, fsdp_plugin=plugin)
    model = new_model()
    optimizer = new(model, {"lr": 0.1, "max_grad_norm": CLIP})
    model, prepared = accelerator.prepare(model, optimizer)
    norms = []
    for batch in batches():
        accelerator.backward(model(**batch)["loss"])
        prepared.step()
        prepared.zero_grad()
        norms.append(prepared.optimizer.control.grad_norm.item())
    accelerator.free_memory()
    accelerate.state.AcceleratorState._reset_state()
    shards = sum(p.to_local().numel() for p in model.parameters())
    moments = [s.get("exp_avg", s.get("momentum_buffer")) for s in optimizer.state.values()]
    held = sum(moment.to_local().numel() for moment in moments)
    assert held == shards < sum(p.numel() for p in model.parameters())
    return result(model, norms, prepared.optimizer.control)


if __name__ == "__main__":
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    fsdp2_kinds = {
        "fsdp2": lambda model, options: FusedAdamW(model.parameters(), **options),
        "fsdp2_container": lambda m, options: OptimizersContainer([m], FusedAdamW, options),
        "fsdp2_in_backward": lambda m, options: OptimizersInBackwardContainer(
            [m], FusedAdamW, options
        ),
        "muon_fsdp2": lambda model, options: muon_over_shards(model, **options),
    }
    zero = lambda model: ZeroRedundancyOptimizer(model.parameters(), FusedAdamW, lr=0.1)  # noqa: E731
    run_cases(
        lambda: {
            "by_hand": partial(by_hand, adamw),
            "accelerate": partial(accelerated, adamw),
            "accelerate_zero": partial(accelerated, zero),
            "hugging_face": partial(hugging_face, adamw),
            "lightning": partial(lightning, adamw),
            "muon_by_hand": partial(by_hand, muon),
            "muon_accelerate": partial(accelerated, muon),
            "muon_hugging_face": partial(hugging_face, muon),
            "muon_lightning": partial(lightning, muon),
            "muon_lightning_fsdp2": partial(lightning_fsdp2, muon_over_shards),
            **{name: partial(fsdp2, new) for name, new in fsdp2_kinds.items()},
        }
    )
