"""The EAGLE-3 drafter: one decoder layer behind the target's hidden states, and its checkpoint on disk.

Mathematics: eagle3.md, "Draft model" (Li et al. 2025, arXiv 2503.01840, section 3). Row t is position t of
the document. Its feature g⁰ is made from the target's streams at t; at step k its input token is x_{t+1+k},
and the layer turns gᵏ into gᵏ⁺¹. Row t attends to the step-0 keys of rows 0 … t and to its own keys of steps
1 … k. The step-0 keys follow from g⁰ and the tokens alone: `context` computes them once, for all positions.
`step` then runs on any rows: many of many documents in training, the last one of one in decoding.

Shapes: N positions of documents that lie one behind the other, R rows, S step-0 keys (attention.py), H hidden size,
n key heads of size d.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors_torch
from torch import Tensor, nn

from eaglet import draft_vocab, files
from eaglet import layers as layer_ids
from eaglet.attention import KeyValues, Segments, attention
from eaglet.draft_vocab import DraftVocabulary
from eaglet.errors import EagletError

ARCHITECTURE = "LlamaForCausalLMEagle3"
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose frequencies do not move with the length
# Rotating part of a head, or by image position, is the target's: the drafter rotates whole heads by position.
_ROPE_DROPPED = ("type", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class DrafterConfig:
    """The drafter's sizes, all the target's but for the draft vocabulary.

    `rope_parameters` is Transformers' dict: rope_theta, rope_type and what that type takes.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any]

    @classmethod
    def from_target(cls, config: Any, draft_vocab_size: int) -> "DrafterConfig":
        """The drafter for a target with this Transformers configuration (its text part).

        Raises:
            EagletError: the configuration lacks a size, or its RoPE moves with the length of the text.
        """
        text = config.get_text_config()
        heads = getattr(text, "num_attention_heads", 1)
        sizes: dict[str, Any] = {name: getattr(text, name, None) for name in cls.__dataclass_fields__}
        sizes["draft_vocab_size"] = draft_vocab_size
        sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or heads
        sizes["head_dim"] = sizes["head_dim"] or text.hidden_size // heads
        missing = [name for name, value in sizes.items() if value is None]
        if missing:
            raise EagletError(f"the target's configuration ({text.model_type}) has no {', '.join(missing)}")
        return cls(**{**sizes, "rope_parameters": _plain_rope(sizes["rope_parameters"])})


def _plain_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """The target's RoPE, or of its full-attention layers, as one that the drafter can have.

    Raises:
        EagletError: a type whose frequencies depend on the length (dynamic, longrope), or that is unknown.
    """
    rope = parameters.get("full_attention", parameters)
    rope = {"rope_type": rope.get("type", "default")} | {k: v for k, v in rope.items() if k not in _ROPE_DROPPED}
    if rope["rope_type"] not in _ROPE_TYPES or "rope_theta" not in rope:
        raise EagletError(f"the target's RoPE {rope} is not supported: the drafter can have {', '.join(_ROPE_TYPES)}")
    return rope


def rope_frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    """Angle per position, float32 [d/2], and the factor on cos and sin (scaled types: Transformers')."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / rope["rope_theta"] ** exponents, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    llama = LlamaConfig(
        hidden_size=config.head_dim * config.num_attention_heads,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(rope),
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](llama)
    return frequencies.float(), float(factor)


class _Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)


class _SwiGLU(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class _MidLayer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _SwiGLU(config)


class Drafter(nn.Module):
    """The draft model. Its parameters have the names of SGLang's LlamaForCausalLMEagle3.

    `embedding` [V, H] is the target's: a buffer, neither trained nor saved.
    """

    embedding: Tensor

    def __init__(self, config: DrafterConfig, embedding: Tensor, seed: int = 0) -> None:
        """A drafter of float32 weights that follow from `seed` alone.

        Raises:
            EagletError: `embedding` is not [V, H].
        """
        super().__init__()
        if tuple(embedding.shape) != (config.vocab_size, config.hidden_size):
            raise EagletError(
                f"the target's embedding is {list(embedding.shape)}, the drafter expects "
                f"[{config.vocab_size}, {config.hidden_size}]: is it another target's?"
            )
        self.config = config
        self.register_buffer("embedding", embedding, persistent=False)
        self.frequencies, self.rope_factor = rope_frequencies(config)
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = _MidLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:  # uniform in ±1/√fan_in, PyTorch's default for linear layers
                bound = parameter.shape[1] ** -0.5
                nn.init.uniform_(parameter, -bound, bound, generator=generator)

    def _apply(self, *args: Any, **kwargs: Any) -> "Drafter":
        """What moves a module: the frequencies go to the device too, but are never rounded as a buffer would be."""
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.frequencies = self.frequencies.to(self.fc.weight.device)
        return self

    def init_from_target(self, head_weight: Tensor, vocab: DraftVocabulary) -> None:
        """Let lm_head start from the target head's [V, H] rows of the draft vocabulary."""
        with torch.no_grad():
            self.lm_head.weight.copy_(head_weight[vocab.target_ids.to(head_weight.device)])

    def fuse(self, aux: Tensor) -> Tensor:
        """g⁰ = W_fc · concat(low, mid, high): [..., 3H] to [..., H]."""
        features: Tensor = self.fc(aux.to(self.fc.weight.dtype))
        return features

    def context(self, features: Tensor, tokens: Tensor, positions: Tensor) -> KeyValues:
        """Step-0 keys and values [N, n, d].

        Args:
            features: g⁰, [N, H].
            tokens: int64 [N], the *next* token x_{t+1} of each position.
            positions: int64 [N], each t within its document.
        """
        return self._key_values(self._input(features, tokens), positions)

    def step(
        self,
        k: int,
        features: Tensor,
        tokens: Tensor,
        positions: Tensor,
        context: KeyValues,
        segments: Segments,
        own: KeyValues | None = None,
    ) -> tuple[Tensor, KeyValues | None]:
        """One pass of the layer, gᵏ to gᵏ⁺¹, over rows of any positions.

        Args:
            k: the step.
            features: gᵏ, [R, H].
            tokens: int64 [R], x_{t+1+k} of each row.
            positions: int64 [R], the position t of each row; its RoPE position is t + k.
            context: step-0 keys and values [S, n, d], as `segments` orders them.
            segments: which of them each row sees.
            own: what the step before returned (None at step 0).

        Returns:
            gᵏ⁺¹ [R, H] before the norm, and the rows' own keys and values of steps 1 … k, [R, k, n, d].
        """
        layer = self.midlayer
        u = self._input(features, tokens)
        if k > 0:
            new = KeyValues(*(x[:, None] for x in self._key_values(u, positions + k)))
            own = new if own is None else KeyValues(*(torch.cat(both, 1) for both in zip(own, new, strict=True)))
        q = self._rotate(self._heads(layer.self_attn.q_proj(u)), positions + k)
        y = features + layer.self_attn.o_proj(attention(q, context, own, segments))
        return y + layer.mlp(layer.post_attention_layernorm(y)), own

    def logits(self, features: Tensor) -> Tensor:
        """W_lm · RMSNorm(gᵏ⁺¹): [..., H] to [..., Vd]."""
        logits: Tensor = self.lm_head(self.norm(features))
        return logits

    def _input(self, features: Tensor, tokens: Tensor) -> Tensor:
        """u = [RMS_input(E[x]) ; RMS_hidden(g)], [R, 2H]."""
        embedded = nn.functional.embedding(tokens, self.embedding).to(features.dtype)
        layer = self.midlayer
        return torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(features)], dim=-1)

    def _key_values(self, u: Tensor, positions: Tensor) -> KeyValues:
        keys = self._heads(self.midlayer.self_attn.k_proj(u))
        return KeyValues(self._rotate(keys, positions), self._heads(self.midlayer.self_attn.v_proj(u)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self.config.head_dim)  # [R, n·d] to [R, n, d]

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE (Su et al. 2021) in the half-split layout of Llama: [R, n, d] at positions [R]."""
        angles = positions[:, None, None] * self.frequencies  # [R, 1, d/2]
        cos, sin = ((f * self.rope_factor).to(x.dtype) for f in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Each tensor of a checkpoint and its shape (eagle3.md, "Exported checkpoint, SGLang")."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "d2t": (config.draft_vocab_size,),
        "t2d": (config.vocab_size,),
    }


def check_tensors(tensors: dict[str, Tensor], config: DrafterConfig, where: str) -> None:
    """Names, shapes and types: engines skip unknown names and leave missing ones at random, both silently.

    Raises:
        EagletError: a tensor is missing, unknown, or of another shape or type.
    """
    expected = tensor_shapes(config)
    if missing := sorted(expected.keys() - tensors.keys()):
        raise EagletError(f"{where} lacks the tensors {', '.join(missing)}")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise EagletError(f"{where} holds unknown tensors {', '.join(unknown)}")
    dtypes = {"d2t": torch.int64, "t2d": torch.bool}
    for name, shape in expected.items():
        tensor, dtype = tensors[name], dtypes.get(name, torch.bfloat16)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise EagletError(f"{where}: {name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}")


def save(folder: Path, drafter: Drafter, vocab: DraftVocabulary, layers: list[int], target_config: Any) -> None:
    """Write config.json and model.safetensors (bfloat16) as SGLang reads them; config.json comes last.

    Args:
        layers: the target's layers whose outputs the drafter was trained on, 0-based, low to high.
        target_config: the target's Transformers configuration.

    Raises:
        EagletError: the tensors are not those of `tensor_shapes`, or the layers not the target's.
    """
    text = target_config.get_text_config()
    layer_ids.choose(layers, text.num_hidden_layers)
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in drafter.state_dict().items()}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()} | {
        "d2t": vocab.d2t,
        "t2d": vocab.t2d,
    }
    check_tensors(tensors, drafter.config, "the drafter")
    draft_vocab.check(vocab.d2t, vocab.t2d, "the draft vocabulary")
    sizes = asdict(drafter.config)
    rope = sizes.pop("rope_parameters")
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **sizes,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": getattr(text, "bos_token_id", None),
        "eos_token_id": getattr(text, "eos_token_id", None),
        "torch_dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": layer_ids.to_sglang(layers, text.model_type),
            "use_aux_hidden_state": True,
        },
        "eaglet": {"layers": layers},  # as this project counts; engines pass over it
    }
    (folder / "config.json").unlink(missing_ok=True)
    with files.atomic(folder / "model.safetensors") as file:
        file.write(safetensors_torch.save(tensors, metadata={"format": "pt"}))
    files.write_json(folder / "config.json", config)


def load(folder: Path, embedding: Tensor) -> tuple[Drafter, DraftVocabulary]:
    """Read what `save` wrote.

    Args:
        embedding: the target's, [V, H]; the drafter computes in its dtype, on its device.

    Raises:
        EagletError: a file is missing or damaged, a tensor is not as expected, or the embedding's shape.
    """
    tensors, config = read(folder)
    vocab = draft_vocab.check(tensors.pop("d2t"), tensors.pop("t2d"), str(folder))
    drafter = Drafter(config, embedding)
    drafter.load_state_dict(tensors)
    return drafter.to(embedding.device, embedding.dtype), vocab


def read(folder: Path) -> tuple[dict[str, Tensor], DrafterConfig]:
    """The tensors that `save` wrote, checked, and the drafter's sizes; raises as `load`."""
    path = folder / "model.safetensors"
    config = _read_config(folder / "config.json")
    try:
        tensors = safetensors_torch.load_file(path)
    except (SafetensorError, OSError) as error:
        raise EagletError(f"{path} cannot be read ({error})") from None
    check_tensors(tensors, config, str(path))
    return tensors, config


def read_layers(folder: Path) -> list[int]:
    """The layers whose outputs a saved drafter was trained on.

    Raises:
        EagletError: no drafter of this project lies there.
    """
    config = files.read_json(folder / "config.json", "train")
    try:
        return [int(layer) for layer in config["eaglet"]["layers"]]
    except (KeyError, TypeError, ValueError):
        raise EagletError(f"{folder / 'config.json'} does not say which layers: it was not saved by eaglet") from None


def _read_config(path: Path) -> DrafterConfig:
    try:
        raw = json.loads(path.read_bytes())
        if raw["architectures"] != [ARCHITECTURE]:
            raise EagletError(f"{path}: architectures is {raw['architectures']}, not [{ARCHITECTURE!r}]")
        rope = {"rope_type": "default", "rope_theta": raw["rope_theta"], **(raw["rope_scaling"] or {})}
        names = [name for name in DrafterConfig.__dataclass_fields__ if name != "rope_parameters"]
        return DrafterConfig(**{name: raw[name] for name in names}, rope_parameters=rope)
    except FileNotFoundError:
        raise EagletError(f"{path} is missing: no drafter was saved there") from None
    except (ValueError, KeyError, TypeError) as error:
        raise EagletError(f"{path} is not a drafter's configuration: {error!r}") from None
