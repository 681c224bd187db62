// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC11) on registers. Included
// by body files, inside foreach_target.h: no include guard on purpose.
#include "kernels/common/simd-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

using Longs = std::uint64_t __attribute__((vector_size(4 * PYPRUNE_TARGET_WIDTH)));

// 64-bit products of the lower words; what the upper words hold is ignored.
#if PYPRUNE_TARGET_WIDTH == 16

inline Longs multiply_lower(Longs a, std::uint32_t b) {
  return (Longs)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(static_cast<std::int64_t>(b)));
}

#elif PYPRUNE_TARGET_WIDTH == 8

inline Longs multiply_lower(Longs a, std::uint32_t b) {
  return (Longs)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(static_cast<std::int64_t>(b)));
}

#else

inline Longs multiply_lower(Longs a, std::uint32_t b) { return (a & 0xffffffffu) * static_cast<std::uint64_t>(b); }

#endif

// Ten rounds on kWidth / 2 counters of four words. Every word is the lower half of a lane.
inline void philox_rounds(Longs* x, std::uint64_t seed) {
  std::uint32_t key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Longs product0 = multiply_lower(x[0], 0xD2511F53u), product2 = multiply_lower(x[2], 0xCD9E8D57u);
    x[0] = (product2 >> 32) ^ x[1] ^ static_cast<std::uint64_t>(key0);
    x[1] = product2;
    x[2] = (product0 >> 32) ^ x[3] ^ static_cast<std::uint64_t>(key1);
    x[3] = product0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// The four words of kWidth consecutive counters: the first of them is `counter`, a multiple of kWidth, and they share
// the three upper words.
inline void philox(std::uint32_t counter, const std::uint32_t* upper_words, std::uint64_t seed, Words* words) {
  Longs x[4], y[4];
  for (int i = 0; i < kWidth / 2; ++i) x[0][i] = std::uint64_t{counter} + 2 * static_cast<std::uint64_t>(i);
  for (int i = 1; i < 4; ++i) x[i] = Longs{} + static_cast<std::uint64_t>(upper_words[i - 1]);
  y[0] = x[0] + 1;
  for (int i = 1; i < 4; ++i) y[i] = x[i];
  philox_rounds(x, seed);
  philox_rounds(y, seed);
  for (int i = 0; i < 4; ++i) words[i] = (Words)((x[i] & 0xffffffffu) | (y[i] << 32));
}

}  // namespace
}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
