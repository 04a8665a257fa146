"""How parameters and their state are held: what optimizers, state dicts and all above them share.

- :mod:`algorithms`: hyperparameters and states of the algorithms, as C++ declares them.
- :mod:`storage`: how weights and moments are held, and where a shard lies.
- :mod:`quantized`: 8-bit moments, and their conversion.
- :mod:`entries`: the kinds of entries of a state: what each must be, and how it is kept.
- :mod:`masters`: conversion of master weights and remainders.
- :mod:`local`: this rank's plain tensors. :mod:`params`: parameters and their names.
- :mod:`collective`: collectives with time limits and errors that name a purpose.
- :mod:`devices`: copies between devices, streams and captured graphs.
"""
