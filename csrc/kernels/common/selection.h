// The rows or columns of a matrix that an operation works on.
#pragma once

#include <cstdint>

#include "kernels/common/storage.h"

namespace pyprune {

// Groups of a rows x cols row-major matrix: the rows or columns that `index` names, each at most once. `offset` is
// added to every weight first (1 for norms that multiply by 1 + w), and taken off again where weights are written.
struct Selection {
  std::int64_t rows;
  std::int64_t cols;
  bool by_row;                // a group is a row, else a column
  const std::int64_t* index;  // null: every group in order
  std::int64_t count;
  float offset;
  DType dtype;
  int threads;
};

}  // namespace pyprune
