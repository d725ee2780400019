"""The size and the shape of the house: the numbers of docs/design.md, for any checkout.

    python benchmarks/house.py [--tree DIR] [--json FILE] [--no_run] [--store now|before]

- One GRPO step: ``examples/train_ppo.py`` in one process with ``--advantage_estimator grpo`` and default options but
  for the sizes: a random Llama, eight prompts. Counted are the functions entered in the body of ``fit``'s loop.
  Building a run: the same from the call of ``PPOTrainer.from_config`` to its return, without its checks, which are
  counted apart; a function that both call is in both. A function's lines are those from ``def`` to its end, docstrings
  and comments too. Lambdas and comprehensions are no functions. The watchdog's thread is left out: it looks every few
  seconds, in whatever phase that is.
- Rooms: folders of ``lightppo/``, those in ``lightppo/plugins/`` each for itself.
- Tables: :class:`lightppo.table.Table` and ``MetricTable`` at module level; entries as they are after ``import lightppo``.
- Tokens of code: as Python's tokenizer counts them, without comments, line ends, indents and texts in triple quotes.
- Letters of a name: the mean over the names that are assigned or are parameters, each counted once per function.
- Options that no page names: of ``lightppo ppo``; generated pages do not count, README, examples and benchmarks do.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import textwrap
import threading
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

STORED = Path(__file__).parents[1] / "docs" / "data" / "house.json"
MODULE, FUNCTION, TYPES = range(3)  # depth of an import: module, function, type checkers only
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCALE = {
    "hidden": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "intermediate": 64,
    "prompt_tokens": (4, 8),
}
_REWARD = "def reward_func(queries, prompts, labels):\n    return [len(set(query)) / len(query) for query in queries]\n"
_SIZES = {"rollout_batch_size": 8, "train_batch_size": 8, "micro_train_batch_size": 4, "micro_rollout_batch_size": 4,
          "prompt_max_len": 16, "generate_max_len": 8, "num_episodes": 1,
          "advantage_estimator": "grpo", "n_samples_per_prompt": 4}  # fmt: skip

parsed = functools.cache(ast.parse)  # several numbers are counted from one tree


def sources_of(tree: Path) -> dict[str, str]:
    """Return the text of each file of the package by its path in it."""
    package = tree / "lightppo"
    paths = sorted(package.rglob("*.py"))
    return {path.relative_to(package).as_posix(): path.read_text() for path in paths}


# -- what is written -------------------------------------------------------------------------------------------------

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_tokens(source: str) -> list[tokenize.TokenInfo]:
    """Return the tokens but comments, line ends, indents and texts in triple quotes."""
    tokens = tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__)
    code = (token for token in tokens if token.type not in _NO_CODE)
    return [
        token
        for token in code
        if token.type != tokenize.STRING
        or not token.string.lstrip("rRbBuU").startswith(('"""', "'''"))
    ]


def code_lines(source: str) -> int:
    """Count the lines on which a token of code begins."""
    return len({token.start[0] for token in code_tokens(source)})


def variable_names(tree: ast.AST) -> list[str]:
    """Return parameters and assigned names, each once per function, without ``self``, ``cls`` and ``_``."""
    names = []
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))]:
        own = {
            node.id
            for node in own_nodes(scope)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        own |= {node.arg for node in own_nodes(scope) if isinstance(node, ast.arg)}
        names += sorted(own - {"self", "cls", "_"})
    return names


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or module, without those of the functions in it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, _FUNCTIONS):
            yield from own_nodes(child)


def is_tuple_assignment(node: ast.AST) -> bool:
    """Tell whether this is ``a, b = x, y``."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


_SPEC = re.compile(r"(lightppo[\w.]*|\{\w+\}[\w.]*):[\w{}.()]+")


def module_strings(tree: ast.AST) -> int:
    """Count texts ``"module:name"``, also those that are put together."""
    inner = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (
                part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
                for part in node.values
            )
            count += _SPEC.fullmatch("".join(parts)) is not None
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner
        ):
            count += _SPEC.fullmatch(node.value) is not None
    return count


def writing(sources: Iterable[str]) -> dict[str, float]:
    """Return how much there is to read, and how it is written."""
    sources = list(sources)
    trees = [parsed(source) for source in sources]
    nodes = Counter(
        kind
        for tree in trees
        for node in ast.walk(tree)
        for kind, matches in (
            ("tuples", is_tuple_assignment(node)),
            ("conditionals", isinstance(node, ast.IfExp)),
        )
        if matches
    )
    names = [name for tree in trees for name in variable_names(tree)]
    lines = max(1, sum(map(code_lines, sources)))
    tokens = sum(len(code_tokens(source)) for source in sources)
    return {
        "files": len(sources),
        "lines": sum(len(source.splitlines()) for source in sources),
        "tokens of code": tokens,
        "tokens per line of code": round(tokens / lines, 1),
        "letters per name": round(sum(map(len, names)) / max(1, len(names)), 1),
        "`a, b = x, y` per 1,000 lines of code": round(1000 * nodes["tuples"] / lines, 1),
        "conditional expressions per 1,000 lines of code": round(
            1000 * nodes["conditionals"] / lines, 1
        ),
    }


def rooms_of(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return the texts of each room by its name; files of ``lightppo/`` itself are in the room ``lightppo``."""
    rooms: dict[str, list[str]] = {}
    for path, text in sources.items():
        folders = path.split("/")[:-1]
        is_old = folders[:1] == ["plugins"] and len(folders) > 1
        room = "/".join(folders[:2] if is_old else folders[:1]) or "lightppo"
        rooms.setdefault(room, []).append(text)
    return rooms


def classes_in_two_files(sources: dict[str, str]) -> list[str]:
    """Return the public names that are classes in several files."""
    files = defaultdict(list)
    for path, text in sources.items():
        for node in parsed(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in files.items() if len(paths) > 1]


def replaced_classes(sources: dict[str, str]) -> list[str]:
    """Return what a plugin puts in the place of a public name of ``lightppo``."""
    names = [name for text in sources.values() for name, _ in public_names(parsed(text))]
    return sorted(name for name, count in Counter(names).items() if count > 1)


def replaced_entries(sources: dict[str, str]) -> list[str]:
    """Return the entries of tables that another one is put in place of: ``TABLE["name"] = Entry(…)``."""
    return [
        ast.unparse(node.targets[0])
        for text in sources.values()
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Subscript)
        and ast.unparse(node.targets[0].value).isupper()
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).endswith("Entry")
    ]


_STARTS_PROCESSES = re.compile(
    r"\bos\.fork\(|\bPopen\(|ProcessPool(Executor)?\(|create_subprocess_exec\(|(?<!psutil)\.Process\("
)
# Names of files and folders inside a checkpoint.
_LAYOUT = re.compile(
    r"client_state\.pt|mp_rank_|zero_pp_rank|[\"']latest[\"']|[\"']meta\.json[\"']|\.incomplete\b"
)


def shape(tree: Path) -> dict[str, Any]:
    """Return what can be read of the structure without running anything."""
    sources = sources_of(tree)
    texts = list(sources.values())
    imports = Imports(tree / "lightppo")
    functions = [
        (node.end_lineno - node.lineno + 1, f"{path} {node.name}")
        for path, text in sources.items()
        for node in ast.walk(parsed(text))
        if isinstance(node, _FUNCTIONS)
    ]
    names = defaultdict(list)
    for path in sources:
        if not path.endswith(("__init__.py", "sections.py")):
            names[Path(path).name].append(Path(path).parent.as_posix())
    return {
        "rooms": len(rooms_of(sources)) - 1,
        'texts `"module:name"`': sum(module_strings(parsed(text)) for text in texts),
        "names with two classes": classes_in_two_files(sources),
        "public classes replaced at import": replaced_classes(sources),
        "entries of tables that are replaced": replaced_entries(sources),
        "files that start processes": [
            p for p, t in sources.items() if _STARTS_PROCESSES.search(t)
        ],
        "files that name parts of a checkpoint": [
            p for p, t in sources.items() if _LAYOUT.search(t)
        ],
        "circles of imports at module level": imports.circles(MODULE),
        "circles of imports, with those inside functions": imports.circles(FUNCTION),
        "circles of imports, with those for type checkers": imports.circles(TYPES),
        "names of files in several rooms": [
            f"{name}: {', '.join(folders)}" for name, folders in names.items() if folders[1:]
        ],
        "functions of more than 70 lines": [
            f"{count} {name}" for count, name in sorted(functions, reverse=True) if count > 70
        ],
    }


# -- imports ---------------------------------------------------------------------------------------------------------


def public_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (name, module) of what ``from lightppo import NAME`` resolves: ``PUBLIC = {…}``, ``PUBLIC.update({…})``."""
    for node in ast.walk(tree):
        table = None
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            is_public = isinstance(target, ast.Name) and target.id in ("PUBLIC", "_PUBLIC")
            table = node.value if is_public else None
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "PUBLIC.update":
            table = node.args[0]
        if isinstance(table, ast.Dict):
            yield from ast.literal_eval(table).items()


class Imports:
    """Who imports whom in a package: ``depth[importer, imported]`` is the least depth of such an import."""

    def __init__(self, package: Path) -> None:
        self.name = package.name
        relative = {
            path: path.relative_to(package.parent).with_suffix("")
            for path in sorted(package.rglob("*.py"))
        }
        self.files = {
            ".".join(short.parts).removesuffix(".__init__"): path
            for path, short in relative.items()
        }
        self.packages = {
            module for module, path in self.files.items() if path.name == "__init__.py"
        }
        trees = {module: parsed(path.read_text()) for module, path in self.files.items()}
        self.public = {
            name: module for tree in trees.values() for name, module in public_names(tree)
        }
        self.depth: dict[tuple[str, str], int] = {
            (self.name, target): FUNCTION for target in self.public.values()
        }
        for module, tree in trees.items():
            for target, depth in self._imports(tree, module, MODULE):
                self.depth[module, target] = min(depth, self.depth.get((module, target), depth))

    def circles(self, deepest: int) -> list[str]:
        """Return groups of files that reach each other by imports not deeper than this."""
        pairs = [pair for pair, depth in self.depth.items() if depth <= deepest]
        reach = {module: {b for a, b in pairs if a == module} for module in self.files}
        for middle in reach:
            for targets in reach.values():
                if middle in targets:
                    targets |= reach[middle]
        groups = {tuple(sorted({a} | {b for b in reach[a] if a in reach[b]})) for a in reach}
        return [" ⇄ ".join(group) for group in sorted(groups) if len(group) > 1]

    def _imports(self, node: ast.AST, module: str, depth: int) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            inner = depth
            dotted: list[str] = []
            if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                inner = TYPES
            elif isinstance(child, _FUNCTIONS):
                inner = max(depth, FUNCTION)
            elif isinstance(child, ast.Import):
                dotted = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                here = (
                    module.split(".")[: -child.level + (module in self.packages) or None]
                    if child.level
                    else []
                )
                base = ".".join([*here, *filter(None, [child.module])])
                dotted = [f"{base}.{alias.name}" for alias in child.names]
            yield from ((target, depth) for name in dotted if (target := self._file_of(name)))
            yield from self._imports(child, module, inner)

    def _file_of(self, dotted: str) -> str | None:
        above, _, last = dotted.rpartition(".")
        if above == self.name and last in self.public:
            return self.public[last]
        return dotted if dotted in self.files else above if above in self.files else None


# -- what is there after ``import lightppo`` -------------------------------------------------------------------------


def tables_of(sources: dict[str, str]) -> list[tuple[str, str, int]]:
    """Return module, name and number of written entries of each table that is made at module level."""
    tables = []
    for path, text in sources.items():
        module = ".".join(["lightppo", *path.removesuffix(".py").split("/")])
        for node in parsed(text).body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if ast.unparse(node.value.func) in ("Table", "MetricTable"):
                    given = [*node.value.args, *(keyword.value for keyword in node.value.keywords)]
                    written = sum(len(one.keys) for one in given if isinstance(one, ast.Dict))
                    where = module.removesuffix(".__init__")
                    tables.append((where, ast.unparse(target), written))
    return tables


_COUNTED = """
import importlib, json, sys
import lightppo
names = json.loads(sys.argv[1])
sizes = [len(getattr(importlib.import_module(module), name)) for module, name, _ in names]
from lightppo.config import PPOConfig
print(json.dumps([sizes, [option.name for option in PPOConfig.all_options()]]))
"""
_GENERATED = ("flags.md", "migrating.md", "metrics.md")


def choices(tree: Path) -> dict[str, Any]:
    """Count what a user or a package chooses from: tables and options."""
    tables = tables_of(sources_of(tree))
    environment = os.environ | {"PYTHONPATH": str(tree), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", _COUNTED, json.dumps(tables)],
        env=environment,
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
    )
    sizes, options = json.loads(done.stdout.splitlines()[-1])
    pages = [page for page in tree.glob("docs/**/*.md") if page.name not in _GENERATED]
    others = [
        path
        for folder in ("examples", "benchmarks")
        for path in (tree / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".sh", ".md")
    ]
    texts = [path.read_text() for path in (*pages, tree / "README.md", *others)]
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    return {
        "tables": len(tables),
        "tables with one shipped guest at most": sorted(
            name
            for (_, name, written), size in zip(tables, sizes, strict=True)
            if written < 2 and size - written < 2
        ),
        "options of `ppo`": len(options),
        "options of `ppo` that no page names": sorted(set(options) - words),
    }


# -- what runs -------------------------------------------------------------------------------------------------------


class Trace:
    """The functions of a package that are entered while a run is built, by its checks, and in a step."""

    PHASES = ("building a run", "checks of a run", "one GRPO step")

    def __init__(self, package: Path) -> None:
        self.prefix = f"{package}{os.sep}"
        self.phase: str | None = None
        self.entered: dict[str, set[CodeType]] = {phase: set() for phase in self.PHASES}

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self.prefix):
            return None
        if threading.current_thread().name.startswith("watchdog"):
            return None
        if is_check(code) and self.phase == "building a run":
            self.entered[self.phase].add(code)
            self.phase = "checks of a run"
            return self._until_checked
        if self.phase is not None and is_function(code):
            self.entered[self.phase].add(code)
        if code.co_qualname == "PPOTrainer.from_config" and self.phase is None:
            self.phase = "building a run"
            return self._until_return
        if code.co_qualname == "PPOTrainer.fit" and (lines := lines_of_step(code)):
            return functools.partial(self._in_lines, lines)
        return None

    def _until_return(self, frame: Any, event: str, _: Any) -> Any:
        if event == "return":
            self.phase = None
        return self._until_return

    def _until_checked(self, frame: Any, event: str, _: Any) -> Any:
        if event == "return":
            self.phase = "building a run"
        return self._until_checked

    def _in_lines(self, lines: range, frame: Any, event: str, _: Any) -> Any:
        self.phase = "one GRPO step" if event == "line" and frame.f_lineno in lines else None
        return functools.partial(self._in_lines, lines)

    def numbers(self) -> dict[str, int]:
        """Return files, functions, and lines of functions of each phase."""
        rows = {}
        for phase, codes in self.entered.items():
            lines = {(code.co_filename, line) for code in codes for line in lines_of(code)}
            rows[f"{phase}: files"] = len({code.co_filename for code in codes})
            rows[f"{phase}: functions"] = len(codes)
            rows[f"{phase}: lines of functions"] = len(lines)
        return rows


def is_check(code: CodeType) -> bool:
    """Tell whether this calls checks of a run: a function of ``start_checks.py``; before, a method."""
    return Path(code.co_filename).name == "start_checks.py" or code.co_qualname == "Building.check"


def is_function(code: CodeType) -> bool:
    """Tell whether it is neither a module, nor a class, nor a lambda or comprehension."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and not code.co_name.startswith("<")


def lines_of(code: CodeType) -> range:
    """Return the lines from ``def``, or its first decorator, to the end of a function."""
    inner = [lines_of(const).stop - 1 for const in code.co_consts if isinstance(const, CodeType)]
    own = [line for *_, line in code.co_lines() if line is not None]
    return range(code.co_firstlineno, max([*own, *inner]) + 1)


def lines_of_step(code: CodeType) -> range | None:
    """Return the body of the loop that syncs weights; None in a ``fit`` that has none."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    loops = [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While))]
    loops = [loop for loop in loops if "sync_weights(" in ast.unparse(loop)]
    if not loops:
        return None
    above = code.co_firstlineno - 1
    return range(above + loops[-1].body[0].lineno, above + loops[-1].end_lineno + 1)


def traced_script(tree: Path, out: Path, words: list[str]) -> None:
    """Run the tree's ``examples/train_ppo.py`` in this process and write the numbers."""
    trace = Trace(tree / "lightppo")
    script = str(tree / "examples" / "train_ppo.py")
    sys.argv = [script, *words]
    threading.settrace(trace)
    sys.settrace(trace)
    runpy.run_path(script, run_name="__main__")
    sys.settrace(None)
    out.write_text(json.dumps(trace.numbers()))


def count_one_step(tree: Path) -> dict[str, int]:
    """Return what one GRPO step of a tiny Llama runs through, in a process of its own."""
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def python(script: Path, *words: object) -> None:
            command = [sys.executable, *map(str, (script, *words))]
            subprocess.run(command, env=environment, cwd=folder, stdout=sys.stderr, check=True)

        make_assets = Path(__file__).with_name("make_assets.py")
        python(make_assets, "--output_dir", folder, "--prompts", 8, "--changes", json.dumps(_SCALE))
        (folder / "reward.py").write_text(_REWARD)
        inputs = {
            "pretrain": "model",
            "prompt_data": min(folder.glob("*.jsonl")),
            "reward_fn": "reward.py",
        }
        options = inputs | {"save_path": "run", "ckpt_path": "ckpt"} | _SIZES
        words = (f"--{name}={value}" for name, value in options.items())
        python(Path(__file__), "traced", tree, folder / "step.json", *words)
        return json.loads((folder / "step.json").read_text())


# -- the table -------------------------------------------------------------------------------------------------------


def numbers_of(tree: Path, run: bool = True) -> dict[str, Any]:
    """Return every number of a checkout; lists stand for how many there are."""
    ran = count_one_step(tree) if run else {}
    return ran | choices(tree) | shape(tree) | writing(sources_of(tree).values())


def counted(numbers: dict[str, Any]) -> dict[str, float]:
    """Return the numbers with the length of each list in its place."""
    return {k: len(v) if isinstance(v, list) else v for k, v in numbers.items()}


def markdown(numbers: dict[str, Any], before: dict[str, float] | None = None) -> str:
    """Write a line for each number, beside that of before; lists follow in full."""
    columns = ({"before": before} if before else {}) | {"now": counted(numbers)}
    rows = [
        f"| {name} | {' | '.join(f'{column[name]:,}' if name in column else '' for column in columns.values())} |"
        for name in numbers
    ]
    lists = [f"\n{name}:\n\n" + "\n".join(f"- {entry}" for entry in value)
             for name, value in numbers.items() if isinstance(value, list) and value]  # fmt: skip
    return "\n".join(
        [f"| | {' | '.join(columns)} |", f"|---{'|---:' * len(columns)}|", *rows, *lists]
    )


def rooms_table(tree: Path) -> str:
    """Write a line for each room: files and tokens of code."""
    rows = []
    for room, texts in rooms_of(sources_of(tree)).items():
        tokens = sum(len(code_tokens(text)) for text in texts)
        rows.append(f"| {room} | {len(texts)} | {tokens:,} |")
    return "\n".join(["", "| room | files | tokens of code |", "|---|---:|---:|", *rows])


def store(numbers: dict[str, Any], column: str, commit: str) -> None:
    """Keep the numbers for docs/design.md; without a run, the last one's stay."""
    stored = json.loads(STORED.read_text())
    traced = tuple(f"{phase}: " for phase in Trace.PHASES)
    last = {k: v for k, v in stored.get(column, {}).items() if k.startswith(traced)}
    stored[column] = last | counted(numbers) | {"commit": commit}
    STORED.write_text(json.dumps(stored, indent=1) + "\n")


def main() -> None:
    if sys.argv[1:2] == ["traced"]:
        return traced_script(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    own = Path(__file__).parents[1]
    parser.add_argument("--tree", type=Path, default=own, help="checkout to measure; this one")
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    parser.add_argument("--no_run", action="store_true", help="only what needs no training run")
    parser.add_argument(
        "--store", choices=["now", "before"], help="keep the numbers for docs/design.md (make docs)"
    )
    options = parser.parse_args()
    tree = options.tree.resolve()
    numbers = numbers_of(tree, run=not options.no_run)
    if options.store:
        git = ["git", "-C", str(tree), "rev-parse", "--short=8", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        store(numbers, options.store, commit)
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n")
    print(markdown(numbers, json.loads(STORED.read_text()).get("before")))
    print(rooms_table(tree))


if __name__ == "__main__":
    main()
