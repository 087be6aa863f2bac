"""Acceptance where it counts: the answers of an SGLang server, and the verify cycles that it says they took."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from eaglet.engines.sglang import sampling_params
from eaglet.errors import EagletError
from eaglet.params import GenerateParams
from eaglet.server import Rejected, Server, Unreachable


@dataclass(frozen=True)
class Served:
    """An answer, its end token included, and the server's verify cycles; 0 of them without a drafter."""

    output_ids: list[int]
    cycles: int


@dataclass(frozen=True)
class Pass:
    """Requests put so many at a time, in order, and the seconds from the first to the last answer."""

    batch: int
    served: list[Served]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all answers over the time."""
        return sum(len(one.output_ids) for one in self.served) / self.seconds


def measure(
    server: Server,
    prompts: Sequence[Sequence[int]],
    batch: int,
    max_new_tokens: int,
    end_ids: Iterable[int],
    on_answer: Callable[[Served], None] = lambda served: None,
) -> Pass:
    """Greedy answers to prompts, `batch` requests at a time; before that one batch that is not counted.

    Raises:
        EagletError: a request was refused, or not answered.
    """
    greedy = GenerateParams(True, max_new_tokens, temperature=0.0, top_p=1.0, top_k=0, seed=0)

    def put(prompt: Sequence[int]) -> Served:
        try:
            sampling = sampling_params(greedy, prompt, end_ids)
            reply = server.post("/generate", {"input_ids": list(prompt), "sampling_params": sampling})
        except (Rejected, Unreachable) as error:
            raise EagletError(f"the SGLang server at {server.url} did not answer: {server.died() or error}") from None
        return served(reply)

    with ThreadPoolExecutor(batch) as pool:
        list(pool.map(put, prompts[:batch]))
        found = []
        began = time.monotonic()
        for one in pool.map(put, prompts):
            found.append(one)
            on_answer(one)
        return Pass(batch, found, time.monotonic() - began)


def served(reply: dict[str, Any]) -> Served:
    """Out of a reply of the server's /generate.

    Raises:
        EagletError: the ids are not as many as the server counts.
    """
    ids, meta = reply["output_ids"], reply["meta_info"]
    if len(ids) != meta["completion_tokens"]:
        raise EagletError(f"the server counts {meta['completion_tokens']} tokens of an answer that has {len(ids)}")
    return Served(ids, meta.get("spec_verify_ct", 0))


def acceptance_length(answers: Iterable[Served]) -> float:
    """Σ tokens / Σ verify cycles, as SGLang counts; answers that took no cycle are divided by one."""
    tokens, cycles = map(sum, zip(*((len(one.output_ids), one.cycles) for one in answers), strict=True))
    return tokens / max(1, cycles)


def emitted_per_cycle(answers: Iterable[Served]) -> float:
    """The same without each answer's first token, which prefill wrote: `acceptance.acceptance_length`'s measure."""
    return acceptance_length([Served(one.output_ids[1:], one.cycles) for one in answers])


def differing(one: Pass, other: Pass) -> int:
    """Answers that are not the same, token for token."""
    both = zip(one.served, other.served, strict=True)
    return sum(first.output_ids != second.output_ids for first, second in both)
