"""Settings that model converters read: `float8` and `mx` of torchtitan 0.1, `quantize` of 0.2.

The Trainer reads none of them. Without a converter in `model.converters` they have no effect.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Float8Linear:
    enable_fsdp_float8_all_gather: bool = False
    """Let FSDP gather weights in float8."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """After each step, compute the scales of all weights at once."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """Named recipe of scales."""
    filter_fqns: list[str] = field(default_factory=list)
    """Modules that are not converted."""
    emulate: bool = False
    """Emulate float8 in float32, for tests."""


@dataclass
class Float8(Float8Linear):
    force_recompute_fp8_weight_in_bwd: bool = False
    """Convert weights to float8 again in backward."""


@dataclass
class MX:
    use_fp8_dim1_cast_triton_kernel: bool = True
    """Cast with a Triton kernel."""
    recipe_name: Literal["mxfp8"] = "mxfp8"
    """Named recipe of formats."""
    filter_fqns: list[str] = field(default_factory=lambda: ["output"])
    """Modules that are not converted."""


@dataclass
class MXLinear:
    mxfp8_dim1_cast_kernel_choice: Literal["triton", "cuda", "torch"] = "triton"
    """Kernel for the cast."""
    recipe_name: str = "mxfp8_cublas"
    """Named recipe of formats."""
    filter_fqns: list[str] = field(default_factory=lambda: ["output"])
    """Modules that are not converted."""


@dataclass
class Float8GroupedMM:
    fqns: list[str] = field(default_factory=list)
    """Experts that are converted."""


@dataclass
class MXGroupedMM(Float8GroupedMM):
    recipe_name: Literal["mxfp8"] = "mxfp8"
    """Named recipe of formats."""


@dataclass
class QuantizedLinear:
    float8: Float8Linear = field(default_factory=Float8Linear)
    """float8 in linear layers."""
    mx: MXLinear = field(default_factory=MXLinear)
    """MX formats in linear layers."""


@dataclass
class QuantizedGroupedMM:
    float8: Float8GroupedMM = field(default_factory=Float8GroupedMM)
    """float8 in experts."""
    mx: MXGroupedMM = field(default_factory=MXGroupedMM)
    """MX formats in experts."""


@dataclass
class Quantize:
    linear: QuantizedLinear = field(default_factory=QuantizedLinear)
    """Linear layers."""
    grouped_mm: QuantizedGroupedMM = field(default_factory=QuantizedGroupedMM)
    """Experts."""
