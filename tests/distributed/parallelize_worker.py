"""Compares each kind of parallelism with one process that computes the same batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path += [str(REPOSITORY), str(Path(__file__).parent)]

from rank_cases import full_tensor, gathered, run_cases  # noqa: E402

from examples.byte_llama import tp_plan  # noqa: E402
from examples.model import Transformer  # noqa: E402
from torchopt_ext.trainer.config import ConfigError, JobConfig  # noqa: E402
from torchopt_ext.trainer.distributed import (  # noqa: E402
    clip_grad_norm_,
    mean_and_max,
    set_determinism,
    set_pg_timeouts,
)
from torchopt_ext.trainer.forward_pass import maybe_enable_amp  # noqa: E402
from torchopt_ext.trainer.parallel_dims import ParallelDims  # noqa: E402
from torchopt_ext.trainer.parallelize import parallelize, set_gradient_sync  # noqa: E402
from torchopt_ext.trainer.pipeline import pipeline  # noqa: E402
from torchopt_ext.trainer.train_spec import cross_entropy_loss  # noqa: E402

SEQ_LEN, BATCH = 16, 4  # a rank's batch
FLOAT32 = 2e-6  # sums in another order; seen: 5e-7
BFLOAT16 = 3e-2  # rounded at other places; seen: 1.2e-2
SIZES = {"dim": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": SEQ_LEN, "seed": 5}


def job(**settings: Any) -> JobConfig:
    """Returns a job without mixed precision. Settings are named `section__field`."""
    config = JobConfig()
    config.training.batch_size, config.training.seq_len = BATCH, SEQ_LEN
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint.mode = "none"
    for name, value in settings.items():
        section, _, field = name.partition("__")
        getattr(getattr(config, section), field)  # raises if there is no such field
        setattr(getattr(config, section), field, value)
    return config


def batches(ranks: int) -> tuple[Tensor, Tensor]:
    """Returns the inputs and labels of all data-parallel ranks."""
    tokens = torch.randint(
        256, (ranks * BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1)
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def on_meta() -> Transformer:
    with torch.device("meta"):
        return Transformer(**SIZES)


def one_process(ranks: int, dtype: torch.dtype | None) -> tuple[float, dict[str, Tensor]]:
    model = Transformer(**SIZES)
    inputs, labels = batches(ranks)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = cross_entropy_loss(model(inputs), labels)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


def build(config: JobConfig) -> tuple[Any, ParallelDims, Any, list[nn.Module]]:
    dims = ParallelDims.of(config.parallelism, dist.get_world_size())
    mesh = dims.build_mesh("cpu")
    parallelize_fn = partial(parallelize, tp_plan=tp_plan)
    schedule = None
    if dims.pp_enabled:
        schedule, parts, *_ = pipeline(
            on_meta(),
            mesh,
            dims,
            config,
            torch.device("cpu"),
            None,
            parallelize_fn,
            cross_entropy_loss,
        )
    else:
        parts = [parallelize_fn(on_meta(), mesh, dims, config)]
    for part in parts:
        part.to_empty(device="cpu")
        part.init_weights()
    return mesh, dims, schedule, parts


def compare(*, accumulate: int = 1, dtype: torch.dtype | None = None, **settings: Any) -> None:
    """Loss, gradients, norm and clipped norm are close to those of one process.

    FSDP gathers bf16 weights. DDP and the one process use autocast.
    """
    config = job(**settings)
    mesh, dims, schedule, parts = build(config)
    dp = dims.get_mesh("dp") if dims.dp_enabled else None
    ranks, rank = (dp.size(), dp.get_local_rank()) if dp else (1, 0)
    inputs, labels = (t.chunk(ranks)[rank] for t in batches(ranks))
    expected_loss, expected = one_process(ranks, dtype)

    amp = maybe_enable_amp(dims, config.training.mixed_precision_param, "cpu")
    total = torch.zeros(())
    for index in range(accumulate):
        if accumulate > 1:
            set_gradient_sync(parts, index == accumulate - 1)
        with loss_parallel() if dims.loss_parallel_enabled else nullcontext():
            if schedule is None:
                some = slice(index * BATCH // accumulate, (index + 1) * BATCH // accumulate)
                with amp:
                    loss = cross_entropy_loss(parts[0](inputs[some]), labels[some]) / accumulate
                loss.backward()
                total += full_tensor(loss.detach())
            else:  # the whole batch each time: gradients add up
                losses: list[Tensor] = []
                first = [inputs] if parts[0].embedding is not None else []
                last = parts[-1].output is not None
                schedule.step(*first, **({"target": labels, "losses": losses} if last else {}))
                total = torch.stack(losses).mean() if losses else torch.tensor(expected_loss)
    factor = accumulate if schedule else 1
    named = {n: p for part in parts for n, p in part.named_parameters()}
    errors = {
        n: ((full_tensor(p.grad) / factor - expected[n]).norm() / expected[n].norm()).item()
        for n, p in named.items()
    }
    initial = dict(Transformer(**SIZES).named_parameters())
    same_weights = all(torch.equal(full_tensor(p), initial[n]) for n, p in named.items())
    pp_mesh = mesh["pp"] if dims.pp_enabled else None
    names = sorted(named)
    norm = clip_grad_norm_((p for p in named.values()), 1e-3, pp_mesh=pp_mesh) / factor
    clipped = torch.stack([full_tensor(p.grad).norm() for p in named.values()])
    expected_norm = torch.stack([g.norm() for g in expected.values()]).norm()
    clipped_norm = (clipped**2).sum()
    if pp_mesh is not None:
        dist.all_reduce(clipped_norm, group=pp_mesh.get_group())
        stages: list[Any] = [None] * pp_mesh.size()
        dist.all_gather_object(stages, names, group=pp_mesh.get_group())
        names = sorted(name for stage in stages for name in stage)
    mean, largest = mean_and_max(total, dp) if dp else (total.item(), total.item())
    assert names == sorted(expected)
    assert same_weights
    assert largest >= mean
    tolerance = FLOAT32 if dtype is None else BFLOAT16
    assert max(errors.values()) < tolerance
    assert dtype is None or max(errors.values()) > 1e-3
    scalars = {
        "loss": mean / expected_loss,
        "norm": norm.item() / expected_norm.item(),
        "clipped": clipped_norm.sqrt().item() * 1e3,
    }
    for scalar, ratio in scalars.items():
        assert abs(ratio - 1) < max(tolerance / 10, FLOAT32), scalar


DP = "parallelism__data_parallel_replicate_degree"
TP = "parallelism__tensor_parallel_degree"
PP = "parallelism__pipeline_parallel_degree"
SCHEDULE = "parallelism__pipeline_parallel_schedule"
AC, OPTION = "activation_checkpoint__mode", "activation_checkpoint__selective_ac_option"
BF16 = {"training__mixed_precision_param": "bfloat16", "dtype": torch.bfloat16}

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "data parallel": {
        "fsdp": {},
        "ddp": {DP: 2},
        "fsdp accumulated": {"accumulate": 2},
        "ddp accumulated": {DP: 2, "accumulate": 2},
        "fsdp bf16": BF16,
        "ddp bf16": {DP: 2, **BF16},
        "full checkpointing": {AC: "full"},
        "every second layer": {AC: "selective", OPTION: "2"},
        "costly operations": {AC: "selective", OPTION: "op"},
        "reshard always": {"parallelism__fsdp_reshard_after_forward": "always"},
        "cpu offload": {"training__enable_cpu_offload": True},
    },
    "two ranks": {
        "tp": {TP: 2},
        "tp without loss parallel": {TP: 2, "parallelism__disable_loss_parallel": True},
        "tp checkpointed": {TP: 2, AC: "selective", OPTION: "op"},
        "1f1b": {PP: 2},
        "1f1b accumulated": {PP: 2, "accumulate": 2},
        "split points": {PP: 2, "parallelism__pipeline_parallel_split_points": ["layers.1"]},
        "interleaved": {PP: 2, SCHEDULE: "Interleaved1F1B"},
        "interleaved larger microbatch": {
            PP: 2, SCHEDULE: "Interleaved1F1B", "parallelism__pipeline_parallel_microbatch_size": 2
        },
        "gpipe": {PP: 2, SCHEDULE: "GPipe"},
        "fsdp compiled": {"training__compile": True},
        "ddp compiled": {DP: 2, "training__compile": True},
        "compiled and checkpointed": {"training__compile": True, AC: "full"},
        "compiled, costly operations": {"training__compile": True, AC: "selective", OPTION: "op"},
    },
    "v-shaped": {"zero bubble": {PP: 2, SCHEDULE: "ZBVZeroBubble"}},
    "four ranks": {
        "fsdp": {},
        "hsdp": {DP: 2},
        "hsdp accumulated": {DP: 2, "accumulate": 2},
        "fsdp and tp": {TP: 2},
        "fsdp and pp": {PP: 2},
        "fsdp and interleaved": {PP: 2, SCHEDULE: "Interleaved1F1B"},
        "pp and tp": {PP: 2, TP: 2},
        "tp": {TP: 4},
        "1f1b": {PP: 4},
    },
}  # fmt: skip


def seeds(expected: list[int], **settings: Any) -> None:
    """All ranks get rank 0's seed. Pipeline stages count up from it, so dropout differs."""
    dims = ParallelDims.of(job(**settings).parallelism, dist.get_world_size())
    mesh = dims.build_mesh("cpu")
    torch.manual_seed(100 + dist.get_rank())
    set_determinism(mesh, torch.device("cpu"))
    set_pg_timeouts(timedelta(seconds=30), mesh)
    dist.all_reduce(torch.ones(()), group=mesh.get_group(mesh.mesh_dim_names[0]))
    assert gathered(torch.initial_seed()) == expected


def too_few_microbatches() -> None:
    config = job(**{PP: 2, "parallelism__pipeline_parallel_microbatch_size": BATCH})
    message = "batch_size 4 in microbatches of parallelism.pipeline_parallel_microbatch_size 4"
    with pytest.raises(ConfigError, match=message):
        build(config)


def cases() -> dict[str, Callable[[], None]]:
    chosen = sys.argv[2]
    named = {name: partial(compare, **settings) for name, settings in CASES[chosen].items()}
    if chosen == "data parallel":
        named["seeds of replicas"] = partial(seeds, [100, 100])
        named["seeds of stages"] = partial(seeds, [100, 101], **{PP: 2})
        named["one microbatch"] = too_few_microbatches
    return named


if __name__ == "__main__":
    run_cases(cases)
