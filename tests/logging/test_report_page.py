"""Reports from the files of a run."""

from __future__ import annotations

import base64
import gzip
import json
import random
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml
from support.runs import fitted

from lightppo import storage
from lightppo.config import PPOConfig
from lightppo.config.supervised_options import COMMANDS, SFTConfig
from lightppo.errors import ConfigError, ReportError
from lightppo.logging.report_page import (
    KINDS,
    PANELS,
    SFT_PANELS,
    before_and_after,
    command_of,
    draw_training,
    evaluations,
    main,
    plot_training,
    read_jsonl,
    read_metrics,
    series,
    summary,
    write_report,
)
from lightppo.logging.run_folder import write_run_config
from lightppo.metric_names import TIMED

ROWS = [
    {"step": 0, "time": 0.0, "eval/accuracy": 0.5, "eval/reward": 0.4},
    {
        "step": 1,
        "time": 1.0,
        "rollout/reward": 0.5,
        "rollout/kl": 0.0,
        "rollout/response_length": 3.0,
    },
    {
        "step": 2,
        "time": 2.0,
        "rollout/reward": 0.6,
        "rollout/kl": None,
        "rollout/response_length": 3.5,
    },
    {
        "step": 3,
        "time": 3.0,
        "rollout/reward": 0.7,
        "rollout/kl": 0.2,
        "rollout/response_length": 4.0,
    },
    {"step": 3, "time": 3.5, "eval/accuracy": 0.9, "eval/reward": 0.8},
]


@pytest.fixture(autouse=True)
def pictures() -> None:
    """Are drawn."""


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_rows_come_back(tmp_path):
    path = write(tmp_path / "metrics.jsonl", *[json.dumps(row) for row in ROWS])
    assert read_metrics(path) == ROWS


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"step": 1}', '{"step": 2, "rew'], r"metrics\.jsonl, line 2:.*JSON"),
        (['{"step": 1}', "[1, 2]"], r"metrics\.jsonl, line 2:.*list"),
        (['{"step": 1}', '{"time": 2.0}'], r'metrics\.jsonl, line 2:.*"step"'),
        ([], r"metrics\.jsonl"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path, lines, message):
    with pytest.raises(ReportError, match=message):
        read_metrics(write(tmp_path / "metrics.jsonl", *lines))


def test_a_last_row_that_is_not_whole_is_left_out(tmp_path):
    path = write(tmp_path / "metrics.jsonl", '{"step": 1}')
    path.write_text(path.read_text() + '{"step": 2, "rew')
    assert read_metrics(path) == [{"step": 1}]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ReportError, match=r"none\.jsonl"):
        read_jsonl(tmp_path / "none.jsonl")


def test_series_leaves_out_what_was_not_logged_or_not_finite():
    assert series(ROWS, "rollout/kl") == ([1, 3], [0.0, 0.2])
    assert series(ROWS, "train/policy_loss") == ([], [])


def test_evaluations_in_order():
    assert [row["step"] for row in evaluations(ROWS)] == [0, 3]


def test_one_evaluation_is_not_a_comparison():
    with pytest.raises(ReportError, match="--val_before_train"):
        evaluations(ROWS[:-1])


def test_panels_show_the_metrics():
    figure = draw_training(ROWS, title="a run")
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert list(panels) == [panel.title for panel in PANELS]

    def drawn(title: str) -> dict[str, tuple[list, list]]:
        lines = panels[title].lines
        return {
            line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in lines
        }

    assert drawn("reward") == {
        "training prompts": ([1, 2, 3], [0.5, 0.6, 0.7]),
        "held-out prompts": ([0, 3], [0.4, 0.8]),
    }
    assert drawn("KL to the reference (nats per token)") == {
        "training prompts": ([1, 3], [0.0, 0.2])
    }
    assert drawn("accuracy") == {"held-out prompts": ([0, 3], [0.5, 0.9])}
    assert drawn("response length (tokens)") == {"training prompts": ([1, 2, 3], [3.0, 3.5, 4.0])}


@pytest.mark.parametrize(
    ("names", "size"),
    [
        ({"rollout/reward": "reward"}, (550, 350)),
        ({"rollout/reward": "reward", "rollout/response_length": "response length (tokens)"}, (1100, 350)),
        ({"rollout/reward": "reward", "rollout/kl": "KL to the reference (nats per token)",
          "eval/response_length": "response length (tokens)"}, (1650, 350)),
        ({"train/loss": "loss (nats per token)"}, (550, 350)),
    ],
)  # fmt: skip
def test_a_picture_has_no_empty_part(names, size, tmp_path):
    """Most runs have no accuracy, and a run without reference no KL."""
    rows = [{"step": n, "time": 0.0, **dict.fromkeys(names, 1.0 / n)} for n in range(1, 5)]
    figure = draw_training(rows, "a run")
    assert [axes.get_title() for axes in figure.axes] == list(names.values())
    assert all(axes.lines for axes in figure.axes)
    assert figure.get_suptitle() == "a run"
    assert tuple(map(int, figure.get_size_inches() * 100)) == size


def test_where_nothing_was_logged_the_picture_says_so():
    (axes,) = draw_training([{"step": 1, "time": 0.0}]).axes
    assert [text.get_text() for text in axes.texts] == ["not logged"]


def test_the_picture_of_a_run_names_it(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(
        "lightppo.logging.report_page.plot_training", lambda rows, file, title: titles.append(title)
    )
    (tmp_path / "gspo").mkdir()
    write(tmp_path / "gspo" / "metrics.jsonl", *map(json.dumps, ROWS))
    summary(tmp_path / "gspo" / "metrics.jsonl")
    assert titles == ["gspo"]


def test_png(tmp_path):
    plot_training(ROWS, tmp_path / "plot.png")
    data = (tmp_path / "plot.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    # width and height in the header: 11 x 7 inches at 100 dots
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (1100, 700)


def test_matplotlib_is_loaded_only_to_draw():
    code = "import sys, lightppo.logging.report_page; sys.exit(any(m in sys.modules for m in ('matplotlib', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_table_has_means_of_tenths_and_the_best_step():
    rows = [
        {"step": n, "rollout/reward": n / 100, "rollout/kl": 0.1, "train/loss": 1.0 / n}
        for n in range(1, 21)
    ]
    rows = [{"step": 0, "eval/reward": 0.25}, *rows, {"step": 20, "eval/reward": 0.75}]
    header, *lines = before_and_after(rows).split("\n")
    assert header.split() == ["first", "last", "best", "steps"]
    assert [line.split() for line in lines] == [
        ["eval/reward", "0.25", "0.75", "0.75", "0", "→", "20,", "best", "at", "20"],
        # steps 1 and 2, 19 and 20
        ["rollout/reward", "0.015", "0.195", "0.2", "1", "→", "20,", "best", "at", "20"],
        ["rollout/kl", "0.1", "0.1", "1", "→", "20"],
        ["train/loss", "0.75", "0.05132", "0.05", "1", "→", "20,", "best", "at", "20"],
    ]


def test_supervised_training_has_panels_of_its_own(tmp_path):
    rows = [
        {"step": n, "time": 0.0, "train/loss": 1 / n, "train/grad_norm": 0.5} for n in range(1, 6)
    ]
    assert [axes.get_title() for axes in draw_training(rows).axes] == [
        panel.title for panel in SFT_PANELS
    ]


def test_the_summary_of_a_run_without_rows_without_packages_or_room(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    assert "none.jsonl" in summary(tmp_path / "none.jsonl")
    rows = [json.dumps({"step": n, "rollout/reward": 0.5}) for n in range(1, 10)]
    assert "curves" not in summary(write(path, *rows[:2]))
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    write(path, *rows)
    assert summary(path).endswith(f"\ncurves: {tmp_path}/plot.png\nreport: {tmp_path}/report.html")
    for name in ("plot.png", "report.html"):
        (tmp_path / name).unlink()
        (tmp_path / name).mkdir()
    told = summary(path).splitlines()
    assert [line.partition(":")[0] for line in told[-2:]] == ["no picture", "no report"]
    assert any(line.startswith("rollout/reward") for line in told)
    with monkeypatch.context() as broken:
        broken.setattr("lightppo.logging.report_page.write_report", lambda *_: {}["loss"])
        # the run is trained and saved all the same
        assert "no report: KeyError: 'loss'" in summary(path)
    for name in ("matplotlib", "matplotlib.backends.backend_agg", "plotly", "plotly.offline"):
        monkeypatch.setitem(sys.modules, name, None)
    remedy = "pip install 'lightppo[plots]'"
    assert summary(path).endswith(f"\nno picture: {remedy}\nno report: {remedy}")


@pytest.mark.usefixtures("world")
def test_what_a_run_says(make_config, tmp_path, capsys, assets):
    options = {
        "eval_data": assets["prompt_data"],
        "save_steps": 2,
        "profile_steps": [2],
        "num_examine": 1,
    }
    options["old_log_probs"] = "forward"
    fitted(make_config(total_training_steps=4, num_episodes=2, actor_learning_rate=1e-4, **options))
    lines, run = capsys.readouterr().out.splitlines(), tmp_path / "run"
    text = "\n".join(lines)
    assert "  training: " in text
    assert "gamma=" not in text
    assert re.search(
        r"^models: actor [\d,]+ parameters, critic [\d,]+ parameters, reference", text, re.MULTILINE
    )
    steps = [line for line in lines if line.startswith("step ")]
    pattern = r"step (\d)/4 · reward [\d.]+ · kl [-\de.]+ · entropy [\d.]+ · len [\d.]+ · [\d.]+ s · ETA \d+:\d\d"
    assert [re.fullmatch(pattern, line)[1] for line in steps] == ["1", "2", "3", "4"]
    start = next(i for i, line in enumerate(lines) if line.startswith("[step 1] prompt: "))
    assert [line.split()[0] for line in lines[start + 1 : start + 3]] == ["answer:", "label"]
    end = lines[lines.index("finished: 4 steps") :]
    assert any(line.startswith("eval/accuracy ") for line in end)
    assert {f"curves: {run}/plot.png", f"report: {run}/report.html"} < set(end)
    page = (run / "report.html").read_text()
    data = json.loads(embedded(page, "data"))
    assert data["runs"][0]["samples"] == {"eval": [0, 3, 4], "rollouts": [1, 2, 3, 4]}
    told = set(data["runs"][0]["set"])
    assert {"pretrain", "profile_steps", "save_path", "old_log_probs"} < told
    # the default; what None stood for
    assert not told & {"num_examine", "critic_pretrain", "gamma"}
    assert data["runs"][0]["facts"]["ranks"] == "1"
    assert [json.loads(line)["step"] for line in embedded(page, "rollouts-0-2").splitlines()] == [
        2
    ] * 4
    assert (
        f"files: model and logs in {run}, checkpoints in {tmp_path}/ckpt, profiles in {run}/profile"
        in end
    )
    assert any(line.startswith("generate: ") and f"'{run}'" in line for line in end)
    assert any(
        line.startswith(f"evaluate: lightppo eval --config {run}/run_config.yaml ") for line in end
    )
    assert "go on: the same command with larger limits than --total_training_steps 4" in end
    assert (run / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (run / "profile").iterdir()] == ["step2_rank0.json.gz"]
    rows = read_metrics(run / "metrics.jsonl")
    timed = {name for row in rows for name in row if name.startswith("perf/time_")}
    assert timed >= {
        f"perf/time_{part}" for part in TIMED.keys() - {"teacher"} | {"eval", "save", "step"}
    }
    for row in rows:
        assert all(value > 0 for name, value in row.items() if name in timed)
        if "perf/time_step" in row:
            assert (
                row["perf/time_actor_update"] + row["perf/time_critic_update"]
                <= row["perf/time_train"]
            )
            assert (
                sum(row[f"perf/time_{p}"] for p in ("old_log_probs", "reference", "values"))
                <= row["perf/time_experience"]
            )


@pytest.mark.usefixtures("world")
def test_a_step_to_profile_that_never_comes_is_refused(make_config):
    with pytest.raises(ConfigError, match="--profile_steps 9: the run has 3 steps"):
        fitted(make_config(profile_steps=[1, 9], actor_learning_rate=0.0))


# -- the page ----------------------------------------------------------------------------------------------------------

EVIL = '<script>window.evil = 1</script><img src=x onerror="window.evil = 2"> </pre>'


def embedded(page: str, name: str) -> str:
    """What the page holds under a name."""
    content = re.search(f'<script type="application/gzip" id="{name}">([^<]*)</script>', page)[1]
    return gzip.decompress(base64.b64decode(content)).decode()


def sample(step: int, index: int, rng: random.Random, length: int) -> dict[str, Any]:
    text = [rng.choice((" one", " and", " two", "\n")) for _ in range(length)]
    numbers = lambda scale: [round(rng.gauss(0, scale), 4) for _ in text]  # noqa: E731
    tokens = {"text": text, "log_prob": numbers(1), "rollout_log_prob": numbers(1), "kl": numbers(0.1),
              "entropy": [abs(x) for x in numbers(1)], "advantage": numbers(2)}  # fmt: skip
    row = {
        "step": step,
        "index": index // 2,
        "sample_index": index % 2,
        "data_source": "sums",
        "finish_reason": "stop",
    }
    row |= {"input": f"{index} + 1 =", "output": "".join(text), "ground_truth": str(index + 1)}
    row |= {"score": round(rng.random(), 3), "response_length": length, "extras": {"accuracy": 1.0}}
    return row | {"tokens": tokens}


def make_run(
    folder: Path, steps: int, samples: int, length: int = 8, seed: int = 0, **options: Any
) -> Path:
    """The files of a run that never was."""
    rng = random.Random(seed)
    (folder / "rollouts").mkdir(parents=True)
    rows = []
    for step in range(1, steps + 1):
        rows.append(
            {
                "step": step,
                "time": 1.7e9 + step,
                "rollout/reward": rng.random(),
                "rollout/kl": step / 100,
            }
        )
        rows[-1] |= {
            "train/entropy": 1 / step,
            "train/clip_ratio": 0.1,
            "rollout/response_length": 8.0 * step,
        }
        rows[-1] |= {
            "perf/time_step": 2.0,
            "perf/time_rollout": 1.0,
            "perf/time_train": 0.5,
            "train/own": 3.0,
        }
        rows[-1] |= {
            "rollout/response_clip_ratio": 0.6,
            "alarm/truncated": float(step in (3, 4, 6)),
        }
        lines = [json.dumps(sample(step, i, rng, length)) + "\n" for i in range(samples)]
        (folder / "rollouts" / f"step{step}.jsonl.gz").write_bytes(
            gzip.compress("".join(lines).encode(), 1)
        )
    rows += [
        {"step": step, "time": 1.7e9 + step, "eval/accuracy": step / 10} for step in (1, steps)
    ]
    write(folder / "metrics.jsonl", *map(json.dumps, rows))
    options = {"save_path": str(folder), "pretrain": "tiny", "actor_learning_rate": 1e-6} | options
    (folder / "run_config.resolved.yaml").write_text(yaml.safe_dump(options))
    start = {
        "step": 0,
        "time": 1.7e9,
        "ranks": 2,
        "device": "cpu",
        "content": {},
        "versions": {"torch": f"2.{seed}"},
    }
    write(folder / "run_metadata.jsonl", json.dumps(start))
    return folder


def rows_of(run: Path, step: int) -> list[dict[str, Any]]:
    with gzip.open(run / "rollouts" / f"step{step}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="the page is looked at with playwright"
    )
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(
            f"the page is looked at with a browser: none of {', '.join(names)} is installed"
        )
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path, args=FLAGS)


@pytest.fixture
def opened(browser) -> Iterator[Any]:
    """``opened(file)``: the page, without network; at the end, no error was told and nothing was asked for."""
    context = browser.new_context(offline=True, viewport={"width": 1400, "height": 1000})
    page, told, asked = context.new_page(), [], []
    page.on("pageerror", lambda error: told.append(error.stack or str(error)))
    page.on("console", lambda message: told.append(message.text))
    page.on("request", lambda request: asked.append(request.url))

    def open_page(path: Path) -> Any:
        page.goto(f"file://{path}")
        page.wait_for_selector("html[data-ready=curves]", timeout=60_000)
        return page

    yield open_page
    context.close()
    assert (told, len(asked)) == ([], 1)


def drawn(page: Any, title: str) -> list[dict[str, Any]]:
    """The curves of a chart."""
    chart = page.locator(f"figure:has(h3:text-is({json.dumps(title)}))")
    chart.scroll_into_view_if_needed()
    chart.locator(".main-svg").first.wait_for()
    traces = "p => p.data.map(t => ({name: t.name, x: [...t.x], y: [...t.y], stack: t.stackgroup, run: t.meta}))"
    return chart.locator(".plot").evaluate(traces)


def listed(page: Any) -> list[list[str]]:
    """Score, answer and length of each sample in the list."""
    return page.eval_on_selector_all(
        "#list button", "all => all.map(b => [...b.children].map(c => c.textContent))"
    )


def shown_text(page: Any, selector: str, text: str) -> None:
    """Waits until it is shown."""
    page.wait_for_function(
        "([s, t]) => document.querySelector(s).textContent.includes(t)", arg=[selector, text]
    )


def test_the_page_shows_what_is_in_the_files(tmp_path, opened):
    """One page for all of this: a browser takes seconds to open it."""
    run = make_run(tmp_path / "<b>run", 6, 4)
    main([str(run)])
    page = opened(run / "report.html")
    check_search(page)
    check_samples(page, run)
    check_curves_alarms_evaluations_and_options(page, run)


def check_curves_alarms_evaluations_and_options(page: Any, run: Path) -> None:
    rows = read_metrics(run / "metrics.jsonl")[:6]
    assert page.locator(".run b").all_inner_texts() == ["<b>run"]
    (reward,) = drawn(page, "Reward")
    assert (reward["x"], reward["y"]) == (
        [1, 2, 3, 4, 5, 6],
        pytest.approx([r["rollout/reward"] for r in rows], 1e-5),
    )
    phases = {trace["name"]: trace["y"] for trace in drawn(page, "Seconds of a step by phase")}
    assert phases == {"rollout": [1.0] * 6, "train": [0.5] * 6, "other": [0.5] * 6}
    cut = page.locator("figure:has-text('Responses cut') .plot")
    drawn(page, "Responses cut by the limit, share")
    assert cut.evaluate("p => p.layout.shapes.map(s => [s.x0, s.x1])") == [[2.5, 4.5], [5.5, 6.5]]
    assert "truncated · steps 3 to 4, 6" in page.inner_text("#alarms")
    assert page.locator("#evaluations tr").all_inner_texts() == ["step\t1\t6", "accuracy\t0.1\t0.6"]
    options = page.locator("#options tr").all_inner_texts()
    assert "--pretrain\ttiny" in options
    page.select_option("#metric", "train/own")
    assert drawn(page, "train/own")[0]["y"] == [3.0] * 6
    page.fill("#smooth", "0.9")
    assert [trace["y"][0] for trace in drawn(page, "Entropy, nats per token")] == [
        1,
        pytest.approx(1),
    ]


EVIL = "</script><img src=x onerror=alert(1)><b>"


def played(step: int) -> dict[str, Any]:
    """An episode of two turns, as ``logging/samples.py`` writes it; what comes from outside is hostile."""
    text = ["call", " it", EVIL, "\n", "the", " end"]
    call = {"type": "function", "function": {"name": "look", "arguments": {"x": EVIL}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"Which? {EVIL}"},
        {"role": "assistant", "content": "call it", "tool_calls": [call]},
        {"role": "tool", "name": "look", "content": EVIL},
        {"role": "assistant", "content": "the end"},
    ]
    turns = [
        {"end": 1, "reward": 0.0, "calls": 1, "errors": 1, "seconds": 0.25},
        {"end": 5, "reward": 1.0, "calls": 0, "errors": 0, "seconds": 0.0},
    ]
    advantage = [1.0, 1.0, 0.0, 0.0, -1.0, -1.0]
    row = sample(step, 0, random.Random(step), len(text)) | {"messages": messages, "turns": turns}
    row["extras"] = {"turns": 2.0, "stop_reason": "answer"}
    row["output"] = "the end"
    row["tokens"] = {"text": text, "advantage": advantage, "trained": [1, 1, 0, 0, 1, 1]}
    return row


def run_with_episodes(folder: Path) -> Path:
    run = make_run(folder, 3, 2)
    line = json.dumps(played(3)) + "\n"
    (run / "rollouts" / "step3.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    (run / "eval").mkdir()
    row = played(3)
    talk = {"conversation": json.dumps(row["messages"])}
    evaluated = {key: row[key] for key in ("score", "data_source", "response_length", "index")}
    evaluated |= {"prompt": "Which?", "response": "the end", "label": None, "finish_reason": "stop"}
    line = json.dumps(evaluated | {"extras": row["extras"] | talk})
    write(run / "eval" / "step3.jsonl", line)
    return run


class Tags(HTMLParser):
    """The tags of a page, and its blocks of data by their ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.data: dict[str, str] = {}
        self._id: str | None = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        self._id = dict(attributes).get("id") if tag == "script" else None

    def handle_endtag(self, tag):
        self._id = None

    def handle_data(self, data):
        if self._id:
            self.data[self._id] = data


def test_what_comes_from_outside_is_data_in_the_file(tmp_path):
    """No tag of the page is one of a sample's; the episode is there as it was recorded."""
    run = run_with_episodes(tmp_path / "run")
    main([str(run)])
    page = Tags((run / "report.html").read_text())
    assert page.tags["img"] == 0
    (row,) = gzip.decompress(base64.b64decode(page.data["rollouts-0-3"])).decode().splitlines()
    assert json.loads(row)["messages"] == played(3)["messages"]
    assert json.loads(row)["turns"] == played(3)["turns"]


def test_an_episode_is_shown_as_turns_calls_and_observations(tmp_path, opened):
    run = run_with_episodes(tmp_path / "run")
    main([str(run)])
    page = opened(run / "report.html")
    shown_text(page, "#tokens", "Turn 2")
    titles = page.locator("#tokens h4").all_inner_texts()
    assert "reward 1" in titles[1]
    assert "0.25 s in the environment" in titles[0]
    assert "1 wrong calls" in titles[0]
    assert page.locator("#tokens .said").all_text_contents() == ["call it", "the end"]
    assert page.locator("#tokens .observed").all_text_contents() == [f"{EVIL}↵\n"]
    assert page.locator("#tokens .call.wrong").all_text_contents() == [
        f"look({json.dumps({'x': EVIL}, separators=(',', ':'))})"
    ]
    assert page.locator("#prompt .opening").all_text_contents() == ["Be brief.", f"Which? {EVIL}"]
    assert page.locator("#tokens small:text-is('tool look')").count() == 1
    assert page.locator("main img").count() == 0
    colours = page.eval_on_selector_all(
        "#tokens span[data-i]", "all => all.map(s => s.style.background)"
    )
    colours = ["" if "0.000" in one else one for one in colours]
    assert ["high" in one for one in colours] == [True, True, False, False, False, False]
    assert ["low" in one for one in colours] == [False] * 4 + [True, True]
    grey = page.evaluate("() => getComputedStyle(document.querySelector('.observed span')).color")
    said = page.evaluate("() => getComputedStyle(document.querySelector('.said span')).color")
    assert grey != said
    page.hover("#tokens span[data-i='4']")
    assert '"the"' in page.locator("#tip").inner_text()
    # an evaluation has no tokens: its conversation is shown by its messages
    page.select_option("#kind", "eval")
    page.wait_for_function("() => !document.querySelector('#tokens span[data-i]')")
    assert page.locator("#tokens .said").all_text_contents() == ["call it", "the end"]
    assert page.locator("#tokens .observed").all_text_contents() == [EVIL]
    assert page.locator("#tokens .call").count() == 1
    assert not page.locator("#facts span:has-text('conversation')").count()


# The samples of the other step are not there yet when those of the old one are sorted and pointed at.
BOTH_AT_ONCE = """() => {
  for (const [id, chosen] of [["step", "2"], ["sort", "prompt+"]]) {
    document.getElementById(id).value = chosen;
    document.getElementById(id).dispatchEvent(new Event("change"));
    document.querySelector("#tokens span").dispatchEvent(new Event("mouseover", {bubbles: true}));
  }
}"""


def check_samples(page: Any, run: Path) -> None:
    """By step, score and length; their colours."""
    by_score = sorted(rows_of(run, 6), key=lambda row: -row["score"])
    assert [float(score) for score, *_ in listed(page)] == [row["score"] for row in by_score]
    page.select_option("#sort", "score+")
    assert [float(score) for score, *_ in listed(page)] == [row["score"] for row in by_score[::-1]]
    page.evaluate(BOTH_AT_ONCE)
    row = rows_of(run, 2)[0]
    shown_text(page, "#prompt", row["input"])
    assert page.locator("#tokens").text_content() == row["output"].replace("\n", "↵\n")
    facts = page.locator("#facts span").all_inner_texts()
    assert {f"score {row['score']}", "label 1", "source sums", "accuracy 1", "ended by stop"} < set(
        facts
    )
    modes = page.locator("#modes button").all_inner_texts()
    assert modes == ["advantage", "ratio trainer/engine", "KL", "entropy", "surprise"]
    assert page.locator("#sample h3 >> nth=2").inner_text() == "2 answers to this prompt"
    page.click("#modes button:text-is('KL')")
    colours = page.eval_on_selector_all("#tokens span", "all => all.map(s => s.style.background)")
    assert ["--low" in c for c in colours if "0.000" not in c] == [x < 0 for c, x in zip(colours, row["tokens"]["kl"])
                                                                  if "0.000" not in c]  # fmt: skip
    page.hover("#tokens span >> nth=1")
    assert f"kl               {row['tokens']['kl'][1]}" in page.inner_text("#tip")
    page.focus("#tokens")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert f"entropy          {row['tokens']['entropy'][2]}" in page.inner_text("#tip")
    page.fill("#find", rows_of(run, 2)[3]["input"])
    assert len(listed(page)) == 1
    page.fill("#find", "")
    page.focus("#list button >> nth=0")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#prompt") == rows_of(run, 2)[1]["input"]
    page.click("#after")
    page.wait_for_function("document.querySelector('#step').value === '3'")


def check_search(page: Any) -> None:
    """One without a hit says so, and the next one works."""
    before = page.text_content("#sample")
    page.fill("#find", "nowhere <b>")
    shown_text(page, "#sample", "No sample of this step has this text: nowhere <b>")
    assert listed(page) == []
    assert page.text_content("#list") == "no sample"
    assert page.text_content("#count").startswith("0 of 4 samples")
    page.fill("#find", "")
    shown_text(page, "#count", "4 of 4 samples")
    assert page.text_content("#sample") == before
    assert page.locator("#list [aria-current=true]").count() == 1


def test_a_page_of_training_on_data(tmp_path, opened):
    """Its own defaults are not shown as set, and no samples are promised, of which it has none."""
    config = SFTConfig.from_flat(
        pretrain="tiny", dataset="rows.jsonl", max_steps=4, save_path=str(tmp_path / "sft")
    )
    write_run_config(config)
    rows = [
        {"step": n, "time": 1.7e9 + n, "train/loss": 1 / n, "train/grad_norm": 0.5}
        for n in range(1, 5)
    ]
    write(tmp_path / "sft" / "metrics.jsonl", *map(json.dumps, rows))
    write_report([tmp_path / "sft" / "metrics.jsonl"], tmp_path / "page.html")
    page = opened(tmp_path / "page.html")
    assert page.is_hidden("#rollouts")
    assert "samples" not in page.inner_text("main").lower()
    assert "Dragging zooms all curves" in page.inner_text("#curves")
    assert page.text_content("#options summary") == "options that were set (4)"
    told = page.text_content("#options")
    assert all(f"--{name}" in told for name in ("pretrain", "dataset", "max_steps", "save_path"))
    assert f"lightppo sft --config {tmp_path}/sft/run_config.yaml" in told


@pytest.mark.parametrize("kind", [PPOConfig, *COMMANDS.values()])
def test_the_command_of_a_run_is_known_by_its_options(kind):
    options = kind().flat()
    command = next(name for name, known in KINDS.items() if known is kind)
    assert command_of(options) == command
    options.pop("seed")  # of an older version
    assert command_of(options | {"an_older_option": 1}) == command


def test_what_looks_like_html_is_shown_as_text(tmp_path, opened):
    run = make_run(tmp_path / "run", 3, 1)
    row = rows_of(run, 3)[0] | {
        "input": EVIL,
        "output": EVIL,
        "ground_truth": EVIL,
        "data_source": EVIL,
    }
    row |= {"extras": {EVIL: EVIL, "nan": float("nan")}, "finish_reason": EVIL}
    row["tokens"]["text"][0] = EVIL
    row["tokens"]["kl"][0] = None
    (run / "rollouts" / "step3.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    (run / "eval").mkdir()
    of_evaluation = {"prompt": EVIL, "response": EVIL, "label": None, "score": None, "data_source": "x", "index": 0,
                     "response_length": 3, "finish_reason": "stop", "extras": {}}  # fmt: skip
    write(run / "eval" / "step3.jsonl", json.dumps(of_evaluation))
    (run / "run_config.resolved.yaml").write_text(
        yaml.safe_dump({"pretrain": EVIL, "save_path": str(run)})
    )
    main([str(run)])
    page = opened(run / "report.html")
    assert page.inner_text("#prompt") == EVIL
    assert EVIL in page.locator("#tokens").text_content()
    assert page.inner_text("#facts").count(EVIL) == 5
    assert any(EVIL in text for text in page.locator("#options td").all_inner_texts())
    page.select_option("#kind", "eval")
    page.wait_for_selector("#tokens:not(:has(span))")
    assert page.inner_text("#tokens") == EVIL
    assert page.locator("#sample > *").all_inner_texts()[1:] == ["Prompt", EVIL, "Answer", EVIL]
    assert page.evaluate("window.evil") is None


def test_runs_beside_one_another(tmp_path, opened, monkeypatch, capsys):
    """Metrics and options of the first run are called as what every object of the browser has: of the second run, which
    lacks them, nothing may be found by that name."""
    names = [
        "__proto__",
        "constructor",
        "toString",
        "hasOwnProperty",
        "eval/__proto__",
        "train/constructor",
    ]
    changed = {"actor_learning_rate": 2e-6, "temperature": 0.5}
    runs = [make_run(tmp_path / "a", 3, 2), make_run(tmp_path / "b", 3, 2, seed=1, **changed)]
    rows = [
        {"step": step, "time": 1e9 + step, **dict.fromkeys(names, 7.0 + step)} for step in (1, 2)
    ]
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    with (runs[0] / "run_config.resolved.yaml").open("a") as file:
        yaml.safe_dump({"constructor": "mine", "__proto__": "mine too"}, file)
    monkeypatch.chdir(tmp_path)
    main([str(run) for run in runs])
    assert capsys.readouterr().out.splitlines()[-1] == "report.html"
    page = opened(tmp_path / "report.html")
    assert set(names[:4]) <= set(
        page.eval_on_selector_all("#metric option", "all => all.map(o => o.value)")
    )
    for name in names[:4]:
        page.select_option("#metric", name)
        assert [(curve["run"], curve["y"]) for curve in drawn(page, name)] == [(0, [8.0, 9.0])]
    assert any("__proto__\t8" in text for text in page.locator("#evaluations tr").all_inner_texts())
    told = page.locator("#options .scroll >> nth=0").locator("tr").all_inner_texts()
    assert sorted(told) == ["\ta\tb", "__proto__\tmine too\t–", "actor_learning_rate\t0.000001\t0.000002",
                            "constructor\tmine\t–", f"save_path\t{runs[0]}\t{runs[1]}", "temperature\t–\t0.5"]  # fmt: skip
    assert [(trace["name"], trace["run"]) for trace in drawn(page, "Reward")] == [
        ("a training", 0),
        ("b training", 1),
    ]
    assert "torch\t2.0\t2.1" in page.locator("#options tr").all_inner_texts()
    page.select_option("#of-run", "1")
    expected = max(rows_of(runs[1], 3), key=lambda row: row["score"])
    page.wait_for_function(
        "t => document.querySelector('#facts').textContent.includes(t)",
        arg=f"score {expected['score']}",
    )
    assert page.inner_text("#prompt") == expected["input"]


def test_ten_thousand_samples_open(tmp_path, opened):
    run = make_run(tmp_path / "run", 100, 100, length=4)
    main([str(run)])
    page = opened(run / "report.html")  # docs/report.md has the seconds
    assert page.inner_text("#count").startswith("100 of 100")
    page.select_option("#step", "50")
    shown_text(page, "#facts", f"score {max(row['score'] for row in rows_of(run, 50))}")


@pytest.mark.parametrize("scheme", ["file", "memory", "http"])
def test_a_run_at_a_url(tmp_path, monkeypatch, capsys, scheme):
    """Its records are brought, and go; the page lies here, beside the run where that is a folder of this machine."""
    run = make_run(tmp_path / "runs" / "a", steps=3, samples=2)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "large").write_text("not brought")
    monkeypatch.setenv("LIGHTPPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(storage, "_apart", None)
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(handler.func, "log_message", lambda *_: None)
        http = f"http://127.0.0.1:{server.server_port}/runs/a"
        url = {"file": f"file://{run}", "memory": "memory://runs/a", "http": http}[scheme]
        if scheme == "memory":
            fsspec.filesystem("memory").put(f"{run}/", "/runs/a", recursive=True)
        main([url])
        server.shutdown()
    page = (run if scheme == "file" else here) / "report.html"
    data = json.loads(embedded(page.read_text(), "data"))
    assert [one["name"] for one in data["runs"]] == ["a"]
    assert set(data["runs"][0]["samples"]) == {"rollouts"}
    assert data["runs"][0]["series"]["rollout/reward"][0] == [1, 2, 3]
    assert capsys.readouterr().out.splitlines()[-1] == str(page if scheme == "file" else page.name)
    assert scheme == "file" or not list(storage.local_folder(url).rglob("large"))
    assert not (tmp_path / "cache").exists()


def test_samples_beyond_the_room_are_left_out_evenly(tmp_path):
    run, out = make_run(tmp_path / "run", 10, 2), tmp_path / "report.html"
    data = tmp_path / "data"
    data.mkdir()
    (data / "step11.jsonl").write_text(json.dumps({"score": 1.0}) + "\n")  # --record_samples 0
    (run / "run_config.resolved.yaml").write_text(
        yaml.safe_dump({"save_path": str(run), "rollout_data_dir": str(data)})
    )
    sizes = [path.stat().st_size for path in (run / "rollouts").iterdir()]

    def steps(megabytes: float) -> list[int]:
        write_report([run / "metrics.jsonl"], out, megabytes)
        (told,) = json.loads(embedded(out.read_text(), "data"))["runs"]
        assert told["left_out"] == 11 - len(told["samples"]["rollouts"])
        return told["samples"]["rollouts"]

    assert steps(1.0) == list(range(1, 12))
    assert steps(sum(sizes) * 0.7 / 1e6) == [1, 3, 5, 7, 9, 11]
    assert steps(0.0) == [11]
    assert json.loads(embedded(out.read_text(), "rollouts-0-11")) == {"score": 1.0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], r"none/metrics\.jsonl: cannot be read"),
        (["run", "run", "--picture", "x.png"], "--picture shows one run"),
        (["run", "--rollouts_mb", "-1"], "--rollouts_mb must be"),
        (["run", "--out", "no/such/folder.html"], "No such file"),
    ],
)
def test_mistakes_of_the_command_are_named(tmp_path, monkeypatch, capsys, words, message):
    make_run(tmp_path / "run", 1, 1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_the_command_says_what_to_install(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run", 1, 1)
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(SystemExit) as stop:
        main([str(run)])
    assert (stop.value.code, capsys.readouterr().err) == (
        0,
        "no report: pip install 'lightppo[plots]'\n",
    )
