"""Seeded random weights of any geometry: each value is a function of (tensor name, element index, seed) alone.

The bits are the same on every device and however a tensor is cut into chunks, because everything up to the last two
roundings is integer arithmetic: splitmix64 hashes a counter, and the four 16-bit lanes of the hash are added. Such a
sum (Irwin-Hall, n = 4) is close to a normal distribution and ends at 3.46 standard deviations. Matrices have mean 0 and
standard deviation `std`; norm weights 1 and 0.1.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch

from mk.model import tensors
from mk.model.folder import write_model_folder
from mk.model.geometry import Geometry
from mk.model.synthetic_tokenizer import build_tokenizer

MATRIX_STD = 0.02
NORM_STD = 0.1

_CHUNK = 1 << 22  # elements made at a time: 32 MB of int64, which stays in a GPU's L2
_LANE_SUM_MEAN = 2 * 0xFFFF
_LANE_SUM_STD = math.sqrt(4 * (2**32 - 1) / 12)


class RandomWeights:
    """A `WeightSource` of made-up weights on `device`; a tensor is made anew each time it is asked for.

    The default `std` is the one the full model is initialised with; narrow models need more for their FFN to matter.
    `qk_scale` multiplies the q and k projections: plain random weights leave attention nearly uniform, where a wrong
    attention would go unnoticed. See `sharp_qk_scale`.
    """

    label = "random"

    def __init__(
        self,
        geometry: Geometry,
        seed: int = 0,
        device: torch.device | str = "cpu",
        std: float = MATRIX_STD,
        qk_scale: float = 1.0,
    ) -> None:
        self.geometry = geometry
        self.seed = seed
        self.device = torch.device(device)
        self.std = std
        self.qk_scale = qk_scale
        self._shapes = tensors.tensor_shapes(geometry)

    def tensor(self, hf_name: str) -> torch.Tensor:
        """The bf16 tensor of that name, on the device. KeyError if this geometry has none."""
        shape = self._shapes[hf_name]
        if len(shape) == 1:
            mean, std = 1.0, NORM_STD
        else:
            sharpened = hf_name.endswith(("q_proj.weight", "k_proj.weight"))
            mean, std = 0.0, self.std * (self.qk_scale if sharpened else 1.0)
        out = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        fill_random(out.view(-1), stream_key(hf_name, self.seed), mean, std)
        return out

    def write_folder(self, folder: Path) -> None:
        """Write all of a model's folder but its weights: config, tokenizer of `vocab` pieces, chat template.

        `load_tokenizer(folder)` then reads it like any other.
        """
        write_model_folder(folder, self.geometry, build_tokenizer(self.geometry.vocab))


def sharp_qk_scale(geometry: Geometry, logit_std: float = 3.5, std: float = MATRIX_STD) -> float:
    """The `qk_scale` at which attention logits have about this standard deviation.

    A normed input of unit mean square times weights of standard deviation s gives q and k entries of s * sqrt(hidden),
    and a logit, the sum of head_dim products over sqrt(head_dim), s^2 * hidden. The norm's weights add 1 + NORM_STD^2.
    """
    plain = std**2 * geometry.hidden * (1 + NORM_STD**2)
    return math.sqrt(logit_std / plain)


def stream_key(name: str, seed: int) -> int:
    """The 64-bit start of a tensor's counter, as a signed integer."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def fill_random(out: torch.Tensor, key: int, mean: float, std: float, first: int = 0) -> None:
    """Fill bf16 `out` [n] with elements first .. first + n - 1 of the stream `key`."""
    scale = torch.tensor(std / _LANE_SUM_STD, dtype=torch.float32).item()  # exactly a float32 on every device
    for start in range(0, len(out), _CHUNK):
        part = out[start : start + _CHUNK]
        index = torch.arange(first + start, first + start + len(part), dtype=torch.int64, device=out.device)
        centred = _lane_sum(_splitmix64(index, key)).sub_(_LANE_SUM_MEAN)
        value = centred.to(torch.float32).mul_(scale)  # |centred| < 2^18: the conversion is exact
        part.copy_(value.add_(mean) if mean else value)


def _splitmix64(x: torch.Tensor, key: int) -> torch.Tensor:
    """Hash counters in place. int64 products and sums wrap; right shifts are masked because >> copies the sign."""
    x.mul_(_signed(0x9E3779B97F4A7C15)).add_(key)
    x ^= (x >> 30).bitwise_and_((1 << 34) - 1)
    x.mul_(_signed(0xBF58476D1CE4E5B9))
    x ^= (x >> 27).bitwise_and_((1 << 37) - 1)
    x.mul_(_signed(0x94D049BB133111EB))
    x ^= (x >> 31).bitwise_and_((1 << 33) - 1)
    return x


def _lane_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum of the four unsigned 16-bit lanes of each int64; overwrites x."""
    even_lanes = 0x0000FFFF0000FFFF
    pairs = (x >> 16).bitwise_and_(even_lanes).add_(x.bitwise_and_(even_lanes))
    return (pairs >> 32).add_(pairs.bitwise_and_(0xFFFFFFFF))


def _signed(constant: int) -> int:
    """A 64-bit constant as torch's int64 holds it."""
    return constant - (1 << 64) if constant >= 1 << 63 else constant
