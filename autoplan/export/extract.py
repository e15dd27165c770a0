"""The part of a module that some of its names need, as source: definitions, constants and imports, in their order."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection

_BESIDE = ("collectives", "experts", "gradients", "model", "parallel", "positions", "program")  # modules of the folder


def extract(source: str, wanted: Collection[str]) -> str:
    """What defines ``wanted`` names of a module and all that they use of it, with the imports that this needs."""
    tree = ast.parse(source)
    docstring = ast.get_docstring(tree, clean=False)
    definitions = {name: node for node in tree.body for name in _defines(node)}
    imports = {name: node for node in tree.body for name in _imports(node)}
    needed: set[str] = set()
    waiting = [name for name in wanted if name in definitions]
    while waiting:
        name = waiting.pop()
        if name in needed or name not in definitions:
            needed |= {name} & imports.keys()
            continue
        needed.add(name)
        waiting.extend(each.id for each in ast.walk(definitions[name]) if isinstance(each, ast.Name))
    kept = [node for node in tree.body if needed & set(_defines(node))]
    lines = source.splitlines()
    future = [line for line in lines if line == "from __future__ import annotations"]
    parts = [f'"""{docstring}"""', *future, _import_block(imports, needed)]
    for node in dict.fromkeys(kept):
        parts.append("\n".join(lines[_start(node) - 1 : node.end_lineno]))
    return _spaced(parts)


def with_class(source: str, name: str, other: str) -> str:
    """``source`` with the class ``name`` of ``other`` in place of its own."""
    spans = []
    for text in (source, other):
        node = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
        spans.append((text.splitlines(), _start(node) - 1, node.end_lineno))
    (lines, first, end), (others, start, stop) = spans
    return "\n".join([*lines[:first], *others[start:stop], *lines[end:]]) + "\n"


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _imports(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__":
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    return []


def _import_block(imports: dict[str, ast.stmt], needed: set[str]) -> str:
    """The imports that are used, each with no more than the names that are."""
    blocks: list[list[str]] = [[], [], []]  # of Python itself, of others, of the folder
    for node in dict.fromkeys(imports[name] for name in imports if name in needed):
        assert isinstance(node, ast.Import | ast.ImportFrom)
        names = [alias for alias in node.names if (alias.asname or alias.name).split(".")[0] in needed]
        module = node.module or "" if isinstance(node, ast.ImportFrom) else names[0].name
        text = ast.unparse(type(node)(**{**{f: getattr(node, f) for f in node._fields}, "names": names}))
        blocks[0 if module.split(".")[0] in sys.stdlib_module_names else 2 if module in _BESIDE else 1].append(text)
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def reads(source: str) -> set[str]:
    """Every name, and every attribute of one, that a module's text mentions."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return names | {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


def _start(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def _spaced(parts: list[str]) -> str:
    """Two empty lines around functions and classes, one elsewhere."""
    text = ""
    for index, part in enumerate(parts):
        large = part.lstrip("@").startswith(("def ", "class ")) or part.startswith("@")
        before = parts[index - 1] if index else ""
        after_large = before.startswith(("def ", "class ", "@"))
        together = "\n" if _one_line(part) and _one_line(before) else "\n\n"
        text += ("" if not index else "\n\n\n" if large or after_large else together) + part
    return text.strip() + "\n"


def _one_line(part: str) -> bool:
    """Whether it is a constant of one line."""
    return "\n" not in part and not part.startswith(("import ", "from ", '"'))
