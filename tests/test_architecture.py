"""The house rules, one assertion each: who may import whom, who may touch the environment, how long a function is."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("flows", "stages", "dataset_builders", "trainer")
CONTRACTS = "dataset_builders.contracts"
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# What others may know of the trainer: what it is told and answers, and the numbers of a model directory.
TRAINER_FACE = (
    "trainer.contract",
    *("trainer.families.family", "trainer.families.registry", "trainer.families.shapes"),
    *("trainer.families.targets", "trainer.families.whole_modules"),
)
# package -> what of ours it may import, beside itself
ALLOWED = {
    "dataset_builders": (),
    "trainer": (
        *(CONTRACTS, "dataset_builders.errors", "dataset_builders.storage"),
        "dataset_builders.pictures.pixel_codecs",
    ),
    "stages": ("dataset_builders", *TRAINER_FACE),
    "flows": ("stages", "dataset_builders", *TRAINER_FACE),
}
# heavy package -> where it may be imported
IMPORTERS = {
    "prefect": ("flows.",),
    "prefect_dask": ("flows.resources.dask_pool",),
    "distributed": ("flows.resources.dask_pool",),
    "dask": ("flows.resources.dask_pool",),
    "mlflow": (
        *("flows.tracking.store", "flows.tracking.publish", "flows.tracking.run_writer"),
        *("flows.tracking.registry", "flows.tracking.system", "flows.tracking.tables"),
        "flows.service.mlflow_app",  # the server's own process
    ),
    "megatron": ("trainer.",),
    "transformer_engine": ("trainer.",),
    "transformers": ("stages.",),
    "webdataset": ("dataset_builders.contracts.shard_io",),
    "PIL": (
        *("dataset_builders.pictures.images", "dataset_builders.pictures.jpeg", "dataset_builders.pictures.pixels"),
        "stages.encode.images",
    ),
    "simplejpeg": ("dataset_builders.pictures.jpeg",),
}
NO_MEGATRON = (*TRAINER_FACE, "trainer.data", "trainer.loop.metrics")
RANK_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
RANK_READERS = (
    *("trainer.parallel.mesh", "stages.answer.worker"),  # what torchrun starts: ranks of a training, workers
    "stages.launchers.torchrun",  # gives them to a process that needs no torchrun
)
# Who may write the process's own environment: settings that a library reads at its import, or when told to.
ENVIRONMENT_WRITERS = (
    *(
        "flows",
        "flows.cli.bytecode",
        "flows.cli.main",
        "flows.prefect_server.service_record",
        "flows.prefect_server.temporary",
        "flows.tracking.store",
    ),
    "stages.answer.worker",  # which GPU vLLM may see
)
CHILD_ENVIRONMENT_WRITERS = (
    "stages.launchers.torchrun",
    "stages.launchers.slurm.launcher",
    "flows.prefect_server.processes",
)
VAGUE = {"utils", "util", "base", "common", "helpers", "misc", "core", "types", "interfaces"}

MAX_FILE_LINES = 400
MAX_FILES = 12  # of a folder, beside __init__
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8


def name_of(path: Path) -> str:
    """trainer/loop/__init__.py -> trainer.loop"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports_of(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Dotted names of everything that is imported, also inside functions; `from a import b` gives a.b too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") if is_package else module.split(".")[:-1]
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def is_within(name: str, prefix: str) -> bool:
    return name == prefix.rstrip(".") or name.startswith(prefix.rstrip(".") + ".")


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=[str(path.relative_to(ROOT)) for path in paths])


def imports(path: Path) -> list[str]:
    return list(imports_of(tree_of(path), name_of(path), path.name == "__init__.py"))


def test_the_checks_see_what_they_look_for():
    code = "import a.b\nfrom . import c\nfrom ..d import e\ndef f():\n    from g import h\n"
    found = set(imports_of(ast.parse(code), "top.inner.module", False))
    assert {"a.b", "top.inner.c", "top.d.e", "g.h"} <= found
    writes = "os.environ['A'] = '1'\nos.environ.setdefault('A', '1')\ndel os.environ['A']\nos.putenv('A', '1')\n"
    assert list(environment_writes(ast.parse(writes + "x = os.environ.get('A')"))) == [1, 3, 2, 4]
    assert is_within("stages.launchers.job", "stages.") and not is_within("stages_other", "stages")


def test_there_is_something_to_check():
    assert {name_of(path).split(".")[0] for path in MODULES} == set(PACKAGES)
    assert len(MODULES) > 40


@each(MODULES)
def test_imports_point_down(path):
    name = name_of(path)
    package = name.split(".")[0]
    for imported in imports(path):
        top = imported.split(".")[0]
        assert top not in ("tests", "infra"), f"{name} imports {imported}"
        if top not in PACKAGES or top == package:
            continue
        # `import a.b.c` also yields the packages above c, which load nothing by themselves.
        allowed = ALLOWED[package]
        is_allowed = any(is_within(imported, prefix) or is_within(prefix, imported) for prefix in allowed)
        assert is_allowed, f"{name} imports {imported}; {package} may import {allowed}"


FOLDERS = sorted({path.parent for path in MODULES})


def folder_imports() -> dict[str, set[str]]:
    """Folder -> other folders whose files it imports, all as dotted names."""
    modules = {name_of(path): name_of(path.parent / "__init__.py") for path in MODULES}
    found: dict[str, set[str]] = {}
    for path in MODULES:
        here = modules[name_of(path)]
        for imported in imports(path):
            # `from a.b import c` also yields the package a.b, where c may be a module of it.
            is_package = imported in modules and modules[imported] == imported
            if imported in modules and not is_package and modules[imported] != here:
                found.setdefault(here, set()).add(modules[imported])
    return found


def test_no_two_folders_import_each_other():
    found = folder_imports()
    rings = sorted(f"{one} <-> {other}" for one in found for other in found[one] if one in found.get(other, ()))
    assert not rings, rings


def test_no_ring_of_folders():
    """Walks away from every folder that imports nothing of what is left, until nothing is left."""
    left = {folder: set(others) for folder, others in folder_imports().items()}
    while free := [folder for folder in left if not left[folder] & left.keys()]:
        for folder in free:
            del left[folder]
    assert not left, left


@each(FOLDERS)
def test_a_folder_is_small_and_opens_with_what_it_is(path):
    files = [file for file in path.glob("*.py") if file.name != "__init__.py"]
    assert len(files) <= MAX_FILES, f"{path} holds {len(files)} files"
    opening = ast.get_docstring(tree_of(path / "__init__.py")) or ""
    assert "In: " in opening or "In and out: " in opening, f"{path}/__init__.py does not say what comes in and goes out"
    assert "Read first: " in opening, f"{path}/__init__.py does not say which file to read first"


@each(MODULES)
def test_stages_and_flows_know_only_the_trainers_contract(path):
    name = name_of(path)
    if name.split(".")[0] in ("stages", "flows"):
        bad = [i for i in imports(path) if is_within(i, "trainer") and not any(is_within(i, f) for f in TRAINER_FACE)]
        assert set(bad) <= {"trainer", "trainer.families"}, f"{name} imports {bad}"


@each(MODULES)
def test_a_heavy_package_has_its_one_importer(path):
    name = name_of(path)
    for imported in imports(path):
        places = IMPORTERS.get(imported.split(".")[0])
        if places is not None:
            assert any(is_within(name, place) for place in places), f"{name} imports {imported}; only {places} may"
        if imported.split(".")[0] in ("megatron", "transformer_engine"):
            assert not any(is_within(name, place) for place in NO_MEGATRON), f"{name} imports {imported}"


@each(MODULES)
def test_no_import_inside_a_function(path):
    for function in functions(tree_of(path)):
        nested = [n.lineno for n in ast.walk(function) if isinstance(n, ast.Import | ast.ImportFrom)]
        assert not nested, f"{path}:{nested[0]}: import inside {function.name}; only registries import on use"


LIGHT = [
    path
    for path in MODULES
    if path.stem != "shard_io"
    and any(
        is_within(name_of(path), place) for place in (CONTRACTS, "dataset_builders.errors", "dataset_builders.storage")
    )
]


def test_contracts_load_neither_torch_nor_prefect():
    trainer_face = [name_of(path) for path in MODULES if any(is_within(name_of(path), face) for face in TRAINER_FACE)]
    names = [*(name_of(path) for path in LIGHT), *trainer_face]
    code = f"import importlib, sys; [importlib.import_module(n) for n in {names}]\n"
    code += "print(sorted({'torch', 'prefect', 'mlflow', 'transformers', 'megatron'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_help_loads_nothing_heavy():
    code = "import sys, flows.cli.main\nflows.cli.main.make_parser()\n"
    code += "print(sorted({'torch', 'prefect', 'mlflow', 'transformers', 'pyarrow'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


@each(MODULES)
def test_only_distributed_reads_the_rank(path):
    if name_of(path) in RANK_READERS:
        return
    found = [n.lineno for n in ast.walk(tree_of(path)) if isinstance(n, ast.Constant) and n.value in RANK_NAMES]
    assert not found, f"{path}:{found[0]}: only {RANK_READERS} reads {RANK_NAMES}"


def environment_writes(tree: ast.AST) -> Iterator[int]:
    """Lines that change os.environ."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            if any("os.environ" in ast.unparse(target) for target in targets):
                yield node.lineno
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            changing = ("setdefault", "update", "pop", "clear", "__setitem__")
            if called in {"os.putenv", "os.unsetenv", *(f"os.environ.{name}" for name in changing)}:
                yield node.lineno


@each(MODULES)
def test_who_writes_the_environment(path):
    name = name_of(path)
    writes = list(environment_writes(tree_of(path)))
    assert not writes or name in ENVIRONMENT_WRITERS, f"{path}:{writes[0]}: {name} writes os.environ"


@each(MODULES)
def test_only_the_launcher_gives_a_child_its_environment(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and any(keyword.arg == "env" for keyword in node.keywords):
            assert name_of(path) in CHILD_ENVIRONMENT_WRITERS, f"{path}:{node.lineno}: env= for a child"


@each(MODULES)
def test_module_names_say_what_is_inside(path):
    stem = path.parent.name if path.stem in ("__init__", "__main__") else path.stem
    # A file that is run as a script would shadow it; a folder, like stages/tokenize, shadows nothing.
    assert path.stem not in sys.stdlib_module_names, f"{path} has the name of a standard module"
    assert stem not in VAGUE, f"{path}: a name says what is inside"


@each([*MODULES, *TESTS])
def test_no_sys_path(path):
    if path == Path(__file__):
        return
    found = [n.lineno for n in ast.walk(tree_of(path)) if isinstance(n, ast.Attribute) and ast.unparse(n) == "sys.path"]
    assert not found, f"{path}:{found[0]}: sys.path"


@each([*MODULES, *TESTS])
def test_ascii_only(path):
    text = path.read_text(encoding="utf-8")
    bad = [i for i, line in enumerate(text.splitlines(), 1) if not line.isascii()]
    assert not bad, f"{path}:{bad[0]}: not ASCII; write it as an escape"


@each(MODULES)
def test_every_module_says_what_it_is(path):
    is_empty_package = path.name == "__init__.py" and not path.read_text().strip()
    assert is_empty_package or ast.get_docstring(tree_of(path)), f"{path} has no docstring"


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@each(MODULES)
def test_sizes(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{path} has {lines} lines"
    for function in functions(tree_of(path)):
        length = function.end_lineno - function.lineno + 1
        assert length <= MAX_FUNCTION_LINES, f"{path}:{function.lineno}: {function.name} has {length} lines"
        if any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list):
            continue  # a kernel takes its pointers and constants one by one
        arguments = function.args
        count = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])
        assert count <= MAX_PARAMETERS, f"{path}:{function.lineno}: {function.name} takes {count} parameters"


STAGE_MODULES = [
    path for path in MODULES if is_within(name_of(path), "stages") and "STAGE = Stage(" in path.read_text()
]


@each(STAGE_MODULES)
def test_a_stage_has_its_version_and_the_flows_know_it(path):
    assert any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VERSION" for node in tree_of(path).body
    )
    assert f"{name_of(path)}:STAGE" in (ROOT / "flows" / "pipeline" / "graph.py").read_text()


def test_the_trainers_command_line_is_one_file():
    code = "from trainer.__main__ import parse_args\nprint(parse_args(['run.json']))\n"
    code += "for arguments in (['run.json', '--lr', '1e-5'], ['run.json', 'other.json'], []):\n"
    code += "    try: parse_args(arguments)\n    except SystemExit as error: print(error.code)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["run.json", "2", "2", "2"]
    assert done.stderr.count("unrecognized arguments") == 2
    assert "the following arguments are required: run_json" in done.stderr


def test_top_level_packages_are_the_four():
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found == {*PACKAGES, "tests"}
