// Group soft-threshold and Moreau step on row-major matrices. The definitions, NaN and infinity included, are
// pyprune/ops/group_soft_threshold/reference.py and pyprune/ops/moreau_step/reference.py.
#pragma once

#include <cstdint>

#include "storage.h"

namespace pyprune {

// rows x cols elements, row-major; by_row: a group is a row, else a column.
struct GroupMatrix {
  std::int64_t rows;
  std::int64_t cols;
  bool by_row;
  DType dtype;
  int threads;
};

// out = x with every group g replaced by g * max(0, 1 - threshold / ||g||_2). x and out: equal or disjoint.
void group_soft_threshold(const void* x, void* out, double threshold, const GroupMatrix& matrix);

// delta = the group soft-threshold of decay * delta - gamma * grad. delta and grad: disjoint.
void moreau_step(void* delta, const void* grad, float decay, float gamma, double threshold,
                 const GroupMatrix& matrix);

}  // namespace pyprune
