"""The target in this process, by Transformers: the reference engine, and the one that needs no GPU."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import torch
import transformers

from eaglet import capture
from eaglet.engines import Answer, Engine, Refusal, States, Used
from eaglet.params import EngineParams, GenerateParams
from eaglet.target import Target

_WINDOW_ROWS = 64  # of which batches of similar length are made; their states come out together


class TransformersEngine:
    """Answers and prefills in batches of similar length."""

    def __init__(self, params: EngineParams, target: Target) -> None:
        self._params = params
        self._target = target

    @property
    def numerics(self) -> str:
        """Engine and arithmetic. Batches are not in it: they move a row by noise only (tested)."""
        return f"transformers/{self._target.dtype}"

    @cached_property
    def _model(self) -> Any:
        return self._target.model()

    def answer(self, contexts: Sequence[list[int]], params: GenerateParams) -> Iterator[tuple[int, Answer | Refusal]]:
        """See `Engine.answer`. Batches are padded on the left and masked."""
        limit = getattr(self._target.config, "max_position_embeddings", None) or float("inf")
        order = []
        for index, context in enumerate(contexts):
            if len(context) + params.max_new_tokens <= limit:
                order.append(index)
            else:
                yield (
                    index,
                    Refusal(
                        f"its {len(context)} tokens and generate.max_new_tokens {params.max_new_tokens} exceed the "
                        f"target's context of {limit}: shorten the prompt or lower the parameter"
                    ),
                )
        order.sort(key=lambda index: len(contexts[index]))
        for start in range(0, len(order), self._params.batch_rows):
            batch = order[start : start + self._params.batch_rows]
            width = len(contexts[batch[-1]])
            yield from zip(batch, self._generate([contexts[index] for index in batch], width, params), strict=True)

    def _generate(self, contexts: list[list[int]], width: int, params: GenerateParams) -> list[Answer]:
        ends = self._target.end_ids
        pad = min(ends)
        device = self._model.device
        ids = torch.tensor([[pad] * (width - len(context)) + context for context in contexts], device=device)
        mask = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts], device=device)
        # A configuration of our own: the folder's generation_config.json may hold sampling defaults or penalties.
        config = transformers.GenerationConfig(
            max_new_tokens=params.max_new_tokens, do_sample=False, eos_token_id=sorted(ends), pad_token_id=pad
        )
        self._model.generation_config = config
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=config,
                logits_processor=_sampler(params, contexts, device),
            )
        answers = []
        for generated in output[:, width:].tolist():
            stop = next((place for place, token in enumerate(generated) if token in ends), None)
            if stop is None:
                answers.append(Answer(generated, "length"))
            else:
                answers.append(Answer(generated[: stop + 1], "stop"))
        return answers

    def prefill(
        self, rows: Iterable[list[int]], streams: Sequence[str], use: Callable[[int, States], Used]
    ) -> Iterator[tuple[int, Used | Refusal]]:
        """See `Engine.prefill`. Batches are padded on the right: no row sees its padding."""
        numbered = enumerate(rows)
        while window := list(islice(numbered, _WINDOW_ROWS)):
            for batch in batches_by_length([len(row) for _, row in window], self._params.batch_tokens):
                members = [window[place] for place in batch]
                for (index, _), states in zip(members, self._states([row for _, row in members], streams), strict=True):
                    yield index, use(index, states)

    def _states(self, rows: Sequence[list[int]], streams: Sequence[str]) -> Iterator[States]:
        """One batch's states, row by row."""
        width = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row)
            mask[place, : len(row)] = 1
        device = self._model.device
        kept, _ = capture.forward(
            self._model,
            streams,
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            use_cache=False,
        )
        for place, row in enumerate(rows):
            yield {name: kept[name][place, : len(row)].to("cpu", torch.bfloat16) for name in streams}

    def split(self, streams: Sequence[str], tokens: int, longest: int) -> list[Callable[[], Engine]]:
        """See `Engine.split`: the model is in this process."""
        return []

    def status(self) -> str:
        """See `Engine.status`."""
        return ""

    def close(self) -> None:
        """See `Engine.close`: nothing was started."""


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices in batches of similar length, each at most `batch_tokens` with its padding (one row at least)."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True):
        # Longest first: the first of a batch is its width, and what is too large for memory fails at once.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _sampler(
    params: GenerateParams, contexts: list[list[int]], device: torch.device
) -> transformers.LogitsProcessorList:
    """Nothing for greedy decoding; else temperature, top-k, top-p and noise whose argmax is a sample."""
    steps = transformers.LogitsProcessorList()
    if params.temperature == 0:
        return steps
    steps.append(transformers.TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        steps.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(transformers.TopPLogitsWarper(params.top_p))
    steps.append(_GumbelNoise(params.seed, contexts, device))
    return steps


class _GumbelNoise(transformers.LogitsProcessor):  # type: ignore[misc]
    """Gumbel-max sampling: argmax(logits + noise) is a draw from their softmax (Gumbel 1954).

    The noise of a row comes from the seed and the row's own context: its sample does not depend on its batch.
    """

    def __init__(self, seed: int, contexts: list[list[int]], device: torch.device) -> None:
        self._generators = []
        for context in contexts:
            name = hashlib.sha256(f"{seed}:{context}".encode()).digest()
            generator = torch.Generator("cpu")
            generator.manual_seed(int.from_bytes(name[:8], "big") >> 1)
            self._generators.append(generator)
        self._device = device

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.stack([torch.rand(scores.shape[1], generator=generator) for generator in self._generators])
        return scores.float() - (-noise.clamp_min(1e-20).log()).log().to(self._device)
