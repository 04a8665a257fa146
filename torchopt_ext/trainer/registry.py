"""Registries: models, data sets and model converters by name."""

from typing import Generic, TypeVar

from torchopt_ext.trainer.config import ConfigError

Value = TypeVar("Value")


class Registry(Generic[Value]):
    """The values of one kind by name. ``function`` of torchopt_ext.trainer adds one."""

    def __init__(self, kind: str, function: str) -> None:
        self._kind, self._function = kind, function
        self.values: dict[str, Value] = {}

    def add(self, name: str, value: Value) -> None:
        """Adds a value. Raises ValueError if there is one of this name."""
        if name in self.values:
            raise ValueError(f"a {self._kind} named {name!r} is registered already")
        self.values[name] = value

    def get(self, name: str) -> Value:
        """Returns the value of a name. If there is none, raises ConfigError."""
        if name not in self.values:
            known = ", ".join(map(repr, sorted(self.values))) or "none"
            raise ConfigError(
                f"{self._kind} {name!r} is not registered (registered: {known}): a module that "
                f"experimental.custom_import names has to call torchopt_ext.trainer."
                f"{self._function}; --config gives a job's file, such as examples/debug.toml"
            )
        return self.values[name]
