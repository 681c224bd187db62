// Group soft-threshold of selected rows or columns. The definition, NaN and infinity included, is
// pyprune/ops/group_soft_threshold/reference.py.
#pragma once

#include "kernels/common/selection.h"

namespace pyprune {

// Shrinks every selected group by threshold in l2 norm, in place; groups not longer than that become +0.
void group_soft_threshold(void* w, double threshold, const Selection& selection);

}  // namespace pyprune
