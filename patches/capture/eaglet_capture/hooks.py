"""What is changed in SGLang 0.5.17 and 0.5.23, by its own hook registry. Nothing on disk is touched.

1. `configure_aux_hidden_state_capture`: the streams are chosen by absolute index, whatever the class means by an id.
2. `LogitsProcessor.forward`: the state after the final norm is kept beside them.
3. `GenerationBatchResult.copy_to_cpu`: it is copied to the host with them, on the copy stream.
4. `SchedulerBatchResultProcessor._append_prefill_hidden_states`: each request's rows go to the spool, those of
   middle chunks too, instead of into its JSON answer.
5. `Req.reset_for_retract`: a retracted request is prefilled again from its first token.
"""

import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eaglet_capture.spool import Request, Spool, SpoolError

logger = logging.getLogger(__name__)

PREFIX = "eaglet-"  # requests whose id starts so are captured; all others are served as without the plugin
# Classes whose +1 depends on the ids they are given; the index they keep means what it means elsewhere.
_CONDITIONAL = ("deepseek_v2", "glm4_moe_lite", "gpt_oss")
_WITHOUT_RESIDUAL = ("gemma3_causal",)  # classes that capture what a layer adds, not the stream
# Parts of weights that say which model this is: the name's end, rows, columns. eaglet reads the same of its target.
_SAMPLED = {
    "embedding": ("embed_tokens.weight", 64, None),
    "norm": ("model.norm.weight", None, None),
    "o_proj": ("layers.0.self_attn.o_proj.weight", 16, 16),
}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Settings:
    """What the server's environment asks for.

    Attributes:
        spool: the folder.
        layers: 0-based ids of layers whose *outputs* are captured, rising.
        max_bytes: of all files in the spool.
    """

    spool: Path
    layers: list[int]
    max_bytes: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Settings":
        """Read EAGLET_CAPTURE_SPOOL, _LAYERS ("1,14,26") and _MAX_BYTES (8 GiB if absent).

        Raises:
            ValueError: one is missing or wrong.
        """
        spool = Path(environment["EAGLET_CAPTURE_SPOOL"])
        if not spool.is_dir():
            raise ValueError(f"EAGLET_CAPTURE_SPOOL: {spool} is not a folder: make it first, readable by the client")
        text = environment.get("EAGLET_CAPTURE_LAYERS", "")
        try:
            layers = [int(part) for part in text.split(",")]
        except ValueError:
            layers = []
        if not layers or layers != sorted(set(layers)) or layers[0] < 0:
            raise ValueError(f"EAGLET_CAPTURE_LAYERS is {text!r}: give rising ids of layers, as in 1,14,26")
        size = environment.get("EAGLET_CAPTURE_MAX_BYTES", str(8 << 30))
        if not size.isdigit():
            raise ValueError(f"EAGLET_CAPTURE_MAX_BYTES is {size!r}: give a number of bytes")
        return cls(spool, layers, int(size))


class Capture:
    """The hooks of one scheduler process, and what they share."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._metadata: dict[str, str] = {}
        self._writes = False
        self._spool: Spool | None = None

    def install(self) -> None:
        """Register the hooks; SGLang applies them before it starts."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        scheduler = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
        for target, hook in {
            "sglang.srt.model_executor.model_runner.configure_aux_hidden_state_capture": self.configure,
            "sglang.srt.layers.logits_processor.LogitsProcessor.forward": self.keep_final,
            "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu": self.copy_final,
            f"{scheduler}._append_prefill_hidden_states": self.take_rows,
            "sglang.srt.managers.schedule_batch.Req.reset_for_retract": self.start_over,
        }.items():
            # A plain function: the registry wraps those only.
            HookRegistry.register(target, lambda *args, hook=hook, **kwargs: hook(*args, **kwargs), HookType.AROUND)

    def configure(self, original: Callable[..., None], *, model: Any, **kwargs: Any) -> None:
        """Hook 1. Runs once a rank, when the model is loaded.

        Raises:
            RuntimeError: the server runs with something that loses rows; it does not start.
        """
        from sglang.srt.runtime_context import get_parallel, get_server_args

        if problem := unfit(get_server_args()):
            raise RuntimeError(f"eaglet-capture: {problem}")
        original(model=model, **kwargs)
        streams = choose_streams(model, self._settings.layers)
        self._writes = get_parallel().attn_tp_rank == 0
        self._metadata = describe(model, streams)
        if self._writes:
            self._spool = Spool(self._settings.spool, self._settings.max_bytes)
        logger.info("eaglet-capture: streams entering layers %s → %s", streams, self._settings.spool)

    def keep_final(
        self,
        original: Callable[..., Any],
        processor: Any,
        input_ids: Any,
        hidden_states: torch.Tensor,
        lm_head: Any,
        logits_metadata: Any,
        aux_hidden_states: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Hook 2. `hidden_states` is [tokens, H] after the final norm.

        Raises:
            RuntimeError: the model gave fewer streams than asked for, which SGLang's classes do silently.
        """
        expected = len(self._settings.layers)
        if self._metadata and isinstance(aux_hidden_states, list) and len(aux_hidden_states) != expected:
            raise RuntimeError(
                f"eaglet-capture: the model gives {len(aux_hidden_states)} of {expected} streams: SGLang's class "
                f"cannot capture one of the layers {self._settings.layers}, most likely the last one"
            )
        output = original(
            processor, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states, *args, **kwargs
        )
        if aux_hidden_states is not None and logits_metadata.capture_hidden_mode.is_full():
            output.last_hidden_states = hidden_states
        return output

    def copy_final(
        self, original: Callable[..., Any], result: Any, return_logprob: bool, return_hidden_states: bool = True
    ) -> Any:
        """Hook 3. Ranks that do not write copy neither."""
        from sglang.srt.managers.utils import _async_d2h

        output = result.logits_output
        final = getattr(output, "last_hidden_states", None)
        if final is not None:
            output.last_hidden_states = _async_d2h(final) if self._writes else None
        return original(result, return_logprob, return_hidden_states and (self._writes or final is None))

    def take_rows(
        self,
        original: Callable[..., int],
        processor: Any,
        *,
        req: Any,
        logits_output: Any,
        hidden_state_offset: int,
        capture_hidden_mode: Any,
        extend_input_len: int,
        **kwargs: Any,
    ) -> int:
        """Hook 4. Rows [offset : offset + extend_input_len] of the batch are this request's next ones."""
        if not (capture_hidden_mode.is_full() and str(req.rid).startswith(PREFIX)):
            return original(
                processor,
                req=req,
                logits_output=logits_output,
                hidden_state_offset=hidden_state_offset,
                capture_hidden_mode=capture_hidden_mode,
                extend_input_len=extend_input_len,
                **kwargs,
            )
        end = hidden_state_offset + extend_input_len
        # A request that was retracted in this very step is prefilled again; one that is finished has all its rows.
        if self._spool is not None and req.return_hidden_states and not req.finished() and not req.is_retracted:
            rows = slice(hidden_state_offset, end)
            self._write(
                req,
                {
                    "aux": logits_output.hidden_states[rows].cpu(),
                    "final": logits_output.last_hidden_states[rows].cpu(),
                },
            )
        return end

    def _write(self, req: Any, tensors: dict[str, torch.Tensor]) -> None:
        assert self._spool is not None
        request: Request | None = getattr(req, "_eaglet_request", None)
        if request is None:
            ids = np.asarray(req.origin_input_ids, "<i4")
            widths = {name: values.shape[1] for name, values in tensors.items()}
            metadata = self._metadata | {"ids": hashlib.sha256(ids.tobytes()).hexdigest()}
            try:
                request = self._spool.start(req.rid, len(ids), widths, tensors["final"].dtype, metadata)
            except SpoolError as error:
                if not getattr(req, "_eaglet_failed", False):
                    req._eaglet_failed = True
                    self._spool.report(req.rid, str(error))
                return
            req._eaglet_request = request
        self._spool.write(request, tensors)

    def start_over(self, original: Callable[..., Any], req: Any) -> Any:
        """Hook 5."""
        request: Request | None = getattr(req, "_eaglet_request", None)
        if request is not None and self._spool is not None:
            self._spool.drop(request)
            req._eaglet_request = None
        return original(req)


def unfit(args: Any) -> str | None:
    """Why a server with these arguments (SGLang's ServerArgs) would lose rows, or None."""
    if not args.disable_radix_cache:
        return "the radix cache is on, and cached rows would be missing: start the server with --disable-radix-cache"
    if not args.enable_return_hidden_states:
        return "hidden states are off: start the server with --enable-return-hidden-states"
    if args.pp_size != 1:
        return "pipeline parallelism splits the streams over ranks: use --tp-size"
    if args.enable_two_batch_overlap:
        return "two-batch overlap reorders the rows: leave out --enable-two-batch-overlap"
    if args.speculative_algorithm:
        return "speculative decoding has its own use of these streams: leave out --speculative-algorithm"
    return None


def choose_streams(model: Any, layers: list[int]) -> list[int]:
    """Have `model` capture the outputs of `layers`; returns what is set: indices of the streams *entering* layers.

    SGLang's classes keep the index of the layer that a stream enters, id + 1; some add the 1 only for some ids.

    Raises:
        RuntimeError: the class captures nothing, or counts in a way that is not known here.
    """
    kind = type(model).__name__
    if not hasattr(model, "set_eagle3_layers_to_capture"):
        raise RuntimeError(f"eaglet-capture: SGLang's {kind} captures no hidden states (set_eagle3_layers_to_capture)")
    try:
        model.set_eagle3_layers_to_capture(list(layers))
    except IndexError:
        raise RuntimeError(f"eaglet-capture: SGLang's {kind} cannot capture one of the layers {layers}") from None
    wanted = [layer + 1 for layer in layers]
    holders = [module for module in model.modules() if getattr(module, "layers_to_capture", None)]
    if len(holders) != 1:
        raise RuntimeError(f"eaglet-capture: SGLang's {kind} keeps its layers_to_capture in {len(holders)} places")
    holder = holders[0]
    if sorted(holder.layers_to_capture) != wanted:
        if type(holder).__module__.rsplit(".", 1)[-1] not in _CONDITIONAL:
            raise RuntimeError(
                f"eaglet-capture: SGLang's {kind} takes {layers} for {list(holder.layers_to_capture)}, where the "
                f"streams entering layers {wanted} are meant: not a convention that this plugin knows"
            )
        holder.layers_to_capture = wanted
    flagged = [index for index, layer in enumerate(holder.layers) if getattr(layer, "_is_layer_to_capture", False)]
    if flagged and flagged != wanted:
        raise RuntimeError(f"eaglet-capture: SGLang's {kind} marks the layers {flagged}, not {wanted}")
    if type(holder).__module__.rsplit(".", 1)[-1] in _WITHOUT_RESIDUAL:
        capture_sums(holder, wanted)
    return sorted(holder.layers_to_capture)


def capture_sums(decoder: Any, streams: list[int]) -> None:
    """Have a decoder return, in its captured tensors' place, the whole stream entering each of these layers.

    SGLang's layers hand on the residual apart from what is still to be added to it; the stream is their sum.
    """
    kept: list[torch.Tensor] = []

    def enter(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        residual = inputs["residual"]
        kept.append(inputs["hidden_states"] if residual is None else inputs["hidden_states"] + residual)

    def leave(module: Any, args: Any, output: Any) -> Any:
        whole = list(kept)
        kept.clear()
        return (output[0], whole) if isinstance(output, tuple) else output

    for stream in streams:
        if stream == len(decoder.layers):
            raise RuntimeError("eaglet-capture: the output of the last layer cannot be captured: choose a lower one")
        decoder.layers[stream].register_forward_pre_hook(enter, with_kwargs=True)
    decoder.register_forward_hook(leave)


def describe(model: Any, streams: list[int]) -> dict[str, str]:
    """What each file says of its origin: streams, releases, the model's class and samples of its weights."""
    return {
        "streams": json.dumps(streams),
        "final": "post_norm",
        "sglang": importlib.metadata.version("sglang"),
        "plugin": importlib.metadata.version("eaglet-capture"),
        "class": type(model).__name__,
        "weights": json.dumps(samples(dict(model.named_parameters()))),
    }


def samples(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """sha256 of parts of a few weights as float32: which model this is.

    Of each, what rank 0 holds under tensor parallelism. Weights that are quantised or not there are left out.
    """
    found = {}
    for label, (ending, rows, columns) in _SAMPLED.items():
        for name, values in weights.items():
            if name.endswith(ending) and "vis" not in name and values.dtype in _FLOATS:
                part = values.detach()[:rows] if values.dim() == 1 else values.detach()[:rows, :columns]
                found[label] = hashlib.sha256(part.float().cpu().contiguous().numpy().tobytes()).hexdigest()
                break
    return found
