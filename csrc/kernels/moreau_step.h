// The Moreau step: a gradient step, then the group soft-threshold. The definition, NaN and infinity included, is
// pyprune/ops/moreau_step/reference.py.
#pragma once

#include "kernels/common/selection.h"

namespace pyprune {

// delta = the group soft-threshold of decay * delta - gamma * grad, in place. delta and grad: disjoint.
void moreau_step(void* delta, const void* grad, float decay, float gamma, double threshold, const Selection& groups);

}  // namespace pyprune
