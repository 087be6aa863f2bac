"""What runs the target: answers prompts, and prefills rows for their hidden states."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from eaglet.params import EngineParams, GenerateParams
from eaglet.target import Target

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Answer:
    """An answer as generated, end-of-turn token included; `finish_reason` is "stop" or "length"."""

    answer_ids: list[int]
    finish_reason: str


class Engine(Protocol):
    """The interface of every engine."""

    @property
    def numerics(self) -> str:
        """What the engine's results depend on besides model and ids; a part of every key."""

    def answer(self, contexts: Sequence[list[int]], params: GenerateParams) -> Iterator[tuple[int, Answer]]:
        """Answer each context; (index, answer) in whatever order they finish."""

    def prefill(
        self, rows: Sequence[list[int]], streams: Sequence[str]
    ) -> Iterator[tuple[int, dict[str, "torch.Tensor"]]]:
        """Hidden states of each row in one pass; (index, {stream: bfloat16 [T, H] on the CPU}) in any order."""


def open_engine(params: EngineParams, target: Target) -> Engine:
    """The engine that params.yaml names, on this target. The model is loaded when it is first needed."""
    from eaglet.engines.transformers import TransformersEngine

    return TransformersEngine(params, target)
