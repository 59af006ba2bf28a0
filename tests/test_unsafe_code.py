"""Things that the code never does: unpickle, extract archives, run text, trust a model's code."""

import ast
from collections.abc import Iterable, Iterator, Sequence

import pytest

from tests.test_architecture import MODULES, at, fail_with, name_of, nodes_of

pytestmark = [
    pytest.mark.full,  # `make lint` runs them always
    pytest.mark.promise(
        "Secrets appear in no file, log, database or command line of a run, servers ask for a login, and no "
        "foreign pickle or code runs."
    ),
]

PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle", "pickletools"}
# Modules that may import pickle, and why that is no risk with somebody else's file.
PICKLE_USERS = {
    "trainer.checkpoint.reader": "an Unpickler that knows the few records of a checkpoint and refuses other names",
}
RUNS_TEXT = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "runpy.run_path", "runpy.run_module"}
UNSAFE_LOADS = {"pd.read_pickle", "pandas.read_pickle", "torch.jit.load", "torch.hub.load", "torch.package"}
EXTRACTS = {"extract", "extractall", "unpack_archive", "extract_archive"}
# Nodes are text. A subclass of SafeLoader makes only the objects that its own code makes.
SAFE_YAML = {
    "safe_load",
    "safe_load_all",
    "safe_dump",
    "YAMLError",
    "SafeLoader",
    "ScalarNode",
    "MappingNode",
    "constructor",
}


def findings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every forbidden expression except imports."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in EXTRACTS:
            yield node.lineno, f"{node.attr}: archives are read without extraction"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "yaml" and node.attr not in SAFE_YAML:
            yield node.lineno, f"yaml.{node.attr}"
        if isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in _calls(ast.unparse(node.func), node))


def _calls(called: str, node: ast.Call) -> Iterator[str]:
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    is_import = called == "runpy.run_module" and isinstance(node.args[0], ast.Constant)  # of a module named in the code
    if called in RUNS_TEXT | UNSAFE_LOADS and not is_import:
        yield called
    if called.endswith("torch.load") and given.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if given.get("allow_pickle", "False") != "False":
        yield "allow_pickle"
    if given.get("shell", "False") != "False":
        yield "shell"
    if given.get("trust_remote_code", "False") != "False":
        yield "trust_remote_code"
    if given.get("weights_only", "True") != "True":
        yield "weights_only"


def pickles(nodes: Sequence[ast.AST]) -> list[str]:
    names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    names += [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
    return [name for name in names if name.split(".")[0] in PICKLES]


UNSAFE = """
eval('1')
exec(x)
compile(x, '', 'exec')
os.system(x)
runpy.run_module(x)
pd.read_pickle(x)
torch.load(x)
torch.load(x, weights_only=False)
f(weights_only=flag)
np.load(x, allow_pickle=True)
yaml.load(x)
yaml.unsafe_load(x)
yaml.Loader
tar.extractall()
zip.extract(x)
shutil.unpack_archive(x)
subprocess.run(x, shell=True)
AutoModel.from_pretrained(x, trust_remote_code=1)
"""
SAFE = """
torch.load(x, weights_only=True)
yaml.safe_load(x)
model.eval()
np.load(x)
runpy.run_module('prefect.engine', run_name='__main__')
"""


def nodes(code: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(code)))


def test_the_checks_see_what_they_look_for():
    assert [line for line in UNSAFE.split("\n") if line and not list(findings(nodes(line)))] == []
    assert [line for line in SAFE.split("\n") if list(findings(nodes(line)))] == []
    assert pickles(nodes("import pickle\nfrom joblib import load\nimport os.path")) == ["pickle", "joblib"]


def test_nothing_unsafe_is_called():
    fail_with(f"{at(path, line)}: {what}" for path in MODULES for line, what in findings(nodes_of(path)))


def test_nothing_is_unpickled_but_where_it_is_no_door():
    """Every exception is still needed."""
    users = {name_of(path): found for path in MODULES if (found := pickles(nodes_of(path)))}
    fail_with(f"{name} imports {found}" for name, found in users.items() if name not in PICKLE_USERS)
    fail_with(f"PICKLE_USERS: {name} imports none" for name in PICKLE_USERS if name not in users)
