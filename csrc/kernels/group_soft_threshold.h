// Group soft-threshold on a row-major matrix: every group g becomes g * max(0, 1 - threshold / ||g||_2).
// pyprune/ops/group_soft_threshold/reference.py defines it, NaN and infinity included.
#pragma once

#include <cstdint>

#include "storage.h"

namespace pyprune {

// x and out: rows x cols elements of `dtype`, row-major, equal or disjoint. by_row: a group is a row, else a column.
void group_soft_threshold(const void* x, void* out, std::int64_t rows, std::int64_t cols, double threshold,
                          bool by_row, DType dtype, int threads);

}  // namespace pyprune
