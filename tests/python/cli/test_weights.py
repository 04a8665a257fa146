"""Where convert finds weights, and what it leaves unchanged."""

from collections import Counter, OrderedDict

import pytest
import torch
from torch import nn

from torchopt_ext.cli.terminal import CommandError
from torchopt_ext.cli.weights import keys_of
from torchopt_ext.state.storage import join_master

from ...support.compare import assert_same
from .conftest import stepped

BF16 = torch.bfloat16


def block(**inner):
    return nn.ModuleDict({"norm": nn.Linear(8, 8), **inner}).to(BF16)


def exact(model, optimizer):
    return {
        name: join_master(param.detach(), optimizer.state[param]["remainder"])
        for name, param in model.named_parameters()
    }


@pytest.fixture
def convert(run, tmp_path):
    """Returns a function that converts a state dict to b.pt, with fp32.pt, and reads both."""

    def call(saved, *options):
        torch.save(saved, tmp_path / "a.pt")
        files = [tmp_path / "b.pt"]
        if "--to-torch" in options:
            files.append(tmp_path / "fp32.pt")
            options = (*options, "--save-weights", files[1])
        shown = run("convert", tmp_path / "a.pt", files[0], "--force", *options)
        return shown, *(torch.load(file, weights_only=True) for file in files)

    return call


def test_what_is_no_optimizer_state_stays_as_it_is(convert):
    """Keys that are not strings, empty containers and classes stay: schedules need them."""
    model = block()
    weights = model.state_dict()
    states = {
        "optimizer": stepped(model).state_dict(),
        "lr": {"milestones": Counter({2: 1, 4: 1}), "empty": {}, "by_epoch": {0: 1.5}},
        "rng": {0: torch.arange(3)},
        "list": [torch.ones(1), {}, (1, torch.ones(2)), []],
        "model": weights,
        5: None,
    }
    _, found = convert(states, "--state-dtype", "bf16")
    assert found["optimizer"]["state"][0]["exp_avg"].dtype == BF16
    assert found["optimizer"]["param_groups"] == states["optimizer"]["param_groups"]
    assert list(found) == list(states)
    for key in ("lr", "rng", "list", 5):
        assert repr(found[key]) == repr(states[key])
    assert type(found["model"]) is OrderedDict
    assert found["model"]._metadata == weights._metadata


@pytest.mark.parametrize("where", ["beside", "given"])
def test_weights_whose_names_end_alike(convert, tmp_path, where):
    model = block(inner=block(), state=nn.Linear(4, 4))
    optimizer = stepped(model, master_weights="remainder")
    beside = {"model": model.state_dict()} if where == "beside" else {}
    torch.save(model.state_dict(), tmp_path / "model.pt")
    options = [] if beside else ["--weights", tmp_path / "model.pt"]
    shown, _, found = convert({"optim": optimizer.state_dict(), **beside}, "--to-torch", *options)
    assert ("took 6 weights such as model.norm.weight" in shown) == bool(beside)
    assert_same(found, exact(model, optimizer))


def test_a_given_checkpoint_comes_first_and_wrappers_do_not_count(convert, tmp_path):
    model = block()
    compiled = torch.compile(model, backend="eager")
    optimizer = stepped(model, named=compiled.named_parameters(), master_weights="remainder")
    average = {name: value * 0.5 for name, value in model.state_dict().items()}
    torch.save({"net": model.state_dict()}, tmp_path / "model.pt")
    saved = {"optim": optimizer.state_dict(), "ema": average}
    _, found = convert(saved, "--master-weights", "fp32", "--weights", tmp_path / "model.pt")
    masters = [entry["master_weight"] for entry in found["optim"]["state"].values()]
    assert_same(masters, [*exact(model, optimizer).values()])


def test_two_optimizers_keep_the_weights_of_both(convert, tmp_path):
    models = {"g": block(), "d": block()}
    both = {part: stepped(model, master_weights="fp32") for part, model in models.items()}
    saved = {part: optimizer.state_dict() for part, optimizer in both.items()}
    _, without, found = convert(saved, "--to-torch")
    for part, optimizer in both.items():
        masters = [entry["master_weight"] for entry in optimizer.state.values()]
        assert_same([*found[part].values()], masters)
    _, back = convert(without, "--master-weights", "fp32", "--weights", tmp_path / "fp32.pt")
    assert back["d"]["state"][0]["master_weight"].equal(found["d"]["norm.weight"])


MISSING, SEVERAL = "no such weight", "several weights end in"


@pytest.mark.parametrize(
    ("names", "keys", "part", "expected"),
    [
        ("w", "m.w ema.w", "", SEVERAL),
        ("w", "w ema.w", "", "w"),
        ("w", "g.w d.w", "d", "d.w"),
        ("w b.w", "m.w m.b.w", "", "m.w m.b.w"),
        ("w v", "m.w ema.w ema.v", "", SEVERAL),
        ("w v", "m.w m.v ema.v", "", SEVERAL),
        ("w v", "w v ema.w ema.v", "", "w v"),
        ("w v", "m.w teacher.v", "", MISSING),
        ("w v", "m.w ema.v m.u", "", MISSING),
        ("module.w", "m.w", "", "m.w"),
        ("w", "m.module.w", "", "m.module.w"),
        ("module.w v", "module.w v", "", "module.w v"),
        ("a._orig_mod.w", "m.a.w", "", "m.a.w"),
        ("a.w", "m.a._checkpoint_wrapped_module.w", "", "m.a._checkpoint_wrapped_module.w"),
        ("w", "xw", "", MISSING),
    ],
)
def test_which_keys(names, keys, part, expected):
    if expected in (MISSING, SEVERAL):
        with pytest.raises(CommandError, match=expected):
            keys_of(names.split(), keys.split(), part)
    else:
        assert keys_of(names.split(), keys.split(), part) == expected.split()


def test_fp32_moments_stay_exact(convert, fails, tmp_path):
    model = nn.ModuleDict({"tok": nn.Embedding(9, 64), "head": nn.Linear(64, 9)})
    optimizer = stepped(model, state_dtype=torch.float32)
    saved, to_int8 = optimizer.state_dict(), ["--state-dtype", "int8"]
    _, found = convert(saved, *to_int8, "--fp32-moments", "tok")
    states = found["state"]
    assert states[0]["exp_avg_sq"].equal(optimizer.state[model["tok"].weight]["exp_avg_sq"])
    assert states[1]["exp_avg_codes"].dtype == torch.int8
    assert "embeddings" in convert(saved, *to_int8)[0]
    command = ["convert", tmp_path / "a.pt", tmp_path / "b.pt", "--force", "--fp32-moments"]
    for chosen, problem in (("none", "no parameter has a name with 'none'"), ("(", "expression")):
        assert problem in fails(*command, chosen, *to_int8)
    assert "exceptions" in fails(*command, "tok")
