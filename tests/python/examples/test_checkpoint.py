from pathlib import Path

import torch
from checkpoint import fingerprint, newest_checkpoint, step_folder


def test_the_newest_checkpoint_is_the_newest_complete_one(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "absent") is None
    for step in (900, 1000, 20000):
        step_folder(tmp_path, step).mkdir()
    assert newest_checkpoint(tmp_path) is None
    for step in (900, 1000):
        (step_folder(tmp_path, step) / ".metadata").touch()
    assert newest_checkpoint(tmp_path) == step_folder(tmp_path, 1000)


def test_a_fingerprint_sees_every_bit_name_and_shape_but_not_the_order() -> None:
    a, b = torch.arange(6.0), torch.zeros((), dtype=torch.float32)
    whole = fingerprint({"a": a, "b": b, "lr": 0.1})
    assert whole == fingerprint({"b": b, "a": a.clone(), "lr": 0.2})
    others = [
        fingerprint({"a": a, "b": -b}),
        fingerprint({"a": a.view(2, 3), "b": b}),
        fingerprint({"a": a, "c": b}),
        fingerprint({"a": a, "b": b}, {"c": b}),
        fingerprint({"a": a.view(torch.int32), "b": b}),
        fingerprint({"a": torch.nextafter(a, a + 1), "b": b}),
    ]
    assert len({whole, *others}) == len(others) + 1


def test_a_transposed_tensor_has_the_fingerprint_of_its_elements_in_order() -> None:
    a = torch.arange(6.0).view(2, 3)
    assert fingerprint({"a": a.T}) == fingerprint({"a": a.T.contiguous()})
