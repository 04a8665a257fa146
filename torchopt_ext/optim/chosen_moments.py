"""Which parameters keep fp32 moments beside 8-bit ones, while groups and parameters change."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchopt_ext._C import Identity
from torchopt_ext.optim.averaged_weights import AveragedWeights
from torchopt_ext.optim.fp32_moments import fp32_params
from torchopt_ext.state.params import named_params


class ChosenMoments(AveragedWeights):
    """Applies ``fp32_moments`` to parameters as they come."""

    _fp32_moments: tuple[str | Tensor, ...] | None = None  # until the constructor has all groups
    # The identities of the parameters for which fp32_moments has chosen, by id: another
    # parameter may get the id of a freed one. torch does not swap tensors with weak references, and
    # references would keep parameters alive that Accelerate replaces.
    _selected_from: Mapping[int, Identity] = {}
    _fp32_places: Sequence[Sequence[bool]] = ()  # what was chosen, by group and position in it

    def _select_fp32_moments(self, *, partial: bool = True) -> None:
        """Applies ``fp32_moments`` to parameters added since the last call.

        A parameter that replaces another in its group is held as that one was: Accelerate, for
        example, replaces parameters for FSDP2.
        """
        if self._storage.state_dtype != torch.int8 or self._fp32_moments is None:
            return
        seen = self._selected_from
        named = named_params(self)
        new = [(name, param) for name, param in named if seen.get(id(param)) != Identity([param])]
        if new or not partial:
            chosen = {id(p) for p in fp32_params(new, self._fp32_moments, partial=partial)}
            counters = {id(p): Identity([p]) for _, p in new}
            rows = [[id(p) for p in group["params"]] for group in self.param_groups]
            for row, places in zip(rows, self._fp32_places, strict=False):
                if len(row) == len(places):
                    chosen |= {p for p, was in zip(row, places, strict=True) if was} & set(counters)
            ids = self._storage.fp32_moments.difference(counters) | chosen
            self._storage = replace(self._storage, fp32_moments=ids)
            self._fp32_places = [[p in ids for p in row] for row in rows]
            self._selected_from = {**seen, **counters}
            # The tensors that were found are not kept alive; others may come with later groups.
            self._fp32_moments = tuple(
                item for item in self._fp32_moments if isinstance(item, str) or id(item) not in ids
            )
