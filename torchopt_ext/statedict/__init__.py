"""State dicts: read in any layout, checked whole, converted, then committed.

- :mod:`entries`: the kinds of entries, one check and one conversion for each.
- :mod:`masters`: from a master weight to a remainder and back.
- :mod:`loaded`: what a state dict has for each parameter; the reader of torch's indexed layout;
  :func:`loaded.raise_problems`, the one place where a state dict is rejected;
  :func:`loaded.load_whole`, which loads any optimizer whole or not at all.
- :mod:`flat`: the layout by name, ``state.{fqn}.{name}`` and ``param_groups.{fqn}.{name}``.
- :mod:`dcp`: loads distributed checkpoints, and reads their metadata safely.

These modules import ``optim.local``, ``optim.storage`` and ``optim.collective``, which import none
of them. All other modules may import these.
"""
