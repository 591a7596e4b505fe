// Stands in for CUDA's header: the sampler has no bf16, but headers that it includes name the types.
#pragma once
struct __nv_bfloat16 {
  unsigned short bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short v) { return {v}; }
