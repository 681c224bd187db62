// The importance of rows or columns. The definition, NaN and infinity included, is
// pyprune/ops/group_importance/reference.py.
#pragma once

#include <vector>

#include "kernels/common/selection.h"

namespace pyprune {

// For each selected group the sum over its elements of |score * w|; signed: of score * w.
std::vector<double> group_importance(const void* score, const void* w, bool is_signed, const Selection& selection);

}  // namespace pyprune
