"""The structure of the code in numbers: folders, files, lines, imports, lengths of functions.

    python -m tests.bench.bench_house [--root CHECKOUT]

Counts the lines of the four packages without their tests.
"""

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

PACKAGES = ("flows", "stages", "trainer", "dataset_builders")
SHORT_LINES = 4


@dataclass(slots=True)
class Folder:
    """A folder of a package: its files, and the other folders that its files import."""

    files: int = 0
    lines: int = 0
    imports: set[str] = field(default_factory=set)


@dataclass(slots=True)
class House:
    """The measurements of a checkout.

    Attributes:
        folders: dotted name -> its folder.
        functions: lines of each function.
        parameters: parameters of each function that is not a kernel.
        file_lines: lines of each file.
    """

    folders: dict[str, Folder]
    functions: list[int]
    parameters: list[int]
    file_lines: list[int]

    def mutual(self) -> list[tuple[str, str]]:
        """Return the pairs of folders that import each other."""
        pairs = ((a, b) for a, folder in self.folders.items() for b in folder.imports if a < b)
        return sorted((a, b) for a, b in pairs if a in self.folders[b].imports)


def measure(root: Path) -> House:
    """Read every module of the four packages."""
    paths = {_dotted(path, root): path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))}
    house = House(defaultdict(Folder), [], [], [])
    for path in paths.values():
        text = path.read_text(encoding="utf-8")
        lines, tree = len(text.splitlines()), ast.parse(text)
        folder = house.folders[_dotted(path.parent / "__init__.py", root)]
        folder.files += path.name != "__init__.py"
        folder.lines += lines
        house.file_lines.append(lines)
        folder.imports |= {_folder_of(name, paths, root) for name in _imported(tree) if name in paths}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                house.functions.append(node.end_lineno - node.lineno + 1)
                if not any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                    house.parameters.append(len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]))
    house.folders = dict(sorted(house.folders.items()))
    for name, folder in house.folders.items():
        folder.imports.discard(name)
    return house


def _dotted(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _folder_of(module: str, paths: dict[str, Path], root: Path) -> str:
    return _dotted(paths[module].parent / "__init__.py", root)


def _imported(tree: ast.AST) -> Iterator[str]:
    """Return the imported modules. `from a.b import c` gives a.b.c if that is a module, else a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module


def table(house: House) -> str:
    """Return the printed table."""
    rows = [f"{'folder':34}{'files':>6}{'lines':>7}  imports"]
    for name, folder in house.folders.items():
        rows.append(f"{name:34}{folder.files:6}{folder.lines:7}  {len(folder.imports)}")
    rows.append("")
    for package in PACKAGES:
        mine = [f for name, f in house.folders.items() if name.split(".")[0] == package]
        rows.append(f"{package:34}{sum(f.files for f in mine):6}{sum(f.lines for f in mine):7}")
    functions = sorted(house.functions)
    rows += [
        f"lines in all                      {sum(house.file_lines)}",
        f"folders                           {len(house.folders)}",
        f"files a folder, most              {max(folder.files for folder in house.folders.values())}",
        f"pairs that import each other      {len(house.mutual())}",
        f"lines of a file, most             {max(house.file_lines)}",
        f"functions                         {len(functions)}",
        f"  of {SHORT_LINES} lines or less              {sum(length <= SHORT_LINES for length in functions)}",
        f"  nine in ten within              {quantiles(functions, n=10)[-1]:.0f} lines",
        f"  over 30 lines                   {sum(length > 30 for length in functions) / len(functions):.1%}",
        f"  longest                         {functions[-1]} lines",
        f"  most parameters                 {max(house.parameters)}",
    ]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="a checkout (this one)")
    print(table(measure(parser.parse_args().root)))


if __name__ == "__main__":
    main()
