"""Progress of long work on a terminal; quiet elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from eaglet.files import human_bytes

_EVERY = 0.5  # seconds between two lines on a terminal


class Progress:
    """Rows, tokens and bytes done; the rate and the time left follow from tokens, since rows differ in length."""

    def __init__(self, label: str, total_tokens: int, total_rows: int, status: Callable[[], str] = str) -> None:
        self._label = label
        self._total_tokens = total_tokens
        self._total_rows = total_rows
        self._status = status
        self._rows = self._tokens = self._bytes = 0
        self._start = time.monotonic()
        self._first: tuple[float, int] | None = None  # when the first rows were done, and their tokens
        self._shown = 0.0
        self._live = sys.stderr.isatty()

    def add(self, rows: int = 0, tokens: int = 0, size: int = 0) -> None:
        """Count what was just finished."""
        self._rows += rows
        self._tokens += tokens
        self._bytes += size
        now = time.monotonic()
        if self._first is None and tokens:
            self._first = now, tokens
        if self._live and now - self._shown > _EVERY:
            self._shown = now
            sys.stderr.write(f"\r\033[K{self._line(now)}")
            sys.stderr.flush()

    def _line(self, now: float) -> str:
        parts = [f"{self._label}: {self._rows:,}/{self._total_rows:,} rows", f"{self._tokens:,} tokens"]
        # From the first rows on: before them a server or a model had to start.
        since, before = self._first or (now, 0)
        rate = (self._tokens - before) / max(now - since, 1e-9)
        if rate:
            parts.append(f"{rate:,.0f} tok/s")
        if self._bytes:
            parts.append(f"{human_bytes(self._bytes)} written")
            if rate:
                parts.append(f"{self._bytes / (now - since) / 1e9:.3g} GB/s")
        if status := self._status():
            parts.append(status)
        if rate and self._tokens < self._total_tokens:
            parts.append(f"{(self._total_tokens - self._tokens) / rate:,.0f} s left")
        return " · ".join(parts)

    def close(self) -> None:
        """Turn the live line into one that says what was done."""
        if self._live and self._rows:
            now = time.monotonic()
            sys.stderr.write(f"\r\033[K{self._line(now)} · {now - self._start:.1f} s\n")


@contextmanager
def progress(label: str, total_tokens: int, total_rows: int, status: Callable[[], str] = str) -> Iterator[Progress]:
    """A `Progress` that is closed whatever happens; `status` is what else its line says."""
    shown = Progress(label, total_tokens, total_rows, status)
    try:
        yield shown
    finally:
        shown.close()
