"""torch.distributed.checkpoint saves and our load restores every optimizer, on one process."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from torchopt_ext import FSDPadaptOptimizer, FusedAdamW, GradScaler
from torchopt_ext.containers import OptimizersContainer, OptimizersInBackwardContainer
from torchopt_ext.mixed_precision import load_checkpoint, save_checkpoint
from torchopt_ext.statedict.dcp import Reader, load

MASTERS = {
    **{name: {"master_weights": name} for name in ("fp32", "remainder", "remainder8")},
    "none": {},
}
Build = Callable[[nn.Module], torch.optim.Optimizer]


def fused(model: nn.Module, masters: str) -> FusedAdamW:
    return FusedAdamW(model.parameters(), lr=0.1, **MASTERS[masters])


def container(model: nn.Module, masters: str) -> OptimizersContainer[FusedAdamW]:
    return OptimizersContainer([model], FusedAdamW, {"lr": 0.1, **MASTERS[masters]})


KINDS: dict[str, Build] = {
    "torch": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1),
    "torch container": lambda m: OptimizersContainer([m], torch.optim.AdamW, {"lr": 0.1}),
    "in backward": lambda m: OptimizersInBackwardContainer([m], FusedAdamW, {"lr": 0.1}),
    "FSDPadapt": lambda m: FSDPadaptOptimizer(fused(m, "none")),
    "FSDPadapt, SGD": lambda m: FSDPadaptOptimizer(
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
    ),
}
for masters in MASTERS:
    KINDS[f"fused, {masters}"] = lambda m, masters=masters: fused(m, masters)
    KINDS[f"container, {masters}"] = lambda m, masters=masters: container(m, masters)


def job(kind: str, seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(9, 7), nn.LayerNorm(7)).bfloat16()
    optimizer = KINDS[kind](model)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        x = torch.randn(4, 9).bfloat16()
        loss = model(x).square().sum()
        optimizer.backward(loss) if hasattr(optimizer, "backward") else loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def content(*objects: Any) -> Any:
    """Returns the bits of state and weights."""
    states = [copy.deepcopy(o if isinstance(o, dict) else o.state_dict()) for o in objects]
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda t: (t.dtype, t.shape, t.reshape(-1).view(torch.uint8).tolist()), states
    )


def continued(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    torch.manual_seed(9)
    train(model, optimizer, 2)
    return content(model, optimizer)


def kinds_of(word: str) -> list[str]:
    return [kind for kind in KINDS if word in kind]


PAIRS = [
    *((saved, loaded) for saved in kinds_of("container") for loaded in kinds_of("container")),
    *((saved, loaded) for saved in ("torch", *kinds_of("fused")) for loaded in kinds_of("fused")),
    *(("fused, remainder", "torch"), ("in backward", "container, fp32")),
    *(("container, remainder", "in backward"), ("FSDPadapt", "FSDPadapt")),
    ("FSDPadapt, SGD", "FSDPadapt, SGD"),
]


# Containers make their state before they load. Other optimizers may have none.
@pytest.mark.parametrize(
    ("saved", "loaded", "steps"),
    [(*pair, steps) for pair in PAIRS for steps in ((2,) if "container" in pair[1] else (0, 2))],
)
def test_a_checkpoint_loads_as_the_state_dict_does(
    saved: str, loaded: str, steps: int, tmp_path: Path
) -> None:
    """Holds for optimizers with or without steps, of the same kind or another."""
    model, optimizer = job(saved, 1, 3)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path)
    expected_model, expected = job(loaded, 2, steps)
    expected_model.load_state_dict(model.state_dict())
    expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed_model, resumed = job(loaded, 3, steps)
    load({"model": resumed_model, "optim": resumed}, checkpoint_id=tmp_path)
    assert continued(resumed_model, resumed) == continued(expected_model, expected)


def test_schedulers_and_scalers_go_along(tmp_path: Path) -> None:
    model, optimizer = job("fused, fp32", 1, 1)
    states: dict[str, Any] = {"optim": optimizer, "model": model, "epoch": 3}
    states |= {"lr": LambdaLR(optimizer, lambda n: 0.5**n), "scaler": GradScaler("cpu")}
    states["lr"].step()
    states["scaler"].load_state_dict(states["scaler"].state_dict() | {"scale": 8.0})
    dcp.save(states, checkpoint_id=tmp_path)
    model, optimizer = job("fused, fp32", 2, 0)
    resumed: dict[str, Any] = {"optim": optimizer, "model": model, "epoch": 0}
    resumed |= {"lr": LambdaLR(optimizer, lambda n: 0.5**n), "scaler": GradScaler("cpu")}
    load(resumed, checkpoint_id=tmp_path, storage_reader=Reader("elsewhere"))
    assert resumed["epoch"] == 3
    for key in ("optim", "model", "lr", "scaler"):
        assert content(resumed[key]) == content(states[key])


class Flat(torch.optim.SGD):
    """An optimizer with its own state dict layout."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"groups.weight": {"lr": 0.5, "count": torch.ones(3)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


def test_other_layouts_are_loaded_as_torch_does(tmp_path: Path) -> None:
    optimizer = Flat(nn.Linear(2, 2))
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    load({"optim": optimizer}, checkpoint_id=tmp_path)
    assert content(optimizer.loaded) == content(optimizer.state_dict())


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def truncate(folder: Path) -> None:
    (data,) = folder.glob("*.distcp")
    os.truncate(data, data.stat().st_size - 100)  # cuts into the last entry


def replace_metadata(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data["evil"] = Evil()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def other_shape(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(9, 8), nn.LayerNorm(8)).bfloat16()
    dcp.save({"optim": container(model, "fp32")}, checkpoint_id=folder)


def other_names(folder: Path) -> None:
    dcp.save({"optim": container(nn.Linear(9, 7).bfloat16(), "fp32")}, checkpoint_id=folder)


def no_file(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def pickled_value(folder: Path) -> None:
    _, optimizer = job("container, fp32", 2, 1)
    optimizer.param_groups[0]["lr"] = Evil()
    dcp.save({"optim": optimizer}, checkpoint_id=folder)


def no_metadata(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps({"planner_data": {}}))


def cut_metadata(folder: Path) -> None:
    os.truncate(folder / ".metadata", 40)


def file_elsewhere(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = f"../saved/{info.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (no_metadata, RuntimeError, r"ValueError: .*\.metadata is not .*: it is of type dict"),
        (cut_metadata, RuntimeError, r"ValueError: .*\.metadata is not a checkpoint's metadata"),
        (file_elsewhere, RuntimeError, r"\.\./saved/.* is not in the checkpoint's folder"),
        (truncate, RuntimeError, "reading the optimizer state: rank 0"),
        (replace_metadata, RuntimeError, r"\.metadata refers to posix\.mkdir"),
        (pickled_value, RuntimeError, "Weights only load failed"),
        (no_file, RuntimeError, "reading the optimizer state: rank 0"),
        (other_names, KeyError, r"'state\.0\.weight\.step' is missing"),
        (other_shape, ValueError, r"exp_avg' has shape \(8, 9\), expected \(7, 9\)"),
    ],
)
def test_a_bad_checkpoint_changes_nothing_and_runs_nothing(
    damage: Callable[[Path], None],
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = job("container, fp32", 1, 2)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path / "saved")
    damage(tmp_path / "saved")
    before = content(optimizer.state_dict())
    with pytest.raises(error, match=message):
        load({"optim": optimizer, "model": model}, checkpoint_id=tmp_path / "saved")
    assert content(optimizer.state_dict()) == before
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["container, fp32", "FSDPadapt", "torch"])
@pytest.mark.parametrize("other", ["container, fp32", "FSDPadapt", "torch"])
def test_another_layout_is_named(tmp_path: Path, kind: str, other: str) -> None:
    def made(name: str) -> Any:
        if name != "torch":
            return job(name, 1, 1)[1]
        model = nn.Linear(9, 7)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 9)).sum().backward()
        optimizer.step()
        return optimizer

    dcp.save({"optim": made(kind)}, checkpoint_id=tmp_path)
    taken = made(other)
    if kind == other:
        load({"optim": taken}, checkpoint_id=tmp_path)
        return
    with pytest.raises(
        ValueError, match=f"saved as 'optim' is .* but that of {type(taken).__name__} is"
    ):
        load({"optim": taken}, checkpoint_id=tmp_path)


def test_a_folder_without_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"there is no checkpoint in {tmp_path / 'none'}"):
        load({"optim": job("container, fp32", 1, 1)[1]}, checkpoint_id=tmp_path / "none")


@pytest.mark.parametrize("scheme", ["memory://", "file://"])
def test_a_folder_may_be_a_url(tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}{tmp_path}"
    reader = Reader("elsewhere")
    with pytest.raises(RuntimeError, match=f"there is no checkpoint in {url}: it lacks .metadata"):
        load({"optim": job("fused, fp32", 1, 1)[1]}, checkpoint_id=url)
    for seed in (1, 2):  # a reader sees that a checkpoint was written again
        model, optimizer = job("fused, fp32", seed, seed)
        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=url)
        for given in ({"checkpoint_id": url}, {"checkpoint_id": url, "storage_reader": reader}):
            resumed_model, resumed = job("fused, fp32", 3, 0)
            load({"model": resumed_model, "optim": resumed}, **given)
            assert content(resumed_model, resumed) == content(model, optimizer)
        reader = Reader(url)
        assert reader.read_metadata() is reader.read_metadata()  # not read twice


def test_a_layout_that_is_not_known_is_not_rejected(tmp_path: Path) -> None:
    class Flat(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"state.w.sum": torch.arange(3.0)}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.loaded = state_dict

        def checkpoint_buffers(self, ids: list[str]) -> Any:
            return lambda path, like: torch.empty(like.shape)

    optimizer = Flat(nn.Linear(1, 1).parameters(), lr=0.1)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    load({"optim": optimizer}, checkpoint_id=tmp_path)
    assert optimizer.loaded["state.w.sum"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("taken", "message"),
    [
        (lambda: torch.optim.SGD(nn.Linear(4, 4).parameters(), momentum=0.9), "lacks .*momentum"),
        (lambda: torch.optim.AdamW(nn.Linear(5, 4).parameters()), r"shape \(4, 4\), .* \(4, 5\)"),
    ],
)
def test_torchs_optimizers_take_what_fits_only(
    tmp_path: Path, taken: Callable[[], Any], message: str
) -> None:
    model = nn.Linear(4, 4)
    optimizer = FusedAdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    loading = taken()
    with pytest.raises(ValueError, match=message):
        load({"optim": loading}, checkpoint_id=tmp_path)
    assert not loading.state
    assert loading.param_groups[0]["params"]


def test_an_interrupt_is_no_failure_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, optimizer = job("container, fp32", 1, 1)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Reader, "read_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load({"optim": optimizer}, checkpoint_id=tmp_path)


def test_no_reader_of_ours_runs_the_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = job("FSDPadapt", 1, 1)
    folder = tmp_path / "saved"
    save_checkpoint(optimizer, folder)
    replace_metadata(folder)
    for call in (
        lambda: load_checkpoint(optimizer, folder),
        lambda: save_checkpoint(optimizer, folder),
        lambda: dcp.load({"model": model.state_dict()}, storage_reader=Reader(folder)),
    ):
        # torch 2.11's load does not say why the metadata is missing.
        with pytest.raises(BaseException, match=r"\.metadata refers to posix|metadata is None"):
            call()
    assert not (tmp_path / "ran").exists()
