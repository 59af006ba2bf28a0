"""The structure of the code in numbers and as an image: folders, files, lines, imports, lengths of functions.

    python -m tests.bench.bench_house [--root CHECKOUT] [--svg FILE]

Counts the lines of the four packages without their tests. The height of a box is the number of its folder's lines. A
line between two boxes is an import, and is red if the two import each other.
"""

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import quantiles

PACKAGES = ("flows", "stages", "trainer", "dataset_builders")
COLOURS = {"flows": "#7aa6c2", "stages": "#9bbf85", "trainer": "#d9a86c", "dataset_builders": "#b5a1c9"}
SHORT_LINES = 4
LINES_A_PIXEL = 24
BOX_WIDTH, COLUMN_WIDTH, COLUMNS, GAP, ROW_GAP = 150, 166, 7, 14, 16


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


def floors_of(house: House) -> dict[str, int]:
    """Folder -> its floor: 0 where it imports no other; folders in a ring share the highest that the ring allows."""
    floors = dict.fromkeys(house.folders, 0)
    for _ in house.folders:
        for name, folder in house.folders.items():
            below = [floors[other] for other in folder.imports if name not in house.folders[other].imports]
            floors[name] = max([floors[name], *(floor + 1 for floor in below)])
            floors[name] = min(floors[name], len(house.folders))
    return floors


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


def picture(house: House) -> str:
    """Return the folders as an SVG: one band per package, with the highest folders first in each; imports go down."""
    places, top, bands = {}, 8, []
    floors = floors_of(house)
    for package in PACKAGES:
        names = sorted((n for n in house.folders if n.split(".")[0] == package), key=lambda n: (-floors[n], n))
        rows = [names[first : first + COLUMNS] for first in range(0, len(names), COLUMNS)]
        start = top
        top += 22
        for row in rows:
            for column, name in enumerate(row):
                height = max(30, house.folders[name].lines // LINES_A_PIXEL)
                places[name] = (GAP + column * COLUMN_WIDTH, top, height)
            top += max(places[name][2] for name in row) + ROW_GAP
        lines = sum(house.folders[name].lines for name in names)
        bands.append((package, start, top - start - 6, f"{package}: {len(names)} folders, {lines:,} lines"))
        top += 6
    shapes = [_band(*band) for band in bands]
    mutual = {frozenset(pair) for pair in house.mutual()}
    for name, folder in house.folders.items():
        shapes += [_import(places[name], places[other], {name, other} in mutual) for other in sorted(folder.imports)]
    shapes += [_box(name, house.folders[name], *place) for name, place in places.items()]
    width = 2 * GAP + COLUMNS * COLUMN_WIDTH
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" font-family="sans-serif" '
        f'font-size="10"><rect width="100%" height="100%" fill="#fff"/>{"".join(shapes)}</svg>\n'
    )


def _band(package: str, y: int, height: int, words: str) -> str:
    return (
        f'<rect x="4" y="{y}" width="{GAP + COLUMNS * COLUMN_WIDTH}" height="{height}" rx="5" '
        f'fill="{COLOURS[package]}" fill-opacity=".22"/><text x="{GAP}" y="{y + 15}" font-size="12">{words}</text>'
    )


def _import(importer: tuple[int, int, int], imported: tuple[int, int, int], is_mutual: bool) -> str:
    (x1, y1, h1), (x2, y2, _) = importer, imported
    x1, x2, y1 = x1 + BOX_WIDTH // 2, x2 + BOX_WIDTH // 2, y1 + h1
    look = 'stroke="#c0392b" stroke-width="2"' if is_mutual else 'stroke="#555" stroke-opacity=".28" stroke-width=".7"'
    return f'<path d="M{x1} {y1} C{x1} {y1 + 30} {x2} {y2 - 30} {x2} {y2}" fill="none" {look}/>'


def _box(name: str, folder: Folder, x: int, y: int, height: int) -> str:
    label = escape(name.partition(".")[2] or "(itself)")
    return (
        f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{height}" rx="3" fill="{COLOURS[name.split(".")[0]]}"/>'
        f'<text x="{x + 6}" y="{y + 13}">{label}</text>'
        f'<text x="{x + 6}" y="{y + 25}" opacity=".7">{folder.files} files, {folder.lines:,} lines</text>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="a checkout (this one)")
    parser.add_argument("--svg", type=Path, help="also draw the folders into this file")
    args = parser.parse_args()
    house = measure(args.root)
    print(table(house))
    if args.svg:
        args.svg.write_text(picture(house), encoding="utf-8")


if __name__ == "__main__":
    main()
