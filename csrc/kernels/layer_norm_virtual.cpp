#include "kernels/layer_norm_virtual.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "dispatch.h"
#include "kernels/common/parallel.h"
#include "kernels/common/with_storage.h"

namespace pyprune {
namespace {

template <class T>
struct NormKernels {
  void (*forward)(const T* x, const T* weight, const T* bias, float eps, T* out, float* means, float* rstds,
                  const NormShape& shape, std::int64_t begin, std::int64_t end);
  void (*backward)(const T* grad, const T* x, const T* weight, const float* means, const float* rstds, T* grad_x,
                   const NormShape& shape, std::int64_t begin, std::int64_t end);
  void (*parameter_sums)(const T* grad, const T* x, const float* means, const float* rstds, double* weight,
                         double* bias, const NormShape& shape, std::int64_t begin, std::int64_t end);
  void (*store)(const double* from, T* to, std::int64_t count);
};

}  // namespace
}  // namespace pyprune

#define PYPRUNE_BODY "kernels/layer_norm_virtual-inl.h"
#include "kernels/common/foreach_target.h"

namespace pyprune {
namespace {

template <class T>
NormKernels<T> active_norm() {
  static const IsaTable<NormKernels<T>> table = PYPRUNE_EACH_ISA(norm_kernels<T>());
  return table.active();
}

// Rows are summed in groups that do not depend on the number of threads, and the groups in order.
constexpr std::int64_t kMostGroups = 64;
constexpr std::int64_t kFewestRows = 32;

template <class T>
void parameter_gradients(const T* grad, const T* x, const float* mean, const float* rstd, T* grad_weight,
                         T* grad_bias, const NormShape& shape) {
  const std::int64_t rows = std::max(kFewestRows, (shape.rows + kMostGroups - 1) / kMostGroups);
  const std::int64_t groups = (shape.rows + rows - 1) / rows, n = shape.cols;
  std::vector<double> sums(static_cast<std::size_t>(std::max<std::int64_t>(1, groups) * 2 * n), 0.0);
  const NormKernels<T> kernels = active_norm<T>();
  parallel_for(groups, 1, shape.threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t group = begin; group < end; ++group) {
      double* own = sums.data() + group * 2 * n;
      kernels.parameter_sums(grad, x, mean, rstd, own, own + n, shape, group * rows,
                             std::min(shape.rows, (group + 1) * rows));
    }
  });
  for (std::int64_t group = 1; group < groups; ++group) {
    for (std::int64_t i = 0; i < 2 * n; ++i) sums[i] += sums[group * 2 * n + i];
  }
  if (grad_weight != nullptr) kernels.store(sums.data(), grad_weight, n);
  if (grad_bias != nullptr) kernels.store(sums.data() + n, grad_bias, n);
}

}  // namespace

void layer_norm_virtual(const void* x, const void* weight, const void* bias, float eps, void* out, float* mean,
                        float* rstd, const NormShape& shape) {
  with_storage(shape.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto kernel = active_norm<T>().forward;
    parallel_for(shape.rows, 1, shape.threads, [&](std::int64_t begin, std::int64_t end) {
      kernel(static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<const T*>(bias), eps,
             static_cast<T*>(out), mean, rstd, shape, begin, end);
    });
  });
}

void layer_norm_virtual_gradient(const void* grad, const void* x, const void* weight, const float* mean,
                                 const float* rstd, void* grad_x, void* grad_weight, void* grad_bias,
                                 const NormShape& shape) {
  with_storage(shape.dtype, [&](auto tag) {
    using T = decltype(tag);
    const T *slope = static_cast<const T*>(grad), *input = static_cast<const T*>(x);
    if (grad_x != nullptr) {
      const auto kernel = active_norm<T>().backward;
      parallel_for(shape.rows, 1, shape.threads, [&](std::int64_t begin, std::int64_t end) {
        kernel(slope, input, static_cast<const T*>(weight), mean, rstd, static_cast<T*>(grad_x), shape, begin, end);
      });
    }
    if (grad_weight != nullptr || grad_bias != nullptr) {
      parameter_gradients(slope, input, mean, rstd, static_cast<T*>(grad_weight), static_cast<T*>(grad_bias), shape);
    }
  });
}

}  // namespace pyprune
