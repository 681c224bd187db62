#include "kernels/group_soft_threshold.h"

#include <cstdint>

#include "dispatch.h"
#include "kernels/parallel.h"

namespace pyprune {
namespace {

// Handles the groups [begin, end): rows or columns.
template <class T>
using GroupKernel = void (*)(const T* x, T* out, std::int64_t rows, std::int64_t cols, double threshold,
                             std::int64_t begin, std::int64_t end);

template <class T>
struct GroupKernels {
  GroupKernel<T> by_row;
  GroupKernel<T> by_column;
};

}  // namespace
}  // namespace pyprune

#define PYPRUNE_BODY "kernels/group_soft_threshold-inl.h"
#include "kernels/foreach_target.h"

namespace pyprune {
namespace {

template <class T>
GroupKernels<T> active_kernels() {
#if PYPRUNE_X86
  static const IsaTable<GroupKernels<T>> table = {
      {scalar::group_kernels<T>(), avx2::group_kernels<T>(), avx512::group_kernels<T>()}};
#else
  static const IsaTable<GroupKernels<T>> table = {
      {scalar::group_kernels<T>(), scalar::group_kernels<T>(), scalar::group_kernels<T>()}};
#endif
  return table.active();
}

template <class T>
void run(const void* x, void* out, std::int64_t rows, std::int64_t cols, double threshold, bool by_row,
         int threads) {
  const GroupKernels<T> kernels = active_kernels<T>();
  const GroupKernel<T> kernel = by_row ? kernels.by_row : kernels.by_column;
  // Columns are handed out in whole blocks, so that threads do not share cache lines.
  const std::int64_t grain = by_row ? 1 : 64;
  parallel_for(by_row ? rows : cols, grain, threads, [&](std::int64_t begin, std::int64_t end) {
    kernel(static_cast<const T*>(x), static_cast<T*>(out), rows, cols, threshold, begin, end);
  });
}

}  // namespace

void group_soft_threshold(const void* x, void* out, std::int64_t rows, std::int64_t cols, double threshold,
                          bool by_row, DType dtype, int threads) {
  switch (dtype) {
    case DType::kFloat32:
      return run<float>(x, out, rows, cols, threshold, by_row, threads);
    case DType::kBFloat16:
      return run<BFloat16>(x, out, rows, cols, threshold, by_row, threads);
    case DType::kFloat16:
      return run<Float16>(x, out, rows, cols, threshold, by_row, threads);
  }
}

}  // namespace pyprune
