"""The target in an SGLang server, by its native HTTP interface: token ids in, token ids or hidden states out."""

import hashlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from eaglet import server, spool
from eaglet.engines import Answer, Engine, Refusal, States, Used
from eaglet.errors import EagletError
from eaglet.layers import FINAL, layer_of
from eaglet.params import EngineParams, GenerateParams
from eaglet.server import Rejected, Server, Unreachable, Watched
from eaglet.spool import Captured, Spool, SpoolError
from eaglet.target import Target

_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before a request that was not answered is put again
_PROBE_TOKENS = 16
_PROCESS_TOKENS = 1 << 16  # a process for each so many tokens, up to the cores


@dataclass(frozen=True)
class Proven:
    """A server that has proved what it captures.

    Attributes:
        layers: whose outputs it captures.
        spool, max_bytes: where to, and how much of it is to be used.
        token_bytes: of all streams it captures.
    """

    url: str
    watched: Watched | None
    layers: list[int]
    spool: Path
    max_bytes: int
    token_bytes: int


class SGLangEngine:
    """Answers and prefills by concurrent requests; each thread sees one row through, from request to `use`."""

    def __init__(self, params: EngineParams, target: Target, proven: Proven | None = None) -> None:
        """`proven` is a server that another process's engine started, for `prefill` only."""
        self._params = params
        self._target = target
        self._open = ExitStack()
        self._answering: Server | None = None
        self._proven = proven
        self._spool: Spool | None = None
        self._closing = threading.Event()
        self._cores = threading.BoundedSemaphore(os.cpu_count() or 1)

    @property
    def numerics(self) -> str:
        """Engine and arithmetic. Release, batches and ranks are not in it: they move a row by noise only (tested)."""
        return f"sglang/{self._target.dtype}"

    def status(self) -> str:
        """See `Engine.status`."""
        return self._spool.status() if self._spool else ""

    def close(self) -> None:
        """See `Engine.close`."""
        self._closing.set()
        self._open.close()

    def answer(self, contexts: Sequence[list[int]], params: GenerateParams) -> Iterator[tuple[int, Answer | Refusal]]:
        """See `Engine.answer`. A server of one's own that dies is started anew."""
        if not contexts:
            return
        if self._answering is None:
            self._answering = self._serve()
        serving = self._answering

        def put(index: int, context: list[int]) -> Answer | Refusal:
            if refusal := self._outside(context):
                return refusal
            sampling = sampling_params(params, context, self._target.end_ids)
            try:
                reply = self._ask(serving, {"input_ids": context, "sampling_params": sampling}, revive=True)
            except Rejected as error:
                return Refusal(str(error))
            return _answer(reply, params.max_new_tokens, self._target.end_ids)

        yield from self._together(contexts, put)

    def prefill(
        self, rows: Iterable[list[int]], streams: Sequence[str], use: Callable[[int, States], Used]
    ) -> Iterator[tuple[int, Used | Refusal]]:
        """See `Engine.prefill`. Nothing is sent before the server has proved what it captures."""
        proven = self._prove(streams)
        serving = Server(proven.url, watched=proven.watched)
        room = self._spool = Spool(proven.spool, proven.max_bytes)

        def put(index: int, ids: list[int]) -> Used | Refusal:
            if refusal := self._outside(ids):
                return refusal
            try:
                with room.reserve(len(ids) * proven.token_bytes):
                    rid, captured = self._capture(serving, room, ids)
                    try:
                        if problem := captured.fault(ids):
                            return Refusal(problem)
                        states = {name: v.to(torch.bfloat16) for name, v in captured.streams(streams).items()}
                        with self._cores:  # more threads at work than cores would only be in each other's way
                            return use(index, states)
                    finally:
                        room.discard(rid)
            except (Rejected, SpoolError) as error:
                if not room.folder.is_dir():
                    raise EagletError(f"the spool {room.folder} is gone: `dvc repro` goes on from here") from None
                return Refusal(str(error))

        yield from self._together(rows, put)

    def _outside(self, ids: Sequence[int]) -> Refusal | None:
        """A refusal of ids that the server would die of."""
        vocabulary = self._target.fingerprint.vocab_size
        if 0 <= min(ids) <= max(ids) < vocabulary:
            return None
        return Refusal(f"it holds a token id outside the vocabulary of {vocabulary:,}")

    def split(self, streams: Sequence[str], tokens: int, longest: int) -> list[Callable[[], Engine]]:
        """See `Engine.split`: each process has a share of the concurrency and of the spool."""
        proven = self._prove(streams)
        count = min(
            os.cpu_count() or 1,
            tokens // _PROCESS_TOKENS,
            proven.max_bytes // (2 * longest * proven.token_bytes),
            self._params.concurrency,
        )
        if count < 2:
            return []
        params = replace(self._params, concurrency=-(-self._params.concurrency // count))
        part = replace(proven, max_bytes=proven.max_bytes // count)
        target = Target(self._target.folder, self._target.fingerprint, self._target.dtype)
        return [partial(SGLangEngine, params, target, part)] * count

    def _prove(self, streams: Sequence[str]) -> Proven:
        """A server that captures these streams, started and proved where it is not yet.

        Raises:
            EagletError: one of them is the last layer's, or the server captures something else.
        """
        wanted = {layer_of(name) for name in streams if name != FINAL}
        last = self._target.fingerprint.num_layers - 1
        if last in wanted:
            raise EagletError(
                f"params.yaml: extract.layers: SGLang captures what enters a layer, and nothing follows layer {last}, "
                f"the last: name {last - 1} at most"
            )
        if self._proven is None or not wanted <= set(self._proven.layers):
            serving, room = self._serve_capture(streams)
            probe = self._probe(serving, room, streams)
            self._proven = Proven(
                url=serving.url,
                watched=serving.watched,
                layers=probe.layers,
                spool=room.folder,
                max_bytes=room.max_bytes,
                token_bytes=(probe.aux.shape[1] + probe.final.shape[1]) * probe.final.element_size(),
            )
        return self._proven

    def _together(
        self, items: Iterable[list[int]], put: Callable[[int, list[int]], Used]
    ) -> Iterator[tuple[int, Used]]:
        """`put` each item, `concurrency` at a time; items are pulled as others finish."""
        numbered = enumerate(items)
        running: dict[Future[Used], int] = {}
        pool = ThreadPoolExecutor(self._params.concurrency, thread_name_prefix="sglang")
        try:
            while True:
                for index, item in islice(numbered, self._params.concurrency - len(running)):
                    running[pool.submit(put, index, item)] = index
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
        except BaseException:
            self.close()  # those still running see it, and end
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _ask(self, serving: Server, body: Mapping[str, Any], revive: bool) -> dict[str, Any]:
        """Put a request until it is answered.

        Raises:
            Rejected: the server refuses this request.
            EagletError: the server is gone, or not to be reached for half a minute.
        """
        for pause in (*_PAUSES, None):
            generation = serving.generation
            try:
                return serving.post("/generate", body)
            except Unreachable as error:
                if self._closing.is_set():
                    raise EagletError("stopped") from None
                if why := serving.died():
                    if not revive or not serving.own:
                        raise EagletError(f"{why}; what is computed so far is kept, `dvc repro` goes on") from None
                    serving.revive(generation)
                elif pause is None:
                    raise EagletError(f"the SGLang server at {serving.url} does not answer: {error}") from None
                else:
                    self._closing.wait(pause)
        raise EagletError(f"the SGLang server at {serving.url} did not answer {len(_PAUSES)} times")

    def _serve(self) -> Server:
        """The server that answers: a running one that serves this target, or one of our own."""
        url = self._params.url.generate
        if url is None:
            return self._launch(None)
        serving = Server(url)
        server.check_target(serving, self._target)
        return serving

    def _serve_capture(self, streams: Sequence[str]) -> tuple[Server, Spool]:
        """The server that captures, and its spool."""
        parent, limit = Path(self._params.spool).expanduser(), int(self._params.spool_gib * 2**30)
        url = self._params.url.extract
        if url is not None:
            self._spool = Spool(parent, limit)
            serving = Server(url)
            server.check_target(serving, self._target)
            return serving, self._spool
        self._open.close()  # a server of other layers
        folder = self._open.enter_context(spool.own_folder(parent))
        self._spool = Spool(folder, limit)
        layers = [layer_of(name) for name in streams if name != FINAL]
        environment = {
            "EAGLET_CAPTURE_SPOOL": str(folder.absolute()),
            "EAGLET_CAPTURE_LAYERS": ",".join(map(str, layers or [0])),
            # Some more than is ever asked for: the files' headers are not counted here.
            "EAGLET_CAPTURE_MAX_BYTES": str(self._spool.max_bytes + (64 << 20)),
        }
        return self._launch(environment), self._spool

    def _launch(self, capture: Mapping[str, str] | None) -> Server:
        serving = server.launch(self._params.launch, self._target, capture)
        self._open.callback(serving.stop)
        serving.start()
        return serving

    def _probe(self, serving: Server, room: Spool, streams: Sequence[str]) -> Captured:
        """Put a short request, and prove by its file what the server captures: layers, norm, arithmetic, model.

        Raises:
            EagletError: it captures nothing, or something else.
        """
        ids = [3 + index for index in range(_PROBE_TOKENS)]
        try:
            rid, captured = self._capture(serving, room, ids)
        except (Rejected, SpoolError) as error:
            raise EagletError(
                f"the SGLang server at {serving.url} does not capture hidden states into {room.folder} ({error}): "
                f"start it on this host, or where that folder is shared, with the plugin of patches/capture and "
                f"EAGLET_CAPTURE_SPOOL={room.folder} (patches/README.md)"
            ) from None
        captured = Captured(captured.aux.clone(), captured.final.clone(), captured.metadata)
        room.discard(rid)
        lacking = {layer_of(name) for name in streams if name != FINAL} - set(captured.layers)
        if lacking:
            raise EagletError(
                f"the SGLang server at {serving.url} captures the layers {captured.layers}, not {sorted(lacking)}: "
                f"start it with EAGLET_CAPTURE_LAYERS={','.join(map(str, sorted(lacking | set(captured.layers))))}"
            )
        problem = captured.fault(ids) or self._other_model(captured)
        if problem:
            raise EagletError(f"the SGLang server at {serving.url}: {problem}")
        return captured

    def _other_model(self, captured: Captured) -> str | None:
        """Why what was captured does not come from this target, or None."""
        dtype = str(captured.final.dtype).removeprefix("torch.")
        if dtype != self._target.dtype:
            return f"it computes in {dtype}, and target.dtype is {self._target.dtype}: start it with --dtype"
        if captured.final.shape[1] != self._target.fingerprint.hidden_size:
            return f"its hidden size is {captured.final.shape[1]}, the target's {self._target.fingerprint.hidden_size}"
        theirs, ours = json.loads(captured.metadata["weights"]), self._target.weight_samples()
        shared = theirs.keys() & ours.keys()
        differ = sorted(name for name in shared if theirs[name] != ours[name])
        if differ or not shared:
            return (
                f"its weights are not those of the target {self._target.fingerprint.name} "
                f"({', '.join(differ) or 'none could be compared'}): it serves another model"
            )
        norm = self._target.final_norm()
        if not is_normed(captured.final, norm):
            return "its final state has not been through the target's final norm, or more than once"
        return None

    def _capture(self, serving: Server, room: Spool, ids: list[int]) -> tuple[str, Captured]:
        """One row through the server: its request id and its file."""
        rid = f"{spool.PREFIX}{uuid.uuid4().hex}"
        body = {
            "input_ids": ids,
            "rid": rid,
            "return_hidden_states": True,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        }
        try:
            reply = self._ask(serving, body, revive=False)
            if reply["meta_info"].get("hidden_states"):
                raise SpoolError("the plugin is not on: the states came back as JSON")
            return rid, room.take(rid)
        except BaseException:
            room.discard(rid)
            raise


def is_normed(final: torch.Tensor, norm: torch.Tensor) -> bool:
    """Whether [T, H] states have been through an RMSNorm of weight [H] once: without the weight their mean square is 1.

    Gemma's norms multiply by 1 + weight.
    """
    wide = final.float()
    for weight in (norm, 1 + norm):
        kept = weight.abs() > 1e-3 * weight.abs().max()
        square = (wide[:, kept] / weight[kept]).square().sum(1) / len(weight)
        if bool(((square - 1).abs() < 0.1).all()):
            return True
    return False


def sampling_params(params: GenerateParams, context: Sequence[int], ends: Iterable[int]) -> dict[str, Any]:
    """SGLang's sampling parameters: everything is said, so that no default of the server's is left."""
    seed = hashlib.sha256(f"{params.seed}:{list(context)}".encode()).digest()
    chosen: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "stop_token_ids": sorted(ends),
        "ignore_eos": False,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    }
    if params.temperature > 0:
        chosen["sampling_seed"] = int.from_bytes(seed[:4], "big") >> 1
    return chosen


def _answer(reply: Mapping[str, Any], limit: int, ends: frozenset[int]) -> Answer | Refusal:
    """An answer out of a reply: ids up to and with the first end, or all up to the limit."""
    ids: list[int] = reply["output_ids"]
    reason = reply["meta_info"]["finish_reason"]
    stop = next((place for place, token in enumerate(ids) if token in ends), None)
    if stop is not None:
        return Answer(ids[: stop + 1], "stop")
    if len(ids) == limit:
        return Answer(ids, "length")
    return Refusal(f"the server ended it after {len(ids)} tokens: {reason.get('message') or reason.get('type')}")
