// Philox (philox-inl.h) and the Box-Muller transform, compiled once per instruction set. Only operations that IEEE 754
// rounds exactly are used (no library functions, no fused multiply-add), so that the noise is equal bit for bit on
// every instruction set.
#include "kernels/common/philox-inl.h"

namespace pyprune {
namespace PYPRUNE_TARGET_NAMESPACE {
namespace {

inline Floats float_from(Integers value) { return __builtin_convertvector(value, Floats); }

// -ln((k + 1) / 2^24) for 24-bit k. Reduced to the mantissa in [sqrt(1/2), sqrt(2)); polynomial of Cephes' logf.
inline Floats minus_log(Words k) {
  const Words bits = (Words)float_from((Integers)(k + 1u));
  const Integers shift = (Integers)(bits - 0x3f3504f3u) >> 23;
  const Floats x = (Floats)(bits - ((Words)shift << 23)) - 1.0f;
  const Floats exponent = float_from(shift - 24);
  Floats y = x * 7.0376836292e-2f - 1.1514610310e-1f;
  y = y * x + 1.1676998740e-1f;
  y = y * x - 1.2420140846e-1f;
  y = y * x + 1.4249322787e-1f;
  y = y * x - 1.6668057665e-1f;
  y = y * x + 2.0000714765e-1f;
  y = y * x - 2.4999993993e-1f;
  y = y * x + 3.3333331174e-1f;
  const Floats square = x * x;
  y = y * x * square - exponent * 2.12194440e-4f - square * 0.5f;
  return -(exponent * 0.693359375f + (x + y));
}

// Cosine and sine of 2 pi word / 2^32. The nearest quarter turn is taken off in integers, without rounding.
inline void turn(Words word, Floats* cosine, Floats* sine) {
  const Words quarter = (word + (1u << 29)) >> 30;
  const Floats angle = float_from((Integers)(word - (quarter << 30))) * 1.4629180792671596e-9f;
  const Floats z = angle * angle;
  const Floats s = ((z * -1.9515295891e-4f + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * angle + angle;
  const Floats c =
      ((z * 2.443315711809948e-5f - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z - z * 0.5f + 1.0f;
  const Words swap = Words{} - (quarter & 1u);
  const Words differ = ((Words)s ^ (Words)c) & swap;
  *cosine = (Floats)((Words)c ^ differ ^ (((quarter + 1u) & 2u) << 30));
  *sine = (Floats)((Words)s ^ differ ^ ((quarter & 2u) << 30));
}

// The kChunk normals of a chunk.
inline void normals(std::uint64_t chunk, std::uint64_t seed, float* out) {
  for (int c = 0; c < kChunkCounters; c += kWidth) {
    Words x[4];
    const std::uint64_t counter = chunk * kChunkCounters + static_cast<std::uint64_t>(c);
    const std::uint32_t upper_words[3] = {static_cast<std::uint32_t>(counter >> 32), 0, 0};
    philox(static_cast<std::uint32_t>(counter), upper_words, seed, x);
    for (int pair = 0; pair < 4; pair += 2) {
      const Floats radius = square_root(minus_log(x[pair] >> 8) * 2.0f);
      Floats cosine, sine;
      turn(x[pair + 1], &cosine, &sine);
      store_lanes(out + kChunkCounters * pair + c, radius * cosine);
      store_lanes(out + kChunkCounters * (pair + 1) + c, radius * sine);
    }
  }
}

inline Floats absolute(Floats value) { return (Floats)((Words)value & 0x7fffffffu); }

template <class T>
inline void perturb_lanes(const PerturbArguments<T>& arguments, std::int64_t i, std::int64_t count, Floats normal,
                          Floats sigma) {
  const Floats w = load_up_to(arguments.w0 + i, count) + load_up_to(arguments.delta + i, count);
  store_up_to(arguments.out + i, w + absolute(w) * sigma * normal, count);
}

template <class T>
void perturb_chunks(const PerturbArguments<T>& given, std::uint64_t begin, std::uint64_t end) {
  const PerturbArguments<T> arguments = given;  // a copy, which no store can change
  const Noise& noise = arguments.noise;
  const Floats sigma = spread(noise.sigma);
  float z[kChunk];
  for (std::uint64_t chunk = begin; chunk < end; ++chunk) {
    normals(chunk, noise.seed, z);
    // The element that takes the chunk's first normal: before the first one, in the chunk where the tensor begins.
    const std::int64_t start = static_cast<std::int64_t>(chunk * kChunk - noise.offset);
    if (start >= 0 && start + kChunk <= arguments.count) {
      for (int lane = 0; lane < kChunk; lane += kWidth) {
        perturb_lanes(arguments, start + lane, kWidth, load_lanes(z + lane), sigma);
      }
      continue;
    }
    const int skip = start < 0 ? static_cast<int>(-start) : 0;
    const int stop = arguments.count - start < kChunk ? static_cast<int>(arguments.count - start) : kChunk;
    for (int lane = skip; lane < stop; lane += kWidth) {
      perturb_lanes(arguments, start + lane, stop - lane, load_up_to(z + lane, stop - lane), sigma);
    }
  }
}

}  // namespace

template <class T>
PerturbKernel<T> perturb_kernel() {
  return perturb_chunks<T>;
}

}  // namespace PYPRUNE_TARGET_NAMESPACE
}  // namespace pyprune
