"""The commands of `python -m torchopt_ext`."""
