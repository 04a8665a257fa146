"""Initial weights: tied parameters stay one parameter, whatever happens to the model before."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torchopt_ext.trainer.config import ConfigError, JobConfig
from torchopt_ext.trainer.parallelize import init_parts, tie, tied_names

TIES = [["embedding.weight", "output.weight"]]
CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(4, 2), nn.LayerNorm(2)
        self.output = nn.Linear(2, 4, bias=False)
        self.output.weight = self.embedding.weight

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        for number, param in enumerate(self.parameters()):
            param.fill_(number)


def test_tied_parameters_stay_tied() -> None:
    with torch.device("meta"):
        model = Tied()
    assert tied_names(model) == TIES
    init_parts([model.eval()], TIES, JobConfig(), CPU)
    assert model.output.weight is model.embedding.weight
    assert [param.unique().tolist() for param in model.parameters()] == [[0], [1], [2]]
    assert model.training


WRAPPERS = [lambda module: module, checkpoint_wrapper, partial(torch.compile, backend="eager")]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("kept", [True, False])
def test_wrappers_hide_no_tie(wrap: Any, kept: bool) -> None:
    with torch.device("meta"):
        model = Tied()
        if not kept:
            model.output = nn.Linear(2, 4, bias=False)  # as parallelize_fn may replace it
    for name in ("embedding", "output"):
        setattr(model, name, wrap(model.get_submodule(name)))
    message = r"embedding.*weight and output.*weight .* made several"
    with nullcontext() if kept else pytest.raises(ConfigError, match=message):
        init_parts([model], TIES, JobConfig(), CPU)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_a_tensor_parallel_plan_divides_tied_parameters_alike(placement, one_rank: None) -> None:
    model, mesh = Tied(), init_device_mesh("cpu", (1,))
    for module, place in ((model.embedding, Shard(0)), (model.output, placement)):
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [place]))
    if placement == Shard(0):
        tie(model, TIES)
        assert model.output.weight is model.embedding.weight
    else:
        with pytest.raises(ConfigError, match=r"one parameter, which .* by \(Shard.* by \(Repl"):
            tie(model, TIES)
