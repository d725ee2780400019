"""What a terminal obeys is spelled out wherever texts of servers, models and files are shown."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
from pathlib import Path

import pytest
from support.fakes import make_rollout
from support.http_server import JsonServer
from support.tiny import write_jsonl

from lightppo.__main__ import main
from lightppo.errors import RequestError, RewardError, RolloutError
from lightppo.http_client import HTTPClient
from lightppo.logging.samples import examined
from lightppo.redaction import plain
from lightppo.rewards import FunctionReward
from lightppo.trainer import run
from lightppo.trainer.evaluation import table

# A title for the window, a cleared screen, a line that is overwritten, colours by one byte, and a line turned round.
EVIL = "\x1b]0;owned\x07\x1b[2J\rgone\x9b31m\u202eback"
SPELLED = r"\x1b]0;owned\x07\x1b[2J\rgone\x9b31m\u202eback"
OBEYED = [
    chr(c)
    for c in (
        *range(0x20),
        *range(0x7F, 0xA0),
        *range(0x2028, 0x202F),
        *range(0x2066, 0x206A),
        0xDC80,
    )
]


def harmless(text: str) -> bool:
    return not {*text} & {*OBEYED} - {"\n", "\t"}


def test_what_is_spelled_out_and_what_stays():
    assert plain(EVIL) == SPELLED
    assert harmless(plain("".join(OBEYED)))
    readable = "naïve 日本語 שלום عربى 👩‍👩‍👧 \\x1b 100 %\n\tline"
    assert plain(readable) == readable
    assert plain(ValueError(3)) == "3"


@pytest.mark.parametrize("debug", [False, True])
def test_logs_and_errors_of_a_run(monkeypatch, debug):
    terminal, ours = io.StringIO(), logging.getLogger("lightppo")
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    monkeypatch.setattr(ours, "level", ours.level)  # which a run sets

    def script():
        logging.getLogger("lightppo.some").warning("a server says %s", EVIL)
        try:
            raise ValueError(EVIL)
        except ValueError as error:
            logging.getLogger("elsewhere").exception("failed")
            raise RolloutError(f"no answer: {EVIL}") from error

    with pytest.raises(SystemExit):
        run(script, "lightppo ppo", debug=debug)
    told = terminal.getvalue()
    assert f"a server says {SPELLED}\n" in told
    assert told.count(f"ValueError: {SPELLED}") == 1 + debug
    assert told.endswith(f"lightppo ppo: error: no answer: {SPELLED}\n")
    assert harmless(told)


def test_answers_of_servers():
    """Cleaned at the source too: a script may print the error itself."""
    server = JsonServer()
    server.reply = lambda path, body, n: (500, EVIL.encode())
    try:
        with pytest.raises(RequestError) as caught:
            HTTPClient(server.url).post("", {})
    finally:
        server.close()
    assert r"HTTP 500: \x1b]0;owned\x07\x1b[2J gone\x9b31m" in str(caught.value)  # in one line
    assert harmless(str(caught.value))


@pytest.mark.parametrize("ends", ["raises", "returns"])
def test_errors_of_reward_functions(ends):
    class Mine:
        def __repr__(self):
            return EVIL

    def score(queries, prompts, labels):
        if ends == "raises":
            raise ValueError(EVIL)
        return [Mine()]

    with pytest.raises(RewardError) as caught:
        FunctionReward(score).score([make_rollout([1], [2])])
    assert SPELLED in str(caught.value)
    assert harmless(str(caught.value))


def test_samples_and_evaluations_on_the_screen():
    rollout = make_rollout([1], [2], reward=1.0)
    rollout.response_text = rollout.prompt.label = rollout.prompt.text = EVIL
    rollout.extras, rollout.texts = {EVIL: 1.0}, {"pred": EVIL}
    assert examined(rollout).count(SPELLED) == 5
    assert harmless(examined(rollout))
    lines = table(
        {
            "eval/reward": 1.0,
            f"eval/{EVIL}/reward": 1.0,
            f"eval/{EVIL}/samples": 2.0,
            "eval/samples": 2.0,
        }
    )
    assert harmless("".join(lines))
    assert len({*map(len, lines)}) == 1


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def evil_run(tmp_path) -> Path:
    """The files of a run whose reward server names a metric so, and whose model answers so."""
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    numbers = {"rollout/reward": 1.0, f"eval/{EVIL}": 0.5, f"reward/{EVIL}": 1.0}
    write_jsonl(
        folder / "metrics.jsonl", [{"step": step, "time": 1e9 + step, **numbers} for step in (1, 2)]
    )
    sample = {"step": 2, "score": 1.0, "input": EVIL, "output": EVIL, "ground_truth": EVIL}
    (folder / "rollouts" / "step2.jsonl.gz").write_bytes(gzip.compress(json.dumps(sample).encode()))
    (folder / "run_config.resolved.yaml").write_text("{}\n")
    return folder


def told_by(capsys: pytest.CaptureFixture, *words: object) -> str:
    with contextlib.suppress(SystemExit):
        main([*map(str, words)])
    return "".join(capsys.readouterr())


def test_lightppo_report(evil_run, capsys, tmp_path):
    pytest.importorskip("plotly")
    told = told_by(capsys, "report", evil_run)
    assert f"\neval/{SPELLED}" in told
    assert harmless(told)
    numbers = {"step": 0, "time": 1e9, f"eval/{EVIL}": 0.5}  # of an evaluation alone
    write_jsonl(evil_run / "metrics.jsonl", [numbers])
    told = told_by(capsys, "report", evil_run)
    assert told.startswith(f"eval/{SPELLED}")
    assert harmless(told)
    (evil_run / "metrics.jsonl").write_text('{"step": "\x1b[2J"}\n')
    assert harmless(told_by(capsys, "report", evil_run))


def test_lightppo_watch(evil_run, capsys, monkeypatch):
    pytest.importorskip("plotext")
    monkeypatch.setenv("COLUMNS", "150")
    told = told_by(capsys, "watch", evil_run, "--once")
    assert told.count(SPELLED) == 3
    assert harmless(told)


def test_lightppo_diff(evil_run, capsys, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    write_jsonl(
        other / "metrics.jsonl",
        [{"step": 1, "time": 1e9, "rollout/reward": 1.0, f"reward/{EVIL}": 2.0}],
    )
    (other / "run_config.resolved.yaml").write_text(json.dumps({EVIL: EVIL}))
    told = told_by(capsys, "diff", evil_run, other)
    assert f"first number that differs: step 1, reward/{SPELLED}: 1.0 and 2.0" in told
    assert harmless(told)


@pytest.mark.parametrize("kind", ["prompts", "sft"])
def test_lightppo_data(tiny_model, tmp_path, capsys, monkeypatch, kind):
    from transformers import PreTrainedTokenizerBase

    monkeypatch.setattr(PreTrainedTokenizerBase, "decode", lambda self, ids, **_: EVIL)
    row = {"question": EVIL, "answer": EVIL, "data_source": EVIL, EVIL: EVIL}
    rows = write_jsonl(tmp_path / "rows.jsonl", [row, {"question": 3, EVIL: EVIL}])
    flags = {
        "prompts": [f"--prompt_data={rows}", "--input_key=question"],
        "sft": ["--for=sft", f"--dataset={rows}", "--input_key=question", "--output_key=answer"],
    }
    told = told_by(capsys, "data", f"--pretrain={tiny_model}", *flags[kind])
    assert f"    {SPELLED}" in told
    assert harmless(told)


@pytest.mark.parametrize("in_terminal", [True, False])
def test_lightppo_chat(tiny_model, capsys, monkeypatch, in_terminal):
    """A terminal gets the answer spelled out; a pipe gets what the model wrote."""
    from transformers import PreTrainedTokenizerBase

    monkeypatch.setattr(PreTrainedTokenizerBase, "decode", lambda self, ids, **_: f"{EVIL}\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: in_terminal)
    told = told_by(capsys, "chat", tiny_model, "--temperature", "0", "--generate_max_len", "2")
    assert (SPELLED if in_terminal else EVIL) in told
    assert harmless(told) is in_terminal
