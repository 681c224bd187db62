#include "kernels/residual_diff_norm.h"

#include <cstdint>

#include "dispatch.h"
#include "kernels/common/parallel.h"
#include "kernels/common/with_storage.h"

namespace pyprune {
namespace {

template <class T>
struct DiffKernels {
  void (*forward)(const T* x_in, const T* x_out, float* norms, std::int64_t cols, bool l1, std::int64_t begin,
                  std::int64_t end);
  void (*backward)(const T* x_in, const T* x_out, const float* norms, double scale, T* grad_in, T* grad_out,
                   std::int64_t cols, bool l1, std::int64_t begin, std::int64_t end);
};

}  // namespace
}  // namespace pyprune

#define PYPRUNE_BODY "kernels/residual_diff_norm-inl.h"
#include "kernels/common/foreach_target.h"

namespace pyprune {
namespace {

template <class T>
DiffKernels<T> active_diff() {
  static const IsaTable<DiffKernels<T>> table = PYPRUNE_EACH_ISA(diff_kernels<T>());
  return table.active();
}

}  // namespace

double residual_diff_norm(const void* x_in, const void* x_out, float* norms, const DiffShape& shape) {
  with_storage(shape.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_diff<T>().forward;
    parallel_for(shape.rows, 1, shape.threads, [&](std::int64_t begin, std::int64_t end) {
      kernel(static_cast<const T*>(x_in), static_cast<const T*>(x_out), norms, shape.cols, shape.l1, begin, end);
    });
  });
  double sum = 0;
  for (std::int64_t row = 0; row < shape.rows; ++row) sum += norms[row];
  return sum / static_cast<double>(shape.rows);
}

void residual_diff_norm_gradient(const void* x_in, const void* x_out, const float* norms, double scale, void* grad_in,
                                 void* grad_out, const DiffShape& shape) {
  with_storage(shape.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_diff<T>().backward;
    parallel_for(shape.rows, 1, shape.threads, [&](std::int64_t begin, std::int64_t end) {
      kernel(static_cast<const T*>(x_in), static_cast<const T*>(x_out), norms, scale, static_cast<T*>(grad_in),
             static_cast<T*>(grad_out), shape.cols, shape.l1, begin, end);
    });
  });
}

}  // namespace pyprune
