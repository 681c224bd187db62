// The proximal step of the group penalties, in place. The definition, NaN and infinity included, is
// pyprune/ops/group_prox/reference.py.
#pragma once

#include "kernels/common/selection.h"

namespace pyprune {

// The proximal step of threshold times the sum that group_penalty() returns, in place.
void group_prox(void* w, double threshold, bool l1, const Selection& selection);

}  // namespace pyprune
