"""How servers are started, and who may ask them."""

import asyncio
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from lightppo.rollout.vllm.serving import (
    KeyGate,
    serve,
    server_command,
    server_environment,
    socket_folder,
)

REPO = Path(__file__).parents[3]


@pytest.fixture
def installed(monkeypatch):
    """The newest vLLM is there, whatever is installed."""
    monkeypatch.setattr(
        "lightppo.rollout.vllm.serving.importlib.util.find_spec", lambda name: object()
    )
    monkeypatch.setattr("lightppo.rollout.vllm.versions.release_of", lambda package: None)


@pytest.fixture
def gpu(monkeypatch):
    def there(is_there):
        monkeypatch.setattr("torch.cuda.is_available", lambda: is_there)

    there(True)
    return there


def test_the_command_has_what_pushes_need(installed, gpu):
    command = server_command("model", "127.0.0.1", 8000, ["--dtype", "float32"])
    assert command[:3] == [sys.executable, "-m", "lightppo.rollout.vllm.serving"]
    assert command[3:].count("--enable-scale-out") == 1
    words = [word for word in command[3:] if word != "--enable-scale-out"]
    assert dict(zip(words[::2], words[1::2])) == {
        "--model": "model",
        "--host": "127.0.0.1",
        "--port": "8000",
        "--worker-extension-cls": "lightppo.rollout.vllm.worker.WorkerExtension",
        "--weight-transfer-config": '{"backend": "lightppo"}',
        "--middleware": "lightppo.rollout.vllm.serving.KeyGate",
        "--generation-config": "vllm",
        "--uvicorn-log-level": "warning",
        "--dtype": "float32",
    }


def test_on_a_cpu_the_cache_has_a_size_unless_the_user_gave_one(installed, gpu):
    gpu(False)
    command = server_command("model", "127.0.0.1", 8000, [])
    assert command[command.index("--kv-cache-memory-bytes") + 1] == str(1 << 30)
    assert "--enforce-eager" in command
    command = server_command(
        "model", "127.0.0.1", 8000, ["--kv_cache_memory_bytes=5", "--uvicorn-log-level", "info"]
    )
    assert "--kv-cache-memory-bytes" not in command
    assert command.count("--uvicorn-log-level") == 1


def test_a_server_for_adapters_has_slots_for_the_trainers_rank(installed, gpu):
    command = server_command("model", "127.0.0.1", 8000, [], lora_rank=20)
    assert "--enable-lora" in command
    assert command[command.index("--max-lora-rank") + 1] == "32"
    assert command[command.index("--max-loras") + 1] == "2"
    assert "--enable-lora" not in server_command("model", "127.0.0.1", 8000, [])
    with pytest.raises(ValueError, match="--lora_rank 600: vLLM takes no adapters of that rank"):
        server_command("model", "127.0.0.1", 8000, [], lora_rank=600)


def test_the_key_is_in_the_environment_alone(installed, gpu, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "of something else")
    environment = server_environment("s3cret")
    assert environment["VLLM_API_KEY"] == "s3cret"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(REPO)
    assert "VLLM_API_KEY" not in server_environment(None)


def test_without_vllm_it_says_so(monkeypatch):
    monkeypatch.setattr("lightppo.rollout.vllm.serving.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="vLLM is not installed"):
        server_command("model", "127.0.0.1", 8000, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], r"--host 0\.0\.0\.0 .*--api_key_env"),
        (["--api-key", "s3cret"], "--api-key .*--api_key_env"),
        (["--api_key=s3cret"], "--api-key "),
        (["--worker_extension_cls", "mine.Worker"], "--worker-extension-cls "),
        (["--weight-transfer-config", "{}"], "--weight-transfer-config "),
        (["--data-parallel-size", "2"], "--data-parallel-size .*several servers"),
        (["--api_key_env", "NO_SUCH_KEY"], "--api_key_env: .*NO_SUCH_KEY"),
    ],
)
def test_the_script_refuses(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve_vllm.py", "--model", "nowhere", *options])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(REPO / "examples" / "serve_vllm.py"), run_name="__main__")
    told = capsys.readouterr().err
    assert caught.value.code == 2
    assert re.search(message, told)
    assert "s3cret" not in told


HOLDS_A_FOLDER = """
import os, signal, sys
from lightppo.rollout.vllm.serving import socket_folder
with socket_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


class TestSocketFolder:
    @pytest.fixture
    def root(self, monkeypatch):
        """Short, as sockets need it."""
        with tempfile.TemporaryDirectory(prefix="lppo-", dir="/tmp") as name:
            monkeypatch.setenv("VLLM_RPC_BASE_PATH", name)
            yield Path(name)

    @pytest.fixture
    def start(self, root):
        """Another server's process, and the folder that it has."""
        started = []

        def make():
            environment = os.environ | {"PYTHONPATH": str(REPO)}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            started.append(
                subprocess.Popen([sys.executable, "-c", HOLDS_A_FOLDER], env=environment, **pipes)
            )
            return started[-1], Path(started[-1].stdout.readline().strip())

        yield make
        for process in started:
            process.kill()
            process.wait(30)
            process.stdin.close()
            process.stdout.close()

    def test_it_is_there_while_the_server_runs(self, root):
        with socket_folder() as folder:
            assert folder.parent == root
            assert folder.stat().st_mode & 0o777 == 0o700
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(str(folder / str(uuid.uuid4())))
        assert list(root.iterdir()) == []

    def test_it_goes_with_an_error_too(self, root):
        with pytest.raises(SystemExit), socket_folder():
            sys.exit(1)
        assert list(root.iterdir()) == []

    def test_what_a_killed_server_left_is_removed_and_what_a_running_one_has_is_not(
        self, root, start
    ):
        killed, left = start()
        running, used = start()
        (left / "socket").touch()
        (root / "of-somebody-else").mkdir()
        killed.kill()
        killed.wait(30)
        assert left.exists()
        with socket_folder() as folder:
            assert {path.name for path in root.iterdir()} == {
                folder.name,
                used.name,
                "of-somebody-else",
            }
        running.stdin.close()
        assert running.wait(60) == 0
        assert [path.name for path in root.iterdir()] == ["of-somebody-else"]

    def test_what_another_user_left_stays(self, root, monkeypatch):
        left = root / "lightppo-vllm-of-another-user"
        left.mkdir()
        monkeypatch.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
        with socket_folder():
            assert left.exists()

    def test_shared_memory_of_its_workers_goes_too(self, root, tmp_path, monkeypatch):
        monkeypatch.setattr("lightppo.rollout.vllm.serving.SHARED_MEMORY", tmp_path)
        for name in ("vllm_dist_1-tp:0", "vllm_dist_2-tp:0", "psm_1"):
            (tmp_path / name).touch()
        with socket_folder() as folder:
            (folder / "vllm_dist_1").touch()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["psm_1", "vllm_dist_2-tp:0"]

    def test_links_are_not_followed(self, root, tmp_path):
        (tmp_path / "file").touch()
        (root / "lightppo-vllm-link").symlink_to(tmp_path)
        with socket_folder():
            pass
        assert (tmp_path / "file").exists()

    @pytest.mark.parametrize(
        ("name", "message"), [("x" * 60, "VLLM_RPC_BASE_PATH"), ("nowhere", "nowhere")]
    )
    def test_a_folder_that_cannot_be_used_is_one_line(self, root, monkeypatch, name, message):
        if name != "nowhere":
            (root / name).mkdir()
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(root / name))
        with pytest.raises(SystemExit, match=message):
            serve()
        assert [path.name for path in root.glob("*/*")] == []

    def test_vllm_gets_it_and_its_compiled_code_stays_outside(self, root, monkeypatch):
        """In a process of its own: the module sets variables for good."""
        (root / "vllm/entrypoints/openai").mkdir(parents=True)
        for name in ("vllm", "vllm/entrypoints", "vllm/entrypoints/openai"):
            (root / name / "__init__.py").touch()
        (root / "vllm/entrypoints/openai/api_server.py").write_text(
            "import os, sys, tempfile\n"
            "print(*sys.argv[1:], *(os.environ[k] for k in ('VLLM_RPC_BASE_PATH', 'TORCHINDUCTOR_CACHE_DIR')),"
            " tempfile.gettempdir(), __name__)\n"
        )
        environment = {
            name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"
        }
        environment |= {"PYTHONPATH": os.pathsep.join([str(root), str(REPO)])}
        command = [sys.executable, "-m", "lightppo.rollout.vllm.serving", "--port", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr
        option, port, sockets, compiled, temporary, name = done.stdout.split()
        assert (option, port, name) == ("--port", "1", "__main__")
        assert sockets == temporary
        assert Path(sockets).parent == root
        assert not Path(compiled).is_relative_to(root)
        assert not Path(sockets).exists()


def ask(gate, path, authorization=None, kind="http", **more_headers):
    """The status that a request gets: 200 from behind the gate."""
    sent = []

    async def send(message):
        sent.append(message)

    headers = [(name.encode(), value.encode()) for name, value in more_headers.items()]
    headers += [] if authorization is None else [(b"authorization", authorization.encode())]
    asyncio.run(gate({"type": kind, "path": path, "headers": headers}, None, send))
    return sent


async def behind(scope, receive, send):
    await send({"type": "http.response.start", "status": 200})


class TestKeyGate:
    @pytest.fixture
    def gate(self, monkeypatch):
        monkeypatch.setenv("VLLM_API_KEY", "s3cret")
        return KeyGate(behind)

    @pytest.mark.parametrize(
        "path", ["/collective_rpc", "/v1/completions", "/pause", "/metrics", "/health/x", ""]
    )
    @pytest.mark.parametrize(
        "authorization", [None, "Bearer wrong", "s3cret", "Basic s3cret", "Bearer s3cret "]
    )
    def test_every_route_needs_the_key(self, gate, path, authorization):
        start, body = ask(gate, path, authorization)
        assert start["status"] == 401
        assert json.loads(body["body"]) == {"error": "the API key is missing or wrong"}

    def test_the_key_opens_it_and_health_is_for_all(self, gate):
        assert ask(gate, "/collective_rpc", "Bearer s3cret")[0]["status"] == 200
        assert ask(gate, "/health")[0]["status"] == 200
        assert ask(gate, "", kind="lifespan")[0]["status"] == 200

    def test_websockets_need_it_too(self, gate):
        assert ask(gate, "/v1/realtime", kind="websocket") == [
            {"type": "websocket.close", "code": 1008}
        ]

    def test_without_a_key_it_is_open(self, monkeypatch):
        monkeypatch.delenv("VLLM_API_KEY", raising=False)
        assert ask(KeyGate(behind), "/collective_rpc")[0]["status"] == 200

    def test_without_a_key_web_pages_may_not_ask(self, monkeypatch):
        monkeypatch.delenv("VLLM_API_KEY", raising=False)
        start, body = ask(KeyGate(behind), "/collective_rpc", origin="https://example.com")
        assert start["status"] == 401
        assert json.loads(body["body"]) == {"error": "web pages may not ask"}
