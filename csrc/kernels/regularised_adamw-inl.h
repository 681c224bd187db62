// Bodies of AdamW, compiled once per instruction set. Elements go in blocks of 128, which share a scale of the 8-bit
// moments and a block of random bits: registers from memory to memory, 8-bit moments by way of buffers in the
// first-level cache. Nothing depends on how blocks are shared between threads.
#include "kernels/common/philox-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

constexpr int kAdamLanes = 16;

enum Purpose : std::uint32_t { kForWeight = 0, kForFirst = 1, kForSecond = 2 };

struct Counter {
  std::uint32_t purpose;
  std::uint32_t step;
  std::uint32_t stream;
  std::uint64_t seed;
};

// 16 random bits for each element of a block.
inline void random_block(std::int64_t block, const Counter& counter, std::uint32_t* bits) {
  const std::uint32_t upper_words[3] = {counter.purpose, counter.step, counter.stream};
  for (int lane = 0; lane < kAdamLanes; lane += kWidth) {
    Words words[4];
    philox(static_cast<std::uint32_t>(block * kAdamLanes + lane), upper_words, counter.seed, words);
    for (int word = 0; word < 4; ++word) {
      const Words low = words[word] & 0xffffu, high = words[word] >> 16;
      std::memcpy(bits + word * kAdamLanes + lane, &low, sizeof low);
      std::memcpy(bits + (word + 4) * kAdamLanes + lane, &high, sizeof high);
    }
  }
}

// 8-bit codes: 4 exponent bits and kMantissa mantissa bits relative to the block's largest value, which has the top
// code; code 0 is zero. With a sign (kMantissa = 3) the sign is the highest bit.
template <int kMantissa, bool kSigned>
struct Code {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr std::uint32_t kTop = kSigned ? 127 : 255;
  static constexpr std::uint32_t kBase = (127u << kMantissa) - kTop;

  // All are blocks of kAdamBlock.
  static void decode(const std::uint8_t* codes, float scale, float* out) {
    for (int i = 0; i < kAdamBlock; i += kWidth) {
      const Words code = load_bytes(codes + i), magnitude = kSigned ? code & 127u : code;
      const Words sign = kSigned ? (code >> 7) << 31 : Words{};
      const Words bits = magnitude == 0u ? Words{} : (magnitude + kBase) << kShift;
      store_lanes(out + i, (Floats)(bits | sign) * scale);
    }
  }

  // Returns the scale of the codes.
  static float encode(const float* values, const std::uint32_t* random, std::uint8_t* codes) {
    const std::uint32_t largest_bits = largest_magnitude(values);
    const float largest = float_of(largest_bits);
    if (largest_bits == 0 || largest_bits >= 0x7f800000u) {
      for (int i = 0; i < kAdamBlock; i += kWidth) {
        store_bytes(codes + i, sign_of(load_lanes(values + i)) | (largest_bits == 0 ? 0u : kTop));
      }
      return largest_bits == 0 ? 0.0f : float_of(0x7fc00000u);
    }
    for (int i = 0; i < kAdamBlock; i += kWidth) {
      Words bits;
      std::memcpy(&bits, random + i, sizeof bits);
      const Floats value = load_lanes(values + i);
      const Floats share = (Floats)((Words)value & 0x7fffffffu) / largest;
      store_bytes(codes + i, magnitude_of(share, bits) | sign_of(value));
    }
    return largest;
  }

  static Words magnitude_of(Floats share, Words random) {
    const Floats smallest = spread(float_of((kBase + 1) << kShift));
    const Words regular = (((Words)share + (random << (kShift - 16))) >> kShift) - kBase;
    const Floats chance = __builtin_convertvector((Integers)random, Floats) * smallest;
    const Words below = (Words)(kSigned ? share * 65536.0f > chance : share > 0.0f) & 1u;
    return share < smallest ? below : regular;
  }

  static Words sign_of(Floats value) { return kSigned ? (Words)(value < 0.0f) & 128u : Words{}; }

  // Compared as integers: NaN is then larger than infinity, and infinity larger than every number.
  static std::uint32_t largest_magnitude(const float* values) {
    Words largest{};
    for (int i = 0; i < kAdamBlock; i += kWidth) {
      const Words bits = (Words)load_lanes(values + i) & 0x7fffffffu;
      largest = bits > largest ? bits : largest;
    }
    std::uint32_t result = 0;
    for (int i = 0; i < kWidth; ++i) result = largest[i] > result ? largest[i] : result;
    return result;
  }
};
using FirstCode = Code<3, true>;
using SecondCode = Code<4, false>;

// The coefficients of a block's elements: their groups'. Points into the groups' own where it can, else to `buffer`.
inline const float* spread(const AdamTensor& t, const float* coefficients, std::int64_t start, int count,
                           float* buffer) {
  std::int64_t row = start / t.cols, col = start % t.cols;
  if (count == kAdamBlock && col + kAdamBlock <= t.cols) {
    if (!t.by_row) return coefficients + col;
    for (int i = 0; i < kAdamBlock; i += kWidth) store_lanes(buffer + i, spread(coefficients[row]));
    return buffer;
  }
  for (int i = 0; i < kAdamBlock; ++i) {
    buffer[i] = i < count ? coefficients[t.by_row ? row : col] : 0.0f;
    if (++col == t.cols) {
      col = 0;
      ++row;
    }
    if (i + 1 >= count) row = col = 0;
  }
  return buffer;
}

// The numbers of a step, one register each.
struct AdamNumbers {
  Floats offset, decay, rate1, beta2, rate2, step_size, root_correction, eps, gradient_scale;

  explicit AdamNumbers(const AdamTensor& t)
      : offset(spread(t.offset)),
        decay(spread(t.decay)),
        rate1(spread(t.rate1)),
        beta2(spread(t.beta2)),
        rate2(spread(t.rate2)),
        step_size(spread(t.step_size)),
        root_correction(spread(t.root_correction)),
        eps(spread(t.eps)),
        gradient_scale(spread(t.gradient_scale)) {}
};

struct AdamLanes {
  Floats w, m, v;
};

// The gradient with the penalty's.
template <AdamPenalty kPenalty>
inline Floats add_penalty(Floats g, Floats w, Floats coefficient, const AdamNumbers& n) {
  if constexpr (kPenalty == AdamPenalty::kL1) {
    const Floats value = w + n.offset;
    return g + (value > 0.0f ? coefficient : (value < 0.0f ? -coefficient : Floats{}));
  }
  if constexpr (kPenalty == AdamPenalty::kL2) {
    return g + (coefficient == 0.0f ? Floats{} : (w + n.offset) * coefficient);
  }
  return g;
}

template <AdamPenalty kPenalty>
inline AdamLanes stepped(AdamLanes x, Floats gradient, Floats coefficient, const AdamNumbers& n) {
  const Floats g = add_penalty<kPenalty>(gradient * n.gradient_scale, x.w, coefficient, n);
  const Floats m = x.m + (g - x.m) * n.rate1;
  const Floats v = x.v * n.beta2 + g * g * n.rate2;
  const Floats scale = square_root(v) * n.root_correction + n.eps;
  return {x.w * n.decay - n.step_size * (m / scale), m, v};
}

template <class T>
inline void store_weight(T* out, Floats w, const std::uint32_t*, std::int64_t count) {
  store_up_to(out, w, count);
}

// Rounds up with the probability that makes the mean right; null: to nearest.
inline void store_weight(BFloat16* out, Floats w, const std::uint32_t* random, std::int64_t count) {
  if (random == nullptr) return store_up_to(out, w, count);
  Words bits;
  std::memcpy(&bits, random, sizeof bits);
  const Words rounded = w == w ? (Words)w + bits : ((Words)w | 0x400000u);
  // The bits that rounding would look at again are cleared.
  store_up_to(out, (Floats)(rounded & 0xffff0000u), count);
}

// Shared by the blocks of a tensor.
template <class T>
struct AdamBlocks {
  const AdamTensor& t;
  const AdamOptions& options;
  const AdamNumbers numbers;
  const float* coefficients;

  void randomise(std::int64_t block, Purpose purpose, std::uint32_t* bits) const {
    random_block(block, {purpose, t.step, t.stream, options.seed}, bits);
  }

  template <AdamPenalty kPenalty>
  void step(std::int64_t start, int count, float* first, float* second) const {
    float buffer[kAdamBlock];
    std::uint32_t random[kAdamBlock];
    const float* coefficient = kPenalty == AdamPenalty::kNone ? nullptr : spread(t, coefficients, start, count, buffer);
    if (options.stochastic) randomise(start / kAdamBlock, kForWeight, random);
    T* weight = static_cast<T*>(t.weight) + start;
    const T* gradient = static_cast<const T*>(t.gradient) + start;
    for (int i = 0; i < count; i += kWidth) {
      const int left = count - i;
      const AdamLanes before{load_up_to(weight + i, left), load_up_to(first + i, left), load_up_to(second + i, left)};
      const Floats own = kPenalty == AdamPenalty::kNone ? Floats{} : load_lanes(coefficient + i);
      const AdamLanes after = stepped<kPenalty>(before, load_up_to(gradient + i, left), own, numbers);
      store_up_to(first + i, after.m, left);
      store_up_to(second + i, after.v, left);
      store_weight(weight + i, after.w, options.stochastic ? random + i : nullptr, left);
    }
  }

  template <AdamPenalty kPenalty>
  void step_coded(std::int64_t start, int count) const {
    // A last block that is not whole is coded by way of one that is.
    std::uint8_t first_codes[kAdamBlock] = {}, second_codes[kAdamBlock] = {};
    float first[kAdamBlock], second[kAdamBlock];
    std::uint32_t random[kAdamBlock];
    const std::int64_t block = start / kAdamBlock;
    const std::size_t size = static_cast<std::size_t>(count);
    std::memcpy(first_codes, static_cast<std::uint8_t*>(t.first) + start, size);
    std::memcpy(second_codes, static_cast<std::uint8_t*>(t.second) + start, size);
    FirstCode::decode(first_codes, t.first_scale[block], first);
    SecondCode::decode(second_codes, t.second_scale[block], second);
    for (int i = 0; i < kAdamBlock; ++i) second[i] *= second[i];
    step<kPenalty>(start, count, first, second);
    for (int i = 0; i < kAdamBlock; i += kWidth) store_lanes(second + i, square_root(load_lanes(second + i)));
    randomise(block, kForFirst, random);
    t.first_scale[block] = FirstCode::encode(first, random, first_codes);
    randomise(block, kForSecond, random);
    t.second_scale[block] = SecondCode::encode(second, random, second_codes);
    std::memcpy(static_cast<std::uint8_t*>(t.first) + start, first_codes, size);
    std::memcpy(static_cast<std::uint8_t*>(t.second) + start, second_codes, size);
  }

  template <AdamPenalty kPenalty>
  void update_block(std::int64_t start, int count) const {
    if (options.quantised) return step_coded<kPenalty>(start, count);
    step<kPenalty>(start, count, static_cast<float*>(t.first) + start, static_cast<float*>(t.second) + start);
  }

  template <AdamPenalty kPenalty>
  void update(std::int64_t begin, std::int64_t end) const {
    std::int64_t start = begin;
    // The constant lets the compiler unroll whole blocks.
    for (; start + kAdamBlock <= end; start += kAdamBlock) update_block<kPenalty>(start, kAdamBlock);
    if (start < end) update_block<kPenalty>(start, static_cast<int>(end - start));
  }
};

// Elements [begin, end) of a tensor; begin is a multiple of the block. coefficients: one a group; null: no penalty.
template <class T>
void adam_update(const AdamTensor& t, const float* coefficients, const AdamOptions& options, std::int64_t begin,
                 std::int64_t end) {
  const AdamBlocks<T> blocks{t, options, AdamNumbers(t), coefficients};
  switch (coefficients == nullptr ? AdamPenalty::kNone : t.penalty) {
    case AdamPenalty::kL1:
      return blocks.template update<AdamPenalty::kL1>(begin, end);
    case AdamPenalty::kL2:
      return blocks.template update<AdamPenalty::kL2>(begin, end);
    default:
      return blocks.template update<AdamPenalty::kNone>(begin, end);
  }
}

}  // namespace

template <class T>
AdamKernel adam_kernel() {
  return adam_update<T>;
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
