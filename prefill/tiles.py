"""Sizes of the kernels' tiles. None changes a bit of what is computed, only how fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProductTile:
    """A tile of m x n outputs, k multiplied at a time; `group` row tiles go over all columns together.

    tail: height of a tile that has no more rows than that, 0 = m.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8
    tail: int = 0

    def launch(self) -> dict[str, int]:
        """Keyword arguments of a kernel that multiplies such tiles."""
        return {
            "BLOCK_M": self.m,
            "BLOCK_N": self.n,
            "BLOCK_K": self.k,
            "GROUP_M": self.group,
            "TAIL": self.tail,
            "STAGES": self.stages,
            "num_warps": self.warps,
        }


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """`tokens` queries with all heads of a group, `keys` keys (one or two pages) at a time."""

    tokens: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Products have two sizes: `large` where that makes a tile for every one of `sms` SMs, else `small`.

    For experts the row count of the average expert decides, `large_rows` being the least for large tiles.
    """

    large: ProductTile
    small: ProductTile
    up: ProductTile
    up_small: ProductTile
    down: ProductTile
    down_small: ProductTile
    large_rows: int
    attention: AttentionTile
    route: ProductTile  # m tokens a block; n is ignored
    rows: int  # whole rows of the residual a program
    sms: int

    def product(self, rows: int, columns: int) -> ProductTile:
        tiles = -(-rows // self.large.m) * -(-columns // self.large.n)
        return self.large if tiles >= self.sms else self.small

    def experts(self, rows: int, experts: int) -> tuple[ProductTile, ProductTile]:
        """(up, down) for `rows` sorted rows; both have the same m."""
        if rows >= self.large_rows * experts:
            return self.up, self.down
        return self.up_small, self.down_small


HOPPER = Tiles(
    large=ProductTile(128, 256, 64, warps=8, stages=4),
    small=ProductTile(64, 64, 128, warps=4, stages=4),
    up=ProductTile(128, 256, 64, warps=8, stages=4, tail=64),
    up_small=ProductTile(64, 128, 64, warps=4, stages=4),
    down=ProductTile(128, 256, 64, warps=8, stages=4, tail=64),
    down_small=ProductTile(64, 128, 64, warps=4, stages=4),
    large_rows=96,
    attention=AttentionTile(16, 64, warps=8, stages=3),
    route=ProductTile(64, 128, 64, warps=8, stages=4),
    rows=1,
    sms=132,
)

# Under the interpreter a block costs some 10 ms, and a product as much as its multiplications, padding included.
_PLAIN = ProductTile(64, 128, 256, warps=1, stages=1)
_THIN = ProductTile(16, 256, 256, warps=1, stages=1)
INTERPRETED = Tiles(
    large=_PLAIN,
    small=_THIN,
    up=_PLAIN,
    up_small=ProductTile(16, 64, 256, warps=1, stages=1),
    down=_PLAIN,
    down_small=_THIN,
    large_rows=60,
    attention=AttentionTile(64, 64, warps=1, stages=1),
    route=_PLAIN,
    rows=64,
    sms=4,
)
