// Norms of the differences of the rows of two matrices, and their gradient. The definition is
// pyprune/ops/residual_diff_norm/reference.py.
#pragma once

#include <cstdint>

#include "kernels/common/storage.h"

namespace pyprune {

struct DiffShape {
  std::int64_t rows;
  std::int64_t cols;
  bool l1;  // else l2
  DType dtype;
  int threads;
};

// norms[row] = ||x_out[row] - x_in[row]||; returns their mean.
double residual_diff_norm(const void* x_in, const void* x_out, float* norms, const DiffShape& shape);

// The gradient of scale times the sum of the norms. Either result may be null; they may not overlap the inputs.
void residual_diff_norm_gradient(const void* x_in, const void* x_out, const float* norms, double scale, void* grad_in,
                                 void* grad_out, const DiffShape& shape);

}  // namespace pyprune
