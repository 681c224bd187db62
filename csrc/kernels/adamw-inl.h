// Bodies of AdamW, compiled once per instruction set. A block of 128 elements is read into float32 buffers (which stay
// in the first-level cache), stepped, and written. Nothing depends on how blocks are shared between threads.
#include "kernels/storage-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

constexpr int kAdamLanes = 16;
constexpr int kNormLanes = 32;

enum Purpose : std::uint32_t { kForWeight = 0, kForFirst = 1, kForSecond = 2, kForProx = 3 };

struct Counter {
  std::uint32_t purpose;
  std::uint32_t step;
  std::uint32_t stream;
  std::uint64_t seed;
};

// Philox4x32-10. words[w][lane] belongs to the counter (first + lane, purpose, step, stream).
template <int kCount>
inline void philox(std::uint32_t first, const Counter& counter, std::uint32_t words[4][kCount]) {
  for (int lane = 0; lane < kCount; ++lane) {
    std::uint32_t c0 = first + static_cast<std::uint32_t>(lane), c1 = counter.purpose, c2 = counter.step,
                  c3 = counter.stream;
    std::uint32_t k0 = static_cast<std::uint32_t>(counter.seed), k1 = static_cast<std::uint32_t>(counter.seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * c0, product1 = std::uint64_t{0xCD9E8D57u} * c2;
      c0 = static_cast<std::uint32_t>(product1 >> 32) ^ c1 ^ k0;
      c1 = static_cast<std::uint32_t>(product1);
      c2 = static_cast<std::uint32_t>(product0 >> 32) ^ c3 ^ k1;
      c3 = static_cast<std::uint32_t>(product0);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    words[0][lane] = c0;
    words[1][lane] = c1;
    words[2][lane] = c2;
    words[3][lane] = c3;
  }
}

// 16 random bits for each element of a block.
inline void random_block(std::int64_t block, const Counter& counter, std::uint32_t* bits) {
  std::uint32_t words[4][kAdamLanes];
  philox<kAdamLanes>(static_cast<std::uint32_t>(block * kAdamLanes), counter, words);
  for (int word = 0; word < 4; ++word) {
    for (int lane = 0; lane < kAdamLanes; ++lane) {
      bits[word * kAdamLanes + lane] = words[word][lane] & 0xffffu;
      bits[(word + 4) * kAdamLanes + lane] = words[word][lane] >> 16;
    }
  }
}

// The same bits for one element.
inline std::uint32_t random_element(std::int64_t i, const Counter& counter) {
  std::uint32_t words[4][1];
  const std::int64_t block = i / kAdamBlock, part = i % kAdamBlock / kAdamLanes, lane = i % kAdamLanes;
  philox<1>(static_cast<std::uint32_t>(block * kAdamLanes + lane), counter, words);
  return words[part % 4][0] >> (part / 4 * 16) & 0xffffu;
}

inline void store_stochastically(BFloat16* out, float value, std::uint32_t random) {
  const std::uint32_t bits = bits_of(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out->bits = static_cast<std::uint16_t>((is_nan ? bits | 0x400000u : bits + random) >> 16);
}
// Other storage types round to nearest; the call is never reached for them.
template <class T>
inline void store_stochastically(T* out, float value, std::uint32_t) {
  store(out, value);
}

// 8-bit codes: 4 exponent bits and kMantissa mantissa bits relative to the block's largest value, which has the top
// code; code 0 is zero. With a sign (kMantissa = 3) the sign is the highest bit.
template <int kMantissa, bool kSigned>
struct Code {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr std::uint32_t kTop = kSigned ? 127 : 255;
  static constexpr std::uint32_t kBase = (127u << kMantissa) - kTop;

  static void decode(const std::uint8_t* codes, float scale, float* out, int count) {
    for (int i = 0; i < count; ++i) {
      const std::uint32_t code = codes[i], magnitude = kSigned ? code & 127u : code;
      const std::uint32_t sign = kSigned ? (code >> 7) << 31 : 0u;
      const std::uint32_t bits = magnitude == 0 ? 0u : (magnitude + kBase) << kShift;
      out[i] = float_of(bits | sign) * scale;
    }
  }

  static float encode(const float* values, const std::uint32_t* random, std::uint8_t* codes, int count) {
    // Compared as integers: NaN is then larger than infinity, and infinity larger than every number.
    std::uint32_t largest_bits = 0;
    for (int i = 0; i < count; ++i) {
      const std::uint32_t bits = bits_of(values[i]) & 0x7fffffffu;
      largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    const float largest = float_of(largest_bits);
    if (largest_bits >= 0x7f800000u || largest_bits == 0) {
      for (int i = 0; i < count; ++i) {
        const std::uint32_t sign = kSigned && values[i] < 0 ? 128u : 0u;
        codes[i] = static_cast<std::uint8_t>((largest_bits == 0 ? 0u : kTop) | sign);
      }
      return largest_bits == 0 ? 0.0f : float_of(0x7fc00000u);
    }
    const float smallest = float_of((kBase + 1) << kShift);
    for (int i = 0; i < count; ++i) {
      const float share = float_of(bits_of(values[i]) & 0x7fffffffu) / largest;
      const std::uint32_t regular = ((bits_of(share) + (random[i] << (kShift - 16))) >> kShift) - kBase;
      const std::uint32_t below =
          kSigned ? (share * 65536.0f > static_cast<float>(static_cast<std::int32_t>(random[i])) * smallest ? 1u : 0u)
                  : (share > 0 ? 1u : 0u);
      const std::uint32_t magnitude = share < smallest ? below : regular;
      const std::uint32_t sign = kSigned && values[i] < 0 ? 128u : 0u;
      codes[i] = static_cast<std::uint8_t>(magnitude | sign);
    }
    return largest;
  }
};
using FirstCode = Code<3, true>;
using SecondCode = Code<4, false>;

inline float root(float value) { return __builtin_sqrtf(value); }

// What a block's elements have as coefficient: that of their group.
inline void spread(const AdamTensor& t, const float* coefficients, std::int64_t start, int count, float* out) {
  std::int64_t row = start / t.cols, col = start % t.cols;
  for (int done = 0; done < count; ++row, col = 0) {
    const std::int64_t left = count - done, here = t.cols - col;
    const int run = static_cast<int>(left < here ? left : here);
    if (t.by_row) {
      for (int i = 0; i < run; ++i) out[done + i] = coefficients[row];
    } else {
      for (int i = 0; i < run; ++i) out[done + i] = coefficients[col + i];
    }
    done += run;
  }
}

inline void add_penalty(const AdamTensor& t, const float* w, const float* coefficient, float* g, int count) {
  if (t.penalty == AdamPenalty::kL1Gradient) {
    for (int i = 0; i < count; ++i) {
      const float value = w[i] + t.offset;
      const float sign = value > 0 ? 1.0f : (value < 0 ? -1.0f : 0.0f);
      g[i] += sign * coefficient[i];
    }
  } else if (t.penalty == AdamPenalty::kL2Gradient) {
    for (int i = 0; i < count; ++i) {
      const float term = (w[i] + t.offset) * coefficient[i];
      g[i] += coefficient[i] == 0 ? 0.0f : term;
    }
  }
}

inline void soft_threshold(const AdamTensor& t, float* w, const float* scale, const float* coefficient, int count) {
  const bool adam = t.penalty == AdamPenalty::kL1AdamProx;
  if (!adam && t.penalty != AdamPenalty::kL1Prox) return;
  for (int i = 0; i < count; ++i) {
    const float limit = adam ? coefficient[i] / scale[i] : coefficient[i];
    const float value = w[i] + t.offset;
    const float above = value > limit ? limit : value;
    const float clamped = above < -limit ? -limit : above;
    w[i] = limit > 0 ? value - clamped - t.offset : w[i];
  }
}

// float32 moments, no penalty, rounding to nearest: one loop from memory to memory.
template <class T>
void plain(const AdamTensor& t, std::int64_t begin, std::int64_t end) {
  T* __restrict weight = static_cast<T*>(t.weight);
  const T* __restrict gradient = static_cast<const T*>(t.gradient);
  float* __restrict first = static_cast<float*>(t.first);
  float* __restrict second = static_cast<float*>(t.second);
  for (std::int64_t i = begin; i < end; ++i) {
    const float g = load(gradient[i]) * t.gradient_scale;
    const float m = first[i] + (g - first[i]) * t.rate1;
    const float v = second[i] * t.beta2 + g * g * t.rate2;
    const float scale = root(v) * t.root_correction + t.eps;
    first[i] = m;
    second[i] = v;
    store(weight + i, load(weight[i]) * t.decay - t.step_size * (m / scale));
  }
}

template <class T, bool kQuantised>
void update_block(const AdamTensor& t, const float* coefficients, const AdamOptions& options, std::int64_t start,
                  int count) {
  float w[kAdamBlock], g[kAdamBlock], m[kAdamBlock], v[kAdamBlock], scale[kAdamBlock], coefficient[kAdamBlock];
  std::uint32_t random[kAdamBlock];
  T* weight = static_cast<T*>(t.weight) + start;
  const T* gradient = static_cast<const T*>(t.gradient) + start;
  const std::int64_t block = start / kAdamBlock;
  for (int i = 0; i < count; ++i) w[i] = load(weight[i]);
  for (int i = 0; i < count; ++i) g[i] = load(gradient[i]) * t.gradient_scale;
  if (coefficients != nullptr) {
    spread(t, coefficients, start, count, coefficient);
    add_penalty(t, w, coefficient, g, count);
  }
  if (kQuantised) {
    FirstCode::decode(static_cast<std::uint8_t*>(t.first) + start, t.first_scale[block], m, count);
    SecondCode::decode(static_cast<std::uint8_t*>(t.second) + start, t.second_scale[block], v, count);
    for (int i = 0; i < count; ++i) v[i] *= v[i];
  } else {
    for (int i = 0; i < count; ++i) m[i] = static_cast<float*>(t.first)[start + i];
    for (int i = 0; i < count; ++i) v[i] = static_cast<float*>(t.second)[start + i];
  }
  for (int i = 0; i < count; ++i) {
    m[i] += (g[i] - m[i]) * t.rate1;
    v[i] = v[i] * t.beta2 + g[i] * g[i] * t.rate2;
    scale[i] = root(v[i]) * t.root_correction + t.eps;
    w[i] = w[i] * t.decay - t.step_size * (m[i] / scale[i]);
  }
  if (coefficients != nullptr) soft_threshold(t, w, scale, coefficient, count);
  if (kQuantised) {
    for (int i = 0; i < count; ++i) v[i] = root(v[i]);
    random_block(block, {kForFirst, t.step, t.stream, options.seed}, random);
    t.first_scale[block] = FirstCode::encode(m, random, static_cast<std::uint8_t*>(t.first) + start, count);
    random_block(block, {kForSecond, t.step, t.stream, options.seed}, random);
    t.second_scale[block] = SecondCode::encode(v, random, static_cast<std::uint8_t*>(t.second) + start, count);
  } else {
    for (int i = 0; i < count; ++i) static_cast<float*>(t.first)[start + i] = m[i];
    for (int i = 0; i < count; ++i) static_cast<float*>(t.second)[start + i] = v[i];
  }
  if (options.stochastic) {
    random_block(block, {kForWeight, t.step, t.stream, options.seed}, random);
    for (int i = 0; i < count; ++i) store_stochastically(weight + i, w[i], random[i]);
  } else {
    for (int i = 0; i < count; ++i) store(weight + i, w[i]);
  }
}

template <class T, bool kQuantised>
void update_blocks(const AdamTensor& t, const float* coefficients, const AdamOptions& options, std::int64_t begin,
                   std::int64_t end) {
  for (std::int64_t start = begin; start < end; start += kAdamBlock) {
    if (end - start >= kAdamBlock) {
      update_block<T, kQuantised>(t, coefficients, options, start, kAdamBlock);
    } else {
      update_block<T, kQuantised>(t, coefficients, options, start, static_cast<int>(end - start));
    }
  }
}

// Elements [begin, end) of a tensor; begin is a multiple of the block.
template <class T>
void adam_update(const AdamTensor& t, const float* coefficients, const AdamOptions& options, std::int64_t begin,
                 std::int64_t end) {
  if (options.quantised) return update_blocks<T, true>(t, coefficients, options, begin, end);
  if (coefficients == nullptr && !options.stochastic) return plain<T>(t, begin, end);
  update_blocks<T, false>(t, coefficients, options, begin, end);
}

// Squared norms of the selected groups of some pieces. The lanes are those of a fixed summation order.
template <class T>
void adam_squares(const AdamTensor& t, const GroupPiece* pieces, std::int64_t count, double* sums) {
  const T* weight = static_cast<const T*>(t.weight);
  if (t.by_row) {
    for (std::int64_t p = 0; p < count; ++p) {
      const T* row = weight + pieces[p].first * t.cols;
      double lanes[kNormLanes] = {};
      std::int64_t i = 0;
      for (; i + kNormLanes <= t.cols; i += kNormLanes) {
        for (int lane = 0; lane < kNormLanes; ++lane) {
          const double value = load(row[i + lane]) + t.offset;
          lanes[lane] += value * value;
        }
      }
      for (int lane = 0; i < t.cols; ++i, ++lane) {
        const double value = load(row[i]) + t.offset;
        lanes[lane] += value * value;
      }
      for (int width = kNormLanes / 2; width > 0; width /= 2) {
        for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
      }
      sums[pieces[p].position] = lanes[0];
    }
    return;
  }
  for (std::int64_t row = 0; row < t.rows; ++row) {
    for (std::int64_t p = 0; p < count; ++p) {
      const T* from = weight + row * t.cols + pieces[p].first;
      double* to = sums + pieces[p].position;
      for (std::int64_t i = 0; i < pieces[p].length; ++i) {
        const double value = load(from[i]) + t.offset;
        to[i] += value * value;
      }
    }
  }
}

template <class T>
inline void shrink(T* out, float scale, float offset, bool stochastic, std::int64_t i, const Counter& counter) {
  const float product = (load(*out) + offset) * scale;
  const float value = (scale == 0.0f ? 0.0f : product) - offset;
  if (stochastic) return store_stochastically(out, value, random_element(i, counter));
  store(out, value);
}

// The l2 proximal map: every selected group times its scale; scale 0 writes zeros.
template <class T>
void adam_scale(const AdamTensor& t, const AdamOptions& options, const GroupPiece* pieces, std::int64_t count,
                const float* scales) {
  T* weight = static_cast<T*>(t.weight);
  const Counter counter{kForProx, t.step, t.stream, options.seed};
  const std::int64_t rows = t.by_row ? 1 : t.rows;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t p = 0; p < count; ++p) {
      const std::int64_t start = t.by_row ? pieces[p].first * t.cols : row * t.cols + pieces[p].first;
      const std::int64_t length = t.by_row ? t.cols : pieces[p].length;
      const float* scale = scales + pieces[p].position;
      if (options.stochastic) {
        for (std::int64_t i = 0; i < length; ++i) {
          shrink(weight + start + i, scale[t.by_row ? 0 : i], t.offset, true, start + i, counter);
        }
      } else if (t.by_row) {
        for (std::int64_t i = 0; i < length; ++i) shrink(weight + start + i, scale[0], t.offset, false, 0, counter);
      } else {
        for (std::int64_t i = 0; i < length; ++i) shrink(weight + start + i, scale[i], t.offset, false, 0, counter);
      }
    }
  }
}

}  // namespace

template <class T>
AdamKernels adam_kernels() {
  return {adam_update<T>, adam_squares<T>, adam_scale<T>};
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
