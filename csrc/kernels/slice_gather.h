// Rows and columns of a matrix gathered together, with a scale. The definition is
// pyprune/ops/slice_gather/reference.py.
#pragma once

#include <cstdint>

#include "kernels/common/storage.h"

namespace pyprune {

struct Gather {
  const std::int64_t* rows;  // null: all of them
  std::int64_t row_count;
  std::int64_t row_stride;  // of the source, in elements
  const std::int64_t* cols;
  std::int64_t col_count;
  int threads;
};

// out[i][j] = w[rows[i]][cols[j]], bit for bit; elements of 1, 2, 4 or 8 bytes.
void slice_gather(const void* w, void* out, int element_bytes, const Gather& gather);

// out[i][j] = (w[rows[i]][cols[j]] + offset) * scale - offset in float32, rounded once.
void slice_gather_scaled(const void* w, void* out, DType dtype, float scale, float offset, const Gather& gather);

}  // namespace pyprune
