"""Names to classes: one registry for codecs, one for strategies. A name in a configuration becomes an instance here."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from zipccl_core.errors import ConfigError

T = TypeVar("T", bound=BaseModel)


class Registry(Generic[T]):
    """The known subclasses of one interface, by id. An id that is not known yet is looked for among installed entry
    points."""

    def __init__(self, kind: str, entry_point_group: str) -> None:
        self.kind, self._group = kind, entry_point_group
        self._classes: dict[str, type[T]] = {}

    def register(self, id_: str, cls: type[T]) -> None:
        """Adds a class under its id. The same class defined again (a reloaded module) replaces itself.

        Raises:
            ConfigError: another class has this id.
        """
        known = self._classes.get(id_)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(
                f"{self.kind} id {id_!r} of {cls.__module__}.{cls.__qualname__} is taken "
                f"by {known.__module__}.{known.__qualname__}"
            )
        self._classes[id_] = cls

    def get(self, id_: str) -> type[T]:
        """The class with this id.

        Raises:
            ConfigError: no such id; the message lists the known ones.
        """
        if id_ not in self._classes:
            for entry_point in entry_points(group=self._group, name=id_):
                entry_point.load()  # defining the class registers it
        if id_ not in self._classes:
            raise ConfigError(f"unknown {self.kind} {id_!r}; known: {', '.join(self.known())}")
        return self._classes[id_]

    def known(self) -> list[str]:
        """All ids, sorted: of the defined classes and of the installed entry points."""
        return sorted({*self._classes, *(entry_point.name for entry_point in entry_points(group=self._group))})

    def resolve(self, value: Any) -> Any:
        """Makes an instance of what a configuration gives: an id, a mapping with an `id`, or an instance, which stays
        as it is.

        Raises:
            ConfigError: an unknown id or field, or a value that is not allowed.
        """
        if isinstance(value, str):
            return self.get(value)()
        if isinstance(value, dict):
            if not isinstance(value.get("id"), str):
                raise ConfigError(f"a {self.kind} given as a mapping needs an 'id'; known: {', '.join(self.known())}")
            cls = self.get(value["id"])
            try:
                return cls(**value)
            except ValidationError as error:
                raise ConfigError(describe(error, cls, f"{self.kind} {value['id']!r}")) from None
        return value


def describe(error: ValidationError, model: type[BaseModel], source: str) -> str:
    """Says what is wrong with a configuration: the key, the value that came and what is allowed, a line each."""
    lines = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(
                f"{source}: unknown key {key!r} (value {item['input']!r}); allowed: {', '.join(model.model_fields)}"
            )
        elif item["type"] == "value_error":  # from a validator of ours, which words it itself
            lines.append(f"{source}: {key + ': ' if key else ''}{item['ctx']['error']}")
        else:
            lines.append(f"{source}: {key} = {item['input']!r}: {item['msg']}")
    return "\n".join(lines)
