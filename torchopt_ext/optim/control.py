"""Read access to the control block by field name."""

from torch import Tensor

from torchopt_ext.ops import CONTROL_FIELDS


class ControlView:
    """The decision of an optimizer's last step: ``control.grad_norm`` and so on.

    Every field is a 0-dim float64 view into the control block on the parameters' device, so that
    reading one costs no synchronisation until its value is asked for; the next step overwrites it.
    csrc/kernels/control.h says what each field means.
    """

    def __init__(self, block: Tensor) -> None:
        self._block = block

    def __getattr__(self, name: str) -> Tensor:
        if name not in CONTROL_FIELDS:
            raise AttributeError(f"no field {name!r}; the fields are {', '.join(CONTROL_FIELDS)}")
        return self._block[CONTROL_FIELDS.index(name)]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *CONTROL_FIELDS]

    def __repr__(self) -> str:
        pairs = zip(CONTROL_FIELDS, self._block.tolist(), strict=True)
        return "ControlView(" + ", ".join(f"{name}={value:g}" for name, value in pairs) + ")"
