"""An SGLang server: one that runs already, or one that is started, watched and stopped here."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from eaglet.errors import EagletError
from eaglet.params import LaunchParams
from eaglet.paths import STORE
from eaglet.target import Target

SUPPORTED = ("0.5.17", "0.5.23")
PLUGIN = "patches/capture"
_RESTARTS = 3  # of a server that dies, in one run
_PATIENCE = 5.0  # seconds that a server has to end by itself
_CONNECT = 10.0  # seconds
_READ = 3600.0  # seconds an answer may take: a server that dies is seen at once, one that hangs after this
_CPU_TOKENS = 32768  # of KV cache without a GPU, where SGLang would take most of the memory
# Seen by the server's own Python: what is installed beside it. Its torch may see GPUs that this process's does not.
_FACTS = """
import importlib.metadata as m, json, torch
def version(name):
    try: return m.version(name).split("+")[0]
    except m.PackageNotFoundError: return None
print(json.dumps([version("sglang"), version("eaglet-capture"), torch.cuda.device_count()]))
"""
# Kills the server once this process is gone, however it went: its standard input ends then.
_WATCH = "import os, signal, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), signal.SIGKILL)"


class Rejected(Exception):
    """The server refused this one request, and would again."""


class Unreachable(Exception):
    """The request was not answered: the server is not there, dies or is overloaded."""


@dataclass(frozen=True)
class Watched:
    """A server's process on this machine, and its log."""

    pid: int
    log: Path

    @property
    def gone(self) -> bool:
        """Whether it has ended."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    def last_words(self) -> str:
        """The last line of the log that tells of an error."""
        with self.log.open("rb") as file:
            file.seek(max(self.log.stat().st_size - (256 << 10), 0))
            lines = file.read().decode(errors="replace").replace("\0", "").splitlines()
        told = [line.strip() for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)(:|$)|eaglet-capture", line)]
        return f"{told[-1][:400]} (log: {self.log})" if told else f"it was killed (log: {self.log})"


@dataclass
class _Process:
    """A server's command, and its process while it runs."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    child: subprocess.Popen[bytes] | None = None
    watch: subprocess.Popen[bytes] | None = None
    restarts: int = 0


class Server:
    """A server's address, and its process if it was started here. Threads may share it."""

    def __init__(self, url: str, process: _Process | None = None, watched: "Watched | None" = None) -> None:
        """Use the server at `url`: one of someone else's, of `launch`, or one that another process started."""
        self.url = url.rstrip("/")
        self._process = process
        self._watched = watched
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._local = threading.local()

    @property
    def own(self) -> bool:
        """Whether this object started it, and may start it anew."""
        return self._process is not None

    @property
    def watched(self) -> "Watched | None":
        """The process to look at when the server does not answer, if it is one of this machine."""
        return self._watched

    def get(self, path: str) -> dict[str, Any]:
        """The JSON at a path.

        Raises:
            Unreachable: no answer.
            Rejected: it says no.
        """
        return self._ask("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON that a request is answered with; raises as `get`."""
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        if not hasattr(self._local, "session"):  # sessions are not for several threads
            self._local.session = requests.Session()
            self._local.session.trust_env = False  # no proxy stands between here and the server
            if key := os.environ.get("SGLANG_API_KEY"):
                self._local.session.headers["Authorization"] = f"Bearer {key}"
        try:
            response = self._local.session.request(method, self.url + path, json=body, timeout=(_CONNECT, _READ))
            if response.status_code == 200:
                answer: dict[str, Any] = response.json()
                return answer
        except (requests.RequestException, ValueError) as error:
            raise Unreachable(_plain(error)) from None
        message = _message(response)
        if response.status_code == 429 or response.status_code >= 500:
            raise Unreachable(f"status {response.status_code}: {message}")
        raise Rejected(message)

    def start(self) -> None:
        """Start the process and wait until it answers.

        Raises:
            EagletError: it ends instead; the message holds its own last error.
        """
        process = self._process
        assert process is not None
        process.log.parent.mkdir(parents=True, exist_ok=True)
        with process.log.open("wb") as log:
            process.child = child = subprocess.Popen(
                process.command,
                env=dict(process.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process.watch = subprocess.Popen(
            [sys.executable, "-Sc", _WATCH, str(child.pid)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._watched = Watched(child.pid, process.log)
        began = time.monotonic()
        while not self._healthy():
            if child.poll() is not None:
                raise EagletError(f"SGLang did not start: {self._watched.last_words()}")
            if self._stopped.is_set():  # by another thread, which may have come too early to see this process
                self._end()
                raise EagletError("stopped")
            time.sleep(0.5)
        if sys.stderr.isatty():
            print(f"SGLang is ready at {self.url} after {time.monotonic() - began:.0f} s", file=sys.stderr)

    def _healthy(self) -> bool:
        try:
            return bool(requests.get(self.url + "/health", timeout=5).status_code == 200)
        except requests.RequestException:
            return False

    def died(self) -> str | None:
        """How a server of this machine ended, in a line; None while it runs, or where that cannot be seen."""
        if self._watched is None:
            return None
        with self._lock:  # not while another thread starts it anew
            # A server that was killed closes its connections a moment before its process is gone.
            for _ in range(50):
                if self._watched.gone:
                    return f"the SGLang server died: {self._watched.last_words()}"
                if self._healthy():
                    return None
                time.sleep(0.2)
            return f"the SGLang server answers no more: {self._watched.last_words()}"

    def revive(self, seen: int) -> None:
        """Start the process anew, once for all threads that saw generation `seen` die.

        Raises:
            EagletError: it died too often, or does not start.
        """
        process = self._process
        assert process is not None
        with self._lock:
            if seen != process.restarts:
                return
            why = self.died()
            if why is None or self._stopped.is_set():
                return
            if process.restarts == _RESTARTS:
                raise EagletError(f"{why}; it was started anew {_RESTARTS} times already")
            print(f"{why}; starting it anew", file=sys.stderr)
            self._end()
            self.start()
            process.restarts += 1

    @property
    def generation(self) -> int:
        """How often it was started anew; while another thread does so, this waits."""
        with self._lock:
            return self._process.restarts if self._process else 0

    def stop(self) -> None:
        """End the process that was started here, for good; nothing for a server of someone else's."""
        self._stopped.set()
        self._end()

    def _end(self) -> None:
        """End the process with its children. Threads may do so at once."""
        process = self._process
        if process is None or process.child is None:
            return
        child, watch, process.child = process.child, process.watch, None
        if watch is not None:
            watch.kill()
            watch.communicate()
        # SIGTERM to the first process only: it takes an end of its children for a crash, and sleeps over it.
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_PATIENCE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@dataclass(frozen=True)
class Drafting:
    """A drafter that a server decodes with, and the tokens it drafts a cycle, in a chain."""

    folder: Path
    steps: int

    def arguments(self) -> list[str]:
        """Of sglang.launch_server."""
        chain = {"num-steps": self.steps, "eagle-topk": 1, "num-draft-tokens": self.steps + 1}
        found = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(self.folder)]
        return found + [word for name, value in chain.items() for word in (f"--speculative-{name}", str(value))]


def launch(
    params: LaunchParams,
    target: Target,
    capture: Mapping[str, str] | None,
    drafting: Drafting | None = None,
) -> Server:
    """A server of the target on this machine, not started yet.

    Args:
        capture: the plugin's environment; None for a server that only answers.
        drafting: what it answers with beside the target.

    Raises:
        EagletError: the environment lacks SGLang or the plugin, or the machine the GPUs.
    """
    release, gpus = _installed(Path(params.python), with_plugin=capture is not None)
    if drafting is not None and gpus == 0:
        raise EagletError(
            f"SGLang decodes with a drafter on a GPU only, and {params.python} sees none; `eaglet evaluate` without "
            "--server decodes the same chains here"
        )
    if 0 < gpus < params.tp * params.dp:
        raise EagletError(
            f"params.yaml: engine.launch.tp {params.tp} × dp {params.dp} need as many GPUs; this machine has {gpus}"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [params.python, "-m", "sglang.launch_server", "--model-path", str(target.folder.absolute())]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", target.dtype, "--skip-tokenizer-init"]
    # SGLang ends itself where its own first request takes a busy machine more than 5 s; the probe is ours.
    command += ["--skip-server-warmup"]
    command += ["--tp-size", str(params.tp), "--dp-size", str(params.dp)]
    if params.mem_fraction is not None:
        command += ["--mem-fraction-static", str(params.mem_fraction)]
    no_graphs = (
        ["--disable-cuda-graph"]
        if release == "0.5.17"
        else ["--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"]
    )
    if gpus == 0:
        command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        command += ["--grammar-backend", "none", "--max-total-tokens", str(_CPU_TOKENS)]
    if capture is not None:
        # Cached rows would be missing; graphs serve decoding, and nothing is decoded.
        command += ["--disable-radix-cache", "--enable-return-hidden-states"]
    if capture is not None or gpus == 0:
        command += no_graphs
    if drafting is not None:
        command += drafting.arguments()
    command += params.args  # last, so that they win
    environment = {**os.environ, **(capture or {}), "HF_HUB_OFFLINE": "1"}
    if gpus == 0 and params.tp > 1:
        # SGLang must be told which cores are whose, and not to use the NCCL that torch may bring: it wants a GPU.
        environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _cores(params.tp))
        environment.setdefault("SGLANG_NCCL_SO_PATH", "none")
    use = "extract" if capture is not None else "draft" if drafting is not None else "generate"
    log = (STORE / "logs" / f"sglang-{use}.log").absolute()
    return Server(f"http://127.0.0.1:{port}", _Process(command, environment, log))


def check_target(serving: Server, target: Target) -> dict[str, Any]:
    """Whether a running server is one that can be used, and serves this target; its own arguments.

    Raises:
        EagletError: not reachable, another release, another model, or arithmetic that is not the target's.
    """
    try:
        model, args = serving.get("/model_info"), serving.get("/server_info")
    except (Unreachable, Rejected) as error:
        raise EagletError(
            f"no SGLang server answers at {serving.url} ({error}): start it, or leave its address out to have "
            "one started"
        ) from None
    check_release(args.get("version"), f"the server at {serving.url}")
    folder, ours = target.folder, target.fingerprint
    served = {str(model.get("model_path")), str(args.get("served_model_name"))}
    known = {str(folder), str(folder.absolute()), ours.name}
    same = served & known or {Path(name).name for name in served} & known
    architectures = model.get("architectures") or []
    if not same or (architectures and ours.architecture not in architectures):
        raise EagletError(
            f"the server at {serving.url} serves {model.get('model_path')} ({', '.join(architectures)}), not the "
            f"target {ours.name} ({ours.architecture}): serve that one, with --served-model-name {ours.name} if its "
            "folder is named otherwise"
        )
    config = target.config
    plain = getattr(config, "quantization_config", None) is None
    native = str(getattr(config, "dtype", None)).removeprefix("torch.")  # what "auto" comes to
    for name, wanted in {
        "dtype": (target.dtype, *(["auto"] if native == target.dtype else [])),
        "kv_cache_dtype": ("auto", target.dtype),
        "quantization": (None,) if plain else (None, args.get("quantization")),
    }.items():
        if args.get(name) not in wanted:
            raise EagletError(
                f"the server at {serving.url} runs with {name} {args.get(name)}; its numbers would not be the "
                f"target's own in {target.dtype}: start it without"
            )
    return args


def check_release(release: str | None, where: str) -> None:
    """Raises EagletError where a release of SGLang is not one that was read and tested."""
    if release not in SUPPORTED:
        known = " and ".join(SUPPORTED)
        raise EagletError(f"{where} is SGLang {release}; eaglet supports {known}: install one of those")


def _installed(python: Path, with_plugin: bool) -> tuple[str, int]:
    """The release of SGLang that a Python has, and the GPUs that it sees."""
    found = None
    try:
        done = subprocess.run([python, "-c", _FACTS], capture_output=True, text=True, check=False)
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except OSError:
        done = None
    if found is None:
        why = done.stderr.strip().splitlines()[-1] if done and done.stderr.strip() else "it is not there"
        raise EagletError(f"engine.launch.python {python} does not run ({why}): run `make sglang`, or name another")
    release, plugin, gpus = found
    if release is None:
        raise EagletError(f"{python} has no SGLang: run `make sglang`, or name another in engine.launch.python")
    check_release(release, str(python))
    if with_plugin and plugin is None:
        raise EagletError(f"{python} lacks the capture plugin: `{python} -m pip install --no-deps ./{PLUGIN}`")
    return release, gpus


def _cores(ranks: int) -> str:
    """This machine's cores, split: "0-3|4-7"."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(len(cores) // ranks, 1)
    parts = [cores[rank * share % len(cores) :][:share] for rank in range(ranks)]
    return "|".join(",".join(map(str, part)) for part in parts)


def _message(response: requests.Response) -> str:
    try:
        error = response.json()
        error = error.get("error", error) if isinstance(error, dict) else error
        text = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        text = response.text
    return " ".join(str(text).split())[:400]


def _plain(error: Exception) -> str:
    """The root of a connection error, without the library's own wrapping."""
    text = " ".join(str(error).split())
    match = re.search(r"\[Errno -?\d+\] [^'\")]+|Remote end closed connection|[Tt]imed out", text)
    return match[0] if match else f"{type(error).__name__}: {text[:200]}"
