"""State dicts: read in any layout, checked whole, converted, then committed.

- :mod:`entries`: the kinds of entries, with a check and a conversion for each.
- :mod:`masters`: conversions between master weights and remainders.
- :mod:`moments`, :mod:`low_bit`: conversions of 8-bit moments, and of other packages' moments.
- :mod:`loaded`: what a state dict has for each parameter; the reader of torch's indexed layout;
  :func:`loaded.raise_problems`, the only place that rejects a state dict;
  :func:`loaded.load_whole`, which loads any optimizer whole or not at all.
- :mod:`flat`: the layout by name, ``state.{fqn}.{name}`` and ``param_groups.{fqn}.{name}``.
- :mod:`dcp`: loads distributed checkpoints, and reads their metadata safely.

These modules import ``optim.local``, ``optim.quantized``, ``optim.storage`` and
``optim.collective``, which import none of them. All other modules may import these modules.
"""
