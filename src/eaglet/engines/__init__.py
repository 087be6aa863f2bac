"""What runs the target: answers prompts, and prefills rows for their hidden states."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from eaglet.params import EngineParams, GenerateParams
from eaglet.target import Target

if TYPE_CHECKING:
    import torch

Used = TypeVar("Used")
States = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Answer:
    """An answer as generated, end-of-turn token included; `finish_reason` is "stop" or "length"."""

    answer_ids: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Refusal:
    """Why one prompt or row was not computed; all others were."""

    reason: str


class Engine(Protocol):
    """The interface of every engine. What it starts is started when it is first needed."""

    @property
    def numerics(self) -> str:
        """What its hidden states depend on besides model and ids; a part of their key."""

    def answer(self, contexts: Sequence[list[int]], params: GenerateParams) -> Iterator[tuple[int, Answer | Refusal]]:
        """Answer each context; (index, answer) in whatever order they finish.

        Raises:
            EagletError: nothing can be answered any more.
        """

    def prefill(
        self, rows: Iterable[list[int]], streams: Sequence[str], use: Callable[[int, States], Used]
    ) -> Iterator[tuple[int, Used | Refusal]]:
        """Hidden states of each row in one pass; what `use` makes of them, in whatever order they finish.

        Rows are pulled as there is room for them. `use` is given the row's index and {stream: bfloat16 [T, H] on the
        CPU}, in any thread, and keeps none of the tensors: they are gone when it returns.

        Raises:
            EagletError: nothing can be computed any more.
        """

    def split(self, streams: Sequence[str], tokens: int, longest: int) -> list[Callable[[], "Engine"]]:
        """What opens this engine in each of several processes, that prefill `tokens` tokens together.

        Args:
            longest: tokens of the longest row.

        Returns:
            Picklable functions; none where the work is best done in this process.
        """

    def status(self) -> str:
        """What the progress line says of it, if anything."""

    def close(self) -> None:
        """Stop what was started."""


def open_engine(params: EngineParams, target: Target) -> Engine:
    """The engine that params.yaml names, on this target."""
    if params.name == "sglang":
        from eaglet.engines.sglang import SGLangEngine

        return SGLangEngine(params, target)
    from eaglet.engines.transformers import TransformersEngine

    return TransformersEngine(params, target)
