#include "kernels/perturb.h"

#include <cstdint>

#include "dispatch.h"
#include "kernels/common/parallel.h"
#include "kernels/common/simd.h"
#include "kernels/common/with_storage.h"

namespace pyprune {
namespace {

// Normals come in chunks: 16 Philox counters give 4 words each. Word j of counter c is normal 16 j + c of the chunk, so
// that every instruction set stores whole registers.
constexpr int kChunkCounters = 16;
constexpr int kChunk = 4 * kChunkCounters;

template <class T>
struct PerturbArguments {
  const T* w0;
  const T* delta;
  T* out;
  std::int64_t count;
  Noise noise;
};

// Works on the chunks [begin, end).
template <class T>
using PerturbKernel = void (*)(const PerturbArguments<T>& arguments, std::uint64_t begin, std::uint64_t end);

}  // namespace
}  // namespace pyprune

#define PYPRUNE_BODY "kernels/perturb-inl.h"
#include "kernels/common/foreach_target.h"

namespace pyprune {
namespace {

template <class T>
PerturbKernel<T> active_kernel() {
  static const IsaTable<PerturbKernel<T>> table = PYPRUNE_EACH_ISA(perturb_kernel<T>());
  return table.active();
}

}  // namespace

void perturb(const void* w0, const void* delta, void* out, std::int64_t count, DType dtype, const Noise& noise,
             int threads) {
  with_storage(dtype, [&](auto tag) {
    using T = decltype(tag);
    const PerturbKernel<T> kernel = active_kernel<T>();
    const PerturbArguments<T> arguments{static_cast<const T*>(w0), static_cast<const T*>(delta), static_cast<T*>(out),
                                        count, noise};
    const std::uint64_t first = noise.offset / kChunk;
    const std::uint64_t last = (noise.offset + static_cast<std::uint64_t>(count) - 1) / kChunk;
    parallel_for(static_cast<std::int64_t>(last - first + 1), 1, threads, [&](std::int64_t begin, std::int64_t end) {
      kernel(arguments, first + static_cast<std::uint64_t>(begin), first + static_cast<std::uint64_t>(end));
    });
  });
}

}  // namespace pyprune
