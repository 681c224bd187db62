// LayerNorm over n stored channels of d, the others being zero. The definition is
// pyprune/ops/layer_norm_virtual/reference.py.
#pragma once

#include <cstdint>

#include "kernels/common/storage.h"

namespace pyprune {

struct NormShape {
  std::int64_t rows;
  std::int64_t cols;       // stored channels
  std::int64_t norm_size;  // d, at least cols
  DType dtype;
  int threads;
};

// out, and the mean and the reciprocal deviation of each row. bias may be null.
void layer_norm_virtual(const void* x, const void* weight, const void* bias, float eps, void* out, float* mean,
                        float* rstd, const NormShape& shape);

// The gradients of x, weight and bias, each of which may be null.
void layer_norm_virtual_gradient(const void* grad, const void* x, const void* weight, const float* mean,
                                 const float* rstd, void* grad_x, void* grad_weight, void* grad_bias,
                                 const NormShape& shape);

}  // namespace pyprune
