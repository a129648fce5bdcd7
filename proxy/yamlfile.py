"""Read a YAML file strictly, and remember on which line each key stands.

PyYAML keeps the last of two equal keys without a word; here that is an error with its line.
"""

from pathlib import Path
from typing import Any

import yaml

from proxy.errors import ConfigError

Loc = tuple[str | int, ...]


class YamlFile:
    """A parsed file: `data`, and `where(loc)` -> "config.yaml:12" for the key or list index path `loc`."""

    def __init__(self, name: str, text: str) -> None:
        """Parse `text`. Raises ConfigError on bad YAML and on a duplicate key, with the line."""
        self.name = name
        self._lines: dict[tuple[str, ...], int] = {}
        self._indexed: set[int] = set()
        try:
            loader = _Loader(text)
            root = loader.get_single_node()
            self._index(root, ())
            self.data: Any = None if root is None else loader.construct_document(root)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = f":{mark.line + 1}" if mark else ""
            raise ConfigError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from None
        except yaml.reader.ReaderError as error:
            number = text.count("\n", 0, error.position) + 1
            raise ConfigError(f"{name}:{number}: not valid YAML: a character that cannot be printed") from None
        except RecursionError:
            raise ConfigError(f"{name}: not valid YAML: nested too deeply") from None

    @classmethod
    def read(cls, path: Path) -> "YamlFile":
        """Read and parse a file. Raises ConfigError."""
        try:
            return cls(str(path), path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None

    def where(self, loc: Loc) -> str:
        """File and line of the key at `loc`, or of the nearest enclosing key that is written in the file."""
        keys = tuple(map(str, loc))
        while keys and keys not in self._lines:
            keys = keys[:-1]
        return f"{self.name}:{self._lines[keys]}" if keys in self._lines else self.name

    def _index(self, node: yaml.Node | None, loc: tuple[str, ...], above: tuple[int, ...] = ()) -> None:
        if node is not None and id(node) in above:
            line = node.start_mark.line + 1
            raise ConfigError(f"{self.name}:{line}: '{'.'.join(loc)}' stands inside itself, by way of an anchor")
        # Once a node: anchors may share nodes, and must cost no more than their text.
        if node is None or id(node) in self._indexed:
            return
        self._indexed.add(id(node))
        above = (*above, id(node))
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key_node, value_node in node.value:
                key, line = key_node.value, key_node.start_mark.line + 1
                if not isinstance(key, str):
                    raise ConfigError(f"{self.name}:{line}: a key must be a word, not a list or a mapping")
                if key in seen and key != "<<":
                    raise ConfigError(f"{self.name}:{line}: duplicate key '{'.'.join((*loc, key))}'")
                seen.add(key)
                self._lines[(*loc, key)] = line
                self._index(value_node, (*loc, key), above)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._lines[(*loc, str(index))] = item.start_mark.line + 1
                self._index(item, (*loc, str(index)), above)


class _Loader(yaml.SafeLoader):
    """PyYAML's own, which also says on which line a value stands that looks like a date or a number and is none."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, f"{node.value}: {error}", node.start_mark) from None

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        # Of merged keys the last counts anyway; kept all, they would multiply with each merge of a merge.
        node.value = list({key.value: (key, value) for key, value in node.value}.values())
