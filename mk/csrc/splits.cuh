// Where a sequence's attention is cut: the same arithmetic as mk/splits.py.
#pragma once
#include "shared.cuh"

// Split sizes are powers of two, so that no role divides: one thread does this arithmetic ahead of every task.
struct Splits {
  int first, shift, keys;  // first visible key, log2 of a split's keys, context length

  DEVICE Splits(int context, bool sliding) : first(0), shift(SPLIT_SHIFT), keys(context) {
    if (sliding) {
      first = max(0, context - WINDOW_KEYS);
      shift = WINDOW_SHIFT;
    } else {
      while ((context - 1) >> shift >= MAX_SPLITS) ++shift;
    }
  }
  DEVICE int count() const { return keys <= 0 ? 0 : ((keys - 1) >> shift) - (first >> shift) + 1; }
  DEVICE int lo(int split) const { return max(first, ((first >> shift) + split) << shift); }
  DEVICE int hi(int split) const { return min(keys, ((first >> shift) + split + 1) << shift); }
};

// The pages of one 128-key chunk that hold a key of [lo, hi): bit 0 and bit 1.
DEVICE int chunk_pages(int base, int lo, int hi) {
  int first = lo < base + PAGE && hi > base;
  int second = lo < base + 2 * PAGE && hi > base + PAGE;
  return first | second << 1;
}
