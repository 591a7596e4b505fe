// The sampler's arithmetic, the same operations in the same order as mk/noise.py and mk/shortlist.py.
//
// exp and log of two libraries differ in their last bits, and a bit may change a drawn token. So both are polynomials
// of single float32 operations that round to nearest; the intrinsics keep the compiler from fusing them.
#pragma once
#include "params.cuh"

constexpr int BINS = 1024;
constexpr float REACH = 25.5f;  // temperatures below the largest logit from where on a token cannot be drawn
constexpr int MASS_BITS = 31;   // fixed point of a probability relative to the largest one

constexpr float LN2 = 0.6931472f;

template <int N>
DEVICE float polynomial(const float (&coefficients)[N], float x) {
  float value = coefficients[N - 1];
#pragma unroll
  for (int i = N - 2; i >= 0; --i) value = __fadd_rn(__fmul_rn(value, x), coefficients[i]);
  return value;
}
// x * ln(1 + x) / x for x from sqrt(1/2) - 1 to sqrt(2) - 1.
DEVICE float log_near_one(float x) {
  constexpr float C[] = {1.0f,
                         -0.49999988079071045f,
                         0.3333418369293213f,
                         -0.2500215470790863f,
                         0.19956977665424347f,
                         -0.16560696065425873f,
                         0.14949095249176025f,
                         -0.14377330243587494f,
                         0.08743945509195328f};
  return __fmul_rn(x, polynomial(C, x));
}

// ---- noise ------------------------------------------------------------------------------------------------------

// Philox4x32-10: words of tokens 4 block .. 4 block + 3 at a position.
DEVICE void philox(uint32_t (&word)[4], uint32_t block, uint32_t position, uint64_t seed) {
  word[0] = block, word[1] = position, word[2] = 0, word[3] = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    uint32_t low0 = 0xD2511F53u * word[0], high0 = __umulhi(0xD2511F53u, word[0]);
    uint32_t low1 = 0xCD9E8D57u * word[2], high1 = __umulhi(0xCD9E8D57u, word[2]);
    word[0] = high1 ^ word[1] ^ k0, word[1] = low1;
    word[2] = high0 ^ word[3] ^ k1, word[3] = low0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
}

// -ln(-ln(1 - u)), u = (word | 1) / 2^32. 1 - u is taken apart in integers: near 1, where the largest values come from,
// it is too fine for float32.
DEVICE float gumbel(uint32_t word) {
  uint32_t rest = 0u - (word | 1u);
  int halvings = __clz(rest);
  uint32_t mantissa = rest << halvings;  // of [1/2, 1) in units of 2^-32
  bool low = mantissa < 0xB504F334u;     // sqrt(1/2)
  float x = low ? __fmul_rn(__int2float_rn(static_cast<int>(mantissa - 0x80000000u)), 0x1p-31f)
                : __fmul_rn(__int2float_rn(static_cast<int>(mantissa)), 0x1p-32f);
  float exponential = __fsub_rn(__fmul_rn(__int2float_rn(halvings + low), LN2), log_near_one(x));
  int bits = __float_as_int(exponential) - 0x3F3504F3;
  float y = __fsub_rn(__int_as_float((bits & 0x7FFFFF) + 0x3F3504F3), 1.f);
  return -__fadd_rn(__fmul_rn(__int2float_rn(bits >> 23), LN2), log_near_one(y));
}

// What the drawn token has the most of. A product of two float32 is exact in float64, so the sum is rounded once.
DEVICE double noisy_score(float logit, float temperature, float noise) {
  return static_cast<double>(logit) + static_cast<double>(temperature) * static_cast<double>(noise);
}

// ---- masses and orders ------------------------------------------------------------------------------------------

// exp(-below / temperature) in units of 2^-31, rounded down; rate = log2(e) / temperature.
DEVICE uint32_t token_mass(float below, float rate) {
  constexpr float C[] = {-0.6931471824645996f,  0.24022610485553741f,    -0.055499278008937836f,
                         0.009597169235348701f, -0.0012917894637212157f, 0.00011498086678329855f};
  float orders = fminf(__fmul_rn(below, rate), 64.f), whole = floorf(orders);
  float x = __fsub_rn(orders, whole);
  float fraction = __fadd_rn(1.f, __fmul_rn(x, polynomial(C, x)));
  uint32_t mass = static_cast<uint32_t>(__fmul_rn(fraction, 0x1p31f));
  return whole < 32.f ? mass >> static_cast<int>(whole) : 0;
}

// Floats as unsigned numbers of the same order; -0 and +0 are one.
DEVICE uint32_t ordered_key(float v) {
  uint32_t bits = __float_as_uint(__fadd_rn(v, 0.f));  // -0 + 0 = +0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
DEVICE float float_of_key(uint32_t key) { return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key); }

// What the masses kept by top-p must add up to.
DEVICE uint64_t needed_mass(uint64_t total, double top_p) {
  double need = ceil(__dmul_rn(top_p, static_cast<double>(total)));
  return need < 1. ? 1 : static_cast<uint64_t>(need);
}

// Where a row's logits lie, and with that the bins: from `top`, its largest, down to `floor`.
struct RowView {
  float top = 0.f, floor = 0.f, reach = 0.f, scale = 0.f, rate = 0.f;
  RowView() = default;
  DEVICE RowView(const RowSampling& q, float top_, float floor_) : top(top_), floor(floor_), rate(q.rate) {
    reach = __fmul_rn(REACH, q.temperature);
    float width = fminf(reach, __fsub_rn(top, floor));
    scale = width > 0.f ? __fdiv_rn(static_cast<float>(BINS), width) : 0.f;
  }
  // Bin of a logit, 0 for the largest; NONE where it is out of reach or below the floor.
  DEVICE int bin(float logit) const {
    float below = __fsub_rn(top, logit), scaled = __fmul_rn(below, scale);
    int found = scaled < BINS ? static_cast<int>(scaled) : BINS - 1;
    // never outside the bins, whatever the candidates say
    return below >= 0.f && below <= reach && logit >= floor ? found : NONE;
  }
  DEVICE uint32_t mass(float logit) const { return token_mass(__fsub_rn(top, logit), rate); }
};
