"""A real SuperLink and SuperNodes on loopback: started, waited for, and ended by their ids."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

APP = Path(__file__).parents[2] / "examples" / "flower"
BIN = Path(sys.executable).parent
PATIENCE = 180.0


def environment(root):
    """Nothing of Flower's leaves this machine or this directory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)  # a process for every message
    return kept | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(root / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "OPENBLAS_NUM_THREADS": "1",
        "NO_COLOR": "1",
    }


def free_port():
    with contextlib.closing(socket.socket()) as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def until(ready, what, patience=PATIENCE, pause=0.2):
    deadline = time.monotonic() + patience
    while True:
        value = ready()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not in {patience:g} s")
        time.sleep(pause)


def partition(number, of):
    return f"partition-id={number} num-partitions={of}"


class Deployment:
    """A SuperLink, its nodes, and the commands of a user."""

    def __init__(
        self,
        root,
        nodes=3,
        app=APP,
        link=(),
        node=lambda number: (),
        tls=None,
        node_config=partition,
    ):
        self.root, self.app, self.tls = Path(root), app, tls
        self.port, self.env = free_port(), environment(Path(root))
        self.started, self.nodes = {}, {}
        self.node_words, self.node_config = node, node_config
        home = Path(self.env["FLWR_HOME"])
        home.mkdir(parents=True, exist_ok=True)
        trust = f'root-certificates = "{tls}"' if tls else "insecure = true"
        (home / "config.toml").write_text(
            f'[superlink.here]\naddress = "127.0.0.1:{self.port}"\n{trust}\n'
        )
        how = [*link] if tls else ["--insecure", *link]
        self.start(
            "superlink",
            [
                *("flower-superlink", *how, "--host", "127.0.0.1", "--port", str(self.port)),
                *("--database", str(self.root / "state.db")),
                "--disable-runtime-dependency-installation",
            ],
        )
        until(self._healthy, "the SuperLink")
        for number in range(nodes):
            self.join(number, nodes)

    def start(self, name, words):
        with (self.root / f"{name}.log").open("ab") as log:
            self.started[name] = subprocess.Popen(
                [str(BIN / words[0]), *words[1:]],
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.root,
                start_new_session=True,
            )
        return self.started[name]

    def join(self, number, of, more="", name=None):
        trust = ["--root-certificates", str(self.tls)] if self.tls else ["--insecure"]
        config = f"{self.node_config(number, of)} {more}"
        words = ["flower-supernode", *trust, "--superlink", f"127.0.0.1:{self.port}"]
        words += ["--host", "127.0.0.1", "--port", str(free_port()), *self.node_words(number)]
        return self.start(name or f"node{number}", [*words, "--node-config", config])

    def _healthy(self):
        if self.started["superlink"].poll() is not None:
            raise AssertionError(self.log("superlink"))
        kind = "https" if self.tls else "http"
        try:
            context = None
            if self.tls:
                import ssl

                context = ssl.create_default_context(cafile=str(self.tls))
            address = f"{kind}://127.0.0.1:{self.port}/health"
            with urllib.request.urlopen(address, timeout=2, context=context) as answer:
                return answer.status == 200
        except OSError:
            return False

    def log(self, name):
        return (self.root / f"{name}.log").read_text("utf-8", errors="replace")

    def flwr(self, *words, check=True, patience=PATIENCE):
        done = subprocess.run(
            [str(BIN / "flwr"), *words],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=patience,
            check=False,
            cwd=self.root,
        )
        if check and done.returncode:
            raise AssertionError(f"flwr {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def run(self, **config):
        """Submit a run; its number."""
        said = self.flwr("run", str(self.app), "here", "-c", as_toml(config), "--format", "json")
        answer = json.loads(said[said.index("{") :])
        assert "run-id" in answer, answer
        return str(answer["run-id"])

    def status(self, number):
        said = self.flwr("list", "here", "--run-id", number, "--format", "json")
        return json.loads(said[said.index("{") :])["runs"][0]

    def ended(self, number, patience=PATIENCE):
        """How a run ended: finished:completed, finished:failed, … (Asking takes a second.)"""
        return until(
            lambda: (s := self.status(number)["status"]).startswith("finished") and s,
            f"run {number}",
            patience,
            pause=2.0,
        )

    def run_log(self, number):
        return self.flwr("log", number, "here", "--show", check=False)

    def end(self, name, how=signal.SIGTERM, patience=20):
        """End one of ours, and what it started: by the ids of their sessions."""
        process = self.started.pop(name)
        with contextlib.suppress(ProcessLookupError):
            if how == signal.SIGKILL:
                os.killpg(process.pid, how)
            else:
                process.send_signal(how)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(patience)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left behind

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name, process in self.started.items():
            if name != "superlink":
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
        for name in sorted(self.started, key=lambda name: name == "superlink"):
            self.end(name)


def as_toml(config):
    def shown(value):
        return json.dumps(value) if isinstance(value, str | bool) else str(value)

    return " ".join(f"{name.replace('_', '-')}={shown(value)}" for name, value in config.items())


def simulated(root):
    """The deployment page's commands for Flower's simulation, in `root`."""
    page = (APP.parents[1] / "docs" / "deployment.md").read_text("utf-8")
    lines = page.split("```console\n", 1)[1].split("```")[0].splitlines()
    (root / "examples").symlink_to(APP.parent)
    return run_script("\n".join(line.removeprefix("$ ") for line in lines), root)


def run_script(script, root, patience=1500.0):
    """What a bash script prints. Whatever it leaves running is ended, Flower's SuperLink, too."""
    env = environment(root) | {
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
    }
    env.pop("XLA_FLAGS", None)  # as users have it
    output = root / "output.txt"
    with output.open("w") as file:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=root,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        shell.wait(patience)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
        for pid in processes():
            if str(root / "flower-home") in its_environment(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
    said = output.read_text("utf-8", errors="replace")
    assert shell.returncode == 0, said
    return said


def processes():
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def its_environment(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return ""
