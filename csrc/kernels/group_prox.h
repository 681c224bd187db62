// The proximal step of the group penalties. The definition, NaN and infinity included, is
// pyprune/ops/group_prox/reference.py.
#pragma once

#include "kernels/common/selection.h"

namespace pyprune {

// out = the proximal step of threshold times the sum that group_penalty() returns, from w. Of out only the selected
// groups are written. w and out: equal, or disjoint if every group is selected.
void group_prox(const void* w, void* out, double threshold, bool l1, const Selection& selection);

}  // namespace pyprune
