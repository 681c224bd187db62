// The group soft-threshold of a matrix. The definition, NaN and infinity included, is
// pyprune/ops/group_soft_threshold/reference.py.
#pragma once

#include "kernels/common/selection.h"

namespace pyprune {

// out = x with every group g replaced by g * max(0, 1 - threshold / ||g||_2). x and out: equal or disjoint.
void group_soft_threshold(const void* x, void* out, double threshold, const Selection& groups);

}  // namespace pyprune
