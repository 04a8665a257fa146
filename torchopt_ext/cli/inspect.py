"""python -m torchopt_ext inspect: shows what a checkpoint of an optimizer holds."""

from __future__ import annotations

import hashlib
import json
import math
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchopt_ext.cli.checkpoints import (
    OPTION,
    Checkpoint,
    Entry,
    give_back_memory,
    is_control,
    memory_of,
    open_checkpoint,
)
from torchopt_ext.cli.tensors import MASTERS_NAMED
from torchopt_ext.cli.terminal import WIDTH, Progress, size, table
from torchopt_ext.state.storage import MASTER_WEIGHTS

_SHOWN = (
    *("algorithm", "lr", "betas", "eps", "weight_decay", "amsgrad"),
    *("momentum", "dampening", "nesterov"),
    *("beta2", "ns_steps", "adjust_lr_fn"),
)
_NO_OPTIONS = ("params", "param_names")


def main(options: Any) -> int:
    give_back_memory()
    facts = report(options.checkpoint, hashed=not options.no_hash)
    print(json.dumps(facts, indent=2) if options.json else as_text(facts, options.tensors))
    return 0


def report(path: Path, hashed: bool) -> dict[str, Any]:
    """Returns the whole report in JSON's types."""
    checkpoint = open_checkpoint(path, only_shown=True)
    parts: dict[str, list[Entry]] = {part: [] for part in checkpoint.options()}
    for entry in map(checkpoint.entry, sorted(checkpoint.tensors)):
        if entry.kind != OPTION:  # a part has no others before a first step, and for plain SGD
            parts.setdefault(entry.part, []).append(entry)
    with Progress("reading", 1):
        reports = {
            part: part_report(checkpoint, part, each) for part, each in sorted(parts.items())
        }
    return {
        "checkpoint": str(checkpoint.path),
        "format": checkpoint.format,
        "made_by": checkpoint.made_by,
        "beside": [*checkpoint.beside],
        "not_loaded": [*checkpoint.not_loaded],
        "bytes": checkpoint.bytes,
        "parts": reports,
        "other_values": sum(
            not is_control(key) and checkpoint.entry(key).kind != OPTION
            for key in checkpoint.values
        ),
        "tensors": {
            key: {"dtype": dtype_name(like), "shape": list(like.shape)}
            for key, like in sorted(checkpoint.tensors.items())
        },
        "elements": sum(like.numel() for like in checkpoint.tensors.values()),
        "meta": sorted(key for key, like in checkpoint.tensors.items() if like.is_meta),
        "sha256": digest(checkpoint) if hashed else None,
    }


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def part_report(checkpoint: Checkpoint, part: str, entries: list[Entry]) -> dict[str, Any]:
    kinds: dict[tuple[str, str], list[Tensor]] = {}
    steps = []
    for entry in entries:
        like = checkpoint.tensors[entry.key]
        kinds.setdefault((entry.kind, dtype_name(like)), []).append(like)
        if entry.kind == "step" and like.numel() == 1 and not like.is_meta:
            steps.append(checkpoint.tensor(entry.key).item())
    names = {kind for kind, _ in kinds}
    owners = {entry.owner for entry in entries if entry.owner}
    for key, value in checkpoint.values.items():  # torch before 2.0 saved numbers
        if key.startswith(f"{part}.state." if part else "state.") and key.endswith(".step"):
            steps.append(value)
    shown = groups(checkpoint, part)
    is_optimizer = bool(owners or shown)
    facts: dict[str, Any] = {
        "optimizer": is_optimizer,
        "entries": [
            {
                "kind": kind,
                "dtype": dtype,
                "tensors": len(likes),
                "elements": sum(like.numel() for like in likes),
                "bytes": sum(like.nbytes for like in likes if not like.is_meta),
            }
            for (kind, dtype), likes in sorted(kinds.items(), key=lambda item: item[0])
        ],
    }
    if is_optimizer:
        indexed = any(group["indices"] for group in shown) or not shown
        facts |= {
            "layout": "indices" if indexed else "names",
            "parameters": len(owners) or sum(group["parameters"] for group in shown),
            "masters": next((kind for kind, name in MASTER_WEIGHTS.items() if name in names), None),
            "steps": sorted({int(step) for step in steps if is_finite(step)}),
            "groups": [{k: v for k, v in group.items() if k != "indices"} for group in shown],
            "control": {
                key.rpartition(".")[2]: _plain(
                    checkpoint.tensor(key)
                    if key in checkpoint.tensors
                    else checkpoint.values[key]  # a number in a flat state dict
                )
                for key in checkpoint.paths
                if is_control(key) and checkpoint.entry(key).part == part
            },
        }
    return facts


def is_finite(step: Any) -> bool:
    return isinstance(step, int | float) and math.isfinite(step)


def groups(checkpoint: Checkpoint, part: str) -> list[dict[str, Any]]:
    """Returns the groups' options. In a flat state dict, equal options make a group."""
    alike: dict[str, dict[str, Any]] = {}
    for owner, saved in checkpoint.options().get(part, {}).items():
        plain = {name: _plain(v) for name, v in sorted(saved.items()) if name not in _NO_OPTIONS}
        # Groups of an indexed layout stay separate, even if their options are the same.
        text = json.dumps(plain, sort_keys=True) + (owner if "params" in saved else "")
        group = {"parameters": 0, "options": plain, "indices": "params" in saved}
        alike.setdefault(text, group)["parameters"] += len(saved.get("params", [owner]))
    return list(alike.values())


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.is_meta:
            return "on the meta device"
        return _plain(value.item() if value.numel() == 1 else value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such numbers
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def digest(checkpoint: Checkpoint) -> str:
    """Returns the SHA-256 of all tensors, in the order of their keys."""
    hashed = hashlib.sha256()
    total = sum(like.nbytes for like in checkpoint.tensors.values())
    with Progress("hashing", total) as progress:
        for key in sorted(checkpoint.tensors):
            value = checkpoint.tensor(key).contiguous()
            hashed.update(f"{key} {dtype_name(value)} {list(value.shape)}\n".encode())
            if value.numel() and not value.is_meta:
                hashed.update(memory_of(torch.view_as_real(value) if value.is_complex() else value))
            progress.add(value.nbytes)
    return hashed.hexdigest()


# ---- text ----------------------------------------------------------------------------------------


def as_text(facts: dict[str, Any], tensors: bool) -> str:
    lines = [f"{facts['checkpoint']}: {facts['format']}, {size(facts['bytes'])}"]
    if facts["made_by"]:
        lines.append(f"a checkpoint of {facts['made_by']}")
    if facts["beside"]:
        lines += textwrap.wrap(f"beside it: {', '.join(facts['beside'])}", WIDTH)
    for part, held in facts["parts"].items():
        lines += ["", *textwrap.wrap(headline(part, held), WIDTH)]
        header = ["", "dtype", "tensors", "elements", "size"]
        rows = [
            [e["kind"][:24], e["dtype"], f"{e['tensors']:,}", f"{e['elements']:,}",
             size(e["bytes"])]
            for e in held["entries"]
        ]  # fmt: skip
        if rows:
            lines += ["", table(header, rows)]
        for number, group in enumerate(held.get("groups", [])):
            shown = [
                f"{name}={str(group['options'][name]).replace(' ', '')}"
                for name in _SHOWN
                if group["options"].get(name) or (name == "lr" and name in group["options"])
            ]
            text = f"group {number}, {group['parameters']:,} parameters: {' '.join(shown)}"
            lines += ["", *textwrap.wrap(text, WIDTH)]
        if held.get("control"):
            counts = ", ".join(
                f"{name} {value:g}" if is_finite(value) else f"{name} {value}"
                for name, value in held["control"].items()
            )
            lines += ["", *textwrap.wrap(f"control: {counts}", WIDTH)]
    if tensors:
        rows = [
            [key if len(key) <= 44 else f"~{key[-43:]}", t["dtype"], str(t["shape"])]
            for key, t in facts["tensors"].items()
        ]
        lines += ["", table(["tensor", "dtype", "shape"], rows)]
    lines += ["", f"{len(facts['tensors']):,} tensors, {facts['elements']:,} elements"]
    if facts["meta"]:
        text = f"on the meta device, without elements: {', '.join(facts['meta'])}"
        lines += textwrap.wrap(text, WIDTH)
    if facts["not_loaded"]:
        text = f"not loaded, as their code could run: {', '.join(facts['not_loaded'])}"
        lines += textwrap.wrap(text, WIDTH)
    if facts["other_values"]:
        count = facts["other_values"]
        lines.append(f"{count:,} value{'s' * (count > 1)} beside them")
    if facts["sha256"]:
        lines.append(f"sha256 {facts['sha256']}")
    return "\n".join(lines)


def headline(part: str, held: dict[str, Any]) -> str:
    if not held["optimizer"]:
        return f"{part or 'tensors'}:"
    steps = held["steps"]
    counted = "no steps" if held["entries"] else "no state"
    if steps:
        counted = f"steps {steps[0]:,} to {steps[-1]:,}" if steps[1:] else f"step {steps[0]:,}"
    layout = {"indices": "index", "names": "name"}[held["layout"]]
    masters = MASTERS_NAMED.get(held["masters"], "no master weights")
    said = [f"{held['parameters']:,} parameters by {layout}", counted, masters]
    return f"{part or 'optimizer'}: optimizer state, {', '.join(said)}"
