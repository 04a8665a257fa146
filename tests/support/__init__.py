"""What tests of several rooms share. Nothing in ``oracle`` calls the library.

``ways``      the ways to hold a parameter and its state, and the classes that step it
``problems``  parameters, gradients, and steps with them
``compare``   bits, differences, and what a rejected call must leave unchanged
``oracle``    steps, storage, loss scale and schedule, in numpy
``ranks``     cases that run on every rank of a process group
"""
