// Group penalties of selected rows or columns, with their gradient. The definition, NaN and infinity included, is
// pyprune/ops/group_penalty/reference.py.
#pragma once

#include <vector>

#include "kernels/common/selection.h"

namespace pyprune {

// Returns the sum over the selected groups of their l2 norm, or with l1 of their absolute values. If grad is not null,
// adds penalty_weight times the gradient of that to it. w and grad: disjoint, of one shape and dtype.
double group_penalty(const void* w, void* grad, double penalty_weight, bool l1, const Selection& selection);

// The sum of squares of each selected group.
std::vector<double> group_squares(const void* w, const Selection& selection);

// The factor of a group in the gradient of penalty_weight times its l2 norm, given its sum of squares. A zero group has
// gradient zero; a NaN norm fails the comparisons and spreads over its group; a norm so small that the quotient has no
// float32 takes the largest one.
float slope_scale(double sum, double penalty_weight);

}  // namespace pyprune
