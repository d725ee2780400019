"""Every option is read by the code that it is for, and named by a test of it."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from lightppo.algorithms.entries import TABLES
from lightppo.config import PPOConfig
from lightppo.config.options import all_options, sections
from lightppo.plugins.http import remote
from lightppo.plugins.supervised.sections import COMMANDS
from lightppo.plugins.verifiers import formats, math, programs
from lightppo.plugins.vllm.colocated import engine_arguments
from lightppo.rewards import registry
from lightppo.rollout.engine import SamplingParams
from lightppo.strategy.deepspeed import DeepspeedStrategy

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightppo"

KINDS = (PPOConfig, *COMMANDS.values())
OPTIONS = {(one.owner, one.name): one for kind in KINDS for one in kind.all_options()}
SECTIONS = {title: {name for owner, name in OPTIONS if owner == title} for title, _ in OPTIONS}
PER_ROLE = {one.name: one.owner for one in all_options() if one.per_role}
SECTION_OF_CLASS = {section.__name__: title for title, section in sections().items()}

# Read elsewhere, and why.
READ_ELSEWHERE = {
    "config": "by the command line itself",
    "log_file": "by its name: the records of PPO have no such option",
    "local_rank": "the launcher's: accepted, while ranks and devices come from its environment variables",
}


class Reads(ast.NodeVisitor):
    """Collects (section, option) wherever an option is read from its section: ``config.training.l2``, or ``t.l2`` with
    ``t = config.training`` or ``t: TrainingConfig`` before it, or ``getattr(t, name) for name in ("l2", ...)``."""

    def __init__(self) -> None:
        self.found: set[tuple[str, str]] = set()
        self.aliases: list[dict[str, str]] = [{}]

    def section_of(self, node: ast.AST) -> str | None:
        text = ast.unparse(node)
        if text.startswith("of_role("):
            return "of_role"
        known = next((names[text] for names in reversed(self.aliases) if text in names), None)
        if known is None and isinstance(node, ast.Attribute) and node.attr in SECTIONS:
            return node.attr if "config" in ast.unparse(node.value) else None
        return known

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        annotated = {a.arg: ast.unparse(a.annotation) for a in [*node.args.args, *node.args.kwonlyargs] if a.annotation}
        self.aliases.append(
            {arg: SECTION_OF_CLASS[kind] for arg, kind in annotated.items() if kind in SECTION_OF_CLASS}
        )
        self.generic_visit(node)
        self.aliases.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.aliases.append({})
        self.generic_visit(node)
        self.aliases.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        target, value = node.targets[-1], node.value
        tuples = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        pairs = zip(target.elts, value.elts) if tuples else [(target, value)]
        for to, what in pairs:
            if section := self.section_of(what):
                # what a method puts on self is there for the other methods of the class
                scope = self.aliases[-2 if ast.unparse(to).startswith("self.") else -1]
                scope[ast.unparse(to)] = section
        self.generic_visit(node)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        names = {n.value for loop in node.generators for n in ast.walk(loop.iter) if isinstance(n, ast.Constant)}
        for call in ast.walk(node.value):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "getattr":
                section = self.section_of(call.args[0])
                self.found |= {(section, name) for name in names & SECTIONS.get(section, {}.keys())}
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        section = self.section_of(node.value)
        if section == "of_role" and node.attr in PER_ROLE:
            owner = PER_ROLE[node.attr]
            self.found |= {(owner, node.attr), (owner, f"critic_{node.attr}")}
        elif isinstance(node.ctx, ast.Load) and section and node.attr in SECTIONS.get(section, {}):
            self.found.add((section, node.attr))
        self.generic_visit(node)


def reads(source: str | ast.AST) -> set[tuple[str, str]]:
    reader = Reads()
    reader.visit(ast.parse(source) if isinstance(source, str) else source)
    return reader.found


def live_options() -> set[tuple[str, str]]:
    """Options read outside lightppo/config, and those that decide what such an option resolves to."""
    found: set[tuple[str, str]] = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "config":
            found |= reads(path.read_text())
    decide = ("resolutions", "old_log_probs_from", "micro_batch_spec", "reward_plan", "evaluation_config")
    for node in ast.parse((PACKAGE / "config" / "rules.py").read_text()).body:
        if getattr(node, "name", None) in decide:
            found |= reads(node)
    # the parts of rewards are made with the options that have the names of their parameters
    modules = (registry, remote, math, formats, programs)
    made = [
        (module, name) for module in modules for name in re.findall(r"options_of\((\w+)\)", inspect.getsource(module))
    ]
    kinds = [getattr(module, name) for module, name in made]
    found |= {("verifier", name) for kind in kinds for name in inspect.signature(kind).parameters}
    # what is made of all options that have the names of its fields or arguments
    found |= {("rollout", field.name) for field in fields(SamplingParams)}
    found |= {("engine", name) for name in re.findall(r'"(\w+)"', inspect.getsource(engine_arguments))}
    of_any_section = {field.name for field in fields(DeepspeedStrategy)}
    # an algorithm's own options are read by the names in its entry
    of_any_section |= {name for table in TABLES for name in table.flag_options()}
    return found | {(owner, name) for owner, name in OPTIONS if name in of_any_section}


def test_every_option_is_read():
    live = live_options()
    dead = {name for owner, name in OPTIONS if (owner, name) not in live}
    assert dead == set(READ_ELSEWHERE), "an option that nothing reads, or one in READ_ELSEWHERE that is read now"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(config):\n    return config.training.l2", {("training", "l2")}),
        ("def f(config):\n    return self.config.resolved().training.l2", {("training", "l2")}),
        ("def f(config):\n    a, t = config.algorithm, config.training\n    g(t.l2, a.gamma)",
         {("training", "l2"), ("algorithm", "gamma")}),
        ("def f(t: TrainingConfig):\n    def g():\n        return t.l2", {("training", "l2")}),
        ("class C:\n    def __init__(self, config: TrainingConfig):\n        self.config = config\n"
         "    def f(self):\n        return self.config.l2", {("training", "l2")}),
        ("def f(config):\n    t = config.training\n    return {n: getattr(t, n) for n in ('l2', 'gamma')}",
         {("training", "l2")}),
        ("def f(config):\n    of = of_role(config, role)\n    return of.l2",
         {("training", "l2"), ("training", "critic_l2")}),
        ("def f(config):\n    config.training.l2 = 0", set()),  # written
        ("def f(config):\n    t = config.training\ndef g(t):\n    return t.l2", set()),  # another t
        ("def f(config):\n    return config.l2, config.model.l2, other.training.l2", set()),
    ],
)  # fmt: skip
def test_the_check_itself(source, expected):
    assert reads(source) == expected


def test_every_option_is_named_by_a_test():
    """Of the part that reads it: the tests of the command line go over all options alike."""
    here = Path(__file__)
    tests = [p.read_text() for p in here.parent.rglob("*.py") if p != here and here.parent / "config" not in p.parents]
    words = set(re.findall(r"\w+", " ".join(tests)))
    unnamed = {name for _, name in OPTIONS} - words
    assert not unnamed, f"write a test of what these change: {sorted(unnamed)}"
