"""Environments as a user writes them: every failure at every place, in threads, loops and processes."""

from __future__ import annotations

import asyncio
import math
import pickle
import threading

import pytest

from lightppo.episodes.environments import (
    EnvFailure,
    EnvironmentFailed,
    Environments,
    Reply,
    Session,
    Step,
    ToolError,
    opening_messages,
)
from lightppo.episodes.hosts import _ThreadCalls, opening_calls
from lightppo.errors import ConfigError

HEAD = """
import asyncio, math, os, random, threading
from lightppo.episodes.environments import EnvFailure, Reply, Step, ToolError
"""

# Classes that fail in one way at one place, sync and async.
FAILING = (
    HEAD
    + '''
def fail(how):
    if how == "exception":
        raise ValueError("it broke at https://user:secret@host/?key=1")
    if how == "stop":
        raise StopIteration("nothing left")
    if how == "exit":
        raise SystemExit(3)
    if how == "failure":
        raise EnvFailure("no network")
    if how == "hang" or how == "block":
        threading.Event().wait()
    if how == "die":
        os._exit(5)
    if how == "nan":
        return math.nan
    if how == "inf":
        return Step("", reward=math.inf)
    if how == "word":
        return Reply("", reward="much")
    if how == "last":
        return Step("fine", done=True)
    return {"tool": "fine", "step": Step("fine"), "get_reward": 1.0}.get(how)

def sync_class(place, how):
    class Sync:
        def _at(self, here):
            return fail(how if here == place else here)
        def __init__(self): self._at("constructor")
        def reset(self, **row): return self._at("reset")
        def tool(self):
            """A tool."""
            return self._at("tool")
        def step(self, text): return fail("last") if place == "last" else self._at("step")
        def get_reward(self): return fail(how) if place == "last" else self._at("get_reward")
        def close(self): self._at("close")
    return Sync

def async_class(place, how):
    class Async:
        async def _at(self, here):
            if here == place and how == "hang":
                await asyncio.Event().wait()
            if how != "block":
                await asyncio.sleep(0)
            return fail(how if here == place else here)
        def __init__(self):
            if place == "constructor": fail(how)
        async def reset(self, **row): return await self._at("reset")
        async def tool(self):
            """A tool."""
            return await self._at("tool")
        async def step(self, text): return fail("last") if place == "last" else await self._at("step")
        async def get_reward(self): return fail(how) if place == "last" else await self._at("get_reward")
        async def close(self): await self._at("close")
    return Async

PLACES = ["constructor", "reset", "tool", "step", "get_reward", "close", "nowhere", "last"]
WAYS = ["exception", "stop", "exit", "failure", "hang", "block", "die", "nan", "inf", "word"]
ALL = {
    f"{name}-{place}-{how}": make(place, how)
    for name, make in [("sync", sync_class), ("async", async_class)]
    for place in PLACES
    for how in WAYS
}
'''
)


@pytest.fixture(scope="module", params=[0, 1], ids=["here", "process"])
def failing(request, tmp_path_factory):
    """Environments with all of them; the option says how many worker processes."""
    path = tmp_path_factory.mktemp("environments") / "failing.py"
    path.write_text(FAILING)
    environments = Environments(f"{path}:ALL", timeout=60, workers=request.param)
    yield environments
    environments.end()


def write(tmp_path, source: str, name: str = "env.py"):
    path = tmp_path / name
    path.write_text(HEAD + source)
    return path


async def play(environments: Environments, row: dict) -> float | None:
    """A whole episode."""
    session = await environments.open(row, seed=1)
    try:
        assert session.opening is None
        assert (await session.call("tool", {})).text == "fine"
        assert (await session.step("text")).observation == "fine"
        reward = await session.get_reward()
    except BaseException:
        await session.close()
        raise
    await session.close()
    return reward


PLACES = ["constructor", "reset", "tool", "step", "get_reward", "close"]
KINDS = {"exception": "exception", "stop": "exception", "exit": "exception", "failure": "failure"}


@pytest.mark.parametrize("style", ["sync", "async"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", KINDS)
def test_failures(failing, style, place, how):
    with pytest.raises(EnvironmentFailed) as caught:
        asyncio.run(play(failing, {"environment": f"{style}-{place}-{how}"}))
    error = caught.value
    assert (error.kind, error.place) == (KINDS[how], place)
    assert "failing.py" in str(error)
    assert f"{style}-{place}-{how}" in str(error)
    assert place in str(error)
    assert "secret" not in str(error)
    assert asyncio.run(play(failing, {"environment": f"{style}-nowhere-{how}"})) == 1.0


@pytest.mark.parametrize("style", ["sync", "async"])
@pytest.mark.parametrize("place", PLACES)
def test_hangs(failing, style, place, monkeypatch):
    ask, start, step = Session._ask, Session._start, Session.step

    # short where it hangs only, as the machine may be busy
    def ask_with_limit(session, asked, **given):
        failing.timeout = 0.5 if asked == place else 60
        return ask(session, asked, **given)

    def start_with_limit(session, row, seed):
        failing.timeout = 0.5 if place in ("constructor", "reset") else 60
        return start(session, row, seed)

    def step_with_limit(session, said):
        failing.timeout = 0.5 if place == "step" else 60
        return step(session, said)

    monkeypatch.setattr(Session, "step", step_with_limit)
    monkeypatch.setattr(Session, "_ask", ask_with_limit)
    monkeypatch.setattr(Session, "_start", start_with_limit)
    with pytest.raises(EnvironmentFailed) as caught:
        asyncio.run(play(failing, {"environment": f"{style}-{place}-hang"}))
    monkeypatch.undo()
    failing.timeout = 60
    assert (caught.value.kind, caught.value.place) == ("timeout", place)
    assert "0.5 s" in str(caught.value)
    assert asyncio.run(play(failing, {"environment": f"{style}-nowhere-hang"})) == 1.0


@pytest.mark.parametrize(("seconds", "late"), [(40, False), (70, True)])
def test_constructor_and_reset_have_a_limit_each(seconds, late):
    """They are one call of the thread; when the clock is looked at, reset has run for so many seconds."""

    class SlowHost:
        async def handle(self, place, given):
            now[place] = max(now.values()) + (seconds if place == "reset" else 40)
            if place == "reset":
                self.look_at_clock()
            return {"value": place}

    async def answer():
        host = SlowHost()
        asyncio.get_running_loop().time = lambda: max(now.values())
        calling = _ThreadCalls(host, opening_calls({}, 1), timeout=60)
        calling._clock.cancel()  # the test looks at the clock itself
        host.look_at_clock = calling._check_deadline
        calling.run()
        try:
            return await calling.answered
        finally:
            calling.end()

    now = {"begin": 0}
    made = {"constructor": {"value": "constructor"}}
    assert asyncio.run(answer()) == made | {"reset": {} if late else {"value": "reset"}}


def test_the_reward_is_asked_with_the_last_step_and_fails_by_itself(failing):
    async def last_step(row):
        session = await failing.open({"environment": row}, seed=1)
        try:
            step = await session.step("text", then_reward=True)
            with pytest.raises(EnvironmentFailed) as caught:
                await session.get_reward()
            return step, caught.value.place
        finally:
            await session.close()

    for style in ("sync", "async"):
        assert asyncio.run(last_step(f"{style}-last-nan")) == (
            Step("fine", done=True),
            "get_reward",
        )


@pytest.mark.parametrize("workers", [0, 1])
def test_the_reward_is_asked_once_and_after_the_last_step_alone(tmp_path, workers):
    path = write(
        tmp_path,
        """
class Counted:
    def reset(self): self.asked = []
    def step(self, text):
        self.asked.append("step")
        return Step("", done=text == "end")
    def get_reward(self):
        self.asked.append("reward")
        return float(len(self.asked))
""",
    )

    async def play():
        session = await environments.open({}, seed=1)
        try:
            for text in ("more", "end"):
                await session.step(text, then_reward=True)
            return await session.get_reward(), await session.get_reward()
        finally:
            await session.close()

    environments = Environments(f"{path}:Counted", workers=workers)
    try:
        assert asyncio.run(play()) == (3.0, 3.0)
    finally:
        environments.end()


def test_a_late_constructor_is_not_followed_by_reset():
    class LateHost:
        async def handle(self, place, given):
            asked.append(place)
            calling.end()  # nobody waits any more
            return {"value": place}

    async def begin():
        return _ThreadCalls(LateHost(), opening_calls({}, 1), timeout=60)

    asked: list[str] = []
    calling = asyncio.run(begin())
    calling.run()
    assert asked == ["constructor"]


@pytest.mark.parametrize(
    ("place", "how"),
    [("get_reward", "nan"), ("step", "inf"), ("tool", "word"), ("get_reward", "word")],
)
@pytest.mark.parametrize("style", ["sync", "async"])
def test_numbers_that_are_none(failing, style, place, how):
    with pytest.raises(EnvironmentFailed) as caught:
        asyncio.run(play(failing, {"environment": f"{style}-{place}-{how}"}))
    assert (caught.value.kind, caught.value.place) == ("not_finite", place)


@pytest.mark.parametrize("place", PLACES)
def test_a_process_that_dies(failing, place):
    if not failing.workers:
        pytest.skip("it would be this process")
    with pytest.raises(EnvironmentFailed) as caught:
        asyncio.run(play(failing, {"environment": f"sync-{place}-die"}))
    assert (caught.value.kind, caught.value.place) == ("lost", place)
    assert "exit code 5" in str(caught.value)
    assert asyncio.run(play(failing, {"environment": "sync-nowhere-die"})) == 1.0


def test_failures_pickle():
    error = EnvironmentFailed("lost", "tool", "text")
    again = pickle.loads(pickle.dumps(error))
    assert (again.kind, again.place, str(again)) == ("lost", "tool", "text")


def test_a_failed_session_stays_failed(failing):
    async def run():
        session = await failing.open({"environment": "sync-tool-exception"}, seed=1)
        errors = []
        for call in (session.call("tool", {}), session.step("x"), session.get_reward()):
            with pytest.raises(EnvironmentFailed) as caught:
                await call
            errors.append(caught.value)
        await session.close()
        await session.close()
        return errors

    errors = asyncio.run(run())
    assert errors[0] is errors[1] is errors[2]


GUESS = '''
class Guess:
    def reset(self, n, **row):
        self.n, self.closed = n, False
        self.others = row
        return f"Guess it. {sorted(row)}"
    def guess(self, x: int) -> str:
        """Guess a number.  Args: x: your number."""
        if not 0 < x < 100: raise ToolError("between 1 and 99")
        return Reply("right", done=True, reward=0.5, metrics={"x": x}) if x == self.n else "wrong"
    def get_reward(self) -> float:
        return float(self.n)

class Talk:
    def reset(self, kind, **row): self.kind = kind
    def step(self, text):
        if text == "bad": raise ToolError("say something else")
        return {
            "step": Step(text, reward=1, done=True, metrics={"m": 2}), "text": text, "nothing": None,
            "two": (text, 0.5), "three": (text, 0.5, True), "four": (text, 0.5, True, {"a": 1, "b": "no"}),
            "gym": (text, 0.5, False, True, {"a": 1}), "messages": [{"role": "user", "content": text}],
            "wrong": 3, "wrong messages": [text],
        }[self.kind]
'''


@pytest.mark.parametrize("workers", [0, 1])
def test_the_example(tmp_path, workers):
    path = write(tmp_path, GUESS)
    environments = Environments(f"{path}:Guess", timeout=60, workers=workers)

    async def run():
        session = await environments.open({"n": 7, "text": "t"}, seed=1)
        replies = [
            await session.call(name, arguments)
            for name, arguments in [
                ("guess", {"x": 500}), ("guess", {"x": "3"}), ("guess", {"x": 7}), ("guess", {"x": "many"}),
                ("guess", {}), ("guess", {"x": 1, "y": 2}), ("guess", [1]), ("look", {}), ("reset", {}),
            ]
        ]  # fmt: skip
        return (
            session,
            replies,
            await session.get_reward(),
            session.environment,
            await session.close(),
        )

    try:
        session, replies, reward, environment, _ = asyncio.run(run())
    finally:
        environments.end()
    assert session.opening == "Guess it. ['text']"
    assert (session.has_step, session.has_reward) == (False, True)
    refused, wrong, right, *bad = replies
    assert refused == Reply("between 1 and 99", error=True)
    assert wrong == Reply("wrong")
    assert right == Reply("right", done=True, reward=0.5, metrics={"x": 7.0})
    assert all(reply.error for reply in bad)
    texts = [reply.text for reply in bad]
    assert "argument x" in texts[0]
    assert "'many'" in texts[0]
    assert "missing argument x" in texts[1]
    assert "unknown argument y" in texts[2]
    assert "object" in texts[3]
    assert texts[4] == "There is no tool 'look'. Tools: guess."
    assert "no tool 'reset'" in texts[5]
    assert reward == 7.0
    assert (environment is None) == bool(workers)
    assert session.environment is None


@pytest.mark.parametrize("workers", [0, 1])
def test_steps_of_all_forms(tmp_path, workers):
    environments = Environments(f"{write(tmp_path, GUESS)}:Talk", timeout=60, workers=workers)

    async def step(kind, text="hi"):
        session = await environments.open({"kind": kind}, seed=1)
        try:
            return await session.step(text)
        finally:
            await session.close()

    try:
        assert asyncio.run(step("step")) == Step("hi", reward=1.0, done=True, metrics={"m": 2.0})
        assert asyncio.run(step("text")) == Step("hi")
        assert asyncio.run(step("nothing")) == Step(None)
        assert asyncio.run(step("two")) == Step("hi", reward=0.5)
        assert asyncio.run(step("three")) == Step("hi", reward=0.5, done=True)
        assert asyncio.run(step("four")) == Step("hi", reward=0.5, done=True, metrics={"a": 1.0})
        assert asyncio.run(step("gym")) == Step("hi", reward=0.5, done=True, metrics={"a": 1.0})
        messages = [{"role": "user", "content": "hi"}]
        assert asyncio.run(step("messages")) == Step(messages)
        assert asyncio.run(step("text", "bad")).observation == "say something else"
        for kind in ("wrong", "wrong messages"):
            with pytest.raises(EnvironmentFailed, match="step") as caught:
                asyncio.run(step(kind))
            assert caught.value.kind == "exception"
    finally:
        environments.end()


def test_the_row_is_a_copy(tmp_path):
    source = """
class Greedy:
    def reset(self, numbers): self.n = numbers.pop(); return str(self.n)
    def step(self, text): return ""
"""
    environments = Environments(f"{write(tmp_path, source)}:Greedy", timeout=60)
    row = {"numbers": [1, 2]}

    async def opening():
        session = await environments.open(row, seed=1)
        await session.close()
        return session.opening

    assert [asyncio.run(opening()) for _ in range(2)] == ["2", "2"]
    assert row == {"numbers": [1, 2]}


ROUTED = (
    GUESS
    + '''
def add(a: int, b: int = 1) -> int:
    """Add numbers.

    Args:
        a: one
        b: another
    """
    return a + b

async def shout(text: str) -> str:
    """Shout. Args: text: what."""
    return text.upper()
'''
)


@pytest.mark.parametrize("workers", [0, 2])
def test_routing(tmp_path, workers):
    path = write(tmp_path, ROUTED)
    environments = Environments(
        [f"{path}:Guess", f"talk={path}:Talk"],
        tools=f"{path}:add,shout",
        timeout=60,
        workers=workers,
    )
    assert environments.names == ["Guess", "talk"]
    names = {
        name: [tool["function"]["name"] for tool in environments.tools(name)]
        for name in environments.names
    }
    assert names == {"Guess": ["add", "shout", "guess"], "talk": ["add", "shout"]}

    async def run():
        talk = await environments.open({"environment": "talk", "kind": "text"}, seed=1)
        guess = await environments.open({"environment": "Guess", "n": 3}, seed=1)
        replies = [
            await talk.call("add", {"a": 2}), await guess.call("add", {"a": 2, "b": "5"}),
            await guess.call("shout", {"text": "hi"}), await talk.call("guess", {"x": 1}),
        ]  # fmt: skip
        assert [session.has_step for session in (guess, talk)] == [False, True]
        assert [session.has_reward for session in (guess, talk)] == [True, False]
        await talk.close()
        await guess.close()
        with pytest.raises(EnvironmentFailed, match=r"reset takes n; the row's columns: environ"):
            await environments.open({"environment": "Guess"}, seed=1)
        return replies, talk.name, await talk.get_reward()

    try:
        (three, seven, loud, no_tool), name, reward = asyncio.run(run())
    finally:
        environments.end()
    assert [three.text, seven.text, loud.text] == ["3", "7", "HI"]
    assert no_tool.error
    assert (name, reward) == ("talk", None)
    with pytest.raises(
        ConfigError, match="'environment' is missing; it must be one of Guess, talk"
    ):
        environments.route({})
    with pytest.raises(ConfigError, match="has 'other'"):
        environments.route({"environment": "other"})


@pytest.mark.parametrize("workers", [0, 1])
def test_tools_alone(tmp_path, workers):
    path = write(tmp_path, ROUTED)
    environments = Environments(tools=[f"{path}:add"], timeout=60, workers=workers)

    async def run():
        session = await environments.open({"any": 1}, seed=1)
        reply = await session.call("add", {"a": 1})
        found = session.opening, reply.text, await session.get_reward()
        await session.close()
        return found

    try:
        assert asyncio.run(run()) == (None, "2", None)
    finally:
        environments.end()


@pytest.mark.parametrize(
    ("entries", "tools", "text"),
    [
        ("{path}:Gues", (), "has no 'Gues'"),
        ("{path}", (), "name what it has"),
        ("{path}:ROOM", (), "is of type int, not a class"),
        ("{path}:NoReset", (), "has no method reset"),
        (["{path}:Guess", "{path}:Guess"], (), "two environments are named 'Guess'"),
        ("{path}:Guess", "{path}:guess", "guess is in --tools, too"),
        ((), "{path}:ROOM", "ROOM is of type int"),
        ((), ["{path}:add", "{path}:add"], "two tools are named 'add'"),
        ((), (), "name an environment or a tool"),
        ("no_such_package:Thing", (), "No module named 'no_such_package'"),
        ("just a name", (), "is not of the form file.py:Name"),
        ("missing.py:Thing", (), "no file"),
    ],
)
def test_what_cannot_be_used(tmp_path, entries, tools, text):
    source = """
ROOM = 3
class NoReset: ...
def guess(): ...
def broken(x): "Broken. Args: x: what."
"""
    path = write(tmp_path, ROUTED + source)

    def filled(texts):
        return (
            texts.format(path=path)
            if isinstance(texts, str)
            else [t.format(path=path) for t in texts]
        )

    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        Environments(filled(entries), tools=filled(tools))


def test_files_run_once(tmp_path):
    path = write(tmp_path, ROUTED + "\nopen(__file__ + '.log', 'a').write('x')\n")
    Environments([f"{path}:Guess", f"{path}:Talk"], tools=f"{path}:add")
    assert (tmp_path / "env.py.log").read_text() == "x"


def test_classes_and_functions_as_they_are():
    class Here:
        def reset(self):
            return "hi"

        def look(self) -> str:
            """Look around."""
            return "a wall"

    environments = Environments(Here, timeout=60)

    async def run():
        session = await environments.open({}, seed=1)
        reply = await session.call("look", {})
        await session.close()
        return session.opening, reply.text

    assert asyncio.run(run()) == ("hi", "a wall")
    with pytest.raises(ConfigError, match="must be at the top level of a module"):
        Environments(Here, workers=1)


@pytest.mark.parametrize("workers", [0, 3])
def test_seeds(tmp_path, workers):
    source = """
class Seeded:
    def reset(self, seed): return f"{seed}"
    def step(self, text): return ""
class Random:
    def __init__(self): self.first = random.random()
    def reset(self, **row): return f"{self.first} {random.random()} {'seed' in row}"
    def step(self, text): return ""
"""
    path = write(tmp_path, source)
    environments = Environments([f"{path}:Seeded", f"{path}:Random"], timeout=60, workers=workers)

    async def openings(row, seeds):
        sessions = [await environments.open(row, seed=seed) for seed in seeds]
        for session in sessions:
            await session.close()
        return [session.opening for session in sessions]

    try:
        assert asyncio.run(openings({"environment": "Seeded"}, [5, 6])) == ["5", "6"]
        assert asyncio.run(openings({"environment": "Seeded", "seed": 9}, [5])) == ["9"]
        rows = asyncio.run(openings({"environment": "Random"}, [1, 1, 2]))
        again = asyncio.run(openings({"environment": "Random"}, [1]))
    finally:
        environments.end()
    assert all(row.endswith("False") for row in rows)
    if workers:  # threads share the generator
        assert rows[0] == rows[1] == again[0] != rows[2]


@pytest.mark.parametrize("workers", [0, 4])
def test_a_hundred_at_once(tmp_path, workers):
    source = """
class Count:
    async def reset(self, start): self.n = start
    async def add(self, by: int) -> int:
        '''Add. Args: by: how much.'''
        await asyncio.sleep(0)
        self.n += by
        return self.n
    def get_reward(self): return self.n
"""
    environments = Environments(f"{write(tmp_path, source)}:Count", timeout=60, workers=workers)

    async def one(i):
        session = await environments.open({"start": i}, seed=i)
        texts = [(await session.call("add", {"by": by})).text for by in (1, 10)]
        reward = await session.get_reward()
        await session.close()
        return texts, reward

    async def run():
        found = await asyncio.gather(*(one(i) for i in range(100)))
        return found, len(environments._workers.process_ids if environments._workers else ())

    try:
        found, processes = asyncio.run(run())
    finally:
        environments.end()
    assert found == [([str(i + 1), str(i + 11)], i + 11.0) for i in range(100)]
    assert processes <= workers


def test_a_hung_thread_cleans_up_when_it_comes_back(tmp_path):
    class Slow:
        go, closed = threading.Event(), threading.Event()

        def reset(self): ...

        def wait(self) -> str:
            """Wait."""
            self.go.wait()
            return "late"

        def close(self):
            self.closed.set()

    environments = Environments(Slow, timeout=60)

    async def run():
        session = await environments.open({}, seed=1)
        environments.timeout = 0.5
        with pytest.raises(EnvironmentFailed, match=r"Slow: tool wait: no answer within 0.5 s"):
            await session.call("wait", {})
        thread = session._seat._thread._thread
        await session.close()
        return thread

    thread = asyncio.run(run())
    assert thread.is_alive()
    assert not Slow.closed.is_set()
    Slow.go.set()
    assert Slow.closed.wait(60)
    thread.join(60)
    assert not thread.is_alive()


def test_async_code_that_blocks_does_not_stop_time_outs():
    """A loop that is blocked is given up: its others are lost at once, later ones get a new loop."""
    never = threading.Event()

    class Blocks:
        async def reset(self): ...

        async def wait(self) -> str:
            """Wait."""
            await asyncio.Event().wait()

        async def block(self) -> str:
            """Block."""
            never.wait()

        async def answer(self) -> str:
            """Answer."""
            return "here"

    environments = Environments(Blocks, timeout=60)

    async def run():
        victim, culprit = [await environments.open({}, seed=1) for _ in range(2)]
        waiting = asyncio.ensure_future(victim.call("wait", {}))
        await asyncio.sleep(0)
        environments.timeout = 0.3
        with pytest.raises(EnvironmentFailed) as caught:
            await culprit.call("block", {})
        assert caught.value.kind == "timeout"
        with pytest.raises(EnvironmentFailed, match="another environment blocked") as caught:
            await waiting
        assert caught.value.kind == "lost"
        environments.timeout = 60
        later = await environments.open({}, seed=1)
        reply = await later.call("answer", {})
        for session in (victim, culprit, later):
            await session.close()
        return reply.text

    assert asyncio.run(run()) == "here"
    never.set()
    environments.end()


def test_a_session_keeps_its_thread():
    """As sqlite and others demand."""

    class Thread:
        def __init__(self):
            self.thread = threading.get_ident()

        def reset(self):
            return str(self.thread == threading.get_ident())

        def look(self) -> bool:
            """Look."""
            return self.thread == threading.get_ident()

    environments = Environments(Thread, timeout=60)

    async def run():
        session = await environments.open({}, seed=1)
        found = session.opening, (await session.call("look", {})).text
        await session.close()
        return found

    assert asyncio.run(run()) == ("True", "true")


def test_threads_are_used_again_but_for_one_that_hangs():
    go = threading.Event()

    class Told:
        def reset(self, hangs: bool = False):
            if hangs:
                go.wait()
            return str(threading.get_ident())

    environments = Environments(Told, timeout=60)

    async def run():
        both = [await environments.open({}, seed=1) for _ in range(2)]
        for session in both:
            await session.close()
        environments.timeout = 0.3
        with pytest.raises(EnvironmentFailed):
            await environments.open({"hangs": True}, seed=1)
        environments.timeout = 60
        later = [await environments.open({}, seed=1) for _ in range(2)]
        for session in later:
            await session.close()
        return [{session.opening for session in part} for part in (both, later)]

    before, after = asyncio.run(run())
    assert len(before) == len(after) == 2
    assert len(before & after) == 1
    idle = list(environments._local._idle)
    environments.end()
    go.set()
    for thread in idle:
        thread._thread.join(60)
        assert not thread._thread.is_alive()


def test_a_cancelled_call_gives_up_its_environment(tmp_path):
    class Slow:
        started, go = threading.Event(), threading.Event()

        def reset(self): ...

        def wait(self) -> str:
            """Wait."""
            self.started.set()
            self.go.wait()

    environments = Environments(Slow, timeout=60)

    async def run():
        session = await environments.open({}, seed=1)
        task = asyncio.ensure_future(session.call("wait", {}))
        await asyncio.to_thread(Slow.started.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        thread = session._seat._thread._thread
        await session.close()
        return thread

    assert asyncio.run(run()).is_alive()
    Slow.go.set()


def test_the_python_tool():
    environments = Environments(tools="python", timeout=60, workers=1)

    async def run(code):
        session = await environments.open({}, seed=1)
        try:
            return await session.call("python", code)
        finally:
            await session.close()

    try:
        assert [tool["function"]["name"] for tool in environments.tools("tools")] == ["python"]
        assert asyncio.run(run({"code": "print('hi')\n2 + 2"})) == Reply("hi\n4")
        assert asyncio.run(run({"code": "x = 1"})).text == "(nothing was printed)"
        failed = asyncio.run(run({"code": "def f(): 1 / 0\nf()"}))
        assert failed.error
        assert failed.text.endswith("ZeroDivisionError: division by zero")
        assert 'File "<python>", line 2' in failed.text
        assert "_run" not in failed.text
        assert "SyntaxError" in asyncio.run(run({"code": "1 +"})).text
        assert "exit code 7" in asyncio.run(run({"code": "import sys; sys.exit(7)"})).text
        assert "missing argument code" in asyncio.run(run({})).text
    finally:
        environments.end()


def test_openings():
    user = {"role": "user", "content": "Question"}
    tool = {"role": "assistant", "content": "Yes?"}
    assert opening_messages([user], None, "lightppo") == [user]
    assert opening_messages([user], "now", "lightppo")[0]["content"] == "Question\n\nnow"
    assert opening_messages([tool], "now", "lightppo")[1] == {"role": "user", "content": "now"}
    assert opening_messages([], "now", "lightppo") == [{"role": "user", "content": "now"}]
    assert opening_messages([], "now", "trl") == [{"role": "user", "content": "now"}]
    assert opening_messages([user], "now", "trl")[0]["content"] == "Questionnow"
    assert opening_messages([user], [tool], "lightppo") == [user, tool]
    assert user["content"] == "Question"


def test_names():
    assert issubclass(ToolError, Exception)
    assert issubclass(EnvFailure, Exception)
    assert math.isfinite(Reply("").reward)


def test_the_end_of_all_ends_what_waits():
    class Waits:
        async def reset(self): ...

        async def wait(self) -> str:
            """Wait."""
            await asyncio.Event().wait()

    environments = Environments(Waits, timeout=60)

    async def run():
        session = await environments.open({}, seed=1)
        waiting = asyncio.ensure_future(session.call("wait", {}))
        await asyncio.sleep(0)
        await environments.close()
        for call in (waiting, session.call("wait", {})):
            with pytest.raises(EnvironmentFailed, match="the environments were closed") as caught:
                await call
        await session.close()
        return caught.value.kind

    assert asyncio.run(run()) == "lost"


def test_an_object_that_was_never_made_is_not_closed(caplog):
    class Broken:
        closed = 0

        def __init__(self):
            raise ValueError("no")

        def reset(self): ...

        def close(self):
            Broken.closed += 1

    class Resets(Broken):
        def __init__(self): ...

        def reset(self):
            raise ValueError("no")

    for kind, closed in ((Broken, 0), (Resets, 1)):
        with pytest.raises(EnvironmentFailed, match="no"):
            asyncio.run(Environments(kind, timeout=60).open({}, seed=1))
        assert Broken.closed == closed


@pytest.mark.parametrize("column", [["Guess"], 3, ""])
def test_columns_that_route_nowhere(tmp_path, column):
    environments = Environments(f"{write(tmp_path, GUESS)}:Guess", timeout=60)
    with pytest.raises(ConfigError, match="must be one of Guess"):
        environments.route({"environment": column})
    assert environments.route({"environment": "Guess"}) == environments.route({}) == "Guess"


def test_a_sandbox_that_fails_is_a_failure_of_the_world():
    from lightppo.errors import SandboxError

    class Pool:
        def run(self, program):
            raise SandboxError("the sandbox failed twice")

        def close(self): ...

    environments = Environments(tools="python", timeout=60, sandbox=Pool)

    async def run():
        session = await environments.open({}, seed=1)
        try:
            await session.call("python", {"code": "1"})
        finally:
            await session.close()

    with pytest.raises(EnvironmentFailed, match="tool python: the sandbox failed twice") as caught:
        asyncio.run(run())
    assert (caught.value.kind, caught.value.place) == ("failure", "tool")


def test_a_machine_without_room_for_a_thread(tmp_path, monkeypatch):
    environments = Environments(f"{write(tmp_path, GUESS)}:Guess", timeout=60)

    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", start)
    with pytest.raises(EnvironmentFailed, match="no thread can be started") as caught:
        asyncio.run(environments.open({"n": 1}, seed=1))
    assert caught.value.kind == "lost"
