"""The shape of a `cohere2_moe` model, read from its config.json, and the tile rules every other part obeys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mk.errors import MkError

ROWS = 16  # rows of one strip: the m of mma.m16n8k16
SLOT_K = 256  # k of one slot
SLOT_BYTES = ROWS * SLOT_K * 2  # 8 KB, the unit of the weight buffer and of the ring
HEAD_DIM = 128
PAGE = 64  # tokens of a KV page
MAX_GROUP = 8  # query heads a KV head: the n of mma.m16n8k16
MAX_EXPERTS = 128  # width of the expert mask
MAX_TOP_K = 8

LAYER_KINDS = ("full", "sliding")
MLP_KINDS = ("dense", "sparse")


@dataclass(frozen=True, slots=True)
class Geometry:
    """Every number that shapes the computation. Widths count elements, `window` counts keys including the query's own.

    `rope[i]` says whether layer i rotates q and k: sliding layers do, full layers only in a dense prefix of pattern 1.
    """

    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_ffn: int
    dense_ffn: int
    vocab: int
    layer_kinds: tuple[str, ...]  # "full" | "sliding"
    mlp_kinds: tuple[str, ...]  # "dense" | "sparse"
    rope: tuple[bool, ...]
    window: int
    rms_eps: float
    rope_theta: float
    logit_scale: float
    max_positions: int
    window_includes_extra: bool = False  # vLLM's reading: `window` keys before the query, plus the query's own

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "q_heads", "kv_heads", "head_dim", "vocab", "max_positions"):
            if getattr(self, name) < 1:
                raise MkError(f"geometry: {name}={getattr(self, name)} must be at least 1")
        for name, allowed in (("layer_kinds", LAYER_KINDS), ("mlp_kinds", MLP_KINDS), ("rope", (True, False))):
            values = getattr(self, name)
            if len(values) != self.layers:
                raise MkError(f"geometry: {name} has {len(values)} entries for {self.layers} layers")
            for layer, value in enumerate(values):
                if value not in allowed:
                    raise MkError(f"geometry: {name}[{layer}]={value!r} is not one of {allowed}")
        if "sparse" in self.mlp_kinds and not 1 <= self.top_k <= self.experts:
            raise MkError(f"geometry: top_k={self.top_k} must lie in 1..experts={self.experts}")

    @property
    def q_width(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused projection: all query heads, then all key heads, then all value heads."""
        return self.q_width + 2 * self.kv_width

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def window_keys(self) -> int:
        """Keys a query of a sliding layer sees, its own included."""
        return self.window + int(self.window_includes_extra)

    @property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "full")

    @property
    def sliding_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "sliding")

    @property
    def dense_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.mlp_kinds) if kind == "dense")

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.mlp_kinds) if kind == "sparse")

    @classmethod
    def from_hf_config(cls, source: Mapping[str, Any] | str | Path, window_includes_extra: bool = False) -> Geometry:
        """Read a config.json: its parsed contents, its path, or the folder that holds it.

        Raises MkError naming the field and its value where this code does not compute what the field asks for.
        """
        from mk.model import hf_config

        return hf_config.read(hf_config.load(source), window_includes_extra)

    def to_hf_config(self) -> dict[str, Any]:
        """The config.json of this geometry, as transformers' `Cohere2MoeConfig` accepts it; token ids are null."""
        from mk.model import hf_config

        return hf_config.write(self)


@dataclass(frozen=True, slots=True)
class MatrixTile:
    """One weight matrix [rows, k] and its size in strips of 16 rows and slots of 16 x 256."""

    rows: int
    k: int
    order: str  # row order inside the packing: "plain" | "gate_up" | "qkv"

    @property
    def strips(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def k_slots(self) -> int:
        return -(-self.k // SLOT_K)

    @property
    def padded_rows(self) -> int:
        return self.strips * ROWS

    @property
    def padded_k(self) -> int:
        return self.k_slots * SLOT_K

    @property
    def slots(self) -> int:
        return self.strips * self.k_slots


@dataclass(frozen=True, slots=True)
class Tiles:
    """The matrices of a geometry by name; an expert's matrix is listed once and exists `experts` times a layer."""

    matrices: Mapping[str, MatrixTile] = field(hash=False)


def layer_matrices(geometry: Geometry, layer: int) -> tuple[str, ...]:
    """Names of the matrices of one layer, in the order the packed buffer holds them."""
    ffn = ("dense_up", "dense_down") if geometry.mlp_kinds[layer] == "dense" else ("router", "up", "down")
    return ("qkv", "o", *ffn)


def tile_rules(geometry: Geometry) -> Tiles:
    """Check that a geometry fits the tiles and return every matrix padded to them. Raises MkError naming the field."""
    g = geometry
    rules = [
        ("head_dim", g.head_dim, g.head_dim == HEAD_DIM, f"must be {HEAD_DIM}"),
        ("q_heads", g.q_heads, g.q_heads % g.kv_heads == 0, f"must be a multiple of kv_heads={g.kv_heads}"),
        ("q_heads", g.q_heads, g.group <= MAX_GROUP, f"is more than {MAX_GROUP} query heads a KV head"),
        ("hidden", g.hidden, g.hidden % ROWS == 0, f"must be a multiple of {ROWS}"),
    ]
    if g.sliding_layers:
        fits = g.window > 0 and g.window % PAGE == 0
        rules.append(("window", g.window, fits, f"must be a positive multiple of the {PAGE}-token page"))
    if g.sparse_layers:
        rules += [
            ("experts", g.experts, g.experts <= MAX_EXPERTS, f"must be at most {MAX_EXPERTS}"),
            ("top_k", g.top_k, g.top_k <= MAX_TOP_K, f"must be at most {MAX_TOP_K}"),
            ("expert_ffn", g.expert_ffn, _whole_halves(g.expert_ffn), f"must be a positive multiple of {ROWS // 2}"),
        ]
    if g.dense_layers:
        rule = ("dense_ffn", g.dense_ffn, _whole_halves(g.dense_ffn), f"must be a positive multiple of {ROWS // 2}")
        rules.append(rule)
    for name, value, holds, why in rules:
        if not holds:
            raise MkError(f"geometry: {name}={value} {why}")

    matrices = {
        "qkv": MatrixTile(g.qkv_rows, g.hidden, "qkv"),
        "o": MatrixTile(g.hidden, g.q_width, "plain"),
        "head": MatrixTile(g.vocab, g.hidden, "plain"),
    }
    if g.sparse_layers:
        matrices["router"] = MatrixTile(g.experts, g.hidden, "plain")
        matrices["up"] = MatrixTile(2 * g.expert_ffn, g.hidden, "gate_up")
        matrices["down"] = MatrixTile(g.hidden, g.expert_ffn, "plain")
    if g.dense_layers:
        matrices["dense_up"] = MatrixTile(2 * g.dense_ffn, g.hidden, "gate_up")
        matrices["dense_down"] = MatrixTile(g.hidden, g.dense_ffn, "plain")
    return Tiles(matrices)


def _whole_halves(ffn: int) -> bool:
    """A gate/up strip is 8 gate rows and their 8 up rows."""
    return ffn > 0 and ffn % (ROWS // 2) == 0


def rope_layers(layer_kinds: tuple[str, ...], mlp_kinds: tuple[str, ...], prefix_pattern: int) -> tuple[bool, ...]:
    """Which layers rotate q and k: `sliding_window is not None or force_rope` of transformers' attention."""
    forced = prefix_pattern == 1
    return tuple(a == "sliding" or (m == "dense" and forced) for a, m in zip(layer_kinds, mlp_kinds, strict=True))


def north_mini_code() -> Geometry:
    """The full CohereLabs/North-Mini-Code-1.0: 49 layers, 128 experts, 30.5 B parameters."""
    layers = 49
    kinds = tuple("full" if i % 4 == 0 else "sliding" for i in range(layers))
    mlps = tuple("dense" if i == 0 else "sparse" for i in range(layers))
    return _north(layers, vocab=262_144, layer_kinds=kinds, mlp_kinds=mlps)


def slice_() -> Geometry:
    """Five layers of full width (dense, three sliding, one full without rope) and a short vocabulary."""
    kinds = ("full", "sliding", "sliding", "sliding", "full")
    return _north(5, vocab=16_384, layer_kinds=kinds, mlp_kinds=("dense",) + ("sparse",) * 4)


def _north(layers: int, vocab: int, layer_kinds: tuple[str, ...], mlp_kinds: tuple[str, ...]) -> Geometry:
    return Geometry(
        hidden=2048,
        layers=layers,
        q_heads=32,
        kv_heads=4,
        head_dim=128,
        experts=128,
        top_k=8,
        expert_ffn=768,
        dense_ffn=3072,
        vocab=vocab,
        layer_kinds=layer_kinds,
        mlp_kinds=mlp_kinds,
        rope=rope_layers(layer_kinds, mlp_kinds, prefix_pattern=1),
        window=4096,
        rms_eps=1e-6,
        rope_theta=50_000.0,
        logit_scale=1.0,
        max_positions=500_000,
    )


PRESETS: dict[str, Geometry] = {"north_mini_code": north_mini_code(), "slice": slice_()}
