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
        self._lines: dict[Loc, int] = {}
        self._indexed: set[int] = set()
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            self._index(root, ())
            self.data: Any = yaml.safe_load(text)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = f":{mark.line + 1}" if mark else ""
            raise ConfigError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{name}: not valid YAML: {error}") from None

    @classmethod
    def read(cls, path: Path) -> "YamlFile":
        """Read and parse a file. Raises ConfigError."""
        try:
            return cls(str(path), path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None

    def where(self, loc: Loc) -> str:
        """File and line of the key at `loc`, or of the nearest enclosing key that is written in the file."""
        while loc and loc not in self._lines:
            loc = loc[:-1]
        return f"{self.name}:{self._lines[loc]}" if loc in self._lines else self.name

    def _index(self, node: yaml.Node | None, loc: Loc) -> None:
        # Once a node: anchors may share nodes, even with themselves, and must cost no more than their text.
        if node is None or id(node) in self._indexed:
            return
        self._indexed.add(id(node))
        if isinstance(node, yaml.MappingNode):
            seen: set[Any] = set()
            for key_node, value_node in node.value:
                key, line = key_node.value, key_node.start_mark.line + 1
                if key in seen and key != "<<":
                    raise ConfigError(f"{self.name}:{line}: duplicate key '{'.'.join(map(str, (*loc, key)))}'")
                seen.add(key)
                self._lines[(*loc, key)] = line
                self._index(value_node, (*loc, key))
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._lines[(*loc, index)] = item.start_mark.line + 1
                self._index(item, (*loc, index))
