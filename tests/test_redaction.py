"""What of a URL may be shown; and what a text, or the value of an option, shows of those in it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightppo.config import PPOConfig
from lightppo.config.supervised_options import SFTConfig
from lightppo.errors import ConfigError, StagingError
from lightppo.http_client import check_url
from lightppo.redaction import cut_urls, is_cut, shown_url, shown_value, without_secrets
from lightppo.storage import local_folder, stage_to_local

SHOWN = {
    "https://host:8/a/b.jsonl": "https://host:8/a/b.jsonl",
    "https://host/a?X-Amz-Signature=SECRET&b=1": "https://host/a?…",
    "https://me:SECRET@host/a": "https://…@host/a",
    "ftp://SECRET@host:21/a#SECRET": "ftp://…@host:21/a#…",
    "sftp://me:SE/CR?E#T@host/a": "sftp://…@host/a",  # a password that is not quoted
    "sftp://me:SE@CRET@host/a": "sftp://…@host/a",
    "http://[::1]:8000/a?SECRET": "http://[::1]:8000/a?…",
    "s3://bucket/a": "s3://bucket/a",
    "memory://a/b": "memory://a/b",
    "abfs://container@account.dfs.core.windows.net/a": "abfs://container@account.dfs.core.windows.net/a",
    "hf://datasets/org/name@main/a.jsonl": "hf://datasets/org/name@main/a.jsonl",
    "github://org:repo@main/a": "github://org:repo@main/a",
    "org/name": "org/name",
}


@pytest.mark.parametrize("url", SHOWN)
def test_what_is_shown(url):
    assert shown_url(url) == SHOWN[url]
    assert shown_url(SHOWN[url]) == SHOWN[url]  # once more changes nothing
    assert is_cut(shown_url(url)) == (url != SHOWN[url])
    assert not is_cut(url)


def test_urls_in_a_text():
    text = "FileNotFoundError: 'https://h/x?sig=SECRET'; ftp://u:SECRET@h/y, (http://h/z?SECRET). Not ?q=1 or a://"
    assert (
        without_secrets(text)
        == "FileNotFoundError: 'https://h/x?…'; ftp://…@h/y, (http://h/z?…). Not ?q=1 or a://"
    )
    assert without_secrets("https://h/a?SECRET,https://h/b?SECRET") == "https://h/a?…,https://h/b?…"


def test_values_of_options():
    assert shown_value(("https://h/a?S", "b.py", 3)) == ("https://h/a?…", "b.py", 3)
    assert shown_value("a.jsonl, https://h/a?S,s3://b/c") == "a.jsonl, https://h/a?…,s3://b/c"
    prose = "Look at https://h/a?page=1 before you answer"  # a system prompt stays what it is
    assert shown_value(prose) == prose
    assert shown_value(None) is None
    assert cut_urls(["a", "http://h/a?…"]) == ["http://h/a?…"]
    assert cut_urls("a.jsonl,ftp://…@h/a") == ["ftp://…@h/a"]


# -- an address that a run has kept in part ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option", [{"pretrain": "https://h/m?…"}, {"prompt_data": "a.jsonl,https://h/m?…"}, {"teacher_url": ["http://h?…"]},
               {"remote_rm_url": ["http://h/score?…"]}, {"save_path": "ftp://…@h/run"}]
)  # fmt: skip
def test_it_has_to_be_given_again(option):
    name = next(iter(option))
    with pytest.raises(
        ConfigError,
        match=rf"--{name} \S+…\S*: a run keeps no login and nothing after \?.*whole address",
    ):
        PPOConfig.from_flat({"pretrain": "m", "prompt_data": "p"} | option).validate()


def test_also_for_training_on_data():
    with pytest.raises(ConfigError, match=r"--dataset https://h/m\?…: a run keeps"):
        SFTConfig.from_flat(pretrain="m", dataset="https://h/m?…").validate()


def test_an_evaluation_does_not_read_the_prompts_of_training():
    asked = {
        "pretrain": "m",
        "prompt_data": "https://h/m?…",
        "eval_data": "e",
        "reward_source": ["format"],
    }
    PPOConfig.from_flat(asked | {"val_only": True}).validate()


def test_it_is_never_asked_for():
    with pytest.raises(StagingError, match="give the whole address"):
        stage_to_local("memory://…@h/m")
    with pytest.raises(ValueError, match="give the whole address"):
        check_url("http://h/score?…")


# -- where texts come out ----------------------------------------------------------------------------------------------


def test_logs_errors_and_tracebacks_of_a_run():
    """Of other libraries too, and with --debug."""
    program = (
        "import logging, sys\n"
        "from lightppo.trainer import run\n"
        "from lightppo.errors import ConfigError\n"
        "def main():\n"
        "    logging.getLogger('aiohttp').warning('GET %s', 'https://h/a?SECRET')\n"
        "    try:\n"
        "        raise OSError('https://u:SECRET@h/b')\n"
        "    except OSError as error:\n"
        "        kind = ConfigError if sys.argv[1] == 'user' else RuntimeError\n"
        "        raise kind('--pretrain https://h/c?SECRET') from error\n"
        "run(main, 'p', debug=True)\n"
    )
    for kind in ("user", "other"):
        done = subprocess.run([sys.executable, "-c", program, kind], capture_output=True, text=True)
        said = done.stdout + done.stderr
        assert done.returncode == (2 if kind == "user" else 1)
        for shown in ("GET https://h/a?…", "https://…@h/b", "https://h/c?…", "Traceback"):
            assert shown in said
        assert "SECRET" not in said


def test_mistakes_of_the_command_line(capsys):
    from lightppo.config import parse_args

    with pytest.raises(SystemExit):
        parse_args(
            ["--rollout_batch_size", "https://u:SECRET@h", "https://h/?SECRET", "--pretrain", "m"]
        )
    said = capsys.readouterr().err
    assert "https://…@h" in said
    assert "SECRET" not in said


def test_folders_of_other_logins_are_others_and_have_no_login_in_their_names():
    mine, yours = (local_folder(f"ftp://{login}@host/run") for login in ("SECRET", "SECRET2"))
    assert mine != yours != local_folder("ftp://host/run")
    assert "SECRET" not in f"{mine} {yours} {local_folder('http://host/run?SECRET')}"
