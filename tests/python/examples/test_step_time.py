import torch
from step_time import compare_step_times
from torch import nn


def test_measuring_leaves_the_model_and_its_gradients_alone() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    model(torch.randn(3, 8)).square().sum().backward()
    before = [
        (p.detach().clone(), p.grad.clone()) for p in model.parameters() if p.grad is not None
    ]
    times = compare_step_times(model, {"lr": 0.1, "weight_decay": 0.1}, 1e-3, repeats=2)
    assert set(times) == {"ours", "torch"}
    assert all(milliseconds > 0 for milliseconds in times.values())
    assert len(before) == 2
    for param, (value, grad) in zip(model.parameters(), before, strict=True):
        assert param.grad is not None
        assert param.equal(value)
        assert param.grad.equal(grad)
