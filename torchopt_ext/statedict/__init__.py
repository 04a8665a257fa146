"""State dicts: read in any layout, checked whole, converted, then committed.

- :mod:`loaded`: what a state dict has for each parameter; the reader of torch's indexed layout;
  :func:`loaded.raise_problems`, the only place that rejects a state dict;
  :func:`loaded.load_whole`, which loads any optimizer whole or not at all.
- :mod:`flat`: the layout by name, ``state.{fqn}.{name}`` and ``param_groups.{fqn}.{name}``.
- :mod:`low_bit`: decodes other packages' moments. :mod:`weights`: reads weights by name.
- :mod:`several`: state dicts of several optimizers as one, and of classical momentum.
- :mod:`folders`: replaces folders as a whole.
- :mod:`dcp`: loads distributed checkpoints, and reads their metadata safely.
"""
