"""Trains with Accelerate, transformers and Lightning on two ranks, and with plain DDP."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from rank_cases import run_cases
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchopt_ext import FusedAdamW, ZeroRedundancyOptimizer
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer

STEPS, CLIP = 4, 0.3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x) - labels).square().mean()}


def batches() -> list[dict[str, Tensor]]:
    """Returns this rank's batches, one row per step."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [
        {
            "x": torch.randn(1, 4, generator=generator),
            "labels": torch.randn(1, 2, generator=generator),
        }
        for _ in range(STEPS)
    ]


def new_model() -> Model:
    torch.manual_seed(0)
    return Model()


def weights(model: nn.Module) -> list[Any]:
    return [p.tolist() for p in model.parameters()]


def by_hand() -> Any:
    model = new_model()
    ddp = DistributedDataParallel(model)
    optimizer = FusedAdamW(model.parameters(), lr=0.1, max_grad_norm=CLIP)
    norms = []
    for batch in batches():
        optimizer.zero_grad()
        ddp(**batch)["loss"].backward()
        optimizer.step()
        norms.append(optimizer.control.grad_norm.item())
    return {"weights": weights(model), "norms": norms}


def accelerated(zero: bool) -> Any:
    from torchopt_ext.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = new_model()
    optimizer: torch.optim.Optimizer
    if zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), FusedAdamW, lr=0.1)
    else:
        optimizer = FusedAdamW(model.parameters(), lr=0.1)
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
    return {"weights": weights(model), "norms": norms}


def hugging_face() -> Any:
    import transformers

    from torchopt_ext.integrations.huggingface import FusedStep

    class Trainer(FusedStep, transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return batches()

    model = new_model()
    arguments = transformers.TrainingArguments(
        str(Path(sys.argv[1]) / "out"), max_steps=STEPS, use_cpu=True, ddp_backend="gloo",
        max_grad_norm=CLIP, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        lr_scheduler_type="constant",
    )  # fmt: skip
    optimizer = FusedAdamW(model.parameters(), lr=0.1)
    trainer = Trainer(model, arguments, train_dataset=[0], optimizers=(optimizer, None))
    trainer.train()
    logs = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    return {"weights": weights(model), "norms": logs}


def lightning() -> Any:
    import lightning as pl

    from torchopt_ext.integrations.lightning import FusedStep

    class Module(FusedStep, pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = new_model()
            self.norms: list[float] = []

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return FusedAdamW(self.parameters(), lr=0.1)

        def on_train_batch_end(self, *_: Any) -> None:
            self.norms.append(self.trainer.optimizers[0].control.grad_norm.item())

    # torchrun sets these variables. With them Lightning starts no processes.
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=STEPS, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
        gradient_clip_val=CLIP, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    return {"weights": weights(module.model), "norms": module.norms}


def fsdp2(new: Callable[[nn.Module, Any], torch.optim.Optimizer]) -> Any:
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
    own = [p for p in model.parameters() if p.to_local().numel()]
    held = [s["exp_avg"].to_local().numel() for s in optimizer.state.values()]
    assert sum(held) == sum(p.to_local().numel() for p in own) < sum(p.numel() for p in own)
    return {"weights": [p.full_tensor().tolist() for p in model.parameters()], "norms": norms}


if __name__ == "__main__":
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    run_cases(
        lambda: {
            "by_hand": by_hand,
            "accelerate": lambda: accelerated(False),
            "accelerate_zero": lambda: accelerated(True),
            "hugging_face": hugging_face,
            "lightning": lightning,
            "fsdp2": lambda: fsdp2(lambda m, given: FusedAdamW(m.parameters(), **given)),
            "fsdp2_container": lambda: fsdp2(
                lambda m, given: OptimizersContainer([m], FusedAdamW, given)
            ),
            "fsdp2_in_backward": lambda: fsdp2(
                lambda m, given: OptimizersInBackwardContainer([m], FusedAdamW, given)
            ),
        }
    )
