"""Both sides of the spool, without a server: the plugin's writer and eaglet's reader."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file

from eaglet import spool
from eaglet.errors import EagletError

sys.path.insert(0, str(ROOT / "patches/capture"))
from eaglet_capture import hooks  # type: ignore[import-not-found]
from eaglet_capture import spool as plugin

WIDTHS = {"aux": 12, "final": 4}
METADATA = {"streams": "[2, 4, 6]", "final": "post_norm", "ids": spool.ids_hash([7, 8, 9])}


def start(writer: Any, rid: str = "eaglet-a", length: int = 3) -> Any:
    return writer.start(rid, length, WIDTHS, torch.bfloat16, METADATA)


def values(length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(length, width).bfloat16() for name, width in WIDTHS.items()}


def part(of: dict[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
    return {name: tensor[rows] for name, tensor in of.items()}


def still_open(folder: Path) -> list[str]:
    """Files of a folder that this process holds open."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(descriptor.readlink()))
        except FileNotFoundError:  # the listing's own
            continue
    return [link for link in links if link.startswith(str(folder))]


def test_chunks_of_many_requests_are_whole_files(tmp_path: Path) -> None:
    """Chunks of several requests between each other, handed over by several threads."""
    writer = plugin.Spool(tmp_path, 1 << 20)
    wanted = {f"eaglet-{k}": values(5 + k, seed=k) for k in range(40)}

    def hand_over(rids: list[str]) -> None:
        requests = {rid: start(writer, rid, len(wanted[rid]["aux"])) for rid in rids}
        for rows in (slice(0, 2), slice(2, 3), slice(3, None)):
            for rid in rids:
                writer.write(requests[rid], part(wanted[rid], rows))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hand_over, [list(wanted)[k::4] for k in range(4)]))
    reader = spool.Spool(tmp_path, 1 << 20)
    for rid, of in wanted.items():
        found = reader.take(rid)
        assert torch.equal(found.aux, of["aux"]) and torch.equal(found.final, of["final"])
        theirs = load_file(tmp_path / f"{rid}.safetensors")
        assert torch.equal(theirs["aux"], of["aux"]) and torch.equal(theirs["final"], of["final"])
        assert torch.equal(found.streams(["L03", "final"])["L03"], of["aux"][:, 4:8])
        reader.discard(rid)
    assert list(tmp_path.iterdir()) == [] and writer._open_bytes == 0
    del found, theirs
    assert still_open(tmp_path) == []


def test_what_was_captured_is_checked(tmp_path: Path) -> None:
    writer, reader = plugin.Spool(tmp_path, 1 << 20), spool.Spool(tmp_path, 1 << 20)
    writer.write(start(writer), values(3))
    found = reader.take("eaglet-a")
    assert found.fault([7, 8, 9]) is None
    assert found.layers == [1, 3, 5]
    assert "other ids" in str(found.fault([7, 8, 10]))
    cut = spool.Captured(found.aux[1:], found.final, found.metadata)
    assert "[2, 12] for 3 tokens" in str(cut.fault([7, 8, 9]))
    pre = spool.Captured(found.aux, found.final, {**found.metadata, "final": "pre_norm"})
    assert "pre_norm" in str(pre.fault([7, 8, 9]))


def test_too_many_rows_and_dropped_requests_leave_no_file(tmp_path: Path) -> None:
    writer, reader = plugin.Spool(tmp_path, 1 << 20), spool.Spool(tmp_path, 1 << 20)
    many = start(writer, "eaglet-many")
    writer.write(many, values(2))
    writer.write(many, values(2))
    with pytest.raises(spool.SpoolError, match="4 rows came for 3 tokens"):
        reader.take("eaglet-many")
    retracted = start(writer, "eaglet-r")
    writer.write(retracted, values(2))
    writer.drop(retracted)
    again = start(writer, "eaglet-r")
    of = values(3, seed=9)
    writer.write(again, of)
    assert torch.equal(reader.take("eaglet-r").final, of["final"])
    assert writer._open_bytes == 0 and still_open(tmp_path) == []
    reader.discard("eaglet-many")
    reader.discard("eaglet-r")
    assert list(tmp_path.iterdir()) == []


class Scheduled:
    """A request as SGLang's scheduler holds it, and the plugin's hooks around it."""

    def __init__(self, folder: Path, rid: str = "eaglet-s") -> None:
        self.capture = hooks.Capture(hooks.Settings(folder, [1, 3, 5], 1 << 20))
        self.capture._spool = plugin.Spool(folder, 1 << 20)
        self.capture._metadata = {"streams": "[2, 4, 6]", "final": "post_norm"}
        self.req = SimpleNamespace(rid=rid, origin_input_ids=[7, 8, 9], return_hidden_states=True, is_retracted=False)
        self.req.finished = lambda: False
        self.passed_on: list[dict[str, Any]] = []

    def take(self, of: dict[str, torch.Tensor], rows: slice) -> int:
        """A step of the scheduler: these rows, behind two of another request's."""
        batch = {name: torch.cat([torch.zeros_like(tensor[:2]), tensor[rows]]) for name, tensor in of.items()}
        return int(
            self.capture.take_rows(
                lambda processor, **all: self.passed_on.append(all) or -1,
                None,
                req=self.req,
                logits_output=SimpleNamespace(hidden_states=batch["aux"], last_hidden_states=batch["final"]),
                hidden_state_offset=2,
                capture_hidden_mode=SimpleNamespace(is_full=lambda: True),
                extend_input_len=len(of["aux"][rows]),
            )
        )


def test_chunks_of_a_request_become_its_file(tmp_path: Path) -> None:
    scheduled, of = Scheduled(tmp_path), values(3)
    assert scheduled.take(of, slice(0, 2)) == 4, "where the next request's rows begin"
    assert scheduled.take(of, slice(2, 3)) == 3
    found = spool.Spool(tmp_path, 1 << 20).take("eaglet-s")
    assert torch.equal(found.aux, of["aux"]) and torch.equal(found.final, of["final"])
    assert found.metadata["ids"] == spool.ids_hash([7, 8, 9]) and found.fault([7, 8, 9]) is None
    assert hooks.PREFIX == spool.PREFIX and not scheduled.passed_on


def test_a_retracted_request_starts_over(tmp_path: Path) -> None:
    """Its rows come again from the first one, and another batch may have rounded them otherwise."""
    scheduled, first, second = Scheduled(tmp_path), values(3), values(3, seed=1)
    scheduled.take(first, slice(0, 2))
    assert scheduled.capture.start_over(lambda req: "done", scheduled.req) == "done"
    assert still_open(tmp_path) == []
    scheduled.req.is_retracted = True  # in this very step: what it computed is computed again
    scheduled.take(first, slice(0, 2))
    scheduled.req.is_retracted = False
    scheduled.take(second, slice(0, 2))
    scheduled.take(second, slice(2, 3))
    found = spool.Spool(tmp_path, 1 << 20).take("eaglet-s")
    assert torch.equal(found.aux, second["aux"]) and torch.equal(found.final, second["final"])


def test_a_class_that_gives_fewer_streams_is_named(tmp_path: Path) -> None:
    """SGLang's classes leave out the last layer without a word."""
    with pytest.raises(RuntimeError, match=r"the model gives 2 of 3 streams.*layers \[1, 3, 5\]"):
        Scheduled(tmp_path).capture.keep_final(None, None, None, torch.zeros(3, 4), None, None, [torch.zeros(3, 4)] * 2)


def test_requests_of_others_are_served_as_ever(tmp_path: Path) -> None:
    scheduled = Scheduled(tmp_path, rid="chat-1")
    assert scheduled.take(values(3), slice(0, 3)) == -1
    assert [given["hidden_state_offset"] for given in scheduled.passed_on] == [2]
    assert list(tmp_path.iterdir()) == []


def test_a_full_spool_waits_until_a_file_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = start(plugin.Spool(tmp_path, 1 << 20), "eaglet-measure").size
    (tmp_path / ".eaglet-measure.tmp").unlink()
    bound = size + size // 2
    writer = plugin.Spool(tmp_path, bound)
    writer.write(start(writer), values(3))
    spool.Spool(tmp_path, bound).take("eaglet-a")
    monkeypatch.setattr(plugin, "_PATIENCE", 0.1)
    with pytest.raises(plugin.SpoolError, match=rf"stayed full \({bound:,} bytes\): is it read\?"):
        start(writer, "eaglet-b")
    monkeypatch.setattr(plugin, "_PATIENCE", 30)
    threading.Timer(0.2, (tmp_path / "eaglet-a.safetensors").unlink).start()
    began = time.monotonic()
    writer.write(start(writer, "eaglet-b"), values(3))
    assert 0.1 < time.monotonic() - began < 20
    with pytest.raises(plugin.SpoolError, match=rf"needs .* the spool may hold {bound:,}"):
        start(writer, "eaglet-c", length=1000)


def test_a_spool_that_is_gone_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    writer, reader = plugin.Spool(folder, 1 << 20), spool.Spool(folder, 1 << 20)
    folder.rmdir()
    with pytest.raises(plugin.SpoolError, match="is gone"):
        start(writer)
    with pytest.raises(spool.SpoolError, match="is gone"):
        reader.take("eaglet-a")
    with pytest.raises(EagletError, match=r"engine\.spool .* is not a folder"):
        spool.Spool(folder, 1 << 20)


def test_rows_on_their_way_are_bounded(tmp_path: Path) -> None:
    room = spool.Spool(tmp_path, 100)
    inside, most = 0, 0
    lock = threading.Lock()

    def row() -> None:
        nonlocal inside, most
        with room.reserve(40):
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.01)
            with lock:
                inside -= 1

    threads = [threading.Thread(target=row) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 2
    with pytest.raises(spool.SpoolError, match=r"raise engine\.spool_gib"), room.reserve(101):
        pass


def test_folders_of_dead_runs_are_removed_and_no_others(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    dead, alive = tmp_path / f"run-{child.pid}-x", tmp_path / f"run-{os.getppid()}-x"
    for folder in (dead, alive):
        folder.mkdir()
    with spool.own_folder(tmp_path) as own:
        assert own.is_dir() and alive.is_dir() and not dead.exists()
    assert not own.exists()
