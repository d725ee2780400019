"""The size of the house: files, lines, imports, and how much of it one PPO step runs through.

    python benchmarks/house.py [--tree DIR] [--json FILE] [--before FILE.json] [--no_run] [--store]

- Lines of code: without blank lines, comments and docstrings.
- Tokens of code: as Python's tokenizer counts them, without comments, line ends, indents and texts in triple quotes.
- Letters of a variable: the mean over the names that are assigned or are parameters, each counted once per function.
- Argument tuples: calls with ``*(a, b, c)``, whose parameters one has to count.
- The core is everything but ``lightppo/plugins``; each folder there is a plugin.
- Importers of a file: at any depth, for type checkers too, or by a name that ``lightppo/__init__.py`` resolves.
- One GRPO step: ``examples/train_ppo.py`` in one process with ``--advantage_estimator grpo`` and default options but
  for the sizes: a random Llama, eight prompts. Counted are the functions entered in the body of ``fit``'s loop.
  Building the run: the same from the call of ``PPOTrainer.from_config`` to its return. A function's lines are those
  from ``def`` to its end, docstrings and comments too; its tokens are those of code on these lines. Lambdas and
  comprehensions are no functions.
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
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

STORED = Path(__file__).parents[1] / "docs" / "data" / "house.json"
MODULE, FUNCTION, TYPES = range(
    3
)  # how deep an import is: at module level, in a function, for type checkers only
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


def code_lines(source: str) -> int:
    """Lines that are not blank, not a comment and not part of a docstring."""
    tokens = tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__)
    code = (t for t in tokens if t.type != tokenize.COMMENT and t.string.strip())
    lines = {n for token in code for n in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(parsed(source)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS))
            and ast.get_docstring(node) is not None
        ):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return sum(bool(text.strip()) for n, text in enumerate(source.splitlines(), 1) if n in lines)


_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_tokens(source: str) -> list[tokenize.TokenInfo]:
    """Tokens but comments, line ends, indents and texts in triple quotes."""
    tokens = tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__)
    kept = (token for token in tokens if token.type not in _NO_CODE)
    return [
        t
        for t in kept
        if t.type != tokenize.STRING or not t.string.lstrip("rRbBuU").startswith(('"""', "'''"))
    ]


def variable_names(tree: ast.AST) -> list[str]:
    """Parameters and assigned names, each once per function; ``self``, ``cls`` and ``_`` are none."""
    found = []
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))]:
        names = {
            node.id
            for node in own_nodes(scope)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        names |= {node.arg for node in own_nodes(scope) if isinstance(node, ast.arg)}
        found += sorted(names - {"self", "cls", "_"})
    return found


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or module, without those of the functions in it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, _FUNCTIONS):
            yield from own_nodes(child)


def density(sources: Iterable[str]) -> dict[str, float]:
    """How much there is to read, and how densely it is written."""
    sources = list(sources)
    tokens = [code_tokens(source) for source in sources]
    trees = [parsed(source) for source in sources]
    names = [name for tree in trees for name in variable_names(tree)]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Starred)]
    count, lines = (
        sum(map(len, tokens)),
        sum(len({token.start[0] for token in of_file}) for of_file in tokens),
    )
    return {
        "files": len(sources),
        "lines": sum(len(source.splitlines()) for source in sources),
        "tokens of code": count,
        "tokens per line of code": round(count / max(1, lines), 1),
        "letters per variable name": round(sum(map(len, names)) / max(1, len(names)), 1),
        "argument tuples": sum(isinstance(node.value, ast.Tuple) for node in calls),
    }


def sources_of(tree: Path) -> dict[str, list[str]]:
    """The files of the core, and of each plugin."""
    package = tree / "lightppo"
    sources: dict[str, list[str]] = {"core": []}
    for path in sorted(package.rglob("*.py")):
        folders = path.relative_to(package).parts
        part = "core" if folders[0] != "plugins" else f"plugins/{folders[1].removesuffix('.py')}"
        sources.setdefault(part, []).append(path.read_text())
    return sources


def parts_of(tree: Path) -> dict[str, dict[str, float]]:
    """The density of the core, of each plugin and of both together."""
    sources = sources_of(tree)
    found = {part: density(texts) for part, texts in sources.items()}
    return found | {"all": density(text for texts in sources.values() for text in texts)}


def public_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(name, module) of what ``from lightppo import NAME`` resolves: ``PUBLIC = {…}``, ``PUBLIC.update({…})``."""
    for node in ast.walk(tree):
        table = None
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            is_public = isinstance(target, ast.Name) and target.id in ("PUBLIC", "_PUBLIC")
            table = node.value if is_public else None
        elif isinstance(node, ast.Call) and _is_update_of_public(node.func):
            table = node.args[0]
        if isinstance(table, ast.Dict):
            yield from ast.literal_eval(table).items()


def _is_update_of_public(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "update"
        and ast.unparse(function) == "PUBLIC.update"
    )


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
        """Groups of files that reach each other by imports not deeper than this."""
        pairs = [pair for pair, depth in self.depth.items() if depth <= deepest]
        reach = {module: {b for a, b in pairs if a == module} for module in self.files}
        for middle in reach:
            for targets in reach.values():
                if middle in targets:
                    targets |= reach[middle]
        groups = {tuple(sorted({a} | {b for b in reach[a] if a in reach[b]})) for a in reach}
        return [" ⇄ ".join(group) for group in sorted(groups) if len(group) > 1]

    def single(self) -> list[str]:
        """Files with one importer, which is in their own room."""
        users = {
            m: [a for a, b in self.depth if b == m != a]
            for m in self.files
            if m not in self.packages
        }
        alone = {module: found[0] for module, found in users.items() if len(found) == 1}
        return [
            f"{m} ← {user}"
            for m, user in alone.items()
            if m.split(".")[1:2] == user.split(".")[1:2]
        ]

    def _imports(self, node: ast.AST, module: str, depth: int) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            inner, dotted = depth, []
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


def count_files(tree: Path) -> dict[str, Any]:
    """What can be read without running anything."""
    package = tree / "lightppo"
    texts = {
        path.relative_to(package).as_posix(): path.read_text()
        for path in sorted(package.rglob("*.py"))
    }
    imports = Imports(package)
    functions = [(node.end_lineno - node.lineno + 1, f"{path} {node.name}") for path in texts
                 for node in ast.walk(parsed(texts[path])) if isinstance(node, _FUNCTIONS)]  # fmt: skip
    folders = defaultdict(list)
    for path in (
        Path(p) for p in texts if "__init__" not in p and Path(p).name != "sections.py"
    ):  # each plugin's
        folders[path.name].append(path.parent.as_posix())
    words = [set(re.findall(r"\w+", text)) for text in texts.values()]
    return {
        "files": len(texts),
        "lines": sum(len(text.splitlines()) for text in texts.values()),
        "lines of code": sum(map(code_lines, texts.values())),
        **{
            f"files that mention {w}": sum(w in found for found in words)
            for w in ("kl_estimator", "advantages")
        },
        "files of config/": sum(path.startswith("config/") for path in texts),
        "files with one importer, in their own room": imports.single(),
        "circles of imports at module level": imports.circles(MODULE),
        "circles of imports, with those inside functions": imports.circles(FUNCTION),
        "circles of imports, with those for type checkers": imports.circles(TYPES),
        "names of files in several rooms": [
            f"{n}: {', '.join(found)}" for n, found in folders.items() if found[1:]
        ],
        "functions of more than 70 lines": [
            f"{n} {name}" for n, name in sorted(functions, reverse=True) if n > 70
        ],
        "lines of tests/": sum(
            len(path.read_text().splitlines()) for path in tree.glob("tests/**/*.py")
        ),
        "words of docs/": sum(len(path.read_text().split()) for path in tree.glob("docs/**/*.md")),
    }


class Trace:
    """The functions of a package that are entered while the run is built, by checks at that time, and in a step."""

    def __init__(self, package: Path) -> None:
        self.prefix = f"{package}{os.sep}"
        self.phase: str | None = None
        phases = ("building the run", "checks of the run", "one GRPO step")
        self.entered: dict[str, set[CodeType]] = {phase: set() for phase in phases}

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self.prefix):
            return None
        in_checks = os.path.basename(code.co_filename) == "start_checks.py"
        if in_checks and self.phase == "building the run":
            self.entered[self.phase].add(code)
            self.phase = "checks of the run"
            return self._until_checked
        if self.phase is not None and is_function(code):
            self.entered[self.phase].add(code)
        if code.co_qualname == "PPOTrainer.from_config" and self.phase is None:
            self.phase = "building the run"
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
            self.phase = "building the run"
        return self._until_checked

    def _in_lines(self, lines: range, frame: Any, event: str, _: Any) -> Any:
        self.phase = "one GRPO step" if event == "line" and frame.f_lineno in lines else None
        return functools.partial(self._in_lines, lines)

    def numbers(self) -> dict[str, int]:
        rows = {}
        for phase, entered in self.entered.items():
            core = {
                code
                for code in entered
                if not code.co_filename.startswith(f"{self.prefix}plugins{os.sep}")
            }
            for codes, part in ((entered, ""), (core, " of the core")):
                lines = {(code.co_filename, line) for code in codes for line in lines_of(code)}
                rows[f"{phase}: files{part}"] = len({code.co_filename for code in codes})
                rows[f"{phase}: functions{part}"] = len(codes)
                rows[f"{phase}: lines of functions{part}"] = len(lines)
                rows[f"{phase}: tokens of functions{part}"] = tokens_on(lines)
        return rows


def tokens_on(lines: Iterable[tuple[str, int]]) -> int:
    """Tokens of code that begin on these lines of files."""
    of_file = defaultdict(set)
    for file, line in lines:
        of_file[file].add(line)
    return sum(
        token.start[0] in numbers
        for file, numbers in of_file.items()
        for token in code_tokens(Path(file).read_text())
    )


def is_function(code: CodeType) -> bool:
    """Whether it is neither a module, nor a class, nor a lambda or comprehension."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and not code.co_name.startswith("<")


def lines_of(code: CodeType) -> range:
    """From ``def``, or its first decorator, to the end of a function."""
    inner = [lines_of(const).stop - 1 for const in code.co_consts if isinstance(const, CodeType)]
    own = [line for *_, line in code.co_lines() if line is not None]
    return range(code.co_firstlineno, max([*own, *inner]) + 1)


def lines_of_step(code: CodeType) -> range | None:
    """The body of the loop that syncs weights; None in a ``fit`` that has none."""
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
    """What one GRPO step of a tiny Llama runs through, in a process of its own."""
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
        python(
            Path(__file__),
            "traced",
            tree,
            folder / "step.json",
            *(f"--{k}={v}" for k, v in options.items()),
        )
        return json.loads((folder / "step.json").read_text())


def markdown(numbers: dict[str, Any], before: dict[str, Any] | None = None) -> str:
    """A line for each number, beside that of before; lists are counted, and follow in full."""

    def cell(value: Any) -> str:
        return "" if value is None else f"{len(value) if isinstance(value, list) else value:,}"

    columns = ({"before": before} if before else {}) | {"now": numbers}
    rows = [
        f"| {name} | " + " | ".join(cell(c.get(name)) for c in columns.values()) + " |"
        for name in numbers
    ]
    lists = [f"\n{name}:\n\n" + "\n".join(f"- {entry}" for entry in value)
             for name, value in numbers.items() if isinstance(value, list) and value]  # fmt: skip
    return "\n".join(
        [f"| | {' | '.join(columns)} |", f"|---{'|---:' * len(columns)}|", *rows, *lists]
    )


def parts_table(parts: dict[str, dict[str, float]]) -> str:
    """A line for each part."""
    columns = list(parts["all"])
    rows = [
        f"| {part} | {' | '.join(f'{numbers[name]:,}' for name in columns)} |"
        for part, numbers in parts.items()
    ]
    return "\n".join(
        ["", f"| part | {' | '.join(columns)} |", f"|---{'|---:' * len(columns)}|", *rows]
    )


def store(parts: dict[str, dict[str, float]], run: dict[str, int]) -> None:
    """Keep the numbers of this tree beside those of before; without a run, the last one's stay."""
    stored = json.loads(STORED.read_text())
    stored["now"] = {"parts": parts, "run": run or stored["now"]["run"]}
    STORED.write_text(json.dumps(stored, indent=1) + "\n")


def main() -> None:
    if sys.argv[1:2] == ["traced"]:
        return traced_script(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tree",
        type=Path,
        default=Path(__file__).parents[1],
        help="checkout to measure; default: this one",
    )
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    parser.add_argument("--before", type=Path, help="such a file: its numbers beside those of now")
    parser.add_argument(
        "--no_run", action="store_true", help="only what can be read: a few seconds"
    )
    parser.add_argument(
        "--store",
        action="store_true",
        help="keep the numbers for the page docs/design.md (make docs)",
    )
    options = parser.parse_args()
    tree = options.tree.resolve()
    run = {} if options.no_run else count_one_step(tree)
    parts = parts_of(tree)
    if options.store:
        store(parts, run)
    numbers = count_files(tree) | run
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n")
    print(markdown(numbers, json.loads(options.before.read_text()) if options.before else None))
    print(parts_table(parts))


if __name__ == "__main__":
    main()
