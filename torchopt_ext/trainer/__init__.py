"""The Trainer: a training loop as torchtitan's, on any device. docs/trainer.md."""
