"""The laws of the architecture, read from the imports and the names in the sources."""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import pytest

from fedflat.methods import mechanisms

PACKAGE = Path(__file__).parents[1] / "src" / "fedflat"
PRIVATE_TORCH = ("gradients/", "core/flat.py", "models/conv/")
"""Where PyTorch's private functions may be called: each such file has a test that compares it with the public way."""


@dataclass(frozen=True)
class Import:
    """One imported module of the package; `waits` while its line is inside a function, `types` for checkers only."""

    file: str
    line: int
    module: str
    waits: bool
    types: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


class Tree:
    """A package's sources, parsed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = {
            path.relative_to(root).as_posix(): ast.parse(path.read_text("utf-8"))
            for path in sorted(root.rglob("*.py"))
            if "__pycache__" not in path.parts
        }

    @cached_property
    def modules(self) -> dict[str, str]:
        """The file of every module, by its dotted name."""
        return {self.module(file): file for file in self.files}

    def module(self, file: str) -> str:
        return ".".join(("fedflat", *file.removesuffix(".py").split("/"))).removesuffix(".__init__")

    @cached_property
    def imports(self) -> list[Import]:
        found: list[Import] = []
        for file, source in self.files.items():
            self._collect(file, source, False, False, found)
        return found

    def _collect(self, file: str, node: ast.AST, waits: bool, types: bool, found: list[Import]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for statement in child.body:
                    self._collect(file, ast.Module([statement], []), waits, True, found)
                for statement in child.orelse:
                    self._collect(file, ast.Module([statement], []), waits, types, found)
                continue
            found += [Import(file, line, module, waits, types) for line, module in self._named(file, child)]
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            self._collect(file, child, waits or inside, types, found)

    def _named(self, file: str, node: ast.AST) -> Iterator[tuple[int, str]]:
        """The modules of the package that one statement imports, and its line."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "fedflat":
                    yield node.lineno, alias.name
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = self.module(file).split(".")
                up = node.level - file.endswith("__init__.py")
                base = ".".join([*here[: len(here) - up], *([node.module] if node.module else [])])
            if base.split(".")[0] == "fedflat":
                below = (f"{base}.{alias.name}" for alias in node.names)
                for module in dict.fromkeys(name if name in self.modules else base for name in below):
                    yield node.lineno, module


Law = Callable[[Tree], list[str]]
"""Gives a sentence for every place that breaks it."""


def room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def outside(tree: Tree, place: str, allowed: set[str], types: bool) -> list[str]:
    """Imports of a room that lead to rooms other than the allowed ones."""
    return [
        str(one)
        for one in tree.imports
        if one.file.startswith(f"{place}/")
        and (types or not one.types)
        and room(one.module) not in {f"fedflat.{name}" for name in (place, *allowed)}
    ]


# -- the laws -----------------------------------------------------------------------------------------


def core_is_at_the_bottom(tree: Tree) -> list[str]:
    """`core` imports nothing above it."""
    return outside(tree, "core", {"errors"}, types=True)


def gradients_stand_on_core(tree: Tree) -> list[str]:
    """`gradients` imports `core` and nothing else."""
    return outside(tree, "gradients", {"core", "errors"}, types=True)


def methods_stand_on_core(tree: Tree) -> list[str]:
    """`methods` imports `core` and nothing else when it runs; type checkers may see more."""
    return outside(tree, "methods", {"core", "errors"}, types=False)


def engines_know_no_method(tree: Tree) -> list[str]:
    """`engines` imports no mechanism and no named method, and names none."""
    found = [
        str(one)
        for one in tree.imports
        if one.file.startswith("engines/")
        and re.match(r"fedflat\.methods\.(mechanisms|named)(\.|$)", one.module)
    ]
    classes = mechanisms.__all__
    names = {*classes, *(re.sub(r"(?<!^)([A-Z])", r"-\1", name).lower() for name in classes)}
    for file, source in tree.files.items():
        if file.startswith("engines/"):
            prose = {id(node.value) for node in ast.walk(source) if isinstance(node, ast.Expr)}
            for node in ast.walk(source):
                said = {getattr(node, "id", None), getattr(node, "attr", None)}
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                    said |= {name for name in names if re.search(rf"(?<![\w-]){name}(?![\w-])", node.value)}
                found += [f"{file}:{node.lineno} names {name}" for name in sorted(names & said)]  # type: ignore[attr-defined]
    return found


def no_import_cycles(tree: Tree) -> list[str]:
    """No two modules need each other at the moment of import."""
    edges: dict[str, dict[str, Import]] = {module: {} for module in tree.modules}
    for one in tree.imports:
        if not one.waits and not one.types and one.module in edges:
            edges[tree.module(one.file)].setdefault(one.module, one)
    done: set[str] = set()
    path: list[str] = []
    found: list[str] = []

    def follow(module: str) -> None:
        path.append(module)
        for other in edges[module]:
            if other in path:
                ring = [*path[path.index(other) :], other]
                found.append("; ".join(str(edges[a][b]) for a, b in pairwise(ring)))
            elif other not in done:
                follow(other)
        done.add(path.pop())

    for module in edges:
        if module not in done:
            follow(module)
    return found


def private_torch_has_its_places(tree: Tree) -> list[str]:
    """`torch._*` and `torch.ops.aten` are used in `gradients/`, `core/flat.py` and `models/conv/` only."""
    found = []
    for file, source in tree.files.items():
        if not file.startswith(PRIVATE_TORCH):
            for line, name in names_used(source):
                if private := re.match(r"torch(\.\w+)*?\._(?!_)\w+|torch\.ops\.aten", name):
                    found.append(f"{file}:{line} uses {private[0]}")
    return sorted(set(found))


def names_used(source: ast.AST) -> Iterator[tuple[int, str]]:
    """What a file imports and the attributes it takes, by their full dotted names."""
    full: dict[str, str] = {}
    for node in ast.walk(source):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                yield node.lineno, base + alias.name
                if base or alias.asname:
                    full[alias.asname or alias.name] = base + alias.name
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            yield node.lineno, f"{full.get(first, first)}.{rest}"


def the_top_drawer_is_small(tree: Tree) -> list[str]:
    """At most six modules lie directly in the package."""
    top = [path.name for path in sorted(tree.root.glob("*.py*")) if path.is_file()]
    return [] if len(top) <= 6 else [f"{name} lies in the top drawer" for name in top]


LAWS: dict[Law, tuple[dict[str, str], list[str]]] = {
    core_is_at_the_bottom: (
        {
            "core/flat.py": "from fedflat.errors import E\n\ndef f():\n    from fedflat.data import own\n",
            "data/own.py": "from fedflat.core import flat\n",
        },
        ["core/flat.py:4 imports fedflat.data.own"],
    ),
    gradients_stand_on_core: (
        {"gradients/dense.py": "import fedflat.core.flat\nfrom ..models import mlp\n"},
        ["gradients/dense.py:2 imports fedflat.models"],
    ),
    methods_stand_on_core: (
        {
            "methods/method.py": "if TYPE_CHECKING:\n    from fedflat.client.step import Step\nelse:\n"
            "    from fedflat.server.server import Server\n"
        },
        ["methods/method.py:4 imports fedflat.server.server"],
    ),
    engines_know_no_method: (
        {
            "methods/named.py": "from . import mechanisms\n",
            "engines/ray.py": '"""Knows private-uploads."""\nfrom fedflat.methods import named\n'
            'from fedflat.methods.method import Method\nif "private-uploads(1)" in method: PrivateUploads()\n',
        },
        [
            "engines/ray.py:2 imports fedflat.methods.named",
            "engines/ray.py:4 names private-uploads",
            "engines/ray.py:4 names PrivateUploads",
        ],
    ),
    no_import_cycles: (
        {
            "a.py": "from fedflat import b\n",
            "b.py": "import fedflat.c\n",
            "c.py": "from .a import x\n",
            "d.py": "def f():\n    from fedflat import e\n",
            "e.py": "import fedflat.d\n",
        },
        ["a.py:1 imports fedflat.b; b.py:1 imports fedflat.c; c.py:1 imports fedflat.a"],
    ),
    private_torch_has_its_places: (
        {
            "core/flat.py": "import torch\ntorch._foreach_add_([], 1)\n",
            "client/step.py": "import torch\nfrom torch import nn\nfrom torch._dynamo import reset\n"
            "print(torch.__version__, nn.Linear, x._parameters)\ntorch._foreach_add_([], 1)\n"
            "torch.ops.aten.add.Tensor(1, 2)\nnn.functional._hidden()\n",
        },
        [
            "client/step.py:3 uses torch._dynamo",
            "client/step.py:5 uses torch._foreach_add_",
            "client/step.py:6 uses torch.ops.aten",
            "client/step.py:7 uses torch.nn.functional._hidden",
        ],
    ),
    the_top_drawer_is_small: (
        {f"{name}.py": "" for name in "abcdefg"},
        [f"{name}.py lies in the top drawer" for name in "abcdefg"],
    ),
}
"""Every law with a small package that breaks it, and what is said of that."""


@pytest.fixture(scope="module")
def package() -> Tree:
    return Tree(PACKAGE)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_package_keeps_the_law(law: Law, package: Tree):
    broken = law(package)
    assert not broken, "\n".join([f"{law.__doc__} But:", *broken])


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_law_can_be_broken(law: Law, tmp_path: Path):
    sources, said = LAWS[law]
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert law(Tree(tmp_path)) == said
