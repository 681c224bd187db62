// One register of float32 lanes on every target, with conversions from and to storage that agree bit for bit with
// storage-inl.h. Arithmetic is the compiler's own vector arithmetic (operators on Floats); only what has no operator
// is spelled out per target. Included by body files, inside foreach_target.h: no include guard on purpose.
#include "kernels/common/storage-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

constexpr int kWidth = PYPRUNE_TARGET_WIDTH;

using Floats = float __attribute__((vector_size(4 * PYPRUNE_TARGET_WIDTH)));
using Words = std::uint32_t __attribute__((vector_size(4 * PYPRUNE_TARGET_WIDTH)));
using Integers = std::int32_t __attribute__((vector_size(4 * PYPRUNE_TARGET_WIDTH)));
// Half as many lanes as Floats.
using Doubles = double __attribute__((vector_size(4 * PYPRUNE_TARGET_WIDTH)));

inline Floats spread(float value) { return value - Floats{}; }

inline Floats load_lanes(const float* x) {
  Floats lanes;
  std::memcpy(&lanes, x, sizeof lanes);
  return lanes;
}

inline void store_lanes(float* out, Floats lanes) { std::memcpy(out, &lanes, sizeof lanes); }

inline Doubles load_lanes(const double* x) {
  Doubles lanes;
  std::memcpy(&lanes, x, sizeof lanes);
  return lanes;
}

inline void store_lanes(double* out, Doubles lanes) { std::memcpy(out, &lanes, sizeof lanes); }

// The bits of bfloat16 in the upper halves; the lower halves are what rounding left over. Not for NaN.
inline Words number_to_bfloat16(Floats lanes) {
  const Words bits = (Words)lanes;
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

inline Words rounded_to_bfloat16(Floats lanes) {
  return lanes == lanes ? number_to_bfloat16(lanes) : ((Words)lanes | 0x400000u);
}

// load_bytes() and store_bytes(): one byte, 0 to 255, for each lane. add_square() may fuse: the square of a float32 is
// exact in double, so both forms round once and alike.
#if PYPRUNE_TARGET_WIDTH == 16

inline Floats load_lanes(const BFloat16* x) {
  return (Floats)((Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)) << 16);
}

inline void store_upper_halves(void* out, Words words) {
  _mm256_storeu_si256((__m256i*)out, _mm512_cvtepi32_epi16((__m512i)(words >> 16)));
}

inline Floats load_lanes(const Float16* x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x)); }

inline void store_lanes(Float16* out, Floats lanes) {
  _mm256_storeu_si256((__m256i*)out, _mm512_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline Doubles lower(Floats lanes) { return _mm512_cvtps_pd(_mm512_castps512_ps256(lanes)); }

inline Doubles upper(Floats lanes) {
  return _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(lanes), 1)));
}

inline Doubles add_square(Doubles sum, Doubles value) { return _mm512_fmadd_pd(value, value, sum); }

inline Floats square_root(Floats value) { return _mm512_sqrt_ps(value); }

inline Words load_bytes(const std::uint8_t* x) {
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)x));
}

inline void store_bytes(std::uint8_t* out, Words words) {
  _mm_storeu_si128((__m128i*)out, _mm512_cvtepi32_epi8((__m512i)words));
}

#elif PYPRUNE_TARGET_WIDTH == 8

inline Floats load_lanes(const BFloat16* x) {
  return (Floats)((Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x)) << 16);
}

inline void store_upper_halves(void* out, Words words) {
  const __m256i halves = (__m256i)(words >> 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);
  _mm_storeu_si128((__m128i*)out, _mm256_castsi256_si128(packed));
}

inline Floats load_lanes(const Float16* x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)x)); }

inline void store_lanes(Float16* out, Floats lanes) {
  _mm_storeu_si128((__m128i*)out, _mm256_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline Doubles lower(Floats lanes) { return _mm256_cvtps_pd(_mm256_castps256_ps128(lanes)); }

inline Doubles upper(Floats lanes) { return _mm256_cvtps_pd(_mm256_extractf128_ps(lanes, 1)); }

inline Doubles add_square(Doubles sum, Doubles value) { return _mm256_fmadd_pd(value, value, sum); }

inline Floats square_root(Floats value) { return _mm256_sqrt_ps(value); }

inline Words load_bytes(const std::uint8_t* x) {
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)x));
}

inline void store_bytes(std::uint8_t* out, Words words) {
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)words),
                                          _mm256_extracti128_si256((__m256i)words, 1));
  _mm_storel_epi64((__m128i*)out, _mm_packus_epi16(halves, halves));
}

#else

using Halves = std::uint16_t __attribute__((vector_size(2 * PYPRUNE_TARGET_WIDTH)));

inline Words load_halves(const void* x) {
  Halves halves;
  std::memcpy(&halves, x, sizeof halves);
  return __builtin_convertvector(halves, Words);
}

inline void store_halves(void* out, Words words) {
  const Halves halves = __builtin_convertvector(words, Halves);
  std::memcpy(out, &halves, sizeof halves);
}

inline Floats load_lanes(const BFloat16* x) { return (Floats)(load_halves(x) << 16); }

inline void store_upper_halves(void* out, Words words) { store_halves(out, words >> 16); }

// Takes the steps of the conversions of single values in storage-inl.h.
inline Floats load_lanes(const Float16* x) {
  const Words bits = load_halves(x);
  const Words shifted = (bits & 0x7fffu) << 13;
  const Words exponent = shifted & (0x7c00u << 13);
  const Words rebiased = shifted + ((127u - 15u) << 23);
  const Words special = rebiased + ((128u - 16u) << 23);
  const Words subnormal = (Words)((Floats)(rebiased + (1u << 23)) - float_of(113u << 23));
  const Words magnitude = exponent == (0x7c00u << 13) ? special : (exponent == 0u ? subnormal : rebiased);
  return (Floats)(magnitude | ((bits & 0x8000u) << 16));
}

inline void store_lanes(Float16* out, Floats lanes) {
  const Words sign = (Words)lanes & 0x80000000u;
  const Words magnitude = (Words)lanes ^ sign;
  const Words infinity = Words{} + 0x7c00u;
  const Words too_large = magnitude > 0x7f800000u ? Words{} + 0x7e00u : infinity;
  const std::uint32_t magic = ((127u - 15u) + (23u - 10u) + 1u) << 23;
  const Words subnormal = (Words)((Floats)magnitude + float_of(magic)) - magic;
  const Words normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const Words half =
      magnitude >= ((127u + 16u) << 23) ? too_large : (magnitude < (113u << 23) ? subnormal : normal);
  store_halves(out, half | (sign >> 16));
}

inline Doubles lower(Floats lanes) { return Doubles{lanes[0], lanes[1]}; }

inline Doubles upper(Floats lanes) { return Doubles{lanes[2], lanes[3]}; }

inline Doubles add_square(Doubles sum, Doubles value) { return sum + value * value; }

inline Words load_bytes(const std::uint8_t* x) {
  Words words;
  for (int i = 0; i < kWidth; ++i) words[i] = x[i];
  return words;
}

inline void store_bytes(std::uint8_t* out, Words words) {
  for (int i = 0; i < kWidth; ++i) out[i] = static_cast<std::uint8_t>(words[i]);
}

inline Floats square_root(Floats value) {
  for (int i = 0; i < kWidth; ++i) value[i] = __builtin_sqrtf(value[i]);
  return value;
}

#endif

inline void store_lanes(BFloat16* out, Floats lanes) { store_upper_halves(out, rounded_to_bfloat16(lanes)); }

// Two registers for 2 * kWidth neighbouring elements. bfloat16 gives its even elements first and then the odd ones,
// which takes a shift and a mask instead of shuffles; arithmetic lane by lane is the same, and store_pair() undoes it.
constexpr int kPair = 2 * kWidth;

struct Pair {
  Floats first;
  Floats second;
};

inline Pair operator*(Pair x, Pair y) { return {x.first * y.first, x.second * y.second}; }
inline Pair operator*(Pair x, Floats y) { return {x.first * y, x.second * y}; }
inline Pair operator+(Pair x, Pair y) { return {x.first + y.first, x.second + y.second}; }
inline Pair operator-(Pair x, Pair y) { return {x.first - y.first, x.second - y.second}; }

template <class T>
inline Pair load_pair(const T* x) {
  return {load_lanes(x), load_lanes(x + kWidth)};
}

inline Pair load_pair(const BFloat16* x) {
  Words words;
  std::memcpy(&words, x, sizeof words);
  return {(Floats)(words << 16), (Floats)(words & 0xffff0000u)};
}

template <class T>
inline void store_pair(T* out, Pair pair) {
  store_lanes(out, pair.first);
  store_lanes(out + kWidth, pair.second);
}

inline void store_pair_of_words(BFloat16* out, Words first, Words second) {
  const Words words = (first >> 16) | (second & 0xffff0000u);
  std::memcpy(out, &words, sizeof words);
}

inline void store_pair(BFloat16* out, Pair pair) {
  store_pair_of_words(out, rounded_to_bfloat16(pair.first), rounded_to_bfloat16(pair.second));
}

// For pairs without NaN, or only with NaN that comes from bfloat16 or from arithmetic on it: its lower half is 0, so
// that rounding cannot turn it into anything else. For bfloat16 that saves a third of the work, and keeps the bits of
// elements that were only loaded.
template <class T>
inline void store_numbers(T* out, Pair pair) {
  store_pair(out, pair);
}

inline void store_numbers(BFloat16* out, Pair pair) {
  store_pair_of_words(out, number_to_bfloat16(pair.first), number_to_bfloat16(pair.second));
}

// kPair elements, or the first `count` of them; the others are zero.
template <class T>
inline Pair load_pair_up_to(const T* x, std::int64_t count) {
  if (count >= kPair) return load_pair(x);
  T padded[kPair] = {};
  for (int i = 0; i < count; ++i) padded[i] = x[i];
  return load_pair(padded);
}

// The lane of a pair loaded from T that holds this element of memory.
template <class T>
constexpr int lane_of(int element) {
  return std::is_same<T, BFloat16>::value ? element / 2 + element % 2 * kWidth : element;
}

// From the lanes of pairs that were loaded from T to the order of memory; `count` is a multiple of kPair.
template <class T, class Value>
inline void in_order(const Value* lanes, Value* out, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = lanes[i / kPair * kPair + lane_of<T>(static_cast<int>(i % kPair))];
}

// The first `count` lanes, 0 < count < kWidth; the others are zero.
template <class T>
inline Floats load_some(const T* x, int count) {
  T padded[kWidth] = {};
  for (int i = 0; i < count; ++i) padded[i] = x[i];
  return load_lanes(padded);
}

template <class T>
inline void store_some(T* out, Floats lanes, int count) {
  T padded[kWidth];
  store_lanes(padded, lanes);
  for (int i = 0; i < count; ++i) out[i] = padded[i];
}

// A register's worth, or the first `count` lanes of one.
template <class T>
inline Floats load_up_to(const T* x, std::int64_t count) {
  return count >= kWidth ? load_lanes(x) : load_some(x, static_cast<int>(count));
}

template <class T>
inline void store_up_to(T* out, Floats lanes, std::int64_t count) {
  if (count >= kWidth) {
    store_lanes(out, lanes);
  } else {
    store_some(out, lanes, static_cast<int>(count));
  }
}

}  // namespace
}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
