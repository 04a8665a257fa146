"""The byte-level llama of model.py as a TrainSpec, and the text of data.py as data sets.

    python -m torchopt_ext train --config examples/debug.toml

A job selects it: experimental.custom_import = "examples.byte_llama", model.name = "byte_llama". To
train another model, write the same parts: sizes, a plan for tensor parallelism, data.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from torchopt_ext.trainer.config import JobConfig
from torchopt_ext.trainer.data import register_dataset
from torchopt_ext.trainer.parallelize import parallelize
from torchopt_ext.trainer.pipeline import pipeline
from torchopt_ext.trainer.train_spec import TrainSpec, register_train_spec
from torchopt_ext.trainer.windows import TokenWindows

from .data import load_text
from .model import Transformer


@dataclass
class ByteLlamaArgs:
    """Sizes of the model."""

    dim: int = 64
    n_layers: int = 4
    n_heads: int = 4
    max_seq_len: int = 128
    seed: int | None = None

    def update_from_config(self, job_config: JobConfig, tokenizer: Any) -> None:
        self.max_seq_len = job_config.training.seq_len
        self.seed = job_config.training.seed

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Counts parameters, and FLOPs to train on one token (arXiv:2204.02311, appendix B)."""
        count = sum(p.numel() for p in model.parameters())
        table = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
        return count, 6 * (count - table) + 12 * self.n_layers * self.dim * seq_len


class ByteLlama(Transformer):
    """Transformer as a TrainSpec's model."""

    @classmethod
    def from_model_args(cls, args: ByteLlamaArgs) -> "ByteLlama":
        return cls(args.dim, args.n_layers, args.n_heads, args.max_seq_len, args.seed)


def tp_plan(model: nn.Module, loss_parallel: bool) -> Mapping[str, ParallelStyle]:
    """Returns torch's tutorial's tensor-parallel plan: ranks shard heads and hidden units.

    Between the sharded layers they shard the sequence (arXiv:2205.05198).
    """
    assert isinstance(model, Transformer)
    block = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
    plan: dict[str, ParallelStyle] = {
        f"layers.{name}.{module}": style for name in model.layers for module, style in block.items()
    }
    if model.embedding is not None:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if model.output is not None:
        plan["norm"] = SequenceParallel()
        plan["output"] = ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        )
    return plan


@cache
def _text() -> tuple[Tensor, Tensor]:
    return load_text()


def build_text(held_out: bool, *, job_config: JobConfig, **_: Any) -> TokenWindows:
    """Builds windows of the Python standard library's source. Some of its files are held out."""
    return TokenWindows(_text()[held_out], job_config.training.seq_len)


register_dataset("python_stdlib", partial(build_text, False))
register_dataset("python_stdlib_held_out", partial(build_text, True))
register_train_spec(
    TrainSpec(
        name="byte_llama",
        cls=ByteLlama,
        config={
            "debug": ByteLlamaArgs(),
            "demo": ByteLlamaArgs(dim=192, n_layers=5, n_heads=4),
            # 1,011 tensors: 9 per layer, and 3
            "small_tensors": ByteLlamaArgs(dim=32, n_layers=112, n_heads=4),
        },
        parallelize_fn=partial(parallelize, tp_plan=tp_plan),
        pipelining_fn=pipeline,
    )
)
